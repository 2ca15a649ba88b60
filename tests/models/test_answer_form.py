"""What answers are held to, by what is asked for and what the template says."""

from typing import Any

import pytest
from chatml import chat_tokenizer
from tool_models import HERMES, WITHOUT_THOUGHTS

from polydraft.errors import InvalidParameter
from polydraft.models import AnswerForm, Grammar, LateGrammar, Tool, answer_form
from polydraft.models.grammar.grammar import vocabulary_of

pytest.importorskip("llguidance")
DAY = {"type": "object", "properties": {"day": {"type": "integer"}}, "required": ["day"], "additionalProperties": False}
LOOSE, STRICT = Tool("look", DAY), Tool("look", DAY, strict=True)
CALL = '<tool_call>\n{"name": "look", "arguments": {"day": 3}}\n</tool_call>'
OTHER = CALL.replace('"day": 3', '"week": 3')
HARMONY = "{{ messages }}<|channel|><|message|>"


def form(tools: tuple[Tool, ...] = (), template: str = WITHOUT_THOUGHTS, **options: Any) -> AnswerForm:
    return answer_form(chat_tokenizer(template), tools, **options)


def takes(found: Any, text: str) -> bool:
    tokenizer = chat_tokenizer()
    vocabulary = vocabulary_of(tokenizer, len(tokenizer))
    matcher, tokens = vocabulary.start(found).deep_copy(), vocabulary.tokens.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def test_an_answer_is_free_unless_something_is_asked_for() -> None:
    assert form().grammar is None and form().tool_format is None
    assert form((LOOSE,)).grammar is None and form((STRICT,), choice="none").grammar is None
    own = form((LOOSE,)).tool_format
    assert own is not None and own.name == "hermes"


def test_strict_and_named_tools_hold_from_the_mark_on() -> None:
    for found, fits in ((form((STRICT,)).grammar, False), (form((LOOSE,), held=True).grammar, True)):
        assert isinstance(found, LateGrammar) and found.mark == "<tool_call>"
        assert takes(found.grammar, CALL.removeprefix(found.mark)) and takes(found.grammar, OTHER[11:]) == fits


def test_a_call_is_required_behind_reasoning() -> None:
    plain = form((LOOSE,), choice="required").grammar
    assert isinstance(plain, Grammar) and takes(plain, CALL) and not takes(plain, OTHER) and not takes(plain, "Hm")
    for prompt, begun in (("...<think>\n", True), ("<think></think>", False), ("", False)):
        late = form((LOOSE,), HERMES, choice="required", prompt=prompt).grammar
        assert isinstance(late, LateGrammar) and late.begun == begun and not late.mark and takes(late.grammar, CALL)


def test_an_answer_of_a_schema_may_be_a_call_instead() -> None:
    found = form((LOOSE,), response=Grammar.json_object()).grammar
    assert isinstance(found, LateGrammar)
    assert takes(found.grammar, CALL) and takes(found.grammar, '{"a": 1}') and not takes(found.grammar, "Hm")


def test_an_answer_of_harmony_is_a_message() -> None:
    found = form(template=HARMONY, response=Grammar.regex("[0-9]+")).grammar
    assert isinstance(found, LateGrammar) and found.thinking is not None
    for text in ("<|channel|>final<|message|>12", "<|start|>assistant<|channel|>final<|message|>12"):
        assert takes(found.grammar, text) and not takes(found.grammar, "12")
    both = form((LOOSE,), HARMONY, response=Grammar.regex("[0-9]+")).grammar
    assert isinstance(both, LateGrammar) and takes(both.grammar, "<|channel|>final<|message|>12")
    called = '<|start|>assistant<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"day": 3}'
    assert takes(both.grammar, called)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"choice": "any"}, "choice must be one of"),
        ({"choice": "required", "tools": ()}, "tool_choice asks for a call"),
        ({"tool_format": "x"}, "tool format must be one of"),
        ({"most_reasoning": 3}, "max_reasoning_tokens bounds reasoning"),
    ],
)
def test_what_no_answer_can_be_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidParameter, match=said):
        form(**{"tools": (LOOSE,), **options})
