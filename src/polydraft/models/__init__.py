"""Language models: the protocol, the cache, and the only door to Hugging Face."""

from polydraft.models.anatomy import (
    cheapest,
    chosen_precision,
    function_of,
    kept_product,
    linear_of,
    pack_linear_layers,
    weight_of,
    weights_of,
)
from polydraft.models.cache import TreeCache
from polydraft.models.checkpoints.folders import is_known
from polydraft.models.checkpoints.plain import (
    LeftOver,
    PlainFolder,
    plain_config,
    plain_names,
    plain_shapes,
    read_plain,
    write_plain,
)
from polydraft.models.checkpoints.silence import first_sentence
from polydraft.models.checkpoints.tiny_folder import export_tiny
from polydraft.models.checks.layout import cache_in
from polydraft.models.checks.room import check_memory
from polydraft.models.checks.trial import agree
from polydraft.models.compiled import LEVELS, CompiledModel, draft_model
from polydraft.models.derived import check_roundable, check_word, read_word, refuse_word, word_of
from polydraft.models.distributed.elsewhere import HOME, ElsewhereModel
from polydraft.models.distributed.mirrored import MirroredModel
from polydraft.models.distributed.parcel import RANKS
from polydraft.models.distributed.ranks import is_other_rank
from polydraft.models.distributed.splitting import check_over_ranks
from polydraft.models.encoders.filling import encoded, filled
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
from polydraft.models.grammar.late import LateGrammar
from polydraft.models.hugging_face import (
    HuggingFaceModel,
    module_of,
    pass_in_words,
    same_model,
    weight_bytes,
    without_head,
)
from polydraft.models.language_model import (
    WHOLE,
    Cache,
    Facts,
    Forward,
    LanguageModel,
    Layer,
    LayerSet,
    Queries,
    ShowsSlots,
)
from polydraft.models.layers.layer_words import AUTO, skip_sets
from polydraft.models.layers.skippable import SubLayer, head_bytes, layer_set, logits_of, sublayers, walk, without
from polydraft.models.layers.target_layer import TargetLayer
from polydraft.models.loading import (
    Pair,
    check_same_size,
    check_same_source,
    check_same_tokens,
    device_named,
    embedded_head,
    load,
    load_draft,
    load_pair,
    load_tokenizer,
    planned,
    save,
    shipped_head,
    tokenizer_of,
)
from polydraft.models.sources import Encoded
from polydraft.models.text.conversation import (
    Conversation,
    Message,
    asked_within,
    check_shown,
    check_template,
    conversation_ids,
)
from polydraft.models.text.marks import Thinking
from polydraft.models.text.stream_decoder import StreamDecoder, bytes_of, text_of
from polydraft.models.tools.answer_form import AnswerForm, answer_form
from polydraft.models.tools.answer_reader import AnswerEvent, AnswerReader
from polydraft.models.tools.call_formats import format_named, format_names
from polydraft.models.tools.call_grammar import Tool

__all__ = [
    "AUTO",
    "BUILT_IN",
    "HOME",
    "LEVELS",
    "OF_A_CALL_THAT_ENDS",
    "OF_DECODERS",
    "OF_ONE_CALL",
    "RANKS",
    "WHOLE",
    "AdditivePenalties",
    "AnswerEvent",
    "AnswerForm",
    "AnswerReader",
    "Cache",
    "CompiledModel",
    "Conversation",
    "ElsewhereModel",
    "Encoded",
    "Facts",
    "Forward",
    "Grammar",
    "HeldBack",
    "HuggingFaceModel",
    "LanguageModel",
    "LateGrammar",
    "Layer",
    "LayerSet",
    "LeftOver",
    "Message",
    "MirroredModel",
    "Pair",
    "PlainFolder",
    "Prepared",
    "Queries",
    "Refusal",
    "RowProcessor",
    "Serial",
    "ShowsSlots",
    "StreamDecoder",
    "SubLayer",
    "TargetLayer",
    "Thinking",
    "TokenBias",
    "Tool",
    "TreeCache",
    "agree",
    "answer_form",
    "as_hugging_faces",
    "asked_within",
    "bytes_of",
    "cache_in",
    "cheapest",
    "check_arguments",
    "check_config",
    "check_made_inside",
    "check_memory",
    "check_over_ranks",
    "check_prompts",
    "check_roundable",
    "check_same_size",
    "check_same_source",
    "check_same_tokens",
    "check_shown",
    "check_template",
    "check_word",
    "chosen_precision",
    "conversation_ids",
    "copied_criterion",
    "device_named",
    "draft_model",
    "drafting_asked_for",
    "embedded_head",
    "encoded",
    "export_tiny",
    "filled",
    "first_sentence",
    "fork_all",
    "format_named",
    "format_names",
    "function_of",
    "head_bytes",
    "inputs_beside",
    "is_known",
    "is_other_rank",
    "is_prepared",
    "kept_product",
    "layer_set",
    "linear_of",
    "load",
    "load_draft",
    "load_pair",
    "load_tokenizer",
    "logits_of",
    "main_input",
    "module_of",
    "one_row",
    "own_inputs",
    "pack_linear_layers",
    "pass_in_words",
    "plain_config",
    "plain_names",
    "plain_shapes",
    "planned",
    "prepare_by_hugging_face",
    "prompts_by_name",
    "prompts_of",
    "read_plain",
    "read_size",
    "read_word",
    "refuse_word",
    "require_count",
    "same_model",
    "save",
    "shipped_head",
    "skip_sets",
    "sources_of",
    "sublayers",
    "take_apart",
    "text_of",
    "tokenizer_of",
    "walk",
    "warn_of_serial",
    "weight_bytes",
    "weight_of",
    "weights_of",
    "without",
    "without_head",
    "word_of",
    "write_plain",
]
