"""``python -m specsampling_conformance.transformers_audit``: audit assisted generation of transformers."""

import sys

from specsampling_conformance._audit_transformers import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
