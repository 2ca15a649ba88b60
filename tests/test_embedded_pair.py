"""The model pair that ships with the package: loads plainly, is as good as its card says, and keeps the promises."""

import re
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import polydraft
from polydraft.cli.benchmark.demo import demo_prompts
from polydraft.training import measure_quality

FOLDER = Path(str(files("polydraft") / "data" / "pair"))
MOST_BYTES = 45_000_000


@pytest.fixture(scope="module")
def pair() -> polydraft.Pair:
    return polydraft.load_pair(dtype="float64")


def encoded(pair: polydraft.Pair, text: str) -> torch.Tensor:
    return torch.tensor([pair.tokenizer(text)["input_ids"]])


def test_it_is_small_and_loads_with_plain_transformers() -> None:
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) <= MOST_BYTES
    for name, least, most in (("target", 8e6, 18e6), ("draft", 0.5e6, 1.5e6)):
        model = AutoModelForCausalLM.from_pretrained(str(FOLDER / name))
        assert least <= model.num_parameters() <= most
        assert model.dtype == torch.float32, "stored in half of that"
        text = "def f(x):\n    return x  # \u70b9\n"
        tokenizer = AutoTokenizer.from_pretrained(str(FOLDER / name))
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def claimed(name: str, words: str) -> float:
    line = next(line for line in (FOLDER / name / "README.md").read_text().splitlines() if words in line)
    return float(re.findall(r"[0-9.]+", line.split("|")[2])[0])


def test_the_card_claims_what_is_asked_of_the_pair() -> None:
    assert claimed("target", "bits per byte") <= 1.7
    assert claimed("target", "mean overlap") >= 0.55
    assert claimed("draft", "mean overlap") == claimed("target", "mean overlap")


@pytest.mark.slow
def test_on_text_that_it_never_saw_it_is_about_as_good_as_its_card_says() -> None:
    """Our own source is in no corpus; it is not like the held-out files either, so the margins are wide."""
    loaded = polydraft.load_pair()
    assert loaded.draft is not None
    texts = [path.read_text() for path in sorted(Path(polydraft.__file__).parent.rglob("*.py"))]
    quality = measure_quality(loaded.target, loaded.draft, loaded.tokenizer, texts, window=256, most_windows=24)
    assert quality.target_bits_per_byte < claimed("target", "bits per byte") + 0.9
    assert quality.draft_bits_per_byte > quality.target_bits_per_byte
    assert quality.overlap > claimed("target", "mean overlap") - 0.15


@pytest.mark.long(1)
@pytest.mark.parametrize("number", [0, 2])
def test_greedy_text_is_that_of_hugging_face(pair: polydraft.Pair, number: int) -> None:
    prompt = encoded(pair, demo_prompts()[number])
    expected = pair.target.generate(prompt, do_sample=False, max_new_tokens=40)
    for drafter in (pair.draft, None):
        output = polydraft.generate(pair.target, prompt, drafter=drafter, temperature=0, max_new_tokens=40)
        assert isinstance(output, polydraft.GenerationOutput)
        assert torch.equal(output.sequences, expected)


def test_drafts_are_taken(pair: polydraft.Pair) -> None:
    for temperature, least in ((0.0, 1.5), (0.8, 1.3)):
        new = calls = 0
        for text in demo_prompts()[:4]:
            options = {"temperature": temperature, "seed": 1, "max_new_tokens": 32}
            output = polydraft.generate(pair.target, encoded(pair, text), drafter=pair.draft, **options)
            assert isinstance(output, polydraft.GenerationOutput)
            new += output.statistics.new_tokens
            calls += output.statistics.target_calls
        assert new / calls > least
