"""The folder for the hub: `custom_generate` by its path, alone, beside weights, and inside a pipeline."""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    TextGenerationPipeline,
    TextIteratorStreamer,
    dynamic_module_utils,
    pipeline,
)
from transformers.generation.utils import GenerateDecoderOnlyOutput

import polydraft
from polydraft import GenerationOutput
from polydraft.errors import InvalidParameter
from polydraft.models.loading import SHIPPED

ROOT = Path(__file__).parents[2]
HUB = ROOT / "integrations" / "hub"
TARGET = SHIPPED["pair"]
PROMPT = "def read_json(path):\n"
NEW = 16


@pytest.fixture(autouse=True)
def copied_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let transformers copy the code that it runs into the test's own folder, not the user's cache."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(TARGET)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TARGET, pad_token="<|endoftext|>", padding_side="left")


def by_folder(model: PreTrainedModel, prompt: Any = None, **options: Any) -> Any:
    return model.generate(prompt, custom_generate=str(HUB), trust_remote_code=True, **options)


def test_the_text_is_the_models_own(model: PreTrainedModel, tokenizer: Any) -> None:
    given = tokenizer(PROMPT, return_tensors="pt")
    plain = model.generate(**given, max_new_tokens=NEW, do_sample=False)
    assert torch.equal(by_folder(model, **given, max_new_tokens=NEW, do_sample=False, drafter="ngram"), plain)
    config = GenerationConfig(max_new_tokens=NEW, do_sample=False)
    assert torch.equal(by_folder(model, given["input_ids"], generation_config=config, drafter="none"), plain)


def test_several_padded_rows(model: PreTrainedModel, tokenizer: Any) -> None:
    given = tokenizer([PROMPT, "import os\nimport "], return_tensors="pt", padding=True)
    plain = model.generate(**given, max_new_tokens=NEW, do_sample=False)
    assert torch.equal(by_folder(model, **given, max_new_tokens=NEW, do_sample=False), plain)


def test_an_output_is_hugging_faces_and_has_statistics(model: PreTrainedModel, tokenizer: Any) -> None:
    given = tokenizer(PROMPT, return_tensors="pt")
    options: dict[str, Any] = {"max_new_tokens": NEW, "temperature": 0.8, "top_k": 0, "seed": 3, "drafter": "ngram"}
    output = by_folder(model, **given, **options, return_dict_in_generate=True, output_scores=True)
    direct = polydraft.generate(model, given["input_ids"], **options)
    assert isinstance(output, GenerateDecoderOnlyOutput) and isinstance(direct, GenerationOutput)
    assert torch.equal(output.sequences, direct.sequences)
    assert output.statistics.target_calls == direct.statistics.target_calls  # type: ignore[attr-defined]
    assert output.scores is not None and len(output.scores) == NEW
    config = GenerationConfig(max_new_tokens=2, return_dict_in_generate=True)
    assert isinstance(by_folder(model, **given, generation_config=config), GenerateDecoderOnlyOutput)


def test_what_a_callable_is_not_handed_arrives(model: PreTrainedModel, tokenizer: Any) -> None:
    """A streamer, stop strings with their tokenizer, and a draft model."""
    given = tokenizer(PROMPT, return_tensors="pt")
    draft = AutoModelForCausalLM.from_pretrained(SHIPPED["pair-draft"])
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    found = by_folder(
        model, **given, streamer=streamer, max_new_tokens=40, do_sample=False, assistant_model=draft,
        stop_strings=["param"], tokenizer=tokenizer, return_dict_in_generate=True,
    )  # fmt: skip
    text = "".join(streamer)
    new = tokenizer.decode(found.sequences[0, given["input_ids"].shape[1] :])
    assert text == new and new.endswith("param") and found.finish == ("stop",)
    assert found.statistics.sources["model"][0] > 0


