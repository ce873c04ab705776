"""Counts against a script written by hand."""

import numpy as np
import pytest

from specsampling import PhaseTimes, RoundInfo, Stats, generate
from specsampling._results import StatsBuilder
from specsampling_numpy import TableModel


def info(lookahead, proposed, tested, accepted, emitted, *, overlap=0.0, draft_calls=0, point_mass=False, times=()):
    """Return the report of a round; counts are lists with an entry per row."""
    rows = len(proposed)
    counts = (np.array(values) for values in (emitted, proposed, tested, accepted))
    return RoundInfo(
        lookahead,
        np.arange(rows),
        np.zeros((rows, lookahead + 1), int),
        *counts,
        np.full(rows, overlap),
        None,
        np.full(rows, None),
        draft_calls,
        point_mass,
        PhaseTimes(*times),
    )


def test_counts_of_a_script_written_by_hand():  # fault #146, #149
    builder = StatsBuilder({"lookahead": "script"}, prefill=0.5)
    builder.add(info(4, [4], [4], [4], [5], overlap=3.5, draft_calls=4, times=(0, 1, 2, 3)))
    builder.add(info(2, [2], [2], [1], [2], overlap=1.25, draft_calls=2, times=(0, 1, 2, 3)))
    builder.add(info(0, [0], [0], [0], [1]))
    stats = builder.build()
    assert stats == Stats(
        rounds=3,
        target_calls=3,
        draft_calls=6,
        proposed=6,
        tested=6,
        accepted=5,
        emitted=8,
        accepted_per_slot=(2, 1, 1, 1),
        tested_per_slot=(2, 2, 1, 1),
        accepted_histogram=(1, 1, 0, 0, 1),
        expected_accepted=4.75,
        undrafted=0,
        point_mass_proposed=0,
        times=PhaseTimes(0.5, 2, 4, 6),
        config={"lookahead": "script"},
    )
    assert stats.acceptance_rate == 5 / 6
    assert stats.tokens_per_target_call == 8 / 3
    assert stats.times.total == 12.5


def test_rows_are_added_up_and_those_that_proposed_nothing_counted():
    builder = StatsBuilder({}, prefill=0.0)
    builder.add(info(2, [2, 0, 1], [1, 0, 1], [0, 0, 1], [1, 1, 2], overlap=0.25, point_mass=True))
    builder.add(info(0, [0, 0, 0], [0, 0, 0], [0, 0, 0], [1, 1, 1], point_mass=True))
    stats = builder.build()
    assert (stats.rounds, stats.target_calls, stats.proposed, stats.tested, stats.accepted) == (2, 2, 3, 2, 1)
    assert (stats.emitted, stats.undrafted, stats.point_mass_proposed) == (7, 1, 3)
    assert (stats.accepted_per_slot, stats.tested_per_slot, stats.accepted_histogram) == ((1, 0), (2, 0), (5, 1, 0))
    assert stats.expected_accepted == 0.75


def test_rates_are_none_before_anything_was_tested():  # fault #147
    for stats in (Stats(), StatsBuilder({}, prefill=0.0).build()):
        assert stats.acceptance_rate is None
        assert stats.tokens_per_target_call is None
    plain = generate(TableModel([0.5, 0.5]), None, [0], max_new_tokens=3).stats
    assert plain.acceptance_rate is None
    assert plain.tokens_per_target_call == 1.0


@pytest.mark.parametrize("accepted", range(3))
def test_flags_mark_the_accepted_tokens(accepted):
    report = info(2, [2], [2], [accepted], [accepted + 1])
    assert report.from_draft.tolist() == [[slot < accepted for slot in range(3)]]


def test_stats_change_only_with_new_rounds():
    builder = StatsBuilder({}, prefill=0.0)
    before = builder.build()
    builder.add(info(1, [1], [1], [1], [2]))
    assert before.emitted == 0
    assert builder.build().emitted == 2
