"""Texts whose grammar begins inside them: those of plain decoding, whatever is drafted, and behind the mark a match."""

import re
from typing import Any

import pytest
import torch
from chatml import chat_model, chat_tokenizer

import polydraft
from polydraft import Grammar, LateGrammar, Thinking
from polydraft.errors import InvalidParameter

pytest.importorskip("llguidance")
TOKENIZER = chat_tokenizer()
MODEL = chat_model(TOKENIZER)
PATTERN = "[a-z]{3,9}(, [a-z]{1,3}){1,2}!"
MARKED = LateGrammar(Grammar.regex(PATTERN), "e")
"""A random model writes this mark soon, alone and in the middle of tokens."""
BEHIND = LateGrammar(Grammar.regex(PATTERN), thinking=Thinking("<t>", "</t>"), begun=True, most=9)


def text(ids: torch.Tensor, grammar: LateGrammar, drafter: str, **options: Any) -> tuple[str, str, list[int]]:
    output = polydraft.generate(
        MODEL, ids, grammar=grammar, tokenizer=TOKENIZER, drafter=drafter, max_new_tokens=48, **options
    )
    new = output.sequences[0, ids.shape[1] :]
    return TOKENIZER.decode(new, skip_special_tokens=True), output.finish[0], new.tolist()


def prompts(count: int) -> list[torch.Tensor]:
    stream = torch.Generator().manual_seed(5)
    return [torch.randint(1, 290, (1, 12), generator=stream) for _ in range(count)]


@pytest.mark.parametrize("drafter", ["merge", "suffix"])
def test_greedy_texts_are_those_of_plain_decoding(drafter: str) -> None:
    begun = 0
    for ids in prompts(12):
        found = text(ids, MARKED, drafter, temperature=0)
        assert found == text(ids, MARKED, "none", temperature=0)
        _, mark, behind = found[0].partition("e")
        begun += bool(mark)
        assert not mark or found[1] != "eos" or re.fullmatch(PATTERN, behind), found
    assert begun > 2


def test_reasoning_is_closed_and_the_grammar_follows() -> None:
    for ids in prompts(8):
        for temperature in (0, 1):
            found, finish, tokens = text(ids, BEHIND, "merge", temperature=temperature, seed=3)
            _, mark, behind = found.partition("</t>")
            assert mark and finish == "eos" and re.fullmatch(f"\n{{0,2}}{PATTERN}", behind), found
            closed = next(size for size in range(len(tokens)) if "</t>" in TOKENIZER.decode(tokens[:size]))
            assert closed <= 9 + len(TOKENIZER("</t>", add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"grammar": "x"}, "grammar must be a Grammar"),
        ({"grammar": None, "mark": "x"}, "mark must be"),
        ({"grammar": None, "most": 3}, "whose marks"),
        ({"grammar": None, "thinking": Thinking("<t>", "</t>"), "most": -1}, "at least 0"),
        ({"grammar": None, "thinking": Thinking("", "x")}, "must not be empty"),
    ],
)
def test_what_is_no_late_grammar_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidParameter, match=said):
        LateGrammar(**options)
