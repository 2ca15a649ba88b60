"""The one door to Hugging Face models: any causal model with a standard attention cache, scored under a tree mask."""

import inspect

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from polydraft.errors import InvalidParameter
from polydraft.models.cache import TreeCache
from polydraft.models.checks import check_model, check_trial, evaluating
from polydraft.models.protocol import Cache, Forward, LanguageModel


class HuggingFaceModel:
    """A Hugging Face causal model as polydraft's `LanguageModel`.

    The model's own code runs unchanged: it receives a four-dimensional mask, explicit position ids and a
    `TreeCache`. A sliding attention window is exact as long as the text fits into it, so the context is cut to it.
    Passes run in evaluation mode; between them every layer is in the mode that it was in. Layers that are put into the
    model later are not looked after: wrap it anew.

    Args:
        model: the model, on its device, in its precision.

    Raises:
        InvalidParameter: this is no model; the text says what to pass.
        UnsupportedModel: the model keeps a recurrent state, takes no position ids (ALiBi), is an encoder-decoder,
            has no head for next tokens, attends in both directions, or runs an attention kernel that takes no masks;
            or a trial of a few tokens shows that it cannot score trees (`check_trial`). The text says which and what
            to do.
    """

    def __init__(self, model: object) -> None:
        self.model = check_model(model)
        self.modules = tuple(self.model.modules())
        config = self.model.config.get_text_config()
        self.vocab_size: int = config.vocab_size
        self.context: int = _context(config)
        self.layers: int = config.num_hidden_layers
        self.cuts_logits = "logits_to_keep" in inspect.signature(self.model.forward).parameters
        check_trial(self.model, self if type(self) is HuggingFaceModel else HuggingFaceModel(model))

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
        with evaluating(self.modules):
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


def same_model(one: LanguageModel, other: LanguageModel) -> bool:
    """Tell whether two are one model, whichever way each runs it."""
    if isinstance(one, HuggingFaceModel) and isinstance(other, HuggingFaceModel):
        return one.model is other.model
    return one is other


def weights_of(model: nn.Module) -> tuple[tuple[int, int], ...]:
    """Return what changes when a model's weights are changed or moved: their places in memory and their versions."""
    versions = ((one, 0 if one.is_inference() else one._version) for one in model.parameters())
    return tuple((one.data_ptr(), version) for one, version in versions)


def _sees_all(mask: Bool[Tensor, "b n m"]) -> bool:
    """Tell whether this is one token that sees all slots: without a mask attention is faster. GPUs are not asked."""
    return mask.shape[:2] == (1, 1) and mask.device.type == "cpu" and bool(mask.all())


def _context(config: object) -> int:
    """Return the most tokens of a text; with frequencies that switch by the longest position of a pass, up to there."""
    longest = getattr(config, "max_position_embeddings", None) or 2**31 - 1
    rotation = getattr(config, "rope_parameters", None) or {}
    if isinstance(rotation, dict) and rotation.get("rope_type") == "longrope":
        longest = min(longest, rotation.get("original_max_position_embeddings") or longest)
    window = getattr(config, "sliding_window", None)
    slides = "sliding_attention" in (getattr(config, "layer_types", None) or ("sliding_attention",))
    return min(longest, window) if window and slides else longest
