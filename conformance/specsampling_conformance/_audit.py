"""`audit`: is the law of an engine's output the one it should be? Asked from outside, of any engine.

All that is asked of the engine is samples: it need not be written in Python, nor know of this library. Sequences are
counted and tested against their exact joint law by the suite's anytime-valid test, so the audit looks after every batch
and stops at the first rejection. A second test asks whether neighbouring sequences of a batch are independent.
"""

import math
import operator
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from specsampling import Sampling
from specsampling_conformance._audit_findings import Tests, diagnosis, worst_cells
from specsampling_conformance._audit_law import (
    Cells,
    Law,
    Reference,
    Sampler,
    Tokens,
    alternative_laws,
    as_model,
    law_of_reference,
)
from specsampling_conformance._audit_report import AuditReport
from specsampling_conformance._certify import BETA, certified_tv, certify
from specsampling_conformance._evalue import ALPHA, EProcess, Look, neighbour_law
from specsampling_conformance._runner import fresh_seed

__all__ = ["audit"]


def audit(
    sample: Sampler,
    reference: Reference,
    *,
    prompt: Sequence[int] = (0,),
    length: int | None = None,
    sampling: Sampling | None = None,
    end_tokens: Sequence[int] = (),
    vocab_size: int | None = None,
    tv: float = 0.05,
    num_samples: int | None = None,
    batch_size: int = 1024,
    time_limit: float | None = None,
    alpha: float = ALPHA,
    seed: int | None = None,
    reseed: Callable[[int], object] | None = None,
    alternatives: Mapping[str, Reference] | None = None,
    name: str | None = None,
    settings: Mapping[str, Any] | None = None,
    on_look: Callable[[Look], object] | None = None,
) -> AuditReport:
    """Test an engine's samples against the exact law of its output.

    Parameters
    ----------
    sample : callable
        ``sample(prompt_ids, num_samples) -> token sequences``: that many independent sequences of new token ids, as a
        list of lists or as an integer array of any framework.
    reference : Model, array or mapping
        The law: of a model's own one-token scores under `sampling`; or written down, as an array ``(V,) * length`` of
        probabilities, or as a mapping of tuples of ids, of any lengths, to probabilities.
    prompt : sequence of int, optional
        Ids that every sequence starts from, which `sample` is given as a list.
    length : int, optional
        Tokens in a sequence; needed with a model, and left out with an explicit law.
    sampling : Sampling, optional
        Settings that the engine was told to sample with; left out with an explicit law.
    end_tokens : sequence of int, optional
        Ids that end a sequence, which includes them; an explicit law is cut there too.
    vocab_size : int, optional
        Number of ids; by default the reference's, where it has one. Larger ids raise.
    tv : float, optional
        Total variation to certify, in (0, 0.5], which says how many sequences are drawn.
    num_samples : int, optional
        Draw this many instead.
    batch_size : int, optional
        Sequences asked of each call.
    time_limit : float, optional
        Seconds after which no further batch is drawn, whatever that certifies; one batch is always drawn.
    alpha : float, optional
        Largest probability that a sound engine is rejected, over the whole audit.
    seed : int, optional
        What `reseed` is called with; by default fresh entropy.
    reseed : callable, optional
        ``reseed(seed)``, called once before the first batch, makes an audit repeatable.
    alternatives : mapping, optional
        Laws by name, given like `reference` (the draft model, say), to which a rejection is compared. Common mistakes,
        such as a temperature that is ignored, are known where the reference is a model.
    name : str, optional
        What is audited, for the report.
    settings : mapping, optional
        Added to the report's settings; values that JSON can hold.
    on_look : callable, optional
        Called with each :class:`Look`, after every batch.

    Returns
    -------
    AuditReport
        With `passed`; ``print(report)`` tells the story.

    Raises
    ------
    TypeError, ValueError
        If an argument cannot be used, or `sample` returns what is no sample: too many sequences or too few, more than
        `length` tokens, ids out of range. Sequences that end too early or too late are findings, not errors.

    Notes
    -----
    Each of the two tests has level ``alpha / 2``. A law with a single sequence (greedy decoding) needs no test: any
    other sequence is impossible, and n sequences certify ``1 - 0.001 ** (1 / n)``.

    Examples
    --------
    A sampler that should throw a fair coin twice:

    >>> import numpy as np
    >>> from specsampling_conformance import audit
    >>> rng = np.random.default_rng(1)
    >>> fair = audit(lambda prompt, n: rng.integers(0, 2, (n, 2)), np.full((2, 2), 0.25), tv=0.1)
    >>> fair.passed, fair.n >= 2000
    (True, True)
    >>> loaded = audit(lambda prompt, n: rng.integers(0, 10, (n, 2)) // 6, np.full((2, 2), 0.25), tv=0.1)
    >>> loaded.passed, loaded.stopped
    (False, 'rejected')
    """
    start = time.perf_counter()
    text, ends = _ids("prompt", prompt), _ids("end_tokens", end_tokens)
    model = as_model(reference)
    if model is not None and max(text) >= model.vocab_size:
        raise ValueError(f"`prompt` must have ids in [0, {model.vocab_size}), got {list(text)}")
    law = law_of_reference(reference, text, length, sampling, ends)
    cells = Cells.of(law)
    wanted = _num_samples(len(law), tv, num_samples, alpha)
    if batch_size < 1:
        raise ValueError(f"`batch_size` must be a positive integer, got {batch_size}")
    if seed is not None and reseed is None:
        raise ValueError("`seed` must come with `reseed`, a callable that hands it to the engine")
    others = {
        **alternative_laws(reference, text, length, sampling, ends),
        **{key: _alternative(key, other, text, length, sampling, ends) for key, other in (alternatives or {}).items()},
    }
    used = None
    if reseed is not None:
        used = fresh_seed() if seed is None else seed
        reseed(used)
    exact = cells.array(law)
    tests = Tests(EProcess(exact, alpha / 2), EProcess(neighbour_law(exact), alpha / 2))
    known = _vocab_size(reference) if vocab_size is None else vocab_size
    stopped = "enough samples"
    while tests.sequences.num_samples < wanted:
        size = min(batch_size, wanted - tests.sequences.num_samples)
        tests.update(_checked(sample(list(text), size), size, cells, known), cells)
        if on_look is not None:
            on_look(tests.sequences.looks[-1])
        if tests.rejected:
            stopped = "rejected"
            break
        if time_limit is not None and time.perf_counter() - start >= time_limit:
            stopped = "time limit"
            break
    process = tests.sequences
    return AuditReport(
        name=name or str(getattr(sample, "__qualname__", type(sample).__qualname__)),
        passed=not tests.rejected,
        ln_e=process.log_e,
        neighbours_ln_e=tests.neighbours.log_e,
        threshold=process.threshold,
        n=process.num_samples,
        num_cells=len(law),
        certified_tv=_certified(len(law), process.num_samples, alpha),
        stopped=stopped,
        worst=worst_cells(process, cells),
        diagnosis=diagnosis(tests, cells, ends, others) if tests.rejected else None,
        seed=used,
        seconds=time.perf_counter() - start,
        settings={**_described(text, cells.length, sampling, ends), **(settings or {})},
        looks=tuple(process.looks),
    )


