"""Measure what trunks save: agents take turns on one slot, and the server is killed in the middle.

Run by scripts/bench_trunks. The same turns are had through the product and on two servers without it: the bare engine
with its default flags, and the recipe's flags with plain chat. Turn by turn the variants go one after another, in an
order that rotates, so that a busy machine slows all of them alike. No server works while another is measured.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import openai
import psutil
from bench_overhead import DOCUMENT, free_port, machine, write_table
from trunk_figures import (
    COLD,
    SWITCH,
    TRUNKS,
    WARM,
    WARM_AGENTS,
    Goal,
    Turn,
    goal_table,
    instructions,
    middle,
    pick,
    question,
    scale_goals,
    scale_table,
    states,
    turn_goals,
    turn_table,
    visits,
)

from looprun_models import LocalModel, Trunk, Warmth, local_model, warmth
from looprun_models.probe import child_environ
from looprun_models.registry import resolve_alias
from looprun_models.reply import counted
from looprun_models.runtime import LlamaCppRuntime
from looprun_models.settings import load_settings

REPO = Path(__file__).parent.parent
MARK = "<!-- scripts/bench_trunks{} --write: {} -->"
ALIAS, WEIGHTS = "smoke", "SMOLLM2_135M_GGUF"
TOKEN_BYTES = 24_000
"""Of a saved state, for each token of a trunk of this model."""
SPARE = 2e9
"""Bytes of disk that stay free."""
ANSWER_TOKENS = 4
SIZES = {"full": (8, 2000, 5), "quick": (4, 600, 3)}
SCALE_TOKENS, SCALE_CACHE = 2193, 384
COUNTS = (1, 8, 20, 50, 100)
SCALE_TURNS = 16
"""Turns counted for each number of agents, at least: whole laps."""
POOL, SAMPLE = 20, 4
"""The bare engine reads everything of many agents, at 9 s a turn: beyond eight it has this many turns, going round this
many agents. A cache that has lost an agent after 19 others has also lost it after 49 or 99."""
BARE, RECIPE = "the bare engine", "the recipe, no trunks"


class Variant(Protocol):
    """A server, and how a turn is had on it."""

    name: str

    def start(self) -> None: ...
    def kill(self) -> None: ...
    def close(self) -> None: ...
    def turn(self, agent: int, words: str, kind: str) -> Turn: ...


class Trunks:
    """The product: `local_model`, `model.trunk` for each agent of a server's life, `trunk.create`."""

    name = TRUNKS

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.trunks: dict[int, Trunk] = {}
        self.model: LocalModel

    def start(self) -> None:
        self.trunks.clear()
        self.model = local_model(ALIAS, keep_alive=0)

    def kill(self) -> None:
        record = self._record()
        os.kill(record.child_pid, signal.SIGKILL)
        self.close()

    def close(self) -> None:
        self.model.close()
        with contextlib.suppress(psutil.Error):
            psutil.Process(self._record().supervisor_pid).wait(20)

    def size(self) -> int:
        """Tokens of a trunk, median."""
        return round(statistics.median(trunk.tokens for trunk in self.trunks.values()))

    def turn(self, agent: int, words: str, kind: str) -> Turn:
        before = self._tokens_read()
        began = time.perf_counter()
        state = "" if agent in self.trunks else self.hold(agent).state
        stream = self.trunks[agent].create(messages=[user(words)], stream=True, **SHORT)
        seconds, _ = first_words(stream, began)
        found, read = warmth(stream), self._tokens_read() - before
        return Turn(self.name, kind, seconds, found.prompt, read, state or found.state)

    def hold(self, agent: int) -> Trunk:
        trunk = self.model.trunk(f"agent {agent}", messages=[system(instructions(agent, self.tokens))])
        self.trunks[agent] = trunk
        return trunk

    def _tokens_read(self) -> int:
        """Prompt tokens that the engine has read in its life: those of a trunk that was read again are in no reply."""
        told = fetch(str(self.model.base_url).rstrip("/").removesuffix("/v1") + "/metrics", self.model.api_key)
        counted = re.search(r"^llamacpp:prompt_tokens_total (\d+)", told, re.MULTILINE)
        if counted is None:
            raise SystemExit("the engine does not count the tokens that it reads")
        return int(counted[1])

    def _record(self) -> Any:
        return getattr(self.model.server, "record")  # noqa: B009 (a handle need not have one)


