import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import polydraft
from polydraft.training import OwnText, PairRecipe, PairShape, Stage, export_pair, measure_quality, train_pair
from polydraft.training.corpus import SourceFile
from polydraft.training.pair import build_model
from polydraft.training.token_files import train_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # the Trainer's notes on absent accelerators

TEXT = "\n".join(f"def function_{i}(value):\n    return value + {i}\n" for i in range(60))
STAGE = Stage(4, 2, 32, matrix_rate=1e-2, other_rate=1e-2, warmup_steps=1, decay_steps=2)
RECIPE = PairRecipe(
    vocab_size=300,
    context=64,
    compiled=False,
    save_every=2,
    target_shape=PairShape(layers=2, width=32, inner=32, heads=1),
    draft_shape=PairShape(layers=1, width=16, inner=16, heads=1),
    target=STAGE,
    extend=STAGE,
    draft=STAGE,
    distil=STAGE,
    refine=STAGE,
    polish=STAGE,
    own_text=OwnText(batches=2, rows=3, given=8, written=24, seed=0),
    follow=STAGE,
)

LATER = ("distil", "refine", "polish", "follow", "own.u32")


def files() -> tuple[list[SourceFile], list[SourceFile]]:
    return [SourceFile("p", "MIT", "a.py", TEXT)], [SourceFile("p", "MIT", "b.py", TEXT[:900])]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return LlamaForCausalLM.from_pretrained(str(folder)).state_dict()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    work = tmp_path_factory.mktemp("work")
    return (work, *train_pair(work, RECIPE, files))


@pytest.mark.slow
def test_a_finished_run_is_not_repeated(trained: tuple[Path, Path, Path]) -> None:
    work, target, draft = trained
    before = target.joinpath("model.safetensors").stat().st_mtime_ns
    assert train_pair(work, RECIPE, files) == (target, draft)
    assert target.joinpath("model.safetensors").stat().st_mtime_ns == before


@pytest.mark.slow
def test_an_interrupted_stage_goes_on_from_its_checkpoint_to_the_same_weights(
    trained: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    work, _, draft = trained
    expected = weights(draft)
    copy = tmp_path / "work"
    copy.mkdir()
    for item in work.iterdir():
        (copy / item.name).symlink_to(item) if item.name not in LATER else None
    checkpoint = copy / "distil" / "checkpoint-2"
    checkpoint.mkdir(parents=True)
    for item in (work / "distil" / "checkpoint-2").iterdir():
        (checkpoint / item.name).write_bytes(item.read_bytes())
    _, resumed = train_pair(copy, RECIPE, files)
    assert json.loads((copy / "distil" / "checkpoint-4" / "trainer_state.json").read_text())["global_step"] == 4
    for name, value in weights(resumed).items():
        torch.testing.assert_close(value, expected[name])


@pytest.mark.slow
def test_the_exported_pair_loads_plainly_and_generates(trained: tuple[Path, Path, Path], tmp_path: Path) -> None:
    work, target, draft = trained
    quality = export_pair(work, target, draft, tmp_path, RECIPE)
    plain = AutoModelForCausalLM.from_pretrained(str(tmp_path / "target"))
    assert plain.dtype == torch.float32  # as the configuration says, so that texts are the same on every processor
    assert {one.dtype for one in load_file(tmp_path / "target" / "model.safetensors").values()} == {torch.bfloat16}
    card = (tmp_path / "draft" / "README.md").read_text()
    assert f"{quality.overlap:.3f}" in card and f"{quality.draft_bits_per_byte:.3f}" in card
    pair = polydraft.load(tmp_path / "target", tmp_path / "draft")
    ids = torch.tensor(pair.tokenizer("def function_1(")["input_ids"]).unsqueeze(0)
    output = polydraft.generate(pair.target, ids, drafter=pair.draft, max_new_tokens=5, temperature=0)
    assert isinstance(output, polydraft.GenerationOutput)
    assert output.sequences.shape == (1, ids.shape[1] + 5)


def test_measures_of_a_uniform_target_are_those_on_paper() -> None:
    tokenizer = train_tokenizer([TEXT], vocab_size=300, context=64)
    uniform = build_model(RECIPE.target_shape, RECIPE, 0)
    torch.nn.init.zeros_(uniform.get_input_embeddings().weight)
    text = TEXT[:200]
    quality = measure_quality(uniform, uniform, tokenizer, [text], window=1024)
    tokens = len(tokenizer(text)["input_ids"])
    assert quality.tokens == tokens and quality.text_bytes == len(text.encode())
    assert quality.target_bits_per_byte == pytest.approx(tokens * math.log2(300) / 200, rel=1e-6)
    assert quality.overlap == pytest.approx(1, abs=1e-6) and quality.same_top == 1
