"""Hugging Face's generation call: its arguments, what it prepares, and the processors that it hands over."""

from polydraft.models.generation.additions import AdditivePenalties, HeldBack, TokenBias
from polydraft.models.generation.arguments import (
    HONOURED,
    OF_A_CALL_THAT_ENDS,
    OF_ONE_CALL,
    REFUSED,
    Refusal,
    check_arguments,
    check_config,
    drafting_asked_for,
    require_count,
)
from polydraft.models.generation.criteria import copied as copied_criterion
from polydraft.models.generation.encodings import inputs_beside, one_row, prompts_by_name, prompts_of
from polydraft.models.generation.prepare import (
    Prepared,
    as_hugging_faces,
    check_prompts,
    is_prepared,
    prepare_by_hugging_face,
    take_apart,
)
from polydraft.models.generation.processors import BUILT_IN, RowProcessor, Serial, fork_all, warn_of_serial

__all__ = [
    "BUILT_IN",
    "HONOURED",
    "OF_A_CALL_THAT_ENDS",
    "OF_ONE_CALL",
    "REFUSED",
    "AdditivePenalties",
    "HeldBack",
    "Prepared",
    "Refusal",
    "RowProcessor",
    "Serial",
    "TokenBias",
    "as_hugging_faces",
    "check_arguments",
    "check_config",
    "check_prompts",
    "copied_criterion",
    "drafting_asked_for",
    "fork_all",
    "inputs_beside",
    "is_prepared",
    "one_row",
    "prepare_by_hugging_face",
    "prompts_by_name",
    "prompts_of",
    "require_count",
    "take_apart",
    "warn_of_serial",
]