class Plain:
    """A llama-server started here, and chats that begin with the agent's instructions."""

    def __init__(self, name: str, command: Sequence[str], env: Mapping[str, str], tokens: int, log: Path) -> None:
        self.name, self.tokens = name, tokens
        self._command, self._env, self._log = command, env, log
        self._process: subprocess.Popen[bytes]
        self._client: openai.OpenAI

    def start(self) -> None:
        port = free_port()
        key = self._env.get("LLAMA_API_KEY", "none")
        command = [*self._command, "--host", "127.0.0.1", "--port", str(port)]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command, env=self._env, cwd=os.sep, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self._client = openai.OpenAI(
            base_url=f"http://127.0.0.1:{port}/v1",
            api_key=key,
            max_retries=0,
            timeout=None,
            http_client=openai.DefaultHttpxClient(trust_env=False),
        )
        self._wait_ready(f"http://127.0.0.1:{port}/health")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._client.close()

    close = kill

    def turn(self, agent: int, words: str, kind: str) -> Turn:
        began = time.perf_counter()
        messages: Any = [system(instructions(agent, self.tokens)), user(words)]
        stream = self._client.chat.completions.create(model=ALIAS, messages=messages, stream=True, **SHORT)
        seconds, found = first_words(stream, began)
        return Turn(self.name, kind, seconds, found.prompt, found.read)

    def _wait_ready(self, url: str) -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and self._process.poll() is None:
            with contextlib.suppress(OSError):
                fetch(url)
                return
            time.sleep(0.02)
        raise SystemExit(f"{self.name} did not start: {self._log.read_text(encoding='utf-8')[-2000:]}")


SHORT: dict[str, Any] = {"max_tokens": ANSWER_TOKENS, "temperature": 0}


def main() -> int:
    args = arguments()
    cache = REPO / ".cache"
    cache.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-trunks-", dir=cache) as folder:
        prepare(Path(folder), args)
        text, goals = (scale if args.scale else take_turns)(Path(folder), args)
    print(text)
    if args.write:
        name = " --scale" if args.scale else ""
        write_table(MARK.format(name, "begin"), MARK.format(name, "end"), text)
    return 0 if all(goal.ok or not goal.binding for goal in goals) else 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench_trunks", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--quick",
        action="store_true",
        help="four agents of 600 tokens, three rounds, without the recipe; times never fail",
    )
    parser.add_argument("--scale", action="store_true", help=f"{', '.join(map(str, COUNTS))} agents with a small cache")
    parser.add_argument("--agents", type=positive, help="how many agents; with --scale, how many at most")
    parser.add_argument("--tokens", type=positive, help="tokens of each trunk, about")
    parser.add_argument(
        "--rounds", type=positive, help="turns of each agent, at least 3 (each is followed by a warm one)"
    )
    parser.add_argument("--engine", type=Path, help="a llama-server; the embedded engine by default")
    parser.add_argument("--write", action="store_true", help=f"update the tables in {DOCUMENT.relative_to(REPO)}")
    args = parser.parse_args()
    agents, tokens, rounds = SIZES["quick" if args.quick else "full"]
    if args.scale:
        agents, tokens = COUNTS[-1], SCALE_TOKENS
    args.agents, args.tokens, args.rounds = args.agents or agents, args.tokens or tokens, args.rounds or rounds
    if args.agents < 2 or args.rounds < 3:
        parser.error("a switch and a restart take at least 2 agents and 3 rounds")
    if not Path(os.environ.get(WEIGHTS, "")).is_file():
        parser.error(f"{WEIGHTS} names no file; scripts/bench_trunks fetches one")
    return args


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def prepare(folder: Path, args: argparse.Namespace) -> None:
    """From here on the product sees an empty home, this engine, and room for all trunks."""
    need = args.agents * args.tokens * TOKEN_BYTES
    if shutil.disk_usage(folder).free < need + SPARE:
        raise SystemExit(
            f"the trunks take {need / 1e9:.1f} GB of disk in {folder.parent}, and {SPARE / 1e9:g} GB stay free"
        )
    for name in list(os.environ):
        if name.startswith(("LLAMA_", "LOOPRUN_", "AIP_", "XDG_")):
            del os.environ[name]
    os.environ.update(
        {
            WEIGHTS: str(Path(os.environ[WEIGHTS]).absolute()),
            "HOME": str(folder),
            "PATH": str(Path(sys.executable).parent),  # no llama-server of the user's
            "LOOPRUN_STATE_DIR": str(folder / "state"),
            "LOOPRUN_CACHE_DIR": str(folder / "cache"),
            "LOOPRUN_TRUNK_BUDGET": f"{2 * need / 1e9:.3f}",
            "OMP_WAIT_POLICY": "passive",  # idle servers do not spin while another is measured
        }
    )
    if args.engine:
        os.environ["LLAMA_BIN"] = str(args.engine.absolute())
    if args.scale:
        os.environ["LLAMA_CACHE_RAM"] = str(SCALE_CACHE)


