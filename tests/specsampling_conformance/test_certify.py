"""Certificates: the numbers promised are the numbers that simulation finds."""

import math

import numpy as np
import pytest

from specsampling_conformance._certify import (
    certified_tv,
    certify,
    least_detectable,
    noncentral_chi2_cdf,
    power,
    rejection_rates,
)


def test_noncentral_chi_square_agrees_with_published_values():
    # Central: P(chi2_2 <= x) = 1 - exp(-x / 2). Noncentral: Patnaik (1949), Table 1: 4 degrees, noncentrality 4.
    assert noncentral_chi2_cdf(3.0, 2, 0.0) == pytest.approx(1 - math.exp(-1.5), abs=1e-12)
    assert noncentral_chi2_cdf(17.309, 4, 4.0) == pytest.approx(0.95, abs=1e-4)


@pytest.mark.statistical
def test_noncentral_chi_square_agrees_with_simulation():
    # Within five standard errors: false-alarm rate below 1e-6 a point.
    draws = np.random.default_rng(0).noncentral_chisquare(80, 200, size=40_000)
    for x in (200.0, 250.0, 280.0, 330.0):
        exact = noncentral_chi2_cdf(x, 80, 200)
        assert abs(np.mean(draws <= x) - exact) < 5 * math.sqrt(exact * (1 - exact) / 40_000)


@pytest.mark.parametrize(
    ("k", "tv", "designed"), [(81, 0.05, 20_263), (64, 0.01, 470_000), (81, 0.01, 470_000), (512, 0.01, 1_000_000)]
)
def test_sample_sizes_are_those_of_the_design(k: int, tv: float, designed: int):
    # The design's figures came from trials. Ours are calculated: 20,461, 468,597, 503,407 and 1,001,247.
    assert certify(k, tv) == pytest.approx(designed, rel=0.075)


def test_five_batches_of_4096_certify_a_twentieth_over_81_cells():
    assert certify(81, 0.05) <= 5 * 4096
    assert certified_tv(81, 5 * 4096) <= 0.05


def test_certified_tv_is_the_inverse_of_certify():
    for k, tv in ((9, 0.1), (81, 0.05), (216, 0.01)):
        n = certify(k, tv)
        assert certified_tv(k, n) == pytest.approx(tv, rel=1e-3)
        assert certified_tv(k, n - n // 50) > tv


def test_too_few_samples_certify_nothing():
    assert certified_tv(81, 20) == 1.0
    assert certified_tv(81, 0) == 1.0


def test_least_detectable_law_has_the_total_variation_asked_for():
    law = np.random.default_rng(1).dirichlet(np.ones(81)).reshape(3, 3, 3, 3)
    moved = least_detectable(law, 0.05, np.random.default_rng(2))
    assert moved.sum() == pytest.approx(1.0)
    assert 0.5 * np.abs(moved - law).sum() == pytest.approx(0.05)
    # Chi-square is within one per cent of the smallest possible, 4 tv^2.
    assert np.sum((moved - law) ** 2 / law) <= 4 * 0.05**2 * 1.01


@pytest.mark.statistical
@pytest.mark.parametrize("concentration", [None, 1.0, 0.3])
def test_power_at_the_certified_size_is_what_was_promised(concentration: float | None):
    # beta = 0.05 so that 1500 runs can see it; a miss rate above beta plus five standard errors fails (false-alarm
    # rate below 1e-6). Uniform, ordinary and very uneven laws of 81 cells.
    rng = np.random.default_rng(7)
    law = np.full(81, 1 / 81) if concentration is None else rng.dirichlet(np.full(81, concentration))
    beta, streams = 0.05, 1500
    n = certify(81, 0.05, beta=beta)
    rates = rejection_rates(
        law, least_detectable(law, 0.05, rng), alpha=2e-8, looks=1, batch_size=n, num_streams=streams, rng=rng
    )
    assert 1 - rates.rate <= beta + 5 * math.sqrt(beta * (1 - beta) / streams)


def test_half_the_certified_size_is_not_enough():
    # The control for the test above.
    rng = np.random.default_rng(8)
    law = np.full(81, 1 / 81)
    rates = rejection_rates(
        law,
        least_detectable(law, 0.05, rng),
        alpha=2e-8,
        looks=1,
        batch_size=certify(81, 0.05, beta=0.05) // 2,
        num_streams=200,
        rng=rng,
    )
    assert rates.rate < 0.5


def test_power_grows_with_samples_and_with_distance():
    assert power(81, 0.05, 10_000) < power(81, 0.05, 15_000) < power(81, 0.05, 20_000)
    assert power(81, 0.03, 20_000) < power(81, 0.05, 20_000)


@pytest.mark.parametrize(("k", "tv"), [(1, 0.1), (9, 0.0), (9, 0.6)])
def test_impossible_requests_are_refused(k: int, tv: float):
    with pytest.raises(ValueError, match="must"):
        certify(k, tv)
