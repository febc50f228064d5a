"""A server that somebody else owns: it is used, never started, never stopped, and nothing is downloaded for it."""

from __future__ import annotations

import functools
import importlib
import re
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from looprun_models.errors import BadSetting, NotOurServer, ServerUnavailable
from looprun_models.progress import OnProgress
from looprun_models.registry import LocalModelSpec
from looprun_models.runtime import RuntimeStatus, ServerStatus
from looprun_models.settings import load_settings
from looprun_models.wire import bracketed, dial_host

ANSWER_TIMEOUT = 10.0


class ExternalHandle:
    """Somebody else's server, in use; `stop()` does nothing, on purpose."""

    already_running = True

    def __init__(self, base_url: str, api_key: str | None, served_id: str) -> None:
        self.base_url, self.api_key, self.served_id = base_url, api_key, served_id

    def stop(self) -> None:
        """It is not ours to stop."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        """Nothing to give up."""


class ExternalRuntime:
    """base_url, api_key and model default to LOOPRUN_EXTERNAL_URL, _KEY and _MODEL; model, further, to the served id.

    Raises BadSetting when there is no usable address.
    """

    id = "external"

    def __init__(self, base_url: str | None = None, api_key: str | None = None, model: str | None = None) -> None:
        settings = load_settings()
        self.base_url = normalise_url(base_url or settings.external_url or "")
        self.api_key = api_key or settings.external_key
        self.model = model or settings.external_model

    def status(self, spec: LocalModelSpec) -> RuntimeStatus:
        try:
            served = self._served()
        except ServerUnavailable as error:
            return self._status(ServerStatus(False, self.base_url, note=error.message, fix=error.hint))
        lacks = self._lacks(spec, served)
        note, fix = (lacks.message, lacks.hint) if lacks else ("", "")
        return self._status(ServerStatus(True, self.base_url, ", ".join(served), note=note, fix=fix))

    def ensure_model(
        self, spec: LocalModelSpec, *, download: bool = False, on_progress: OnProgress | None = None
    ) -> Path | str:
        """The name of the model; its weights are its owner's business."""
        return self.model or spec.served_id

    def ensure_server(
        self,
        spec: LocalModelSpec,
        *,
        auto_start: bool = True,
        timeout: float | None = None,
        on_progress: OnProgress | None = None,
    ) -> ExternalHandle:
        """Raises ServerUnavailable when it does not answer, NotOurServer when it serves other models."""
        lacks = self._lacks(spec, self._served())
        if lacks:
            raise lacks
        return ExternalHandle(self.base_url, self.api_key, self._wanted(spec))

    def _wanted(self, spec: LocalModelSpec) -> str:
        return self.model or spec.served_id

    def _lacks(self, spec: LocalModelSpec, served: list[str]) -> NotOurServer | None:
        if self._wanted(spec) in served:
            return None
        return NotOurServer(
            f"{self.base_url} serves {', '.join(served) or 'no model'}, not {self._wanted(spec)}.",
            hint="set LOOPRUN_EXTERNAL_MODEL to one of them" if served else "load a model there",
        )

    def _status(self, server: ServerStatus) -> RuntimeStatus:
        return RuntimeStatus(self.id, binary=None, model_file=None, server=server)

    def _served(self) -> list[str]:
        """What it lists. Raises ServerUnavailable."""
        import openai

        library = http_library()
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        with openai.DefaultHttpxClient(**http_options(self.base_url), timeout=ANSWER_TIMEOUT) as http:
            try:
                answer = http.get(f"{self.base_url}/models", headers=headers)
                if answer.status_code == 200:
                    return _listed(answer)
            except (library.HTTPError, library.InvalidURL, OSError, ValueError) as error:
                why, hint = str(error) or type(error).__name__, "check LOOPRUN_EXTERNAL_URL, and that the server runs"
            else:
                why, hint = f"it answered {answer.status_code}", _HINTS.get(answer.status_code, _HINTS[404])
        raise ServerUnavailable(f"the external server at {self.base_url} cannot be used: {why}.", hint=hint)


_HINTS = {
    401: "check LOOPRUN_EXTERNAL_KEY",
    403: "check LOOPRUN_EXTERNAL_KEY",
    404: "check LOOPRUN_EXTERNAL_URL: it takes the address that ends before /models and /chat/completions",
    503: "wait until it has loaded its model",
}


def _listed(answer: Any) -> list[str]:
    """The names in an answer to /v1/models, with llama-server's second names. Raises ValueError for anything else."""
    try:
        models = answer.json()["data"] or []
        return [str(name) for model in models for name in (model["id"], *model.get("aliases", ()))]
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ValueError("it does not list models as an OpenAI-compatible server does") from None


def http_options(base_url: str) -> dict[str, Any]:
    """For OpenAI's HTTP client: no proxy on this machine, and certificates are only loaded where one may be needed."""
    address = urlsplit(base_url)
    here = address.hostname in ("127.0.0.1", "::1", "localhost")
    return {"trust_env": not here, "verify": not (here and address.scheme == "http")}


@functools.cache
def http_library() -> Any:
    """The module behind OpenAI's HTTP client: httpx for openai 2, httpx2 for openai 3."""
    import openai

    return importlib.import_module(openai.DefaultHttpxClient.__mro__[1].__module__.partition(".")[0])


def normalise_url(text: str) -> str:
    """An address as people write it, as one that can be dialled: scheme, host, port, and a path, /v1 by default.

    >>> [normalise_url(t) for t in ("0.0.0.0:8080", ":8080", "http://h:1/", "https://h/v1/")]
    ['http://127.0.0.1:8080/v1', 'http://127.0.0.1:8080/v1', 'http://h:1/v1', 'https://h/v1']
    """
    name = "LOOPRUN_EXTERNAL_URL"
    accepted = "the address of a server, such as http://127.0.0.1:8080/v1"
    text = text.strip()
    if not text:
        raise BadSetting(name, text, accepted, hint=f"set {name}, or pass base_url")
    try:
        parts = urlsplit(text if re.match(r"\w+://", text) else f"http://{text}")
        host, port = parts.hostname or "", parts.port
    except ValueError:
        raise BadSetting(name, text, accepted) from None
    if parts.scheme not in ("http", "https") or port == 0 or parts.username or parts.query or re.search(r"\s", text):
        raise BadSetting(name, text, accepted)
    host = bracketed(dial_host(host))
    path = parts.path.rstrip("/") or "/v1"
    return f"{parts.scheme}://{host}{f':{port}' if port else ''}{path}"
