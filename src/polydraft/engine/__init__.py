"""The engine: the decode loop, its parameters and statistics, and the public calls."""

from polydraft.engine.block import Block, Emission, Statistics, summed
from polydraft.engine.compare import Comparison, compare
from polydraft.engine.decode import decode
from polydraft.engine.defaults import default_policy, default_verifier
from polydraft.engine.generate import GenerationOutput, generate, stream
from polydraft.engine.guarded import Guarded
from polydraft.engine.run import Run, Setup
from polydraft.engine.stopping import Limits
from polydraft.engine.target_law import TargetLaw

__all__ = [
    "Block",
    "Comparison",
    "Emission",
    "GenerationOutput",
    "Guarded",
    "Limits",
    "Run",
    "Setup",
    "Statistics",
    "TargetLaw",
    "compare",
    "decode",
    "default_policy",
    "default_verifier",
    "generate",
    "stream",
    "summed",
]
