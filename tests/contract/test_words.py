"""Words: what is shown is what is taken, and a slip is answered with what was meant before anybody else is asked."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from doubles import tiny_model

import polydraft
import polydraft.models.checkpoints.folders as places
from polydraft.catalogue import (
    drafter_line,
    meant_drafter,
    meant_rule,
    parse_policy,
    scheme_by_name,
    tables,
    tree_in_words,
    tree_text,
    verifier_by_name,
)
from polydraft.cli import main
from polydraft.cli.option_words import drafter_word, rule_word, scheme_word, verifier_word
from polydraft.drafters import LookupFirst, MergedDrafter, ModelDrafter, NgramDrafter, RoutedDrafter
from polydraft.errors import CheckpointError, InvalidParameter, PolydraftError, near
from polydraft.models import HuggingFaceModel
from polydraft.trees import BestFirst, Chain, Confident, Fixed, Widths
from polydraft.verifiers import BottomUp, Optimal

IDS = torch.tensor([[3, 1, 4, 1]])
HUB = (
    *(
        "gpt2",
        "gpt2-medium",
        "gpt2-large",
        "gpt2-xl",
        "distilgpt2",
        "openai-gpt",
        "ctrl",
        "t5-small",
        "t5-base",
        "t5-11b",
    ),
    *(
        "bert-base-uncased",
        "roberta-base",
        "albert-base-v2",
        "xlm-roberta-base",
        "xlnet-base-cased",
        "transfo-xl-wt103",
    ),
    *("camembert-base", "distilbert-base-cased", "xlm-mlm-en-2048", "facebook/opt-125m", "org/ngram", "org/smollm"),
)
"""Names of real models, those without an owner among them, and two that only look like words behind their owner."""
Asked = list[str]
Command = Callable[..., tuple[int, str]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """Return the names that the hub is asked for; it has none of them."""
    found: Asked = []

    def answer(url: str) -> Any:
        found.append(url)
        raise ConnectionError

    monkeypatch.setattr(places, "is_offline_mode", lambda: False)
    monkeypatch.setattr(places, "get_hf_file_metadata", answer)
    return found


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Return a function that runs a command and gives its exit code and what it said on standard error."""

    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["polydraft", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        return int(end.value.code or 0), capsys.readouterr().err

    return run


def generated(**choices: Any) -> Any:
    options: dict[str, Any] = {"attention_mask": torch.ones_like(IDS), "max_new_tokens": 4}
    return polydraft.generate(tiny_model("llama"), IDS, **options, **choices)


SLIPS = {
    "n-gram": "ngram",
    "N_Gram": "ngram",
    "NgramDrafter": "ngram",
    "ngrm:3": "ngram:3",
    "sufix": "suffix",
    "Suffix:/some/folder": "suffix:/some/folder",
    "rests": "rest:FOLDER",
    "recycle": "recycling",
    "lookahed:5,7,7": "lookahead:5,7,7",
    "lookupfirst": "lookup-first",
    "merge_beside": "merge-beside",
    "pair-drft": "pair-draft",
    "slef:int8": "self:int8",
}


@pytest.mark.parametrize("slip", SLIPS)
def test_a_slip_of_a_drafter_is_answered_before_the_hub_is_asked(slip: str, asked: Asked) -> None:
    with pytest.raises(PolydraftError, match=r"did you mean .*\?\)\.$") as caught:
        generated(drafter=slip)
    assert f"(did you mean {SLIPS[slip]}?)." in str(caught.value) and not asked


@pytest.mark.parametrize("name", HUB)
def test_a_name_of_the_hub_is_asked_for_there(name: str, asked: Asked) -> None:
    with pytest.raises(CheckpointError, match="no connection") as caught:
        generated(drafter=name)
    assert asked and "did you mean" not in str(caught.value)
    assert ("drafters without a draft model are ngram[:N], suffix" in str(caught.value)) == ("/" not in name)
    for role in ({"target": name}, {"target": "pair", "draft": name}):
        asked.clear()
        with pytest.raises(CheckpointError, match="no connection"):
            polydraft.load(**role)
        assert asked


def test_what_lies_on_this_machine_is_a_model_whatever_it_is_called(
    asked: Asked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny_model("llama", seed=1).save_pretrained("n-gram")
    assert generated(drafter="n-gram").statistics.drafted > 0 and not asked
    with pytest.raises(InvalidParameter, match="did you mean ngram"):
        generated(drafter="n_gram")
    monkeypatch.setattr(places, "try_to_load_from_cache", lambda name, file: f"/cache/{name}/{file}")
    assert places.is_known("n_gram"), "the hub's cache has it"


def test_a_slip_of_a_models_word_is_answered_before_the_hub_is_asked(asked: Asked) -> None:
    for role, meant in (
        ({"target": "smolm2"}, "smollm2"),
        ({"target": "Pair"}, "pair"),
        ({"target": "pair", "draft": "pair-haed"}, "pair-head"),
        ({"target": "pair", "draft": "self-int8"}, "self:int8"),
        ({"target": "pair", "draft": "self.skip=2"}, "self:skip=12-19"),
        ({"target": "pair", "draft": "ngram"}, "the drafter ngram"),
        ({"target": "pair", "draft": "n-gram"}, "the drafter ngram"),
    ):
        with pytest.raises(CheckpointError) as caught:
            polydraft.load(**role)
        assert f"(did you mean {meant}?" in str(caught.value) and str(caught.value).endswith(".")
    assert not asked


@pytest.mark.parametrize(
    ("slip", "word"),
    [
        *(("optimall", "optimal"), ("Naive", "naive"), ("NaiveMatch", "naive"), ("recursive_wo", "recursive-wo")),
        *(("blok", "block"), ("SpeculativeSampling", "speculative"), ("block-verification", "block"), ("AUTO", "auto")),
    ],
)
def test_a_slip_of_a_rule_is_answered_everywhere(slip: str, word: str, command: Command) -> None:
    for call in (
        lambda: generated(verifier=slip),
        lambda: verifier_by_name(slip, "ngram"),
        lambda: verifier_word(slip),
    ):
        with pytest.raises((InvalidParameter, typer.BadParameter), match=rf"{slip}.* \(did you mean {word}\?\)\.$"):
            call()
    assert command("bench", "--arm", f"verifier={slip}")[1].endswith(f"(did you mean {word}?).\n")


COMMANDS = {
    "drafter": (["generate", "x", "--drafter", "n-gram"], "'--drafter': 'n-gram' is not known (did you mean ngram?)"),
    "verifier": (
        ["generate", "x", "--verifier", "optiml"],
        "'--verifier': 'optiml' is not known (did you mean optimal?)",
    ),
    "dtype": (["generate", "x", "--dtype", "flaot16"], "no dtype 'flaot16' (did you mean float16?); use auto,"),
    "fetched": (["fetch", "smolm2"], "no 'smolm2' to fetch (did you mean smollm2?); there is smollm2"),
    "type": (["models", "lama"], "that transformers registers (did you mean llama?); a type is"),
    "head": (["train", "head", "eagel"], "not 'eagel' (did you mean eagle?)."),
    "loss": (["train", "head", "medusa", "--loss", "dpace"], "not 'dpace' (did you mean d-pace?)."),
    "term": (["train", "head", "dspark", "--term", "vanila"], "not 'vanila' (did you mean vanilla?)."),
    "added rule": (
        ["limits", "--verifier", "optiml"],
        "--verifier adds FILE.py:CLASS, not 'optiml' (did you mean optimal?)",
    ),
    "model": (["generate", "x", "--drafter", "self:int8"], "write --draft self:int8."),
    "scheme": (["generate", "x", "--verifier", "naive", "--scheme", "without-replacment"], "without-replacement?"),
    "tree": (["generate", "x", "--tree", "chian:4"], "did you mean one such as chain:5?"),
    "planner as tree": (["generate", "x", "--tree", "goodput"], "write --plan goodput."),
    "planner": (["generate", "x", "--plan", "goodputt"], "There is no plan goodputt (did you mean goodput?)."),
    "served planner": (["serve", "--plan", "goodputt"], "did you mean goodput?"),
    "chat": (["chat", "--drafter", "sufix"], "did you mean suffix?"),
    "arm": (["bench", "--arm", "hf-asisted tokens=5"], "did you mean hf-assisted?"),
    "key": (["bench", "--arm", "verifer=optimal"], "did you mean verifier=optimal?"),
    "key of an arm": (["bench", "--arm", "hf-assisted token=5"], "did you mean tokens=5?"),
    "arm's drafter": (["bench", "--arm", "drafter=n-gram tree=4"], "did you mean ngram?"),
    "arm's tree": (["bench", "--arm", "tree=eagel"], "did you mean one such as eagle?"),
    "arm's scheme": (["bench", "--arm", "verifier=naive scheme=topk"], "did you mean top-k?"),
    "proved rule": (["conformance", "--rule", "optimall"], "did you mean optimal?"),
    "measured rule": (["bench", "rules", "--verifier", "optimall"], "did you mean optimal?"),
    "draft": (["generate", "x", "--target", "pair", "--draft", "n-gram"], "did you mean the drafter ngram?"),
}


@pytest.mark.parametrize("what", COMMANDS)
def test_a_slip_on_the_command_line_is_answered_in_one_sentence(what: str, command: Command, asked: Asked) -> None:
    arguments, says = COMMANDS[what]
    code, err = command(*arguments)
    assert code == 2 and says in err and err.count("\n") == 1 and err.endswith(".\n") and not asked, err


def test_what_is_like_no_word_is_answered_with_all_words() -> None:
    assert not any(meant_drafter(name, sys.maxsize) for name in HUB if "/" not in name)
    assert meant_rule("magic") == near("", ("a", "b")) == near("x" * 10_000, ("x" * 10_000,)) == ""
    for call, says in (
        (lambda: verifier_by_name("magic", "ngram"), "no verifier 'magic'; choose from auto, naive,"),
        (lambda: drafter_line("magic"), "no drafter 'magic'; choose from model, ngram"),
        (lambda: scheme_by_name("magic"), "no scheme 'magic'; choose from iid, without-replacement"),
        (lambda: parse_policy("magic:3"), "A tree is written as children per depth"),
    ):
        with pytest.raises(InvalidParameter, match=says):
            call()


def test_names_of_rules_and_schemes_that_are_shown_are_taken() -> None:
    for line in tables.RULES:
        assert verifier_by_name(line.usual.name, "model") == verifier_by_name(line.word, "model")
        assert rule_word(line.usual.name) == verifier_word(line.usual.name) == line.word
    for line in tables.SCHEMES:
        assert scheme_by_name(line.scheme.name) == line.scheme and scheme_word(line.scheme.name) == line.word
    lifted = BottomUp(Optimal())
    assert lifted.name == "optimal, bottom up" and verifier_by_name(lifted.name, "model") == lifted


@pytest.mark.parametrize("text", [text for line in tables.POLICIES for text in line.examples])
def test_trees_show_the_text_that_is_taken(text: str) -> None:
    policy = parse_policy(text)
    shown = tree_text(policy)
    assert shown and parse_policy(shown) == policy and tree_in_words(policy).partition(" (")[0] == shown


def test_trees_that_no_text_means_show_what_they_are() -> None:
    assert tree_in_words(Chain(3)) == "chain:3 (3 drafts, 1 + 1 + 1 by depth)"
    assert tree_text(Widths((1, 1, 1))) == "1,1,1" and tree_text(Confident((1, 1), 0.3)) == "confident:2:0.3"
    assert tree_in_words(Fixed(Widths((2, 1)).shape)) == "4 drafts, 2 + 2 by depth"
    other = BestFirst(8, beam=3)
    assert tree_text(other) == "" and tree_in_words(other) == repr(other)


def test_drafters_show_the_words_that_are_taken() -> None:
    draft = ModelDrafter(HuggingFaceModel(tiny_model("llama")))
    for line in tables.DRAFTERS:
        if line.store == "must" or (line.models and line.wraps and line.word == "ouroboros"):
            continue
        made = line.of(draft) if line.models == 1 else None if line.models else line.make()
        if made is not None:
            shown = made.name.partition(" (")[0]
            assert shown == line.word and drafter_word(shown) == shown, made.name
    assert RoutedDrafter((NgramDrafter(),), draft).name == "route-first (ngram, else model)"
    assert MergedDrafter((NgramDrafter(),), draft).name == "merge-beside (ngram and model)"
    assert LookupFirst(draft).name == "lookup-first (model)"
    output = generated(drafter="ngram")
    assert {*output.statistics.sources} <= {"ngram", ""}
