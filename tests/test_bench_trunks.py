"""The arithmetic of scripts/bench_trunks: its plan, its medians and shares, and which goals it calls missed."""

from __future__ import annotations

import itertools
import random

import pytest
from trunk_figures import (
    BAR,
    COLD,
    RESTART,
    SWITCH,
    TRUNKS,
    WARM,
    Goal,
    Turn,
    bar,
    instructions,
    question,
    read_share,
    scale_goals,
    scale_table,
    states,
    turn_goals,
    turn_table,
    visits,
)

BARE = "bare"


def turns(variant: str = TRUNKS, **seconds: float) -> list[Turn]:
    """Three of each kind, one much slower and one a little faster than said; 2 of 100 tokens read when not cold."""
    taken = {COLD: 10.0, WARM: 0.1, SWITCH: 0.2, RESTART: 0.24} | seconds
    return [
        Turn(variant, kind, middle * factor, 100, 100 if kind == COLD else 2)
        for kind, middle in taken.items()
        for factor in (3.0, 0.9, 1.0)
    ]


def missed(goals: list[Goal]) -> list[str]:
    return [goal.what for goal in goals if not goal.ok]


def test_every_agent_comes_twice_running_in_each_round() -> None:
    plan = [(visit.round, visit.agent, visit.kinds) for visit in visits(2, 3)]

    assert plan == [
        (0, 0, (COLD, WARM)),
        (0, 1, (COLD, WARM)),
        (1, 0, (SWITCH, WARM)),
        (1, 1, (SWITCH, WARM)),
        (2, 0, (RESTART, WARM)),
        (2, 1, (RESTART, WARM)),
    ]


@pytest.mark.parametrize(("rounds", "after"), [(3, 2), (5, 3)])
def test_servers_are_killed_once_after_the_middle_round(rounds: int, after: int) -> None:
    killed = [(visit.round, visit.agent) for visit in visits(4, rounds) if visit.restarts]

    assert killed == [(after, 0)]


def test_a_hundred_agents_have_texts_that_begin_differently_and_stay_the_same() -> None:
    texts = [instructions(agent, 2000) for agent in range(100)]

    assert len({text.split()[0] for text in texts}) == 100
    assert texts[7] == instructions(7, 2000)
    assert all(1500 <= len(text.split()) <= 2000 for text in texts)


def test_no_question_is_asked_twice() -> None:
    chance = random.Random(0)

    assert len({question(chance) for _ in range(500)}) == 500


def test_goals_are_met_by_medians() -> None:
    goals = turn_goals([*turns(), *turns(BARE, cold=12.0)])

    assert missed(goals) == []
    assert [round(goal.value, 2) for goal in goals] == [100, 50, 41.67, 2.4, 0.02]


@pytest.mark.parametrize(
    ("slow", "named"),
    [
        ({"warm": 0.51, "restart": 0.4}, "warm, beside cold"),
        ({"switch": 0.51}, "after a switch, beside cold"),
        ({"warm": 0.3, "restart": 0.51}, "after a restart, beside cold"),
        ({"restart": 0.26}, "after a restart, beside warm"),
    ],
)
def test_a_slow_kind_of_turn_misses_its_goal(slow: dict[str, float], named: str) -> None:
    goals = turn_goals([*turns(TRUNKS, **slow), *turns(BARE)])

    (miss,) = missed(goals)
    assert miss.startswith(named)


def test_cold_is_that_of_the_fastest_variant() -> None:
    """Reading cold may be slower in the product, which saves; that must not make its warm turns look better."""
    goals = turn_goals([*turns(cold=30.0), *turns(BARE, cold=3.0)])

    assert round(goals[0].value) == 30
    assert missed(goals) == [goal.what for goal in goals[1:3]]


def test_one_turn_that_reads_a_tenth_again_misses_the_goal() -> None:
    again = Turn(TRUNKS, WARM, 0.1, 100, 10)

    assert missed(turn_goals([*turns(), again, *turns(BARE)])) == [
        "most that a turn after an agent's first read of its prompt"
    ]


