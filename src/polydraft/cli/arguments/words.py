"""Words for rules, schemes, drafters and trees: checked as they are given, and listed in the help."""

from collections.abc import Sequence

import typer

from polydraft.catalogue import AUTO, drafter_spellings, example_trees, is_drafter_word, rule_words, scheme_words


def verifier_word(word: str) -> str:
    """Return the word of a verification rule, or auto.

    Raises:
        BadParameter: it is none.
    """
    return one_of(word, [AUTO, *rule_words()])


def scheme_word(word: str | None) -> str | None:
    """Return the word of a way of drafting.

    Raises:
        BadParameter: it is none.
    """
    return None if word is None else one_of(word, scheme_words())


def drafter_word(word: str | None) -> str | None:
    """Return the word of a drafter that needs one draft model or none, behind which a store or number may stand.

    Raises:
        BadParameter: it is none.
    """
    if word is None or is_drafter_word(word, 1):
        return word
    return one_of(word, drafter_spellings(1))


def rule_word(word: str) -> str:
    """Return the word of a verification rule.

    Raises:
        BadParameter: it is none.
    """
    return one_of(word, rule_words())


def one_of(word: str, words: Sequence[str]) -> str:
    """Return a word that is among others.

    Raises:
        BadParameter: it is not.
    """
    if word not in words:
        raise typer.BadParameter(f"{word!r} is not one of {', '.join(map(repr, words))}.")
    return word


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
