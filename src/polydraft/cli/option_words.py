"""Words for rules, schemes, drafters and trees: checked as they are given, and listed in the help."""

from collections.abc import Callable, Sequence

from polydraft.catalogue import (
    AUTO,
    drafter_spellings,
    example_trees,
    is_drafter_word,
    meant_drafter,
    meant_rule,
    names_file,
    own_drafter,
    own_rule,
    rule_words,
    scheme_words,
    tables,
)
from polydraft.errors import InvalidParameter
from polydraft.fetched import MODELS, SHIPPED, is_derived
from polydraft.options.flags import Words, one_of


def verifier_word(word: str) -> str:
    """Return the word of a verification rule, or auto, or a rule of the user's own, FILE.py:CLASS.

    Raises:
        BadParameter: it is none.
        InvalidParameter: the file has no such rule.
    """
    return word if word == AUTO else _rule(word, [AUTO, *rule_words()])


def rule_word(word: str) -> str:
    """Return the word of a verification rule, or a rule of the user's own, FILE.py:CLASS.

    Raises:
        BadParameter: it is none.
        InvalidParameter: the file has no such rule.
    """
    return _rule(word, rule_words())


def own_rules(words: Sequence[str] | None) -> Sequence[str] | None:
    """Return rules of the user's own, each FILE.py:CLASS.

    Raises:
        InvalidParameter: one names no file, or its file has no such rule.
    """
    for word in words or ():
        if not names_file(word):
            meant = "" if word in rule_words() else meant_rule(word)
            hint = f" (did you mean {meant}?)" if meant else ""
            raise InvalidParameter(
                f"Lossless rules are all measured; --verifier adds FILE.py:CLASS, not {word!r}{hint}."
            )
        own_rule(word)
    return words


def _rule(word: str, words: Sequence[str]) -> str:
    if names_file(word):
        return own_rule(word).word
    shown = {line.name: line.word for line in tables.RULES if line.word in words}
    meant = meant_rule(word)
    return one_of(shown.get(word, word), words, meant if meant in words else "")


def scheme_word(word: str | None) -> str | None:
    """Return the word of a way of drafting.

    Raises:
        BadParameter: it is none.
    """
    shown = {line.name: line.word for line in tables.SCHEMES}
    return None if word is None else one_of(shown.get(word, word), scheme_words())


def drafter_word(word: str | None) -> str | None:
    """Return the word of a drafter that needs one draft model or none, behind which a store or number may stand.

    A drafter of the user's own is FILE.py:CLASS.

    Raises:
        BadParameter: it is none.
        InvalidParameter: the file has no such drafter.
    """
    if word is None or is_drafter_word(word, 1):
        return word
    if names_file(word):
        return own_drafter(word).word
    if word in MODELS or word in SHIPPED or is_derived(word):
        raise InvalidParameter(f"{word} is a model or a head, and --drafter says how to draft; write --draft {word}.")
    return one_of(word, drafter_spellings(1), meant_drafter(word, 1))


def rules_in_help() -> str:
    """List the rules, those at the end that are lossy."""
    return f"{', '.join([AUTO, *rule_words(lossless=True)])}; LOSSY: {', '.join(rule_words(lossless=False))}"


def schemes_in_help() -> str:
    """List the ways of drafting."""
    return _listed(scheme_words())


def drafters_in_help() -> str:
    """List the drafters."""
    return _listed(drafter_spellings(1))


def trees_in_help() -> str:
    """List an example of each kind of tree, those at the end that follow the draft."""
    first, *others = (f'"{text}"' for text in example_trees(growing=False))
    growing = ", ".join(f'"{text}"' for text in example_trees(growing=True))
    return f"Children per depth such as {first}; or {', '.join(others)}; trees that follow the draft: {growing}"


def _listed(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}"


def _served(check: Callable[[str], str | None], option: str) -> Callable[[str], str | None]:
    """Return the check of a server's word, which means no file."""

    def checked(word: str) -> str | None:
        if names_file(word):
            raise InvalidParameter(f"A server runs no file of rules or drafters: give {option} a word, not {word!r}.")
        return check(word)

    return checked


def _unless_auto(word: str) -> str | None:
    return None if word == AUTO else verifier_word(word)


KINDS = {
    "verifier": Words(rules_in_help, verifier_word),
    "rule": Words(check=rule_word),
    "scheme": Words(schemes_in_help, scheme_word),
    "drafter": Words(drafters_in_help, drafter_word),
    "tree": Words(trees_in_help),
    "served verifier": Words(check=_served(_unless_auto, "--verifier")),
    "served drafter": Words(drafters_in_help, _served(drafter_word, "--drafter")),
}
"""The kinds of words that options name."""