def bare(folder: Path, tokens: int, *flags: str) -> Plain:
    settings, plan = load_settings(), recipe_plan()
    needs_path = not plan.engine.embedded and plan.engine.library_path
    env, _ = child_environ(settings, library_path=plan.engine.path.parent if needs_path else None)
    command = [*plan.engine.command, "-m", str(plan.model), *flags]
    return Plain(f"{BARE}, {' '.join(flags) or 'default flags'}", command, env, tokens, folder / "bare.log")


def recipe(folder: Path, tokens: int) -> Plain:
    plan = recipe_plan()
    own = ("--host", "--port", "--cors-origins")  # the port is another one
    words = [word for flag in plan.flags if flag.words[0] not in own for word in flag.words]
    return Plain(RECIPE, [*plan.engine.command, *words], plan.env, tokens, folder / "recipe.log")


def recipe_plan() -> Any:
    return LlamaCppRuntime(load_settings()).plan(resolve_alias(ALIAS))


def take_turns(folder: Path, args: argparse.Namespace) -> tuple[str, list[Goal]]:
    """All agents on all variants, killed in the middle."""
    load, chance, turns = os.getloadavg(), random.Random(0), []
    ours = Trunks(args.tokens)
    variants: list[Variant] = [ours, bare(folder, args.tokens)]
    if not args.quick:
        variants.append(recipe(folder, args.tokens))
    firsts = itertools.cycle(range(len(variants)))
    with running(variants):
        for visit in visits(args.agents, args.rounds):
            for variant in variants if visit.restarts else ():
                variant.kill()
                variant.start()
            for kind in visit.kinds:
                words, first = question(chance), next(firsts)
                turns += [variant.turn(visit.agent, words, kind) for variant in variants[first:] + variants[:first]]
            say(f"round {visit.round + 1} of {args.rounds}, agent {visit.agent + 1} of {args.agents}")
        tokens = ours.size()
    names = [variant.name for variant in variants]
    turns.sort(key=lambda turn: names.index(turn.variant))
    goals = turn_goals(turns, quick=args.quick)
    what = f"{args.agents} agents with trunks of {tokens} tokens, {args.rounds} rounds, all killed after round "
    told = f"How the trunks were made resident, by kind of turn: {states(pick(turns, variant=TRUNKS))}."
    lines = [heading(load, f"{what}{middle(args.rounds)}"), "", *turn_table(turns), "", told, "", *goal_table(goals)]
    return "\n".join(lines), goals


