"""What readers and writers of head folders share: values of a configuration, tensors, and a head's ends."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any, TypeVar

import torch
from jaxtyping import Int
from torch import Tensor, nn

from polydraft.drafters.heads.drafter import HeadDrafter, HeadEnds, HeadNetwork, MadeFor
from polydraft.drafters.heads.sublayers import Anatomy, Rotation
from polydraft.errors import CheckpointError, InvalidParameter, is_number, is_whole, shown
from polydraft.models import LanguageModel, LeftOver, PlainFolder, write_plain

Network = TypeVar("Network", bound=HeadNetwork)
MOST = 2**31 - 1
"""No number of a configuration that is counted is larger."""
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
SAID: Mapping[str, tuple[str, ...]] = {
    "scale": ("input_embedding_scale",),
    "multiplier": ("output_multiplier", "logit_scale"),
    "softcap": ("final_logit_softcapping",),
}
"""What says in configurations by how much a head's ends are scaled and capped."""
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

    def wrong(self, name: str, value: Any, wanted: str) -> CheckpointError:
        """Return the error of a value that is not as it must be."""
        return CheckpointError(f"config.json in {self.name} says that {name} is {shown(value)}; {wanted}.")

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
            raise self.wrong(name, value, "it must be a number")
        if value > most:
            raise self.wrong(name, value, f"it must be at most {most}")
        if value * each > self.held:
            raise self.wrong(name, value, f"its tensors hold {self.held} values, which are too few for that")
        return value

    def number(self, name: str, otherwise: float, above: float = -inf) -> float:
        """Return a finite number above another one; a missing one is `otherwise`.

        Raises:
            CheckpointError: it is none, infinite or too small.
        """
        value = self.get(name, otherwise)
        if not is_number(value) or not above < value < inf:
            raise self.wrong(name, value, "it must be a number" + ("" if above == -inf else f" above {above:g}"))
        return float(value)

    def flag(self, name: str, otherwise: bool = False) -> bool:
        """Return whether something is so; a missing value is `otherwise`.

        Raises:
            CheckpointError: it is neither true nor false.
        """
        value = self.get(name, otherwise)
        if not isinstance(value, bool):
            raise self.wrong(name, value, "it must be true or false")
        return value

    def counts(self, name: str, least: int = 0) -> tuple[int, ...]:
        """Return a list of whole numbers.

        Raises:
            CheckpointError: it is none, or empty.
        """
        value = self.get(name)
        if not isinstance(value, list | tuple) or not value or not all(is_whole(one) and one >= least for one in value):
            raise self.wrong(name, value, "it must be a list")
        return tuple(value)

    def table(self, name: str) -> Mapping[str, Any]:
        """Return a table of values; an empty one if there is none.

        Raises:
            CheckpointError: there is something else of that name.
        """
        value = self.get(name, {})
        if not isinstance(value, Mapping):
            raise self.wrong(name, value, "it must be a table")
        return value

    def made_for(self, vocab_size: int | None = None) -> MadeFor:
        """Return what is said of the target, by the tensors where the configuration says nothing.

        Raises:
            CheckpointError: a number is none.
        """
        told = vocab_size if self.get("vocab_size") is None else self.count("vocab_size")
        return MadeFor(told, None if self.get("num_target_layers") is None else self.count("num_target_layers"))

    def rotation(self) -> Rotation:
        """Return the rotary positions.

        Raises:
            CheckpointError: they are of a kind that heads do not have.
        """
        scaling = {**self.table("rope_scaling"), **self.table("rope_parameters")}
        own = Fields(self.name, scaling)
        base = own.number("rope_theta", self.number("rope_theta", 10_000.0, above=0), above=0)
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
        raise self.other_positions(kind)

    def other_positions(self, kind: Any) -> CheckpointError:
        """Return the error of rotary positions that heads do not have."""
        return CheckpointError(f"config.json in {self.name} asks for rotary positions of kind {shown(kind)}.")

    def anatomy(self, *, normed: bool = False) -> Anatomy:
        """Return the sizes of Llama's and Qwen's layers, whose queries and keys may be normed per head.

        Raises:
            CheckpointError: a size is missing, or they do not fit each other.
        """
        width = self.count("hidden_size", each=1)
        heads = self.count("num_attention_heads", each=width)
        groups = self.count("num_key_value_heads", heads, each=width)
        channels = self.count("head_dim", max(width // heads, 1), each=width * heads)
        self.check_activation("hidden_act", "silu")
        biased = self.flag("qkv_bias")
        return self.layers_of(width, heads, groups, channels, self.rotation, normed=normed, biased=biased)

    def check_activation(self, name: str, usual: str) -> None:
        """Raise `CheckpointError` for an activation that such heads do not have."""
        asked = self.get(name, usual)
        if asked != usual:
            raise CheckpointError(f"config.json in {self.name} asks for the activation {shown(asked)}, not {usual}.")

    def layers_of(
        self,
        width: int,
        heads: int,
        groups: int,
        channels: int,
        rotation: Callable[[], Rotation],
        *,
        normed: bool,
        biased: bool = False,
    ) -> Anatomy:
        """Return the sizes of layers, given those of their attention.

        Raises:
            CheckpointError: a size is missing, or they do not fit each other.
        """
        if heads % groups or channels % 2:
            raise CheckpointError(
                f"config.json in {self.name} has {heads} query heads of {channels} channels on {groups} key heads."
            )
        bias = self.flag("attention_bias")
        return Anatomy(
            width=width,
            inner=self.count("intermediate_size", each=width),
            heads=heads,
            groups=groups,
            channels=channels,
            eps=self.number("rms_norm_eps", 1e-6, above=0),
            bias=bias or biased,
            output_bias=bias,
            normed=normed,
            rotation=rotation(),
        )


@dataclass(eq=False)
class Tensors:
    """The tensors of a folder, of which every one must be used."""

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

    def damaged(self, what: str) -> CheckpointError:
        """Return the error of tensors that are not as they must be."""
        return CheckpointError(f"The head in {self.folder.name} is damaged: {what}.")

    def incomplete(self, what: str) -> CheckpointError:
        """Return the error of tensors that are missing."""
        return CheckpointError(f"The head in {self.folder.name} is not complete: {what}.")

    def has(self, name: str) -> bool:
        """Tell whether a tensor is there and was not taken."""
        return name in self.left

    def take(self, name: str) -> Tensor:
        """Return a tensor.

        Raises:
            CheckpointError: it is missing.
        """
        if name not in self.left:
            raise self.incomplete(f"{name} is missing")
        return self.left.pop(name)

    def matrix(self, name: str) -> tuple[int, int]:
        """Return the shape of a matrix, and leave it to be taken.

        Raises:
            CheckpointError: it is missing, or no matrix.
        """
        found = self.take(name)
        if found.dim() != 2:
            raise self.damaged(f"{name} has shape {list(found.shape)}, and is no matrix")
        self.left[name] = found
        return found.shape[0], found.shape[1]

    def shaped(self, name: str, like: Tensor) -> Tensor:
        """Return a tensor of the shape of another, and leave it to be taken.

        Raises:
            CheckpointError: it is missing, or has another shape.
        """
        found = self.take(name)
        if found.shape != like.shape:
            shape = list(like.shape)
            raise self.damaged(f"{name} has shape {list(found.shape)}, and its config.json asks for {shape}")
        self.left[name] = found
        return found

    def drop(self, *names: str) -> None:
        """Leave out tensors that say nothing new, where they are there."""
        for name in names:
            self.left.pop(name, None)

    def fill(self, module: nn.Module, prefix: str = "", rename: Mapping[str, str] | None = None) -> None:
        """Put the tensors of a module's parameters into it.

        Args:
            prefix: what stands before its names in the folder.
            rename: names in the folder, by names in the module, where they differ.

        Raises:
            CheckpointError: one is missing, has another shape, or holds what is no number.
        """
        for name, parameter in module.named_parameters():
            self.put(prefix + ((rename or {}).get(name, name)), parameter)

    def put(self, wanted: str, place: Tensor) -> None:
        """Put one tensor into its place; errors are those of `fill`."""
        found = self.shaped(wanted, place)
        del self.left[wanted]
        if not bool(torch.isfinite(found).all()):
            raise self.damaged(f"{wanted} holds values that are no numbers")
        with torch.no_grad():
            place.copy_(found)

    def embedding(self, width: int) -> nn.Embedding | None:
        """Take the head's own input embeddings; None if there are none."""
        if not self.has("embed_tokens.weight"):
            return None
        made = nn.Embedding(self.matrix("embed_tokens.weight")[0], width)
        self.fill(made, "embed_tokens.")
        return made.requires_grad_(False)

    def output_rows(self, width: int, count: int | None = None) -> nn.Linear:
        """Take the head's own output rows, so many of them, or as many as there are."""
        made = nn.Linear(width, self.matrix("lm_head.weight")[0] if count is None else count, bias=False)
        self.fill(made, "lm_head.")
        return made.requires_grad_(False)

    def drafter(self, network: Network, ends: HeadEnds, made_for: MadeFor) -> HeadDrafter[Network]:
        """Return the drafter of a head that took its tensors; errors are those of `check_taken`."""
        self.check_taken()
        return HeadDrafter(network.eval().requires_grad_(False), ends, made_for=made_for)

    def check_taken(self) -> None:
        """Raise `LeftOver` if there are tensors that no part of the head takes: it is of another format."""
        if self.left:
            raise LeftOver(self.folder, self.left)


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
        raise tensors.damaged(f"d2t has shape {list(found.shape)}, no list of tokens")
    offsets = found + torch.arange(len(found))
    if not tensors.has("t2d"):
        tokens = offsets
    else:
        wanted = tensors.take("t2d").bool().nonzero().squeeze(-1)
        tokens = next((one for one in (offsets, found) if torch.equal(one.sort().values, wanted)), None)
        if tokens is None:
            raise tensors.damaged("d2t and t2d name different tokens")
    if int(tokens.min()) < 0 or len(tokens.unique()) != len(tokens):
        raise tensors.damaged("d2t names a token twice, or one below 0")
    return tokens


def tokens_of_rows(tensors: Tensors, rows: int, vocab: int | None) -> Int[Tensor, " v"] | None:
    """Take the tokens that a head of so many rows drafts; None if these are all of its target's `vocab`.

    Raises:
        CheckpointError: they are missing, or others than the rows.
    """
    tokens = draft_tokens(tensors)
    if tokens is None and vocab is not None and rows < vocab:
        raise tensors.incomplete(f"d2t is missing, and it has {rows} of {vocab} tokens")
    if tokens is not None and len(tokens) != rows:
        raise tensors.damaged(f"d2t names {len(tokens)} tokens, and it has {rows} output rows")
    return tokens


def target_tokens(tensors: Tensors) -> int | None:
    """Return how many tokens the target has by the tensors that have a row for each; None if there are none."""
    rows = ("t2d", "embed_tokens.weight", *(() if tensors.has("d2t") else ("lm_head.weight",)))
    name = next((one for one in rows if tensors.has(one)), None)
    return None if name is None or not tensors.left[name].dim() else len(tensors.left[name])


def embeddings_of(ends: HeadEnds, target: LanguageModel) -> Tensor:
    """Return a head's input embeddings: its own, or its target's."""
    if ends.embed_tokens is not None:
        return ends.embed_tokens.weight
    return target.embedded(torch.arange(target.facts.vocab_size, device=target.facts.device).unsqueeze(0))[0]


def output_rows_of(ends: HeadEnds, target: LanguageModel) -> Tensor:
    """Return a head's output rows: its own, or those that it has of its target."""
    if ends.lm_head is not None:
        return ends.lm_head.weight
    every = torch.arange(target.facts.vocab_size, device=target.facts.device)
    return target.output_rows(every if ends.tokens is None else ends.tokens)


def speculator(kind: str, name: str, **proposal: Any) -> dict[str, Any]:
    """Return what speculators writes of a method, its class, its proposals and its target."""
    return {
        "architectures": [name],
        "speculators_model_type": kind,
        "speculators_version": "0.7.0",
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", **proposal}],
            "verifier": {"name_or_path": None, "architectures": []},
        },
    }


def write_head(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    ends: HeadEnds,
    target: LanguageModel,
    dtype: torch.dtype,
    card: str,
    folded: Sequence[str] = (),
) -> None:
    """Write a head's folder, with `d2t` and `t2d` where it drafts some of its target's tokens.

    Args:
        folded: what the tensors have of the scales of its ends.

    Raises:
        CheckpointError: it cannot be written.
        InvalidParameter: its ends scale or cap what the configuration does not say.
    """
    scales = {"scale": ends.scale != 1, "multiplier": ends.multiplier != 1, "softcap": ends.softcap is not None}
    unsaid = next(
        (name for name, has in scales.items() if has and not {*SAID[name]} & {*config} and name not in folded), None
    )
    if unsaid is not None:
        raise InvalidParameter(f"A head whose ends have a {unsaid} of {getattr(ends, unsaid)} has no such form.")
    written = {name: value.to(dtype) for name, value in tensors.items()}
    if ends.tokens is not None:
        tokens, there = ends.tokens.cpu(), torch.zeros(target.facts.vocab_size, dtype=torch.bool)
        there[tokens] = True
        written |= {"d2t": tokens - torch.arange(len(tokens)), "t2d": there}
    write_plain(folder, config, written, card)
