"""What `gpu.py` keeps of its checks: a section's findings, written down as they come."""

import contextlib
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

__all__ = ["Findings", "SECTIONS", "Section", "Skipped", "require", "section", "timed"]


class Skipped(Exception):  # noqa: N818 - not an error
    """There is nothing to check here; the message says why."""


class Findings:
    """What a section has found so far, written down after every check."""

    def __init__(self, device: str, file: Path) -> None:
        self.device, self._file = device, file
        self.checks: list[dict[str, Any]] = []

    @property
    def is_accelerator(self) -> bool:
        """Whether the device is not the host."""
        return not self.device.startswith("cpu")

    @contextlib.contextmanager
    def check(self, name: str) -> Iterator[dict[str, Any]]:
        """Run the block as one check; what it puts into the mapping is reported, and what it raises is a result."""
        values: dict[str, Any] = {}
        entry: dict[str, Any] = {"name": name, "status": "passed", "values": values}
        start = time.perf_counter()
        try:
            yield values
        except Skipped as reason:
            entry |= {"status": "skipped", "reason": str(reason)}
        except Exception as error:  # one failure must not stop the rest
            where = "".join(traceback.format_tb(error.__traceback__)[-3:])
            entry |= {"status": "failed", "reason": f"{type(error).__name__}: {error}", "traceback": where}
        entry["seconds"] = round(time.perf_counter() - start, 3)
        self.checks.append(entry)
        self._file.write_text(json.dumps(self.checks, default=str))
        sys.stderr.write(f"  {entry['status']:7} {name} ({entry['seconds']:.1f} s) {entry.get('reason', '')}\n")


Section: TypeAlias = Callable[[Findings], None]

SECTIONS: dict[str, tuple[Section, float]] = {}
"""By name: what runs, and the seconds that it may take. They run in this order."""


def require(holds: bool, found: Any = "") -> None:
    """Fail the check where something does not hold, and say what was found."""
    if not holds:
        raise AssertionError(str(found))


def section(name: str, limit: float) -> Callable[[Section], Section]:
    """Register a section with the seconds that it may take."""

    def register(run: Section) -> Section:
        SECTIONS[name] = run, limit
        return run

    return register


def timed(call: Callable[[], Any], findings: Findings, repeats: int = 7) -> float:
    """Return the median milliseconds of a call that leaves its work on the device."""
    seconds = []
    for _ in range(repeats + 2):
        wait(findings)
        start = time.perf_counter()
        call()
        wait(findings)
        seconds.append(time.perf_counter() - start)
    return round(1e3 * statistics.median(seconds[2:]), 4)


def wait(findings: Findings) -> None:
    """Wait until the device has done what it was given."""
    if findings.is_accelerator:
        import torch

        torch.cuda.synchronize(findings.device)
