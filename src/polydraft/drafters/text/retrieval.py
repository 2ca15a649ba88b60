"""Retrieval (REST): what followed the text's end in a store of other texts."""

from dataclasses import dataclass
from pathlib import Path

from polydraft.drafters.contract import Defaults, Session
from polydraft.drafters.text.guess import Bounds, Guess, TextDrafter, rows_of
from polydraft.drafters.text.index import as_tokens
from polydraft.drafters.text.stores.store import TextStore
from polydraft.drafters.text.stores.tokenizer import StoreVocabulary
from polydraft.drafters.text.suffix import check_count, check_longest, longest_of, room_for_paths, tree_of
from polydraft.errors import InvalidParameter, shown
from polydraft.probs import SamplingParams
from polydraft.reading import Text
from polydraft.schemes import Given
from polydraft.trees import Fixed

TREES = Fixed(room_for_paths(64, 10, 16))
"""The published size of its trees."""


@dataclass(frozen=True)
class RetrievalDrafter(TextDrafter):
    """Drafts the tree of what most often followed the text's longest end that occurs in a store.

    The last `longest` tokens are looked for, then one fewer, down to `shortest`; the first that occurs is taken. What
    followed its occurrences makes a tree by counts, of which the most frequent paths are kept, as many as the policy's
    trees have nodes.

    Every sampling setting is exact: the drafts are fixed tokens, verified node by node with one draw at each. The
    published code draws at every place of every path apart and takes the longest path that agrees, which is lossy: of
    children with probability 0.5, 0.3 and 0.2 it writes 0.675, 0.255 and 0.07.

    Args:
        store: a `TextStore`, or its folder or file; it is only read. `polydraft store build --kind rest` makes one.
        longest: tokens of the longest end to look for.
        shortest: tokens of the shortest.
        occurrences: the most occurrences that are looked at, evenly spread.
        following: the most tokens that are drafted after one another.

    Raises:
        InvalidParameter: a number outside its range, or a store that is none.
        StoreError: the store cannot be used.
        VocabularyMismatch: at the start, if the store is of another tokenizer than the target's.

    Source: REST, arXiv 2311.08252.
    """

    store: TextStore | str | Path
    longest: int = 16
    shortest: int = 2
    occurrences: int = 5000
    following: int = 10
    name = "rest"
    sound = True

    def __post_init__(self) -> None:
        check_longest("longest", self.longest)
        check_longest("shortest", self.shortest)
        check_count("occurrences", self.occurrences)
        check_count("following", self.following)
        if self.shortest > self.longest:
            raise InvalidParameter(
                f"shortest must be no more than longest, but they are {self.shortest} and {self.longest}."
            )
        if isinstance(self.store, str | Path):
            object.__setattr__(self, "store", TextStore(self.store))
        if not isinstance(self.store, TextStore):
            raise InvalidParameter(f"store must be a TextStore, or its folder or file, but is {shown(self.store)}.")

    @property
    def _texts(self) -> TextStore:
        assert isinstance(self.store, TextStore)
        return self.store

    def defaults(self, params: SamplingParams) -> Defaults:
        """Give trees of sixty-four, ten deep, as published."""
        return Defaults(Given(), TREES)

    def outside(self, row: int) -> bytes:
        """Return the digest of the store."""
        return self._texts.digest()

    def start(self, text: Text, session: Session) -> int:
        """Begin, with a store of the target's tokens.

        Raises:
            VocabularyMismatch: the store's are others.
        """
        self._texts.check(StoreVocabulary.of_target(session))
        return session.vocab_size

    def guesses(self, state: int, text: Text, bounds: Bounds) -> tuple[list[Guess], int]:
        """Look every row's end up."""
        own = Bounds(bounds.nodes, min(bounds.depth, self.following), bounds.children)
        contexts = [as_tokens(row[-self.longest :]) for row in rows_of(text)]
        found = [self._texts.found(context, self.longest) for context in contexts]
        lengths = [longest_of(one) for one in found]
        pairs = zip(found, lengths, strict=True)
        trees = [
            tree_of(one, size, self.occurrences, own, 0.0) if size >= self.shortest else None for one, size in pairs
        ]
        return [one or Guess.nothing() for one in trees], state
