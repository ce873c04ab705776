from specsampling_conformance import BackendSuite

from specsampling_smallest import CAPABILITIES, load


class TestSmallest(BackendSuite):
    capabilities = CAPABILITIES

    def load(self, checkpoint, dtype):
        return load(checkpoint, dtype=dtype)
