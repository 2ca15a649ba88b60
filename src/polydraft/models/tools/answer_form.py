"""What an answer looks like: its format of calls, its reasoning, and the grammar that holds it to what is asked for."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from polydraft.errors import InvalidParameter, shown
from polydraft.models.grammar.grammar import Grammar
from polydraft.models.grammar.late import GrammarBehind, LateGrammar, literal
from polydraft.models.text.marks import Thinking
from polydraft.models.text.stream_decoder import StreamDecoder
from polydraft.models.tools.answer_reader import MESSAGE, AnswerReader
from polydraft.models.tools.call_formats import ToolFormat, format_named, format_of, seen_tokens, thinking_of
from polydraft.models.tools.call_grammar import NEXT_MESSAGE, Tool, call_grammar

CHOICES = ("auto", "none", "required")
OR = "answer"
"""What rules of calls name the answer that may stand in their place."""


FRAMED = re.compile(r"<[^<>\s]+>").fullmatch
"""Whether llguidance takes an added token for a special one, also where the tokenizer does not: it allows such a token
where a text is forced, and then takes it for another text. Grammars name these by their ids, too."""


@dataclass(frozen=True, eq=False)
class AnswerForm:
    """How answers of one request are decoded, read, and held to what is asked for.

    Attributes:
        tool_format: how calls are written; None where there are no tools.
        thinking: the marks of reasoning; None where the template knows none.
        begun: whether the answer begins within reasoning.
        tools: what may be called.
        grammar: what `grammar=` is to be; None for nothing.
    """

    tokenizer: PreTrainedTokenizerBase
    tool_format: ToolFormat | None
    thinking: Thinking | None
    begun: bool
    tools: tuple[Tool, ...]
    grammar: Grammar | LateGrammar | None
    seen: frozenset[int]

    def reader(self, name_call: Callable[[int, str], str] | None = None) -> AnswerReader:
        """Return what reads an answer.

        Args:
            name_call: returns the id of a call from its number and the function's name.
        """
        schemas = {one.name: one.parameters for one in self.tools}
        named = {} if name_call is None else {"name_call": name_call}
        return AnswerReader(self.tool_format, self.thinking, begun=self.begun, tools=schemas, **named)

    def decoder(self, stop: str | Sequence[str] = (), **options: Any) -> StreamDecoder:
        """Return what makes text of the answer's tokens: special tokens that are marks have a text."""
        return StreamDecoder(self.tokenizer, stop, shown=self.seen, **options)


def answer_form(
    tokenizer: PreTrainedTokenizerBase,
    tools: Sequence[Tool] = (),
    *,
    choice: str = "auto",
    held: bool = False,
    parallel: bool = True,
    tool_format: str | None = None,
    response: Grammar | None = None,
    most_reasoning: int | None = None,
    prompt: str = "",
) -> AnswerForm:
    """Return what answers of a model look like, and the grammar that they follow.

    Rule: "auto" leaves the answer free until the mark of a call; from there on calls are held to the schemas of strict
    tools, if there are any. "required" makes the answer one of calls, all held to their schemas, behind its reasoning.
    `response` holds what stands behind the reasoning, unless it is a call. Without any of this nothing is held.

    Args:
        tokenizer: the model's, whose chat template says the format.
        tools: what may be called.
        choice: "auto", "none" (no calls are read) or "required".
        held: whether calls are held to the names of tools although none is strict.
        parallel: whether several calls may follow one another.
        tool_format: the name of another format than the template's.
        response: what the answer must match.
        most_reasoning: the most tokens of reasoning.
        prompt: the text of the prompt, or its end: the answer may begin within reasoning that stands there.

    Raises:
        InvalidParameter: a word or schema that is none, "required" without tools, or a bound of reasoning that the
            template does not mark.
        MissingExtra: a grammar is needed, and llguidance is not installed.
    """
    if choice not in CHOICES:
        raise InvalidParameter(f"choice must be one of {', '.join(CHOICES)}, but is {shown(choice)}.")
    if choice == "required" and not tools:
        raise InvalidParameter("tool_choice asks for a call, but there are no tools; name them or leave it out.")
    template, offered = _template(tokenizer), () if choice == "none" else tuple(tools)
    own = (format_named(tool_format) if tool_format else format_of(template)) if offered else None
    thinking = thinking_of(template)
    if most_reasoning is not None and thinking is None:
        raise InvalidParameter(
            "max_reasoning_tokens bounds reasoning, which this model's chat template does not mark; leave it out."
        )
    added = tokenizer.added_tokens_decoder
    special = {str(token): index for index, token in added.items() if token.special}
    names = seen_tokens(own, thinking, special)
    begun = thinking is not None and prompt.rstrip().endswith(thinking.begin)
    ids = {name: special[name] for name in names}
    late = LateGrammar(None, thinking=thinking, begun=begun, most=most_reasoning, seen=names)
    framed = {str(token): index for index, token in added.items() if not token.special and FRAMED(str(token))}
    rules = _Rules(own, framed | ids, parallel)
    held_to = response if response is None else rules.placed(response, thinking)
    if own is not None and choice == "required":
        late = replace(late, grammar=rules.calls([replace(one, strict=True) for one in offered]))
    elif own is not None and held_to is not None:
        late = replace(late, grammar=rules.either(offered, held_to))
    elif own is not None and (held or any(one.strict for one in offered)):
        body = rules.calls(offered, behind=own.mark)
        late = replace(late, grammar=body, mark=own.mark, anchored=own.anchored)
    elif held_to is not None:
        late = replace(late, grammar=held_to)
    plain = thinking is None and not late.mark and isinstance(late.grammar, Grammar)
    nothing = late.grammar is None and late.most is None
    grammar = None if nothing else late.grammar if plain and isinstance(late.grammar, Grammar) else late
    return AnswerForm(tokenizer, own, thinking, begun, offered, grammar, frozenset(ids.values()))


@dataclass(frozen=True)
class _Rules:
    """Writes the grammars of calls in a format."""

    own: ToolFormat | None
    ids: dict[str, int]
    parallel: bool

    def calls(self, tools: Sequence[Tool], behind: str = "") -> Grammar:
        assert self.own is not None
        return call_grammar(self.own, tools, self.ids, parallel=self.parallel, behind=behind)

    def placed(self, response: Grammar, thinking: Thinking | None) -> Grammar | GrammarBehind:
        """Return the grammar of an answer with what stands before it: in harmony the header of its message."""
        if thinking is None or MESSAGE not in thinking.begin:
            return response
        begin, header = (literal(text, self.ids) for text in (NEXT_MESSAGE, f"<|channel|>final{MESSAGE}"))
        return GrammarBehind(f"start: ({begin})? {header} @final\n", response, "final")

    def either(self, tools: Sequence[Tool], response: Grammar | GrammarBehind) -> GrammarBehind:
        """Return the grammar of calls, or of an answer in their place."""
        rules = self.calls(tools).text
        return GrammarBehind(re.sub("^start:", f"start: calls | @{OR}\ncalls:", rules), response, OR)


def _template(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the chat template's text; of several those of conversations and of tools."""
    found: Any = tokenizer.chat_template
    return "\n".join(map(str, found.values())) if isinstance(found, dict) else str(found or "")
