"""The smoke check: an engine is proved by serving, not by what it answers to --version.

It loads the tiny hybrid model that comes with this package, with the recipe's flags, and must say what that model says.
A program built for another CPU, one that lacks a library and one whose arithmetic is broken are all found here, in a
tenth of a second, before a model of gigabytes is loaded.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from looprun_models import system
from looprun_models.engine import Engine
from looprun_models.errors import EngineDied, LooprunError, PortInUse, StartTimeout
from looprun_models.gguf import read_header
from looprun_models.launch import LaunchPlan, SlotFolder, missing_flags, plan_launch
from looprun_models.lease import Lease
from looprun_models.machine import inspect_machine
from looprun_models.registry import LocalModelSpec
from looprun_models.request import Options, read_request
from looprun_models.servers import Wanted, ensure_server
from looprun_models.settings import Settings
from looprun_models.verdicts import Verdict, keep_verdict, known_verdict
from looprun_models.wire import Record, post_json

MODEL = Path(__file__).with_name("smoke.gguf")
"""Written by scripts/make_tiny_gguf.py; answers with the letters that follow."""
PROMPT, ANSWER = "ab", "cdefghij"
ALIAS = "engine-check"
SPEC = LocalModelSpec(
    alias=ALIAS,
    note="the model of the smoke check",
    file=MODEL.name,
    default_dir=str(MODEL.parent),
    env_var="",
    hf_repo="",
    approx_size_gb=0.0001,
    kv="q8_0",
    ctx=512,
    cache_ram_mib=16,
    served_id=ALIAS,
    spec_type="draft-mtp",
    ctx_checkpoints=4,
)
PORTS = range(20000, 32000)
"""One is drawn: two checks at once that both began at the first would meet there."""
PORT_RACES = 5
TIMEOUT = 60.0
"""Seconds; a GPU's first start compiles its kernels."""
SCRATCH = "looprun-check-"
_ELSEWHERE = ("(SIGKILL)", "(SIGTERM)", "not enough memory", "mem_buffer")
"""Ends that tell more about the machine at that moment than about the engine."""


def prove(engine: Engine, settings: Settings, *, fresh: bool = False) -> Verdict:
    """Whether the engine serves. Runs it once for each program and CPU, again when `fresh`; raises nothing."""
    known = None if fresh else known_verdict(engine, settings)
    if known is not None:
        return known
    verdict = replace(_try(engine, settings), checked=time.time())
    keep_verdict(engine, settings, verdict)
    return verdict


def _try(engine: Engine, settings: Settings) -> Verdict:
    try:
        _sweep(Path(tempfile.gettempdir()))
        with tempfile.TemporaryDirectory(prefix=f"{SCRATCH}{os.getpid()}-", ignore_cleanup_errors=True) as scratch:
            return _serve(engine, _plain(settings, Path(scratch)))
    except OSError as error:
        return Verdict(None, f"{error.filename or 'the check'}: {error.strerror or error}")


def _sweep(folder: Path) -> None:
    """Remove what checks that were killed have left."""
    for left in folder.glob(f"{SCRATCH}*-*"):
        pid = left.name.removeprefix(SCRATCH).partition("-")[0]
        if pid.isdigit() and system.start_of(int(pid)) is None:
            shutil.rmtree(left, ignore_errors=True)


def _plain(settings: Settings, scratch: Path) -> Settings:
    """The recipe as it is, whatever the variables say, and records that no other command finds."""
    plain = replace(settings, kv=None, ctx=None, cache_ram=None, spec_type=None)
    return replace(plain, state_dir=scratch, port=None, slot_save_path=None)


def _serve(engine: Engine, settings: Settings) -> Verdict:
    slots = settings.state_dir / "slots"
    slots.mkdir(mode=0o700)
    plan = _plan(engine, settings, slots, PORTS.start)
    missing = missing_flags(plan)
    if missing:
        return Verdict(False, f"it lacks {', '.join(missing)}, which the recipe needs", missing)
    begun = time.monotonic()
    try:
        with _started(settings, plan, lambda port, _: _plan(engine, settings, slots, port)) as lease:
            verdict = _ask(lease, drafting="--spec-type" in plan.argv)
    except StartTimeout:
        return Verdict(None, f"it was not ready within {TIMEOUT:g} s")
    except EngineDied as died:
        why = re.sub(f"^the engine ({re.escape(str(engine.path))} )?", "it ", died.message)
        return Verdict(None if any(end in why for end in _ELSEWHERE) else False, why)
    except LooprunError as error:
        return Verdict(None, error.message)
    return replace(verdict, seconds=time.monotonic() - begun)


@contextlib.contextmanager
def _started(
    settings: Settings,
    plan: LaunchPlan,
    make_plan: Callable[[int, list[Record]], LaunchPlan],
) -> Iterator[Lease]:
    for race in range(PORT_RACES):
        port = random.choice(PORTS)  # noqa: S311 (no secret)
        wanted = Wanted(ALIAS, plan.fingerprint, port, strict=False, host=plan.host, api_key=None, plan=make_plan)
        with ensure_server(settings, wanted, keep_alive=0) as lease:
            try:
                lease.wait_ready(TIMEOUT)
                yield lease
                return
            except PortInUse:
                if race + 1 == PORT_RACES:
                    raise
            finally:
                lease.stop(force=True)


def _plan(engine: Engine, settings: Settings, slots: Path, port: int) -> LaunchPlan:
    drafts = engine.has("--spec-type") and "draft-mtp" in engine.help_text
    spec = SPEC if drafts else replace(SPEC, spec_type=None)
    options = Options(spare_key="engine-check")
    request = read_request(
        spec, settings, options, engine_identity=engine.identity, weights_identity="smoke", slot_dir=slots
    )
    return plan_launch(
        spec,
        settings,
        options,
        request,
        port=port,
        engine=engine,
        model=MODEL,
        header=read_header(MODEL),
        machine=inspect_machine(),
        slots=SlotFolder(slots),
        check_flags=False,
    )


def _ask(lease: Lease, *, drafting: bool) -> Verdict:
    question = {"prompt": PROMPT, "n_predict": len(ANSWER), "temperature": 0, "cache_prompt": False}
    record = lease.record
    try:
        status, answer = post_json(record.host, record.port, "/completion", record.api_key, TIMEOUT, question)
    except (OSError, ValueError) as error:
        died = lease.why_gone(2.0)
        if died:
            raise died from error
        return Verdict(None, f"it did not answer: {error}")
    if status != 200 or not isinstance(answer, dict):
        return Verdict(False, f"it answered a completion with HTTP {status}")
    if answer.get("content") != ANSWER:
        return Verdict(False, f"it computes wrongly: it said {answer.get('content')!r} instead of {ANSWER!r}")
    drafted = _drafted(answer) if drafting else None
    if drafted == 0:
        return Verdict(False, "it lists draft-mtp and drafted no token", drafted=0)
    return Verdict(True, drafted=drafted)


def _drafted(answer: dict[str, Any]) -> int:
    return int(answer.get("timings", {}).get("draft_n", 0))
