"""The fit step: what a quoted recipe can do on this machine, and what is changed when it cannot. One real engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import openai
import psutil
import pytest

from looprun_models.fit import MIB, WARM_AGENTS, Fit, Sizing, fit_plan
from looprun_models.gguf import GgufHeader, read_header
from looprun_models.lease import Lease
from looprun_models.machine import Machine
from looprun_models.registry import resolve_alias
from looprun_models.request import Options
from looprun_models.runtime import LlamaCppRuntime

GIB = 1 << 30
SENTENCE = "You are agent {}. You know every stone, lock and ferry between the old mill and the sea. "


@pytest.fixture
def wide(tiny_gguf: Callable[[str], Path]) -> GgufHeader:
    """As much recurrent state a layer as the real 35B has, in a tenth of its layers."""
    return read_header(tiny_gguf("wide-qwen35-mtp"))


@pytest.fixture
def real(wide: GgufHeader) -> GgufHeader:
    """The published shape of the 35B-A3B: 30 recurrent layers, 10 full-attention layers of 2 KV heads of 256."""
    return replace(wide, file_size=int(11.8e9), recurrent_layers=30, kv_heads=(2,) * 10)


def machine(available: int) -> Machine:
    return Machine(
        system="Linux",
        os_name="test",
        arch="x86_64",
        cores=8,
        cpu_quota=None,
        ram_total=available,
        ram_available=available,
        ram_limited_by="machine",
        memlock_limit=None,
    )


RAM16 = Sizing(ctx=24576, kv="q8_0", drafting=True, ctx_checkpoints=64, cache_ram_mib=512)
RAM24 = Sizing(ctx=65536, kv="f16", drafting=True, ctx_checkpoints=64, cache_ram_mib=16384)


def test_the_ram16_recipe_as_quoted_keeps_no_switch(real: GgufHeader) -> None:
    fit = fit_plan(real, RAM16, machine(15 * GIB), as_quoted=True)
    assert not fit.keeps_switches
    assert (fit.ctx_checkpoints, fit.cache_ram_mib, fit.changes) == (64, 512, ())
    assert "switching agents reads the prompt anew" in fit.warnings[0]


def test_the_ram16_recipe_is_fitted_to_keep_two_agents(real: GgufHeader) -> None:
    fit = fit_plan(real, RAM16, machine(15 * GIB))
    assert fit.keeps_switches
    assert fit.verdict != "does not fit"
    assert fit.ctx_checkpoints in (3, 4, 5, 6)
    assert fit.cache == WARM_AGENTS * fit.entry - WARM_AGENTS * fit.entry % MIB + (MIB if fit.cache % MIB == 0 else 0)
    assert "64 -> " in fit.changes[0]
    assert "512 -> " in fit.changes[1]
    assert fit.warnings == ()


def test_a_cache_that_outgrows_the_machine_is_capped_and_called_tight(real: GgufHeader) -> None:
    fit = fit_plan(real, RAM24, machine(22 * GIB))
    assert fit.total <= 22 * GIB
    assert fit.keeps_switches
    assert fit.cache_ram_mib < 16384
    assert fit.verdict == "tight"
    assert "within the memory there is" in fit.changes[-1]


def test_with_room_for_all_the_quotation_stands(real: GgufHeader) -> None:
    fit = fit_plan(real, replace(RAM24, ctx_checkpoints=32), machine(64 * GIB))
    assert (fit.ctx_checkpoints, fit.cache_ram_mib, fit.changes, fit.verdict) == (32, 16384, (), "fits")


def test_too_little_memory_does_not_fit(real: GgufHeader) -> None:
    fit = fit_plan(real, RAM16, machine(8 * GIB))
    assert fit.verdict == "does not fit"
    assert fit.arithmetic().endswith("does not fit")


@pytest.mark.parametrize("fixed", [{"cache_fixed": True}, {"checkpoints_fixed": True}])
def test_what_somebody_set_is_never_changed(real: GgufHeader, fixed: dict[str, bool]) -> None:
    fit = fit_plan(real, replace(RAM16, **fixed), machine(15 * GIB))  # type: ignore[arg-type]
    if fixed.get("cache_fixed"):
        assert fit.cache_ram_mib == 512
    else:
        assert fit.ctx_checkpoints == 64


def test_a_fixed_cache_that_is_too_small_is_warned_about_with_a_value(real: GgufHeader) -> None:
    fit = fit_plan(real, replace(RAM16, cache_ram_mib=100, cache_fixed=True), machine(15 * GIB))
    assert "LLAMA_CACHE_RAM=" in fit.warnings[0]


def test_the_arithmetic_adds_up(real: GgufHeader) -> None:
    fit = fit_plan(real, RAM16, machine(15 * GIB))
    assert fit.total == sum((fit.weights, fit.kv, fit.recurrent, fit.checkpoints, fit.cache, fit.overhead))
    assert fit.recurrent == 4 * real.recurrent_bytes, "one state, and three to take drafts back"


class Agent:
    """One agent's conversation; `turn()` gives the share of its prompt that was not read anew."""

    def __init__(self, name: str, lease: Lease) -> None:
        self.client = openai.OpenAI(base_url=lease.base_url, api_key="none", max_retries=0)
        self.messages: list[dict[str, str]] = [{"role": "system", "content": SENTENCE.format(name) * 4}]

    def turn(self, text: str) -> float:
        self.messages.append({"role": "user", "content": text})
        reply = self.client.chat.completions.create(
            model="any",
            messages=self.messages,  # type: ignore[arg-type]
            temperature=0,
            max_tokens=4,
            extra_body={"chat_template_kwargs": {"enable_thinking": False}},
        )
        self.messages.append({"role": "assistant", "content": reply.choices[0].message.content or ""})
        timings = (reply.model_extra or {})["timings"]
        return float(timings["cache_n"] / (timings["cache_n"] + timings["prompt_n"]))


