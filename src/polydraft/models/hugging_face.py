"""The one door to Hugging Face models: any causal model with a standard attention cache, scored under a tree mask."""

import inspect
from typing import cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from polydraft.errors import InvalidParameter, UnsupportedModel
from polydraft.models.cache import TreeCache
from polydraft.models.protocol import Cache, Forward

ATTENTION_WITH_MASKS = ("sdpa", "eager")
CACHED_LAYERS = ("full_attention", "sliding_attention")


class HuggingFaceModel:
    """A Hugging Face causal model as polydraft's `LanguageModel`.

    The model's own code runs unchanged: it receives a four-dimensional mask, explicit position ids and a
    `TreeCache`. A sliding attention window is exact as long as the text fits into it, so the context is cut to it.

    Args:
        model: the model, in evaluation mode, on its device, in its precision.

    Raises:
        UnsupportedModel: the model keeps a recurrent state, takes no position ids (ALiBi), is an encoder-decoder,
            or runs an attention kernel that takes no masks; the text says which and what to do.
    """

    def __init__(self, model: nn.Module) -> None:
        pretrained = cast(PreTrainedModel, model)
        check_supported(pretrained)
        self.model = pretrained.eval()
        config = self.model.config.get_text_config()
        self.vocab_size: int = config.vocab_size
        self.context: int = _context(config)
        self.layers: int = config.num_hidden_layers
        self.cuts_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    @property
    def device(self) -> torch.device:
        """The model's device."""
        return self.model.device

    def new_cache(self, batch: int, capacity: int) -> TreeCache:
        """Return an empty cache with `capacity` slots per row."""
        return TreeCache(self.layers, batch, capacity)

    @torch.no_grad()
    def forward(
        self,
        tokens: Int[Tensor, "b n"],
        positions: Int[Tensor, "b n"],
        mask: Bool[Tensor, "b n m"],
        cache: Cache,
        starts: Int[Tensor, "b"],
        *,
        hidden_layers: tuple[int, ...] = (),
        logits_to_keep: int = 0,
    ) -> Forward:
        """Score tokens under the mask, without gradients; see `LanguageModel.forward`.

        Raises:
            InvalidParameter: the cache is not one that `new_cache` returned.
        """
        if not isinstance(cache, TreeCache):
            raise InvalidParameter(f"cache must come from new_cache, but is a {type(cache).__name__}.")
        cache.place(starts, tokens.shape[1], mask.shape[-1])
        return self.scored(tokens, positions, mask, cache, hidden_layers, logits_to_keep)

    def scored(
        self,
        tokens: Int[Tensor, "b n"],
        positions: Int[Tensor, "b n"],
        mask: Bool[Tensor, "b n m"],
        cache: TreeCache,
        hidden_layers: tuple[int, ...],
        logits_to_keep: int,
    ) -> Forward:
        """Score tokens into a cache that knows their slots, by the model's own code: `forward` after its checks."""
        extra = {"logits_to_keep": logits_to_keep} if logits_to_keep and self.cuts_logits else {}
        if hidden_layers:
            extra["output_hidden_states"] = True
        outputs = self.model(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=None if _sees_all(mask) else self.four_dimensional(mask),
            past_key_values=cache,
            use_cache=True,
            **extra,
        )
        return Forward(outputs.logits, {layer: outputs.hidden_states[layer] for layer in hidden_layers})

    def four_dimensional(self, mask: Bool[Tensor, "b n m"]) -> Float[Tensor, "b 1 n m"]:
        """Return the mask as numbers to be added to the attention's scores; torch would else convert it every layer."""
        open_everywhere = torch.zeros(mask.shape, dtype=self.model.dtype, device=mask.device)
        return open_everywhere.masked_fill_(~mask, torch.finfo(self.model.dtype).min).unsqueeze(1)


def _sees_all(mask: Bool[Tensor, "b n m"]) -> bool:
    """Tell whether this is one token that sees all slots: without a mask attention is faster. GPUs are not asked."""
    return mask.shape[:2] == (1, 1) and mask.device.type == "cpu" and bool(mask.all())


def check_supported(model: PreTrainedModel) -> None:
    """Check that a model can score a token tree.

    Raises:
        UnsupportedModel: it cannot; the text names the reason.
    """
    config = model.config.get_text_config()
    name = type(model).__name__
    arguments = inspect.signature(model.forward).parameters
    layer_types = getattr(config, "layer_types", None) or ()
    strange = sorted({kind for kind in layer_types if kind not in CACHED_LAYERS})
    if model.config.is_encoder_decoder:
        raise UnsupportedModel(f"{name} is an encoder-decoder model; only causal models can be used.")
    if getattr(model, "_is_stateful", False) or "past_key_values" not in arguments:
        raise UnsupportedModel(f"{name} keeps a recurrent state, which cannot branch into a token tree.")
    if strange:
        raise UnsupportedModel(f"{name} has {strange[0]} layers, whose state cannot branch into a token tree.")
    if "position_ids" not in arguments or getattr(config, "alibi", False):
        raise UnsupportedModel(f"{name} takes no position ids, so siblings of a tree cannot share a position.")
    if "local" in getattr(config, "attention_layers", ()):
        raise UnsupportedModel(f"{name} has local attention, which counts cache slots instead of positions.")
    if model.config._attn_implementation not in ATTENTION_WITH_MASKS:
        raise UnsupportedModel(
            f"{name} runs {model.config._attn_implementation} attention, which takes no tree masks; "
            'load it with attn_implementation="sdpa".'
        )


def _context(config: object) -> int:
    longest = getattr(config, "max_position_embeddings", None) or 2**31 - 1
    window = getattr(config, "sliding_window", None)
    slides = "sliding_attention" in (getattr(config, "layer_types", None) or ("sliding_attention",))
    return min(longest, window) if window and slides else longest