def test_what_others_read_again_is_no_miss() -> None:
    assert missed(turn_goals([*turns(), *turns(BARE), Turn(BARE, RESTART, 10.0, 100, 100)])) == []


def test_quick_fails_for_what_is_read_and_not_for_times() -> None:
    slow = turns(warm=9.0, switch=9.0, restart=90.0)
    goals = turn_goals([*slow, Turn(TRUNKS, WARM, 9.0, 100, 50)], quick=True)

    assert len(missed(goals)) == 5
    assert [goal.what for goal in goals if goal.binding] == [
        "most that a turn after an agent's first read of its prompt"
    ]
    assert "MISSED (does not count here)" in str(goals[0])
    assert str(goals[-1]).endswith("| 50.0% | under 10% | MISSED |")


def lap(agents: int, seconds: float, read: int, variant: str = TRUNKS) -> list[Turn]:
    switched = Turn(variant, SWITCH, seconds, 1000, read, "restored", agents)
    return [switched] * agents + [Turn(variant, WARM, 0.1 if agents <= 8 else 0.2, 1000, 5, "warm", agents)]


def test_scale_is_measured_by_the_most_agents_beside_eight_warm_ones() -> None:
    goals = scale_goals([*lap(8, 0.2, 5), *lap(100, 0.29, 140), *lap(100, 9.0, 1000, BARE)])

    assert [round(goal.value, 2) for goal in goals] == [2.9, 0.14]
    assert missed(goals) == []


@pytest.mark.parametrize(("seconds", "read", "named"), [(0.31, 5, "slower by"), (0.2, 150, "read again")])
def test_scale_misses(seconds: float, read: int, named: str) -> None:
    goals = scale_goals([*lap(8, 0.2, 5), *lap(100, seconds, read)])

    (miss,) = missed(goals)
    assert named in miss


def test_shares_are_of_tokens_and_not_of_turns() -> None:
    assert read_share([Turn(TRUNKS, WARM, 1, 10, 10), Turn(TRUNKS, WARM, 1, 90, 0)]) == pytest.approx(0.1)


def test_table_has_a_row_for_each_variant_and_a_cell_for_each_kind() -> None:
    head, _, ours, bare = turn_table([*turns(), *turns(BARE, restart=11.0)])

    assert head.count("|") == ours.count("|") == bare.count("|") == 7
    assert ours == "| trunks | 10.00 s (3) | 100 ms (3) | 200 ms (3) | 240 ms (3) | 2.0%, a turn at most 2.0% |"
    assert "| 11.00 s (3) |" in bare


def test_bars_are_as_long_as_the_times_and_never_nothing() -> None:
    assert bar(9.0, 9.0) == "#" * BAR + " 9.00 s"
    assert bar(4.5, 9.0).count("#") == BAR // 2
    assert bar(0.001, 9.0) == "# 1 ms"


def test_scale_shows_both_variants_at_each_number_of_agents() -> None:
    lines = scale_table([*lap(8, 0.2, 5), *lap(1, 0.1, 5), *lap(8, 9.0, 1000, BARE), *lap(1, 0.1, 5, BARE)])
    rows, bars = (list(part) for kept, part in itertools.groupby(lines, bool) if kept)

    assert rows[2:] == [
        "| 1 | trunks | 100 ms (1) | 100 ms (1) | 0.5% |",
        "| 1 | bare | 100 ms (1) | 100 ms (1) | 0.5% |",
        "| 8 | trunks | 200 ms (8) | 100 ms (1) | 0.5% |",
        "| 8 | bare | 9.00 s (8) | 100 ms (1) | 100.0% |",
    ]
    assert bars[1:-1] == [
        "   1 trunks # 100 ms",
        "   1 bare   # 100 ms",
        "   8 trunks # 200 ms",
        f"   8 bare   {'#' * BAR} 9.00 s",
    ]


def test_states_are_counted_by_kind_of_turn() -> None:
    told = [Turn(TRUNKS, kind, 1, 1, 1, state) for kind, state in ((RESTART, "restored"), (COLD, "baked"))]

    assert states([*told, told[0]._replace(state="baked"), told[0]]) == "cold: 1 baked; restart: 2 restored, 1 baked"
