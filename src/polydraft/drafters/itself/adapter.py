"""Kangaroo: the target's first layers, a small adapter of attention alone, and the target's own head.

With the output h of the first E layers:

    x = h + attn(input_layernorm h);   rows = lm_head(norm x)

The first E layers read the target's own keys, and see for drafts what they see when the target verifies them. So what
the adapter reads of drafts is what the target's own pass makes of them, exactly; only the adapter's row is a guess.

The adapter's keys lie in a cache of its own, in the slots that the target's have, so that one mask serves both. Its
keys follow from h alone. Those of committed tokens are made of the states that verification hands out: nothing of a
draft has to be kept or moved, and a prompt is read once.

Source: Liu et al., arXiv 2404.18911 (Kangaroo); Equationliu/Kangaroo, `kangaroo/adapter.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, arange, nn

from polydraft.drafters.contract import Defaults, Drafter, DraftRequest, Needs, Session
from polydraft.drafters.heads.drafter import MadeFor
from polydraft.drafters.heads.sublayers import Anatomy, Attention, HeadCache, Norm, Seen
from polydraft.drafters.model import SAMPLED, check_listed, draft_rows, listed
from polydraft.errors import InvalidParameter, TargetMismatch, UnsupportedModel
from polydraft.models import Cache, Facts, Forward, LanguageModel, LayerSet, without_head
from polydraft.probs import SamplingParams
from polydraft.reading import Features, Step, Text
from polydraft.rows import parts, shared
from polydraft.schemes import IID, Scheme, TopK, require_scheme
from polydraft.trees import Confident, Draft, Frontier, grow

CHAIN = Confident((1,) * 6, 0.6)
"""The authors' drafts: at most six, of which the first unsure one is the last."""


class AdapterLayer(nn.Module):
    """x + attention(norm x), without an inner layer."""

    def __init__(self, anatomy: Anatomy) -> None:
        super().__init__()
        self.input_layernorm = Norm(anatomy.width, anatomy.eps)
        self.self_attn = Attention(anatomy)


class Adapter(nn.Module):
    """An adapter: one layer of attention alone, and a norm.

    Args:
        anatomy: the sizes of its attention; it is as wide as the target.
    """

    def __init__(self, anatomy: Anatomy) -> None:
        super().__init__()
        self.anatomy = anatomy
        self.layers = nn.ModuleList([AdapterLayer(anatomy)])
        self.norm = Norm(anatomy.width, anatomy.eps)

    @property
    def layer(self) -> AdapterLayer:
        """The one layer; folders name it as the first of a list."""
        return cast(AdapterLayer, self.layers[0])

    def forward(
        self, states: Float[Tensor, "b n d"], places: Int[Tensor, "b n"], seen: Seen, mask: Bool[Tensor, "b #n m"]
    ) -> Float[Tensor, "b n d"]:
        """Return what goes to the target's head.

        Args:
            states: the output of the target's first layers.
            places: the tokens' places in the text.
            seen: gives all keys and values, given the tokens' own.
            mask: True where a token may look at a key.
        """
        layer, turn = self.layer, self.anatomy.turn(places, states.dtype)
        return self.norm(states + layer.self_attn(layer.input_layernorm(states), turn, seen, mask))

    def keys(self, states: Float[Tensor, "b n d"], places: Int[Tensor, "b n"]) -> tuple[Tensor, Tensor]:
        """Return the keys and values of tokens, "b g n h" each."""
        layer, turn = self.layer, self.anatomy.turn(places, states.dtype)
        return layer.self_attn.keys(layer.input_layernorm(states), turn)


@dataclass(frozen=True, eq=False)
class AdapterState:
    """What an adapter has of each text.

    Args:
        cache: its keys and values, token by token; those of drafts are written behind them.
        network: the adapter.
        first: the target's first layers.
        target: the target, whose head it drafts from.
        params: the sampling settings of the drafts.
    """

    cache: HeadCache = parts()
    network: Adapter = shared()
    first: LanguageModel = shared()
    target: LanguageModel = shared()
    params: SamplingParams = shared()

    def resumes(self, fresh: "AdapterState") -> bool:
        """Tell whether both are of the same adapter."""
        return self.network is fresh.network


