"""From a profile, the settings, an engine and the weights to a complete `LaunchPlan`. Pure: nothing is read or started.

Every flag of the plan says where its value comes from and why it stands. To add one to the recipe, add it to `_recipe`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from looprun_models.engine import Device, Engine, system_config
from looprun_models.errors import BadSetting, EngineTooLittle, NotEnoughMemory, UsageError, WeightsBad
from looprun_models.fit import Fit, Sizing, fit_plan, gib
from looprun_models.gguf import GgufHeader
from looprun_models.machine import Machine
from looprun_models.probe import child_environ
from looprun_models.registry import LocalModelSpec
from looprun_models.request import Options, Request
from looprun_models.search import INSTALL_HINT
from looprun_models.settings import Settings
from looprun_models.system import LOOPBACK

STATELESS = {
    *("-m", "--host", "--port", "--alias", "--cors-origins", "--metrics", "--slots", "--slot-save-path"),
    *("-t", "-tb", "-ngl", "-ncmoe", "--load-mode", "--mlock", "--no-mmap", "-ctxcp", "--cache-ram"),
}
"""Flags that change neither what a saved slot state holds nor whether it can be read; others are part of its key."""
ROUND = 1024
"""Tokens over which bytes for each are worked out."""
ENGINE_TOKEN = 24
"""Bytes of its own that the engine keeps with each token of a state."""


@dataclass(frozen=True, slots=True)
class SlotFolder:
    """Where the engine may save trunk states; path None means nowhere, and why."""

    path: Path | None
    why: str = ""


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag of the command line: its words, what decided its value, and why it stands."""

    words: tuple[str, ...]
    origin: str
    reason: str


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """All that is needed to start a server, and to explain it. env is the child's whole environment."""

    spec: LocalModelSpec
    engine: Engine
    model: Path
    model_size: int
    host: str
    port: int
    api_key: str | None
    ctx: int
    parallel: int
    fingerprint: str
    flags: tuple[Flag, ...]
    env: Mapping[str, str] = field(repr=False)
    fit: Fit | None
    notes: tuple[str, ...]
    slots: SlotFolder
    architecture: str
    weights: str
    state_sizes: Mapping[str, int]

    @property
    def argv(self) -> tuple[str, ...]:
        return (*self.engine.command, *(word for flag in self.flags for word in flag.words))

    @property
    def command_line(self) -> str:
        """Ready to paste; the key, if there is one, travels in LLAMA_API_KEY and is not shown."""
        loader = [name for name in ("LD_LIBRARY_PATH", "DYLD_FALLBACK_LIBRARY_PATH") if name in self.env]
        paths = [f"{name}={shlex.quote(self.env[name])} " for name in loader if self.engine.library_path]
        return "".join(paths) + shlex.join(self.argv)

    def _number(self, name: str) -> int:
        return next(int(flag.words[1]) for flag in self.flags if flag.words[0] == name)

    def _state_words(self) -> Iterator[str]:
        for flag in self.flags:
            matters = True
            for word in flag.words:  # what is passed through is many flags in one
                matters = word not in STATELESS if re.match(r"--?[A-Za-z]", word) else matters
                if matters:
                    yield word

    def record_fields(self) -> dict[str, Any]:
        """What the record of a server of this plan says before it is started."""
        return {
            "alias": self.spec.alias,
            "names": [self.spec.alias, *self.spec.short],
            "served_id": self.spec.served_id,
            "fingerprint": self.fingerprint,
            "host": self.host,
            "port": self.port,
            "api_key": self.api_key,
            "model_path": str(self.model),
            "model_size": self.model_size,
            "ctx": self.ctx,
            "parallel": self.parallel,
            "engine": str(self.engine.path),
            "engine_identity": self.engine.identity,
            "build": self.engine.build,
            "summary": summarise(self),
            "notes": list(self.notes),
            "architecture": self.architecture,
            "weights": self.weights,
            "slot_dir": str(self.slots.path) if self.slots.path else None,
            "slot_note": self.slots.why,
            "state_flags": shlex.join(self._state_words()),
            "cache_bytes": self._number("--cache-ram") << 20,
            **self.state_sizes,
        }


def summarise(plan: LaunchPlan) -> str:
    """The plan in a few words: "ctx 24576, KV q8_0, cache 512 MiB, draft-mtp"."""
    words = {word: flag.words[-1] for flag in plan.flags for word in flag.words[:1]}
    drafts = f", {words['--spec-type']}" if "--spec-type" in words else ""
    kv = words["-ctk"] if words["-ctk"] == words["-ctv"] else f"{words['-ctk']}/{words['-ctv']}"
    return f"ctx {plan.ctx}, KV {kv}, RAM cache {words['--cache-ram']} MiB{drafts}"


