"""How much memory a plan takes, and the values that make a quoted recipe do what it is for on this machine.

In a hybrid model every context checkpoint holds the whole recurrent state, and a RAM-cache entry holds the KV cache and
all checkpoints of an agent. Quoted values can therefore keep nothing warm, or outgrow the machine; both are seen here,
from the header, before anything is started. The formulas were checked against the engine's log (docs/benchmarks.md).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from looprun_models.engine import Device
from looprun_models.gguf import GgufHeader
from looprun_models.machine import Machine

MIB = 1 << 20
AGENT_TOKENS = 8192
"""An agent's prompt and conversation, for sizing the RAM cache: trunks are 2k to 21k tokens, turns come on top."""
WARM_AGENTS = 2
"""A switch needs room for the agent that leaves beside the one that comes back."""
CHECKPOINT_CHOICES = (6, 5, 4, 3)
"""Numbers of checkpoints that kept every agent switch warm in the wide-state fixture."""
DRAFT_MAX = 3
"""Tokens a draft may have, by the engine's default; a live slot keeps a recurrent state for each, to take it back."""
OVERHEAD = 512 * MIB
"""Compute buffers and the program itself."""
TIGHT = 0.95


@dataclass(frozen=True, slots=True)
class Sizing:
    """What the plan asks for. cache_ram_mib and ctx_checkpoints are `fixed` when a variable or option set them."""

    ctx: int
    kv: str
    drafting: bool
    ctx_checkpoints: int
    cache_ram_mib: int
    checkpoints_fixed: bool = False
    cache_fixed: bool = False


@dataclass(frozen=True, slots=True)
class Fit:
    """Memory in bytes, by purpose, against what there is. entry: what one agent takes in the RAM cache.

    verdict: "fits" | "tight" | "does not fit". changes: what was fitted, with its arithmetic; warnings: what the values
    cannot do and were left alone.
    """

    weights: int
    kv: int
    recurrent: int
    checkpoints: int
    cache: int
    overhead: int
    available: int
    entry: int
    ctx_checkpoints: int
    cache_ram_mib: int
    gpu_need: int = 0
    gpu_free: int = 0
    ncmoe: int = 0
    changes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        """Bytes of main memory when everything is in use."""
        return self.weights + self.kv + self.recurrent + self.checkpoints + self.cache + self.overhead

    @property
    def verdict(self) -> str:
        if self.total > self.available:
            return "does not fit"
        capped = any("within the memory there is" in change for change in self.changes)
        return "tight" if capped or self.total > TIGHT * self.available else "fits"

    @property
    def keeps_switches(self) -> bool:
        """Whether the RAM cache holds the agents that a switch needs."""
        return self.cache >= WARM_AGENTS * self.entry

    def arithmetic(self) -> str:
        """One line that adds up."""
        parts = [
            ("weights", self.weights),
            ("KV", self.kv),
            ("recurrent state", self.recurrent),
            (f"{self.ctx_checkpoints} checkpoints", self.checkpoints),
            ("RAM prompt cache", self.cache),
            ("engine", self.overhead),
        ]
        shown = " + ".join(f"{name} {gib(size)}" for name, size in parts if size)
        return f"{shown} = {gib(self.total)} of {gib(self.available)} available: {self.verdict}"


def fit_plan(
    header: GgufHeader, sizing: Sizing, machine: Machine, devices: tuple[Device, ...] = (), *, as_quoted: bool = False
) -> Fit:
    """Size a plan; adjust what the profile quoted and nobody fixed, unless as_quoted."""
    quoted = _measure(header, sizing, machine, devices)
    if as_quoted or (quoted.keeps_switches and quoted.verdict != "does not fit"):
        return _with_warnings(quoted, sizing)
    best = quoted
    for count in _choices(header, sizing):
        best = _with_cache(header, replace(sizing, ctx_checkpoints=count), machine, devices)
        if best.keeps_switches and best.verdict != "does not fit":
            break
    return _with_warnings(replace(best, changes=_explain(quoted, best)), sizing)


def _choices(header: GgufHeader, sizing: Sizing) -> tuple[int, ...]:
    if sizing.checkpoints_fixed or not header.is_hybrid:
        return (sizing.ctx_checkpoints,)
    return tuple(count for count in CHECKPOINT_CHOICES if count <= sizing.ctx_checkpoints) or (sizing.ctx_checkpoints,)


