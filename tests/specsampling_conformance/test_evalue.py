"""The e-process: a martingale under the null, anytime valid, and blind to nothing it should see."""

import math

import numpy as np
import pytest

from specsampling_conformance._certify import rejection_rates
from specsampling_conformance._evalue import (
    ALPHA,
    CONCENTRATIONS,
    MAX_CHECKS,
    EProcess,
    log_e_value,
    log_gamma,
    log_mixture_ratio,
    neighbour_counts,
    neighbour_law,
    sequence_counts,
)


def test_log_gamma_agrees_with_the_standard_library():
    points = np.concatenate(
        [10.0 ** np.linspace(-300, 9, 2000), np.linspace(1e-3, 30, 3000), [1.0, 2.0, 9.999999, 10.0, 10.000001]]
    )
    exact = np.array([math.lgamma(point) for point in points])
    assert np.all(np.abs(log_gamma(points) - exact) <= 3e-14 * np.maximum(1.0, np.abs(exact) / 10))


def test_suite_wide_false_alarm_rate_is_one_in_a_million():
    assert pytest.approx(1e-6) == ALPHA * MAX_CHECKS


def test_grid_of_concentrations_is_ten_squared_to_ten_to_the_seventh_in_half_decades():
    assert pytest.approx(np.logspace(2, 7, 11)) == CONCENTRATIONS


def test_mixture_ratio_has_mean_one_under_the_law():
    # Exact: the sum over all count vectors of probability times ratio. A martingale's mean, no sampling.
    law = np.array([0.5, 0.3, 0.2])
    total, samples = 0.0, 12
    for first in range(samples + 1):
        for second in range(samples + 1 - first):
            counts = np.array([first, second, samples - first - second])
            probability = math.exp(math.lgamma(samples + 1) - sum(math.lgamma(c + 1) for c in counts))
            total += probability * float(np.prod(law**counts)) * math.exp(log_mixture_ratio(counts, law))
    assert total == pytest.approx(1.0, abs=1e-9)


def test_whole_e_value_has_mean_one_with_its_marginals():
    law = np.array([[0.4, 0.1], [0.2, 0.3]])
    total, samples = 0.0, 6
    for counts in np.ndindex(*(samples + 1,) * 4):
        if sum(counts) == samples:
            probability = math.exp(math.lgamma(samples + 1) - sum(math.lgamma(c + 1) for c in counts))
            table = np.array(counts).reshape(2, 2)
            total += probability * float(np.prod(law.ravel() ** counts)) * math.exp(log_e_value(table, law))
    assert total == pytest.approx(1.0, abs=1e-9)


def test_mixture_ratio_equals_a_direct_product_of_predictive_probabilities():
    law, draws = np.array([0.7, 0.2, 0.1]), [0, 2, 2, 1, 0, 2]
    ratios = []
    for concentration in CONCENTRATIONS:
        counts, ratio = np.zeros(3), 1.0
        for draw in draws:
            ratio *= (concentration * law[draw] + counts[draw]) / (concentration + counts.sum()) / law[draw]
            counts[draw] += 1
        ratios.append(ratio)
    assert float(log_mixture_ratio(np.bincount(draws, minlength=3), law)) == pytest.approx(
        math.log(np.mean(ratios)), abs=1e-8
    )


def test_a_cell_of_probability_zero_fails_at_once_and_is_named():
    test = EProcess([[0.5, 0.0], [0.25, 0.25]])
    test.update([[1, 0], [0, 0]])
    assert not test.rejected
    test.update([[0, 1], [0, 0]])
    assert test.rejected
    assert test.log_e == math.inf
    assert test.impossible == [(0, 1)]


def test_a_rejection_is_remembered_when_later_counts_look_innocent():
    test = EProcess([0.5, 0.5], alpha=0.01)
    test.update([60, 0])
    assert test.rejected
    test.update([0, 60])
    assert test.log_e < test.threshold
    assert test.rejected
    assert [look.num_samples for look in test.looks] == [60, 120]


def test_marginals_see_what_the_joint_does_not_yet():
    # A shift of one position's law is spread over 5^5 joint cells, too thin for the joint at this size.
    shifted = np.array([0.26, 0.185, 0.185, 0.185, 0.185])
    law = np.full((5,) * 5, 5.0**-5)
    alternative = law * 5 * shifted[:, None, None, None, None]
    counts = np.round(alternative * 20_000).astype(np.int64)
    joint = float(log_mixture_ratio(counts.ravel(), law.ravel()))
    assert joint < math.log(1 / ALPHA) < float(log_e_value(counts, law))


@pytest.mark.statistical
@pytest.mark.parametrize(("alpha", "seed"), [(0.05, 1), (0.01, 2)])
def test_alarm_rate_under_optional_stopping_stays_below_alpha(alpha: float, seed: int):
    # 1500 null streams, a look after every batch. False-alarm rate of this test: below 1e-6, since the true rate is at
    # most alpha (Ville) and the bound is alpha plus five standard errors.
    law = np.random.default_rng(seed).dirichlet(np.ones(27)).reshape(3, 3, 3)
    streams = 1500
    rates = rejection_rates(
        law, law, alpha=alpha, looks=40, batch_size=50, num_streams=streams, rng=np.random.default_rng(seed + 10)
    )
    assert rates.rate <= alpha + 5 * math.sqrt(alpha * (1 - alpha) / streams)


def test_same_samples_at_the_wrong_law_are_rejected():
    # The control for the test above: it can fail.
    rng = np.random.default_rng(3)
    law = rng.dirichlet(np.ones(27)).reshape(3, 3, 3)
    rates = rejection_rates(
        law, np.roll(law, 1), alpha=0.01, looks=40, batch_size=50, num_streams=50, rng=np.random.default_rng(4)
    )
    assert rates.rate == 1.0


def test_shared_uniforms_show_in_neighbouring_rows_and_not_in_the_rows_law():
    rng = np.random.default_rng(5)
    law = np.array([0.5, 0.3, 0.2])
    own = rng.choice(3, p=law, size=(500, 8))
    shared = np.repeat(rng.choice(3, p=law, size=(500, 4)), 2, axis=1)
    rows, pairs = EProcess(neighbour_law(law)), EProcess(neighbour_law(law))
    rows.update(neighbour_counts(own, 3))
    pairs.update(neighbour_counts(shared, 3))
    assert not rows.rejected
    assert pairs.rejected


def test_an_odd_row_has_no_neighbour_and_is_left_out():
    assert neighbour_counts([[0, 1, 2], [1, 1, 0]], 3).tolist() == [[0, 1, 0], [0, 1, 0], [0, 0, 0]]


def test_sequences_are_counted_by_position():
    assert sequence_counts([[0, 1], [0, 1], [1, 2]], (2, 3)).tolist() == [[0, 2, 0], [0, 0, 1]]


def test_an_id_out_of_range_is_an_error_and_not_a_count():
    with pytest.raises(ValueError, match="invalid entry"):
        sequence_counts([[0, 3]], (2, 3))


@pytest.mark.parametrize(
    ("law", "alpha", "message"),
    [
        ([0.5, 0.6], 0.1, "`law` must sum to one"),
        ([1.5, -0.5], 0.1, "non-negative"),
        ([0.5, math.nan], 0.1, "finite"),
        ([0.5, 0.5], 0.0, "`alpha`"),
    ],
)
def test_laws_that_are_none_are_refused(law: list[float], alpha: float, message: str):
    with pytest.raises(ValueError, match=message):
        EProcess(law, alpha)


def test_counts_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"`counts` must be integers of shape \(2,\)"):
        EProcess([0.5, 0.5]).update([1, 2, 3])