def plan_launch(
    spec: LocalModelSpec,
    settings: Settings,
    options: Options,
    request: Request,
    *,
    port: int,
    engine: Engine,
    model: Path,
    model_origin: str = "profile",
    header: GgufHeader | None,
    machine: Machine,
    devices: tuple[Device, ...] = (),
    slots: SlotFolder,
    check_flags: bool = True,
) -> LaunchPlan:
    """The complete plan. Raises EngineTooLittle, WeightsBad or BadSetting for what could not work.

    header None (no weights yet) gives a plan to look at: nothing is fitted, and `fit` is None. check_flags off leaves
    flags in it that the engine lacks (`missing_flags` names them).
    """
    if header is not None:
        _check_model(spec, request, header)
    origins = {name: value.origin for name, value in request.values.items()}
    sizing = Sizing(
        ctx=request["ctx"],
        kv=max(request["kv_k"], request["kv_v"], key=["q8_0", "f16"].index),
        drafting=bool(request["spec_type"]),
        ctx_checkpoints=request["ctx_checkpoints"],
        cache_ram_mib=request["cache_ram"],
        checkpoints_fixed=origins["ctx_checkpoints"] != "profile",
        cache_fixed=origins["cache_ram"] != "profile",
    )
    fit = fit_plan(header, sizing, machine, devices, as_quoted=options.as_quoted) if header else None
    api_key = options.api_key or (None if engine.has("--cors-origins") else options.spare_key) or None
    weights = Flag(("-m", str(model)), model_origin, "the weights")
    flags = _recipe(spec, settings, request, options, port, engine, weights, machine, fit, slots.path)
    if check_flags:
        _check_flags(flags, engine)
    needs_path = not engine.embedded and (engine.library_path or machine.system == "Darwin")
    env, dropped = child_environ(settings, library_path=engine.path.parent if needs_path else None)
    if api_key:
        env["LLAMA_API_KEY"] = api_key
    return LaunchPlan(
        spec=spec,
        engine=engine,
        model=model,
        model_size=header.file_size if header else 0,
        host=options.host,
        port=port,
        api_key=api_key,
        ctx=request["ctx"],
        parallel=request["parallel"],
        fingerprint=request.fingerprint,
        flags=flags,
        env=env,
        fit=fit,
        notes=tuple(_notes(spec, settings, engine, machine, devices, fit, dropped, slots)),
        slots=slots,
        architecture=header.architecture if header else "",
        weights=request.weights,
        state_sizes=_state_sizes(header, sizing, fit),
    )


def _state_sizes(header: GgufHeader | None, sizing: Sizing, fit: Fit | None) -> dict[str, int]:
    """What an agent's state takes in the RAM cache, wherever the layers themselves are: bytes for each token, for each
    checkpoint and for each token in each of those, and how many checkpoints there are at most."""
    if header is None or fit is None:
        return {"token_bytes": 0, "checkpoint_bytes": 0, "checkpoint_token_bytes": 0, "checkpoints": 0}
    draft = header.draft_kv_bytes(ROUND) // ROUND + ENGINE_TOKEN if sizing.drafting else 0
    return {
        "token_bytes": header.kv_bytes(ROUND, sizing.kv) // ROUND + ENGINE_TOKEN + draft,
        "checkpoint_bytes": header.recurrent_bytes,
        "checkpoint_token_bytes": draft if header.is_hybrid else 0,
        "checkpoints": fit.ctx_checkpoints if header.is_hybrid else 0,
    }


def missing_flags(plan: LaunchPlan) -> tuple[str, ...]:
    """The flags of the plan that its engine does not list."""
    return tuple(word for _, word in _unlisted(plan.flags, plan.engine))


def check_memory(plan: LaunchPlan, running: Iterable[str] = (), *, smaller: str = "") -> None:
    """Raises NotEnoughMemory when the plan does not fit, with what would mend it.

    running: servers of ours that hold memory, one line each. smaller: the alias of the next smaller tier.
    """
    fit = plan.fit
    if fit is None or fit.verdict != "does not fit":
        return
    steps = [f"a smaller tier: looprun models serve {smaller}"] if smaller else []
    if plan.ctx > 8192:
        steps.append("a shorter context: LLAMA_CTX=8192")
    if fit.total - fit.cache < fit.available:
        steps.append(f"a smaller RAM prompt cache: LLAMA_CACHE_RAM={(fit.available - fit.total + fit.cache) >> 20}")
    steps.append("start it all the same: --force")
    raise NotEnoughMemory(
        f"{plan.spec.alias} does not fit: it takes {gib(fit.total)} and {gib(fit.available)} are available.\n"
        f"  {fit.arithmetic()}" + "".join(f"\n  {line}" for line in running),
        hint="; or ".join(steps),
    )


