"""Whether a target and a drafter fit together, and if not, why, in words."""

from typing import Any

from specsampling._drafting import Drafter, as_drafter
from specsampling._model import Model
from specsampling._requests import as_model

__all__ = ["check_compatibility"]


def check_compatibility(
    target: Model[Any], drafter: Model[Any] | Drafter[Any] | None, *, lookahead: int = 4, pad_vocab: bool = False
) -> list[str]:
    """List the reasons why `drafter` cannot draft for `target`; an empty list means that it can.

    Parameters
    ----------
    target : Model
        The target.
    drafter : Drafter, Model or None
        What would propose tokens.
    lookahead : int, default: 4
        Tokens drafted per round, K.
    pad_vocab : bool, default: False
        Whether vocabularies of different sizes are accepted.

    Returns
    -------
    list of str
        One full sentence for each obstacle. Only sizes can be compared here: that equal ids stand for equal text is
        for the caller, who has the tokenizers, to know.

    Raises
    ------
    TypeError
        If `target` is no model, or `drafter` neither a drafter nor a model.

    Examples
    --------
    >>> import numpy as np
    >>> from specsampling import check_compatibility
    >>> from specsampling_numpy import TableModel
    >>> check_compatibility(TableModel(np.ones(12) / 12), TableModel(np.ones(10) / 10))
    ['vocabulary sizes differ: the target has 12 ids, the draft 10; pass `pad_vocab=True` if the ids they share agree']
    """
    as_model("target", target)
    drafter = as_drafter(drafter)
    reasons = []
    draft_size = getattr(drafter, "vocab_size", None)
    if draft_size is not None and draft_size != target.vocab_size and not pad_vocab:
        reasons.append(
            f"vocabulary sizes differ: the target has {target.vocab_size} ids, the draft {draft_size}; pass "
            "`pad_vocab=True` if the ids they share agree"
        )
    for name, model in (("target", target), ("draft", drafter)):
        limit = getattr(model, "max_rollback", None)
        if limit is not None and lookahead + 1 > limit:
            remedy = f"use a lookahead of at most {limit - 1}" if limit else "no lookahead is short enough"
            reasons.append(
                f"`lookahead` = {lookahead} needs the {name} to roll back {lookahead + 1} tokens, and its "
                f"`max_rollback` is {limit}; {remedy}"
            )
    return reasons
