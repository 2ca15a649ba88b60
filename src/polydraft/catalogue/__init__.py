"""The catalogue: one line for every rule, scheme, policy and drafter, and what is found through these lines.

The tables are in `polydraft.catalogue.tables`. They are read when they are asked, so nobody keeps a copy of them.
"""

from polydraft.catalogue.lines import DrafterLine, LimitsEntry, PolicyLine, RuleLine, SchemeLine, schemes_of
from polydraft.catalogue.members import every_scheme, node_rules, rules_of, tree_rules
from polydraft.catalogue.own import blamed, digests, names_file, own_drafter, own_rule
from polydraft.catalogue.words import (
    AUTO,
    MANY,
    choice,
    drafter_line,
    drafter_spellings,
    drafter_words,
    example_trees,
    is_drafter_word,
    meant_drafter,
    meant_rule,
    parse_policy,
    rule_line,
    rule_words,
    scheme_by_name,
    scheme_words,
    tree_in_words,
    tree_text,
    verifier_by_name,
    word_of,
)

__all__ = [
    "AUTO",
    "MANY",
    "DrafterLine",
    "LimitsEntry",
    "PolicyLine",
    "RuleLine",
    "SchemeLine",
    "blamed",
    "choice",
    "digests",
    "drafter_line",
    "drafter_spellings",
    "drafter_words",
    "every_scheme",
    "example_trees",
    "is_drafter_word",
    "meant_drafter",
    "meant_rule",
    "names_file",
    "node_rules",
    "own_drafter",
    "own_rule",
    "parse_policy",
    "rule_line",
    "rule_words",
    "rules_of",
    "scheme_by_name",
    "scheme_words",
    "schemes_of",
    "tree_in_words",
    "tree_rules",
    "tree_text",
    "verifier_by_name",
    "word_of",
]
