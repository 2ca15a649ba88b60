"""What a model folder must hold, looked at before anything is loaded: each lack is one sentence that names the file."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import transformers
from safetensors import SafetensorError, safe_open
from transformers import CONFIG_MAPPING
from transformers.utils.hub import cached_file

from polydraft.errors import CheckpointError, UnsupportedModel
from polydraft.models.checkpoints.model_places import Source
from polydraft.models.checkpoints.silence import reason

CONFIG = "config.json"
SAFE, SAFE_INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED, PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
WORDS = ("tokenizer.json", "vocab.json", "vocab.txt", "tekken.json", "*.model", "*.tiktoken", "tokenizer_config.json")
ADAPTER = "adapter_config.json"
FOREIGN = ("*.gguf", "*.onnx", "*.h5", "*.msgpack", "*.pt", "*.pth")
"""What folders hold that are models of other programs, or parts of a model."""


def read_config(source: Source) -> dict[str, Any]:
    """Return a model's configuration as it is written, having checked what can be checked of it.

    Raises:
        CheckpointError: there is none, it cannot be read, or it says what cannot be; or the folder is an adapter's.
        UnsupportedModel: it asks for code of its own, or is of a kind that transformers does not know.
    """
    _check_no_adapter(source)
    said = read_json(config_file(source), source)
    kind = said.get("model_type")
    if not isinstance(kind, str):
        raise CheckpointError(f"{CONFIG} in {source.name} does not say what model it is: its model_type is {kind!r}.")
    if kind not in CONFIG_MAPPING:
        _check_no_code(said, source)
        raise UnsupportedModel(
            f"The model in {source.name} is of the kind {kind!r} (model_type in its {CONFIG}), which transformers "
            f"{transformers.__version__} does not know."
        )
    synonyms = CONFIG_MAPPING[kind].attribute_map
    text = said.get("text_config")
    for part in (said, text if isinstance(text, dict) else {}):
        for name in SIZES:
            _check_size(part, (name, synonyms.get(name, name)), source)
    return said


def check_weights(source: Source) -> None:
    """Check that a folder's weights are there and whole, by their headers; those on the hub are checked as they load.

    Raises:
        CheckpointError: a file is missing, or is no such file.
    """
    folder = Path(source.path)
    if not source.is_local or "transformers_weights" in read_json(folder / CONFIG, source):
        return
    if (folder / SAFE).exists():
        _check_header(folder / SAFE, source)
    elif (folder / SAFE_INDEX).exists():
        for shard in shards(folder / SAFE_INDEX, source):
            _check_header(shard, source)
    elif (folder / PICKLED_INDEX).exists() and not (folder / PICKLED).exists():
        shards(folder / PICKLED_INDEX, source)
    elif not (folder / PICKLED).exists():
        raise CheckpointError(f"No model can be loaded from {source.name}: it holds no {SAFE}{_instead(folder)}.")


def check_tokenizer_files(source: Source) -> None:
    """Check that a folder has a tokenizer.

    Raises:
        CheckpointError: there is none, or its settings cannot be read.
    """
    folder = Path(source.path)
    if not source.is_local:
        return
    if not any(True for pattern in WORDS for _ in folder.glob(pattern)):
        raise CheckpointError(f"No tokenizer can be loaded from {source.name}: it holds no tokenizer.json.")
    settings = folder / "tokenizer_config.json"
    if settings.exists():
        read_json(settings, source)


def config_file(source: Source) -> Path:
    """Return the file of a model's configuration, brought from the hub if it is there.

    Raises:
        CheckpointError: there is none.
    """
    if source.is_local:
        return Path(source.path) / CONFIG
    try:
        found = cached_file(source.path, CONFIG, local_files_only=source.offline)
    except Exception as error:
        raise CheckpointError(f"No model can be loaded from {source.name}: {reason(error)}.") from error
    if found is None:
        raise CheckpointError(f"No model can be loaded from {source.name}: it holds no {CONFIG}.")
    return Path(found)


def read_json(path: Path, source: Source) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        CheckpointError: there is no such file, or something else in it.
    """
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"No model can be loaded from {source.name}: it holds no {path.name}{_instead(path.parent)}."
        ) from error
    except OSError as error:
        raise CheckpointError(f"{path.name} in {source.name} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path.name} in {source.name} is no JSON: {reason(error)}.") from error
    if not isinstance(said, dict):
        raise CheckpointError(f"{path.name} in {source.name} is no JSON object, but a {type(said).__name__}.")
    return said


def _check_no_adapter(source: Source) -> None:
    """Check that a folder is not that of an adapter, which transformers applies or not, as peft is installed or not.

    Raises:
        CheckpointError: it is; the text says what to do.
    """
    if source.is_local and (Path(source.path) / ADAPTER).exists():
        raise CheckpointError(
            f"{source.name} holds an adapter ({ADAPTER}) and not a whole model alone; load it and its base with "
            "peft.AutoPeftModelForCausalLM and pass that model, or save what its merge_and_unload() returns in a folder"
            " of its own."
        )


def _check_no_code(said: dict[str, Any], source: Source) -> None:
    """Check that a model of a kind that transformers does not know names no code that would have to be run.

    Raises:
        UnsupportedModel: it does.
    """
    wanted = said.get("auto_map")
    if wanted:
        named = wanted.get("AutoModelForCausalLM", wanted) if isinstance(wanted, dict) else wanted
        raise UnsupportedModel(
            f"The model in {source.name} needs code of its own (auto_map in its {CONFIG}: {named}), and polydraft runs "
            "no code from a model folder; take a model that transformers knows."
        )


def _instead(folder: Path) -> str:
    """Return what a folder holds in place of a model, if that is known."""
    others = sorted(path.name for pattern in FOREIGN for path in folder.glob(pattern))
    return f" but {others[0]}, and only whole models in transformers' own format can be used" if others else ""


def _check_size(said: dict[str, Any], names: Iterable[str], source: Source) -> None:
    for name in names:
        value = said.get(name, 1)
        if isinstance(value, bool) or (isinstance(value, int | float) and value < 1):
            raise CheckpointError(f"{CONFIG} in {source.name} says that {name} is {value!r}; it must be at least 1.")


def shards(index: Path, source: Source) -> list[Path]:
    """Return the files that an index names.

    Raises:
        CheckpointError: it names none, or one that is missing.
    """
    named = read_json(index, source).get("weight_map")
    if not isinstance(named, dict) or not named or not all(isinstance(one, str) for one in named.values()):
        raise CheckpointError(f"{index.name} in {source.name} names no files: its weight_map is missing or damaged.")
    files = [index.parent / name for name in sorted({*named.values()})]
    absent = [one.name for one in files if not one.is_file()]
    if absent:
        raise CheckpointError(
            f"The model in {source.name} is not complete: {index.name} names {absent[0]}, which is missing."
        )
    return files


def _check_header(path: Path, source: Source) -> None:
    try:
        path.open("rb").close()
    except OSError as error:
        raise CheckpointError(f"{path.name} in {source.name} cannot be read: {error.strerror}.") from error
    try:
        with safe_open(path, framework="pt"):
            pass
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"No model can be loaded from {source.name}: {path.name} is damaged ({reason(error)})."
        ) from error
