"""From words to what they name: rules, schemes, trees and drafters; and the rules as instances."""

import re
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import polydraft.catalogue.tables as tables
from polydraft.catalogue.lines import DrafterLine, RuleLine, schemes_of
from polydraft.errors import InvalidParameter, near, shortened

if TYPE_CHECKING:
    from polydraft.catalogue.lines import Rule
    from polydraft.drafters import Drafter
    from polydraft.schemes import Scheme
    from polydraft.trees import TreePolicy
    from polydraft.verifiers import NodeVerifier, TreeVerifier


MANY = sys.maxsize
"""So many draft models that no drafter needs more."""
AUTO = "auto"
"""The word for the verifier that suits drafter and temperature."""
UPWARD = ", bottom up"
"""How the name of a rule ends in tables that is lifted from the leaves up."""


def rule_words(*, lossless: bool | None = None) -> list[str]:
    """Return the words of all rules, or of those that are lossless, or of those that are not."""
    return [line.word for line in tables.RULES if lossless in (None, line.lossless)]


def scheme_words() -> list[str]:
    """Return the words of all ways of drafting."""
    return [line.word for line in tables.SCHEMES]


def drafter_words(most_models: int, *, proposing: bool = False) -> list[str]:
    """Return the words of all drafters that take at most so many draft models; if asked, only those that draft.

    A drafter that must have a store is no word by itself.
    """
    return [line.word for line in _drafters(most_models, proposing) if line.store != "must"]


def drafter_spellings(most_models: int, *, proposing: bool = False) -> list[str]:
    """Return the same for people to read, with what may stand behind a colon, and with drafters that must have it."""
    return [line.spelling for line in _drafters(most_models, proposing)]


def is_drafter_word(text: str, most_models: int, *, proposing: bool = False) -> bool:
    """Tell whether a text names a drafter of the catalogue by its word, maybe with more behind a colon."""
    return any(line.is_named(text) for line in _drafters(most_models, proposing))


def meant_drafter(text: str, most_models: int, *, proposing: bool = False) -> str:
    """Return how the drafter is written that a text is likely meant to name; empty if it is like none."""
    own, colon, more = text.partition(":")
    lines = {
        name: line for line in reversed(_drafters(most_models, proposing)) for name in (line.class_name, line.word)
    }
    line = lines.get(near(own, reversed(lines)))
    if line is None:
        return ""
    return f"{line.word}:{more}" if colon and line.takes_more else line.shortest


def _drafters(most_models: int, proposing: bool) -> list[DrafterLine]:
    return [line for line in tables.DRAFTERS if line.models <= most_models and (line.proposes or not proposing)]


def example_trees(*, growing: bool) -> list[str]:
    """Return an example of every kind of tree that follows the draft, or of every kind whose shape is fixed."""
    return [line.examples[0] for line in tables.POLICIES if line.grows == growing]


def drafter_line(word: str) -> DrafterLine:
    """Return the line of the drafter with a word, behind which a store or number may stand.

    Raises:
        InvalidParameter: there is none.
    """
    for line in tables.DRAFTERS:
        if line.is_named(word):
            return line
    raise InvalidParameter(f"There is no drafter {word!r}{choice(drafter_spellings(MANY), meant_drafter(word, MANY))}")


def choice(words: Sequence[str], meant: str) -> str:
    """Return the end of a sentence about a wrong word: the word that was likely meant, or all there are."""
    return f" (did you mean {meant}?)." if meant else f"; choose from {', '.join(words)}."


def word_of(drafter: "Drafter") -> str:
    """Return the word of a drafter; empty for one that is not in the catalogue."""
    return next((line.word for line in tables.DRAFTERS if line.makes(drafter)), "")


def scheme_by_name(name: str) -> "Scheme":
    """Return the scheme with a word, or with the name that tables show.

    Raises:
        InvalidParameter: the scheme is unknown.
    """
    for line in tables.SCHEMES:
        if name in (line.word, line.name):
            return line.scheme
    raise InvalidParameter(f"There is no scheme {name!r}{choice(scheme_words(), near(name, scheme_words()))}")


