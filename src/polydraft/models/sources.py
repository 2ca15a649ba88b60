"""What a row reads beside its text: what an encoder made of an input, or a prompt with images that was read."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from polydraft.errors import UnsupportedModel
from polydraft.models.cache import TreeCache
from polydraft.probs import Noise

PLACES = 3
"""How many hidden states a stand-in has."""


@dataclass(frozen=True, eq=False)
class Encoded:
    """What a decoder reads beside a text: of one row, but where training reads several at once.

    Args:
        states: the hidden states of the encoder.
        mask: 1 where the decoder may look, as the model takes it; None for everywhere.
        encoder: the encoder that made them.
        inputs: what it read, by name, for other models' encoders; empty if that is not known.
        beside: what else it returned of this row, by name.
        crossed: the keys and values that the decoder made of the states in its first pass; filled by that pass.
    """

    states: Float[Tensor, "b s d"]
    mask: Int[Tensor, "b s"] | None
    encoder: nn.Module
    inputs: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    beside: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    crossed: DynamicCache = field(default_factory=DynamicCache)


class EncoderOutput(BaseModelOutput):
    """What a decoder is told of its encoder: what there is not is None, since some models look for more than others."""

    def __getattr__(self, name: str) -> None:
        """Return None for what the encoder did not note.

        Raises:
            AttributeError: Python itself looks for something.
        """
        if name.startswith("_"):
            raise AttributeError(name)


def is_encoder_decoder(model: PreTrainedModel) -> bool:
    """Tell whether a model's decoder reads what an encoder makes of another input."""
    return bool(model.config.is_encoder_decoder)


def stand_in(model: PreTrainedModel) -> Encoded:
    """Return hidden states that no input made, for a trial of the decoder and for rows that have no text."""
    config = model.config
    width = getattr(getattr(config, "encoder", config), "hidden_size", None)
    width = width or config.get_text_config(decoder=True).hidden_size
    noise = torch.randn(1, PLACES, width, generator=Noise.from_seed(0, 1).generators[0])
    return Encoded(noise.to(model.device, model.dtype), None, model.get_encoder())


def encoded_for(model: PreTrainedModel, source: Any) -> Encoded:
    """Return what a model's decoder reads of a source: what its own encoder made, or makes now.

    Args:
        model: the model.
        source: what another model's decoder reads, or this one's; None for a row without text.

    Raises:
        UnsupportedModel: the source is not what the model's encoder reads.
    """
    if source is None:
        return stand_in(model)
    encoder, name = model.get_encoder(), type(model).__name__
    if not isinstance(source, Encoded):
        raise UnsupportedModel(f"{name} reads what its encoder made, but the source is a {type(source).__name__}.")
    if source.encoder is encoder:
        return Encoded(source.states, source.mask, encoder, source.inputs, source.beside)
    known = inspect.signature(encoder.forward).parameters
    if not source.inputs or not source.inputs.keys() - {"attention_mask"} <= known.keys():
        given = ", ".join(sorted(source.inputs)) or "nothing that it could read"
        raise UnsupportedModel(f"{name} has an encoder of its own, which reads no such input; there is {given}.")
    inputs = {label: value.to(model.device) for label, value in source.inputs.items() if label in known}
    made = encoder(**inputs, return_dict=True)
    return Encoded(made[0], source.inputs.get("attention_mask"), encoder, source.inputs, _beside(made, 0, 1))


def decoder_inputs(
    source: Encoded, tokens: Int[Tensor, "b n"], embeddings: Float[Tensor, "b n d"] | None = None
) -> dict[str, Any]:
    """Return what a model's forward pass takes in place of its text alone."""
    rows = len(tokens)
    mask = {} if source.mask is None else {"attention_mask": source.mask.expand(rows, -1)}
    text = {"decoder_input_ids": tokens} if embeddings is None else {"decoder_inputs_embeds": embeddings}
    made: Any = EncoderOutput(last_hidden_state=cast(Any, source.states.expand(rows, -1, -1)))
    for name, value in source.beside.items():
        setattr(made, name, value)
    return {**text, **mask, "encoder_outputs": made}


def crossing(cache: TreeCache, source: Encoded) -> EncoderDecoderCache:
    """Return the cache that a decoder takes: its text's keys, and those of the source."""
    return EncoderDecoderCache(cache, source.crossed)


def encoded_rows(
    model: PreTrainedModel, rows: int, prepared: Mapping[str, Any], read: Tensor | None
) -> Sequence[Encoded]:
    """Return the source of each row of what Hugging Face's `generate` prepared.

    Args:
        model: the model.
        rows: how many; several rows may share an input.
        prepared: the model's inputs, the encoder's output among them.
        read: what the encoder read, a row for each input; None if that is not known.
    """
    states, mask = prepared["encoder_outputs"][0], prepared.get("attention_mask")
    encoder = model.get_encoder()
    inputs = {} if read is None else {model.main_input_name: read}
    if inputs and mask is not None:
        inputs["attention_mask"] = mask
    return [
        Encoded(
            states[row : row + 1],
            None if mask is None else mask[row : row + 1],
            encoder,
            {name: row_of(value, row, rows) for name, value in inputs.items()},
            _beside(prepared["encoder_outputs"], row, rows),
        )
        for row in range(rows)
    ]


def _beside(made: Any, row: int, rows: int) -> dict[str, Tensor]:
    """Return what an encoder noted of one row beside its hidden states, such as which of them are padding."""
    found = made.items() if isinstance(made, Mapping) else ()
    return {
        name: value[row : row + 1]
        for name, value in found
        if name != "last_hidden_state" and isinstance(value, Tensor) and value.shape[:1] == (rows,)
    }


def row_of(value: Tensor, row: int, rows: int) -> Tensor:
    """Return one row of a tensor that has a row for each input; several returned sequences share one."""
    place = row * len(value) // rows
    return value[place : place + 1]


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
