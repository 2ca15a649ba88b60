"""Random models of a few thousand weights, whose laws can be enumerated: for checks and examples, not for text."""

import copy

import torch
from torch import Generator, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from polydraft.errors import InvalidParameter
from polydraft.probs import Noise

SPREAD = 0.6
"""Standard deviation of the weights: large enough that next-token laws are far from uniform."""


def tiny_target(seed: int = 0, vocabulary: int = 8, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """Return a random Llama model of two layers over a small vocabulary; the same arguments give the same weights.

    It has no end-of-text token, so it always gives as many tokens as asked for. torch's global random state is left
    as it was.

    Raises:
        InvalidParameter: a vocabulary of fewer than two tokens.
    """
    if vocabulary < 2:
        raise InvalidParameter(f"vocabulary must be at least 2, but is {vocabulary}.")
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        model = LlamaForCausalLM(config)
    weights, _ = Noise.from_seed(seed, 2).generators
    return _shaken(model, SPREAD, weights, keep=0.0, dtype=dtype)


def tiny_draft(target: PreTrainedModel, distance: float = 0.05, seed: int = 0) -> PreTrainedModel:
    """Return a copy of a tiny target with noise of standard deviation `distance` on its weights: a draft model.

    At .02, .05 and .1 its next-token laws overlap the target's by about nine, seven and six tenths.
    """
    _, noise = Noise.from_seed(seed, 2).generators  # another stream than the target's own weights came from
    return _shaken(copy.deepcopy(target).double(), distance, noise, keep=1.0, dtype=target.dtype)


@torch.no_grad()
def _shaken(
    model: PreTrainedModel, spread: float, stream: Generator, keep: float, dtype: torch.dtype
) -> PreTrainedModel:
    """Scale all weight matrices by `keep` and add noise; the normalisations' gains stay."""
    for weights in model.parameters():
        if weights.dim() > 1:
            weights.copy_(keep * weights + spread * torch.randn(weights.shape, generator=stream))
    nn.Module.to(model, dtype)  # transformers hides the signature of its own
    return model.eval()
