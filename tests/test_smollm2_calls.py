"""The real chat model, with a template that tells of tools: strict calls are always of their schemas, with drafts on.

`pytest -s -m smollm2 tests/test_smollm2_calls.py` also prints what docs/tools.md says of tokens per call and times.
"""

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from tool_models import WITHOUT_THOUGHTS, tool

import polydraft
from polydraft.fetched import place
from polydraft.models import AnswerForm, Tool, answer_form

pytest.importorskip("llguidance", reason="grammars need llguidance")
pytestmark = pytest.mark.smollm2
CITIES = ["Paris", "Lima", "Oslo", "Cairo"]
DAYS = {"type": "integer", "minimum": 1, "maximum": 14}
WORDS = {"type": "string", "minLength": 1, "maxLength": 60}
SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": {"city": {"enum": CITIES}, "days": DAYS},
    "send_message": {"to": {"enum": ["Ann", "Ben", "the team"]}, "text": WORDS},
    "set_alarm": {"hour": {"type": "integer", "minimum": 0, "maximum": 23}, "repeat": {"type": "boolean"}},
    "add_items": {"items": {"type": "array", "items": WORDS, "minItems": 1, "maxItems": 3}},
}
TOOLS = [
    Tool(
        name,
        {"type": "object", "properties": own, "required": [*own], "additionalProperties": False},
        strict=True,
    )
    for name, own in SCHEMAS.items()
]
ASKS = [
    "How will the weather be in {} for the next {} days?",
    "Tell the team that we meet in {} in {} days.",
    "Wake me at {1} in {0}, every day.",
    "Put {1} maps of {0} on my list.",
    "Is it warmer in {} than here, over {} days?",
]
QUESTIONS = [
    one.format(city, number) for one, (city, number) in product(ASKS, [*zip(CITIES * 2, range(2, 10), strict=True)])
]
PROSE = [
    "Why is the sky blue?",
    "Write a short letter to a friend about a walk in the rain.",
    "How does bread rise?",
    "What does a lighthouse keeper do all day?",
    "Describe a small town by the sea.",
    "Explain what a bridge is for.",
]
NEW, PROSE_NEW = 400, 48


def fits(name: str, given: dict[str, Any]) -> bool:
    """Tell whether arguments are of the schema of a tool; the schemas here have few words."""
    return given.keys() == SCHEMAS[name].keys() and all(_is(one, SCHEMAS[name][key]) for key, one in given.items())


def _is(value: Any, own: dict[str, Any]) -> bool:
    if "enum" in own:
        return value in own["enum"]
    match own["type"]:
        case "integer":
            return type(value) is int and own["minimum"] <= value <= own["maximum"]
        case "boolean":
            return isinstance(value, bool)
        case "string":
            return isinstance(value, str) and own["minLength"] <= len(value) <= own["maxLength"]
        case _:
            return isinstance(value, list) and 1 <= len(value) <= own["maxItems"] and all(map(_is, value, [WORDS] * 9))


class Asked:
    """The model with a template of tools, and what its texts cost: tokens, passes of the target, seconds."""

    def __init__(self) -> None:
        assert place("smollm2").is_dir(), "run `polydraft fetch smollm2` first"
        self.pair = polydraft.load("smollm2")
        self.pair.tokenizer.chat_template = WITHOUT_THOUGHTS
        self.form: AnswerForm = answer_form(self.pair.tokenizer, TOOLS, choice="required", parallel=False)
        self.spent = defaultdict[tuple[str, str, str], float](float)

    def text(self, what: str, question: str, drafter: str, **options: Any) -> tuple[list[int], str]:
        """Return an answer's tokens, and why it ended."""
        calls = what != "prose"
        told = [tool(one.name, dict(one.parameters), strict=True) for one in TOOLS] if calls else None
        messages = [{"role": "user", "content": question}]
        ids: Any = self.pair.tokenizer.apply_chat_template(
            messages, tools=told, add_generation_prompt=True, return_tensors="pt", return_dict=False
        )
        grammar = {"grammar": self.form.grammar, "tokenizer": self.pair.tokenizer} if calls else {}
        own = self.pair.draft if drafter == "own" else drafter
        with torch.inference_mode():
            output = polydraft.generate(
                self.pair.target, ids, drafter=own, max_new_tokens=NEW if calls else PROSE_NEW, **grammar, **options
            )
        seconds = output.statistics.seconds
        cost = {
            "tokens": output.statistics.new_tokens,
            "passes": output.statistics.target_calls,
            "ms": 1000 * (seconds["total"] - seconds["prefill"]),
        }
        for name, value in cost.items():
            self.spent[what, drafter, name] += value
        return output.sequences[0, ids.shape[1] :].tolist(), output.finish[0]

    def calls(self, tokens: list[int]) -> list[tuple[str, str, bool]]:
        """Return the calls in an answer: names, arguments, and whether they are sound."""
        decoder, reader = self.form.decoder(), self.form.reader()
        events = [one for token in tokens for one in reader.feed(decoder.add(token))]
        events += reader.feed(decoder.rest()) + reader.finish()
        assert not [one for one in events if one.kind == "content"], events
        sound = {one.index: one.sound for one in events if one.kind == "end"}
        return [
            (one.text, "".join(more.text for more in events if more.kind == "arguments"), sound[one.index])
            for one in events
            if one.kind == "call"
        ]


@pytest.fixture(scope="module")
def asked() -> Iterator[Asked]:
    found = Asked()
    yield found
    for what, drafter in sorted({key[:2] for key in found.spent}):
        tokens, passes, spent = (found.spent[what, drafter, one] for one in ("tokens", "passes", "ms"))
        sys.stdout.write(
            f"\n{what}, drafter {drafter}: {tokens:.0f} tokens, {tokens / passes:.2f} tokens per call, "
            f"{spent / tokens:.1f} ms a token"
        )
    sys.stdout.write("\n")


def test_forty_strict_calls_are_of_their_schemas(asked: Asked) -> None:
    """Half of them at temperature 0, half at 1, where a model that knows no tools writes whatever it may."""
    assert len(QUESTIONS) == 40
    names = Counter[str]()
    for number, question in enumerate(QUESTIONS):
        greedy = number % 2 == 0
        options: dict[str, Any] = {} if greedy else {"temperature": 1, "top_k": 0, "seed": number}
        tokens, finish = asked.text("calls" if greedy else "calls at 1", question, "own", **options)
        ((name, arguments, sound),) = asked.calls(tokens)
        assert sound and finish == "eos" and fits(name, json.loads(arguments)), (question, name, arguments)
        names[name] += 1
        if greedy:
            assert asked.text("calls", question, "none")[0] == tokens
        else:
            asked.text("calls at 1", question, "none", **options)
    assert len(names) > 1


def test_prose_beside_them(asked: Asked) -> None:
    for question in PROSE:
        assert asked.text("prose", question, "own")[0] == asked.text("prose", question, "none")[0]
    tokens, passes = (asked.spent["prose", "none", one] for one in ("tokens", "passes"))
    assert tokens == passes, "without drafts every pass of the target brings one token"
