"""What the engine needs of a language model: a forward pass under any attention mask, over a cache it can edit."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from polydraft.errors import InvalidParameter, UnsupportedModel, is_whole, shown

Layer = int | Literal["final"]
"""Which hidden states: the output of so many layers, 0 being the embedding; or "final", behind the last norm."""


@dataclass(frozen=True)
class LayerSet:
    """Which sub-layers of a model run, layers counted from 0: all but the skipped ones, up to an exit.

    Args:
        skipped_attention: layers whose attention is left out; it reads no keys and writes none.
        skipped_mlp: layers whose inner layer is left out.
        exit: how many layers run; the final norm and the head come behind them. None for all.
        depth: how many layers the model has for which the sets were chosen; None if that is not known.

    Raises:
        InvalidParameter: the exit is none, a skipped layer lies behind it, or nothing is left to run.
    """

    skipped_attention: frozenset[int] = frozenset()
    skipped_mlp: frozenset[int] = frozenset()
    exit: int | None = None
    depth: int | None = None

    def __post_init__(self) -> None:
        for one in (self.skipped_attention, self.skipped_mlp):
            if not isinstance(one, frozenset) or not all(is_whole(number) and number >= 0 for number in one):
                raise InvalidParameter(f"Layers to skip are a frozenset of numbers from 0, not {shown(one)}.")
        skipped, run = self.skipped_attention | self.skipped_mlp, self.exit
        if run is None:
            return
        if not is_whole(run) or run < 1:
            raise InvalidParameter(f"An exit lies behind one layer at least, not behind {shown(run)}.")
        if skipped and max(skipped) >= run:
            raise InvalidParameter(f"Layer {max(skipped)} lies behind the exit at {run}, so it cannot be skipped.")
        self._check_something_runs(run)

    def check(self, count: int) -> None:
        """Check that a model of so many layers has these.

        Raises:
            InvalidParameter: the sets are for another depth, a layer or the exit is not there, or nothing is left to
                run.
        """
        if self.depth not in (None, count):
            raise InvalidParameter(
                f"The layers to skip were chosen for a model of {self.depth} layers, but this one has {count}."
            )
        if self.exit is not None and self.exit > count:
            raise InvalidParameter(f"Exits lie behind 1 to {count} layers of this model, not behind {self.exit}.")
        beyond = [number for number in self.skipped_attention | self.skipped_mlp if not 0 <= number < count]
        if beyond:
            raise InvalidParameter(
                f"Layers to skip lie between 0 and {count - 1} in this model of {count} layers, but {max(beyond)} is "
                "one of them."
            )
        self._check_something_runs(count if self.exit is None else self.exit)

    def _check_something_runs(self, run: int) -> None:
        if len(self.skipped_attention & self.skipped_mlp) == run:
            raise InvalidParameter(f"All {run} layers that run are skipped; leave one of their sub-layers.")

    def is_whole(self, count: int) -> bool:
        """Tell whether these are all sub-layers of a model of so many layers."""
        return not (self.skipped_attention or self.skipped_mlp) and self.exit in (None, count)


WHOLE = LayerSet()


@dataclass(frozen=True, eq=False)
class Queries:
    """What tokens ask keys for: a layer's score of a key is the product of both, before a cap.

    Args:
        states: of every token the queries of all layers and heads beside each other, each times what its layer
            multiplies scores by.
        widths: how wide those of each layer are.
    """

    states: Float[Tensor, "*b q w"]
    widths: tuple[int, ...]

    @classmethod
    def of(cls, noted: Sequence[Float[Tensor, "b q _"]]) -> "Queries | None":
        """Join what layers have noted, in their order; None of none."""
        return cls(torch.cat(list(noted), -1), tuple(one.shape[-1] for one in noted)) if noted else None

    def __getitem__(self, part: Any) -> "Queries":
        """Return those of some rows, or of some rows' tokens, as of a tensor "b q"."""
        return replace(self, states=self.states[part])


@dataclass(frozen=True, eq=False)
class Forward:
    """What one forward pass returns.

    Args:
        logits: one row per scored position, or for the last `logits_to_keep` of them.
        hidden: per requested layer, the hidden states of all scored positions.
        queries: those of the last scored positions, as many as were asked for; None where none were, or are known.
    """

    logits: Float[Tensor, "b n V"]
    hidden: dict[Layer, Float[Tensor, "b s d"]]
    queries: Queries | None = None


