from pathlib import Path

from specsampling_conformance import BackendSuite

from specsampling_recurrent import CAPABILITIES, load


class TestRecurrent(BackendSuite):
    capabilities = CAPABILITIES

    def load(self, checkpoint, dtype):  # the suite's own are Llamas, whose weights this model cannot host
        return load(Path(__file__).parents[1] / "demo", dtype=dtype)
