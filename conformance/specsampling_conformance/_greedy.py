"""Is a text the model's greedy text? A numeric tie is told from a bug by its margin."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from specsampling import Model
from specsampling_conformance._host import Array, host_copy
from specsampling_conformance._oracle import block_logits, padded_length
from specsampling_conformance._trial import DELTA_CAPS

__all__ = ["GreedyComparison", "compare_greedy"]


class GreedyComparison(NamedTuple):
    """How a text compares with greedy decoding.

    Attributes
    ----------
    verdict : {"equal", "numeric tie", "bug"}
        ``"numeric tie"`` where each token that is not the likeliest is so near to it that rounding decides.
    position : int or None
        Index of the first new token that is not the likeliest; of the worst one where that is a bug.
    margin : float or None
        By how much its logit falls short of the largest there.
    tolerance : float
        Largest margin that is put down to rounding.
    delta : float
        Largest difference of logits between the text scored as one block and token by token.

    Examples
    --------
    >>> import numpy as np
    >>> from specsampling_conformance import compare_greedy
    >>> from specsampling_numpy import TableModel
    >>> model = TableModel(np.array([0.0, 1.0, 1.0]), logits=True)
    >>> tie, bug = compare_greedy(model, [0], [1, 2]), compare_greedy(model, [0], [1, 2, 0])
    >>> tie.verdict, tie.position, tie.margin
    ('numeric tie', 1, 0.0)
    >>> bug.verdict, bug.position, bug.margin
    ('bug', 2, 1.0)
    """

    verdict: Literal["equal", "numeric tie", "bug"]
    position: int | None
    margin: float | None
    tolerance: float
    delta: float

    def __str__(self) -> str:
        if self.verdict == "equal":
            return "equal"
        short = f"new token {self.position} falls short by {self.margin:.3g}"
        return f"{self.verdict}: {short} (rounding: {self.tolerance:.3g})"


def compare_greedy(
    model: Model[Any], prompt: Sequence[int], tokens: Sequence[int], *, tolerance: float | None = None
) -> GreedyComparison:
    """Compare new tokens with what plain greedy decoding of a model would emit.

    Every token is held against the logits of the text before it, so that a tie in the middle does not make everything
    after it look wrong.

    Parameters
    ----------
    model : Model
        The model whose greedy text it should be.
    prompt : sequence of int
        The prompt.
    tokens : sequence of int
        The new tokens.
    tolerance : float, optional
        Margin of logits up to which a token counts as tied. By default twice the difference between a block and single
        steps, measured on this very text, but never more than the cap of the logits' dtype.

    Returns
    -------
    GreedyComparison
        The verdict, and where it was made.

    Examples
    --------
    >>> import numpy as np
    >>> from specsampling_conformance import compare_greedy
    >>> from specsampling_numpy import TableModel
    >>> model = TableModel(np.array([0.0, 1.0, 1.0]), logits=True)
    >>> compare_greedy(model, [0], [1, 1]).verdict, compare_greedy(model, [0], [1, 2]).verdict
    ('equal', 'numeric tie')
    >>> print(compare_greedy(model, [0], [1, 0]))
    bug: new token 1 falls short by 1 (rounding: 4.44e-16)
    """
    text = [int(token) for token in (*prompt, *tokens)]
    start = len(text) - len(tokens)
    if start == 0:
        raise ValueError("`prompt` must not be empty")
    cache = model.init_cache(1, padded_length(len(text)))
    rows = []
    logits: Array = None
    for token in text[:-1]:
        logits, cache = model.score(cache, np.array([[token]], dtype=np.int32))
        rows.append(host_copy(logits)[0, -1])
    if not tokens:
        return GreedyComparison("equal", None, None, tolerance or 0.0, 0.0)
    steps = np.stack(rows)
    dtype = str(logits.dtype).rpartition(".")[2]
    finite = np.isfinite(steps)
    delta = float(np.max(np.abs(np.where(finite, block_logits(model, text[:-1]) - steps, 0.0))))
    if tolerance is None:
        scale = max(1.0, float(np.max(np.abs(steps[finite]), initial=0.0)))
        cap = DELTA_CAPS.get(dtype, DELTA_CAPS["float32"])
        tolerance = 2 * min(delta, cap * scale) + 2 * scale * float(np.finfo(np.float64).eps)
    margins = [float(row.max() - row[token]) for row, token in zip(steps[start - 1 :], tokens, strict=True)]
    others = [
        position
        for position, (row, token) in enumerate(zip(steps[start - 1 :], tokens, strict=True))
        if int(np.argmax(row)) != int(token)
    ]
    if not others:
        return GreedyComparison("equal", None, None, tolerance, delta)
    for position in others:
        if not margins[position] <= tolerance:
            return GreedyComparison("bug", position, margins[position], tolerance, delta)
    return GreedyComparison("numeric tie", others[0], margins[others[0]], tolerance, delta)
