"""Checks of words, for options that are not made of dataclasses yet."""

from polydraft.cli.words import own_rules, rule_word, scheme_word
from polydraft.options.flags import one_of

__all__ = ["one_of", "own_rules", "rule_word", "scheme_word"]
