"""What speculation should gain."""

from fractions import Fraction

import pytest

from specsampling import best_lookahead, expected_speedup, expected_tokens


def test_expected_tokens_is_the_geometric_sum() -> None:  # fault #131
    assert expected_tokens(0.8, 4) == pytest.approx(3.3616)
    assert expected_tokens(0.8, 4) == pytest.approx((1 - 0.8**5) / (1 - 0.8))


@pytest.mark.parametrize(("acceptance", "tokens"), [(0.0, 1.0), (1.0, 6.0)])
def test_expected_tokens_runs_from_one_to_the_whole_block(acceptance: float, tokens: float) -> None:
    assert expected_tokens(acceptance, 5) == tokens


@pytest.mark.parametrize("acceptance", [5e-324, 1e-9, 0.3, 0.999, 1 - 2.0**-53])
@pytest.mark.parametrize("lookahead", [0, 1, 7, 1000])
def test_expected_tokens_loses_nothing_to_rounding(acceptance: float, lookahead: int) -> None:
    exact = sum(Fraction(acceptance) ** slot for slot in range(min(lookahead, 20) + 1))
    if lookahead > 20:  # the sum of so many exact fractions takes long
        exact = (1 - Fraction(acceptance) ** (lookahead + 1)) / (1 - Fraction(acceptance))
    assert expected_tokens(acceptance, lookahead) == pytest.approx(float(exact), rel=4e-16)


def test_a_lookahead_of_any_size_is_counted_at_once() -> None:
    assert expected_tokens(0.5, 2**31) == 2.0
    assert expected_tokens(1.0, 2**31) == 2.0**31 + 1


def test_plain_decoding_neither_gains_nor_loses() -> None:
    assert expected_speedup(0.3, 0, draft_cost=0.7, block_cost=1.0) == 1.0


def test_no_gain_means_lookahead_zero() -> None:  # fault #131
    assert best_lookahead(0.2, draft_cost=0.3, block_costs={1: 1.1, 2: 1.2, 4: 1.4}) == 0


def test_the_block_cost_decides_between_lookaheads() -> None:
    assert best_lookahead(0.8, draft_cost=0.05, block_costs={2: 1.0, 4: 1.0, 8: 1.0}) == 8
    assert best_lookahead(0.8, draft_cost=0.05, block_costs={2: 1.1, 4: 1.9, 8: 4.0}) == 2


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ((1.5, 2, 0.1, 1.0), "acceptance"),
        ((-0.1, 2, 0.1, 1.0), "acceptance"),
        ((float("nan"), 2, 0.1, 1.0), "acceptance"),
        ((0.5, -1, 0.1, 1.0), "lookahead"),
        ((0.5, 2, -0.1, 1.0), "draft_cost"),
        ((0.5, 2, 0.1, 0.0), "block_cost"),
    ],
)
def test_numbers_out_of_range_are_refused_by_name(arguments: tuple[float, int, float, float], name: str) -> None:
    acceptance, lookahead, draft_cost, block_cost = arguments
    with pytest.raises(ValueError, match=f"`{name}`"):
        expected_speedup(acceptance, lookahead, draft_cost=draft_cost, block_cost=block_cost)
