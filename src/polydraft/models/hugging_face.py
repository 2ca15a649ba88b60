"""The one door to Hugging Face models: any causal model with a standard attention cache, and the memory it needs."""

import copy
import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from polydraft.errors import InvalidParameter, UnsupportedModel
from polydraft.fetched import DERIVED
from polydraft.models.anatomy import check_layer, check_packed, chosen_precision, observed_layers, places_of
from polydraft.models.cache import TreeCache
from polydraft.models.chain_models import (
    HANDED,
    HandedCache,
    RememberingCache,
    listed_cache,
    row_by_row,
    scored_by_count,
    without,
)
from polydraft.models.checks.layout import (
    FULL,
    KeyWindow,
    context_of,
    device_of,
    evaluating,
    for_logits,
    is_offloaded,
    kept_by,
    settings_of,
    sizes_of,
    windowed_layers,
    windows_of,
)
from polydraft.models.checks.supported import check_model, counts_itself, remembers
from polydraft.models.checks.trial import check_trial
from polydraft.models.derived import derived, kept, without_layers
from polydraft.models.fused.few_bits import FewBits
from polydraft.models.fused.folded import folding
from polydraft.models.fused.fused_pass import FusedPass, fused_pass
from polydraft.models.language_model import WHOLE, Cache, Facts, Forward, LanguageModel, Layer, LayerSet, Queries
from polydraft.models.layers.variants import check_shares_keys, first_of, leave_out
from polydraft.models.sources import (
    ReadPrompt,
    crossing,
    decoder_inputs,
    encoded_for,
    is_encoder_decoder,
)

TRIED = 4
TOLERANCE = 0.02
"""How far the logits of a model that was cut may be from its own, relative to the largest; bfloat16 rounds so much."""


