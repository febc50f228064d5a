"""Measure what trunks save: agents take turns on one slot, and the server is killed in the middle.

Run by scripts/bench_trunks. The same turns are had through the product and on two servers without it: the bare engine
with its default flags, and the recipe's flags with plain chat. Turn by turn the variants go one after another, in an
order that rotates, so that a busy machine slows all of them alike. No server works while another is measured.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import os
import random
import shutil
import sys
import tempfile
from pathlib import Path

from bench_overhead import DOCUMENT, machine, write_table
from trunk_figures import (
    COLD,
    SWITCH,
    TRUNKS,
    WARM,
    WARM_AGENTS,
    Goal,
    Turn,
    goal_table,
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
from trunk_servers import Plain, Trunks, Variant, bare, engine_name, recipe, running

REPO = Path(__file__).parent.parent
MARK = "<!-- scripts/bench_trunks{} --write: {} -->"
WEIGHTS = "SMOLLM2_135M_GGUF"
TOKEN_BYTES = 24_000
"""Of a saved state, for each token of a trunk of this model."""
SPARE = 2e9
"""Bytes of disk that stay free."""
SIZES = {"full": (8, 2000, 5), "quick": (4, 600, 3)}
SCALE_TOKENS, SCALE_CACHE = 2193, 384
COUNTS = (1, 8, 20, 50, 100)
SCALE_TURNS = 16
"""Turns counted for each number of agents, at least: whole laps."""
POOL, SAMPLE = 20, 4
"""The bare engine reads everything of many agents, at 9 s a turn: beyond eight it has this many turns, going round this
many agents. A cache that has lost an agent after 19 others has also lost it after 49 or 99."""


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


def heading(load: tuple[float, float, float], what: str) -> str:
    today, loads = datetime.date.today().isoformat(), f"load {load[0]:.1f} before and {os.getloadavg()[0]:.1f} after"
    return f"Measured {today} on {machine()}; {loads}. Engine {engine_name()}, SmolLM2-135M, {what}."


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
