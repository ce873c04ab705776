"""Speculative sampling for any framework.

A cheap draft proposes K tokens, the target scores K + 1 positions in one pass, and modified rejection sampling keeps
the output law exactly the target's (Chen et al. 2023, arXiv 2302.01318, Algorithm 2). This package is the core: pure
array-API functions and the protocols that models, drafters and random sources satisfy. Backends are separate packages
that register themselves; `load_model` finds them by name.
"""

from specsampling._adaptive import AdaptiveLookahead
from specsampling._bundled import bundled
from specsampling._compatibility import check_compatibility
from specsampling._counter import CounterSource, Philox
from specsampling._decoding import Decoder, Lookahead
from specsampling._drafting import Context, Drafter, ModelDrafter, ModelDrafterState
from specsampling._errors import (
    BackendError,
    BackendNotInstalledError,
    CacheError,
    CapabilityError,
    NonFiniteLogitsError,
    SpecSamplingError,
    UnknownBackendError,
)
from specsampling._generation import generate, stream
from specsampling._lookup import PromptLookup, PromptLookupState
from specsampling._model import Array, Capabilities, Model
from specsampling._random import Label, Purpose, Randomness, RandomSource, UniformRandomness
from specsampling._registry import BackendStatus, available_backends, load_model
from specsampling._rejection import Proposal, Verdict, verify
from specsampling._results import Generation, PhaseTimes, RoundInfo, Stats, StreamEvent
from specsampling._round import DecodeRound, RoundCarry, RoundOutput, decode_round
from specsampling._sampling import Sampling, to_probs
from specsampling._state import DecoderState
from specsampling._theory import best_lookahead, expected_speedup, expected_tokens

CONTRACT_VERSION = "1.0"
"""Version of the model contract (docs/contract.md); the conformance suite reports it."""

__version__ = "0.1.0"

__all__ = [
    "AdaptiveLookahead",
    "Array",
    "BackendError",
    "BackendNotInstalledError",
    "BackendStatus",
    "CONTRACT_VERSION",
    "CacheError",
    "Capabilities",
    "CapabilityError",
    "Context",
    "CounterSource",
    "DecodeRound",
    "Decoder",
    "DecoderState",
    "Drafter",
    "Generation",
    "Label",
    "Lookahead",
    "Model",
    "ModelDrafter",
    "ModelDrafterState",
    "NonFiniteLogitsError",
    "PhaseTimes",
    "Philox",
    "PromptLookup",
    "PromptLookupState",
    "Proposal",
    "Purpose",
    "RandomSource",
    "Randomness",
    "RoundCarry",
    "RoundInfo",
    "RoundOutput",
    "Sampling",
    "SpecSamplingError",
    "Stats",
    "StreamEvent",
    "UniformRandomness",
    "UnknownBackendError",
    "Verdict",
    "available_backends",
    "best_lookahead",
    "bundled",
    "check_compatibility",
    "decode_round",
    "expected_speedup",
    "expected_tokens",
    "generate",
    "load_model",
    "stream",
    "to_probs",
    "verify",
]
