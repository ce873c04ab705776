"""What keeps a run going whatever an adapter does: a time limit, and the memory and time it used."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["TimeLimitExceeded", "peak_mib", "time_limit"]


class TimeLimitExceeded(BaseException):  # no Exception, which an adapter might catch and go on
    """A check took longer than it may."""


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Raise :class:`TimeLimitExceeded` in the body when it takes longer.

    Without effect where the system has no alarm signal, outside the main thread, and where somebody else uses the
    alarm. A call that never comes back from C code is beyond its reach too.
    """
    usable = hasattr(signal, "SIGALRM") and threading.current_thread() is threading.main_thread()
    if seconds is None or not usable or signal.getsignal(signal.SIGALRM) is not signal.SIG_DFL:
        yield
        return

    armed = True

    def ring(signum: int, frame: FrameType | None) -> None:  # noqa: ARG001 - the signature of a handler
        if armed:
            raise TimeLimitExceeded(f"took longer than {seconds:g} s")

    previous = signal.signal(signal.SIGALRM, ring)
    # It rings again, in case the first time is caught by a bare `except` in the adapter.
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        armed = False
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, previous)


def peak_mib() -> float | None:
    """Return the largest memory this process has had, in MiB; None where the system does not tell."""
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak) / (2**20 if sys.platform == "darwin" else 2**10)
