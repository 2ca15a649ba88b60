"""polydraft: faster text generation with exactly the same output distribution, by multi-draft speculative decoding."""

from polydraft.drafters import ModelDrafter, NgramDrafter, NoDraft
from polydraft.engine import (
    Completed,
    GenerationOutput,
    ManyRun,
    Past,
    Run,
    Statistics,
    generate,
    generate_many,
    stream,
)
from polydraft.errors import PolydraftError
from polydraft.fetching import fetch
from polydraft.models import HuggingFaceModel, Pair, StreamDecoder, load, load_pair
from polydraft.probs import SamplingParams
from polydraft.schemes import IID, Given, TopK, TopThenSample, WithoutReplacement
from polydraft.trees import EAGLE_25, MEDUSA_63, Chain, Fixed, TreeShape, Widths
from polydraft.verifiers import (
    NaiveMatch,
    RecursiveRejection,
    RecursiveRejectionWithoutReplacement,
    SpeculativeSampling,
    TopDown,
    TopThenSampleRule,
)

__version__ = "0.1.0"

__all__ = [
    "EAGLE_25",
    "IID",
    "MEDUSA_63",
    "Chain",
    "Completed",
    "Fixed",
    "GenerationOutput",
    "Given",
    "HuggingFaceModel",
    "ManyRun",
    "ModelDrafter",
    "NaiveMatch",
    "NgramDrafter",
    "NoDraft",
    "Pair",
    "Past",
    "PolydraftError",
    "RecursiveRejection",
    "RecursiveRejectionWithoutReplacement",
    "Run",
    "SamplingParams",
    "SpeculativeSampling",
    "Statistics",
    "StreamDecoder",
    "TopDown",
    "TopK",
    "TopThenSample",
    "TopThenSampleRule",
    "TreeShape",
    "Widths",
    "WithoutReplacement",
    "__version__",
    "fetch",
    "generate",
    "generate_many",
    "load",
    "load_pair",
    "stream",
]
