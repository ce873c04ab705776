"""Check every backend on a device: ``python conformance/gpu.py --json gpu.json``.

Needs no network, no nox, no installed package and no checkpoint besides the bundled pair: other models are random and
are built here. Each section runs in a process of its own, so that what one of them breaks, a context of CUDA included,
stays its own; what it had found by then is kept. ``--device cpu`` exercises everything on a machine without a GPU.
"""

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = [str(ROOT), str(ROOT / "backends"), str(ROOT / "conformance")]
sys.path[:0] = FOLDERS  # a source checkout is enough

import gpu_sections  # noqa: E402, F401 - registers the sections
from gpu_findings import SECTIONS, Findings  # noqa: E402 (after the path is set)

__all__ = ["build_parser", "main"]

_MINUTES = 9.5

PACKAGES = ("numpy", "torch", "transformers", "accelerate", "jax", "jaxlib", "onnxruntime-gpu", "onnxruntime")

# Products of float32 are otherwise rounded to ten bits on the way (TF32), in three libraries by three defaults. The
# suite measures what is left of float32, so all three are told.
ENVIRONMENT = {
    "NVIDIA_TF32_OVERRIDE": "0",
    "JAX_DEFAULT_MATMUL_PRECISION": "highest",
    "JAX_ENABLE_X64": "1",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONPATH": os.pathsep.join([*FOLDERS, *filter(None, [os.environ.get("PYTHONPATH")])]),
}


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description="Check every backend on a device, each section in a process of its own.",
        epilog="Exit status: 0 when nothing failed, 1 otherwise. What is not installed is skipped, and said so.",
    )
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu (default: cuda)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results as JSON")
    parser.add_argument(
        "--minutes",
        type=float,
        default=_MINUTES,
        help="stop after this long (default: %(default)g); with more, each section may take longer in proportion",
    )
    parser.add_argument("--only", action="append", metavar="TEXT", help="sections whose name has this; may be repeated")
    parser.add_argument("--list", action="store_true", help="list the sections and run nothing")
    parser.add_argument("--section", help=argparse.SUPPRESS)  # how the program calls itself
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    arguments = build_parser().parse_args(argv)
    if arguments.section:
        SECTIONS[arguments.section][0](Findings(arguments.device, arguments.json))
        return 0
    chosen = [name for name in SECTIONS if not arguments.only or any(text in name for text in arguments.only)]
    if arguments.list or not chosen:
        print(*SECTIONS, sep="\n")
        return 0 if chosen else 2
    end = time.monotonic() + 60 * arguments.minutes
    result: dict[str, Any] = {"device": arguments.device, "versions": versions(arguments.device), "sections": {}}
    for name in chosen:
        print(name, file=sys.stderr, flush=True)
        limit = min(SECTIONS[name][1] * max(1.0, arguments.minutes / _MINUTES), end - time.monotonic())
        found = start_section(name, arguments.device, limit)
        result["sections"][name] = found
        print(f"{found['status']}: {name} ({found['seconds']:.1f} s) {found['reason']}", flush=True)
        result["passed"] = all(one["status"] in ("passed", "skipped") for one in result["sections"].values())
        result["seconds"] = round(60 * arguments.minutes - end + time.monotonic(), 1)
        if arguments.json:
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
            arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if result["passed"] else 1


def versions(device: str) -> dict[str, Any]:
    """Return what the results were obtained with."""
    found: dict[str, Any] = {"python": platform.python_version(), "platform": platform.platform()}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    if device.startswith("cuda"):
        asked = "import torch; print(torch.cuda.get_device_name(), torch.version.cuda, sep=', CUDA ')"
        done = subprocess.run([sys.executable, "-c", asked], check=False, capture_output=True, text=True)
        found["device"] = done.stdout.strip() or done.stderr.strip().splitlines()[-1]
    return found


def start_section(name: str, device: str, limit: float) -> dict[str, Any]:
    """Run one section in a process of its own and return what it found."""
    start = time.perf_counter()
    if limit < 5:
        return {"status": "out of time", "reason": "not begun", "seconds": 0.0, "checks": []}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "checks.json"
        command = [sys.executable, __file__, "--device", device, "--section", name, "--json", str(file)]
        status, reason = "", ""
        try:
            done = subprocess.run(command, check=False, timeout=limit, env={**os.environ, **ENVIRONMENT})
        except subprocess.TimeoutExpired:
            status, reason = "out of time", f"not done after {limit:.0f} s"
        else:
            if done.returncode:
                status, reason = "crashed", f"exit status {done.returncode}"
        checks = json.loads(file.read_text()) if file.exists() else []
    found = {check["status"] for check in checks}
    status = status or ("failed" if "failed" in found else "passed" if "passed" in found else "skipped")
    reason = reason or "; ".join(dict.fromkeys(c["reason"] for c in checks if c["status"] != "passed"))[:300]
    return {"status": status, "reason": reason, "seconds": round(time.perf_counter() - start, 1), "checks": checks}


if __name__ == "__main__":
    sys.exit(main())
