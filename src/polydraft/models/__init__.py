"""Language models: the protocol, the cache, and the only door to Hugging Face."""

from polydraft.models.anatomy import chosen_precision, function_of, linear_of, pack_linear_layers, weight_of
from polydraft.models.cache import TreeCache
from polydraft.models.checkpoints.folders import is_known
from polydraft.models.checkpoints.plain import PlainFolder, plain_config, plain_shapes, read_plain, write_plain
from polydraft.models.checkpoints.silence import first_sentence
from polydraft.models.checks.layout import cache_in
from polydraft.models.checks.trial import agree
from polydraft.models.compiled import LEVELS, CompiledModel
from polydraft.models.fused import FusedModel, draft_model
from polydraft.models.generation.additions import AdditivePenalties, HeldBack, TokenBias
from polydraft.models.generation.arguments import (
    OF_A_CALL_THAT_ENDS,
    OF_ONE_CALL,
    Refusal,
    check_arguments,
    check_config,
    drafting_asked_for,
    require_count,
)
from polydraft.models.generation.prepare import (
    Prepared,
    as_hugging_faces,
    check_prompts,
    copied_criterion,
    is_prepared,
    prepare_by_hugging_face,
    take_apart,
)
from polydraft.models.generation.processors import BUILT_IN, RowProcessor, Serial, fork_all, warn_of_serial
from polydraft.models.generation.prompts import (
    OF_DECODERS,
    check_made_inside,
    inputs_beside,
    main_input,
    one_row,
    own_inputs,
    prompts_by_name,
    prompts_of,
    read_size,
    sources_of,
)
from polydraft.models.grammar.grammar import Grammar
from polydraft.models.hugging_face import HuggingFaceModel, check_memory, module_of, same_model, weight_bytes
from polydraft.models.language_model import Cache, Facts, Forward, LanguageModel, Layer, ShowsSlots
from polydraft.models.loading import (
    Pair,
    check_same_size,
    check_same_source,
    embedded_head,
    load,
    load_draft,
    load_pair,
    load_tokenizer,
    save,
    shipped_head,
    tokenizer_of,
)
from polydraft.models.text.conversation import (
    Conversation,
    Message,
    asked_within,
    check_shown,
    check_template,
    conversation_ids,
)
from polydraft.models.text.stream_decoder import StreamDecoder, bytes_of, text_of

__all__ = [
    "BUILT_IN",
    "LEVELS",
    "OF_A_CALL_THAT_ENDS",
    "OF_DECODERS",
    "OF_ONE_CALL",
    "AdditivePenalties",
    "Cache",
    "CompiledModel",
    "Conversation",
    "Facts",
    "Forward",
    "FusedModel",
    "Grammar",
    "HeldBack",
    "HuggingFaceModel",
    "LanguageModel",
    "Layer",
    "Message",
    "Pair",
    "PlainFolder",
    "Prepared",
    "Refusal",
    "RowProcessor",
    "Serial",
    "ShowsSlots",
    "StreamDecoder",
    "TokenBias",
    "TreeCache",
    "agree",
    "as_hugging_faces",
    "asked_within",
    "bytes_of",
    "cache_in",
    "check_arguments",
    "check_config",
    "check_made_inside",
    "check_memory",
    "check_prompts",
    "check_same_size",
    "check_same_source",
    "check_shown",
    "check_template",
    "chosen_precision",
    "conversation_ids",
    "copied_criterion",
    "draft_model",
    "drafting_asked_for",
    "embedded_head",
    "first_sentence",
    "fork_all",
    "function_of",
    "inputs_beside",
    "is_known",
    "is_prepared",
    "linear_of",
    "load",
    "load_draft",
    "load_pair",
    "load_tokenizer",
    "main_input",
    "module_of",
    "one_row",
    "own_inputs",
    "pack_linear_layers",
    "plain_config",
    "plain_shapes",
    "prepare_by_hugging_face",
    "prompts_by_name",
    "prompts_of",
    "read_plain",
    "read_size",
    "require_count",
    "same_model",
    "save",
    "shipped_head",
    "sources_of",
    "take_apart",
    "text_of",
    "tokenizer_of",
    "warn_of_serial",
    "weight_bytes",
    "weight_of",
    "write_plain",
]
