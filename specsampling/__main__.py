"""``specsampling`` and ``python -m specsampling``."""

import io
import json
import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from specsampling._cli import _generate
from specsampling._cli._arguments import build_parser, in_options
from specsampling._errors import SpecSamplingError
from specsampling._registry import available_backends

__all__ = ["main"]

# As shells report a program that a signal ended.
_INTERRUPTED = 130
_BROKEN_PIPE = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    argv : sequence of str, optional
        Arguments after the program's name; by default the process's own.

    Returns
    -------
    int
        Exit status: 0, 2 for input that cannot be used (one line on stderr says why), 130 when interrupted.
    """
    # Python sets a stream to None that was closed before it started: what goes there goes nowhere.
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 (open until the end)
    arguments = build_parser().parse_args(argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A model may emit any character and the terminal's encoding need not have it.
            stream.reconfigure(errors="replace")
    command = {"generate": _generate.run, "backends": _backends}[arguments.command]
    try:
        return command(arguments)
    except KeyboardInterrupt:
        print("\nspecsampling: interrupted", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:
        # The reader has left. Python flushes stdout once more at exit, and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE
    except (SpecSamplingError, ValueError, TypeError, OSError, MemoryError) as error:
        message = " ".join(str(error).split()) or "not enough memory"  # the one of these that may come without words
        message = in_options(message)
        print(f"specsampling: error: {message}", file=sys.stderr)
        return 2


def _backends(arguments: Namespace) -> int:
    backends = available_backends()
    if arguments.json:
        print(json.dumps([backend._asdict() for backend in backends]))
        return 0
    width = max((len(backend.name) for backend in backends), default=0)
    for backend in backends:
        print(f"{backend.name:<{width}}  {'installed' if backend.installed else 'not installed: ' + backend.reason}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
