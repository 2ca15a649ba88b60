"""Where the name of a model leads, and what its folder must hold: each lack is a sentence that comes before loading."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub import get_hf_file_metadata, hf_hub_url, is_offline_mode, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import validate_repo_id
from safetensors import SafetensorError, safe_open
from transformers import CONFIG_MAPPING
from transformers.utils.hub import cached_file

from polydraft.errors import CheckpointError, UnsupportedModel, near
from polydraft.fetched import MADE, MODELS, SHIPPED, is_there, place
from polydraft.models.checkpoints.silence import reason

LONGEST = 200
"""Longer names are cut in messages."""


@dataclass(frozen=True)
class Source:
    """A place that models are loaded from.

    Args:
        name: as it was given, quoted for messages.
        path: the folder, or the hub name, as transformers takes it.
        is_local: whether it is a folder.
        offline: whether the hub is not to be asked, since everything comes from its cache.
        gguf: the name of the GGUF file in the folder that holds all of the model; else empty.
    """

    name: str
    path: str
    is_local: bool
    offline: bool = False
    gguf: str = ""

    @property
    def arguments(self) -> dict[str, Any]:
        """How transformers is told where it is, beside the path."""
        told: dict[str, Any] = {"trust_remote_code": False, "local_files_only": self.offline or bool(self.gguf)}
        return {**told, "gguf_file": self.gguf} if self.gguf else told


def find(name: object) -> Source:
    """Tell where a name leads: what was fetched or ships, a folder, a GGUF file, or the hub.

    The words of what is fetched or ships come first, and always mean the same; a folder of that name is `./smollm2`.
    A slip of such a word is not asked for anywhere else. The hub is asked once, without retries, and only for names
    that it may have.

    Raises:
        CheckpointError: nowhere; the text says what was looked for.
    """
    if not isinstance(name, str | PathLike) or isinstance(text := str(name), bytes):
        raise CheckpointError(f"A model is named by a folder or a hub name, but {name!r} is a {type(name).__name__}.")
    shown = quoted(text)
    if not text.strip():
        raise CheckpointError(f"The name of the model is empty: {shown}; give a folder or a hub name.")
    if isinstance(name, str) and text in MODELS:
        if not _answers(lambda _: is_there(text), place(text), shown):
            raise CheckpointError(f"The model {shown} is not on this machine yet: `polydraft fetch {text}` brings it.")
        return Source(shown, str(place(text)), is_local=True)
    if isinstance(name, str) and text in SHIPPED:
        return Source(shown, str(SHIPPED[text]), is_local=True)
    folder = _expanded(text)
    if folder is not None and _answers(Path.is_dir, folder, shown):
        return Source(shown, str(folder), is_local=True)
    if folder is not None and is_gguf(folder) and _answers(Path.is_file, folder, shown):
        return Source(shown, str(folder.parent), is_local=True, gguf=folder.name)
    if folder is not None and _answers(Path.exists, folder, shown):
        raise CheckpointError(
            f"There is no model folder {shown}: it is a file; name the folder that holds config.json, or a .gguf file."
        )
    if not isinstance(name, str) or text.startswith((".", "~")) or Path(text).is_absolute() or text.count("/") > 1:
        raise CheckpointError(f"There is no model folder {shown}.")
    return _on_hub(text, shown)


def is_known(name: str) -> bool:
    """Tell whether a name leads to something on this machine, without asking the hub."""
    folder = _expanded(name)
    there = folder is not None and _answers(Path.exists, folder, quoted(name))
    return name in MODELS or name in SHIPPED or there or _is_cached(name)


def _is_cached(name: str) -> bool:
    try:
        return isinstance(try_to_load_from_cache(name, "config.json"), str)
    except HFValidationError:
        return False


def is_gguf(path: Path) -> bool:
    """Tell by a file's name whether it is a GGUF file."""
    return path.suffix.lower() == ".gguf"


def quoted(text: str) -> str:
    """Return a name in quotes; what cannot be printed is escaped, and the middle of a long name is left out."""
    shown = repr(text) if len(text) <= LONGEST else repr(f"{text[: LONGEST // 2]}...{text[-LONGEST // 4 :]}")
    return shown.encode("utf-8", "backslashreplace").decode()


def _expanded(text: str) -> Path | None:
    """Return the path with the home folder put in; None where there is no such user."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        return None


def _answers(question: Callable[[Path], bool], path: Path, shown: str) -> bool:
    """Ask the file system; a name that it cannot have is a no."""
    try:
        return question(path)
    except PermissionError as error:
        raise CheckpointError(f"The folder {shown} cannot be read: permission denied.") from error
    except (OSError, ValueError):  # too long, or with characters that no name has
        return False


def _on_hub(name: str, shown: str) -> Source:
    """Return the hub's model, or what its cache has of it."""
    cached = _is_cached(name)
    meant = "" if cached or "/" in name else near(name, (*MODELS, *SHIPPED, *MADE))
    if meant and meant != name:
        raise CheckpointError(f"There is no model folder {shown} (did you mean {meant}?).")
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise CheckpointError(
            f"There is no model folder {shown}, and a model on the Hugging Face hub cannot have that name."
        ) from error
    try:
        if not is_offline_mode():
            get_hf_file_metadata(hf_hub_url(name, "config.json"))
            return Source(shown, name, is_local=False)
    except Exception as error:
        if not cached:
            raise CheckpointError(
                f"There is no model folder {shown}, and the Hugging Face hub does not give a model of that name: "
                f"{_refusal(error)}."
            ) from error
    if not cached:
        raise CheckpointError(
            f"There is no model folder {shown}, and no model of that name in the Hugging Face hub's cache; the hub is "
            "not asked, since HF_HUB_OFFLINE is set."
        )
    return Source(shown, name, is_local=False, offline=True)


def _refusal(error: Exception) -> str:
    if isinstance(error, GatedRepoError):
        return "access to it must be asked for there, and HF_TOKEN set"
    if isinstance(error, RepositoryNotFoundError):
        return "it has none, or a private one for which HF_TOKEN must be set"
    if isinstance(error, EntryNotFoundError):
        return "what it has of that name holds no config.json (an adapter is loaded with peft, and the model passed)"
    if isinstance(error, HfHubHTTPError) and error.response is not None:
        return f"it answers with status {error.response.status_code}"
    return f"there is no connection to it ({type(error).__name__})"


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
    """Check that a folder is not that of an adapter, which transformers applies or not, as peft is installed or not."""
    if source.is_local and (Path(source.path) / ADAPTER).exists():
        raise CheckpointError(
            f"{source.name} holds an adapter ({ADAPTER}) and not a whole model alone; load it and its base with "
            "peft.AutoPeftModelForCausalLM and pass that model, or save what its merge_and_unload() returns in a folder"
            " of its own."
        )


def _check_no_code(said: dict[str, Any], source: Source) -> None:
    """Check that a model of a kind that transformers does not know names no code that would have to be run."""
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
