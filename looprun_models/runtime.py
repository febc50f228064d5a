"""The seam: what a runtime does for an agent, and the llama.cpp runtime that this package ships.

Another runtime is a class with the three methods of `ModelRuntimePort`, registered under the entry-point group
`looprun_models.runtimes`; `local_model(runtime=...)` and `--runtime` use it unchanged. `looprun_models.testing` has the
tests that it should pass.
"""

from __future__ import annotations

import importlib.metadata
import os
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, Self, runtime_checkable

from looprun_models import weights as weights_module
from looprun_models.engine import Engine, devices, identity_of
from looprun_models.errors import EngineMissing, FolderUnwritable, PortInUse, RuntimeBroken, UnknownRuntime, UsageError
from looprun_models.launch import LaunchPlan, SlotFolder, check_memory, plan_launch
from looprun_models.lease import Lease
from looprun_models.machine import inspect_machine
from looprun_models.progress import OnProgress
from looprun_models.records import list_servers
from looprun_models.registry import LocalModelSpec, load_profiles
from looprun_models.request import Options, Request, read_request
from looprun_models.search import find_engine
from looprun_models.servers import Wanted, ensure_server
from looprun_models.settings import DEFAULT_KEEP_ALIVE, Settings, load_settings, private_dir
from looprun_models.smoke import prove
from looprun_models.verdicts import known_verdict
from looprun_models.weights import (
    MISSING,
    PARTIAL,
    Weights,
    check_pullable,
    inspect_weights,
    mending_error,
    weights_path,
)
from looprun_models.wire import Record, identify, proves

ENTRY_POINTS = "looprun_models.runtimes"
LLAMA_CPP = "llama-cpp"
PORT_RACES = 3
"""Starts before giving up when somebody else takes the port between our look at it and the engine's."""


@dataclass(frozen=True, slots=True)
class BinaryStatus:
    """The program behind a runtime. note: why it is not ok, or what to know about it. fix: the next command."""

    path: str | None
    ok: bool
    note: str = ""
    build: int | None = None
    fix: str = ""


@dataclass(frozen=True, slots=True)
class ModelFileStatus:
    """The weights. state: missing | partial | bad | ok. fix: the next command."""

    path: str
    state: str
    note: str = ""
    fix: str = ""


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """The server of this model. serves: what it says it serves. outdated: how its program differs from the disk's."""

    up: bool
    base_url: str | None = None
    serves: str | None = None
    note: str = ""
    fix: str = ""
    outdated: str = ""


@dataclass(frozen=True, slots=True)
class RuntimeStatus:
    """Which of the three things is wrong, if one is. None where a runtime has no such thing."""

    runtime: str
    binary: BinaryStatus | None
    model_file: ModelFileStatus | None
    server: ServerStatus

    @property
    def ready_to_start(self) -> bool:
        """Whether nothing is missing; where nothing can be started, whether the server is up."""
        if self.binary is None and self.model_file is None:
            return self.server.up
        return (self.binary is None or self.binary.ok) and (
            self.model_file is None or self.model_file.state == weights_module.OK
        )


@runtime_checkable
class ServerHandle(Protocol):
    """A server in use. Leaving the `with` block gives it up; `stop()` ends it, if it is ours to end.

    base_url ends in /v1. A handle may also have `served_id`, when its server knows the model under another name, and
    `why_gone(wait)`, which says within `wait` seconds why the server has ended, as a LooprunError, or None.
    """

    @property
    def base_url(self) -> str: ...
    @property
    def api_key(self) -> str | None: ...
    @property
    def already_running(self) -> bool: ...
    def stop(self) -> Any: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *exc: object) -> None: ...


@runtime_checkable
class ModelRuntimePort(Protocol):
    """What `local_model` and the commands call, in this order: status to report, ensure_model, ensure_server."""

    id: str

    def status(self, spec: LocalModelSpec) -> RuntimeStatus:
        """Look, change nothing, never use the network beyond the server's own address."""
        ...

    def ensure_model(
        self, spec: LocalModelSpec, *, download: bool = False, on_progress: OnProgress | None = None
    ) -> Path | str:
        """Where the model is. Fetches only when download is set; raises WeightsMissing or WeightsBad otherwise."""
        ...

    def ensure_server(
        self,
        spec: LocalModelSpec,
        *,
        auto_start: bool = True,
        timeout: float | None = None,
        on_progress: OnProgress | None = None,
    ) -> ServerHandle:
        """A server that is ready and proves that it serves this model. timeout in seconds."""
        ...


