"""Local models for agents: measured llama-server profiles, one OpenAI client, no cloud key.

    from looprun_models import local_model

    with local_model("ram16") as model:
        reply = model.chat.completions.create(model=model.model, messages=[...])

Nothing is imported until a name is used: `import looprun_models` costs next to nothing.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from looprun_models._version import __version__
    from looprun_models.client import (
        AsyncLocalModel,
        LocalModel,
        async_local_model,
        local_model,
        local_model_status,
        localModel,
    )
    from looprun_models.errors import ContextOverflow, LooprunError, ServerUnavailable, TrunkRefused
    from looprun_models.progress import Progress
    from looprun_models.registry import LocalModelSpec, resolve_alias
    from looprun_models.reply import Warmth, warmth
    from looprun_models.resident import AsyncTrunk, Trunk
    from looprun_models.runtime import LlamaCppRuntime, ModelRuntimePort, RuntimeStatus, ServerHandle

_HOMES = {
    "__version__": "_version",
    "AsyncLocalModel": "client",
    "LocalModel": "client",
    "async_local_model": "client",
    "localModel": "client",
    "local_model": "client",
    "local_model_status": "client",
    "ContextOverflow": "errors",
    "LooprunError": "errors",
    "ServerUnavailable": "errors",
    "TrunkRefused": "errors",
    "Progress": "progress",
    "LocalModelSpec": "registry",
    "resolve_alias": "registry",
    "AsyncTrunk": "resident",
    "Trunk": "resident",
    "LlamaCppRuntime": "runtime",
    "ModelRuntimePort": "runtime",
    "RuntimeStatus": "runtime",
    "ServerHandle": "runtime",
    "Warmth": "reply",
    "warmth": "reply",
}

__all__ = [
    "AsyncLocalModel",
    "AsyncTrunk",
    "ContextOverflow",
    "LlamaCppRuntime",
    "LocalModel",
    "LocalModelSpec",
    "LooprunError",
    "ModelRuntimePort",
    "Progress",
    "RuntimeStatus",
    "ServerHandle",
    "ServerUnavailable",
    "Trunk",
    "TrunkRefused",
    "Warmth",
    "__version__",
    "async_local_model",
    "localModel",
    "local_model",
    "local_model_status",
    "resolve_alias",
    "warmth",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
