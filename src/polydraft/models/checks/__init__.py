"""What a model must be and do before it is trusted with token trees, and how its passes leave it as it was."""

from polydraft.models.checks.evaluation import device_of, evaluating, for_logits, is_offloaded
from polydraft.models.checks.layout import cache_in, cache_name, kept_by
from polydraft.models.checks.supported import (
    check_architecture,
    check_model,
    check_supported,
    counts_itself,
    reads_prompts_both_ways,
    sees,
)
from polydraft.models.checks.trial import agree, check_trial
from polydraft.models.checks.wrapped import unwrapped

__all__ = [
    "agree",
    "cache_in",
    "cache_name",
    "check_architecture",
    "check_model",
    "check_supported",
    "check_trial",
    "counts_itself",
    "device_of",
    "evaluating",
    "for_logits",
    "is_offloaded",
    "kept_by",
    "reads_prompts_both_ways",
    "sees",
    "unwrapped",
]
