"""Prompts with images: the model's own code reads them once, and what it keeps of each row begins its text.

Problem: images enter a prompt in many ways: as embeddings in place of tokens, in several layers, with positions of
three parts, with masks by which a prompt is read in both directions. Hugging Face's `generate` prepares all of this for
the first pass, and needs none of it later. So the first pass is Hugging Face's, over slots of ours, and what comes
behind it is text at positions that go on from the prompt's last.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from polydraft.errors import InvalidParameter, UnsupportedModel
from polydraft.models.cache import TreeCache
from polydraft.models.checkpoints.reasons import first_sentence
from polydraft.models.checks.evaluation import evaluating, for_logits
from polydraft.models.checks.shapes import cache_name
from polydraft.models.checks.trial import agree
from polydraft.models.protocol import Forward
from polydraft.models.sources.inputs import BY_TOKEN
from polydraft.probs import sent


@dataclass(frozen=True, eq=False)
class ReadPrompt:
    """What a model keeps of one row's prompt.

    Args:
        cache: its keys, in slots from 0 on; None where they were taken over.
        length: its tokens.
        offset: what is added to the place of a token behind it, for the token's position.
        states: what layers without keys remember of all tokens but the last; None of models without such layers.
    """

    cache: TreeCache | None
    length: int
    offset: int
    states: Any = None

    @property
    def known(self) -> int:
        """How many tokens need not be read: all but the last, which is the first tree's root."""
        return self.length - 1

    def taken_over(self) -> "ReadPrompt":
        """Return the same without keys and states."""
        return replace(self, cache=None, states=None)


def moved(positions: Int[Tensor, "b n"], cache: TreeCache) -> Int[Tensor, "b n"]:
    """Return the positions of tokens behind prompts whose last position is not their last place."""
    offsets = [getattr(source, "offset", 0) for source in cache.sources]
    return positions + sent(torch.tensor(offsets), positions.device).unsqueeze(-1) if any(offsets) else positions


def check_not_again(cache: TreeCache, starts: Int[Tensor, "b"]) -> None:
    """Check that no pass reads a prompt with images again, which it would read as text.

    Raises:
        InvalidParameter: one does: rows beside it have more to read.
    """
    known = cache.known()
    if any(known) and any(start < count for start, count in zip(starts.tolist(), known, strict=True)):
        raise InvalidParameter("A prompt with images is read once; rows beside it must have equally much to read.")


@runtime_checkable
class Door(Protocol):
    """A model as the engine runs it."""

    model: PreTrainedModel
    uncounted: int | None

    @property
    def encodes(self) -> bool:
        """Whether rows read a source by an encoder."""
        ...

    @property
    def remembers(self) -> bool:
        """Whether layers remember in states."""
        ...

    def new_cache(self, batch: int, capacity: int, sources: Sequence[Any] | None = None) -> TreeCache:
        """Return an empty cache."""
        ...

    def forward(self, *given: Any, **named: Any) -> Forward:
        """Score tokens."""
        ...


@torch.no_grad()
def read_prompts(door: Door, input_ids: Int[Tensor, "b t"], prepared: Mapping[str, Any]) -> list[ReadPrompt | None]:
    """Read prompts by the model's own code, and check on their last tokens that a text can go on from there.

    Args:
        door: the model.
        input_ids: the prompts, padded.
        prepared: the inputs of the model that Hugging Face's `generate` prepared.

    Raises:
        UnsupportedModel: the model's own code fails, or what it needs of an image later is not in its keys.
    """
    if door.remembers and input_ids.shape[1] == 1:
        return [None] * len(input_ids)  # the only token is the first tree's root
    if door.remembers:
        return [_with_states(door, input_ids, prepared)]
    (rows, width), model = input_ids.shape, door.model
    mask = prepared.get("attention_mask")
    real = torch.ones_like(input_ids) if mask is None else mask.to(input_ids.device).long()
    cache = door.new_cache(rows, width)
    logits, positions = _own_pass(model, input_ids, prepared, cache)
    found: list[ReadPrompt | None] = []
    for row in range(rows):
        slots = real[row].nonzero().squeeze(-1)
        last, own = int(slots[-1]), cache.of_row(row).compacted(slots.unsqueeze(0), 0)
        place = _position(model, positions, row, last, len(slots))
        read = ReadPrompt(own, len(slots), place - len(slots) + 1)
        if logits.shape[1] == width or last == width - 1:  # else its logits were not asked for
            _check(door, input_ids[row, last], logits[row, last - width], read)
        found.append(read)
    return found


