"""The situations in which T1 enumerates: which models, which prompts and settings, how many tokens are drafted when."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

__all__ = ["Row", "SITUATIONS", "Situation"]


class Row(NamedTuple):
    """A kind of row: its scenario, its sampling settings as the oracle takes them, and the draft's (None: the same)."""

    prompt: tuple[int, ...]
    max_new_tokens: int
    settings: Mapping[str, Any] = {}
    draft_settings: Mapping[str, Any] | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What is enumerated together.

    Attributes
    ----------
    claim : str
        The clause: when the law holds.
    rows : tuple of Row
        Kinds of rows in the batch.
    pair : str
        The frozen pair.
    target, drafter : str
        Who plays: ``"target"``, ``"draft"``, ``"own_target"``, ``"own_draft"``; for the drafter also ``"lookup"``,
        ``"none"``.
    schedule : tuple of int
        K of each round, repeated.
    draft_pair : str or None
        The pair that the draft comes from; None for `pair`.
    end_tokens : tuple of int
        Ids that end a row.
    min_new_tokens : int
        Tokens before which no end token may come.
    stop_sequences : tuple of tuple of int
        Runs of ids that end a row.
    every_column : bool
        Branch in the accept decisions after the first rejection too.
    compiled : bool
        Let the decoder use the adapter's compiled round where there is one.
    requires : tuple of str
        Capabilities that the situation's checks require.
    few : mapping
        Fields that are others where shapes are to be few; see `Subject.spares`. A round is compiled for its K, its
        vocabularies and its settings, whatever the pair, so situations that agree in those share it.
    leading : bool
        Whether the situation is gone through in a run's leading dtypes only; see `Subject.leads`.
    """

    claim: str
    rows: tuple[Row, ...]
    pair: str = "three_a"
    target: str = "target"
    drafter: str = "draft"
    schedule: tuple[int, ...] = (2,)
    draft_pair: str | None = None
    end_tokens: tuple[int, ...] = ()
    min_new_tokens: int = 0
    stop_sequences: tuple[tuple[int, ...], ...] = ()
    every_column: bool = False
    compiled: bool = True
    requires: tuple[str, ...] = ()
    few: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    leading: bool = False


_PLAIN = (Row((1,), 3), Row((2, 0, 1), 3))

SITUATIONS = {
    "fixed_lookahead": Situation(claim="with the same lookahead in every round", rows=_PLAIN),
    "lookahead_then_none": Situation(
        claim="when rounds of K = 2 and K = 0 alternate, so that a stale cache is not overwritten",
        rows=(Row((1,), 4), Row((0, 2), 3)),
        pair="three_b",
        schedule=(2, 0),
    ),
    "none_then_lookahead": Situation(
        claim="when rounds of K = 0 and K = 2 alternate, so that the draft has tokens to catch up on",
        rows=(Row((2,), 4), Row((0, 1), 3)),
        schedule=(0, 2),
    ),
    "growing_lookahead": Situation(
        claim="when K changes from round to round",
        rows=(Row((1, 2), 4, {"top_k": 2}),),
        pair="three_b",
        schedule=(1, 3),
        # K = 3 is in the replays.
        few={"rows": (Row((1, 2), 4),), "schedule": (1, 2)},
        leading=True,
    ),
    "four_ids": Situation(
        claim="with four ids and prompts and limits of different lengths in one batch",
        rows=(Row((3,), 2), Row((0, 2, 1, 3), 2), Row((1, 1), 1)),
        pair="four",
        schedule=(2, 1),
        few={"schedule": (2,)},
        leading=True,
    ),
    "every_answer": Situation(
        claim="whatever is answered after a row's first rejection",
        rows=(Row((2, 1), 3),),
        pair="three_b",
        every_column=True,
    ),
    "self_draft": Situation(
        claim="when the target drafts for itself, and every token drafted is accepted",
        rows=_PLAIN,
        pair="three_b",
        drafter="target",
        schedule=(2, 0, 1),
    ),
    "no_drafter": Situation(claim="with no drafter", rows=_PLAIN, drafter="none", schedule=(0,)),
    "prompt_lookup": Situation(
        claim="when tokens are chosen by prompt lookup (point masses)",
        rows=(Row((1, 0, 1), 4), Row((2, 2), 3), Row((0, 1, 2), 3)),
        pair="three_b",
        drafter="lookup",
        schedule=(2, 0, 2),
    ),
    "end_tokens": Situation(
        claim="with end tokens, which end a row wherever in the block they are accepted or drawn",
        rows=(Row((1,), 4), Row((0, 2), 3)),
        schedule=(2, 1),
        end_tokens=(2,),
    ),
    "min_new_tokens": Situation(
        claim="when end tokens are forbidden until enough tokens were emitted, position by position and before any"
        " filter",
        rows=(
            Row((1,), 4),
            Row((0, 2), 3, {"top_k": 1}),
            Row((2, 0), 4, {"top_p": 0.7}),
            Row((1, 1), 3, {"temperature": 0.0}),
        ),
        end_tokens=(2,),
        min_new_tokens=2,
        few={"schedule": (1,)},
        leading=True,
    ),
    "stop_sequences": Situation(
        claim="with stop sequences, which end a row where they are complete in its new tokens, within a block or across"
        " blocks",
        rows=(Row((1, 0), 3), Row((2, 2), 3)),
        pair="three_b",
        stop_sequences=((0, 1), (2, 2), (1, 0, 2)),
    ),
    "wider_draft": Situation(
        claim="when the draft knows an id that the target does not (`pad_vocab`)",
        rows=(Row((1,), 3), Row((0, 2), 3, {"top_p": 0.8})),
        draft_pair="four",
        few={"rows": (Row((1,), 3), Row((0, 2), 2))},
        leading=True,
    ),
    "narrower_draft": Situation(
        claim="when the target knows an id that the draft does not (`pad_vocab`), and is fed as id 0",
        rows=(Row((3, 1), 3), Row((0,), 2)),
        pair="four",
        draft_pair="three_a",
        leading=True,
    ),
    "short_draft": Situation(
        claim="when rows grow past the draft's context, and go on without proposals",
        rows=(Row((1, 2), 3), Row((0, 2, 1), 3), Row((2, 1, 0, 1, 2, 0), 2)),
        draft_pair="short",
        leading=True,
    ),
    "settings": Situation(
        claim="when each row has a temperature, top-k, top-p and min-p of its own, greedy rows among them",
        rows=(
            Row((1, 0), 3, {"temperature": 0.6}),
            Row((1, 0), 3, {"top_k": 2}),
            Row((1, 0), 3, {"top_p": 0.7}),
            Row((1, 0), 3, {"temperature": 0.5, "top_p": 0.7}),
            Row((1, 0), 3, {"min_p": 0.3}),
            Row((1, 0), 3, {"temperature": 0.0}),
            Row((1, 0), 2, {"temperature": 1.7, "top_k": 3, "top_p": 0.8, "min_p": 0.1}),
        ),
    ),
    "draft_settings": Situation(
        claim="when the draft has settings of its own",
        rows=(
            Row((0,), 3, {"temperature": 0.8}, {"temperature": 1.5}),
            Row((2, 1), 3, {"top_p": 0.9}, {"temperature": 1.5}),
        ),
        schedule=(2, 1),
        few={"schedule": (1,)},
        leading=True,
    ),
    "row_draft_settings": Situation(
        claim="when the draft has other settings in each row, greedy ones among them",
        rows=(
            Row((0, 1), 3, {}, {"temperature": 0.5}),
            Row((0, 1), 3, {"temperature": 0.7}, {"top_k": 2}),
            Row((0, 1), 3, {"top_k": 2}, {"temperature": 0.0}),
            Row((0, 1), 3, {"temperature": 0.0}, {"temperature": 1.8, "top_p": 0.9}),
        ),
        pair="three_b",
        few={"schedule": (1,)},
        leading=True,
    ),
    "greedy_draft": Situation(
        claim="when the draft is greedy and the target is not",
        rows=tuple(row._replace(draft_settings={"temperature": 0.0}) for row in _PLAIN),
        pair="three_b",
        few={"schedule": (1,)},
        leading=True,
    ),
    "other_draft": Situation(
        claim="with a draft of another backend",
        rows=_PLAIN,
        pair="three_b",
        drafter="own_draft",
        schedule=(2, 0),
        leading=True,
    ),
    "as_draft": Situation(
        claim="with the adapter's model as the draft of another backend's target",
        rows=_PLAIN,
        target="own_target",
        schedule=(2, 0),
        few={"schedule": (1,)},
        leading=True,
    ),
    "not_compiled": Situation(
        claim="without the compiled round, too",
        # Few shapes: an eager framework compiles every operation for each.
        rows=(Row((1,), 3),),
        schedule=(1, 0),
        compiled=False,
        requires=("compile_round",),
        few={"schedule": (1,)},
        leading=True,
    ),
}
"""Every situation by the last part of its checks' ids."""
