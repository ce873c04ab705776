"""`audit_transformers`: the assisted generation of Hugging Face transformers, audited on a frozen tiny pair.

Both of its modes are asked: a draft model (``assistant_model``) and prompt lookup (``prompt_lookup_num_tokens``). The
law is that of the suite's own plain Llama in float64, on the same weights. Assisted generation takes one prompt at a
time, so sequences are drawn one by one, from one stream of torch's generator.
"""

import argparse
import dataclasses
import functools
import hashlib
import importlib
import json
import platform
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from specsampling import BackendNotInstalledError, Sampling
from specsampling_conformance._audit import audit
from specsampling_conformance._audit_report import AuditReport
from specsampling_conformance._cast import PAIRS
from specsampling_conformance._evalue import Look
from specsampling_conformance._oracle import Scores
from specsampling_conformance._reference import ReferenceModel
from specsampling_conformance._runner import fresh_seed

__all__ = ["TRANSFORMERS_CASES", "TransformersCase", "audit_transformers", "main"]

_PAIR = PAIRS["four"]
_LENGTH = 3
_BATCH = 64
_GREEDY_SEQUENCES = 200
_ROUNDING = 1e-4
"""Largest difference of logits between transformers and the reference; a real one would show as a deviation."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TransformersCase:
    """One way of calling ``generate``.

    Attributes
    ----------
    mode : str
        "assistant" or "prompt_lookup".
    sampling : Sampling
        Settings of ``generate``; temperature 0 is ``do_sample=False``.
    prompt : tuple of int
        Ids; those for prompt lookup repeat themselves, so that something is found.
    lookahead : int
        ``num_assistant_tokens`` or ``prompt_lookup_num_tokens``.
    end_tokens : tuple of int
        ``eos_token_id``.
    confidence_threshold : float
        ``assistant_confidence_threshold`` of the draft model: drafting stops after a token less likely than this.

    Examples
    --------
    >>> from specsampling_conformance import TRANSFORMERS_CASES
    >>> sorted(TRANSFORMERS_CASES)[:2], len(TRANSFORMERS_CASES)
    (['assistant', 'assistant.end_token'], 9)
    >>> case = TRANSFORMERS_CASES["prompt_lookup.warped"]
    >>> case.mode, case.sampling.temperature, case.is_greedy
    ('prompt_lookup', 0.7, False)
    """

    mode: str
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    prompt: tuple[int, ...] = (1, 2)
    lookahead: int = 2
    end_tokens: tuple[int, ...] = ()
    confidence_threshold: float = 0.4

    @property
    def is_greedy(self) -> bool:
        """Whether ``generate`` is called with ``do_sample=False``."""
        return self.sampling.is_greedy


def _cases() -> dict[str, TransformersCase]:
    warped, greedy = Sampling(temperature=0.7, top_p=0.9), Sampling(temperature=0.0)
    lookup: Mapping[str, Any] = {"mode": "prompt_lookup", "prompt": (0, 2, 1, 0, 2)}
    return {
        "assistant": TransformersCase(mode="assistant"),
        "assistant.no_threshold": TransformersCase(mode="assistant", confidence_threshold=0.0),
        "assistant.warped": TransformersCase(mode="assistant", sampling=warped),
        "assistant.end_token": TransformersCase(mode="assistant", end_tokens=(3,)),
        "assistant.greedy": TransformersCase(mode="assistant", sampling=greedy),
        "prompt_lookup": TransformersCase(**lookup),
        "prompt_lookup.warped": TransformersCase(**lookup, sampling=warped),
        "prompt_lookup.end_token": TransformersCase(**lookup, end_tokens=(3,)),
        "prompt_lookup.greedy": TransformersCase(**lookup, sampling=greedy),
    }


TRANSFORMERS_CASES = _cases()
"""Every case by name."""


def audit_transformers(
    cases: Sequence[str] | None = None,
    *,
    minutes: float = 15.0,
    seed: int | None = None,
    tv: float = 0.01,
    on_look: Callable[[str, Look], object] | None = None,
) -> list[AuditReport]:
    """Audit the assisted generation of the installed transformers.

    Parameters
    ----------
    cases : sequence of str, optional
        Keys of ``TRANSFORMERS_CASES``; by default all. A mode's name followed by ``.*`` stands for its cases.
    minutes : float, optional
        For the cases of one mode together, shared equally by those that sample; greedy ones take seconds.
    seed : int, optional
        Seed of torch's generator, which is set once for each case; by default fresh entropy.
    tv : float, optional
        A case ends early once it certifies this total variation.
    on_look : callable, optional
        Called with the case's name and each :class:`Look`.

    Returns
    -------
    list of AuditReport
        One for each case, in order.

    Raises
    ------
    BackendNotInstalledError
        If torch or transformers is not installed.
    ValueError
        If a case is unknown.

    Notes
    -----
    Torch's default generator is seeded, and left where the audit ends.

    Examples
    --------
    >>> from specsampling_conformance import audit_transformers
    >>> reports = audit_transformers(["assistant.greedy"], minutes=0.1, seed=0)  # doctest: +SKIP
    >>> [report.passed for report in reports]  # doctest: +SKIP
    [True]
    """
    return list(_audits(cases, minutes=minutes, seed=seed, tv=tv, on_look=on_look))


def _audits(
    cases: Sequence[str] | None,
    *,
    minutes: float,
    seed: int | None,
    tv: float,
    on_look: Callable[[str, Look], object] | None,
) -> Iterator[AuditReport]:
    """Yield the report of each case as it ends."""
    chosen = _chosen(cases)
    if not minutes > 0:
        raise ValueError(f"`minutes` must be positive, got {minutes}")
    torch, transformers = _frameworks()
    engine = _Engine(torch, transformers)
    used = fresh_seed() if seed is None else seed
    sampled = Counter(TRANSFORMERS_CASES[name].mode for name in chosen if not TRANSFORMERS_CASES[name].is_greedy)
    for name in chosen:
        case = TRANSFORMERS_CASES[name]
        yield audit(
            engine.sampler(case),
            engine.reference,
            prompt=case.prompt,
            length=_LENGTH,
            sampling=case.sampling,
            end_tokens=case.end_tokens,
            tv=tv,
            num_samples=_GREEDY_SEQUENCES if case.is_greedy else None,
            batch_size=_BATCH,
            time_limit=60.0 * minutes / max(sampled[case.mode], 1),
            seed=used,
            reseed=torch.manual_seed,
            alternatives={"the draft's law": engine.own_draft} if case.mode == "assistant" else None,
            name=f"transformers {name}",
            settings=_described(case),
            on_look=None if on_look is None else functools.partial(on_look, name),
        )


def _chosen(cases: Sequence[str] | None) -> list[str]:
    if cases is None:
        return list(TRANSFORMERS_CASES)
    chosen: dict[str, None] = {}
    for name in cases:
        matching = [key for key in TRANSFORMERS_CASES if key == name or f"{TRANSFORMERS_CASES[key].mode}.*" == name]
        if not matching:
            raise ValueError(f"`cases` must be among {', '.join(TRANSFORMERS_CASES)}, got {name!r}")
        chosen |= dict.fromkeys(matching)
    return list(chosen)


def _described(case: TransformersCase) -> dict[str, Any]:
    described: dict[str, Any] = {"mode": case.mode, "lookahead": case.lookahead, "pair": _PAIR.name}
    weights = b"".join((folder / "model.safetensors").read_bytes() for folder in (_PAIR.target, _PAIR.draft))
    described["pair_sha256"] = hashlib.sha256(weights).hexdigest()[:12]
    if case.mode == "assistant":
        described["confidence_threshold"] = case.confidence_threshold
    return described | {"versions": _versions()}


def _versions() -> dict[str, str]:
    return {"python": platform.python_version()} | {name: version(name) for name in ("torch", "transformers")}


def _frameworks() -> tuple[Any, Any]:
    try:
        return importlib.import_module("torch"), importlib.import_module("transformers")
    except ImportError as error:
        raise BackendNotInstalledError(
            f"`audit_transformers` needs the packages `torch` and `transformers` ({error}): pip install"
            " 'specsampling[torch,conformance]'",
            name=error.name,
        ) from error


class _Engine:
    """The frozen pair in transformers, and its law in the suite's own reference."""

    def __init__(self, torch: Any, transformers: Any) -> None:
        self.torch, self.transformers = torch, transformers
        self.target, self.draft = (
            transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            for folder in (_PAIR.target, _PAIR.draft)
        )
        self.reference: Any = ReferenceModel(_PAIR.target, "float64")
        self.own_draft: Any = ReferenceModel(_PAIR.draft, "float64")
        self._compare()

    def _compare(self) -> None:
        """Raise where transformers does not compute the reference's logits: that is no question of sampling."""
        text = [1, 2, 0, 3, 3, 1]
        with self.torch.no_grad():
            got = self.target(self.torch.tensor([text])).logits[0].numpy()
        scores = Scores(self.reference)
        expected = np.stack([scores.logits(tuple(text[:end])) for end in range(1, len(text) + 1)])
        difference = float(np.max(np.abs(got - expected)))
        if not difference <= _ROUNDING:
            raise RuntimeError(
                f"transformers' logits of the frozen pair differ from the reference's by {difference:.3g}"
            )

    def sampler(self, case: TransformersCase) -> Callable[[list[int], int], list[list[int]]]:
        """Return a callable that draws sequences one by one; whatever can be is made once."""
        sampling = case.sampling
        warped = {"temperature": sampling.temperature, "top_p": sampling.top_p}
        options: dict[str, Any] = {} if case.is_greedy else {**warped, "top_k": 0}
        config = self.transformers.GenerationConfig(
            do_sample=not case.is_greedy,
            max_new_tokens=_LENGTH,
            eos_token_id=list(case.end_tokens) or None,
            pad_token_id=0,
            **{name: value for name, value in options.items() if value is not None},
        )
        extra: dict[str, Any] = {}
        if case.mode == "assistant":
            own = self.draft.generation_config
            own.num_assistant_tokens, own.num_assistant_tokens_schedule = case.lookahead, "constant"
            own.assistant_confidence_threshold = case.confidence_threshold
            extra["assistant_model"] = self.draft
        else:
            config.prompt_lookup_num_tokens = case.lookahead

        def sample(prompt: list[int], num_samples: int) -> list[list[int]]:
            ids = self.torch.tensor([prompt])
            mask = self.torch.ones_like(ids)
            outputs = (
                self.target.generate(ids, attention_mask=mask, generation_config=config, **extra)
                for _ in range(num_samples)
            )
            return [output[0, len(prompt) :].tolist() for output in outputs]

        return sample


