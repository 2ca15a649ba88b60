"""Where the name of a model leads: to a folder, to the hub, or nowhere, which is said at once."""

from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from huggingface_hub import get_hf_file_metadata, hf_hub_url, is_offline_mode, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import validate_repo_id

from polydraft.errors import CheckpointError, near
from polydraft.fetched import MADE, MODELS, SHIPPED, is_there, place

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
        return _fetched(text, shown)
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
    """Tell whether the hub's cache has a model of that name."""
    try:
        return isinstance(try_to_load_from_cache(name, "config.json"), str)
    except HFValidationError:
        return False


def is_gguf(path: Path) -> bool:
    """Tell by a file's name whether it is a GGUF file."""
    return path.suffix.lower() == ".gguf"


def _fetched(word: str, shown: str) -> Source:
    """Return what was fetched.

    Raises:
        CheckpointError: it was not.
    """
    if not _answers(lambda _: is_there(word), place(word), shown):
        raise CheckpointError(f"The model {shown} is not on this machine yet: `polydraft fetch {word}` brings it.")
    return Source(shown, str(place(word)), is_local=True)


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
    """Ask the file system; a name that it cannot have is a no.

    Raises:
        CheckpointError: it may not be asked.
    """
    try:
        return question(path)
    except PermissionError as error:
        raise CheckpointError(f"The folder {shown} cannot be read: permission denied.") from error
    except (OSError, ValueError):  # too long, or with characters that no name has
        return False


def _on_hub(name: str, shown: str) -> Source:
    """Return the hub's model, or what its cache has of it.

    Raises:
        CheckpointError: the hub has no model of that name, does not give it, or cannot be asked.
    """
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
    """Return why the hub did not give a model."""
    if isinstance(error, GatedRepoError):
        return "access to it must be asked for there, and HF_TOKEN set"
    if isinstance(error, RepositoryNotFoundError):
        return "it has none, or a private one for which HF_TOKEN must be set"
    if isinstance(error, EntryNotFoundError):
        return "what it has of that name holds no config.json (an adapter is loaded with peft, and the model passed)"
    if isinstance(error, HfHubHTTPError) and error.response is not None:
        return f"it answers with status {error.response.status_code}"
    return f"there is no connection to it ({type(error).__name__})"