@dataclass(frozen=True, eq=False)
class AdapterDrafter(Drafter):
    """Draft with the target's first layers and an adapter, over the target's own keys.

    Args:
        network: the adapter.
        exit_layer: behind how many layers of the target it stands.
        shortlist_size: as for `ModelDrafter`.
        params: the drafts' own temperature and filters; None for the target's.
        made_for: what its folder says of its target.

    Raises:
        InvalidParameter: a shortlist without a token.
        TargetMismatch: at the start, an adapter for another target, such as one that has not more layers than that.
        UnsupportedModel: at the start, if the target's texts cannot branch, or its layers cannot be cut.
    """

    network: Adapter
    exit_layer: int = 2
    shortlist_size: int | None = None
    params: SamplingParams | None = None
    made_for: MadeFor = MadeFor()
    name = "adapter"
    sound = True

    def __post_init__(self) -> None:
        check_listed(self.shortlist_size)

    @property
    def needs(self) -> Needs:  # pyright: ignore[reportIncompatibleVariableOverride]  an attribute of most drafters
        """The target's keys, and the output of its first layers."""
        return Needs((self.exit_layer,), target=True)

    def defaults(self, params: SamplingParams) -> Defaults:
        """Draft a chain that ends where the adapter is unsure."""
        return Defaults(IID() if params.temperature else TopK(), CHAIN)

    def check(self, scheme: Scheme) -> None:
        """Raise `UnpairedScheme` for `Given`, whose drafts come from outside."""
        require_scheme(scheme, SAMPLED, "An adapter")

    @torch.no_grad()
    def start(self, text: Text, session: Session) -> AdapterState:
        """Return an empty cache, and the target's first layers."""
        if session.target is None:
            raise InvalidParameter("An adapter stands behind its target's first layers, and there is no target.")
        target = session.target.model
        self.check_target(target)
        like = next(self.network.parameters())
        cache = HeadCache.new(self.network.anatomy, 1, len(text.lengths), session.capacity, like)
        first = without_head(target.variant(layers=LayerSet(exit=self.exit_layer)))
        return AdapterState(cache, self.network, first, target, self.params or session.params)

    def check_target(self, target: LanguageModel) -> None:
        """Check that the adapter can have been trained for a target; errors are those of the start."""
        own = self.network.anatomy.width
        if not target.facts.branches:
            raise UnsupportedModel("A target whose text cannot branch has no keys that an adapter's drafts could use.")
        if target.facts.width not in (None, own):
            raise TargetMismatch(
                f"The adapter is {own} wide and the target's states {target.facts.width}: it was trained for another "
                "target."
            )
        depth = target.facts.layers
        if depth is not None and self.exit_layer >= depth:
            raise TargetMismatch(
                f"The adapter stands behind {self.exit_layer} layers and the target has {depth}: it was trained for "
                "another target, or the exit is another one."
            )
        self.made_for.check(target)

    @torch.no_grad()
    def read(self, state: AdapterState, text: Text, features: Features | None) -> AdapterState:
        """Make keys of what was read of the prompts."""
        return state if features is None else self._remembered(state, features)

    @torch.no_grad()
    def draft(self, state: AdapterState, request: DraftRequest) -> tuple[Draft, AdapterState]:
        """Grow a tree: one pass of the first layers and the adapter per depth."""
        text, scheme, policy = request.text, request.scheme, request.policy
        if not policy.shape.counts or request.target is None:
            return Draft.nothing(text.last()), state
        adapted = _AdaptedModel(state.first, state.target, state.network, state.cache, self.exit_layer)
        view = request.target.at(text).viewed(adapted)
        known = state.target.facts.vocab_size
        size = listed(self.shortlist_size, scheme, policy, known)

        def propose(frontier: Frontier) -> tuple[Int[Tensor, "b f K"], Float[Tensor, "b f *J K"]]:
            return draft_rows(view.grow(text, frontier)[..., :known], state.params, size, scheme)

        draft = grow(text.last(), policy, scheme, propose, request.noise, trusted=True)
        return draft if size is not None else draft.as_whole(), state

    @torch.no_grad()
    def commit(self, state: AdapterState, step: Step) -> AdapterState:
        """Make keys of the target's own states of the tokens that were committed."""
        return self._remembered(state, step.features)

    def _remembered(self, state: AdapterState, features: Features) -> AdapterState:
        states = features.states[self.exit_layer].to(state.cache.keys.dtype)
        keys, values = self.network.keys(states, features.places.clamp_min(0))
        state.cache.write(0, features.places, keys, values)
        return state


@dataclass(frozen=True, eq=False)
class _AdaptedModel(LanguageModel):
    """The first layers, the adapter and the head as a model over the target's keys and the adapter's."""

    first: LanguageModel
    target: LanguageModel
    network: Adapter
    keys: HeadCache
    exit_layer: int

    @property
    def facts(self) -> Facts:
        return self.target.facts

    def new_cache(self, batch: int, capacity: int, sources: Sequence[Any] | None = None) -> Cache:
        raise UnsupportedModel("An adapter reads its target's keys, and has no cache for the target's layers.")

    def forward(
        self,
        tokens: Int[Tensor, "b n"],
        positions: Int[Tensor, "b n"],
        mask: Bool[Tensor, "b n m"],
        cache: Cache,
        starts: Int[Tensor, "b"],
        *,
        logits_to_keep: int = 0,
        **named: Any,
    ) -> Forward:
        named |= {"hidden_layers": (self.exit_layer,), "logits_to_keep": 1}
        passed = self.first.forward(tokens, positions, mask, cache, starts, **named)
        states = passed.hidden[self.exit_layer]
        slots = starts.to(tokens.device).unsqueeze(-1) + arange(tokens.shape[1], device=tokens.device)
        own = states.to(self.keys.keys.dtype)
        made = self.network(own, positions, self.keys.writer(0, slots, mask.shape[-1]), mask)
        return Forward(self.target.unembedded(made[:, -logits_to_keep:].to(states.dtype)), {})