class LlamaCppRuntime:
    """llama-server, found on this machine and run with measured flags.

    strict_port: PortInUse when the port is taken, instead of the next free one. keep_alive: seconds that the server
    stays after this user, None for ever; by default LOOPRUN_KEEP_ALIVE, else 300.
    """

    id = LLAMA_CPP

    def __init__(
        self,
        settings: Settings | None = None,
        options: Options | None = None,
        *,
        strict_port: bool = False,
        keep_alive: float | None = -1.0,
    ) -> None:
        self.settings = settings or load_settings()
        self.options = options or Options()
        self.strict_port = strict_port
        default = self.settings.keep_alive if self.settings.keep_alive is not None else DEFAULT_KEEP_ALIVE
        self.keep_alive = default if keep_alive == -1.0 else keep_alive

    def status(self, spec: LocalModelSpec) -> RuntimeStatus:
        binary = binary_status(self.settings)
        return RuntimeStatus(
            runtime=self.id,
            binary=binary,
            model_file=model_file_status(spec, self.settings),
            server=server_status_of(spec, list_servers(self.settings), binary),
        )

    def ensure_model(
        self, spec: LocalModelSpec, *, download: bool = False, on_progress: OnProgress | None = None
    ) -> Path:
        found = inspect_weights(spec, self.settings)
        if found.state == weights_module.OK:
            return found.path
        if not download:
            raise mending_error(spec, found)
        check_pullable(spec, found)
        from looprun_models.download import pull

        return pull(spec, self.settings, found.path, on_progress=on_progress)

    def ensure_server(
        self,
        spec: LocalModelSpec,
        *,
        auto_start: bool = True,
        timeout: float | None = None,
        on_progress: OnProgress | None = None,
    ) -> Lease:
        settings, options = self.settings, self.options
        engine, request, slots = self._request(spec, to_start=True)

        def plan(port: int, others: list[Record]) -> LaunchPlan:
            made = self._plan(spec, engine, request, slots, port)
            if not options.force:
                running = [f"{r.alias} (pid {r.child_pid}) runs: looprun models stop {r.alias}" for r in others]
                check_memory(made, running, smaller=_smaller_tier(spec, settings))
            return made

        asked = options.port or settings.port
        wanted = Wanted(
            alias=spec.alias,
            fingerprint=request.fingerprint,
            port=asked or spec.port,
            strict=self.strict_port or asked is not None,
            host=options.host,
            api_key=options.api_key,
            plan=plan,
        )
        for others_were_faster in range(PORT_RACES):
            lease = ensure_server(settings, wanted, keep_alive=self.keep_alive, may_start=auto_start)
            try:
                lease.wait_ready(timeout, on_progress)
                return lease
            except PortInUse:
                lease.abandon()
                if wanted.strict or others_were_faster + 1 == PORT_RACES:
                    raise
            except BaseException:
                lease.abandon()
                raise
        raise AssertionError("the last round returns or raises")

    def plan(self, spec: LocalModelSpec) -> LaunchPlan:
        """The plan as it would be started now, to look at; without weights, as far as it goes."""
        engine, request, slots = self._request(spec, to_start=False)
        return self._plan(spec, engine, request, slots, self.options.port or self.settings.port or spec.port)

    def _request(self, spec: LocalModelSpec, *, to_start: bool) -> tuple[Engine, Request, SlotFolder]:
        """Cheap checks first: nothing here reads a GGUF or starts a program that was seen before. An engine that is to
        start must serve, and there must be weights."""
        settings = self.settings
        read_request(spec, settings, self.options, engine_identity="", weights_identity="", slot_dir=None)
        engine = find_engine(settings)
        path, origin = weights_path(spec, settings)
        if to_start:
            if not path.is_file():
                raise mending_error(spec, inspect_weights(spec, settings))
            engine = find_engine(settings, prove)
        slots = slot_folder(settings)
        request = read_request(
            spec,
            settings,
            self.options,
            engine_identity=engine.identity,
            weights_identity=Weights(path, origin, weights_module.OK).identity,
            slot_dir=slots.path,
        )
        return engine, request, slots

    def _plan(self, spec: LocalModelSpec, engine: Engine, request: Request, slots: SlotFolder, port: int) -> LaunchPlan:
        found = inspect_weights(spec, self.settings)
        if found.state == weights_module.BAD or (found.state == PARTIAL and found.path.is_file()):
            raise mending_error(spec, found)
        return plan_launch(
            spec,
            self.settings,
            replace(self.options, spare_key=secrets.token_urlsafe(24)),
            request,
            port=port,
            engine=engine,
            model=found.path,
            model_origin=found.origin,
            header=found.header,
            machine=inspect_machine(),
            devices=devices(engine, self.settings),
            slots=slots,
        )


