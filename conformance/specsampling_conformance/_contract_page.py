"""The contract's page: the protocols as the core writes them, who owns which array, and every clause."""

import ast
import inspect
import textwrap

from specsampling import CONTRACT_VERSION, Drafter, Model
from specsampling_conformance._catalogue import TIERS, all_checks
from specsampling_conformance._checks import Check

__all__ = ["contract_page", "protocol_source"]

_TITLES = {
    "T0": "The cache",
    "T1": "The law, enumerated",
    "T2": "The law, sampled",
    "T3": "Whole systems",
}
_QUESTIONS = {
    "T0": "Does the cache do what it says? Every answer is held against a fresh recompute, row by row.\n"
    "No false alarms.",
    "T1": "Is the output law the target's? Every random decision is enumerated, and nothing is left to chance.\n"
    "No false alarms.",
    "T2": "Are the random streams right? Sequences are drawn and tested against the enumerated law.\n"
    "A whole run raises a false alarm with probability at most 1e-6.",
    "T3": "Do real models, mixed backends and replayed uniforms agree?\nNo false alarms.",
}
_REQUIREMENTS = {
    "rows": "take batches of two or more",
    "max_batch_size": "declare a `max_batch_size`",
    "!max_batch_size": "declare no `max_batch_size`",
    "per_row_rollback": "declare `per_row_rollback`",
    "!per_row_rollback": "declare `per_row_rollback=False`",
    "select": "declare `select`",
    "!select": "declare `select=False`",
    "compile_round": "declare `compile_round`",
    "!compile_round": "declare `compile_round=False`",
}

_INTRODUCTION = """\
# The contract, clause by clause

What an adapter is, in two protocols; what it may assume of arrays and caches; and the clauses, each of them a check of
the [conformance suite](conformance.md) under the check's id. An adapter that passes keeps the contract; nothing else is
asked of it. Messages and taste are not.

```{{note}}
This page is generated from the library and the suite: `python -m specsampling_conformance._generate`. A test fails when
it is stale.
```

Contract version {version}, {clauses} clauses; a run has those of them that the adapter's capabilities leave, which is
said in italics where a clause is not for all. `B` is the number of rows of a batch, `T` the tokens of a block, `V` the
vocabulary size, `K` the tokens drafted per round.

## The protocols

```py
{protocols}
```

{{class}}`specsampling.Model` and {{class}}`specsampling.Drafter` say what each member does. These members are all that
is needed. Powers that are optional are found by the presence of their names, never by a class:

| name | of | what it is |
|---|---|---|
| `max_length` | model | context limit in tokens, prompt included; padded columns may still lie past it |
| `select(cache, rows)` | model | the cache with these rows only, in this order |
| `compile_round(drafter, sampling, lookahead)` | model | runs in place of {{func}}`specsampling.decode_round` |
| `capabilities` | model | its {{class}}`specsampling.Capabilities` |
| `select(state, rows)`, `vocab_size`, `max_rollback` | drafter | as of a model |
| `num_calls`, `ignores_sampling` | drafter | see {{class}}`specsampling.Drafter` |

What a model does not support raises {{class}}`specsampling.CapabilityError`; what a cache has no room for, or does not
hold, raises {{class}}`specsampling.CacheError` where the host can see it.

## Who owns what

- A **cache** (and a drafter's state) belongs to whoever was handed it last. One that was passed to `score`, `rollback`
  or `select` must not be used again: the adapter may have written to it in place, donated it, or copied it.
- **`tokens` and `lengths`** belong to the caller and are never written to. They are integers, int32 or int64: NumPy on
  the first call, afterwards arrays of the namespace and device that the logits came in. An adapter takes both.
- **Logits** belong to the caller once they are returned. They are no view of a buffer that a later call writes to, and
  the caller does not write to them either: they are real floating, of shape `(B, num_logits, V)` and no coarser than
  the dtype that was loaded, in a namespace and on a device of the adapter's choice, the same ones in every call.
- **A drafter's `Proposal`** belongs to the round; `probs` is, bit for bit, what its tokens were drawn from, or None
  where they were chosen.
- Padding is id 0, which is a token like any other."""


def protocol_source(protocol: type) -> str:
    """Return a protocol as Python: its attributes and the signatures of its methods, without docstrings."""
    source = textwrap.dedent(inspect.getsource(protocol))
    (tree,) = ast.parse(source).body
    if not isinstance(tree, ast.ClassDef):
        raise TypeError(f"`protocol` must be a class, got {protocol!r}")
    lines = source.splitlines()
    attributes = [lines[member.lineno - 1] for member in tree.body if isinstance(member, ast.AnnAssign)]
    methods = [
        # As it is written, line breaks included; the docstring begins on a line of its own.
        "\n".join(lines[member.lineno - 1 : member.body[0].lineno - 1]) + " ..."
        for member in tree.body
        if isinstance(member, ast.FunctionDef)
    ]
    return "\n".join([lines[0], *attributes, *([""] if attributes else []), *methods])


def contract_page() -> str:
    """Return docs/contract.md."""
    checks = all_checks()
    lines = [_INTRODUCTION.format(version=CONTRACT_VERSION, clauses=len(checks), protocols=_protocols()), ""]
    for tier in TIERS:
        clauses = [entry for entry in checks if entry.tier == tier]
        if not clauses:
            continue
        lines += [f"## {tier}: {_TITLES[tier].lower()}", "", _QUESTIONS[tier], ""]
        groups: dict[str, list[Check]] = {}
        for entry in clauses:
            groups.setdefault(entry.id.rpartition(".")[0], []).append(entry)
        for group, entries in groups.items():
            lines += [f"### {group}", ""]
            for entry in entries:
                lines += [f"`{entry.id}`", f": {entry.clause}{_for_whom(entry)}", ""]
    return "\n".join(lines).rstrip() + "\n"


def _protocols() -> str:
    return "\n\n\n".join(protocol_source(protocol) for protocol in (Model, Drafter))


def _for_whom(entry: Check) -> str:
    if not entry.requires:
        return ""
    asked = " and ".join(_REQUIREMENTS[name] for name in entry.requires)
    return f" *(Adapters that {asked}.)*"
