"""A server that somebody else owns: it is used, never started, never stopped, and nothing is downloaded for it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from looprun_models.errors import BadSetting, NotOurServer, ServerUnavailable
from looprun_models.progress import OnProgress
from looprun_models.registry import LocalModelSpec
from looprun_models.runtime import RuntimeStatus, ServerStatus
from looprun_models.settings import load_settings

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
            return RuntimeStatus(
                self.id, None, None, ServerStatus(False, self.base_url, note=error.message, fix=error.hint)
            )
        return RuntimeStatus(self.id, None, None, ServerStatus(True, self.base_url, ", ".join(served)))

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
        wanted = self.model or spec.served_id
        served = self._served()
        if wanted not in served:
            raise NotOurServer(
                f"{self.base_url} serves {', '.join(served) or 'no model'}, not {wanted}.",
                hint="set LOOPRUN_EXTERNAL_MODEL to one of them",
            )
        return ExternalHandle(self.base_url, self.api_key, wanted)

    def _served(self) -> list[str]:
        import openai

        from looprun_models.client import http_client

        local = urlsplit(self.base_url).hostname in ("127.0.0.1", "::1")
        with (
            http_client(trust_env=not local) as http,
            openai.OpenAI(
                base_url=self.base_url,
                api_key=self.api_key or "none",
                max_retries=0,
                timeout=ANSWER_TIMEOUT,
                http_client=http,
            ) as client,
        ):
            try:
                return [model.id for model in client.models.list().data]
            except openai.APIStatusError as error:
                why, hint = f"it answered {error.status_code}: {error.message}", "check LOOPRUN_EXTERNAL_KEY"
            except (openai.APIError, ValueError) as error:
                why, hint = str(error), "check LOOPRUN_EXTERNAL_URL, and that the server runs"
        raise ServerUnavailable(f"the external server at {self.base_url} cannot be used: {why}", hint=hint)


def normalise_url(text: str) -> str:
    """An address as people write it, as one that can be dialled: scheme, host, port, and /v1 at the end.

    >>> [normalise_url(t) for t in ("0.0.0.0:8080", ":8080", "http://h:1/", "https://h/v1/")]
    ['http://127.0.0.1:8080/v1', 'http://127.0.0.1:8080/v1', 'http://h:1/v1', 'https://h/v1']
    """
    name = "LOOPRUN_EXTERNAL_URL"
    accepted = "the address of a server, such as http://127.0.0.1:8080/v1"
    if not text:
        raise BadSetting(name, text, accepted, hint=f"set {name}, or pass base_url")
    try:
        parts = urlsplit(text if re.match(r"https?://", text) else f"http://{text}")
        host, port = parts.hostname or "127.0.0.1", parts.port
    except ValueError:
        raise BadSetting(name, text, accepted) from None
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "localhost": "127.0.0.1"}.get(host, host)  # noqa: S104
    host = f"[{host}]" if ":" in host else host
    path = parts.path.rstrip("/") or "/v1"
    return f"{parts.scheme}://{host}{f':{port}' if port else ''}{path}"
