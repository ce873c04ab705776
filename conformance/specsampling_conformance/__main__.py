"""``python -m specsampling_conformance``: the suite on the command line, for adapters with an entry point."""

import argparse
import dataclasses
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from specsampling import Capabilities, SpecSamplingError, available_backends
from specsampling_conformance._cast import FEWEST_IDS
from specsampling_conformance._catalogue import all_checks, manifest_ids, selected_ids
from specsampling_conformance._entry_point import EntryPointLoader, is_on_cpu
from specsampling_conformance._runner import CHECKPOINT, TIME_LIMIT, check_backend
from specsampling_conformance._tiny import write_tiny_checkpoint
from specsampling_conformance._workers import num_cores

__all__ = ["build_parser", "main"]

_INTERRUPTED = 130
_MOST_JOBS = 2
"""Processes by default: each imports the framework and compiles anew what all checks have in common."""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m specsampling_conformance",
        description="Run the conformance suite against a backend that is registered in `specsampling.backends`.",
        epilog="Exit status: 0 passed, 1 something failed, 2 wrong arguments, 130 interrupted.",
    )
    parser.add_argument("--backend", default="numpy", help="name of the backend (default: numpy)")
    parser.add_argument(
        "--draft-backend",
        metavar="NAME",
        help="load every draft with this backend, so that target and draft are of two frameworks (default: the same)",
    )
    parser.add_argument("--device", help="device, in the backend's own words (default: the backend's choice)")
    parser.add_argument(
        "--checkpoint",
        type=Path,
        metavar="DIR",
        help="load this in place of the suite's own checkpoints, for a backend that cannot host foreign weights",
    )
    parser.add_argument(
        "--tier",
        choices=("contract", "exact", "pr", "nightly"),
        default="pr",
        help="T0 only, T0 and T1, all for a pull request (default), or all with the samples that certify TV 0.01",
    )
    parser.add_argument("--dtype", action="append", metavar="NAME", help="run in this dtype only; may be repeated")
    parser.add_argument(
        "--seed", type=int, help="replay a run; the seed is printed at its end (default: fresh entropy)"
    )
    parser.add_argument(
        "--checks",
        action="append",
        default=[],
        metavar="PATTERN",
        help="run some checks, as T0.rollback.*; gets no level",
    )
    parser.add_argument(
        "--expect-failure",
        action="append",
        default=[],
        metavar="ID=REASON",
        help="a failure that is known, with its reason; one that passes fails the run; may be repeated",
    )
    parser.add_argument(
        "--time-limit",
        type=float,
        default=TIME_LIMIT,
        metavar="SECONDS",
        help="most time of one check in one dtype (default: %(default)g)",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        metavar="N",
        help="run checks in N processes, with the same outcome (default: 2 for a whole run on two cores or more, where"
        " the model is on the CPU; else 1)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the report as one HTML page")
    parser.add_argument("--list", action="store_true", help="list the checks for this backend and run nothing")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    argv : sequence of str, optional
        Arguments after the program's name; by default the process's own.

    Returns
    -------
    int
        Exit status: 0 passed, 1 something failed, 2 wrong arguments, 130 interrupted.
    """
    arguments = build_parser().parse_args(argv)
    try:
        return _list(arguments) if arguments.list else _run(arguments)
    except KeyboardInterrupt:
        sys.stderr.write("\nspecsampling_conformance: interrupted\n")
        return _INTERRUPTED
    except (SpecSamplingError, TypeError, ValueError, OSError) as error:
        sys.stderr.write(f"specsampling_conformance: error: {' '.join(str(error).split())}\n")
        return 2


def _run(arguments: argparse.Namespace) -> int:
    capabilities, jobs, refusal = _capabilities(arguments)
    report = check_backend(
        _loader(arguments),
        capabilities,
        tier=arguments.tier,
        expected_failures=_expectations(arguments.expect_failure),
        seed=arguments.seed,
        checks=arguments.checks,
        backend=arguments.backend,
        draft_backend=arguments.draft_backend,
        device=arguments.device,
        checkpoint=arguments.checkpoint,
        time_limit=arguments.time_limit if arguments.time_limit > 0 else None,
        jobs=jobs if arguments.jobs is None else arguments.jobs,
    )
    if arguments.json:
        report.write_json(arguments.json)
    if arguments.html:
        report.write_html(arguments.html)
    sys.stdout.write(f"{report}\n")
    if refusal and arguments.checkpoint is None:
        sys.stderr.write(
            f"specsampling_conformance: {arguments.backend} cannot load the suite's own checkpoint, a tiny Llama"
            f" ({refusal}); name one that it can load with --checkpoint\n"
        )
    return report.exit_status


def _list(arguments: argparse.Namespace) -> int:
    wanted = set(selected_ids(manifest_ids(_capabilities(arguments)[0]), arguments.checks))
    for entry in all_checks():
        if entry.id in wanted:
            sys.stdout.write(f"{entry.id}  {entry.clause}\n")
    return 0


def _loader(arguments: argparse.Namespace) -> EntryPointLoader:
    return EntryPointLoader(backend=arguments.backend, draft_backend=arguments.draft_backend, device=arguments.device)


def _capabilities(arguments: argparse.Namespace) -> tuple[Capabilities, int, str]:
    """Return what the backend's models declare, how many processes suit them, and why none can be loaded, if so."""
    known = {backend.name: backend for backend in available_backends()}
    for option, name in (("--backend", arguments.backend), ("--draft-backend", arguments.draft_backend)):
        if name is not None and name not in known:
            names = ", ".join(sorted(known)) or "(none registered)"
            raise ValueError(f"`{option}` must be one of {names}, got {name!r}")
        if name is not None and not known[name].installed:
            raise ValueError(known[name].reason)
    if arguments.draft_backend is not None and arguments.checkpoint is not None:
        raise ValueError("`--draft-backend` cannot be combined with `--checkpoint`: its draft is the suite's own")
    dtypes = tuple(dict.fromkeys(arguments.dtype or ()))
    declared, num_ids, jobs, refusal = None, FEWEST_IDS, 1, ""
    with tempfile.TemporaryDirectory(prefix="specsampling-conformance-", ignore_cleanup_errors=True) as folder:
        checkpoint = arguments.checkpoint or write_tiny_checkpoint(Path(folder) / "tiny", **CHECKPOINT)
        try:
            model = _loader(arguments)(checkpoint, dtypes[0] if dtypes else "float32")
            declared, num_ids = getattr(model, "capabilities", None), getattr(model, "vocab_size", FEWEST_IDS)
            # Frameworks take a good part of a GPU's memory each, whoever else is there.
            jobs = min(_MOST_JOBS, num_cores()) if not arguments.checks and is_on_cpu(model) else 1
        except Exception as error:  # an adapter's own; the first check meets it again, and reports it
            refusal = f"{type(error).__name__}: {' '.join(str(error).split())}"
            if arguments.dtype or arguments.device:
                _check_defaults_fail(arguments, checkpoint, refusal)
    if arguments.checkpoint is not None and num_ids < FEWEST_IDS:
        raise ValueError(f"`--checkpoint` must have at least {FEWEST_IDS} ids, got a model of {num_ids}")
    capabilities = declared if isinstance(declared, Capabilities) else Capabilities()
    if dtypes:
        capabilities = dataclasses.replace(capabilities, dtypes=dtypes)
    return capabilities, jobs, refusal


def _check_defaults_fail(arguments: argparse.Namespace, checkpoint: Path, refusal: str) -> None:
    """Refuse `--dtype` or `--device` where the backend loads the checkpoint without them."""
    defaults = EntryPointLoader(backend=arguments.backend, draft_backend=arguments.draft_backend, device=None)
    try:
        defaults(checkpoint, "float32")
    except Exception:  # then the checkpoint is at fault, or the backend
        return
    given = [f"`--dtype {dtype}`" for dtype in arguments.dtype or ()]
    given += [f"`--device {arguments.device}`"] if arguments.device else []
    raise ValueError(f"{arguments.backend} loads nothing with {' '.join(given)} ({refusal})")


def _expectations(given: Sequence[str]) -> dict[str, str]:
    for entry in given:
        if "=" not in entry:
            raise ValueError(f"`--expect-failure` must be ID=REASON, got {entry!r}")
    return {check_id: reason for check_id, _, reason in (entry.partition("=") for entry in given)}


if __name__ == "__main__":
    sys.exit(main())