def verifier_by_name(
    name: str, drafter: str, scheme: str | None = None, *, bottom_up: bool = False
) -> "TreeVerifier | None":
    """Return the tree verifier with a word, or with the name that tables show; None for "auto".

    Args:
        name: the rule.
        drafter: the drafter's word; of one that drafts under one scheme only, the rule takes that one if it can.
        scheme: the word of the way of drafting, for rules that know several; None for the rule's own.
        bottom_up: lift the node rule with `BottomUp` instead of `TopDown`.

    Raises:
        InvalidParameter: the rule or scheme is unknown, or the rule cannot be had in this way.
        UnpairedScheme: the rule is not exact for the scheme.
    """
    if name == AUTO:
        if scheme or bottom_up:
            raise InvalidParameter("--scheme and --bottom-up need a --verifier, not auto.")
        return None
    if name.endswith(UPWARD):
        return verifier_by_name(name.removesuffix(UPWARD), drafter, scheme, bottom_up=True)
    drawn = scheme_by_name(scheme) if scheme else None
    line = rule_line(name)
    if drawn and len(line.known) == 1:
        raise InvalidParameter(f"The verifier {name} has a scheme of its own; leave --scheme {scheme} out.")
    return _lifted(line.of(drawn or _scheme_for(line, drafter)), name, bottom_up)


def rule_line(name: str) -> RuleLine:
    """Return the line of the rule with a word, or with the name that tables show.

    Raises:
        InvalidParameter: there is none, or the number behind its colon is none.
    """
    for line in tables.RULES:
        if line.is_named(name):
            return line.numbered(name)
    words = [AUTO, *rule_words()]
    raise InvalidParameter(f"There is no verifier {name!r}{choice(words, meant_rule(name))}")


def meant_rule(name: str) -> str:
    """Return the word of the rule that a text is likely meant to name, by its word, name or class; empty for none."""
    named = {one: line.word for line in reversed(tables.RULES) for one in (line.class_name, line.name, line.word)}
    return {**named, AUTO: AUTO}.get(near(name, [AUTO, *reversed(named)]), "")


def _scheme_for(line: RuleLine, drafter: str) -> "Scheme":
    """Return the scheme that a drafter is bound to, if the rule knows it; else the rule's usual one."""
    bound = next((one.scheme for one in tables.DRAFTERS if one.is_named(drafter)), None)
    return bound if bound in line.known else line.known[0]


def _lifted(rule: "NodeVerifier | TreeVerifier", name: str, bottom_up: bool) -> "TreeVerifier":
    from polydraft.verifiers import BottomUp, NodeVerifier, ScalableVerifier, TopDown

    if not isinstance(rule, NodeVerifier):
        if bottom_up:
            raise InvalidParameter(f"The verifier {name} verifies whole trees already; leave --bottom-up out.")
        return rule
    if not bottom_up:
        return TopDown(rule)
    if not isinstance(rule, ScalableVerifier):
        raise InvalidParameter(f"The verifier {name} cannot be lifted bottom up: its average acceptance is not known.")
    return BottomUp(rule)


