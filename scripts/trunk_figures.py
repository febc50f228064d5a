"""The arithmetic of scripts/bench_trunks: who has which turn, medians, goals, and how they are shown. Nothing runs."""

from __future__ import annotations

import functools
import operator
import random
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from demo_agent import TRUNK

COLD, WARM, SWITCH, RESTART = KINDS = ("cold", "warm", "switch", "restart")
HEADINGS = ("cold", "warm: the same agent again", "after a switch", "after a restart")
TRUNKS = "trunks"
BAR = 48
"""Characters of the longest bar."""
FASTER, RESTART_TO_WARM, READ_SHARE = 20, 2.5, 0.10
SCALE_TO_WARM, SCALE_READ_SHARE = 3, 0.15
WARM_AGENTS = 8
"""Agents at which the warm figure is taken that more of them are compared with."""
VOCABULARY = sorted(set(re.findall(r"[a-z]{3,}", TRUNK)))


class Turn(NamedTuple):
    """One turn of one agent. seconds: to the first word. prompt, read: tokens; read counts all that the engine read for
    it. state: what the trunk had to do with it. agents: how many take turns."""

    variant: str
    kind: str
    seconds: float
    prompt: int
    read: int
    state: str = ""
    agents: int = 0


class Goal(NamedTuple):
    """A figure and its limit. binding: whether a miss fails the bench."""

    what: str
    value: float
    wanted: str
    limit: float
    unit: str = "x"
    binding: bool = True

    @property
    def ok(self) -> bool:
        compare = {"at least": operator.ge, "at most": operator.le, "under": operator.lt}[self.wanted]
        return bool(compare(self.value, self.limit))

    def __str__(self) -> str:
        shown = f"{self.value:.1%}" if self.unit == "%" else f"{self.value:.1f}{self.unit}"
        limit = f"{self.limit:.0%}" if self.unit == "%" else f"{self.limit:g}{self.unit}"
        verdict = "ok" if self.ok else "MISSED" if self.binding else "MISSED (does not count here)"
        return f"| {self.what} | {shown} | {self.wanted} {limit} | {verdict} |"


class Visit(NamedTuple):
    """An agent's turns in one round. restarts: before it, every server is killed and started again."""

    round: int
    agent: int
    kinds: tuple[str, ...]
    restarts: bool


def visits(agents: int, rounds: int) -> Iterator[Visit]:
    """Who comes when: each agent twice running in each round, the servers killed after the middle one."""
    for number in range(rounds):
        kind = {0: COLD, middle(rounds): RESTART}.get(number, SWITCH)
        for agent in range(agents):
            yield Visit(number, agent, (kind, WARM), restarts=kind == RESTART and agent == 0)


def middle(rounds: int) -> int:
    """After so many rounds the servers are killed."""
    return (rounds + 1) // 2


@functools.cache
def instructions(agent: int, tokens: int) -> str:
    """An agent's system prompt of about so many tokens. No two begin alike."""
    chance = random.Random(agent)
    words = [VOCABULARY[agent % len(VOCABULARY)].capitalize()]
    while len(words) < 0.83 * tokens:
        words += chance.choices(VOCABULARY, k=11)
        words[-1] += "."
    return " ".join(words)


def question(chance: random.Random) -> str:
    return f"What do you say about {' and '.join(chance.sample(VOCABULARY, 3))}?"


def median(turns: Iterable[Turn]) -> float:
    """Seconds."""
    return statistics.median(turn.seconds for turn in turns)


def pick(turns: Iterable[Turn], **wanted: Any) -> list[Turn]:
    """The turns with these values of their fields."""
    return [turn for turn in turns if all(getattr(turn, name) == value for name, value in wanted.items())]


def read_share(turns: Sequence[Turn]) -> float:
    return sum(turn.read for turn in turns) / sum(turn.prompt for turn in turns)


