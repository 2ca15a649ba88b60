"""What a line of each table says.

A line is text: what it names, "polydraft.schemes.iid:IID", is imported when something of it is asked, so that words are
known without torch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, get_type_hints

from polydraft.errors import InvalidParameter, UnpairedScheme, shown

if TYPE_CHECKING:
    from polydraft.drafters import Drafter
    from polydraft.schemes import Scheme
    from polydraft.trees import TreePolicy
    from polydraft.verifiers import NodeVerifier, TreeVerifier

    Rule = NodeVerifier | TreeVerifier
    Drawn = tuple["SchemeLine | Scheme", ...]


def load(named: Any) -> Any:
    """Return what a text names, "module:name"; anything else as it is."""
    if not isinstance(named, str):
        return named
    module, _, name = named.partition(":")
    return getattr(import_module(module), name)


def schemes_of(drawn: "Drawn") -> "tuple[Scheme, ...]":
    """Return schemes that are given by their lines or as they are."""
    return tuple(one.scheme if isinstance(one, SchemeLine) else one for one in drawn)


def _name_of(source: Any) -> str:
    return source.rpartition(":")[2] if isinstance(source, str) else source.__name__


@dataclass(frozen=True)
class SchemeLine:
    """A way of drafting and the word for it.

    Args:
        word: its name on the command line and wherever schemes are named by text.
        source: its class.
        arguments: what the class is called with.
        own_name: its name in tables; empty for the word with blanks.
    """

    word: str
    source: "str | Callable[..., Scheme]"
    arguments: tuple[Any, ...] = ()
    own_name: str = ""

    @property
    def name(self) -> str:
        """Its name in tables, which is the scheme's own."""
        return self.own_name or self.word.replace("-", " ")

    @cached_property
    def scheme(self) -> "Scheme":
        """The scheme itself."""
        return load(self.source)(*self.arguments)


@dataclass(frozen=True)
class LimitsEntry:
    """How `polydraft limits` measures a lossless rule on real text.

    Args:
        label: its name in tables; empty for the rule's own.
        nodes: the schemes with which it is measured at single nodes; None for the usual one.
        short: its name behind "top-down" or "bottom-up"; empty for the label.
        trees: the schemes with which it is measured on trees, a node rule top down; None for the usual one.
        bottom_up: the schemes with which a node rule is measured on trees from the bottom up.
        chains: its name on chains, where the usual scheme is measured; empty if it is not.
    """

    label: str = ""
    nodes: "Drawn | None" = None
    short: str = ""
    trees: "Drawn | None" = None
    bottom_up: "Drawn" = ()
    chains: str = ""