def main(argv: Sequence[str] | None = None) -> int:
    """Run the audit from the command line.

    Parameters
    ----------
    argv : sequence of str, optional
        Arguments after the program's name; by default the process's own.

    Returns
    -------
    int
        Exit status: 0 no deviation, 1 a deviation, 2 wrong arguments or missing packages, 130 interrupted.
    """
    parser = argparse.ArgumentParser(
        prog="python -m specsampling_conformance.transformers_audit",
        description="Test whether the assisted generation of Hugging Face transformers keeps the target's law.",
        epilog="Exit status: 0 no deviation, 1 a deviation, 2 wrong arguments or missing packages, 130 interrupted.",
    )
    parser.add_argument("--minutes", type=float, default=15.0, help="for each mode (default: %(default)g)")
    parser.add_argument(
        "--cases", nargs="+", metavar="CASE", help=f"some of: {', '.join(TRANSFORMERS_CASES)}; or assistant.*"
    )
    parser.add_argument("--tv", type=float, default=0.01, help="total variation that is enough (default: %(default)g)")
    parser.add_argument("--seed", type=int, help="replay an audit (default: fresh entropy)")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default: 1; the models are tiny)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found as JSON")
    arguments = parser.parse_args(argv)
    try:
        return _run(arguments)
    except KeyboardInterrupt:
        sys.stderr.write("\naudit_transformers: interrupted\n")
        return 130
    except (BackendNotInstalledError, ValueError) as error:
        sys.stderr.write(f"audit_transformers: error: {error}\n")
        return 2