def _check_model(spec: LocalModelSpec, request: Request, header: GgufHeader) -> None:
    if "draft-mtp" in request["spec_type"] and not header.has_draft_head:
        raise WeightsBad(
            f"{header.path} has no MTP head, and {spec.alias} asks for draft-mtp "
            f"({request.values['spec_type'].origin}).",
            hint=f"serve it without drafts: LLAMA_SPEC_TYPE='' looprun models serve {spec.alias}",
        )
    if header.is_hybrid and request["cache_ram"] == 0:
        origin = request.values["cache_ram"].origin
        names = {"option": "--cache-ram", "profile": f"cache_ram_mib of {spec.alias}"}
        raise BadSetting(
            names.get(origin, origin.removeprefix("variable ")),
            "0",
            "1 MiB or more for a hybrid model: without the RAM prompt cache every agent switch reads the whole prompt",
        )
    if request["flash_attn"] in ("off", "0", "false", "disabled") and request["kv_v"] != "f16":
        raise BadSetting("-fa", str(request["flash_attn"]), "on, while the KV cache is q8_0 (or set LLAMA_KV=f16)")


def _check_flags(flags: Sequence[Flag], engine: Engine) -> None:
    """Each flag is one the engine lists: a refusal here costs nothing, at the engine it costs a start."""
    for flag, word in _unlisted(flags, engine):
        if flag.origin == "option":
            raise UsageError(
                f"the engine {engine.label} does not know the flag {word}.",
                hint=f"{' '.join(engine.command)} --help lists what it takes",
            )
        raise EngineTooLittle(
            f"the engine {engine.label} lacks {word}, which the recipe needs ({flag.reason}).",
            hint=INSTALL_HINT,
        )
    drafts = next((flag for flag in flags if flag.words[0] == "--spec-type"), None)
    for kind in drafts.words[1].split(",") if drafts else ():
        if not re.search(rf"(?<![\w-]){re.escape(kind)}(?![\w-])", engine.help_text):
            raise EngineTooLittle(
                f"the engine {engine.label} does not know --spec-type {kind} ({drafts.origin if drafts else ''}).",
                hint="serve without drafts: LLAMA_SPEC_TYPE='', or use a newer engine (LLAMA_BIN)",
            )


def _unlisted(flags: Iterable[Flag], engine: Engine) -> Iterator[tuple[Flag, str]]:
    for flag in flags:
        yield from ((flag, w) for w in flag.words if re.match(r"--?[A-Za-z]", w) and w not in engine.flags)


