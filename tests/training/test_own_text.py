"""Text that the target writes for its draft to learn from."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import chi2
from transformers import LlamaForCausalLM

from polydraft.models import HuggingFaceModel
from polydraft.training import OwnText, PairRecipe, PairShape, write_own_text
from polydraft.training.pair import build_model
from polydraft.training.token_files import TOKEN, Alternating, Windows, continued

AMOUNT = OwnText(batches=3, rows=4, given=5, written=7, seed=2)
SIZE = AMOUNT.rows * (AMOUNT.given + AMOUNT.written)


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    torch.manual_seed(0)
    recipe = PairRecipe(vocab_size=24, context=32)
    model = build_model(PairShape(layers=2, width=32, inner=32, heads=2), recipe, 0).eval()
    torch.nn.init.normal_(model.get_input_embeddings().weight, std=0.3)
    return model


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.u32"
    np.arange(200, dtype=TOKEN).__mod__(24).tofile(path)
    return path


def test_texts_begin_with_the_corpus_and_go_on(target: LlamaForCausalLM, corpus: Path, tmp_path: Path):
    write_own_text(target, corpus, tmp_path / "own.u32", AMOUNT)
    texts = np.fromfile(tmp_path / "own.u32", dtype=TOKEN).reshape(-1, AMOUNT.given + AMOUNT.written)
    assert len(texts) == AMOUNT.batches * AMOUNT.rows
    given = texts[:, : AMOUNT.given].astype(np.int64)
    assert ((np.diff(given, axis=1) % 24) == 1).all()  # a window of the corpus counts up
    written = texts[:, AMOUNT.given - 1 :].astype(np.int64)
    assert not ((np.diff(written, axis=1) % 24) == 1).all()
    assert len(np.unique(texts, axis=0)) > 2 * AMOUNT.rows, "batches have random numbers of their own"


@pytest.mark.parametrize("left", [SIZE, SIZE + 3])
def test_an_interrupted_run_writes_what_one_run_writes(
    left: int, target: LlamaForCausalLM, corpus: Path, tmp_path: Path
):
    whole, resumed = tmp_path / "whole.u32", tmp_path / "resumed.u32"
    write_own_text(target, corpus, whole, AMOUNT)
    resumed.write_bytes(whole.read_bytes()[: 4 * left])
    write_own_text(target, corpus, resumed, AMOUNT)
    assert resumed.read_bytes() == whole.read_bytes()
    write_own_text(target, corpus, resumed, replace(AMOUNT, batches=1))
    assert resumed.read_bytes() == whole.read_bytes(), "a finished file is left alone"


def test_two_tokens_follow_the_targets_law(target: LlamaForCausalLM):
    """By chi-square over the tokens and pairs that are expected at least ten times; false-alarm rate 1e-6."""
    many = 20_000
    beginning = torch.tensor([3, 4, 5])
    found = continued(HuggingFaceModel(target), beginning.expand(many, -1), 2, torch.Generator().manual_seed(1))
    with torch.no_grad():
        first = target(beginning[None]).logits[0, -1].double().softmax(-1)
        after = torch.stack([torch.cat([beginning, torch.tensor([token])]) for token in range(24)])
        second = target(after).logits[:, -1].double().softmax(-1)
    expected = many * first[:, None] * second
    counts = torch.bincount(found[:, 3] * 24 + found[:, 4], minlength=24 * 24).view(24, 24).double()
    often = expected >= 10
    cells = torch.cat([expected[often], expected[~often].sum()[None]])
    seen = torch.cat([counts[often], counts[~often].sum()[None]])
    statistic = float(((seen - cells) ** 2 / cells).sum())
    assert chi2.sf(statistic, len(cells) - 1) > 1e-6
    uniform = torch.full_like(cells, many / len(cells))
    assert chi2.sf(float(((seen - uniform) ** 2 / uniform).sum()), len(cells) - 1) < 1e-6, "the test has power"


def test_windows_alternate_until_the_longer_file_is_through(tmp_path: Path):
    for name, values in (("short", range(8)), ("long", range(100, 124))):
        np.array(values, dtype=TOKEN).tofile(tmp_path / name)
    text = Alternating(Windows(tmp_path / "short", 4), Windows(tmp_path / "long", 4))
    firsts = [int(text[index]["input_ids"][0]) for index in range(len(text))]
    assert firsts == [0, 100, 4, 104, 0, 108, 4, 112, 0, 116, 4, 120]