@dataclass(frozen=True)
class RuleLine:
    """A verification rule.

    What a rule can do is not said here but asked of the rule: whether it decides at nodes or on whole trees, whether it
    can be lifted bottom up, and how many drafts it takes (`most_drafts`).

    Args:
        word: its name on the command line and wherever rules are named by text.
        source: the rule's class, called with a scheme, or without for its usual one; or a function that does the same.
        schemes: all that it can be made for; empty for a rule that has one scheme of its own.
        on_trees: the schemes that `polydraft conformance` proves on whole trees, besides the usual one.
        others: other parameters with which it is proved too.
        measured: how it is measured on real text.
        digest: of the file that it comes from, if that is a user's own; else empty.
        own_name: the rule's own name, which tables show; empty for the word with blanks.
        lossless: what the rule says of itself.
        number: the argument of its class that a number behind a colon gives; empty for none.
    """

    word: str
    source: "str | Callable[..., Rule]"
    schemes: "Drawn" = ()
    on_trees: "Drawn" = ()
    others: tuple[Mapping[str, Any], ...] = ()
    measured: LimitsEntry = LimitsEntry()
    digest: str = ""
    own_name: str = ""
    lossless: bool = True
    number: str = ""

    @property
    def name(self) -> str:
        """The rule's own name, which tables show."""
        return self.own_name or self.word.replace("-", " ")

    @property
    def spelling(self) -> str:
        """How it is named in help."""
        return f"{self.word}[:{self.number.upper()}]" if self.number else self.word

    def is_named(self, text: str) -> bool:
        """Tell whether a text is its word or its name in tables, or its word with more behind a colon."""
        return text in (self.word, self.name) or (bool(self.number) and text.startswith(f"{self.word}:"))

    def numbered(self, text: str) -> "RuleLine":
        """Return the line of the rule with the number that a text has behind a colon, if it has one.

        Raises:
            InvalidParameter: what is behind the colon is no number, or outside its range.
        """
        _, colon, told = text.partition(":")
        if not (self.number and colon):
            return self
        try:
            given = {self.number: float(told)}
        except ValueError as error:
            raise InvalidParameter(
                f"The verifier {self.word} takes a number behind its colon, its {self.number}, not {shown(told)}: "
                f"write {self.name}, or {self.word} alone."
            ) from error
        return replace(self, source=partial(self.make, **given), own_name=self.make(**given).name)

    @property
    def class_name(self) -> str:
        """The name of the rule's class."""
        return _name_of(self.source)

    @property
    def make(self) -> "Callable[..., Rule]":
        """The rule's class, or what is called in its place."""
        return load(self.source)

    @property
    def usual(self) -> "Rule":
        """The rule with its usual scheme."""
        return self.make()

    @property
    def variants(self) -> "tuple[Rule, ...]":
        """The rule with other parameters, which are proved too."""
        return tuple(self.make(**others) for others in self.others)

    @property
    def known(self) -> "tuple[Scheme, ...]":
        """All schemes that the rule can be made for, the usual one first."""
        usual = self.usual.scheme
        return usual, *(scheme for scheme in schemes_of(self.schemes) if scheme != usual)

    @property
    def proved_on_trees(self) -> "tuple[Scheme, ...]":
        """The schemes that are proved on whole trees, the usual one first."""
        return self.usual.scheme, *schemes_of(self.on_trees)

    @property
    def decides_at_nodes(self) -> bool:
        """Whether it is a node rule, which trees are verified by once it is lifted."""
        from polydraft.verifiers import NodeVerifier

        return isinstance(self.usual, NodeVerifier)

    def of(self, scheme: "Scheme") -> "Rule":
        """Return the rule for one of its schemes.

        Raises:
            UnpairedScheme: the rule is not exact for the scheme.
        """
        rule = self.make(scheme) if self.schemes else self.make()
        if scheme not in self.known:
            names = " or ".join(one.name for one in self.known)
            raise UnpairedScheme(f"The verifier {self.word} works with drafts that are {names}, not {scheme.name}.")
        return rule


@dataclass(frozen=True)
class PolicyLine:
    """A kind of tree.

    Args:
        word: what its text begins with, before a colon; empty for trees that are numbers alone.
        source: makes the policy from the text behind the colon; whatever it cannot read is a `ValueError` or
            `TypeError`.
        examples: texts that it can be written as.
        form: how its policy is written, with the names of the policy's numbers; empty for as the first example.
        grows: whether its trees follow the draft; else their shape is fixed.
    """

    word: str
    source: "str | Callable[[str], TreePolicy]"
    examples: tuple[str, ...]
    form: str = ""
    grows: bool = False

    @property
    def read(self) -> "Callable[[str], TreePolicy]":
        """What makes the policy from the text behind the colon."""
        return load(self.source)

    def written(self, policy: "TreePolicy") -> list[str]:
        """Return texts that would mean a policy if it were of this line; widths of one child each as a length first."""
        form, numbers = self.form or self.examples[0], getattr(policy, "__dict__", {})
        ways = [{name: way(value) for name, value in numbers.items()} for way in (_length, _listed)]
        try:
            return [form.format(**way) for way in ways]
        except KeyError:
            return []


def _listed(value: object) -> object:
    return ",".join(map(str, value)) if isinstance(value, tuple) else value


def _length(value: object) -> object:
    return len(value) if isinstance(value, tuple) and {*value} == {1} else _listed(value)