def _recipe(
    spec: LocalModelSpec,
    settings: Settings,
    request: Request,
    options: Options,
    port: int,
    engine: Engine,
    weights: Flag,
    machine: Machine,
    fit: Fit | None,
    slot_dir: Path | None,
) -> tuple[Flag, ...]:
    values = request.values

    def fitted(name: str, now: int) -> str:
        return values[name].origin if values[name].value == now else f"fitted (quoted {values[name].value})"

    checkpoints = fit.ctx_checkpoints if fit else request["ctx_checkpoints"]
    cache_ram = fit.cache_ram_mib if fit else request["cache_ram"]
    ports = {spec.port: "profile", settings.port: "variable LLAMA_PORT", options.port: "option"}
    port_origin = ports.get(port, "looprun")
    flags = [
        weights,
        Flag(("--host", options.host), "looprun" if options.host == LOOPBACK else "option", "who can reach it"),
        Flag(("--port", str(port)), port_origin, "where clients find it"),
        Flag(
            ("--alias", f"{spec.served_id},{spec.served_id}@{request.fingerprint}"),
            "profile",
            "the served id, and a second name that proves which plan is serving",
        ),
        Flag(("--jinja",), "looprun", "tool calls and template arguments need the model's own template"),
        Flag(
            ("-fa", str(request["flash_attn"])),
            values["flash_attn"].origin,
            "a quantized V cache needs flash attention",
        ),
        Flag(
            ("-ngl", str(request["gpu_layers"])), values["gpu_layers"].origin, "every layer on the GPU, if there is one"
        ),
        _locked_in_ram(engine),
        Flag(("-np", str(request["parallel"])), values["parallel"].origin, "one slot keeps the shared prefix resident"),
        Flag(("-c", str(request["ctx"])), values["ctx"].origin, "context, in tokens"),
        Flag(("-ctk", request["kv_k"]), values["kv_k"].origin, "type of the K cache"),
        Flag(("-ctv", request["kv_v"]), values["kv_v"].origin, "type of the V cache"),
        Flag(
            ("-ctxcp", str(checkpoints)),
            fitted("ctx_checkpoints", checkpoints),
            "context checkpoints: what a hybrid model can step back to",
        ),
        Flag(
            ("--cache-ram", str(cache_ram)),
            fitted("cache_ram", cache_ram),
            "MiB of RAM prompt cache: keeps other agents warm over a switch",
        ),
    ]
    if slot_dir:
        origin = "variable LLAMA_SLOT_SAVE_PATH" if settings.slot_save_path else "looprun"
        flags.append(Flag(("--slot-save-path", str(slot_dir)), origin, "where trunk states are kept over restarts"))
    if request["spec_type"]:
        reason = "the trained head in the file drafts, and every draft is verified"
        flags.append(Flag(("--spec-type", request["spec_type"]), values["spec_type"].origin, reason))
    flags.append(Flag(("--metrics",), "looprun", "what `status` and benchmarks read"))
    flags.append(Flag(("--slots",), "looprun", "who is being served"))
    if engine.has("--cors-origins"):
        origin = f"http://{LOOPBACK}:{port}"
        flags.append(Flag(("--cors-origins", origin), "looprun", "no other web page may use the model"))
    flags += _threads(request, machine)
    if fit and fit.ncmoe and engine.has("-ncmoe") and not _places_experts(request):
        reason = "experts of so many layers stay in main memory: the GPU has too little"
        flags.append(Flag(("-ncmoe", str(fit.ncmoe)), "fitted", reason))
    own, given = request.extra[: request.profile_extra], request.extra[request.profile_extra :]
    flags += [Flag(words, origin, "passed through") for words, origin in ((own, "profile"), (given, "option")) if words]
    return tuple(flags)


def _locked_in_ram(engine: Engine) -> Flag:
    """The same request in the words of the build: the old pair is gone since b10883, and before that the later of the
    two silently undid the first."""
    reason = "locked in RAM: an idle model is not paged out"
    if engine.has("--load-mode"):
        return Flag(("--load-mode", "mlock"), "engine dialect", reason)
    return Flag(("--mlock", "--no-mmap"), "engine dialect", reason)


def _places_experts(request: Request) -> bool:
    return bool({"-ncmoe", "--n-cpu-moe", "-cmoe", "--cpu-moe", "-ot"} & set(request.extra))


def _threads(request: Request, machine: Machine) -> list[Flag]:
    chosen = request.values["threads"]
    if chosen.value is not None:
        return [Flag(("-t", str(chosen.value)), chosen.origin, "threads")]
    if machine.threads is not None:
        reason = f"the CPU quota is {machine.cpu_quota:g} of {machine.cores} visible cores"
        return [Flag(("-t", str(machine.threads)), "fitted", reason)]
    return []


def _notes(
    spec: LocalModelSpec,
    settings: Settings,
    engine: Engine,
    machine: Machine,
    devices: tuple[Device, ...],
    fit: Fit | None,
    dropped: tuple[str, ...],
    slots: SlotFolder,
) -> Iterable[str]:
    if fit is None:
        yield "the weights are not here yet: nothing could be fitted to this machine, the values are the profile's"
    else:
        yield from fit.changes
        yield from fit.warnings
    if engine.note:
        yield f"engine {engine.path}: {engine.note}"
    if dropped:
        yield f"kept from the engine: {', '.join(dropped)} (the recipe decides)"
    config = system_config(settings)
    if config:
        yield f"{config} exists; it can change what the recipe does not set"
    if fit and machine.memlock_limit is not None and machine.memlock_limit < fit.weights:
        yield (
            f"the locked-memory limit is {gib(machine.memlock_limit)}, the weights take {gib(fit.weights)}: they "
            "will not be locked in RAM (raise it with ulimit -l)"
        )
    if spec.tier and not devices and not machine.apple_silicon:
        yield "the profile was measured on a GPU; this engine has none and runs on the CPU, which is much slower"
    if slots.path is None:
        yield f"trunk states are not kept over restarts: {slots.why}"
    if fit and fit.ncmoe:
        yield (
            f"the GPU has {gib(fit.gpu_free)} free of the {gib(fit.gpu_need)} needed; keeping the experts of "
            f"{fit.ncmoe} layers in main memory makes up for it (-ncmoe {fit.ncmoe})"
        )
