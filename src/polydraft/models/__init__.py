"""Language models: the protocol, the cache, and the only door to Hugging Face."""

from polydraft.models.cache import TreeCache
from polydraft.models.checkpoints.reasons import first_sentence
from polydraft.models.checks import check_model, check_supported
from polydraft.models.compiled import LEVELS, CompiledModel
from polydraft.models.fused import FusedModel, draft_model
from polydraft.models.generation import (
    BUILT_IN,
    OF_A_CALL_THAT_ENDS,
    OF_ONE_CALL,
    Prepared,
    Refusal,
    RowProcessor,
    Serial,
    check_arguments,
    check_config,
    check_inputs,
    check_prompts,
    copied_criterion,
    drafting_asked_for,
    fork_all,
    is_prepared,
    one_row,
    prepare_by_hugging_face,
    prompts_by_name,
    prompts_of,
    require_count,
    take_apart,
    warn_of_serial,
)
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
from polydraft.models.text import Message, StreamDecoder, conversation_ids, text_of

__all__ = [
    "BUILT_IN",
    "LEVELS",
    "OF_A_CALL_THAT_ENDS",
    "OF_ONE_CALL",
    "Cache",
    "CompiledModel",
    "Forward",
    "FusedModel",
    "HuggingFaceModel",
    "LanguageModel",
    "Message",
    "Pair",
    "Prepared",
    "Refusal",
    "RowProcessor",
    "Serial",
    "StreamDecoder",
    "TreeCache",
    "cache_bytes",
    "check_arguments",
    "check_config",
    "check_inputs",
    "check_memory",
    "check_model",
    "check_prompts",
    "check_same_size",
    "check_same_source",
    "check_same_tokens",
    "check_supported",
    "conversation_ids",
    "copied_criterion",
    "draft_model",
    "drafting_asked_for",
    "first_sentence",
    "fork_all",
    "is_prepared",
    "load",
    "load_draft",
    "load_pair",
    "one_row",
    "prepare_by_hugging_face",
    "prompts_by_name",
    "prompts_of",
    "require_count",
    "take_apart",
    "text_of",
    "warn_of_serial",
]
