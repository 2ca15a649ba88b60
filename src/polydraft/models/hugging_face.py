"""The one door to Hugging Face models: any causal model with a standard attention cache, scored under a tree mask."""

import inspect
from collections.abc import Sequence
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from polydraft.errors import InvalidParameter, UnsupportedModel
from polydraft.models.cache import TreeCache
from polydraft.models.checks import check_model, check_trial, evaluating
from polydraft.models.derived.layers import without_layers
from polydraft.models.layers import observed_layers
from polydraft.models.protocol import Cache, Forward, LanguageModel, Layer

TRIED = 4
TOLERANCE = 0.02
"""How far the logits of a model that was cut may be from its own, relative to the largest; bfloat16 rounds so much."""


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
        self._parts: dict[range, HuggingFaceModel] = {}
        check_trial(self.model, self if type(self) is HuggingFaceModel else HuggingFaceModel(model))

    @property
    def device(self) -> torch.device:
        """The model's device."""
        return self.model.device

    def new_cache(self, batch: int, capacity: int, sources: Sequence[Any] | None = None) -> TreeCache:
        """Return an empty cache with `capacity` slots per row.

        Raises:
            UnsupportedModel: sources are given; a decoder alone reads nothing but text.
        """
        if sources is not None:
            raise UnsupportedModel(f"{type(self.model).__name__} reads text alone; leave the sources out.")
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
        hidden_layers: tuple[Layer, ...] = (),
        logits_to_keep: int = 0,
        embeddings: Float[Tensor, "b n d"] | None = None,
    ) -> Forward:
        """Score tokens under the mask, without gradients; see `LanguageModel.forward`.

        Raises:
            InvalidParameter: the cache is not one that `new_cache` returned.
        """
        if not isinstance(cache, TreeCache):
            raise InvalidParameter(f"cache must come from new_cache, but is a {type(cache).__name__}.")
        cache.place(starts, tokens.shape[1], mask.shape[-1])
        return self.scored(tokens, positions, mask, cache, hidden_layers, logits_to_keep, embeddings)

    def scored(
        self,
        tokens: Int[Tensor, "b n"],
        positions: Int[Tensor, "b n"],
        mask: Bool[Tensor, "b n m"],
        cache: TreeCache,
        hidden_layers: tuple[Layer, ...],
        logits_to_keep: int,
        embeddings: Float[Tensor, "b n d"] | None = None,
    ) -> Forward:
        """Score tokens into a cache that knows their slots, by the model's own code: `forward` after its checks."""
        extra = {"logits_to_keep": logits_to_keep} if logits_to_keep and self.cuts_logits else {}
        given = {"input_ids": tokens} if embeddings is None else {"inputs_embeds": embeddings}
        with evaluating(self.modules), observed_layers(self.model, hidden_layers) as observed:
            outputs = self.model(
                **given,
                position_ids=positions,
                attention_mask=None if _sees_all(mask) else self.four_dimensional(mask),
                past_key_values=cache,
                use_cache=True,
                **extra,
            )
        return Forward(outputs.logits, observed)

    @torch.no_grad()
    def embedded(self, tokens: Int[Tensor, "b n"], table: Float[Tensor, "e d"] | None = None) -> Float[Tensor, "b n d"]:
        """Return the tokens' input embeddings; an id V + i names row i of the table."""
        embed = cast(nn.Module, self.model.get_input_embeddings())
        found = embed(tokens.clamp(0, self.vocab_size - 1))
        if table is None:
            return found
        learnt = table.to(found)[(tokens - self.vocab_size).clamp(0, len(table) - 1)]
        return torch.where((tokens >= self.vocab_size).unsqueeze(-1), learnt, found)

    @torch.no_grad()
    def unembedded(self, states: Float[Tensor, "b n d"]) -> Float[Tensor, "b n V"]:
        """Return the logits of final hidden states, by the output head.

        Raises:
            UnsupportedModel: the model keeps no head that can be called by itself.
        """
        head = self.model.get_output_embeddings()
        if not isinstance(head, nn.Module):
            raise UnsupportedModel(f"{type(self.model).__name__} has no output head that can be called by itself.")
        return head(states)

    def first_layers(self, count: int) -> "HuggingFaceModel":
        """Return the model of the first layers, with the last norm and the head behind them; weights are shared.

        Raises:
            InvalidParameter: fewer than one layer, or not fewer than all.
            UnsupportedModel: the model cannot be cut.
        """
        return self._cut(count, range(count, self.layers))

    def last_layers(self, count: int) -> "HuggingFaceModel":
        """Return the model of all but the first `count` layers, which takes their output as embeddings.

        Raises:
            InvalidParameter: fewer than one layer, or not fewer than all.
            UnsupportedModel: the model cannot be cut, or does more to embeddings than to hand them to its first layer.
        """
        known = range(count) in self._parts
        rest = self._cut(count, range(count))
        if not known:
            self._check_cut(rest, count)
        return rest

    def _cut(self, count: int, dropped: range) -> "HuggingFaceModel":
        if not 0 < count < self.layers:
            raise InvalidParameter(f"{self.layers} layers are cut behind 1 to {self.layers - 1}, not {count}.")
        if dropped not in self._parts:
            self._parts[dropped] = HuggingFaceModel(without_layers(self.model, dropped))
        return self._parts[dropped]

    def _check_cut(self, rest: "HuggingFaceModel", count: int) -> None:
        """Check on a few tokens that both parts together are the model.

        Raises:
            UnsupportedModel: they are not.
        """
        tokens = torch.arange(TRIED, device=self.device).unsqueeze(0) % self.vocab_size
        mask, start = torch.ones(1, TRIED, TRIED, dtype=torch.bool, device=self.device).tril_(), tokens[:, 0] * 0
        whole = self.forward(tokens, tokens, mask, self.new_cache(1, TRIED), start, hidden_layers=(count,))
        cut = rest.forward(tokens, tokens, mask, rest.new_cache(1, TRIED), start, embeddings=whole.hidden[count])
        if not torch.allclose(
            cut.logits, whole.logits, rtol=TOLERANCE, atol=TOLERANCE * float(whole.logits.abs().max())
        ):
            del self._parts[range(count)]
            raise UnsupportedModel(f"{type(self.model).__name__} cannot go on from the states of its first layers.")

    def four_dimensional(self, mask: Bool[Tensor, "b n m"]) -> Float[Tensor, "b 1 n m"]:
        """Return the mask as numbers to be added to the attention's scores; torch would else convert it every layer."""
        open_everywhere = torch.zeros(mask.shape, dtype=self.model.dtype, device=mask.device)
        return open_everywhere.masked_fill_(~mask, torch.finfo(self.model.dtype).min).unsqueeze(1)


def same_model(one: LanguageModel, other: LanguageModel) -> bool:
    """Tell whether two are one model, whichever way each runs it."""
    if isinstance(one, HuggingFaceModel) and isinstance(other, HuggingFaceModel):
        return one.model is other.model
    return one is other


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
