"""A target on several ranks: the first decides and tells the others its passes and what becomes of its keys.

Engine, planners, drafts and random numbers are on rank 0 alone, so that nothing that depends on a clock, a thread or a
user can let ranks run different passes. A pass is told before it begins, since all ranks must meet in its sums; what
becomes of keys needs no meeting, and is told when rank 0 has done it.

Source: the target split, the draft whole, as Chen et al., arXiv 2302.01318, section 4.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Protocol

from jaxtyping import Bool, Float, Int
from torch import Tensor

from polydraft.errors import InvalidParameter, UnsupportedModel
from polydraft.models.cache import TreeCache
from polydraft.models.distributed.parcel import RANKS, Parcel
from polydraft.models.hugging_face import HuggingFaceModel
from polydraft.models.language_model import WHOLE, Cache, Facts, Forward, Layer, LayerSet

END, PASS, NEW, KEEP, PUT, SELECT = range(6)
"""What can be told."""
TAKE_ANOTHER = "take a draft model of its own, or one that drafts from text, such as ngram"


class Teller(Protocol):
    """Who tells the other ranks: `Ranks`, or something in its place in tests."""

    count: int

    def together(self) -> AbstractContextManager[Any]:
        """Hold back other threads and Ctrl-C while something is done and told."""
        ...

    def passing(self) -> AbstractContextManager[Any]:
        """Let a pass run, in which all ranks meet; an error in it ends them."""
        ...

    def tell(self, parcel: Parcel) -> None:
        """Tell all other ranks something."""
        ...


class MirroredCache(Cache):
    """The keys of rank 0's heads; the other ranks do the same with theirs.

    Args:
        own: the keys here.
        model: the model whose cache it is.
        number: what it is called among ranks.
    """

    def __init__(self, own: TreeCache, model: "MirroredModel", number: int) -> None:
        self.own, self.number, self._model = own, number, model
        weakref.finalize(self, model.forgotten.append, number).atexit = False

    def keep(self, base: Int[Tensor, "b"], path: Int[Tensor, "b D"]) -> None:
        """Move slots, on all ranks."""
        if not path.shape[-1]:
            return
        with self._model.ranks.together():
            self.own.keep(base, path)
            self._model.tell(KEEP, (self.number,), (base, path))

    def put(self, row: int, other: "MirroredCache", length: int) -> "MirroredCache":
        """Put a row of another cache in place of a row's, or behind the last, on all ranks."""
        with self._model.ranks.together():
            found, number = self.own.put(row, other.own, length), self._model.next_number()
            self._model.tell(PUT, (self.number, row, other.number, length, number))
            return self if found is self.own else MirroredCache(found, self._model, number)

    def select(self, rows: Sequence[int]) -> "MirroredCache":
        """Return a view of the keys of a run of rows, on all ranks."""
        with self._model.ranks.together():
            found, number = self.own.select(rows), self._model.next_number()
            self._model.tell(SELECT, (self.number, number, *rows))
            return MirroredCache(found, self._model, number)

    def in_slot(self, slot: int) -> tuple[Tensor, ...]:
        """Return copies of what a slot of the first row holds in this rank's heads."""
        return self.own.in_slot(slot)


