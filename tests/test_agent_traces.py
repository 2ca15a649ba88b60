"""Agents' conversations written again: how many tokens a pass of the target brings with text drafters and a grammar.

The traces (`agent_traces.jsonl`) are ours: conversations in which an assistant calls tools, reads what they return, and
answers. Each turn of the assistant is written behind the conversation before it by a greedy target that says exactly
this. So what is counted depends on the text, the tokenizer, the drafter and the grammar, and on no model's weights.

`pytest -s -m smollm2 tests/test_agent_traces.py` prints the table of docs/tools.md.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chatml import END, START, chat_model
from tool_models import WITHOUT_THOUGHTS

import polydraft
from polydraft.bench.speed.replay import Replay
from polydraft.fetched import place
from polydraft.models import Tool, answer_form, conversation_ids, load_tokenizer
from polydraft.models.grammar.masks import grammar_processor

pytest.importorskip("llguidance", reason="grammars need llguidance")
TRACES = [json.loads(line) for line in Path(__file__).with_name("agent_traces.jsonl").read_text().splitlines()]
DRAFTERS = ("none", "ngram", "suffix")


@dataclass(frozen=True)
class Turn:
    """What an assistant said: calls, or words.

    Args:
        before: the tokens before it.
        text: what it said.
        grammar: what holds its calls to their schemas; None for words.
    """

    before: list[int]
    text: str
    grammar: Any


class Spoken:
    """A tokenizer of chats, a target that has it, and what writing the turns of traces takes."""

    def __init__(self, words: str) -> None:
        self.tokenizer: Any = deepcopy(load_tokenizer(words))
        self.tokenizer.add_special_tokens({"additional_special_tokens": [START, END]})
        self.tokenizer.chat_template, self.tokenizer.eos_token = WITHOUT_THOUGHTS, END
        self.end = self.tokenizer.convert_tokens_to_ids(END)
        self.target = chat_model(self.tokenizer)

    def turns(self, trace: dict[str, Any]) -> Iterator[Turn]:
        """Yield the turns of the assistant."""
        told = [{"type": "function", "function": one} for one in trace["tools"]]
        tools = [Tool(one["name"], one["parameters"], strict=True) for one in trace["tools"]]
        form = answer_form(self.tokenizer, tools, choice="required", tool_format="hermes")
        for number, one in enumerate(trace["messages"]):
            if one["role"] == "assistant":
                before = conversation_ids(self.tokenizer, trace["messages"][:number], told)
                calls = [call["function"] for call in one.get("tool_calls", ())]
                lines = (f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)
                yield Turn(before, "\n".join(lines) or one["content"], form.grammar if calls else None)

    def spelt(self, turn: Turn) -> list[int]:
        """Return the tokens of a turn: what its grammar forces, elsewhere as the tokenizer has the rest."""
        found, left, masks = list[int](), turn.text, ()
        if turn.grammar is not None:
            masks = (
                grammar_processor(turn.grammar, self.tokenizer, self.target).placed([0], frozenset((self.end,))).rows
            )
        while left:
            forced = [one for mask in masks for one in mask.forced(np.array(found, np.int64).tobytes(), 1)]
            found.append((forced or self.tokenizer(left, add_special_tokens=False).input_ids)[0])
            left = turn.text[len(self.tokenizer.decode(found)) :]
        return found

    def passes(self, turn: Turn, said: Sequence[int], drafter: str, *, held: bool) -> int:
        """Return how many passes of the target it takes to write a turn and its end."""
        ids = torch.tensor([turn.before])
        grammar = {"grammar": turn.grammar, "tokenizer": self.tokenizer} if held else {}
        found: Any = polydraft.generate(
            self.target,
            ids,
            drafter=drafter,
            temperature=0,
            max_new_tokens=len(said) + 1,
            logits_processor=[Replay(ids, [said], self.end)],
            **grammar,
        )
        assert found.sequences[0, len(turn.before) :].tolist() == [*said, self.end]
        return found.statistics.target_calls

    def tokens_per_call(self, traces: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
        """Return, for calls that are free, calls that are held, and answers, the tokens per call by drafter."""
        kinds, sizes = ("calls, free", "calls, held", "answers"), dict[str, int]()
        counts = {kind: dict.fromkeys(DRAFTERS, 0) for kind in kinds}
        for turn in (one for trace in traces for one in self.turns(trace)):
            said = self.spelt(turn)
            for kind in kinds[:2] if turn.grammar is not None else kinds[2:]:
                sizes[kind] = sizes.get(kind, 0) + len(said) + 1
                for drafter in DRAFTERS:
                    counts[kind][drafter] += self.passes(turn, said, drafter, held=kind == kinds[1])
        return {
            kind: {"tokens": size, **{drafter: size / counts[kind][drafter] for drafter in DRAFTERS}}
            for kind, size in sizes.items()
        }


def test_a_grammar_and_what_was_said_before_spare_passes() -> None:
    found = Spoken("pair").tokens_per_call(TRACES[-1:])
    free, held = found["calls, free"], found["calls, held"]
    assert free["none"] == found["answers"]["none"] == 1
    for drafter in DRAFTERS:
        assert held[drafter] > free[drafter] >= 1
    for drafter in DRAFTERS[1:]:
        assert free[drafter] > 1.5 and held[drafter] > held["none"]


@pytest.mark.smollm2
def test_the_table_of_all_traces() -> None:
    assert place("smollm2").is_dir(), "run `polydraft fetch smollm2` first"
    found = Spoken("smollm2").tokens_per_call(TRACES)
    for kind, own in found.items():
        sys.stdout.write(f"\n{kind}: " + ", ".join(f"{name} {value:.2f}" for name, value in own.items()))
    sys.stdout.write("\n")
    assert found["calls, held"]["suffix"] > found["calls, held"]["none"] > found["calls, free"]["none"] == 1