@dataclass(frozen=True)
class DrafterLine:
    """A drafter.

    Args:
        word: its name on the command line and wherever drafters are named by text.
        source: its class, called with nothing, or with the drafter of the draft model if it takes one; or a function
            that does the same.
        models: how many draft models it takes.
        bound: the only scheme that it drafts under; None for a drafter that follows the verifier's.
        proposes: whether it drafts at all.
        wraps: whether it has another drafter inside; a drafter that does not is whatever a draft, be it a model or a
            head, drafts by itself.
        store: whether its word may name a folder of texts behind a colon, as `store` of its class: "no", "may", "must".
        numbers: the arguments of its class that whole numbers behind a colon give, with commas between them; empty for
            none.
        numbers_for_example: such numbers, for help and errors.
        digest: of the file that it comes from, if that is a user's own; else empty.
        gives: the name of the class of what it makes; empty for the source's.
    """

    word: str
    source: "str | Callable[..., Drafter]"
    models: int = 0
    bound: "SchemeLine | Scheme | None" = None
    proposes: bool = True
    wraps: bool = False
    store: Literal["no", "may", "must"] = "no"
    numbers: tuple[str, ...] = ()
    numbers_for_example: str = ""
    digest: str = ""
    gives: str = ""

    @property
    def make(self) -> "Callable[..., Drafter]":
        """Its class, or what is called in its place."""
        return load(self.source)

    @property
    def scheme(self) -> "Scheme | None":
        """The only scheme that it drafts under; None for a drafter that follows the verifier's."""
        return None if self.bound is None else schemes_of((self.bound,))[0]

    @property
    def spelling(self) -> str:
        """How it is named in help."""
        if self.numbers:
            return f"{self.word}[:{','.join('NWG'[: len(self.numbers)])}]"
        return {"no": self.word, "may": f"{self.word}[:FOLDER]", "must": f"{self.word}:FOLDER"}[self.store]

    @property
    def takes_more(self) -> bool:
        """Whether something may stand behind its word and a colon."""
        return self.store != "no" or bool(self.numbers)

    @property
    def shortest(self) -> str:
        """What must be written at least."""
        return self.spelling if self.store == "must" else self.word

    @property
    def class_name(self) -> str:
        """The name of the class of what it makes."""
        return self.gives or _name_of(self.source)

    def is_named(self, text: str) -> bool:
        """Tell whether a text is its word, maybe with more behind a colon where it takes more."""
        return text == self.word or (self.takes_more and text.startswith(f"{self.word}:"))

    def named(self, text: str) -> "Drafter":
        """Return the drafter that a text names, which begins with its word and may have more behind a colon.

        Raises:
            InvalidParameter: what is behind the colon is not what the drafter takes, or is missing and must be there.
            StoreError: the store cannot be used.
        """
        return self.make(**self.arguments_in(text))

    def arguments_in(self, text: str) -> dict[str, Any]:
        """Return the arguments of the class that a text has behind its word.

        Raises:
            InvalidParameter: what is behind the colon is not what the drafter takes, or is missing and must be there.
        """
        if self.numbers:
            return self._numbers_in(text)
        folder = self._folder_in(text)
        return {"store": folder} if folder else {}

    def _numbers_in(self, text: str) -> dict[str, int]:
        _, colon, told = text.removeprefix(self.word).partition(":")
        if not colon:
            return {}
        found = told.split(",")
        fine = [one.isascii() and one.isdecimal() and len(one) <= 6 and int(one) > 0 for one in found]
        if not all(fine) or len(found) != len(self.numbers):
            many = len(self.numbers) > 1
            asked = f"{len(self.numbers)} whole numbers, {', '.join(self.numbers)}," if many else "a whole number of "
            raise InvalidParameter(
                f"The drafter {self.word!r} takes {asked}{'' if many else self.numbers[0]} behind its colon, from 1 to "
                f"999999, not {shown(told)}: write {self.word}:{self.numbers_for_example}, or {self.word} alone."
            )
        return dict(zip(self.numbers, map(int, found), strict=True))

    def _folder_in(self, text: str) -> str:
        _, colon, folder = text.removeprefix(self.word).partition(":")
        if not folder.strip() and (colon or self.store == "must"):
            told = "needs a store" if self.store == "must" else "has no folder behind its colon"
            besides = f", or {self.word} alone" if self.store == "may" else ""
            raise InvalidParameter(f"The drafter {self.word!r} {told}: write {self.word}:FOLDER{besides}.")
        return folder

    def of(self, drafter: "Drafter") -> "Drafter":
        """Return the drafter that has the drafter of a draft model inside, or is it."""
        return self.make(drafter) if self.wraps and not self.makes(drafter) else drafter

    @property
    def kind(self) -> type | None:
        """The class of what it makes: `make` itself, or what it says that it returns."""
        make = self.make
        made = make if isinstance(make, type) else get_type_hints(make).get("return")
        return made if isinstance(made, type) else None

    def makes(self, drafter: "Drafter") -> bool:
        """Tell whether a drafter is of this line."""
        make = self.make
        return isinstance(make, type) and isinstance(drafter, make)
