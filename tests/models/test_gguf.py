"""GGUF files: what is read is the model that was written, and what cannot be read is one sentence."""

import struct
import sys
from pathlib import Path

import gguf
import pytest
import torch
from gguf_files import write_gguf
from transformers import LlamaForCausalLM

import polydraft
from polydraft.errors import CheckpointError, MissingExtra, PolydraftError, UnsupportedModel
from polydraft.extras import GGUF
from polydraft.models.checkpoints.gguf import read_contents

Q8 = gguf.GGMLQuantizationType.Q8_0


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LlamaForCausalLM]:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return path, write_gguf(path)


def refusal(path: Path, kind: type[Exception]) -> str:
    with pytest.raises(kind) as caught:
        polydraft.load(path)
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")
    return str(caught.value)


def test_the_model_that_was_written_comes_back(written: tuple[Path, LlamaForCausalLM]) -> None:
    path, model = written
    pair = polydraft.load(str(path))
    for name, weight in model.state_dict().items():
        assert torch.equal(pair.target.state_dict()[name], weight), name
    text = "def add(a, b):\n"
    assert pair.tokenizer.decode(pair.tokenizer(text).input_ids) == text
    prompt = pair.tokenizer.apply_chat_template(
        [{"role": "user", "content": "add"}], add_generation_prompt=True, tokenize=False
    )
    assert prompt == "<|im_start|>user\nadd<|im_end|>\n<|im_start|>assistant\n"
    assert pair.target.generation_config.eos_token_id == pair.tokenizer.eos_token_id


def test_it_is_an_ordinary_model(written: tuple[Path, LlamaForCausalLM], tmp_path: Path) -> None:
    pair = polydraft.load(written[0])
    pair.target.save_pretrained(tmp_path)
    pair.tokenizer.save_pretrained(tmp_path)
    again = polydraft.load(tmp_path)
    ids = torch.tensor([[5, 7, 9]])
    outputs = [polydraft.generate(one.target, ids, max_new_tokens=12) for one in (pair, again)]
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)


def test_two_files_are_a_pair(written: tuple[Path, LlamaForCausalLM], tmp_path: Path) -> None:
    model = write_gguf(tmp_path / "draft.gguf", kind=Q8)
    pair = polydraft.load(written[0], tmp_path / "draft.gguf")
    assert pair.draft is not None
    theirs, ours = model.model.layers[0].mlp.up_proj.weight, pair.draft.model.layers[0].mlp.up_proj.weight
    assert 0 < (ours - theirs).abs().max() < theirs.abs().max() / 100
    ids = torch.tensor([[5, 7, 9]])
    plain = polydraft.generate(pair.target, ids, drafter="none", max_new_tokens=20)
    drafted = polydraft.generate(pair.target, ids, drafter=pair.draft, max_new_tokens=20)
    assert torch.equal(plain.sequences, drafted.sequences) and drafted.statistics.accepted > 0


