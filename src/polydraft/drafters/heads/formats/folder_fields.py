"""What readers of head folders share: values of a configuration, and tensors of which none is left over."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from polydraft.drafters.heads.drafter import MadeFor
from polydraft.drafters.heads.sublayers import Anatomy, Rotation
from polydraft.errors import CheckpointError, is_number, is_whole, shown
from polydraft.models import PlainFolder

MOST = 2**31 - 1
"""No number of a configuration that is counted is larger."""
TABLES = ("rope_scaling", "rope_parameters")
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "rms_norm_eps": 1e-6},
    "qwen3": {
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
    },
}
"""Hugging Face's sizes of layers, by kinds of models: a table of layers need not name what it has from there."""
Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of tensors, by their names in a folder."""


def classes_of(config: Mapping[str, Any]) -> list[str]:
    """Return the names of classes in a configuration; none where something else is written."""
    named = config.get("architectures")
    return [one for one in named if isinstance(one, str)] if isinstance(named, list | tuple) else []


@dataclass(frozen=True, eq=False)
class Fields:
    """A configuration, read with checks.

    Args:
        name: the folder, for messages.
        config: the values; where a name is in several tables, that of the first counts.
        beside: further tables, such as `dflash_config`.
        held: how many values the folder's tensors hold, which no size of theirs can exceed.
    """

    name: str
    config: Mapping[str, Any]
    beside: tuple[Mapping[str, Any], ...] = ()
    held: float = inf

    @classmethod
    def of(cls, folder: PlainFolder, config: Mapping[str, Any], *beside: Mapping[str, Any]) -> "Fields":
        """Return tables of a folder."""
        return cls(folder.name, config, beside, sum(one.numel() for one in folder.tensors.values()))

    def get(self, name: str, otherwise: Any = None) -> Any:
        """Return a value as it is written; a missing or null one is `otherwise`."""
        for table in (self.config, *self.beside):
            if table.get(name) is not None:
                return table[name]
        return otherwise

    def count(self, name: str, otherwise: int | None = None, least: int = 1, *, most: int = MOST, each: int = 0) -> int:
        """Return a whole number.

        Args:
            name: of the value.
            otherwise: what a missing one is.
            least: the smallest that it may be.
            most: the largest.
            each: how many values of the folder's tensors each one stands for, at least: memory is allotted for what
                these hold, and for no more.

        Raises:
            CheckpointError: it is none, too small or too large.
        """
        value = self.get(name, otherwise)
        if not is_whole(value) or value < least:
            raise CheckpointError(
                f"config.json in {self.name} says that {name} is {shown(value)}; it must be a number."
            )
        if value > most:
            raise CheckpointError(
                f"config.json in {self.name} says that {name} is {shown(value)}; it must be at most {most}."
            )
        if value * each > self.held:
            raise CheckpointError(
                f"config.json in {self.name} says that {name} is {shown(value)}; its tensors hold {self.held} values, "
                "which are too few for that."
            )
        return value

    def number(self, name: str, otherwise: float, above: float = -inf) -> float:
        """Return a number.

        Args:
            name: of the value.
            otherwise: what a missing one is.
            above: what it must be larger than.

        Raises:
            CheckpointError: it is none, infinite or too small.
        """
        value = self.get(name, otherwise)
        if not is_number(value) or not above < value < inf:
            wanted = "a number" if above == -inf else f"a number above {above:g}"
            raise CheckpointError(
                f"config.json in {self.name} says that {name} is {shown(value)}; it must be {wanted}."
            )
        return float(value)

    def counts(self, name: str, least: int = 0) -> tuple[int, ...]:
        """Return a list of whole numbers.

        Raises:
            CheckpointError: it is none, or empty.
        """
        value = self.get(name)
        if not isinstance(value, list | tuple) or not value or not all(is_whole(one) and one >= least for one in value):
            raise CheckpointError(f"config.json in {self.name} says that {name} is {shown(value)}; it must be a list.")
        return tuple(value)

    def table(self, name: str) -> Mapping[str, Any]:
        """Return a table of values; an empty one if there is none.

        Raises:
            CheckpointError: there is something else of that name.
        """
        value = self.get(name, {})
        if not isinstance(value, Mapping):
            raise CheckpointError(f"config.json in {self.name} says that {name} is {shown(value)}; it must be a table.")
        return value

    def made_for(self, vocab_size: int | None = None) -> MadeFor:
        """Return what is said of the target.

        Args:
            vocab_size: its number of tokens by the tensors, if the configuration says nothing.

        Raises:
            CheckpointError: a number is none.
        """
        told = vocab_size if self.get("vocab_size") is None else self.count("vocab_size")
        return MadeFor(told, None if self.get("num_target_layers") is None else self.count("num_target_layers"))

    def rotation(self, theta: float = 10_000.0) -> Rotation:
        """Return the rotary positions.

        Raises:
            CheckpointError: they are of a kind that heads do not have.
        """
        scaling = {**self.table("rope_scaling"), **self.table("rope_parameters")}
        own = Fields(self.name, scaling)
        base = own.number("rope_theta", self.number("rope_theta", theta, above=0), above=0)
        kind = own.get("rope_type", own.get("type", "default"))
        if kind in ("default", None):
            return Rotation(base)
        if kind == "linear":
            return Rotation(base, "linear", own.number("factor", 1.0, above=0))
        if kind == "llama3":
            return Rotation(
                base,
                "llama3",
                own.number("factor", 1.0, above=0),
                own.number("low_freq_factor", 1.0),
                own.number("high_freq_factor", 4.0),
                own.count("original_max_position_embeddings", 8192),
            )
        raise CheckpointError(f"config.json in {self.name} asks for rotary positions of kind {shown(kind)}.")

    def anatomy(self, *, normed: bool = False, theta: float = 10_000.0, eps: float = 1e-6) -> Anatomy:
        """Return the sizes of Llama's and Qwen's layers.

        Args:
            normed: whether queries and keys are normed per head.
            theta: the base of rotary positions where none is written.
            eps: what norms add where nothing is written.

        Raises:
            CheckpointError: a size is missing, or they do not fit each other.
        """
        width = self.count("hidden_size", each=1)
        heads = self.count("num_attention_heads", each=width)
        groups = self.count("num_key_value_heads", heads, each=width)
        channels = self.count("head_dim", max(width // heads, 1), each=width * heads)
        activation = self.get("hidden_act", "silu")
        if activation != "silu":
            raise CheckpointError(f"config.json in {self.name} asks for the activation {shown(activation)}, not silu.")
        if heads % groups or channels % 2:
            raise CheckpointError(
                f"config.json in {self.name} has {heads} query heads of {channels} channels on {groups} key heads."
            )
        bias = bool(self.get("attention_bias", False))
        return Anatomy(
            width=width,
            inner=self.count("intermediate_size", each=width),
            heads=heads,
            groups=groups,
            channels=channels,
            eps=self.number("rms_norm_eps", eps, above=0),
            bias=bias or bool(self.get("qkv_bias", False)),
            output_bias=bias,
            normed=normed,
            rotation=self.rotation(theta),
        )


@dataclass(eq=False)
class Tensors:
    """The tensors of a folder, of which every one must be used.

    Args:
        folder: the folder.
        left: those that nobody took yet, by their names.
    """

    folder: PlainFolder
    left: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: PlainFolder, prefixes: Iterable[str] = ("model.",)) -> "Tensors":
        """Take up a folder's tensors; a prefix that stands before some names is dropped."""
        named: dict[str, Tensor] = {}
        for name, value in folder.tensors.items():
            short = next((name.removeprefix(one) for one in prefixes if name.startswith(one)), name)
            if short in named:
                raise CheckpointError(f"{folder.file} in {folder.name} holds {short} twice, with and without a prefix.")
            named[short] = value
        return cls(folder, named)

    def has(self, name: str) -> bool:
        """Tell whether a tensor is there and was not taken."""
        return name in self.left

    def take(self, name: str) -> Tensor:
        """Return a tensor.

        Raises:
            CheckpointError: it is missing.
        """
        if name not in self.left:
            raise CheckpointError(f"The head in {self.folder.name} is not complete: {name} is missing.")
        return self.left.pop(name)

    def matrix(self, name: str) -> tuple[int, int]:
        """Return the shape of a matrix, and leave it to be taken.

        Raises:
            CheckpointError: it is missing, or no matrix.
        """
        found = self.take(name)
        if found.dim() != 2:
            raise CheckpointError(
                f"The head in {self.folder.name} is damaged: {name} has shape {list(found.shape)}, and is no matrix."
            )
        self.left[name] = found
        return found.shape[0], found.shape[1]

    def drop(self, *names: str) -> None:
        """Leave out tensors that say nothing new, where they are there."""
        for name in names:
            self.left.pop(name, None)

    def fill(self, module: nn.Module, prefix: str = "", rename: Mapping[str, str] | None = None) -> None:
        """Put the tensors of a module's parameters into it.

        Args:
            module: the module, of the right shapes.
            prefix: what stands before its names in the folder.
            rename: names in the folder, by names in the module, where they differ.

        Raises:
            CheckpointError: one is missing, has another shape, or holds what is no number.
        """
        for name, parameter in module.named_parameters():
            wanted = prefix + ((rename or {}).get(name, name))
            found = self.take(wanted)
            if found.shape != parameter.shape:
                raise CheckpointError(
                    f"The head in {self.folder.name} is damaged: {wanted} has shape {list(found.shape)}, and its "
                    f"config.json asks for {list(parameter.shape)}."
                )
            if not bool(torch.isfinite(found).all()):
                raise CheckpointError(
                    f"The head in {self.folder.name} is damaged: {wanted} holds values that are no numbers."
                )
            with torch.no_grad():
                parameter.copy_(found)

    def done(self) -> None:
        """Check that nothing is left.

        Raises:
            CheckpointError: there are tensors that no part of the head takes: it is of another format.
        """
        if self.left:
            more = f" and {len(self.left) - 1} more" if len(self.left) > 1 else ""
            raise CheckpointError(
                f"{self.folder.file} in {self.folder.name} holds {min(self.left)}{more}, which this kind of head does "
                "not have."
            )


