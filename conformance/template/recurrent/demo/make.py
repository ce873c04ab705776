"""Write the demo checkpoint: an untrained model.

The weights are large, so that every token of a text matters to the law of the next: the suite can then see a state that
is off by one token.
"""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

FOLDER = Path(__file__).parent
VOCAB, HIDDEN = 16, 12

if __name__ == "__main__":
    rng = np.random.default_rng(0)
    shapes = {
        "embedding": (VOCAB, HIDDEN),
        "input": (HIDDEN, 2 * HIDDEN),
        "state": (HIDDEN, 2 * HIDDEN),
        "output": (HIDDEN, VOCAB),
    }
    weights = {name: rng.normal(0, 2 / np.sqrt(HIDDEN), shape).astype(np.float32) for name, shape in shapes.items()}
    save_file(weights, FOLDER / "model.safetensors")
    config = {"model_type": "minimal-gated-unit", "vocab_size": VOCAB, "hidden_size": HIDDEN}
    (FOLDER / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
