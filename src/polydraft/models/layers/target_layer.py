"""One more decoder layer of a model's own class, over keys that the caller keeps."""

import copy
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from polydraft.errors import UnsupportedModel
from polydraft.models.anatomy import layers_of

FULL = "full_attention"
NORMS = "input_layernorm", "norm"
"""What layers call the norm before their first part."""
Shown = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Takes the keys and values of a pass, "b g n h" each, and returns all that its tokens may look at."""


class _Shower:
    """What a layer takes for its cache; it shows what the caller keeps."""

    def __init__(self, shown: Shown) -> None:
        self.shown = shown

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return self.shown(keys, values)


class TargetLayer(nn.Module):
    """A decoder layer of a model's own class, or several in a row where a layer of the model's is one sub-layer.

    Its weights are not set yet. The rotary positions are the model's own, which stay where they are.

    Args:
        model: the model.
        dtype: the precision of the weights, but for those that the model keeps in single precision.
        kinds: of the layers in a row, by the words of the model's configuration, one of them with attention; such
            layers turn no positions. None for one layer like the model's last with full attention.

    Raises:
        UnsupportedModel: the model's layers are not in one list, keep no keys, or have no norm whose class is known.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, kinds: Sequence[str] | None = None) -> None:
        super().__init__()
        target = cast(PreTrainedModel, model)
        config = copy.deepcopy(target.config.get_text_config(decoder=True))
        config._attn_implementation = "sdpa" if target._supports_sdpa else "eager"
        layers = layers_of(target)
        known = getattr(config, "layer_types", None) or [FULL] * len(layers)
        last = max((place for place, kind in enumerate(known) if kind == FULL), default=-1)
        like = layers[last] if last >= 0 else None
        norm = next((one for one in NORMS if like is not None and one in dict(like.named_children())), None)
        self.rotary = (getattr(cast(Any, target.get_decoder()), "rotary_emb", None),)
        if like is None or norm is None or (self.rotary[0] is None and kinds is None):
            raise UnsupportedModel(
                f"No layer like those of {type(target).__name__} can be made: it has no usual parts."
            )
        if kinds is not None:
            config.layer_types = [*kinds]
        with torch.device("meta"):
            places = [last] if kinds is None else range(len(kinds))
            made = nn.ModuleList(type(like)(config, place) for place in places).to(dtype)
        strict = getattr(target, "_keep_in_fp32_modules_strict", None) or ()
        for name, value in [*made.named_parameters(), *made.named_buffers()]:
            if any(one in name for one in strict):
                value.data = value.data.float()
        if {name for name, _ in made.named_buffers()} - made.state_dict().keys():  # no checkpoint could fill them
            raise UnsupportedModel(f"No layer like those of {type(target).__name__} can be made: it keeps buffers.")
        self.layers = made.to_empty(device=target.device).eval()
        self.norm, self.width, self.dtype = norm, config.hidden_size, dtype

    def new_norm(self) -> nn.Module:
        """Return a norm of the layer's own kind, over its width."""
        return copy.deepcopy(self.layers[0].get_submodule(self.norm)).to(self.dtype)

    @torch.no_grad()
    def key_shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return how many keys and values a token has, and how wide they are: found by a trial."""
        found: list[tuple[int, int]] = []

        def shown(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
            found.extend((one.shape[1], one.shape[3]) for one in (keys, values))
            return keys, values

        device = next(self.parameters()).device
        one = torch.zeros(1, 1, dtype=torch.int64, device=device)
        states = torch.zeros(1, 1, self.width, dtype=self.dtype, device=device)
        self(states, one, shown, torch.ones(1, 1, 1, dtype=torch.bool, device=device))
        if len(found) != 2:
            raise UnsupportedModel(f"{type(self.layers[0]).__name__} keeps no keys in one place.")
        return found[0], found[1]

    def forward(
        self, states: Float[Tensor, "b n d"], places: Int[Tensor, "b n"], shown: Shown, mask: Bool[Tensor, "b n m"]
    ) -> Float[Tensor, "b n d"]:
        """Return the layer's output.

        Args:
            places: the tokens' positions.
            shown: gives all keys and values, given the tokens' own.
            mask: True where a token may look at a key.
        """
        (rotary,) = self.rotary
        added = torch.zeros(mask.shape, dtype=states.dtype, device=states.device)
        added = added.masked_fill(~mask, torch.finfo(states.dtype).min).unsqueeze(1)
        turn = None if rotary is None else cast(Any, rotary)(states, position_ids=places)
        keys, found = _Shower(shown), states
        for one in self.layers:
            given = {"attention_mask": added, "position_ids": places, "position_embeddings": turn}
            made = one(found, **given, past_key_values=keys, use_cache=True)
            found = made if isinstance(made, Tensor) else made[0]
        return found
