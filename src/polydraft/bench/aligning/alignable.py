"""What can be aligned: targets whose rows follow from their last states, draft models, and forms that suit both."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from polydraft.bench.aligning.align_plan import AlignPlan
from polydraft.bench.aligning.prompt_split import different
from polydraft.bench.prompts import Prompt
from polydraft.drafters import Drafter, drafter_of, is_boosted, is_head
from polydraft.engine import load
from polydraft.errors import CheckpointError, InvalidParameter, UnsupportedModel, VocabularyMismatch
from polydraft.fetched import is_derived, is_stack
from polydraft.models import HuggingFaceModel, Pair, check_same_tokens, load_tokenizer, planned
from polydraft.training.alignment.draft_forms import GIVEN, UNASKED, DraftForm, check_tunable, draft_form
from polydraft.training.alignment.draft_worth import check_weights
from polydraft.training.heads.losses.row_losses import TargetEnds

NO_MODEL = (
    "is no draft model of its own, and these alone are tuned; a head learns on by `polydraft train head KIND --start "
    "FOLDER`, and --form auto makes drafts that are compared with it."
)
EXACT = 0.05
"""How far logits made of kept states may be from the target's own, relative to the largest: states are rounded."""


LENGTH = 256
"""Tokens of each text, its prompt included."""


def check_asked(
    target: str | Path, draft: str | Path | None, plan: AlignPlan, prompts: Sequence[Prompt] | None
) -> None:
    """Refuse what configurations and tokenizers tell, before weights are read.

    Raises:
        CheckpointError: a model is missing or damaged.
        InvalidParameter: an encoder-decoder, a draft or form that cannot be, or fewer than three prompts that fit.
        UnsupportedModel: a model that cannot score drafts.
        VocabularyMismatch: the draft has other tokens.
    """
    facts = planned(target)
    if facts.encodes:
        raise InvalidParameter(encoder_in_words(str(target)))
    for form in plan.named_forms:
        check_tunable(form, draft)
    drafting = is_stack(draft) or is_derived(draft) or is_head(draft) or is_boosted(draft)
    if drafting:
        _check_untuned(plan, str(draft))
    elif draft is not None:
        planned(draft)
    with suppress(CheckpointError):  # without tokenizers sizes are compared, when models are loaded
        tokenizer = load_tokenizer(target)
        if prompts is not None:
            different(tokenizer, prompts, room_of(facts.context, plan))
        if draft is not None and not drafting:
            _check_tokens(partial(check_same_tokens, tokenizer, load_tokenizer(draft), str(target), str(draft)))


def room_of(context: int, plan: AlignPlan) -> int:
    """Return how many tokens a prompt may have.

    Raises:
        InvalidParameter: there is none.
    """
    room = min(min(LENGTH, context) * 3 // 4, context - plan.max_new_tokens - 1)
    if room < 1:
        raise InvalidParameter(f"--max-new-tokens {plan.max_new_tokens} leaves no room for a prompt in the context.")
    return room


def encoder_in_words(name: str) -> str:
    """Say that a target has an encoder."""
    return (
        f"{name} has an encoder, and drafts are aligned for decoders; the drafter of an encoder-decoder is made by "
        "`polydraft train head spec-drafter`."
    )


def _check_tokens(check: Callable[[], object]) -> Any:
    try:
        return check()
    except VocabularyMismatch as error:
        told = str(error).removesuffix(".")
        raise VocabularyMismatch(f"{told}; or leave --draft out: --form small has the target's tokens.") from error


def loaded(target: str | Path, draft: str | Path | None, dtype: Any, device: str) -> Pair:
    """Load the models, and say which form needs no tokens of a draft's own where these differ."""
    return _check_tokens(partial(load, target, draft, dtype=dtype, device=device))


def checked_target(model: nn.Module) -> HuggingFaceModel:
    """Return a target whose rows follow from its last states and a table.

    Raises:
        InvalidParameter: it has an encoder, or its rows are no numbers.
        UnsupportedModel: they do not follow so.
    """
    target = HuggingFaceModel(model)
    if target.facts.encodes:
        raise InvalidParameter(encoder_in_words(type(model).__name__))
    ends = TargetEnds.of(target.model)
    ids = (torch.arange(4, device=target.device) % target.vocab_size).unsqueeze(0)
    with torch.no_grad():
        passed = target.model(input_ids=ids, output_hidden_states=True, use_cache=False)
        own, made = passed.logits.float(), ends.output(passed.hidden_states[-1].float())
    if not bool(own.isfinite().all()):
        raise InvalidParameter(
            f"The target's logits are no numbers: its weights are damaged, or {own.dtype} overflows."
        )
    if made.shape != own.shape or float((made - own).abs().max()) > EXACT * (1 + float(own.abs().max())):
        raise UnsupportedModel(
            f"No draft can be aligned for {type(model).__name__} yet: its logits are no product of its last states, "
            "but scaled or capped."
        )
    return target


def wanted_forms(plan: AlignPlan, draft: Any, name: str) -> list[DraftForm]:
    """Return the forms that may be looked at, in that order.

    Args:
        plan: what is asked for.
        draft: the draft that the user named; None where none was, whatever comes with the target.
        name: what it is called.

    Raises:
        InvalidParameter: the draft is none that can be tuned and has to be, or no form learns by a loss.
    """
    given = tunable(draft)
    if draft is not None:
        check_weights(draft if isinstance(draft, Drafter) else drafter_of(draft))
        if not given:
            _check_untuned(plan, name)
    words = plan.named_forms or (*(GIVEN if given else ()), *UNASKED)
    forms = [draft_form(word) for word in dict.fromkeys(words)]
    found = [form for form in forms if not plan.losses or {*plan.losses} <= {*form.allowed}]
    if not found:
        raise InvalidParameter(
            f"No form that fits learns by {' and '.join(plan.losses)}; name a --form, or other losses."
        )
    return found


def _check_untuned(plan: AlignPlan, name: str) -> None:
    """Raise `InvalidParameter` where a draft is to learn on that cannot; else new ones are compared with it."""
    if any(draft_form(form).tunes for form in plan.named_forms):
        raise InvalidParameter(f"--draft {name} {NO_MODEL}")


def tunable(draft: Any) -> bool:
    """Tell whether a draft is a model of its own that can be tuned."""
    if not isinstance(draft, nn.Module):
        return False
    return drafter_of(draft).name == "model" and all(one.is_floating_point() for one in draft.state_dict().values())
