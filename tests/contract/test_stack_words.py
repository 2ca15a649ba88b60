"""Stacks of drafters as they are written: what they mean, what is refused, and that the text is the target's."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import polydraft
from polydraft import (
    BlockVerification,
    ByDepthDrafter,
    Chain,
    Given,
    ModelDrafter,
    NestedDrafter,
    NgramDrafter,
    TopDown,
)
from polydraft.catalogue import StackPart, WrittenStack, parse_stack
from polydraft.cli import main
from polydraft.cli.option_words import drafter_word
from polydraft.engine import draft_for, load_models
from polydraft.errors import CheckpointError, InvalidParameter, PolydraftError
from polydraft.fetched import is_derived, is_stack
from polydraft.models import Pair
from polydraft.options.value_checks import model_name
from polydraft.verifiers import NaiveMatch

A, B, C = (StackPart(name, None) for name in "ABC")


def stack(*levels: tuple[StackPart, ...]) -> WrittenStack:
    return WrittenStack(levels)


WRITTEN = {
    "A < B": stack((A,), (B,)),
    "A<B": stack((A,), (B,)),
    " A <\tB < C ": stack((A,), (B,), (C,)),
    "A@2 B@6": stack((StackPart("A", 2), StackPart("B", 6))),
    "A@4 < B@3": stack((StackPart("A", 4),), (StackPart("B", 3),)),
    "A < B@1 C@12": stack((A,), (StackPart("B", 1), StackPart("C", 12))),
    "(A < B)@2 C@6": stack((StackPart(stack((A,), (B,)), 2), StackPart("C", 6))),
    "self:keys=chunks:512/8 < pair-draft": stack(
        (StackPart("self:keys=chunks:512/8", None),), (StackPart("pair-draft", None),)
    ),
    "A < (B@1 C@2)": stack((A,), (StackPart(stack((StackPart("B", 1), StackPart("C", 2))), None),)),
}
REFUSED = {
    "A <": "a drafter is missing",
    "< A": "a drafter is missing",
    "A < < B": "a drafter is missing",
    "() < B": "a drafter is missing",
    "A B@2": "must each say how many tokens",
    "A < B C@2": "must each say how many tokens",
    "A@1 B@2 < C": "before each < one model or view",
    "(A < B) < C": "before each < one model or view",
    "A@0 B@2": "writes at least one token",
    "(A < B)@0 C@2": "writes at least one token",
    "A @2 < B": "a drafter is missing before @2",
    "(A < B": r"a \) is missing",
    "A < B)": r"a \) too many",
    "A@4": "one drafter alone",
}


@pytest.mark.parametrize("text", WRITTEN)
def test_a_stack_is_read_as_it_is_written(text: str) -> None:
    assert is_stack(text) and not is_derived(text) and model_name(text) == text
    assert parse_stack(text) == WRITTEN[text]


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_no_stack_is_refused(text: str) -> None:
    with pytest.raises(InvalidParameter, match=REFUSED[text]):
        parse_stack(text)


def test_names_are_no_stacks_and_a_folder_goes_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [
        "pair-draft",
        "self:int8",
        "self:int8,skip=3-5",
        "suffix:FOLDER",
        "org/model",
        "me@home/model",
        Path("a < b"),
    ]
    assert not any(map(is_stack, names))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a < b").mkdir()
    assert not is_stack("a < b") and is_stack("a < c")


# --- What the words mean ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair() -> Pair:
    return polydraft.load("pair", "pair-draft")


def test_words_name_what_python_builds(pair: Pair) -> None:
    model, text = pair.draft, TopDown(NaiveMatch(Given()))
    found: Any = draft_for("self:int8@4 < pair-draft < ngram@3", pair.target)
    assert isinstance(found, NestedDrafter) and found.length == 4 and isinstance(found.drafter, NestedDrafter)
    assert (found.verifier, found.policy, found.drafter.verifier) == (BlockVerification(), Chain(6), text)
    assert found.drafter.policy == Chain(3) and isinstance(found.drafter.drafter, NgramDrafter)
    assert type(found.drafter.middle.model) is type(model)
    found = draft_for("(pair-draft < ngram)@2 pair-draft@3 ngram@6", pair.target)
    assert isinstance(found, ByDepthDrafter) and found.lengths == (2, 3, 6)
    assert [type(one) for one in found.members] == [NestedDrafter, ModelDrafter, NgramDrafter]
    found = draft_for("self:int8 < pair-draft@2 ngram@4", pair.target)
    assert isinstance(found.drafter, ByDepthDrafter) and found.policy == Chain(6)


WORDS = [
    "pair-draft < ngram",
    "self:int8 < pair-draft < ngram",
    "self:int8@2 ngram@6",
    "(pair-draft < ngram)@2 ngram@4",
]


@pytest.mark.long(1)
@pytest.mark.parametrize("word", WORDS)
def test_greedy_texts_are_plain_ones(word: str, pair: Pair) -> None:
    ids = pair.tokenizer("def add(a, b):\n    return a + b\n\ndef sub(a, b):", return_tensors="pt").input_ids
    given: dict[str, Any] = {"temperature": 0, "max_new_tokens": 24}
    plain = polydraft.generate(pair.target, ids, drafter="none", **given).sequences
    found = polydraft.generate(pair.target, ids, drafter=word, **given)
    assert found.sequences.tolist() == plain.tolist() and found.statistics.block_efficiency > 2
    assert not found.statistics.fallback


def test_load_and_the_command_line_take_a_stack(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    word = "pair-draft@3 < ngram@2"
    found = polydraft.load("pair", word)
    assert isinstance(found.draft, NestedDrafter) and found.draft.length == 3
    ids = pair.tokenizer("def add", return_tensors="pt").input_ids
    expected = polydraft.generate(found.target, ids, drafter=found.draft, temperature=0, max_new_tokens=9)
    call = ["polydraft", "generate", "def add", "--target", "pair", "--draft", word, "--json", "--max-new-tokens", "9"]
    monkeypatch.setattr(sys, "argv", call)
    with pytest.raises(SystemExit) as exit_:
        main()
    told = json.loads(capsys.readouterr().out)
    assert not exit_.value.code and told["tokens"] == expected.sequences[0, ids.shape[1] :].tolist()
    assert told["statistics"]["accepted"] == expected.statistics.accepted > 0


UNFIT: dict[str, tuple[type[PolydraftError], str]] = {
    "pair-draft < pair-draft < pair-draft < ngram": (InvalidParameter, "at most 3 drafters"),
    "ngram < pair-draft": (InvalidParameter, "must be a model, or one view of the target"),
    "pair-head < ngram": (InvalidParameter, "must be a model, or one view of the target"),
    "pair-draft < self:exit=9": (InvalidParameter, "Exits lie behind 1 to 2 layers of this model, not behind 9"),
    "pair-draft@2 pair-head@2": (InvalidParameter, "reads the target's hidden states"),
    "pair-draft@2 route@2": (InvalidParameter, "drafts rows apart"),
    "pair-draft < route-first": (CheckpointError, "did you mean the drafter route-first"),
    "pair-draft < self:int7": (InvalidParameter, "self:int7"),
}


@pytest.mark.parametrize("word", UNFIT)
def test_parts_that_do_not_fit_are_refused_by_name(word: str, pair: Pair) -> None:
    kind, said = UNFIT[word]
    with pytest.raises(kind, match=said):
        draft_for(word, pair.target)


def test_the_option_for_drafters_says_where_a_stack_goes() -> None:
    with pytest.raises(InvalidParameter, match="write --draft 'pair-draft < ngram'"):
        drafter_word("pair-draft < ngram")


def test_a_stack_is_no_model() -> None:
    with pytest.raises(InvalidParameter, match="is a stack of drafters"):
        load_models("pair", WORDS[0])
    with pytest.raises(CheckpointError, match="no model folder"):
        polydraft.load(WORDS[0])
