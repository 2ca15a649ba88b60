"""Words for rules, schemes, drafters and trees: checked as they are given, and listed in the help."""

from collections.abc import Callable, Sequence

from polydraft.catalogue import (
    AUTO,
    drafter_spellings,
    drafter_words,
    example_trees,
    is_drafter_word,
    meant_drafter,
    meant_rule,
    names_file,
    own_drafter,
    own_rule,
    rule_line,
    rule_words,
    scheme_words,
    tables,
)
from polydraft.errors import InvalidParameter
from polydraft.fetched import MODELS, MODULES, PROMPTS, SHIPPED, is_derived, is_stack
from polydraft.options.flags import Words, one_of
from polydraft.options.value_checks import listed


def rule_word(word: str, others: Sequence[str] = ()) -> str:
    """Return the word of a verification rule, or of some others, or a rule of the user's own, FILE.py:CLASS.

    Raises:
        BadParameter: it is none.
        InvalidParameter: the file has no such rule, or the number behind its colon is none.
    """
    if names_file(word):
        return own_rule(word).word
    words, meant = [*others, *rule_words()], meant_rule(word)
    shown = {line.name: line.word for line in tables.RULES}
    if word not in shown and ":" in word and any(line.is_named(word) for line in tables.RULES):
        rule_line(word)
        return word
    return one_of(shown.get(word, word), words, meant if meant in words else "")


def verifier_word(word: str) -> str:
    """Return the word of a verification rule or auto, else as `rule_word` does."""
    return word if word == AUTO else rule_word(word, [AUTO])


def own_rules(words: Sequence[str]) -> Sequence[str]:
    """Return rules of the user's own, each FILE.py:CLASS.

    Raises:
        InvalidParameter: one names no file, or its file has no such rule.
    """
    for word in words:
        if not names_file(word):
            meant = "" if word in rule_words() else meant_rule(word)
            hint = f" (did you mean {meant}?)" if meant else ""
            raise InvalidParameter(
                f"Lossless rules are all measured; --verifier adds FILE.py:CLASS, not {word!r}{hint}."
            )
        own_rule(word)
    return words


def scheme_word(word: str) -> str:
    """Return the word of a way of drafting.

    Raises:
        BadParameter: it is none.
    """
    shown = {line.name: line.word for line in tables.SCHEMES}
    return one_of(shown.get(word, word), scheme_words())


def drafter_word(word: str) -> str:
    """Return the word of a drafter that needs one draft model or none, behind which a store or number may stand.

    A drafter of the user's own is FILE.py:CLASS.

    Raises:
        BadParameter: it is none.
        InvalidParameter: the file has no such drafter.
    """
    if is_drafter_word(word, 1):
        return word
    if names_file(word):
        return own_drafter(word).word
    if is_stack(word):
        raise InvalidParameter(
            f"A stack of drafters is a draft, and --drafter says how to draft; write --draft '{word}'."
        )
    if word in (*MODELS, *SHIPPED, MODULES) or is_derived(word):
        raise InvalidParameter(f"{word} is a model or a head, and --drafter says how to draft; write --draft {word}.")
    return one_of(word, drafter_spellings(1), meant_drafter(word, 1))


def parallel_word(word: str) -> str:
    """Return the word of how a target is shared among ranks.

    Raises:
        InvalidParameter: it is none.
    """
    from polydraft.models.distributed.splitting import TargetSplit  # which imports transformers

    try:
        return str(TargetSplit.named(word))
    except InvalidParameter as error:
        raise InvalidParameter(f"--{error}") from None  # its name is that of the keyword


def rules_in_help() -> str:
    """List the rules, those at the end that are lossy."""
    lossy = ", ".join(line.spelling for line in tables.RULES if not line.lossless)
    return f"{', '.join([AUTO, *rule_words(lossless=True)])}; LOSSY: {lossy}"


def trees_in_help() -> str:
    """List an example of each kind of tree, those at the end that follow the draft."""
    first, *others = (f'"{text}"' for text in example_trees(growing=False))
    growing = ", ".join(f'"{text}"' for text in example_trees(growing=True))
    return f"Children per depth such as {first}; or {', '.join(others)}; trees that follow the draft: {growing}"


def _served(check: Callable[[str], str | None], option: str) -> Callable[[str], str | None]:
    """Return the check of a server's word, which means no file."""

    def checked(word: str) -> str | None:
        if names_file(word):
            raise InvalidParameter(f"A server runs no file of rules or drafters: give {option} a word, not {word!r}.")
        return check(word)

    return checked


def _unless_auto(word: str) -> str | None:
    return None if word == AUTO else verifier_word(word)


def _verifiers() -> Sequence[str]:
    return AUTO, *rule_words()


def _drafters() -> Sequence[str]:
    return drafter_words(1)


def _trees() -> Sequence[str]:
    return *example_trees(growing=False), *example_trees(growing=True)


KINDS = {
    "verifier": Words(rules_in_help, verifier_word, _verifiers),
    "rule": Words(check=rule_word, offered=rule_words),
    "scheme": Words(lambda: listed(scheme_words()), scheme_word, scheme_words),
    "drafter": Words(lambda: listed(drafter_spellings(1)), drafter_word, _drafters),
    "tree": Words(trees_in_help, offered=_trees),
    "served verifier": Words(check=_served(_unless_auto, "--verifier"), offered=_verifiers),
    "served drafter": Words(lambda: listed(drafter_spellings(1)), _served(drafter_word, "--drafter"), _drafters),
    "parallel": Words(check=parallel_word),
    "fetched": Words(offered=lambda: (*MODELS, *PROMPTS)),
}
"""The kinds of words that options name."""