class HuggingFaceModel:
    """A Hugging Face causal model as polydraft's `LanguageModel`.

    A model whose anatomy is known runs the fused pass, the same function up to rounding (`FusedPass`); `why_not_fused`
    says why another one does not. Its own code then runs unchanged: it receives a four-dimensional mask, one for each
    kind of layer if its layers have windows of their own, explicit position ids and a `TreeCache`. No key is dropped,
    so a sliding window costs memory, not exactness; where a trial shows that the model does not follow our masks of
    windows, the context is cut to the smallest window.

    Models that cannot score trees score chains (`branches` is False): those with recurrent or convolutional layers,
    whose states the caller gives back before each pass, and those that count positions themselves, of which rows that
    are not equally far are scored one by one.

    Passes run in evaluation mode; between them every layer is in the mode that it was in. Layers that are put into the
    model later are not looked after: wrap it anew.

    Args:
        model: the model, on its device, in its precision. Of a wrapper (PEFT, torch.compile, data parallelism) the
            model inside is taken, with its adapters.
        fused: whether passes are fused if the model is of a known anatomy; else its modules are called.

    Raises:
        InvalidParameter: this is no model; the text says what to pass.
        UnsupportedModel: the model takes no cache, has no head for next tokens, attends in both
            directions, or runs an attention kernel that takes no masks; or a trial of a few tokens shows that it can
            score neither trees nor chains (`check_trial`). The text says which and what to do.
    """

    def __init__(self, model: object, *, fused: bool = True) -> None:
        self.model = check_model(model)
        self.modules = tuple(self.model.modules())
        config = self.model.config.get_text_config(decoder=True)
        self.vocab_size: int = config.vocab_size
        self.context: int = context_of(config)
        self.layers: int = config.num_hidden_layers
        self.width: int = config.hidden_size
        self.windows = windows_of(config)
        arguments = inspect.signature(self.model.forward).parameters
        self.cuts_logits, self.takes_positions = "logits_to_keep" in arguments, "position_ids" in arguments
        self.kept, self.told = kept_by(self.model), for_logits(self.model)
        self.cached_as, self.shapes = self.kept.name, self.kept.shapes
        self.encodes = is_encoder_decoder(self.model)
        self.states = not self.encodes and (remembers(config) or self.cached_as == HANDED)
        self.counts = not self.states and counts_itself(self.model)
        self.uncounted: int | None = None
        self.crowded: str | None = None
        if self.encodes:
            self.layers = self.kept.layers
        check_packed(self.model)
        self.fused: FusedPass | None = None
        tried = check_trial(self.model, self)
        self.counts, self.uncounted, self.crowded = tried.counts, tried.uncounted, tried.crowded
        if tried.windows is None:
            self.cut_to_windows()
        else:
            self.windows = tried.windows
        self.why_not_fused = self._fuse() if fused else f"{type(self.model).__name__} was not to be fused."

    def plain(self) -> "HuggingFaceModel":
        """Return the model run by its own passes, which are the ones that trials look at."""
        return self if type(self) is HuggingFaceModel else HuggingFaceModel(self.model, fused=False)

    @property
    def facts(self) -> Facts:
        """What the model says of itself."""
        branches = not (self.states or self.counts)
        found = (self.vocab_size, self.context, self.device, branches, self.states, self.encodes)
        return Facts(*found, self.layers, self.width, branches, chooses=len(self.shapes or ()) > 2 * self.layers)

    @property
    def device(self) -> torch.device:
        """The device of the model's passes."""
        return device_of(self.model)

    def _fuse(self) -> str:
        """Take the fused pass if there is one, and return why not; empty if there is."""
        why = "it scores chains" if self.states or self.counts or self.encodes else ""
        if why or chosen_precision(self.device):
            return f"{type(self.model).__name__} keeps its own passes: {why or 'it was met under autocast'}."

        def own(tokens: Tensor, places: Tensor, mask: Tensor) -> tuple[Forward, TreeCache]:
            width = tokens.shape[1]
            first, second = self.new_cache(1, width), self.new_cache(1, width)
            for cache in (first, second):
                cache.place(places[:, 0] * 0, width, width, places)
            return self.scored(tokens, places, mask, first, tuple(range(self.layers + 1)), 0), second

        self.fused_weights = (self.device, places_of(self.model))
        try:
            self.fused = fused_pass(self.model, [one.kind for one in self.windows], self.context, own)
        except UnsupportedModel as reason:
            return str(reason)
        return ""

    def cut_to_windows(self) -> None:
        """End texts where the smallest window does, and give one mask to layers of all kinds."""
        sizes = settings_of(self.model.config.get_text_config(decoder=True)).values()
        self.context, self.windows = min(self.context, *sizes), (KeyWindow(FULL),)

    def new_cache(self, batch: int, capacity: int, sources: Sequence[Any] | None = None) -> TreeCache:
        """Return an empty cache with `capacity` slots per row.

        An encoder reads its sources here. A row without one gets a stand-in, for what is no text.

        Raises:
            UnsupportedModel: sources are given that the model cannot read; a decoder alone reads nothing but text.
        """
        if self.fused is not None and self.fused_weights != (self.device, places_of(self.model)):
            self.fused = None
            self.why_not_fused = self._fuse()
        graphs = None if self.fused is None else self.fused.graphs
        cache = self._empty(batch, capacity) if graphs is None else graphs.new_cache(self._empty, batch, capacity)
        if self.encodes:
            with torch.no_grad(), evaluating(self.modules):
                cache.sources = [encoded_for(self.model, one) for one in sources or (None,) * batch]
            return cache
        for row, source in enumerate(sources or ()):
            if not isinstance(source, ReadPrompt | None):
                raise UnsupportedModel(f"{type(self.model).__name__} reads text alone; leave the sources out.")
            if source is not None and source.cache is not None:
                cache.put(row, source.cache, source.length)
                cache.begin(source.states)
                cache.sources[row] = source.taken_over()
        return cache

    def _empty(self, batch: int, capacity: int) -> TreeCache:
        placed = bool(sizes_of(self.windows)) and not self.counts
        if self.states:
            kind = RememberingCache if self.kept.own is None else listed_cache(self.kept.own)
            kind = HandedCache if self.cached_as == HANDED else kind
            config = self.model.config.get_text_config(decoder=True)
            return kind(config, self.layers, batch, capacity, self.shapes, placed=placed)
        made = TreeCache(self.layers, batch, capacity, self.shapes, placed=placed)
        if placed:
            config = self.model.config.get_text_config(decoder=True)
            made.windowed = windowed_layers(self.windows, config, self.layers)
        return made

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
        queries: int = 0,
    ) -> Forward:
        """Score tokens under the mask, without gradients; see `LanguageModel.forward`.

        Passes that hand out queries are not recorded on a GPU.

        Raises:
            InvalidParameter: the cache is not one that `new_cache` returned.
        """
        if not isinstance(cache, TreeCache):
            raise InvalidParameter(f"cache must come from new_cache, but is a {type(cache).__name__}.")
        cache.check_not_again(starts)
        if self.counts:

            def score(
                tokens: Tensor, positions: Tensor, cache: TreeCache, embeddings: Tensor | None, keep: int
            ) -> Forward:
                return self.scored(tokens, positions, mask, cache, hidden_layers, keep, embeddings)

            own = score if self.uncounted is None else without(self.uncounted, score)
            given = (own, tokens, positions, cache, starts, embeddings)
            return scored_by_count(*given, context=self.context, keep=logits_to_keep, alone=self.encodes)
        cache.place(starts, tokens.shape[1], mask.shape[-1], positions)
        fused = self.fused
        if fused is None or chosen_precision(self.device):
            return self.scored(tokens, positions, mask, cache, hidden_layers, logits_to_keep, embeddings, queries)
        for layer in hidden_layers:
            check_layer(layer, self.layers)
        masks, places = self.kind_masks(mask, positions, cache), cache.moved(positions)
        given = tokens, places, masks, cache, logits_to_keep, hidden_layers
        with evaluating(self.modules):
            records = fused.graphs is not None and embeddings is None and not queries
            recorded = fused.graphs(*given) if fused.graphs is not None and records else None
            return recorded or fused(*given, embeddings, queries)

    def scored(
        self,
        tokens: Int[Tensor, "b n"],
        positions: Int[Tensor, "b n"],
        mask: Bool[Tensor, "_ _ m"],
        cache: TreeCache,
        hidden_layers: tuple[Layer, ...],
        logits_to_keep: int,
        embeddings: Float[Tensor, "b n d"] | None = None,
        queries: int = 0,
    ) -> Forward:
        """Score tokens into a cache that knows their slots, by the model's own code: `forward` after its checks.

        Models that count positions are given some rows or tokens under the mask of all, which they do not look at.
        """
        if isinstance(cache, HandedCache) and len(tokens) > 1:

            def alone(row: int, own: HandedCache) -> Forward:
                some, given = slice(row, row + 1), None if embeddings is None else embeddings[row : row + 1]
                return self.scored(tokens[some], positions[some], mask[some], own, hidden_layers, logits_to_keep, given)

            return row_by_row(alone, cache)
        extra = {"logits_to_keep": logits_to_keep} if logits_to_keep and self.cuts_logits else {}
        given: dict[str, Any] = {"input_ids": tokens} if embeddings is None else {"inputs_embeds": embeddings}
        given[self.cached_as] = cache
        if self.takes_positions:
            given["position_ids"] = cache.moved(positions)
        if self.encodes:
            given = decoder_inputs(cache.sources[0], tokens, embeddings)
            given[self.cached_as] = crossing(cache, cache.sources[0])
        elif not self.counts:
            given["attention_mask"] = self.masks(mask, positions, cache)
        watching = observed_layers(self.model, hidden_layers, self.modules)
        with evaluating(self.modules), folding(queries) as noted, watching as observed:
            if isinstance(cache, HandedCache):
                given[HANDED] = cache.held
            outputs = self.model(**given, use_cache=True, **self.told, **extra)
            if isinstance(cache, HandedCache):
                cache.held = outputs[HANDED]
        return Forward(outputs.logits, observed, Queries.of(noted) if len(noted) == self.layers else None)

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
        fused = self.fused
        if fused is None or chosen_precision(self.device):
            return head(states)
        return fused.plan.head(states.flatten(0, -2)).view(*states.shape[:-1], -1)

    def output_rows(self, tokens: Int[Tensor, " k"]) -> Float[Tensor, "k d"]:
        """Return the rows of the output head for some tokens, whose products with final states are their logits.

        Raises:
            UnsupportedModel: the output head is not a plain product.
        """
        head = self.model.get_output_embeddings()
        if not isinstance(head, nn.Linear) or head.bias is not None:
            raise UnsupportedModel(f"The output head of {type(self.model).__name__} is no plain product of its rows.")
        if is_offloaded(head):
            raise UnsupportedModel(
                f"The output head of {type(self.model).__name__} is offloaded, and the drafter reads its rows; take "
                "another drafter, or load the model on one device."
            )
        return head.weight.detach()[tokens.to(head.weight.device)]

    def variant(self, weights: str = "", layers: LayerSet = WHOLE) -> "HuggingFaceModel":
        """Return the model with weights of few bits, or without some of its sub-layers, over the same cache.

        Weights are shared, but for those of few bits. Layers keep their numbers, so that it reads the keys that the
        model has written. A skipped attention reads no keys and writes none; a skipped inner layer leaves the states as
        they are. It is made once, and anew when the model has changed.

        Args:
            weights: "int8" or "int4"; empty for the model's own.
            layers: what runs.

        Raises:
            InvalidParameter: the model has no such layers, or nothing would be left to run.
            UnsupportedModel: it scores chains only, has layers that choose what they attend to, or is offloaded; or it
                cannot have such weights, or be run without these sub-layers. The text says which.
        """
        check_shares_keys(self)
        layers.check(self.layers)
        if not weights and layers.is_whole(self.layers):
            return self
        function = self._function
        if function is not None and self.fused_weights != (self.device, places_of(self.model)):
            function = None  # the weights are others since
        return kept(self.model, (weights, layers, self.fused is None), lambda: self._variant(weights, layers), function)

    @property
    def _function(self) -> object:
        """What the model was when its fused pass was made; None where modules run, which may have changed since.

        The pass multiplies by the weights of that time, so that what continues it has to be made of the same.
        """
        return None if self.fused is None or chosen_precision(self.device) else self.fused.origin

    def _variant(self, weights: str, layers: LayerSet) -> "HuggingFaceModel":
        """Make a variant: by the model's own modules, and by the fused pass if it has one."""
        if weights:
            return HuggingFaceModel(derived(self.model, DERIVED + weights)).variant("", layers)
        made = copy.copy(self if type(self) is HuggingFaceModel else HuggingFaceModel(self.model))
        fused, made.fused, made.layers = made.fused, None, layers.exit or made.layers
        made.model, made.shapes = first_of(self.model, layers), made.shapes and made.shapes[: 2 * made.layers]
        made.modules = tuple(made.model.modules())
        leave_out(made, layers)
        made.modules = tuple(made.model.modules())
        if fused is not None:
            made.fused, made.fused_weights = fused.without(layers), (made.device, places_of(made.model))
        return made

    def last_layers(self, count: int) -> "HuggingFaceModel":
        """Return the model of all but the first `count` layers, which takes their output as embeddings.

        Raises:
            InvalidParameter: fewer than one layer, or not fewer than all.
            UnsupportedModel: the model cannot be cut, or does more to embeddings than to hand them to its first layer.
        """
        dropped, function = range(self._cut_at(count)), self._function

        def make() -> "HuggingFaceModel":
            return self._with_layers(kept(self.model, dropped, lambda: self._rest(dropped)), slice(count, None))

        return make() if function is None else kept(self.model, (dropped, "fused"), make, function)

    def _with_layers(self, model: PreTrainedModel, layers: slice) -> "HuggingFaceModel":
        """Return a model of some of the layers, which shares the joined weights."""
        made = HuggingFaceModel(model, fused=False)
        if self.fused is not None:
            made.fused, made.why_not_fused = self.fused.of_layers(layers), ""
            made.fused_weights = (made.device, places_of(model))
        return made

    def _cut_at(self, count: int) -> int:
        if not 0 < count < self.layers:
            raise InvalidParameter(f"{self.layers} layers are cut behind 1 to {self.layers - 1}, not {count}.")
        return count

    def _rest(self, dropped: range) -> PreTrainedModel:
        """Leave the first layers out, and check on a few tokens that both parts together are the model."""
        made, count = without_layers(self.model, dropped), len(dropped)
        rest = self._with_layers(made, slice(count, None))
        tokens = torch.arange(TRIED, device=self.device).unsqueeze(0) % self.vocab_size
        mask, start = torch.ones(1, TRIED, TRIED, dtype=torch.bool, device=self.device).tril_(), tokens[:, 0] * 0
        whole = self.forward(tokens, tokens, mask, self.new_cache(1, TRIED), start, hidden_layers=(count,))
        cut = rest.forward(tokens, tokens, mask, rest.new_cache(1, TRIED), start, embeddings=whole.hidden[count])
        if float((cut.logits - whole.logits).abs().max()) > TOLERANCE * float(whole.logits.abs().max()):
            raise UnsupportedModel(f"{type(self.model).__name__} cannot go on from the states of its first layers.")
        return made

    def masks(
        self, mask: Bool[Tensor, "b n m"], positions: Int[Tensor, "b n"], cache: TreeCache
    ) -> Tensor | dict[str, Tensor | None] | None:
        """Return what the model takes as its mask: one, one for each kind of its layers, or none where all is seen."""
        sizes = sizes_of(self.windows)
        # without a mask a token that sees all slots is faster; GPUs are not asked
        sees_all = mask.shape[:2] == (1, 1) and mask.device.type == "cpu" and bool(mask.all())
        if sees_all and not (sizes and mask.shape[-1] > min(sizes)):
            return None
        if not any(one.has_keys for one in self.windows):
            return None
        return self.all_masks(mask, positions, cache)

    def kind_masks(
        self, mask: Bool[Tensor, "b n m"], positions: Int[Tensor, "b n"], cache: TreeCache
    ) -> dict[str, Tensor | None]:
        """Return what layers of each kind may see; None where they see all."""
        # a token that sees all slots is faster without a mask; GPUs are not asked
        all_seen = mask.shape[:2] == (1, 1) and mask.device.type == "cpu" and bool(mask.all())
        found = dict[str, Tensor | None]()
        for one in self.windows:
            seen = one.seen(mask, positions, cache.positions)
            found[one.kind] = None if all_seen and seen is mask else seen
        return found

    def all_masks(
        self, mask: Bool[Tensor, "b n m"], positions: Int[Tensor, "b n"], cache: TreeCache
    ) -> Tensor | dict[str, Tensor | None]:
        """Return the mask, or one for each kind of the model's layers."""
        if len(self.windows) == 1:
            return self._four_dimensional(self.windows[0].seen(mask, positions, cache.positions))
        return {
            one.kind: self._four_dimensional(one.seen(mask, positions, cache.positions)) if one.has_keys else None
            for one in self.windows
        }

    def _four_dimensional(self, mask: Bool[Tensor, "b n m"]) -> Float[Tensor, "b 1 n m"]:
        """Return the mask as numbers to be added to the attention's scores; torch would else convert it every layer."""
        open_everywhere = torch.zeros(mask.shape, dtype=self.model.dtype, device=mask.device)
        return open_everywhere.masked_fill_(~mask, torch.finfo(self.model.dtype).min).unsqueeze(1)