def test_what_is_not_honoured_is_refused(model: PreTrainedModel, tokenizer: Any) -> None:
    given = tokenizer(PROMPT, return_tensors="pt")
    with pytest.raises(InvalidParameter, match="num_beams=4 is refused"):
        by_folder(model, **given, num_beams=4)
    with pytest.raises(InvalidParameter, match="did you mean drafter"):
        by_folder(model, **given, draftr="ngram")


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """A folder of weights that has the way of generating with them."""
    shutil.copytree(TARGET, tmp_path / "whole")
    shutil.copytree(HUB / "custom_generate", tmp_path / "whole" / "custom_generate")
    return tmp_path / "whole"


def test_beside_weights_it_is_the_models_generate(whole: Path, model: PreTrainedModel, tokenizer: Any) -> None:
    given = tokenizer(PROMPT, return_tensors="pt")
    loaded = AutoModelForCausalLM.from_pretrained(whole, trust_remote_code=True)
    plain = model.generate(**given, max_new_tokens=NEW, do_sample=False)
    assert torch.equal(loaded.generate(given["input_ids"], max_new_tokens=NEW, do_sample=False), plain)
    output = loaded.generate(
        **given, max_new_tokens=NEW, do_sample=False, drafter="ngram", return_dict_in_generate=True
    )
    assert torch.equal(output.sequences, plain) and output.statistics.drafted > 0


WAYS: dict[str, Callable[[], dict[str, Any]]] = {
    "callable": lambda: {"custom_generate": polydraft.generate, "drafter": "ngram"},
    "folder": lambda: {"custom_generate": str(HUB), "trust_remote_code": True, "drafter": "ngram"},
}


@pytest.fixture(scope="module")
def writer(model: PreTrainedModel, tokenizer: Any) -> TextGenerationPipeline:
    made = pipeline("text-generation", model=model, tokenizer=tokenizer)
    assert isinstance(made, TextGenerationPipeline)
    return made


@pytest.mark.parametrize("way", WAYS)
def test_a_pipeline_writes_the_same(way: str, writer: TextGenerationPipeline) -> None:
    prompts, usual = [PROMPT, "class Point:\n", "import os\n"], {"max_new_tokens": NEW, "do_sample": False}
    plain = writer(prompts, batch_size=2, **usual)
    assert writer(prompts, batch_size=2, **usual, **WAYS[way]()) == plain
    sampled = {"max_new_tokens": NEW, "do_sample": True, "num_return_sequences": 3, "seed": 5}
    texts = writer(PROMPT, **sampled, **WAYS[way]())
    assert len({one["generated_text"] for one in texts}) == 3


def test_a_pipelines_stop_sequence_needs_the_folder(writer: TextGenerationPipeline) -> None:
    usual = {"max_new_tokens": 40, "do_sample": False, "stop_sequence": "("}
    plain = writer(PROMPT, **usual)
    assert writer(PROMPT, **usual, **WAYS["folder"]()) == plain
    with pytest.raises(ValueError, match="tokenizer"):
        writer(PROMPT, **usual, **WAYS["callable"]())


def test_without_the_package_a_sentence_says_so() -> None:
    """No name of an index is proposed, on which somebody else's package could lie under it."""
    code = f"""
import sys
sys.modules["polydraft"] = None
from transformers.dynamic_module_utils import get_imports
assert "polydraft" not in get_imports({str(HUB / "custom_generate" / "generate.py")!r})
sys.path.insert(0, {str(HUB / "custom_generate")!r})
import generate
generate.generate(model=None)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].startswith("ImportError: This way of generating needs polydraft")


def test_the_card_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Its program, with the folder in place of the name on the hub and a model that lies here."""
    card = (HUB / "README.md").read_text()
    (program,) = re.findall(r"^```python\n(.*?)^```$", card, flags=re.MULTILINE | re.DOTALL)
    for name, place in {"HuggingFaceTB/SmolLM2-135M-Instruct": TARGET, "your-name/polydraft": HUB}.items():
        assert f'"{name}"' in program
        program = program.replace(f'"{name}"', repr(str(place)))
    exec(compile(program, "the card", "exec"), {})
    said = capsys.readouterr().out
    assert re.search(r"\d+ tokens in \d+ passes of the model", said)
    assert card.startswith("---\n") and "library_name: transformers" in card and "custom_generate" in card