@runtime_checkable
class Cache(Protocol):
    """Keys and values of a batch, in numbered slots per row."""

    def keep(self, base: Int[Tensor, "b"], path: Int[Tensor, "b D"]) -> None:
        """Move the slots base + path[i] to base + 1 + i: the accepted nodes become committed tokens.

        Node j of the last scored tree lies in slot base + j; nodes of -1 stay where they are.
        """
        ...

    def put(self, row: int, other: Any, length: int) -> "Cache":
        """Put the first `length` slots of the only row of another cache of the same model in place of a row's.

        Returns:
            this cache; or, where they come behind the last row, one with a copy of its slots and theirs.
        """
        raise UnsupportedModel(f"{type(self).__name__} takes in no rows of other caches; it needs `put`.")

    def select(self, rows: Sequence[int]) -> "Cache":
        """Return a view of the keys of a run of rows: what is written there is written here."""
        raise UnsupportedModel(f"{type(self).__name__} does not keep the keys of rows apart.")

    def known(self) -> tuple[int, ...]:
        """Return how many tokens of each row came with its source, so that they need not be read; () for none."""
        return ()

    def states(self) -> Any:
        """Return what layers without keys remember of each row after the last pass, a value; None if there are none."""
        return None

    def begin(self, states: Any) -> None:
        """Let the next pass go on from states; None for rows of which nothing was read."""
        if states is not None:
            raise UnsupportedModel(f"{type(self).__name__} holds keys alone, no states.")

    def of_layers(self, first: int, stop: int | None) -> "Cache":
        """Return a view of the keys of some layers: what is written there is written here."""
        raise UnsupportedModel(f"{type(self).__name__} does not keep the keys of layers apart.")

    def take(
        self, row: int, other: Any, slots: Sequence[Int[Tensor, "#h m"]], newest: Int[Tensor, " m"], first: int
    ) -> None:
        """Copy slots of the only row of another cache of the same shapes into a row's slots from `first` on.

        Args:
            row: the row.
            other: the other cache.
            slots: of each layer, or for all layers one, the slots of each head of keys, or for all heads one row.
            newest: as many, which layers with windows take, whatever is chosen for the others.
            first: where the copies begin.
        """
        raise UnsupportedModel(f"{type(self).__name__} cannot be copied in part.")


@runtime_checkable
class ShowsSlots(Protocol):
    """A cache that tells what it holds, so that keys read twice can be compared."""

    def in_slot(self, slot: int) -> tuple[Tensor, ...]:
        """Return copies of what a slot of the first row holds in every layer."""
        ...


@dataclass(frozen=True)
class Facts:
    """What a language model says of itself.

    A model that cannot `branch` scores chains: every token sees those in the slots before its own, whatever the mask
    says, and rows begin where their states ended (`Cache.begin`). One that `remembers` has such states.

    Args:
        vocab_size: the number of logits V.
        context: the largest number of positions.
        device: where inputs must be.
        branches: whether trees can be scored, or chains only.
        remembers: whether layers remember in states, not in slots.
        encodes: whether rows read a source beside their text, by an encoder (`new_cache`).
        layers: how many layers it has; None if that is not known.
        width: how wide its hidden states are; likewise.
        queries: whether `forward` takes `queries`.
        ranks: on how many ranks its weights lie; states and weights of more than one are not given away.
        chooses: whether layers choose what they attend to, by keys of their own.
    """

    vocab_size: int
    context: int
    device: torch.device
    branches: bool = True
    remembers: bool = False
    encodes: bool = False
    layers: int | None = None
    width: int | None = None
    queries: bool = False
    ranks: int = 1
    chooses: bool = False


@runtime_checkable
class LanguageModel(Protocol):
    """A causal language model that can score any set of tokens under any attention mask.

    It must have `facts`, `new_cache` and `forward`. A class that is derived from this one has an answer for everything
    else, a refusal by name.
    """

    @property
    def facts(self) -> Facts:
        """What it says of itself."""
        ...

    def new_cache(self, batch: int, capacity: int, sources: Sequence[Any] | None = None) -> Cache:
        """Return an empty cache with `capacity` slots per row.

        Args:
            batch: rows.
            capacity: slots of each.
            sources: per row what the model reads beside the text, such as an encoder's input; it is kept with the row.
                A model that reads nothing else need not take this argument.
        """
        ...

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
        """Score tokens and store their keys and values in slots starts to starts + n - 1.

        A model whose facts say so takes one argument more, `queries`: of how many of the last tokens to return them.

        Args:
            tokens: token ids.
            positions: their positions in the text; siblings of a tree share one.
            mask: True where a token may attend to a slot; m slots are looked at.
            cache: where keys and values are read and written.
            starts: first slot to write, per row.
            hidden_layers: which layers' hidden states to return.
            logits_to_keep: return logits for the last so many tokens only; 0 for all.
            embeddings: what enters the first layer instead of the tokens' embeddings; None for those.
        """
        ...

    def embedded(self, tokens: Int[Tensor, "b n"], table: Float[Tensor, "e d"] | None = None) -> Float[Tensor, "b n d"]:
        """Return the tokens' input embeddings; an id V + i names row i of the table."""
        raise UnsupportedModel(f"{type(self).__name__} does not give its embeddings away.")

    def unembedded(self, states: Float[Tensor, "b n d"]) -> Float[Tensor, "b n V"]:
        """Return the logits of final hidden states, by the output head."""
        raise UnsupportedModel(f"{type(self).__name__} does not give its output head away.")

    def output_rows(self, tokens: Int[Tensor, "k"]) -> Float[Tensor, "k d"]:
        """Return the rows of the output head for some tokens, whose products with final states are their logits."""
        raise UnsupportedModel(f"{type(self).__name__} does not give its output head away.")

    def variant(self, weights: str = "", layers: LayerSet = WHOLE) -> "LanguageModel":
        """Return the model with other weights, or without some of its sub-layers, over the same cache.

        Layers keep their numbers, so that it reads the keys that the model has written; the same object as long as the
        model's weights are the same.

        Args:
            weights: "int8" or "int4"; empty for the model's own.
            layers: what runs.
        """
        raise UnsupportedModel(f"{type(self).__name__} cannot be run with other weights or without some of its layers.")

    def last_layers(self, count: int) -> "LanguageModel":
        """Return the model of all but the first `count` layers, which takes their output as embeddings."""
        raise UnsupportedModel(f"{type(self).__name__} cannot be cut between its layers.")
