"""Whether a token's logits depend on the other tokens of its pass, which drafts beside it would change.

Experts with a capacity pass tokens over when a pass brings too many, and layers that quantise what comes in scale it by
the largest number of the pass. Masks change neither, and texts differ from plain decoding's.
"""

from typing import Any, Protocol

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from polydraft.models.fused.few_bits import rounds_short
from polydraft.models.language_model import LanguageModel
from polydraft.models.sources import is_encoder_decoder

BESIDE = 7
"""How many tokens stand beside the one that is looked at."""
DEPENDING, DEPENDING_MIXED = 0.0001, 0.1
"""How far logits may be apart, relative to their spread, when other tokens stand beside in passes of one size; the
second in half precision with experts, which then multiply other numbers of rows. Tiny models of every type came
to 1e-6, in half precision to 0; those that scale numbers by the pass came to 0.004 at least."""
PASSED_OVER, HALF_PASSED_OVER = 0.02, 0.3
"""The same for passes of one and of eight equal tokens, whose products may be rounded otherwise; the second in half
precision. Who passes tokens over leaves out a large part of a layer."""
EXPERTS = ("expert", "moe")
"""Numbers with such words in their names tell of experts."""


class CrowdedModel(LanguageModel, Protocol):
    """A model as the engine runs it."""

    model: PreTrainedModel


def known_crowd(model: PreTrainedModel) -> str | None:
    """Return in words which of a model's layers are known to score a token by the others of its pass; None for none.

    An encoder reads its input once, whatever is drafted.
    """
    encoder = {id(one) for one in model.get_encoder().modules()} if is_encoder_decoder(model) else set[int]()
    said = (_capacity(part) or _quantised(part) for part in model.modules() if id(part) not in encoder)
    return next((one for one in said if one is not None), None)


def tried_crowd(door: CrowdedModel) -> str | None:
    """Return in words what passes over eight tokens show of a dependence on others; None if there is none."""
    alone, equal, mixed = _beside(door) if door.facts.branches else _before(door)
    half = rounds_short(door.model) or torch.finfo(door.model.dtype).bits < 32
    spread = _rms(alone - alone.mean())
    config: Any = door.model.config.get_text_config(decoder=True)
    experts = any(word in name for name, size in vars(config).items() if type(size) is int for word in EXPERTS)
    if _rms(equal - alone) > (HALF_PASSED_OVER if half else PASSED_OVER) * spread:
        return "passes tokens over where a pass brings many that are alike, as experts with a capacity do"
    if _rms(mixed - equal) > (DEPENDING_MIXED if half and experts else DEPENDING) * spread:
        return "scores a token otherwise beside other tokens, as layers do that quantise what comes in by the pass"
    return None


def _capacity(part: nn.Module) -> str | None:
    """Tell of the capacity of experts; one that is all of a pass is never filled."""
    share, most = getattr(part, "moe_eval_capacity_token_fraction", None), getattr(part, "expert_capacity", None)
    if isinstance(share, int | float) and share > 0:
        say = f"has experts that take a share of {share} of a pass's tokens (moe_eval_capacity_token_fraction)"
        return say if share < 1 else None
    return f"has experts that take at most {most} tokens of a pass (expert_capacity)" if isinstance(most, int) else None


def _quantised(part: nn.Module) -> str | None:
    """Tell of layers that quantise by the pass what comes in: torch's dynamic ones, and LLM.int8 with its outliers."""
    kind, state = type(part), getattr(part, "state", None)
    outliers = getattr(state, "threshold", 0) if kind.__name__ == "Linear8bitLt" else 0
    if outliers:
        return f"has layers of LLM.int8 (Linear8bitLt), whose outliers, above {outliers}, are those of the whole pass"
    if "quantized.dynamic" in kind.__module__:
        return f"has layers of dynamic quantisation ({kind.__module__}), which scale what comes in by the whole pass"
    return None


def _beside(door: CrowdedModel) -> tuple[Float[Tensor, " V"], Float[Tensor, " V"], Float[Tensor, " V"]]:
    """Return a token's logits alone behind a text, beside seven that are the same, and beside seven others."""
    token, others = _tokens(door)
    cache = door.new_cache(1, BESIDE + 2)

    def scored(tokens: list[int], place: int) -> Float[Tensor, " V"]:
        given = torch.tensor([tokens], device=door.facts.device)
        own = torch.eye(len(tokens), dtype=torch.bool, device=door.facts.device)
        mask = torch.nn.functional.pad(own, (place, 0), value=True).unsqueeze(0)
        start = torch.full((1,), place, device=door.facts.device)
        return door.forward(given, torch.full_like(given, place), mask, cache, start).logits[0, -1].float()

    scored([(token + 1) % door.facts.vocab_size], 0)
    alone, equal = scored([token], 1), scored([token] * (BESIDE + 1), 1)
    return alone, equal, scored([*others, token], 1)


def _before(door: CrowdedModel) -> tuple[Float[Tensor, " V"], Float[Tensor, " V"], Float[Tensor, " V"]]:
    """Return the same of a model of chains, whose token begins a text, without the pass over it alone.

    Experts that take tokens in the order of the text spare the first; chains that are read in pieces show these.
    """
    token, others = _tokens(door)
    size = min(BESIDE + 1, door.facts.context)

    def scored(tokens: list[int]) -> Float[Tensor, " V"]:
        given = torch.tensor([tokens], device=door.facts.device)
        places = torch.arange(len(tokens), device=door.facts.device).unsqueeze(0)
        mask = (places.unsqueeze(-1) >= places.unsqueeze(-2)).view(1, len(tokens), len(tokens))
        return door.forward(given, places, mask, door.new_cache(1, size), places[:, 0]).logits[0, 0].float()

    equal = scored([token] * size)
    return equal, equal, scored([token, *others][:size])


def _tokens(door: CrowdedModel) -> tuple[int, list[int]]:
    """Return a token, and seven others as far apart as the vocabulary allows; the first ones are often special."""
    token, step = door.facts.vocab_size // 3, max(1, door.facts.vocab_size // (2 * BESIDE))
    return token, [(token + 2 + step * place) % door.facts.vocab_size for place in range(BESIDE)]


def _rms(numbers: Float[Tensor, " V"]) -> float:
    return float(numbers.square().mean().sqrt())