def _with_cache(header: GgufHeader, sizing: Sizing, machine: Machine, devices: tuple[Device, ...]) -> Fit:
    """The cache that holds the warm agents, up to what was quoted, within the memory there is."""
    if sizing.cache_fixed or not sizing.cache_ram_mib:
        return _measure(header, sizing, machine, devices)
    bare = _measure(header, replace(sizing, cache_ram_mib=0), machine, devices)
    least = -(-WARM_AGENTS * bare.entry // MIB)
    room = (bare.available - bare.total) // MIB
    cache = max(least, min(max(sizing.cache_ram_mib, least), room))
    return _measure(header, replace(sizing, cache_ram_mib=cache), machine, devices)


def _measure(header: GgufHeader, sizing: Sizing, machine: Machine, devices: tuple[Device, ...]) -> Fit:
    agent = min(sizing.ctx, AGENT_TOKENS)
    draft_kv = header.draft_kv_bytes(sizing.ctx) if sizing.drafting else 0
    agent_draft = header.draft_kv_bytes(agent) if sizing.drafting else 0
    kv = header.kv_bytes(sizing.ctx, sizing.kv) + draft_kv
    checkpoints = agent_checkpoints = 0
    if header.is_hybrid:
        checkpoints = sizing.ctx_checkpoints * header.checkpoint_bytes(sizing.ctx, sizing.drafting)
        agent_checkpoints = sizing.ctx_checkpoints * header.checkpoint_bytes(agent, sizing.drafting)
    weights, overhead = header.file_size, OVERHEAD
    recurrent = header.live_recurrent_bytes(DRAFT_MAX if sizing.drafting else 0)
    gpu_need, gpu_free, ncmoe = 0, 0, 0
    if devices and not machine.apple_silicon:
        gpu_free = sum(device.free for device in devices)
        gpu_need = weights + kv + recurrent + OVERHEAD
        ncmoe, on_host = _experts_on_host(header, gpu_need - gpu_free)
        weights, kv, recurrent = on_host, 0, 0
    return Fit(
        weights=weights,
        kv=kv,
        recurrent=recurrent,
        checkpoints=checkpoints,
        cache=sizing.cache_ram_mib * MIB,
        overhead=overhead,
        available=machine.ram_available,
        entry=header.kv_bytes(agent, sizing.kv) + agent_draft + header.recurrent_bytes + agent_checkpoints,
        ctx_checkpoints=sizing.ctx_checkpoints,
        cache_ram_mib=sizing.cache_ram_mib,
        gpu_need=gpu_need,
        gpu_free=gpu_free,
        ncmoe=ncmoe,
    )


def _experts_on_host(header: GgufHeader, excess: int) -> tuple[int, int]:
    """How many layers' experts must stay in main memory to free `excess` bytes of GPU memory, and their bytes."""
    moved = 0
    for count, size in enumerate(header.expert_layer_bytes):  # the flag counts from the first layer, dense ones too
        if moved >= excess:
            return count, moved
        moved += size
    return len(header.expert_layer_bytes), moved if moved >= excess else header.file_size


def _explain(quoted: Fit, fitted: Fit) -> tuple[str, ...]:
    changes = []
    loses = f"the quoted {quoted.cache_ram_mib} MiB hold less than {WARM_AGENTS} agents of {mib(quoted.entry)}"
    if fitted.ctx_checkpoints != quoted.ctx_checkpoints:
        why = loses if not quoted.keeps_switches else f"the quoted values can grow to {gib(quoted.total)}"
        changes.append(
            f"context checkpoints {quoted.ctx_checkpoints} -> {fitted.ctx_checkpoints}: each holds the whole recurrent "
            f"state, and {why}"
        )
    if fitted.cache_ram_mib > quoted.cache_ram_mib:
        changes.append(
            f"RAM prompt cache {quoted.cache_ram_mib} -> {fitted.cache_ram_mib} MiB: {WARM_AGENTS} agents of "
            f"{mib(fitted.entry)} each, so that a switch finds both"
        )
    elif fitted.cache_ram_mib < quoted.cache_ram_mib:
        changes.append(
            f"RAM prompt cache {quoted.cache_ram_mib} -> {fitted.cache_ram_mib} MiB: kept within the memory there is "
            f"({gib(quoted.available)} available)"
        )
    return tuple(changes)


def _with_warnings(fit: Fit, sizing: Sizing) -> Fit:
    warnings = []
    if not fit.keeps_switches:
        warnings.append(
            f"the RAM prompt cache ({fit.cache_ram_mib} MiB) holds less than {WARM_AGENTS} agents of {mib(fit.entry)} "
            f"with {fit.ctx_checkpoints} checkpoints: switching agents reads the prompt anew"
            + (f"; LLAMA_CACHE_RAM={-(-WARM_AGENTS * fit.entry // MIB)} would keep it" if sizing.cache_fixed else "")
        )
    return replace(fit, warnings=tuple(warnings))


def gib(size: int) -> str:
    return f"{size / (1 << 30):.2f} GiB" if size >= 1 << 30 else mib(size)


def mib(size: int) -> str:
    return f"{size / MIB:.0f} MiB" if size >= 10 * MIB else f"{size / MIB:.1f} MiB"