def test_files_that_are_cut_anywhere_are_one_sentence(written: tuple[Path, LlamaForCausalLM], tmp_path: Path) -> None:
    content = written[0].read_bytes()
    start = read_contents(written[0]).start
    assert 0 < start < len(content)
    cut = tmp_path / "cut.gguf"
    for size in [*range(0, start, 331), start - 1, start, start + 1, (start + len(content)) // 2, len(content) - 33]:
        cut.write_bytes(content[:size])
        said = refusal(cut, CheckpointError)
        assert "cut short" in said or "no GGUF file" in said


def test_heads_with_any_byte_changed_end_in_one_sentence_or_load(
    written: tuple[Path, LlamaForCausalLM], tmp_path: Path
) -> None:
    content, changed = written[0].read_bytes(), tmp_path / "changed.gguf"
    for place in [*range(64), *range(64, read_contents(written[0]).start, 997)]:
        changed.write_bytes(content[:place] + bytes([content[place] ^ 0xFF]) + content[place + 1 :])
        try:
            read_contents(changed)
        except PolydraftError as error:
            assert "\n" not in str(error)


def test_other_files_are_one_sentence(written: tuple[Path, LlamaForCausalLM], tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(b"PK\x03\x04 and more")
    assert "it begins with b'PK" in refusal(other, CheckpointError)
    content = written[0].read_bytes()
    other.write_bytes(content[:4] + struct.pack("<I", 1) + content[8:])
    assert "version 1; versions 2 and 3" in refusal(other, CheckpointError)
    assert "There is no model folder" in refusal(tmp_path / "absent.gguf", CheckpointError)


def test_an_unknown_architecture_is_one_sentence(tmp_path: Path) -> None:
    write_gguf(tmp_path / "odd.gguf", architecture="retnet")
    assert "architecture 'retnet'" in refusal(tmp_path / "odd.gguf", UnsupportedModel)


def test_an_architecture_that_cannot_score_trees_is_one_sentence(tmp_path: Path) -> None:
    write_gguf(tmp_path / "odd.gguf", architecture="mamba")
    with pytest.raises(PolydraftError) as caught:
        polydraft.load(tmp_path / "odd.gguf")
    assert "\n" not in str(caught.value)


def test_an_unknown_quantisation_is_one_sentence(written: tuple[Path, LlamaForCausalLM], tmp_path: Path) -> None:
    content = written[0].read_bytes()
    name = b"blk.0.ffn_up.weight"
    place = content.index(name) + len(name) + 4 + 2 * 8
    assert struct.unpack_from("<I", content, place) == (0,)
    odd = tmp_path / "odd.gguf"
    for number, word in ((4, "number 4"), (999, "number 999")):
        odd.write_bytes(content[:place] + struct.pack("<I", number) + content[place + 4 :])
        said = refusal(odd, UnsupportedModel)
        assert "blk.0.ffn_up.weight in the quantisation" in said and word in said


def test_a_missing_tensor_is_one_sentence(written: tuple[Path, LlamaForCausalLM], tmp_path: Path) -> None:
    content = written[0].read_bytes()
    odd = tmp_path / "odd.gguf"
    odd.write_bytes(content.replace(b"blk.0.ffn_up.weight", b"blk.0.ffn_xx.weight"))
    with pytest.raises(PolydraftError) as caught:
        polydraft.load(odd)
    assert "\n" not in str(caught.value)


def test_layers_that_are_not_there_are_one_sentence(written: tuple[Path, LlamaForCausalLM], tmp_path: Path) -> None:
    content, odd = written[0].read_bytes(), tmp_path / "odd.gguf"
    place = content.index(b"llama.block_count") + len(b"llama.block_count") + 4
    assert struct.unpack_from("<I", content, place) == (2,)
    odd.write_bytes(content[:place] + struct.pack("<I", 100_000) + content[place + 4 :])
    assert "its head says 100000 layers, but it holds 2" in refusal(odd, CheckpointError)


def test_what_lies_beside_a_file_does_not_count(written: tuple[Path, LlamaForCausalLM], tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(written[0].read_bytes())
    (tmp_path / "tokenizer.json").write_text("{")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "Odd", "chat_template": "no"}')
    (tmp_path / "chat_template.jinja").write_text("no")
    (tmp_path / "config.json").write_text("{")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 7}')
    beside, alone = polydraft.load(path), polydraft.load(written[0])
    assert beside.tokenizer.get_vocab() == alone.tokenizer.get_vocab()
    assert beside.tokenizer.chat_template == alone.tokenizer.chat_template
    assert beside.target.generation_config.to_dict() == alone.target.generation_config.to_dict()
    assert beside.target.name_or_path == str(path) and beside.tokenizer.name_or_path == str(tmp_path)


def test_without_the_package_one_sentence_says_what_to_install(
    written: tuple[Path, LlamaForCausalLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [one for one in sys.modules if one == "gguf" or one.startswith("gguf.")]:
        monkeypatch.setitem(sys.modules, name, None)
    said = refusal(written[0], MissingExtra)
    assert "needs gguf, which is not installed: pip install" in said and said.endswith(f'"{GGUF.requirements[1]}".')