def switches(lease: Lease) -> list[float]:
    """Two agents, three turns each, then turn about."""
    alpha, bravo = Agent("Alpha", lease), Agent("Bravo", lease)
    try:
        for agent in (alpha, bravo):
            for number in range(3):
                agent.turn(f"question {number}")
        return [agent.turn(f"switch {number}") for number in range(3) for agent in (alpha, bravo)]
    finally:
        alpha.client.close()
        bravo.client.close()


def resident(lease: Lease) -> int:
    return int(psutil.Process(lease.record.child_pid).memory_info().rss)


@pytest.mark.engine
@pytest.mark.parametrize("as_quoted", [True, False])
def test_the_wide_state_model_under_the_ram16_recipe(profile: Callable[..., str], as_quoted: bool) -> None:
    """The quoted 512 MiB, scaled as the layers are: as quoted every switch is lost, fitted none is, and 60 turns stay
    within what the preflight said."""
    alias = profile("wide-qwen35-mtp", ctx=24576, cache_ram_mib=51)
    runtime = LlamaCppRuntime(options=Options(as_quoted=as_quoted), keep_alive=0.0)
    fit = runtime.plan(resolve_alias(alias)).fit
    assert fit is not None
    assert fit.keeps_switches is not as_quoted
    with runtime.ensure_server(resolve_alias(alias)) as lease:
        at_start = resident(lease)
        kept = switches(lease)
        if as_quoted:
            assert max(kept) < 0.1, "the premise of the fit step: every switch reads the whole prompt"
            return
        assert min(kept) > 0.9
        alone = Agent("Charlie", lease)
        for number in range(60):
            alone.turn(f"turn {number}")
        alone.client.close()
        assert resident(lease) < fit.total
        assert resident(lease) - at_start < fit.checkpoints + fit.cache + fit.kv, "and not only thanks to the margin"


def test_a_dense_model_needs_no_checkpoints(wide: GgufHeader) -> None:
    dense = replace(wide, recurrent_layers=0)
    fit: Fit = fit_plan(dense, RAM16, machine(15 * GIB))
    assert fit.checkpoints == 0
    assert fit.ctx_checkpoints == 64