def scale(folder: Path, args: argparse.Namespace) -> tuple[str, list[Goal]]:
    """More and more agents with a RAM cache for seven."""
    load, chance = os.getloadavg(), random.Random(0)
    counts = [count for count in COUNTS if count <= args.agents]
    ours, theirs = Trunks(args.tokens), bare(folder, args.tokens, "--cache-ram", str(SCALE_CACHE))
    turns: list[Turn] = []
    with running([ours, theirs]):
        for agent in range(counts[-1]):
            ours.hold(agent)
            say(f"baking: {agent + 1} of {counts[-1]}")
        laps = PlainLaps(theirs, chance)
        for count in counts:
            turns += trunk_laps(ours, count, chance)
            turns += laps.of(count)
            say(f"{count} agents: done")
        tokens = ours.size()
    goals = scale_goals(turns)
    what = f"trunks of {tokens} tokens, --cache-ram {SCALE_CACHE}, agents in round robin"
    largest = states(pick(turns, variant=TRUNKS, agents=counts[-1]))
    told = f"How the trunks of {counts[-1]} agents were made resident, by kind of turn: {largest}."
    return "\n".join([heading(load, what), "", *scale_table(turns), "", told, "", *goal_table(goals)]), goals


def trunk_laps(ours: Trunks, count: int, chance: random.Random) -> list[Turn]:
    """Whole laps; the end of one before them is not counted, it leaves the cache as laps do."""
    for agent in range(max(0, count - POOL), count):
        ours.turn(agent, question(chance), SWITCH)
    laps = range(-(-SCALE_TURNS // count))
    return [turn for _ in laps for agent in range(count) for turn in two_turns(ours, agent, count, chance)]


class PlainLaps:
    """The same on the bare engine, where beyond eight agents a few turns have to do."""

    def __init__(self, theirs: Plain, chance: random.Random) -> None:
        self._theirs, self._chance, self._seen, self._next = theirs, chance, 0, 0

    def of(self, count: int) -> list[Turn]:
        pool, turns = min(count, POOL), []
        while self._seen < pool:  # an agent's first turn is not counted
            self._theirs.turn(self._seen, question(self._chance), COLD)
            self._seen, self._next = self._seen + 1, 0
        for _ in range(max(count, SAMPLE) if count <= WARM_AGENTS else SAMPLE):
            turns += two_turns(self._theirs, self._next % pool, count, self._chance)
            self._next += 1
        return turns


def two_turns(variant: Variant, agent: int, count: int, chance: random.Random) -> list[Turn]:
    return [variant.turn(agent, question(chance), kind)._replace(agents=count) for kind in (SWITCH, WARM)]


@contextlib.contextmanager
def running(variants: Sequence[Variant]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for variant in variants:
            variant.start()
            stack.callback(variant.close)
        yield


def first_words(stream: Iterable[Any], began: float) -> tuple[float, Warmth]:
    """Seconds from `began` to the first chunk with text, and the engine's counts; reads the stream to its end."""
    first, found = None, None
    for chunk in stream:
        if first is None and chunk.choices and chunk.choices[0].delta.content:
            first = time.perf_counter() - began
        found = counted(chunk) or found
    if first is None or found is None:
        raise SystemExit("an answer had no words or no counts")
    return first, found


def fetch(url: str, key: str = "none") -> str:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"}), timeout=60) as answer:
        return str(answer.read().decode())


def heading(load: tuple[float, float, float], what: str) -> str:
    today, loads = datetime.date.today().isoformat(), f"load {load[0]:.1f} before and {os.getloadavg()[0]:.1f} after"
    return f"Measured {today} on {machine()}; {loads}. Engine {engine_name()}, SmolLM2-135M, {what}."


def engine_name() -> str:
    engine = recipe_plan().engine
    build = "of unknown build" if engine.build is None else f"b{engine.build}"
    return f"{build}, embedded" if engine.embedded else build


def system(content: str) -> Any:
    return {"role": "system", "content": content}


def user(content: str) -> Any:
    return {"role": "user", "content": content}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