def _with_states(door: Door, input_ids: Int[Tensor, "b t"], prepared: Mapping[str, Any]) -> ReadPrompt:
    """Read all of a prompt but the last token, behind which the states of layers without keys are wanted."""
    model, (rows, length) = door.model, input_ids.shape
    if rows > 1 or prepared.get("attention_mask") is not None:
        raise UnsupportedModel(
            f"{type(model).__name__} remembers in states, so prompts with images are read one by one: give one row "
            "without padding and ask for one text, or call polydraft.generate_many."
        )
    whole = door.new_cache(1, length)
    logits, positions = _own_pass(model, input_ids, prepared, whole)
    shorter = {name: prepared[name][..., :-1] for name in BY_TOKEN if prepared.get(name) is not None}
    cache = door.new_cache(1, length)
    _own_pass(model, input_ids[:, :-1], {**prepared, **shorter}, cache)
    offset = _position(model, positions, 0, length - 1, length) - length + 1
    read = ReadPrompt(cache, length, offset, cache.states())
    _check(door, input_ids[0, -1], logits[0, -1], read)
    return read


def _own_pass(
    model: PreTrainedModel, input_ids: Int[Tensor, "b t"], prepared: Mapping[str, Any], cache: TreeCache
) -> tuple[Float[Tensor, "b k V"], Tensor | None]:
    """Let the model read prompts as in the first pass of Hugging Face's `generate`, into our slots.

    Returns:
        logits, of the last tokens or of all; and the positions that the model was given.

    Raises:
        InvalidParameter: the model's own code refuses its inputs.
        UnsupportedModel: it fails.
    """
    rows, width = input_ids.shape
    mask = prepared.get("attention_mask")
    real = torch.ones_like(input_ids) if mask is None else mask.to(input_ids.device).long()
    cache.place(input_ids.new_zeros(rows), width, width, (real.cumsum(-1) - 1).clamp_min(0))
    given = {**prepared, cache_name(model): cache}
    try:
        with evaluating(list(model.modules())):
            inputs = cast(Any, model).prepare_inputs_for_generation(input_ids, is_first_iteration=True, **given)
            logits = model(**{**inputs, **for_logits(model), "return_dict": True}).logits
    except torch.OutOfMemoryError:
        raise
    except ValueError as error:
        raise InvalidParameter(f"{type(model).__name__} refuses the prompt: {first_sentence(error)}.") from error
    except Exception as error:
        raise UnsupportedModel(f"{type(model).__name__} cannot read the prompt: {first_sentence(error)}.") from error
    if not cache.stores:
        raise UnsupportedModel(f"{type(model).__name__} keeps nothing of a prompt with images in its cache.")
    return logits, inputs.get("position_ids")


def _position(model: PreTrainedModel, positions: Tensor | None, row: int, last: int, length: int) -> int:
    """Return the position of a prompt's last token, as it was given: one number, or three and the place before."""
    if positions is None:
        return length - 1
    own = positions[..., min(row, positions.shape[-2] - 1), last].reshape(-1)[-3:]  # rows may share them
    if len({*own.tolist()}) > 1:
        raise UnsupportedModel(f"{type(model).__name__} gives the prompt's last token several positions.")
    return int(own[-1])


def _check(door: Door, token: Int[Tensor, ""], own: Float[Tensor, " V"], read: ReadPrompt) -> None:
    """Score a prompt's last token again, as text.

    Raises:
        UnsupportedModel: its logits are others than in the model's own pass.
    """
    place = torch.tensor([read.known], device=token.device)
    mask = torch.ones(1, 1, read.length, dtype=torch.bool, device=token.device)
    again = door.new_cache(1, read.length, [read])
    again.begin(again.states())
    logits = door.forward(token.view(1, 1), place.unsqueeze(0), mask, again, place).logits[0, -1]
    if not agree(door.model, logits, own):
        raise UnsupportedModel(
            f"{type(door.model).__name__} needs more of the prompt's images later than the keys that it kept, so its "
            "text cannot be verified."
        )
