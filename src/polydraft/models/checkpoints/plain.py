"""Folders of plain tensors, such as draft heads: a configuration and numbers, whatever they are for."""

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from zipfile import is_zipfile

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.utils.hub import cached_file

from polydraft.errors import CheckpointError
from polydraft.models.checkpoints.folders import (
    CONFIG,
    PICKLED,
    PICKLED_INDEX,
    SAFE,
    SAFE_INDEX,
    Source,
    config_file,
    find,
    read_json,
    shards,
)
from polydraft.models.checkpoints.silence import reason

MEDUSA, HYDRA = "medusa_lm_head", "hydra_lm_head"
"""What Medusa's and Hydra's own tools call the file of their heads."""
LOOKAHEAD = "lookahead.safetensors"
"""The file of PaSS's embeddings, of which nobody has published any."""
OWN = [f"{name}.{kind}" for kind in ("safetensors", "pt") for name in (MEDUSA, HYDRA)]
FILES = (SAFE, SAFE_INDEX, *OWN[:2], LOOKAHEAD, PICKLED, PICKLED_INDEX, *OWN[2:])
"""The files of weights, in the order in which they are looked for: those that cannot hold code come first."""
Found = TypeVar("Found")


@dataclass(frozen=True, eq=False)
class PlainFolder:
    """What is in a folder of plain tensors.

    Args:
        name: the folder or hub name as it was given, quoted for messages.
        config: its config.json.
        tensors: all tensors, or those that were asked for, by name, on the host.
        file: which file they are in, or which index names the files.
    """

    name: str
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    file: str


class LeftOver(CheckpointError):
    """Tensors of a folder that nothing takes; `left` are theirs by name."""

    def __init__(self, folder: PlainFolder, left: Mapping[str, Tensor]) -> None:
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        found = f"{folder.file} in {folder.name} holds {min(left)}{more}"
        super().__init__(f"{found}, which this kind of head does not have.")
        self.left = {**left}


def plain_config(name: object) -> tuple[Source, Mapping[str, Any]]:
    """Return where a name leads and the config.json there, before any weights are read.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    source = find(name)
    if source.gguf:
        raise CheckpointError(f"{source.name} is a GGUF file; a draft head is a folder with config.json.")
    return source, read_json(config_file(source), source)


def read_plain(name: object, wanted: Callable[[str], bool] = bool, files: Sequence[str] = FILES) -> PlainFolder:
    """Read a folder, or a hub repository; no code is run and nothing but numbers is taken.

    Args:
        name: the folder or hub name.
        wanted: tells by its name whether a tensor is read; all are unless said otherwise.
        files: the first of these that there is has the tensors, or names those that have.

    Raises:
        CheckpointError: it is missing or damaged, or pickled weights hold more than numbers.
    """
    source, config = plain_config(name)
    tensors, file = _all_parts(source, partial(_tensors, wanted=wanted), files)
    return PlainFolder(source.name, config, tensors, file)


def plain_names(source: Source) -> list[str]:
    """Return the names of all tensors, from the index where there is one; none where the weights are pickled.

    Raises:
        CheckpointError: there are no weights, or they are damaged.
    """
    index = None if _file(source, SAFE) is not None else _file(source, SAFE_INDEX)
    if index is not None:
        named = read_json(index, source).get("weight_map")
        return [*named] if isinstance(named, dict) else []
    return [*_all_parts(source, _names)[0]]


def plain_shapes(source: Source) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors, by name, without reading their values.

    Args:
        source: where they are; from the hub the files come first.

    Raises:
        CheckpointError: there are none, or they are damaged.
    """
    return _all_parts(source, _shapes)[0]


def _all_parts(
    source: Source, read: Callable[[Path], dict[str, Found]], files: Sequence[str] = FILES
) -> tuple[dict[str, Found], str]:
    """Return what is read of all files of weights, and the name of the first, or of their index."""
    file = next((found for one in files if (found := _file(source, one)) is not None), None)
    if file is None:
        others = f", and no {MEDUSA}.safetensors, {PICKLED} or {MEDUSA}.pt in its place" if len(files) > 1 else ""
        raise CheckpointError(f"No head can be loaded from {source.name}: it holds no {files[0]}{others}.")
    read_ones: dict[str, Found] = {}
    parts = _parts(file, source) if file.name in (SAFE_INDEX, PICKLED_INDEX) else [file]
    for part in parts:
        try:
            read_ones |= read(part)
        except Exception as error:
            raise CheckpointError(
                f"No head can be loaded from {source.name}: {part.name} is damaged ({reason(error)})."
            ) from error
    return read_ones, file.name


def write_plain(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], card: str = "", file: str = SAFE
) -> None:
    """Write config.json, the tensors and, if given, README.md into a folder.

    Args:
        folder: where to.
        config: the configuration.
        tensors: all tensors.
        card: the text of README.md; "" for none.
        file: what the file of the tensors is called.

    Raises:
        CheckpointError: they cannot be written; why.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        kept = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
        save_file(kept, str(folder / file), metadata={"format": "pt"})
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        if card:
            (folder / "README.md").write_text(card, encoding="utf-8")
    except Exception as error:
        raise CheckpointError(f"The head cannot be saved in {folder}: {reason(error)}.") from error


def _file(source: Source, name: str) -> Path | None:
    if source.is_local:
        path = Path(source.path) / name
        return path if path.is_file() else None
    try:
        found = cached_file(
            source.path, name, local_files_only=source.offline, _raise_exceptions_for_missing_entries=False
        )
    except Exception as error:
        raise CheckpointError(f"No head can be loaded from {source.name}: {reason(error)}.") from error
    return None if found is None else Path(found)


def _parts(index: Path, source: Source) -> list[Path]:
    """Return the files that an index names, brought from the hub if they are there."""
    if source.is_local:
        return shards(index, source)
    named = read_json(index, source).get("weight_map")
    names = sorted({*named.values()}) if isinstance(named, dict) else []
    found = [_file(source, str(one)) for one in names]
    if not found or None in found:
        raise CheckpointError(f"The head in {source.name} is not complete: {index.name} names a file that is missing.")
    return [one for one in found if one is not None]


def _tensors(file: Path, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
    if file.suffix == ".safetensors":
        with safe_open(str(file), framework="pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys() if wanted(name)}
    return {name: value for name, value in _unpickled(file).items() if wanted(name)}


def _names(file: Path) -> dict[str, None]:
    if file.suffix != ".safetensors":
        return {}
    with safe_open(str(file), framework="pt") as opened:
        return dict.fromkeys(opened.keys())


def _shapes(file: Path) -> dict[str, tuple[int, ...]]:
    if file.suffix == ".safetensors":
        with safe_open(str(file), framework="pt") as opened:
            return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}
    # torch maps the files that it has written since version 1.6, which are archives; older ones are read whole.
    return {name: tuple(value.shape) for name, value in _unpickled(file, mapped=is_zipfile(file)).items()}


def _unpickled(file: Path, *, mapped: bool = False) -> dict[str, Tensor]:
    """Return pickled tensors, by torch's reader that runs no code; it warns of files that it then refuses."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected pickle protocol", UserWarning)
        found = torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    if not isinstance(found, dict) or not all(isinstance(one, Tensor) for one in found.values()):
        raise ValueError("it holds something else than named tensors")
    return {str(name): value for name, value in found.items()}
