"""A model without some of its sub-layers, whose other layers keep their numbers and so their places in a cache."""

from collections.abc import Collection, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from polydraft.errors import UnsupportedModel
from polydraft.models.anatomy import WATCHING, layers_of
from polydraft.models.checks.layout import is_offloaded
from polydraft.models.derived import sharing_copy, without_layers
from polydraft.models.fused.blueprint import ATTENTIONS, DOWN, INNER
from polydraft.models.language_model import LanguageModel, Layer, LayerSet

INNERS = (*INNER, *DOWN)
"""Inner layers, and what ends those that a layer holds itself."""
TRIED = 4


class Sharing(LanguageModel, Protocol):
    """A model of Hugging Face's, and what its layers keep in a cache."""

    @property
    def model(self) -> PreTrainedModel:
        """The module."""
        ...

    @property
    def layers(self) -> int:
        """How many layers it has."""
        ...

    @property
    def shapes(self) -> Sequence[Any] | None:
        """The shapes of what each layer keeps, if they differ."""
        ...

    def scored(
        self, tokens: Any, positions: Any, mask: Any, cache: Any, hidden_layers: Any, logits_to_keep: int
    ) -> Any:
        """Score tokens by the model's own modules."""
        ...


def check_shares_keys(model: Sharing) -> None:
    """Check that variants of a model can read its keys.

    Raises:
        UnsupportedModel: they cannot; the text says why.
    """
    name = type(model.model).__name__
    if not model.facts.branches:
        raise UnsupportedModel(f"{name} scores chains only, so no variant of it can draft over its keys.")
    if model.facts.chooses:
        raise UnsupportedModel(
            f"Layers of {name} choose what they attend to, so no variant of it can draft over its keys."
        )
    if is_offloaded(model.model):
        raise UnsupportedModel(
            f"Weights of this {name} are offloaded, so it has no variants that share them; load it on one device."
        )


def first_of(model: PreTrainedModel, layers: LayerSet) -> PreTrainedModel:
    """Return a copy of a model up to an exit; all weights are shared."""
    count = model.config.get_text_config().num_hidden_layers
    if layers.exit in (None, count):
        return sharing_copy(model)
    return without_layers(model, range(cast(int, layers.exit), count))


def leave_out(model: Sharing, layers: LayerSet) -> None:
    """Put stand-ins that add nothing in the place of sub-layers, in modules that are nobody else's.

    Two passes over a few tokens tell what the sub-layers return beside states, and whether a layer without both leaves
    its states as they are.

    Raises:
        UnsupportedModel: the layers are not in one list, have no such parts of known names, or do more to their states
            than to add what these parts make.
    """
    name, listed = type(model.model).__name__, layers_of(model.model)
    numbers = sorted(layers.skipped_attention | layers.skipped_mlp)
    parts = [(number, *_part(listed[number], names, name)) for number in numbers for names in (ATTENTIONS, INNERS)]
    if not parts:
        return
    skipped = [number in one for number in numbers for one in (layers.skipped_attention, layers.skipped_mlp)]
    for (_, layer, part, _), returned in zip(parts, _returned(model, parts), strict=True):
        setattr(layer, part, LeftOut(returned))
    try:
        states = _run(model, {*numbers, *(number + 1 for number in numbers)})
    except Exception as error:  # whatever its own code does without them
        raise UnsupportedModel(f"{name} does not run without these layers: {type(error).__name__}: {error}.") from error
    changed = [number for number in numbers if not states[number].equal(states[number + 1])]
    if changed:
        raise UnsupportedModel(
            f"Layer {changed[0]} of {name} does more than to add what its attention and its inner layer make, so "
            "neither can be skipped."
        )
    for (_, layer, part, own), is_skipped in zip(parts, skipped, strict=True):
        if not is_skipped:
            setattr(layer, part, own)


def _part(layer: Any, names: Sequence[str], model: str) -> tuple[nn.Module, str, nn.Module]:
    """Return a layer, the name of its part that has one of these, and the part."""
    part = next((one for one in names if isinstance(getattr(layer, one, None), nn.Module)), None)
    if part is None:
        raise UnsupportedModel(
            f"{type(layer).__name__} of {model} has no part called {', '.join(names)}, so nothing of it can be skipped."
        )
    return layer, part, getattr(layer, part)


class LeftOut(nn.Module):
    """Adds nothing, in the place of a sub-layer: zeros for its states, and None for whatever it returned beside.

    Args:
        like: what the sub-layer returned.
    """

    def __init__(self, like: Any) -> None:
        super().__init__()
        self.beside = len(cast(tuple[Any, ...], like)) - 1 if isinstance(like, tuple) else None
        self.width: int = (like[0] if isinstance(like, tuple) else like).shape[-1]

    def forward(self, *given: Any, **named: Any) -> Any:
        """Return zeros."""
        states: Tensor = next(one for one in (*given, named.get("hidden_states")) if isinstance(one, Tensor))
        nothing = states.new_zeros(*states.shape[:-1], self.width)
        return nothing if self.beside is None else (nothing, *[None] * self.beside)


def _returned(model: Sharing, parts: Sequence[tuple[int, nn.Module, str, nn.Module]]) -> list[Any]:
    """Return what each of these parts returns in a pass."""
    found = dict[int, Any]()

    def noting(place: int) -> Any:
        def note(_: nn.Module, __: Any, returned: Any) -> None:
            found[place] = returned

        setattr(note, WATCHING, True)
        return note

    hooks = [part.register_forward_hook(noting(place)) for place, (_, _, _, part) in enumerate(parts)]
    try:
        _run(model, ())
    finally:
        for one in hooks:
            one.remove()
    return [found[place] for place in range(len(parts))]


@torch.no_grad()
def _run(model: Sharing, layers: Collection[int]) -> dict[Layer, Tensor]:
    """Run a model over a few tokens, and return hidden states."""
    device = model.facts.device
    places = torch.arange(TRIED, device=device).unsqueeze(0)
    cache: Any = model.new_cache(1, TRIED)
    cache.place(places[:, 0] * 0, TRIED, TRIED, places)
    mask = torch.ones(1, TRIED, TRIED, dtype=torch.bool, device=device).tril_()
    return model.scored(places % model.facts.vocab_size, places, mask, cache, tuple(sorted(layers)), 0).hidden
