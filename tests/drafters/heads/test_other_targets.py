"""Heads for another target: what their folders say of it is compared with it before anything is generated."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles import tiny_model
from heads import VOCAB, block_drafter, medusa_drafter
from test_block_folders import FLAT, SIZES, folder_of, named
from test_eagle_folders import FOLDERS, put
from transformers import PreTrainedModel

import polydraft
from polydraft.cli import main
from polydraft.drafters import load_head, write_block, write_medusa
from polydraft.drafters.heads.drafter import MadeFor
from polydraft.errors import CheckpointError, TargetMismatch
from polydraft.models import Facts, HuggingFaceModel

PROMPT = torch.tensor([[1, 2, 3]])
PAIR = Path(polydraft.__file__).parent / "data" / "pair"
LAYERS = 4


def target(vocab: int = VOCAB, **changes: Any) -> PreTrainedModel:
    return tiny_model(vocab=vocab, **{"num_hidden_layers": LAYERS, **changes})


def block(folder: Path) -> Path:
    """Write a block head without a table of the vocabulary, so that its configuration alone tells."""
    write_block(block_drafter(), folder, HuggingFaceModel(target()))
    return folder


def medusa(folder: Path, *, vllm: bool) -> Path:
    write_medusa(medusa_drafter(), folder, HuggingFaceModel(target()), vllm=vllm)
    return folder


def eagle(name: str) -> Callable[[Path], Path]:
    return lambda folder: put(folder, *FOLDERS[name])


KINDS: dict[str, Callable[[Path], Path]] = {
    "block": block,
    "eagle": eagle("eagle"),
    "vllm's eagle": eagle("vllm"),
    "eagle 3": eagle("specforge"),
    "speculators": eagle("speculators"),
    "medusa a": lambda folder: medusa(folder, vllm=False),
    "medusa c": lambda folder: medusa(folder, vllm=True),
}


@pytest.mark.long(2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_head_for_another_vocabulary_is_refused(kind: str, tmp_path: Path) -> None:
    folder = KINDS[kind](tmp_path / "head")
    drafted = polydraft.generate(target(), PROMPT, drafter=str(folder), max_new_tokens=6)
    assert drafted.statistics.drafted > 0 and not drafted.statistics.fallback
    for vocab in (VOCAB - 4, VOCAB + 6):
        said = f"trained for a target of 24 tokens and this one has {vocab}: it is another target"
        for given in (str(folder), load_head(folder, LAYERS)):
            with pytest.raises(TargetMismatch, match=said):
                polydraft.generate(target(vocab), PROMPT, drafter=given, max_new_tokens=2)


@pytest.mark.parametrize("name", ["eagle", "specforge"])
def test_where_the_configuration_says_nothing_the_tables_do(name: str, tmp_path: Path) -> None:
    config, tensors = FOLDERS[name]
    folder = put(tmp_path / "head", {key: value for key, value in config.items() if key != "vocab_size"}, tensors)
    assert load_head(folder, LAYERS).made_for == MadeFor(VOCAB)
    with pytest.raises(TargetMismatch, match="a target of 24 tokens and this one has 20"):
        polydraft.generate(target(20), PROMPT, drafter=str(folder), max_new_tokens=2)


def test_a_head_for_another_depth_is_refused(tmp_path: Path) -> None:
    _, tensors = named("markov")
    flat = folder_of(tmp_path / "block", {**SIZES, **FLAT, "num_target_layers": 30}, tensors)
    third = put(tmp_path / "eagle", {**FOLDERS["specforge"][0], "num_target_layers": 30}, FOLDERS["specforge"][1])
    for folder in (flat, third):
        for given in (str(folder), load_head(folder)):
            with pytest.raises(TargetMismatch, match="a target of 30 layers and this one has 4: it is another target"):
                polydraft.generate(target(), PROMPT, drafter=given, max_new_tokens=2)


@pytest.mark.parametrize("name", ["num_target_layers", "vocab_size"])
@pytest.mark.parametrize("kind", ["block", "eagle 3"])
def test_numbers_that_are_none_are_named(kind: str, name: str, tmp_path: Path) -> None:
    folder = KINDS[kind](tmp_path / "head")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, name: "many"}))
    with pytest.raises(CheckpointError, match=f"says that {name} is 'many'; it must be a number"):
        load_head(folder, LAYERS)


class Sized(HuggingFaceModel):
    """A target of any number of tokens, of which nothing else is looked at."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    @property
    def facts(self) -> Facts:
        """The number of tokens."""
        return Facts(self.vocab_size, 64, torch.device("cpu"))


@pytest.mark.parametrize(
    ("told", "found"),
    [(151_936, 152_064), (152_064, 151_936), (32_000, 32_064), (32_000, 32_001), (128_256, 128_258), (None, 5)],
)
def test_padding_and_added_tokens_are_let_through(told: int | None, found: int) -> None:
    MadeFor(told).check(Sized(found))


@pytest.mark.parametrize(
    ("told", "found"), [(8192, 5000), (8192, 9000), (49_152, 50_257), (151_936, 129_280), (32_000, 32_768)]
)
def test_another_vocabulary_is_not_taken_for_padding(told: int, found: int) -> None:
    with pytest.raises(TargetMismatch, match=f"a target of {told} tokens and this one has {found}"):
        MadeFor(told).check(Sized(found))


def test_a_target_that_does_not_tell_its_depth_is_not_asked_for_it() -> None:
    MadeFor(layers=30).check(Sized(7))


@pytest.mark.long(1)
@pytest.mark.parametrize(
    ("changes", "said"),
    [({"num_hidden_layers": 12}, "14 layers and this one has 12"), ({}, "8192 tokens and this one has 9000")],
)
def test_the_shipped_head_is_refused_by_load_and_by_the_command(
    changes: dict[str, Any],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    vocab = 8192 if changes else 9000
    other = target(vocab, dtype=torch.float32, hidden_size=256, **{"num_hidden_layers": 14, **changes})
    other.save_pretrained(tmp_path)
    for file in PAIR.glob("target/tokenizer*"):
        shutil.copy(file, tmp_path)
    with pytest.raises(TargetMismatch, match=said):
        polydraft.load(tmp_path, PAIR / "head")
    capsys.readouterr()
    named_both = ["--target", str(tmp_path), "--draft", str(PAIR / "head")]
    monkeypatch.setattr(sys, "argv", ["polydraft", "generate", "def add", *named_both, "--max-new-tokens", "2"])
    with pytest.raises(SystemExit) as ended:
        main()
    captured = capsys.readouterr()
    assert ended.value.code == 2 and captured.out == ""
    assert captured.err == f"polydraft: The head was trained for a target of {said}: it is another target.\n"