def turn_goals(turns: Sequence[Turn], *, quick: bool = False) -> list[Goal]:
    """Cold is that of the fastest variant. quick: times are no promise of a machine that others use too."""
    cold = min(median(pick(turns, kind=COLD, variant=variant)) for variant in {turn.variant for turn in turns})
    ours = pick(turns, variant=TRUNKS)
    taken = {kind: median(pick(ours, kind=kind)) for kind in (WARM, SWITCH, RESTART)}
    names = {WARM: "warm, beside cold", SWITCH: "after a switch, beside cold", RESTART: "after a restart, beside cold"}
    goals = [Goal(f"{names[k]}: faster by", cold / taken[k], "at least", FASTER, "x", not quick) for k in taken]
    slower = taken[RESTART] / taken[WARM]
    goals.append(Goal("after a restart, beside warm: slower by", slower, "at most", RESTART_TO_WARM, "x", not quick))
    worst = max(turn.read / turn.prompt for turn in ours if turn.kind != COLD)
    return [*goals, Goal("most that a turn after an agent's first read of its prompt", worst, "under", READ_SHARE, "%")]


def scale_goals(turns: Sequence[Turn]) -> list[Goal]:
    """For the largest number of agents, beside warm turns of eight."""
    ours = pick(turns, variant=TRUNKS)
    most = max(turn.agents for turn in ours)
    warm = median(pick(ours, kind=WARM, agents=min(most, WARM_AGENTS)))
    largest = pick(ours, kind=SWITCH, agents=most)
    return [
        Goal(f"{most} agents, beside warm: slower by", median(largest) / warm, "at most", SCALE_TO_WARM),
        Goal(f"{most} agents: read again", read_share(largest), "under", SCALE_READ_SHARE, "%"),
    ]


def turn_table(turns: Sequence[Turn]) -> list[str]:
    lines = [f"| seconds to the first word, median (n) | {' | '.join(HEADINGS)} | read after an agent's first turn |"]
    lines.append("|---|---:|---:|---:|---:|---:|")
    for variant in dict.fromkeys(turn.variant for turn in turns):
        mine = pick(turns, variant=variant)
        later = [turn for turn in mine if turn.kind != COLD]
        cells = [_cell(pick(mine, kind=kind)) for kind in KINDS]
        worst = max(turn.read / turn.prompt for turn in later)
        lines.append(f"| {variant} | {' | '.join(cells)} | {read_share(later):.1%}, a turn at most {worst:.1%} |")
    return lines


def scale_table(turns: Sequence[Turn]) -> list[str]:
    """One row a number of agents and variant, and the same as bars."""
    lines = ["| agents | | seconds to the first word, median (n) | warm | prompt tokens read again |"]
    lines.append("|---:|---|---:|---:|---:|")
    rows = [(count, variant) for count in sorted({t.agents for t in turns}) for variant in _variants(turns)]
    shown = {row: pick(turns, kind=SWITCH, agents=row[0], variant=row[1]) for row in rows}
    for (count, variant), mine in shown.items():
        warm = pick(turns, kind=WARM, agents=count, variant=variant)
        lines.append(f"| {count} | {variant} | {_cell(mine)} | {_cell(warm)} | {read_share(mine):.1%} |")
    medians = {row: median(mine) for row, mine in shown.items()}
    longest = max(medians.values())
    width = max(len(variant) for _, variant in rows)
    bars = [f"{count:4} {variant:{width}} {bar(medians[count, variant], longest)}" for count, variant in rows]
    return [*lines, "", "```", *bars, "```"]


def bar(value: float, longest: float) -> str:
    """As long as the value is; what is above 0 shows."""
    return f"{'#' * max(1, round(BAR * value / longest))} {seconds(value)}"


def goal_table(goals: Iterable[Goal]) -> list[str]:
    return ["| goal | measured | wanted | |", "|---|---:|---:|---|", *map(str, goals)]


def states(turns: Iterable[Turn]) -> str:
    """How often the trunk was in which state, by kind of turn: "cold: 8 baked; warm: 40 warm"."""
    counted = Counter((turn.kind, turn.state) for turn in turns)
    told = [", ".join(f"{n} {state}" for (k, state), n in counted.items() if k == kind) for kind in KINDS]
    return "; ".join(f"{kind}: {text}" for kind, text in zip(KINDS, told, strict=True) if text)


def seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.0f} ms"


def _cell(turns: Sequence[Turn]) -> str:
    return f"{seconds(median(turns))} ({len(turns)})" if turns else ""


def _variants(turns: Iterable[Turn]) -> list[str]:
    return list(dict.fromkeys(turn.variant for turn in turns))