def sizes_of(own: Anatomy, layers: int) -> dict[str, Any]:
    """Return the sizes of so many layers, under Hugging Face's names."""
    turn = own.rotation
    scaling = {
        "": None,
        "linear": {"rope_type": "linear", "factor": turn.factor},
        "llama3": {
            "rope_type": "llama3",
            "factor": turn.factor,
            "low_freq_factor": turn.low,
            "high_freq_factor": turn.high,
            "original_max_position_embeddings": turn.original,
        },
    }[turn.stretch]
    return {
        "hidden_size": own.width,
        "intermediate_size": own.inner,
        "num_hidden_layers": layers,
        "num_attention_heads": own.heads,
        "num_key_value_heads": own.groups,
        "head_dim": own.channels,
        "hidden_act": "silu",
        "rms_norm_eps": own.eps,
        "rope_theta": turn.theta,
        "rope_scaling": scaling,
    }


def draft_tokens(tensors: Tensors) -> Int[Tensor, " v"] | None:
    """Take the head's tokens out of a folder's tensors; None if there are none.

    `d2t` holds offsets: token j of the head is j + d2t[j] of the target (EAGLE-3). `t2d` says of each of the target's
    tokens whether the head has it. Some writers put the ids themselves into `d2t`, which `t2d` shows.

    Raises:
        CheckpointError: both do not fit each other, or tokens are named twice.
    """
    if not tensors.has("d2t"):
        tensors.drop("t2d")
        return None
    found = tensors.take("d2t").long()
    if found.dim() != 1 or not len(found):
        raise CheckpointError(
            f"The head in {tensors.folder.name} is damaged: d2t has shape {list(found.shape)}, no list of tokens."
        )
    offsets = found + torch.arange(len(found))
    name = tensors.folder.name
    if not tensors.has("t2d"):
        tokens = offsets
    else:
        wanted = tensors.take("t2d").bool().nonzero().squeeze(-1)
        tokens = next((one for one in (offsets, found) if torch.equal(one.sort().values, wanted)), None)
        if tokens is None:
            raise CheckpointError(f"The head in {name} is damaged: d2t and t2d name different tokens.")
    if int(tokens.min()) < 0 or len(tokens.unique()) != len(tokens):
        raise CheckpointError(f"The head in {name} is damaged: d2t names a token twice, or one below 0.")
    return tokens


def target_tokens(tensors: Tensors) -> int | None:
    """Return how many tokens the target has by the tensors that have a row for each; None if there are none."""
    rows = ("t2d", "embed_tokens.weight", *(() if tensors.has("d2t") else ("lm_head.weight",)))
    name = next((one for one in rows if tensors.has(one)), None)
    return None if name is None or not tensors.left[name].dim() else len(tensors.left[name])


def offsets_of(tokens: Int[Tensor, " v"], vocab_size: int) -> dict[str, Tensor]:
    """Return `d2t` and `t2d` of a head's tokens.

    Args:
        tokens: ids of the target.
        vocab_size: how many the target has.
    """
    there = torch.zeros(vocab_size, dtype=torch.bool)
    there[tokens] = True
    return {"d2t": tokens - torch.arange(len(tokens), device=tokens.device), "t2d": there}
