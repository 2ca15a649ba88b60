"""Language models: the protocol, the cache, and the only door to Hugging Face."""

from polydraft.models.cache import TreeCache
from polydraft.models.checks import check_model, check_supported
from polydraft.models.compiled import LEVELS, CompiledModel
from polydraft.models.fused import FusedModel, draft_model
from polydraft.models.generation import Prepared, check_prompts, is_prepared, prepare_by_hugging_face, take_apart
from polydraft.models.hugging_face import HuggingFaceModel
from polydraft.models.loading import (
    Pair,
    check_same_size,
    check_same_source,
    check_same_tokens,
    load,
    load_draft,
    load_pair,
)
from polydraft.models.memory import cache_bytes, check_memory
from polydraft.models.protocol import Cache, Forward, LanguageModel

__all__ = [
    "LEVELS",
    "Cache",
    "CompiledModel",
    "Forward",
    "FusedModel",
    "HuggingFaceModel",
    "LanguageModel",
    "Pair",
    "Prepared",
    "TreeCache",
    "cache_bytes",
    "check_memory",
    "check_model",
    "check_prompts",
    "check_same_size",
    "check_same_source",
    "check_same_tokens",
    "check_supported",
    "draft_model",
    "is_prepared",
    "load",
    "load_draft",
    "load_pair",
    "prepare_by_hugging_face",
    "take_apart",
]