class MirroredModel(HuggingFaceModel):
    """A `HuggingFaceModel` whose weights lie on several ranks, as rank 0 runs it: its passes are run by all.

    Rank 0 has whole logits, and the keys of its own heads. Hidden states, embeddings and the output head are not given
    away: what reads them is refused.

    Args:
        model: this rank's part, which says by `RANKS` who has the others.
    """

    def __init__(self, model: Any) -> None:
        self.ranks: Teller = getattr(model, RANKS)
        super().__init__(model, fused=False)
        self.why_not_fused = f"its weights lie on {self.ranks.count} ranks."
        book = vars(self.model).setdefault("polydraft_caches", _Book())
        self.forgotten, self._book = book.forgotten, book

    @property
    def facts(self) -> Facts:
        """What the model says of itself."""
        return replace(super().facts, queries=False, ranks=self.ranks.count)

    def next_number(self) -> int:
        """Return what the next cache is called."""
        self._book.last += 1
        return self._book.last

    def tell(self, operation: int, numbers: Sequence[int] = (), tensors: Sequence[Tensor] = ()) -> None:
        """Tell the other ranks an operation, and which caches are gone since."""
        gone = [self.forgotten.pop() for _ in range(len(self.forgotten))]
        self.ranks.tell(Parcel(operation, (len(gone), *gone, *numbers), tuple(tensors)))

    def new_cache(self, batch: int, capacity: int, sources: Sequence[Any] | None = None) -> Any:
        """Return an empty cache, on all ranks.

        Raises:
            UnsupportedModel: rows read something else than text.
        """
        if any(one is not None for one in sources or ()):
            raise UnsupportedModel(f"A {type(self.model).__name__} over several ranks reads text alone.")
        with self.ranks.together():
            made, number = super().new_cache(batch, capacity), self.next_number()
            self.tell(NEW, (number, batch, capacity))
            return MirroredCache(made, self, number)

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
        """Score tokens under the mask on all ranks; see `LanguageModel.forward`.

        Raises:
            InvalidParameter: the cache is not one that `new_cache` returned.
            RankLost: another rank has ended.
            UnsupportedModel: hidden states or queries are asked for, or embeddings are given.
        """
        if hidden_layers or queries or embeddings is not None:
            raise self._refusal("reads or replaces its states")
        if not isinstance(cache, MirroredCache):
            raise InvalidParameter(f"cache must come from new_cache, but is a {type(cache).__name__}.")
        with self.ranks.together():
            cache.own.place(starts, tokens.shape[1], mask.shape[-1], positions)  # refuses before others are told
            with self.ranks.passing():
                told = (tokens, positions, mask, starts)
                self.tell(PASS, (cache.number, logits_to_keep), told)
                return super().forward(tokens, positions, mask, cache.own, starts, logits_to_keep=logits_to_keep)

    def embedded(self, tokens: Int[Tensor, "b n"], table: Float[Tensor, "e d"] | None = None) -> Float[Tensor, "b n d"]:
        """Refuse to give embeddings away."""
        raise self._refusal("reads its embeddings")

    def unembedded(self, states: Float[Tensor, "b n d"]) -> Float[Tensor, "b n V"]:
        """Refuse to give the output head away."""
        raise self._refusal("reads its output head")

    def output_rows(self, tokens: Int[Tensor, " k"]) -> Float[Tensor, "k d"]:
        """Refuse to give rows of the output head away."""
        raise self._refusal("reads its output head")

    def variant(self, weights: str = "", layers: LayerSet = WHOLE) -> HuggingFaceModel:
        """Refuse to make another model of a part of one."""
        raise self._refusal("runs it in part")

    def last_layers(self, count: int) -> HuggingFaceModel:
        """Refuse to cut the model."""
        raise self._refusal("runs it in part")

    def _refusal(self, what: str) -> UnsupportedModel:
        name, count = type(self.model).__name__, self.ranks.count
        return UnsupportedModel(
            f"{name} lies on {count} ranks, and a drafter that {what} is not run so; {TAKE_ANOTHER}."
        )


class _Book:
    """How far the numbers of a model's caches are, and which are gone and not told yet."""

    def __init__(self) -> None:
        self.last, self.forgotten = 0, list[int]()

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return _Book, ()


def follow(model: HuggingFaceModel, receive: Callable[[], Parcel]) -> None:
    """Do what rank 0 tells until it ends: its passes over this rank's weights, and what becomes of keys.

    Args:
        model: this rank's part.
        receive: waits for what is told next.
    """
    caches = dict[int, TreeCache]()
    while (told := receive()).operation != END:
        gone, *numbers = told.numbers
        for number in numbers[:gone]:
            caches.pop(number, None)
        _DOING[told.operation](model, caches, numbers[gone:], told.tensors)


Numbers = Sequence[int]
Tensors = Sequence[Tensor]


def _pass(model: HuggingFaceModel, caches: dict[int, TreeCache], numbers: Numbers, tensors: Tensors) -> None:
    device = model.device
    tokens, positions, mask = (one.to(device) for one in tensors[:3])
    starts = tensors[3] if len(tokens) == 1 else tensors[3].to(device)
    model.forward(tokens, positions, mask, caches[numbers[0]], starts, logits_to_keep=numbers[1])


def _new(model: HuggingFaceModel, caches: dict[int, TreeCache], numbers: Numbers, tensors: Tensors) -> None:
    number, batch, capacity = numbers
    caches[number] = model.new_cache(batch, capacity)


def _keep(model: HuggingFaceModel, caches: dict[int, TreeCache], numbers: Numbers, tensors: Tensors) -> None:
    base, path = (one.to(model.device) for one in tensors)
    caches[numbers[0]].keep(base, path)


def _put(model: HuggingFaceModel, caches: dict[int, TreeCache], numbers: Numbers, tensors: Tensors) -> None:
    number, row, other, length, made = numbers
    found = caches[number].put(row, caches[other], length)
    if found is not caches[number]:
        caches[made] = found


def _select(model: HuggingFaceModel, caches: dict[int, TreeCache], numbers: Numbers, tensors: Tensors) -> None:
    number, made, *rows = numbers
    caches[made] = caches[number].select(rows)


_DOING: Mapping[int, Callable[[HuggingFaceModel, dict[int, TreeCache], Numbers, Tensors], None]] = {
    PASS: _pass,
    NEW: _new,
    KEEP: _keep,
    PUT: _put,
    SELECT: _select,
}
