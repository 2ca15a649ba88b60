"""A view of the target: its weights or rounded ones, all of its layers or some, all of its keys or a few."""

from dataclasses import dataclass

from polydraft.drafters.itself.keys import Keys, keys_of, word_of_keys
from polydraft.errors import InvalidParameter, UnsupportedModel, shown
from polydraft.models import AUTO, WHOLE, LanguageModel, LayerSet, read_word, refuse_word, word_of

WEIGHTS = ("", "int8", "int4")
"""The target's own weights, or rounded ones."""


@dataclass(frozen=True)
class View:
    """What the target drafts by: what is not said is its own.

    Args:
        weights: "int8" or "int4"; empty for the target's own.
        layers: which sub-layers run.
        keys: which of its keys are seen; None for all.
        chooses: whether sub-layers to skip are chosen while a text is written (`SkippingDrafter`); then no others are
            named, and all keys are seen.
        adapter: the folder of an adapter behind the exit (`AdapterDrafter`); empty for none.

    Raises:
        InvalidParameter: one of them is something else; or it chooses what to skip, or has an adapter, beside parts
            that do not go with that.

    Sources: skipped sub-layers are those of Zhang et al., arXiv 2309.08168 (Draft & Verify); exits those of Elhoushi et
    al., arXiv 2404.16710 (LayerSkip); rounded weights over the target's keys those of Tiwari et al., arXiv 2502.10424
    (QuantSpec).
    """

    weights: str = ""
    layers: LayerSet = WHOLE
    keys: Keys | None = None
    chooses: bool = False
    adapter: str = ""

    def __post_init__(self) -> None:
        if self.weights not in WEIGHTS:
            raise InvalidParameter(
                f"A view's weights are {' or '.join(map(repr, WEIGHTS))}, not {shown(self.weights)}."
            )
        if not isinstance(self.layers, LayerSet):
            raise InvalidParameter(f"A view's layers must be a LayerSet, not {shown(self.layers)}.")
        if not isinstance(self.keys, Keys | None):
            raise InvalidParameter(f"A view's keys must choose keys, as Snap(512) does, not be {shown(self.keys)}.")
        if self.chooses and (self.layers != WHOLE or self.keys is not None):
            raise InvalidParameter(
                "skip=auto chooses among all sub-layers, over all keys: name no other layers and no keys beside it."
            )
        exit, other = self.layers.exit, self.weights or self.keys is not None or self.chooses
        if self.adapter and (other or exit is None or self.layers != LayerSet(exit=exit)):
            raise InvalidParameter(
                "An adapter stands behind an exit, and nothing else goes beside it; write self:exit=2,adapter=FOLDER."
            )

    @classmethod
    def named(cls, word: str) -> "View":
        """Return the view that a word means: parts behind "self:", with commas between them.

        The parts are int8 or int4; skip=3-5+9, skip-attention= and skip-mlp= with layers counted from 0, or skip=FILE
        with a JSON file of skipped sub-layers, or skip=auto; exit=8, behind so many layers, with adapter=FOLDER or
        without; and keys=snap:512 or others (`keys_of`).

        Raises:
            InvalidParameter: the word means no view; the text says why.
        """
        weights, layers, others = read_word(word)
        keys, skip, adapter = (others.pop(one, None) for one in ("keys", "skip", "adapter"))
        if others or adapter == "":
            raise refuse_word(word)
        return cls(weights, layers, None if keys is None else keys_of(f"keys={keys}"), skip == AUTO, adapter or "")

    @property
    def word(self) -> str:
        """A word that means this view."""
        keys = () if self.keys is None else (word_of_keys(self.keys),)
        more = [*([f"skip={AUTO}"] if self.chooses else ()), *([f"adapter={self.adapter}"] if self.adapter else ())]
        return word_of(self.weights, self.layers, *keys, *more)

    @property
    def queries(self) -> int:
        """Of how many of the newest tokens the target's queries are read, to choose keys by."""
        return 0 if self.keys is None else self.keys.queries

    @property
    def is_model(self) -> bool:
        """Whether it can be a model with keys of its own, too: one of other weights, or without whole layers."""
        whole = self.layers.exit is None and self.layers.skipped_attention == self.layers.skipped_mlp
        return whole and self.keys is None and not self.chooses

    def model(self, target: LanguageModel) -> LanguageModel:
        """Return the target as it is seen here: the variant of it that reads and writes its keys.

        Raises:
            InvalidParameter: the target has no such layers, or fewer places than keys are chosen.
            UnsupportedModel: it has no such variant, hands out no queries to choose keys by, or cannot branch; or few
                of its keys are to be seen, and its layers choose what they attend to.
        """
        facts = target.facts
        if not facts.branches:
            raise UnsupportedModel("A target whose text cannot branch has no keys to draft from in part.")
        if self.keys is not None:
            self.check_keys("this target", remembers=facts.remembers, chooses=facts.chooses)
        self.check(facts.layers, facts.context)
        if self.queries and not facts.queries:
            name = type(target).__name__
            raise UnsupportedModel(f"{name} hands out no queries, by which {self.word} chooses; take keys=recent.")
        return target if not self.weights and self.layers == WHOLE else target.variant(self.weights, self.layers)

    def check(self, layers: int | None, context: int) -> None:
        """Check that a target of these sizes has such a view, before it is loaded or looked at.

        Args:
            layers: how many it has; None if that is not known.
            context: how many tokens its longest text has.

        Raises:
            InvalidParameter: it has no such layers, or fewer places than keys are chosen.
        """
        if layers is not None:
            self.layers.check(layers)
        if self.keys is not None and self.keys.budget > context:
            raise InvalidParameter(
                f"{word_of_keys(self.keys)} chooses {self.keys.budget} keys, but the target's context has "
                f"{context}; take fewer."
            )

    def check_keys(self, name: str, *, remembers: bool, chooses: bool) -> None:
        """Check that a target's layers have keys that such a view can read; what is a model too has keys of its own.

        Args:
            name: the target's.
            remembers: whether layers remember in states, not by keys.
            chooses: whether layers choose what they attend to.

        Raises:
            UnsupportedModel: they have none, or their choice would not be among those that are seen.
        """
        why = "remember in states" if remembers else "choose what they attend to" if chooses else ""
        if why and not self.is_model:
            raise UnsupportedModel(
                f"Layers of {name} {why}, so {self.word} has no keys of theirs to draft from; take self:int8, which "
                "keeps its own, or another drafter."
            )

    def check_resumes(self) -> None:
        """Check that the full pass can go on from the states at the exit.

        Raises:
            InvalidParameter: there is no exit, or the states there are not the target's own.
        """
        exit = self.layers.exit
        if exit is None or self.weights or self.keys is not None or self.layers != LayerSet(exit=exit):
            raise InvalidParameter(
                f"The full pass resumes at an exit behind which layers ran that are the target's own over all of its "
                f"keys, which {self.word} does not have; leave resumes out."
            )
