"""Run programs that a model wrote: with a time limit, in an empty folder, without a network.

This keeps accidents away, not attackers: the program runs as this user and can read what this user can read.
"""

import contextlib
import functools
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

__all__ = ["isolation", "passes"]

# The network namespace is empty, and what the program starts ends with it.
_UNSHARE = ("unshare", "--user", "--map-root-user", "--net", "--pid", "--fork", "--kill-child")

# Limits are set in the child, before the program is looked at. The last line is what a program that leaves early,
# `sys.exit(0)` included, never comes to.
_PREAMBLE = """\
import socket, sys
def _refuse(*_args, **_kwargs):
    raise OSError("no network here")
socket.socket.connect = socket.socket.bind = socket.create_connection = socket.getaddrinfo = _refuse
try:
    import resource
    for _name, _limit in (("RLIMIT_AS", 2**30), ("RLIMIT_CPU", {seconds}), ("RLIMIT_FSIZE", 2**20)):
        resource.setrlimit(getattr(resource, _name), (_limit, _limit))
except ImportError:
    pass
exec(compile(open("program.py", encoding="utf-8").read(), "program.py", "exec"), {{"__name__": "__main__"}})
print("{token}")
"""


@functools.cache
def isolation() -> str:
    """Return how the network is kept away: a namespace without one where the system allows it."""
    if (
        shutil.which(_UNSHARE[0])
        and subprocess.run([*_UNSHARE, "true"], capture_output=True, check=False).returncode == 0
    ):
        return "network namespace"
    return "sockets refused in Python only"


def passes(program: str, *, seconds: float = 10.0) -> bool:
    """Return whether a Python program runs to its end without an error.

    Parameters
    ----------
    program : str
        Source code, tests included.
    seconds : float
        Time limit; whatever takes longer has failed.

    Returns
    -------
    bool
        True if every statement ran.

    Examples
    --------
    >>> passes("assert 1 + 1 == 2"), passes("assert 1 + 1 == 3"), passes("import sys; sys.exit(0)")
    (True, False, False)
    """
    token = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        Path(folder, "program.py").write_text(program, encoding="utf-8", errors="replace")
        preamble = _PREAMBLE.format(seconds=int(seconds) + 1, token=token)
        command = [sys.executable, "-I", "-c", preamble]
        if isolation() == "network namespace":
            command = [*_UNSHARE, *command]
        with Path(folder, "stdout").open("w+b") as output:
            process = subprocess.Popen(
                command,
                cwd=folder,
                env={"PATH": os.environ.get("PATH", ""), "HOME": folder},
                stdin=subprocess.DEVNULL,
                stdout=output,  # a file, and limited like one: a program that prints for ever fills no memory
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                return False
            finally:
                if hasattr(os, "killpg"):
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                process.kill()
                process.wait()
            output.seek(0)
            return process.returncode == 0 and token.encode() in output.read()
