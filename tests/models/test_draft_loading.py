"""Draft models for a target that is there already: loaded like it, and compared with it as far as can be told."""

from pathlib import Path
from typing import Any

import pytest
import torch
from doubles import tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel

import polydraft
from polydraft.errors import CheckpointError, UnsupportedModel, VocabularyMismatch
from polydraft.models import HuggingFaceModel, check_same_source, load_draft, loading
from polydraft.models.anatomy import WATCHING
from polydraft.models.checkpoints import placing

VOCAB = len(tiny_tokenizer())
PROMPT = torch.tensor([[3, 1, 4, 1, 5]])


def saved(folder: Path, *, swap: tuple[str, str] | None = None, tokenizer: bool = True, kind: str = "llama") -> Path:
    tiny_model(kind, VOCAB, dtype=torch.float32).save_pretrained(folder)
    if tokenizer:
        tiny_tokenizer(swap).save_pretrained(folder)
    return folder


def from_transformers(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)


def test_it_comes_onto_the_targets_device_in_its_precision(tmp_path: Path) -> None:
    target = from_transformers(saved(tmp_path / "a"))
    for name in (saved(tmp_path / "b"), str(tmp_path / "b")):
        draft = load_draft(name, target)
        assert (draft.dtype, draft.device, draft.training) == (torch.float64, target.device, False)
    assert polydraft.generate(target, PROMPT, drafter=draft, max_new_tokens=4).sequences.shape == (1, 9)


@pytest.mark.parametrize("short", [False, True])
def test_it_has_the_precision_that_it_would_have_beside_its_target(
    short: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft in bfloat16, as `align` writes it, would be slower in single precision than the same one of `load`."""
    monkeypatch.setattr(placing, "multiplies_short", lambda: short)
    saved(tmp_path / "target")
    tiny_model(vocab=VOCAB, dtype=torch.bfloat16).save_pretrained(saved(tmp_path / "draft"))
    pair = polydraft.load(tmp_path / "target", tmp_path / "draft")
    alone = load_draft(tmp_path / "draft", pair.target)
    assert pair.draft is not None and pair.target.dtype == torch.float32
    assert alone.dtype == pair.draft.dtype == (torch.bfloat16 if short else torch.float32)


def test_what_cannot_be_loaded(tmp_path: Path) -> None:
    target = from_transformers(saved(tmp_path / "a"))
    with pytest.raises(CheckpointError, match="There is no model folder"):
        load_draft(tmp_path / "nowhere", target)
    with pytest.raises(UnsupportedModel, match="MambaForCausalLM goes on from its states otherwise"):
        load_draft(saved(tmp_path / "b", kind="mamba"), target)


@pytest.mark.parametrize("way", ["load_draft", "generate", "generate_many"])
def test_other_tokens_are_refused(tmp_path: Path, way: str) -> None:
    target, folder = from_transformers(saved(tmp_path / "a")), saved(tmp_path / "b", swap=("A", "B"))
    with pytest.raises(
        VocabularyMismatch, match="have different tokenizers: id 33 is 'A' in the one and 'B' in the other"
    ):
        if way == "load_draft":
            load_draft(folder, target)
        elif way == "generate":
            polydraft.generate(target, PROMPT, drafter=from_transformers(folder), max_new_tokens=4)
        else:
            polydraft.generate_many(target, [PROMPT[0]], drafter=from_transformers(folder), max_new_tokens=4)


def test_what_cannot_be_told_is_let_through(tmp_path: Path) -> None:
    known, unknown = from_transformers(saved(tmp_path / "a")), from_transformers(saved(tmp_path / "b", tokenizer=False))
    made = tiny_model("llama", VOCAB)
    gone = from_transformers(saved(tmp_path / "c", swap=("A", "B")))
    (tmp_path / "c").rename(tmp_path / "d")
    for target in (known, unknown, made):
        for draft in (unknown, made, gone):
            check_same_source(target, draft)
            polydraft.generate(target, PROMPT, drafter=draft, max_new_tokens=2)


def test_a_hub_name_is_looked_up_in_the_cache_only(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = tiny_model(), tiny_model(seed=1)
    target.name_or_path, draft.name_or_path = "some/model", "some/draft"
    asked: list[bool] = []

    def record(name: str, **options: bool) -> None:
        asked.append(options["local_files_only"])
        raise OSError("not there")

    monkeypatch.setattr(loading.AutoTokenizer, "from_pretrained", record)
    check_same_source(target, draft)
    assert asked == [True, True]
    check_same_source(target, draft)
    assert len(asked) == 2, "once for a pair of models"


def test_a_pair_that_was_loaded_together_is_not_compared_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = polydraft.load(saved(tmp_path / "a"), saved(tmp_path / "b"))
    monkeypatch.setattr(loading, "tokenizer_of", lambda model: pytest.fail("compared again"))
    check_same_source(pair.target, pair.draft)


def test_loading_tries_models_already(tmp_path: Path) -> None:
    pair = polydraft.load(saved(tmp_path / "a"))
    passes: list[int] = []

    def count(*_: Any) -> None:
        passes.append(1)

    setattr(count, WATCHING, True)  # else the model would be tried anew
    pair.target.register_forward_hook(count)
    HuggingFaceModel(pair.target)
    assert not passes
