"""``python -m specsampling_conformance.transformers_audit``."""

# A folder without __init__.py, so that nothing but this command line ever imports a module of the function's name.
import sys

from specsampling_conformance._audit_transformers import main

__all__: list[str] = []

sys.exit(main())