def _run(arguments: argparse.Namespace) -> int:
    torch, transformers = _frameworks()
    torch.set_num_threads(arguments.threads)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    reports: list[AuditReport] = []
    progress = _Progress()
    for report in _audits(
        arguments.cases, minutes=arguments.minutes, seed=arguments.seed, tv=arguments.tv, on_look=progress
    ):
        progress.close()
        reports.append(report)
        sys.stdout.write(f"{report} in {report.seconds:.0f} s\n")
        sys.stdout.flush()
        if arguments.json:  # after each case, so that an interrupted audit leaves what it had
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
            held = json.dumps([one.to_json() for one in reports], indent=2, allow_nan=False)
            arguments.json.write_text(f"{held}\n", encoding="utf-8")
    versions = ", ".join(f"{name} {number}" for name, number in _versions().items())
    sys.stdout.write(f"{versions}. Seed: {reports[0].seed}.\n")
    return 0 if all(report.passed for report in reports) else 1


class _Progress:
    """A bar for the case that runs, where tqdm is installed."""

    def __init__(self) -> None:
        self.bar: Any = None

    def __call__(self, name: str, look: Look) -> None:
        if self.bar is None:
            try:
                from tqdm import tqdm
            except ImportError:
                return
            # Into a file a line a minute, so that a log stays readable.
            pause = 0.5 if sys.stderr.isatty() else 60.0
            self.bar = tqdm(desc=name, unit="seq", leave=False, mininterval=pause, delay=pause)
        self.bar.set_postfix_str(f"ln E = {look.log_e:.1f}", refresh=False)
        self.bar.update(look.num_samples - self.bar.n)

    def close(self) -> None:
        """Take the bar away."""
        if self.bar is not None:
            self.bar.close()
            self.bar = None