def slot_folder(settings: Settings) -> SlotFolder:
    """Where trunk states go: LLAMA_SLOT_SAVE_PATH, or a private folder in the user cache."""
    named = settings.slot_save_path
    if named == "":
        return SlotFolder(None, "LLAMA_SLOT_SAVE_PATH is empty, which turns it off")
    if named is None:
        try:
            return SlotFolder(private_dir(settings.cache_dir / "slot-states", "LOOPRUN_CACHE_DIR"))
        except FolderUnwritable as error:
            return SlotFolder(None, f"{error.message} ({error.hint})")
    folder = settings.expand(named).absolute()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        return SlotFolder(None, f"LLAMA_SLOT_SAVE_PATH={folder}: {error.strerror}")
    if not os.access(folder, os.W_OK | os.X_OK):
        return SlotFolder(None, f"LLAMA_SLOT_SAVE_PATH={folder} cannot be written")
    return SlotFolder(folder)


def binary_status(settings: Settings) -> BinaryStatus:
    """The engine that would be used, or why there is none."""
    try:
        engine = find_engine(settings)
    except EngineMissing as error:
        return BinaryStatus(path=settings.llama_bin, ok=False, note=error.message, fix=error.hint)
    verdict = known_verdict(engine, settings)
    unchecked = "" if verdict else "not checked yet: looprun engine check"
    note = "; ".join(filter(None, (f"from {engine.source}", engine.note, unchecked)))
    return BinaryStatus(str(engine.path), True, note, engine.build)


def model_file_status(spec: LocalModelSpec, settings: Settings) -> ModelFileStatus:
    """The weights of a profile and the command that mends them."""
    found = inspect_weights(spec, settings)
    if found.state == weights_module.OK:
        return ModelFileStatus(str(found.path), found.state)
    error = mending_error(spec, found)
    note = found.why if found.state != MISSING else f"{spec.approx_size_gb:g} GB to download"
    return ModelFileStatus(str(found.path), found.state, note, fix=error.hint)


def server_status_of(spec: LocalModelSpec, running: Iterable[Record], used: BinaryStatus) -> ServerStatus:
    """The server of this very profile, if one runs and proves it. used: the engine that would be started now."""
    start = f"looprun models serve {spec.alias}"
    for record in running:
        if record.alias != spec.alias:
            continue
        outdated = _outdated(record, used)
        if proves(identify(record.host, record.port, record.api_key), record):
            fix = f"looprun models stop {spec.alias}, then {start}" if outdated else ""
            return ServerStatus(True, record.base_url, record.served_id, record.summary, fix, outdated)
        note = f"pid {record.child_pid} is loading or does not answer"
        return ServerStatus(False, record.base_url, None, note, f"looprun models logs {spec.alias}", outdated)
    return ServerStatus(False, fix=start)


def _outdated(record: Record, used: BinaryStatus) -> str:
    """A program that runs is not changed by what happens to its file, so nothing else would tell."""
    now = identity_of(Path(record.engine)) if record.engine else record.engine_identity
    build = "a build without number" if record.build is None else f"b{record.build}"
    if now == record.engine_identity:
        if not used.ok or used.path == record.engine:
            return ""
        other = "another build" if used.build is None else f"b{used.build}"
        return f"runs on {build}, while {other} would be started now: {record.engine}"
    ran = f"{build}, as it was started; {record.engine}"
    if now:
        return f"runs an older program than the one on disk: {ran}, or a library beside it, has changed"
    return f"runs a program that is no longer on the disk: {ran} is gone"


def load_runtime(name: str) -> ModelRuntimePort:
    """A registered runtime by name. Raises UnknownRuntime, or RuntimeBroken with what its package raised."""
    found = {entry.name: entry for entry in importlib.metadata.entry_points(group=ENTRY_POINTS)}
    if name not in found:
        raise UnknownRuntime(name, sorted(found))
    entry = found[name]
    package = entry.dist.name if entry.dist else entry.value
    try:
        loaded = entry.load()
        runtime = loaded() if isinstance(loaded, type) else loaded
    except UsageError:
        raise
    except Exception as error:
        raise RuntimeBroken(
            f"the runtime {name!r} of {package} could not be loaded: {type(error).__name__}: {error}",
            hint=f"update or remove {package}, or leave --runtime out",
        ) from error
    if not isinstance(runtime, ModelRuntimePort):
        raise RuntimeBroken(
            f"the runtime {name!r} of {package} ({entry.value}) is no runtime: it lacks a part of ModelRuntimePort.",
            hint=f"update or remove {package}, or leave --runtime out",
        )
    return runtime


def _smaller_tier(spec: LocalModelSpec, settings: Settings) -> str:
    tiers = [other for other in load_profiles(settings).values() if other.tier and other.min_ram_gb < spec.min_ram_gb]
    return max(tiers, key=lambda tier: tier.min_ram_gb).alias if tiers and spec.tier else ""
