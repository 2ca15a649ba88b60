"""What an encoder-decoder writes of sources, as text to train its drafter on.

    ids[n t]      the decoder's text: the token that begins it, and what the target wrote
    valid[n t]    1 where the target wrote the token, so that it may be asked for
    source[n s]   what the encoder read, padded with -1

Hidden states are not kept: some of these models change them or their logits before and behind the output rows, so that
laws come of the target's own pass.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel

from polydraft.errors import UnsupportedModel
from polydraft.models import Encoded, HuggingFaceModel
from polydraft.models.checks.layout import evaluating
from polydraft.models.sources import decoder_inputs
from polydraft.probs import UNFILTERED, SamplingParams, filtered_scores, sample

NOTHING = -1
"""Stands where a source has no more tokens."""


def next_tokens(
    logits: Float[Tensor, "b V"],
    heats: Float[Tensor, " b"],
    random: torch.Generator,
    filters: SamplingParams = UNFILTERED,
) -> Int[Tensor, " b"]:
    """Draw what rows go on with, each at its own temperature and then filtered; the likeliest at 0."""
    uniforms = torch.rand(len(logits), generator=random, dtype=torch.float64).to(logits.device)
    drawn = sample(filtered_scores(logits / heats.clamp_min(0.01).unsqueeze(-1), filters).softmax(-1), uniforms)
    return drawn.where(heats > 0, logits.argmax(-1))


def first_token(target: PreTrainedModel) -> int:
    """Return the token that an encoder-decoder's text begins with.

    Raises:
        UnsupportedModel: its configurations name none.
    """
    for config in (target.generation_config, target.config):
        for name in ("decoder_start_token_id", "bos_token_id"):
            found = getattr(config, name, None)
            if isinstance(found, int):
                return found
    raise UnsupportedModel(f"{type(target).__name__} names no token that its text begins with.")


@torch.no_grad()
def answered(
    target: HuggingFaceModel,
    sources: Sequence[Int[Tensor, " _"]],
    heats: Float[Tensor, " b"],
    sizes: tuple[int, int],
    end_ids: Sequence[int],
    random: torch.Generator,
    filters: SamplingParams = UNFILTERED,
) -> dict[str, Tensor]:
    """Return what a target writes of sources, as a shard's tensors; it stops where all texts have ended.

    Args:
        heats: the temperature of each text.
        sizes: of texts and of sources, in tokens.
        end_ids: tokens that end a text; () to go on behind them.
        filters: of what is drawn, at their temperature of 1.

    Raises:
        UnsupportedModel: nothing says how a text begins.
    """
    (length, width), rows, model, device = sizes, len(sources), target.model, target.device
    source = torch.full((rows, width), NOTHING, dtype=torch.int64, device=device)
    for row, one in enumerate(sources):
        source[row, : len(one)] = one
    ids = torch.zeros(rows, length, dtype=torch.int64, device=device)
    ids[:, 0], ends = first_token(model), torch.tensor([*end_ids], device=device)
    ended = torch.zeros(rows, dtype=torch.bool, device=device)
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    with evaluating(target.modules):
        read = encoded_sources(model, source)
        for place in range(1, length):
            given = {**decoder_inputs(read, ids[:, place - 1 : place]), target.cached_as: cache}
            logits = model(**given, use_cache=True, **target.told).logits[:, -1].float()
            ids[:, place] = next_tokens(logits, heats, random, filters)
            ended |= torch.isin(ids[:, place], ends)
            if bool(ended.all()):
                break
    valid = (torch.arange(length, device=device) > 0).to(torch.uint8).repeat(rows, 1)
    return {"ids": ids.int(), "valid": valid, "source": source.int()}


def encoded_sources(model: PreTrainedModel, source: Int[Tensor, "b s"]) -> Encoded:
    """Return what a model's encoder makes of padded sources, all rows together."""
    mask, encoder = (source != NOTHING).long(), model.get_encoder()
    made = encoder(input_ids=source.clamp_min(0), attention_mask=mask, return_dict=True)
    return Encoded(made[0], mask, encoder)