def parse_policy(text: str) -> "TreePolicy":
    """Read a policy from text.

    Ways: "4,2,2,1" (children per depth), "chain:5", "trunk:2+3,2" (a chain, then children per depth), "eagle",
    "medusa" and "falcon" (published trees), "best-first:16" or "best-first:16x4:3" (drafts x depth : children),
    "expected:8" or "expected:12x5:2" (the same, by what is likely accepted), "eagle-2" or "eagle-2:10x6:25" (width x
    depth : drafts), "confident:8:0.4" or "confident:3,2,1:0.4" (length or children per depth : threshold on the token;
    likewise "confident-path" and "confident-entropy"), "disco:8" or "disco:8:0.5" (length : threshold of the
    classifier), "adaptive:8" or "adaptive:8:0.6" (length : first threshold).

    Raises:
        InvalidParameter: the text is none of these, or a number is out of range.
    """
    if not isinstance(text, str):
        raise InvalidParameter(f'A tree is written as a text such as "4,2,2,1", not as {shortened(text)}.')
    kind, _, numbers = text.partition(":") if re.match(r"[a-z]", text) else ("", "", text)
    for line in tables.POLICIES:
        if line.word == kind:
            try:
                policy = line.read(numbers)
                if policy.shape.size > 1:
                    return policy
            except (ValueError, TypeError) as error:
                if isinstance(error, InvalidParameter):
                    raise
    lines = {line.word: line for line in tables.POLICIES if line.word}
    own = text.partition(":")[0]
    meant = "" if own in lines else near(own, lines)
    if meant:
        raise InvalidParameter(
            f"There is no tree {shortened(text)} (did you mean one such as {lines[meant].examples[0]}?)."
        )
    words = ", ".join(lines)
    raise InvalidParameter(
        f'A tree is written as children per depth such as "4,2,2,1", or in one of the ways {words} '
        f"with their numbers (docs/trees.md), not as {shortened(text)}."
    )


def tree_text(policy: "TreePolicy") -> str:
    """Return the text that means a policy, as `parse_policy` reads it; empty if none does."""
    return next((text for line in tables.POLICIES for text in line.written(policy) if _means(text, policy)), "")


def _means(text: str, policy: "TreePolicy") -> bool:
    try:
        return parse_policy(text) == policy
    except InvalidParameter:
        return False


def tree_in_words(policy: "TreePolicy") -> str:
    """Return a tree for people: the text that means it, if there is one, and of a fixed one its shape."""
    from polydraft.trees import GrowingPolicy

    text = tree_text(policy)
    if isinstance(policy, GrowingPolicy):
        return text or repr(policy)
    widths = [len(level) for level in policy.shape.levels[1:]]
    shape = f"{sum(widths)} drafts, {' + '.join(map(str, widths))} by depth"
    return f"{text} ({shape})" if text else shape


def every_scheme() -> "tuple[Scheme, ...]":
    """Return every way of drafting."""
    return schemes_of(tables.SCHEMES)


def rules_of(line: RuleLine) -> "list[Rule]":
    """Return a line's rule for each of its schemes, and its variants; a lossy rule for its usual scheme only.

    Schemes whose nodes are not independent are left out: a law at one node does not tell how they are drawn.
    """
    usual = line.usual
    known = [scheme for scheme in line.known if scheme.independent] if usual.lossless else [usual.scheme]
    return [*(line.of(scheme) for scheme in known), *line.variants]


def node_rules(lines: Sequence[RuleLine] | None = None) -> "tuple[NodeVerifier, ...]":
    """Return the node rules of some lines, or of all, with every scheme that can be proved at single nodes."""
    from polydraft.verifiers import NodeVerifier

    lines = tables.RULES if lines is None else lines
    every = (rule for line in lines if line.decides_at_nodes for rule in rules_of(line))
    return tuple(rule for rule in every if isinstance(rule, NodeVerifier))


def tree_rules(lines: Sequence[RuleLine] | None = None) -> "tuple[TreeVerifier, ...]":
    """Return the rules of some lines, or of all, as they verify trees: with the usual scheme and those `on_trees`."""
    lines = tables.RULES if lines is None else lines
    every = (line.of(scheme) for line in lines for scheme in line.proved_on_trees)
    return tuple(lifted for rule in every for lifted in _lifts(rule))


def _lifts(rule: "Rule") -> "Iterator[TreeVerifier]":
    from polydraft.verifiers import BottomUp, NodeVerifier, ScalableVerifier, TopDown

    if not isinstance(rule, NodeVerifier):
        yield rule
        return
    yield TopDown(rule)
    if isinstance(rule, ScalableVerifier) and rule.scheme.independent:
        yield BottomUp(rule)
