"""What speculation should gain, from acceptance and call times: arithmetic to choose K by."""

import math

__all__ = ["best_lookahead", "expected_speedup", "expected_tokens"]


def expected_tokens(acceptance: float, lookahead: int) -> float:
    r"""Return the mean number of tokens that a round emits.

    .. math:: 1 + \alpha + \dots + \alpha^K = \frac{1 - \alpha^{K + 1}}{1 - \alpha}

    Parameters
    ----------
    acceptance : float
        Chance that a slot's token is kept, 0 to 1, taken as equal and independent over slots.
    lookahead : int
        Tokens drafted per round, K.

    Returns
    -------
    float
        Tokens per round, 1 to K + 1.

    Raises
    ------
    ValueError
        For an acceptance outside 0 to 1 or a negative lookahead.

    References
    ----------
    Leviathan, Kalman and Matias 2023, equation 1 (arXiv 2211.17192).

    Examples
    --------
    >>> round(expected_tokens(0.8, 4), 4)
    3.3616
    """
    if not 0 <= acceptance <= 1:
        raise ValueError(f"`acceptance` must lie in 0 to 1, got {acceptance}")
    if lookahead < 0:
        raise ValueError(f"`lookahead` must not be negative, got {lookahead}")
    if lookahead == 0 or acceptance in (0, 1):
        return 1.0 + lookahead * acceptance
    # Of the two differences from one the upper has to be made without rounding the power first.
    return -math.expm1((lookahead + 1) * math.log(acceptance)) / (1 - acceptance)


def expected_speedup(acceptance: float, lookahead: int, *, draft_cost: float, block_cost: float) -> float:
    """Return how many times faster than plain decoding a round of this lookahead should be.

    Parameters
    ----------
    acceptance : float
        Chance that a slot's token is kept, 0 to 1.
    lookahead : int
        Tokens drafted per round, K.
    draft_cost : float
        Time of one draft step, in units of one single-token pass of the target.
    block_cost : float
        Time of the target's block of K + 1 tokens, in the same units; 1 where reading the weights is all that counts.

    Returns
    -------
    float
        Tokens per unit of time; above 1 speculation pays.

    Raises
    ------
    ValueError
        For an acceptance outside 0 to 1, a negative lookahead or cost, or a block that costs nothing.

    Examples
    --------
    >>> round(expected_speedup(0.8, 4, draft_cost=0.1, block_cost=1.2), 2)
    2.1
    """
    if draft_cost < 0:
        raise ValueError(f"`draft_cost` must not be negative, got {draft_cost}")
    if block_cost <= 0:
        raise ValueError(f"`block_cost` must be positive, got {block_cost}")
    return expected_tokens(acceptance, lookahead) / (lookahead * draft_cost + block_cost)


def best_lookahead(acceptance: float, *, draft_cost: float, block_costs: dict[int, float]) -> int:
    """Return the lookahead with the largest expected speed-up; 0 where none gains.

    Parameters
    ----------
    acceptance : float
        Chance that a slot's token is kept, 0 to 1.
    draft_cost : float
        Time of one draft step, in units of one single-token pass of the target.
    block_costs : dict
        For each K in question, the time of the target's block of K + 1 tokens in the same units. K = 0, plain decoding,
        costs 1 and need not be listed.

    Returns
    -------
    int
        The best K; the smallest of equals.

    Examples
    --------
    >>> best_lookahead(0.8, draft_cost=0.1, block_costs={2: 1.1, 4: 1.2, 8: 1.6})
    4
    >>> best_lookahead(0.1, draft_cost=0.5, block_costs={2: 1.1, 4: 1.2})
    0
    """
    gains = {
        lookahead: expected_speedup(acceptance, lookahead, draft_cost=draft_cost, block_cost=cost)
        for lookahead, cost in {0: 1.0, **block_costs}.items()
    }
    return min(gains, key=lambda lookahead: (-gains[lookahead], lookahead))
