"""The conformance suite: whether an adapter keeps the contract, and the law of what it puts out is the target's.

Three ways to run it, with the same checks, ids and expectations:

`BackendSuite`
    A class for pytest with one method to write, an item for every check and dtype.
`check_backend`
    A function that returns a `Report`.
``python -m specsampling_conformance --backend numpy``
    The command line, for adapters with an entry point.

Every check is a clause of the contract; docs/contract.md lists them, docs/conformance.md says how to read a report.
"""

import importlib.util
import sys

from specsampling import Capabilities

if importlib.util.find_spec("hypothesis") is None:
    _needed = "the conformance suite needs the package `hypothesis`: pip install 'specsampling[conformance]'"
    if sys.argv[:1] == ["-m"]:  # being looked for by `python -m`: a command, whose users get one line
        sys.stderr.write(f"specsampling_conformance: error: {_needed}\n")
        raise SystemExit(2)
    raise ImportError(_needed, name="hypothesis")

# Where pytest runs, its assertions show the values they compare; it must know before the module is imported.
if "pytest" in sys.modules:
    sys.modules["pytest"].register_assert_rewrite(f"{__name__}._suite")

from specsampling_conformance._audit import audit
from specsampling_conformance._audit_report import AuditReport, WorstCell
from specsampling_conformance._audit_transformers import TRANSFORMERS_CASES, TransformersCase, audit_transformers
from specsampling_conformance._checks import CheckResult, Measured
from specsampling_conformance._evalue import Look
from specsampling_conformance._greedy import GreedyComparison, compare_greedy
from specsampling_conformance._report import Report, TierCost
from specsampling_conformance._runner import check_backend
from specsampling_conformance._suite import BackendSuite

__all__ = [
    "AuditReport",
    "BackendSuite",
    "Capabilities",
    "CheckResult",
    "GreedyComparison",
    "Look",
    "Measured",
    "Report",
    "TRANSFORMERS_CASES",
    "TierCost",
    "TransformersCase",
    "WorstCell",
    "audit",
    "audit_transformers",
    "check_backend",
    "compare_greedy",
]
