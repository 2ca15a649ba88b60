"""What can be aligned: targets whose rows follow from their last states, draft models, and forms that suit both."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from polydraft.bench.aligning.align_plan import AUTO, AlignPlan
from polydraft.drafters import Drafter, drafter_of
from polydraft.engine import load
from polydraft.errors import InvalidParameter, UnsupportedModel, VocabularyMismatch
from polydraft.models import HuggingFaceModel, Pair
from polydraft.training.alignment.draft_forms import FORMS, TUNED, UNASKED, DraftForm
from polydraft.training.heads.losses.row_losses import TargetEnds

EXACT = 0.05
"""How far logits made of kept states may be from the target's own, relative to the largest: states are rounded."""


def loaded(target: str | Path, draft: str | Path | None, dtype: Any, device: str) -> Pair:
    """Load the models, and say which form needs no tokens of a draft's own where these differ."""
    try:
        return load(target, draft, dtype=dtype, device=device)
    except VocabularyMismatch as error:
        told = str(error).removesuffix(".")
        raise VocabularyMismatch(f"{told}; or leave --draft out: --form small has the target's tokens.") from error


def checked_target(model: nn.Module) -> HuggingFaceModel:
    """Return a target whose rows follow from its last states and a table.

    Raises:
        InvalidParameter: it has an encoder, or its rows are no numbers.
        UnsupportedModel: they do not follow so.
    """
    target = HuggingFaceModel(model)
    if target.facts.encodes:
        raise InvalidParameter(
            f"{type(model).__name__} has an encoder, and drafts are aligned for decoders; the drafter of an "
            "encoder-decoder is made by `polydraft train head spec-drafter`."
        )
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


def wanted_forms(plan: AlignPlan, pair: Pair, *, given: bool) -> list[DraftForm]:
    """Return the forms that are looked at, the cheapest first.

    Args:
        plan: what is asked for.
        pair: the models.
        given: whether the user named the draft, and it does not come with the target.

    Raises:
        InvalidParameter: the draft is none that can be tuned, there is none to tune, or no form learns by a loss.
    """
    if given and not _tunes(pair.draft):
        name = pair.draft.name if isinstance(pair.draft, Drafter) else type(pair.draft).__name__
        raise InvalidParameter(
            f"--draft is {name}, and draft models alone are tuned; a head learns on by `polydraft train head KIND "
            "--start FOLDER`."
        )
    if given and not all(bool(one.isfinite().all()) for one in pair.draft.parameters()):
        raise InvalidParameter("The draft's weights are no numbers: its folder is damaged.")
    if plan.form == TUNED and not given:
        raise InvalidParameter("There is no draft model to tune: name one by --draft, or take another --form.")
    words = ([TUNED] if given else []) + [*UNASKED] if plan.form == AUTO else [plan.form]
    found = [FORMS[word] for word in words if not plan.losses or {*plan.losses} <= {*FORMS[word].allowed}]
    if not found:
        raise InvalidParameter(
            f"No form that fits learns by {' and '.join(plan.losses)}; name a --form, or other losses."
        )
    return found


def _tunes(draft: Any) -> bool:
    """Tell whether a draft is a model of its own that can be tuned."""
    if not isinstance(draft, nn.Module):
        return False
    return drafter_of(draft).name == "model" and all(one.is_floating_point() for one in draft.state_dict().values())
