"""Folders that are no models, damaged ones, and ones of an unsupported kind: one sentence, and not a word besides."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from doubles import tiny_model, tiny_tokenizer
from transformers import BertConfig, BertLMHeadModel

import polydraft
from polydraft.errors import CheckpointError, PolydraftError, UnsupportedModel

VOCAB = len(tiny_tokenizer())
WEIGHTS, INDEX, PICKLE = "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"
Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return kept("llama")(tmp_path_factory.mktemp("models") / "whole")


def kept(kind: str, **changes: object) -> Callable[[Path], Path]:
    """Return what saves a model of a kind in place of a folder."""

    def save(folder: Path) -> Path:
        shutil.rmtree(folder, ignore_errors=True)
        tiny_model(kind, VOCAB, dtype=torch.float32, **changes).save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
        return folder

    return save


def settings(**changes: object) -> Damage:
    def change(folder: Path) -> None:
        said = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**said, **changes}))

    return change


def written(file: str, content: str | bytes, without: str = "") -> Damage:
    """Return what writes a file, in place of another if one is named."""

    def write(folder: Path) -> None:
        if without:
            (folder / without).unlink()
        (folder / file).write_bytes(content.encode() if isinstance(content, str) else content)

    return write


def without(*files: str) -> Damage:
    return lambda folder: [(folder / file).unlink() for file in files]


def emptied(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()


def halved(folder: Path) -> None:
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[: len(content) // 2])


def pickled(folder: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, ("echo this must never be printed",)

    (folder / WEIGHTS).unlink()
    torch.save({"model.embed_tokens.weight": Trap()}, folder / PICKLE)


def linked_to_itself(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("config.json")


def only(name: str) -> Damage:
    def leave(folder: Path) -> None:
        emptied(folder)
        (folder / name).write_bytes(b"GGUF")

    return leave


def bidirectional(folder: Path) -> None:
    shutil.rmtree(folder)
    size = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    BertLMHeadModel(BertConfig(vocab_size=VOCAB, initializer_range=0.3, **size)).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


CODE = {"AutoConfig": "configuration_mine.Mine", "AutoModelForCausalLM": "modeling_mine.Mine"}
SHARDS = json.dumps({"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}})
DAMAGES: dict[str, tuple[Damage, str]] = {
    "empty": (emptied, "No model can be loaded from FOLDER: it holds no config.json."),
    "no config": (without("config.json"), "FOLDER: it holds no config.json."),
    "config that is no JSON": (written("config.json", "{not json"), "config.json in FOLDER is no JSON: "),
    "config of bytes": (written("config.json", b"\xff\xfe\x00"), "config.json in FOLDER is no JSON: "),
    "config that is a list": (written("config.json", "[1]"), "FOLDER is no JSON object, but a list."),
    "config that is null": (written("config.json", "null"), "FOLDER is no JSON object, but a NoneType."),
    "config without end": (written("config.json", "[" * 100_000), "config.json in FOLDER is no JSON: "),
    "config that cannot be read": (linked_to_itself, "config.json in FOLDER cannot be read: "),
    "layers below zero": (settings(num_hidden_layers=-1), "num_hidden_layers is -1; it must be at least 1."),
    "layers in words": (
        settings(num_hidden_layers="two"),
        "config.json in FOLDER is damaged: .* expected int, got str",
    ),
    "more layers": (settings(num_hidden_layers=3), "The model in FOLDER is damaged: model.layers.2.* is missing"),
    "no tokens": (settings(vocab_size=0), "config.json in FOLDER says that vocab_size is 0; it must be at least 1."),
    "far too many tokens": (settings(vocab_size=10**15), "FOLDER: there is not enough memory for its weights."),
    "no heads": (settings(num_attention_heads=0), "num_attention_heads is 0; it must be at least 1."),
    "heads that do not fit": (settings(num_attention_heads=3), "hidden size .16. is not a multiple .* heads .3."),
    "unknown dtype": (settings(dtype="float99"), "config.json in FOLDER is damaged: .* 'float99'"),
    "no kind": (
        settings(model_type=None),
        "config.json in FOLDER does not say what model it is: its model_type is None",
    ),
    "a kind in a list": (settings(model_type=["llama"]), r"its model_type is \['llama'\]"),
    "no weights": (without(WEIGHTS), "No model can be loaded from FOLDER: it holds no model.safetensors."),
    "half the weights": (halved, "FOLDER: model.safetensors is damaged .*incomplete metadata"),
    "weights of garbage": (written(WEIGHTS, b"\xff" * 64), "FOLDER: model.safetensors is damaged .*header too large"),
    "weights of nothing": (written(WEIGHTS, b""), "FOLDER: model.safetensors is damaged .*header too small"),
    "missing shards": (written(INDEX, SHARDS, WEIGHTS), "is not complete: .* names model-00001-of-00002.safetensors"),
    "index of garbage": (written(INDEX, "{", WEIGHTS), "model.safetensors.index.json in FOLDER is no JSON: "),
    "index of nothing": (written(INDEX, '{"weight_map": {}}', WEIGHTS), "in FOLDER names no files"),
    "a trap": (pickled, "its pytorch_model.bin .* more than numbers .*system.*; convert the weights to safetensors if"),
    "a pickle of garbage": (written(PICKLE, b"rubbish" * 20, WEIGHTS), "FOLDER: a file in it is damaged"),
    "no tokenizer": (without("tokenizer.json", "tokenizer_config.json"), "FOLDER: it holds no tokenizer.json."),
    "half a tokenizer": (without("tokenizer.json"), "FOLDER: .*tokenizer.json is missing or damaged."),
    "tokenizer of garbage": (written("tokenizer.json", "{"), "No tokenizer can be loaded from FOLDER: "),
    "tokenizer settings": (written("tokenizer_config.json", "[]"), "tokenizer_config.json in FOLDER is no JSON object"),
    "another format": (only("model.gguf"), "it holds no config.json but model.gguf, and only whole models in"),
    "an adapter": (
        only("adapter_config.json"),
        r"holds an adapter \(adapter_config.json\) and not a whole model alone; load it and its base with peft",
    ),
}
KINDS: dict[str, tuple[Damage, str]] = {
    "unknown": (settings(model_type="nonsense"), "is of the kind 'nonsense' .* transformers .* does not know."),
    "code of its own": (
        settings(model_type="mine", auto_map=CODE),
        "needs code of its own .*modeling_mine.Mine.* runs no",
    ),
    "a tokenizer with code": (
        written(
            "tokenizer_config.json", '{"auto_map": {"AutoTokenizer": ["mine.Mine", null]}, "tokenizer_class": "M"}'
        ),
        "The tokenizer in FOLDER needs code of its own .* polydraft runs no code from a model folder.",
    ),
    "without a cache": (kept("xlnet"), "^XLNetLMHeadModel takes no cache"),
    "bidirectional": (bidirectional, "BertLMHeadModel lets tokens see later ones"),
}


def check_refused(folder: Path, kind: type[PolydraftError], said: str, capfd: pytest.CaptureFixture[str]) -> None:
    capfd.readouterr()
    with pytest.raises(kind, match=said.replace("FOLDER", repr(str(folder)))) as caught:
        polydraft.load(folder)
    text = str(caught.value)
    assert "\n" not in text and text.endswith(".")
    assert not [word for word in ("trust_remote_code", "weights_only", "\x1b") if word in text]
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_folder(name: str, whole: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = shutil.copytree(whole, tmp_path / "model")
    damage, said = DAMAGES[name]
    damage(folder)
    check_refused(folder, CheckpointError, said, capfd)


@pytest.mark.parametrize("name", KINDS)
def test_a_model_of_another_kind(name: str, whole: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = shutil.copytree(whole, tmp_path / "model")
    change, said = KINDS[name]
    change(folder)
    check_refused(folder, UnsupportedModel, said, capfd)


def test_the_kind_is_told_before_the_damage(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = kept("mistral", sliding_window=0)(tmp_path / "model")
    written(WEIGHTS, b"garbage" * 10)(folder)
    check_refused(folder, UnsupportedModel, "has sliding_window=0, so its tokens see nothing", capfd)


def test_a_damaged_draft_model(whole: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = shutil.copytree(whole, tmp_path / "model")
    halved(folder)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        polydraft.load(whole, folder)
    assert capfd.readouterr() == ("", "")


def test_code_that_is_not_needed_is_not_run(whole: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(whole, tmp_path / "model")
    settings(auto_map=CODE)(folder)
    (folder / "modeling_mine.py").write_text("raise RuntimeError('this must never be run')")
    assert polydraft.load(folder).target.config.model_type == "llama"


def test_a_file_is_no_folder(whole: Path, capfd: pytest.CaptureFixture[str]) -> None:
    check_refused(whole / "config.json", CheckpointError, "FOLDER: it is a file; name the folder that", capfd)


@pytest.fixture
def nobody() -> Iterator[None]:
    """Give up root's right to read everything, for as long as a test takes."""
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("closed", ["", "config.json", WEIGHTS])
def test_what_may_not_be_read(closed: str, whole: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    folder = shutil.copytree(whole, tmp_path / "above" / "model")
    for place in (tmp_path, *tmp_path.parents):
        if not place.stat().st_mode & 0o001:  # pytest keeps its folders from others, which root becomes here
            place.chmod(0o755)
    shut = folder / closed if closed else folder.parent
    shut.chmod(0o000)
    request.getfixturevalue("nobody")
    with pytest.raises(CheckpointError, match=r"(?i)^[^\n]*permission denied[^\n]*\.$"):
        polydraft.load(folder)
