"""Grammars that begin inside a text: behind its reasoning, or where a mark is complete."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from polydraft.errors import InvalidParameter, shown
from polydraft.models.grammar.grammar import Grammar
from polydraft.models.text.marks import Thinking

GAP = "start: GAP? @body\nGAP: /\\n{1,2}/\n"
"""Behind reasoning there may be two line breaks, which belong to its mark."""


def literal(text: str, special: Mapping[str, int]) -> str:
    """Return what matches a text and nothing else, in Lark's words.

    Args:
        text: the text.
        special: the special tokens in it, with their ids, by which grammars name them.
    """
    named = sorted((one for one in special if one in text), key=len, reverse=True)
    parts = re.split(f"({'|'.join(map(re.escape, named))})", text) if named else [text]
    told = [f"<[{special[one]}]>" if one in special else json.dumps(one, ensure_ascii=False) for one in parts if one]
    return " ".join(told)


@dataclass(frozen=True)
class LateGrammar:
    """What a text must be from some place in it on, for `grammar=` of `generate`, `stream` and `generate_many`.

    Let p be the law of the next token after processors and y the new tokens so far. With s(y) the text of y, a(y) is
    what stands in s(y) behind the mark at which the grammar begins. The text then follows

        q(x | y) = p(x | y) 1[x is allowed] / Z(y),

    where x is allowed if s(y x) has no such mark yet, or if a(y x) begins a text of the grammar. Before the
    mark nothing is ruled out, but a token that completes it and goes on with what the grammar does not allow; where the
    grammar has no mark of its own (`mark` is empty), a text cannot end before it either. So the law is the same where a
    token holds a part of the mark and text behind it, and at every node of a tree. Reasoning of more than `most` tokens
    is closed: then the tokens of its end mark, as the tokenizer spells it, are all that is allowed.

    Args:
        grammar: what the text is from there on; None if only reasoning is bounded.
        mark: what completes itself where the grammar begins; empty for at once, behind the reasoning.
        anchored: whether the mark counts at the beginning of the answer alone, blanks aside.
        thinking: the marks of reasoning, which may stand before all else, and in which no other mark counts.
        begun: whether the text begins within reasoning.
        most: the most tokens of reasoning between its marks; None for any number.
        seen: special tokens that have a text, for marks. All others have none.

    Raises:
        InvalidParameter: an argument that is none of these.
    """

    grammar: "Grammar | GrammarBehind | None"
    mark: str = ""
    anchored: bool = False
    thinking: Thinking | None = None
    begun: bool = False
    most: int | None = None
    seen: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if not isinstance(self.grammar, Grammar | GrammarBehind | None):
            raise InvalidParameter(f"grammar must be a Grammar, but is {shown(self.grammar)}.")
        if not isinstance(self.mark, str) or (self.mark and self.grammar is None):
            raise InvalidParameter(f"mark must be the text behind which a grammar begins, but is {shown(self.mark)}.")
        if self.most is not None and (not isinstance(self.most, int) or isinstance(self.most, bool) or self.most < 0):
            raise InvalidParameter(f"most must be a number of tokens of at least 0, but is {shown(self.most)}.")
        if self.thinking is None and (self.begun or self.most is not None):
            raise InvalidParameter("begun and most are about reasoning, whose marks (thinking) are not given.")
        if self.thinking is not None and not (self.thinking.begin and self.thinking.end):
            raise InvalidParameter("The marks of reasoning must not be empty.")

    @property
    def told(self) -> Mapping[str, Any]:
        """What is told of it among the settings of a call."""
        own = {} if self.grammar is None else self.grammar.told
        return {**own, "behind": self.mark, **({} if self.most is None else {"most_reasoning": self.most})}


@dataclass(frozen=True)
class GrammarBehind:
    """A grammar with something before it, or in its place.

    Args:
        before: rules in Lark's words, which say where the body stands.
        body: the grammar.
        name: what the rules call it.
    """

    before: str
    body: "Grammar | GrammarBehind"
    name: str = "body"

    @property
    def words(self) -> str:
        """What it is called in a sentence."""
        return self.body.words

    @property
    def told(self) -> Mapping[str, Any]:
        """What is told of it among the settings of a call."""
        return {**self.body.told, "rules": self.before}

    @property
    def source(self) -> str:
        """The grammar as llguidance takes it."""
        own = self.body.source
        is_rules = isinstance(self.body, Grammar) and self.body.kind == "lark"
        first, *others = [{"lark_grammar": own}] if is_rules else json.loads(own)["grammars"]
        return json.dumps({"grammars": [{"lark_grammar": self.before}, {**first, "name": self.name}, *others]})