def same_model(one: LanguageModel, other: LanguageModel) -> bool:
    """Tell whether two are one model, whichever way each runs it."""
    if isinstance(one, HuggingFaceModel) and isinstance(other, HuggingFaceModel):
        return one.model is other.model
    return one is other


def without_head(model: LanguageModel) -> LanguageModel:
    """Return a model for whoever reads its hidden states alone: a fused pass then spares the product with the head.

    Its logits are the last layer's states. A model with a pass of its own is returned as it is, head and all.
    """
    if not isinstance(model, HuggingFaceModel) or model.fused is None:
        return model
    made = copy.copy(model)
    made.fused = FusedPass(replace(model.fused.plan, norm=None, head=lambda states: states, scaled=1.0, cap=None))
    return made


def module_of(model: LanguageModel) -> nn.Module | None:
    """Return the module that a model runs; None if it is none of Hugging Face's, so that nothing is known of it.

    What wraps a model names its `module`.
    """
    return model.model if isinstance(model, HuggingFaceModel) else getattr(model, "module", None)


def pass_in_words(target: LanguageModel) -> str:
    """Return in which precision a target runs, by which pass, and what its copies of weights cost."""
    if not isinstance(target, HuggingFaceModel):
        return "its own"
    found = [str(target.model.dtype).removeprefix("torch.")]
    found += sorted({f"weights of {one.bits} bits" for one in target.modules if isinstance(one, FewBits)})
    if target.fused is None:
        return ", ".join([*found, f"own modules ({target.why_not_fused.rstrip('.')})"])
    recorded = ", recorded" if target.fused.graphs is not None else ""
    copied = f"{target.fused.copied >> 20:,} MiB of" if target.fused.copied else "no"
    return ", ".join([*found, f"fused{recorded} ({copied} weights copied)"])


def weight_bytes(model: LanguageModel) -> int:
    """Return the bytes of a model's weights; 0 if nothing is known of them."""
    module = module_of(model)
    return sum(one.numel() * one.element_size() for one in (module.parameters() if module is not None else ()))
