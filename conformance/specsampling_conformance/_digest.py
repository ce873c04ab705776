"""A fixed list of calls and the digest of the logits they give; run as a module, in a process of its own."""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from specsampling import Model, load_model
from specsampling_conformance._host import host_copy, native_integers

__all__ = ["main", "replay_digest"]


def replay_digest(model: Model[Any], rows: int) -> str:
    """Return a digest of every bit of the logits of a fixed list of calls."""
    digest = hashlib.sha256()
    cache: Any = model.init_cache(rows, 8)
    logits: Any = None
    for block in ([[1, 2, 0], [2, 0, 1]], [[1], [2]], [[0, 2], [1, 1]]):
        ids = [[token % model.vocab_size for token in row] for row in block[:rows]]
        logits, cache = model.score(cache, native_integers(ids, "int64", logits))
        digest.update(host_copy(logits).tobytes())
    cache = model.rollback(cache, native_integers([5] * rows, "int64", logits))
    logits, cache = model.score(cache, native_integers([[1]] * rows, "int64", logits))
    digest.update(host_copy(logits).tobytes())
    return digest.hexdigest()


def main(request: str) -> None:
    """Load a backend by name and write the digest in each dtype to standard output; `request` is a JSON object."""
    wanted = json.loads(request)
    answers = {}
    for dtype in wanted["dtypes"]:
        try:
            model = load_model(wanted["backend"], Path(wanted["checkpoint"]), dtype=dtype, device=wanted["device"])
            answers[dtype] = {"digest": replay_digest(model, wanted["rows"])}
        except Exception as error:  # the check in that dtype reports it
            answers[dtype] = {"error": f"{type(error).__name__}: {error}"}
    sys.stdout.write(json.dumps(answers) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
