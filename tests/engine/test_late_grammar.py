"""Texts whose grammar begins inside them: those of plain decoding, whatever is drafted, and behind the mark a match."""

import re
from typing import Any

import pytest
import torch
from chatml import chat_model, chat_tokenizer
from doubles import perturbed

import polydraft
from polydraft import (
    Chain,
    Grammar,
    HuggingFaceModel,
    LateGrammar,
    ModelDrafter,
    NoDraft,
    RecursiveRejection,
    Thinking,
    TopDown,
    Widths,
)
from polydraft.errors import InvalidParameter
from polydraft.verifiers import SharedNoise

pytest.importorskip("llguidance")
TOKENIZER = chat_tokenizer()
MODEL = chat_model(TOKENIZER)
PATTERN = "[a-z]{3,9}(, [a-z]{1,3}){1,2}!"
MARKED = LateGrammar(Grammar.regex(PATTERN), "e")
"""A random model writes this mark soon, alone and in the middle of tokens."""
BEHIND = LateGrammar(Grammar.regex(PATTERN), thinking=Thinking("<t>", "</t>"), begun=True, most=9)


def text(ids: torch.Tensor, grammar: LateGrammar, drafter: Any, **options: Any) -> tuple[str, str, list[int]]:
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


@pytest.mark.parametrize("own", [MARKED, BEHIND], ids=["marked", "behind"])
def test_a_seed_has_the_same_text_whatever_drafts(own: LateGrammar) -> None:
    """In the reproducible mode; with the usual rule a text depends on the tree."""
    draft, begun, differs = ModelDrafter(HuggingFaceModel(perturbed(MODEL, 0.02))), 0, False
    for seed, ids in enumerate(prompts(6)):
        how: dict[str, Any] = {"temperature": 1, "top_k": 0, "seed": seed}
        plain = text(ids, own, NoDraft(), verifier=SharedNoise(), policy=Chain(1), **how)
        for policy in (Chain(4), Widths((3, 2, 1))):
            assert text(ids, own, draft, verifier=SharedNoise(), policy=policy, **how) == plain
        usual = text(ids, own, draft, verifier=TopDown(RecursiveRejection()), policy=Widths((3, 2, 1)), **how)
        begun, differs = begun + ("e" in plain[0] or "</t>" in plain[0]), differs or usual != plain
    assert begun > 2 and differs


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
