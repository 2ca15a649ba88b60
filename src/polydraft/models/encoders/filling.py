"""Encoder-decoders whose decoder fills a block of masks behind a text in one pass, in which every token sees all."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache

from polydraft.errors import UnsupportedModel
from polydraft.models.checks.layout import evaluating
from polydraft.models.hugging_face import HuggingFaceModel
from polydraft.models.language_model import LanguageModel
from polydraft.models.sources import Encoded, decoder_inputs, encoded_for


@torch.no_grad()
def encoded(model: LanguageModel, source: Any) -> Encoded:
    """Return what a model's decoder reads of a row's source; of None a stand-in, for a row that has no text.

    Raises:
        UnsupportedModel: the source is not what the model's encoder reads, or it is no model of Hugging Face's.
    """
    runs = _module(model)
    with evaluating(runs.modules):
        return encoded_for(runs.model, source)


@torch.no_grad()
def filled(
    model: LanguageModel, source: Encoded, tokens: Int[Tensor, "1 n"], mask_id: int, block: int
) -> Float[Tensor, "1 k V"]:
    """Return the logits of the k masks behind a text: one pass over text and masks, of which every token sees all.

    A token's states depend on what follows it, so no key of the text can be kept; those of the source are.

    Args:
        model: the encoder-decoder.
        source: what its decoder reads beside the text.
        tokens: the text; of one that does not fit before the masks, the last tokens.
        mask_id: the mask.
        block: how many masks k.

    Raises:
        UnsupportedModel: it is no model of Hugging Face's.

    Source: Xia et al., arXiv 2203.16487; hemingkx/SpecDec, specdec_plugins/models/BlockNAT.py.
    """
    runs = _module(model)
    known = tokens[:, -max(1, min(tokens.shape[1], runs.context - block)) :].clamp(0, runs.vocab_size - 1)
    given = torch.cat([known, known.new_full((1, block), mask_id)], dim=1)
    size = given.shape[1]
    all_seen = torch.zeros(1, 1, size, size, dtype=runs.model.dtype, device=given.device)
    named = decoder_inputs(source, given)
    named |= {"decoder_attention_mask": all_seen, runs.cached_as: EncoderDecoderCache(DynamicCache(), source.crossed)}
    with evaluating(runs.modules):
        return runs.model(**named, use_cache=True, **runs.told).logits[:, -block:]


def _module(model: LanguageModel) -> HuggingFaceModel:
    if not isinstance(model, HuggingFaceModel):
        raise UnsupportedModel(f"{type(model).__name__} fills no masks; take an encoder-decoder of Hugging Face's.")
    return model
