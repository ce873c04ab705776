"""Models by the name of their backend: the loader of the command line, which other processes can unpickle."""

import dataclasses
from pathlib import Path
from typing import Any

import array_api_compat
import numpy as np

from specsampling import Model, load_model

__all__ = ["EntryPointLoader", "is_on_cpu"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EntryPointLoader:
    """Loads checkpoints with a backend, and drafts with another one where that is wanted.

    Attributes
    ----------
    backend, draft_backend : str
        Names of entry points; None for the same backend.
    device : str or None
        Device, in the backend's own words.
    """

    backend: str
    draft_backend: str | None
    device: str | None

    def __call__(self, checkpoint: Path, dtype: str) -> Model[Any]:
        """Return the model of a checkpoint."""
        # All drafts of the suite, those of its pairs and the bundled one, are in folders of that name.
        if self.draft_backend is None or not checkpoint.name.endswith("draft"):
            return load_model(self.backend, checkpoint, dtype=dtype, device=self.device)
        # The device is in the words of the target's backend, and a draft need not have the target's dtype.
        return load_model(self.draft_backend, checkpoint, dtype=dtype if dtype == "float64" else "float32")


def is_on_cpu(model: Model[Any]) -> bool:
    """Return whether a model's logits are in the host's memory."""
    logits, _ = model.score(model.init_cache(1, 8), np.array([[0]], dtype=np.int32))
    return "cpu" in str(array_api_compat.device(logits)).lower()