def _ids(name: str, values: Sequence[int]) -> Tokens:
    ids = tuple(operator.index(value) for value in values)
    if min(ids, default=0) < 0 or (name == "prompt" and not ids):
        raise ValueError(f"`{name}` must be {'one or more ' if name == 'prompt' else ''}non-negative ids, got {ids}")
    return ids


def _vocab_size(reference: Reference) -> int | None:
    model = as_model(reference)
    if model is not None:
        return model.vocab_size
    return None if isinstance(reference, Mapping) else len(np.asarray(reference))


def _num_samples(num_cells: int, tv: float, num_samples: int | None, alpha: float) -> int:
    if not 0.0 < tv <= 0.5:
        raise ValueError(f"`tv` must lie in (0, 0.5], got {tv}")
    if not 0.0 < alpha < 1.0:
        raise ValueError(f"`alpha` must lie strictly between 0 and 1, got {alpha}")
    if num_samples is not None:
        if num_samples < 1:
            raise ValueError(f"`num_samples` must be a positive integer, got {num_samples}")
        return num_samples
    # A law with one cell is missed only as long as every draw happens to fall into it.
    return certify(num_cells, tv, alpha / 2) if num_cells > 1 else math.ceil(math.log(BETA) / math.log1p(-tv))


def _certified(num_cells: int, n: int, alpha: float) -> float:
    return certified_tv(num_cells, n, alpha / 2) if num_cells > 1 else -math.expm1(math.log(BETA) / n)


def _alternative(
    name: str, reference: Reference, prompt: Tokens, length: int | None, sampling: Sampling | None, ends: Tokens
) -> Law:
    is_model = as_model(reference) is not None
    try:
        return law_of_reference(reference, prompt, length if is_model else None, sampling if is_model else None, ends)
    except ValueError as error:
        raise ValueError(f"`alternatives[{name!r}]`: {error}") from error


def _checked(samples: Any, size: int, cells: Cells, vocab_size: int | None) -> list[Tokens]:
    """Return the sequences of a batch as tuples of ids, or raise what is wrong with it."""
    listed = samples.tolist() if hasattr(samples, "tolist") else samples
    sequences: list[Any] = [one.tolist() if hasattr(one, "tolist") else one for one in listed]
    if len(sequences) != size:
        raise ValueError(f"`sample` must return the {size} sequences it was asked for, got {len(sequences)}")
    checked = []
    for row, sequence in enumerate(sequences):
        if not isinstance(sequence, Sequence) or isinstance(sequence, str):
            raise TypeError(f"`sample` must return sequences of ids, got {type(sequence).__name__} (sequence {row})")
        try:
            tokens = tuple(map(operator.index, sequence))
        except TypeError as error:
            raise TypeError(f"`sample` must return integers, got {sequence[:8]!r} (sequence {row})") from error
        if len(tokens) > cells.length:
            raise ValueError(
                f"`sample` must return at most {cells.length} new tokens, without the prompt, got {len(tokens)}"
                f" (sequence {row})"
            )
        if tokens and (min(tokens) < 0 or (vocab_size is not None and max(tokens) >= vocab_size)):
            below = "non-negative" if vocab_size is None else f"in [0, {vocab_size})"
            raise ValueError(f"`sample` must return ids {below}, got {list(tokens)} (sequence {row})")
        checked.append(tokens)
    return checked


def _described(prompt: Tokens, length: int, sampling: Sampling | None, ends: Tokens) -> dict[str, Any]:
    described: dict[str, Any] = {"prompt": list(prompt), "length": length, "end_tokens": list(ends)}
    for name in ("temperature", "top_k", "top_p", "min_p") if sampling is not None else ():
        described[name] = getattr(sampling, name)
    return described
