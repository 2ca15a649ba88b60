"""Whether a GGUF file can be read: each reason why not is one sentence, found before any weights are."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import transformers
from transformers import modeling_gguf_pytorch_utils

from polydraft.errors import CheckpointError, UnsupportedModel
from polydraft.extras import GGUF
from polydraft.models.gguf.file_head import Contents, read_contents

UNQUANTISED = ("F32", "F16", "F64", "I8", "I16", "I32", "I64")


def check_gguf(path: Path) -> Contents:
    """Check that a GGUF file is whole, and of a kind that transformers reads.

    Raises:
        CheckpointError: it is no GGUF file, it is cut short, or it lacks layers.
        MissingExtra: the packages that read such files cannot be used.
        UnsupportedModel: its architecture is not read, or the quantisation of one of its tensors.
    """
    contents = read_contents(path)
    constants, quants = _packages()
    if not _is_known(contents.architecture):
        raise UnsupportedModel(
            f"{path} is a model of the architecture {contents.architecture!r}, which transformers does not read from "
            "GGUF files; take its folder of safetensors instead."
        )
    sizes = {int(kind): size for kind, size in constants.GGML_QUANT_SIZES.items()}
    for name, (kind, _, _) in contents.tensors.items():
        if kind not in sizes or not _is_readable(constants, quants, kind):
            raise UnsupportedModel(
                f"{path} holds {name} in the quantisation {_word(constants, kind)}, which the installed gguf cannot "
                "read; take a file in another one, such as Q8_0 or Q4_K_M."
            )
    _check_layers(path, contents)
    whole = contents.end(sizes)
    if contents.size < whole:
        raise CheckpointError(f"{path} is cut short: it has {contents.size} bytes of {whole}; fetch it again.")
    return contents


def _packages() -> tuple[Any, Any]:
    GGUF.check()
    return import_module("gguf.constants"), import_module("gguf.quants")


def _check_layers(path: Path, contents: Contents) -> None:
    """Check that there are as many layers as the head says: transformers would look for the others for minutes.

    Raises:
        CheckpointError: there are not.
    """
    said = contents.fields.get(f"{contents.architecture}.block_count")
    layers = {name.split(".")[1] for name in contents.tensors if name.startswith("blk.")}
    if isinstance(said, int) and layers and said != len(layers):
        raise CheckpointError(f"{path} is damaged: its head says {said} layers, but it holds {len(layers)}.")


def _is_known(architecture: str) -> bool:
    """Tell whether transformers reads an architecture, which files spell with and without hyphens."""
    known = {word.replace("_", "") for word in modeling_gguf_pytorch_utils.GGUF_SUPPORTED_ARCHITECTURES}
    return architecture.replace("-", "").replace("_", "") in known - {"general", "tokenizer"}


def _is_readable(constants: Any, quants: Any, kind: int) -> bool:
    kinds = constants.GGMLQuantizationType
    return kinds(kind).name in UNQUANTISED or kinds(kind) in quants._type_traits


def _word(constants: Any, kind: int) -> str:
    """Return the name of a kind of tensor, or its number if it has none."""
    found = next((one.name for one in constants.GGMLQuantizationType if int(one) == kind), None)
    return found or f"number {kind}"


@contextmanager
def alone(folder: str, file: str) -> Iterator[str]:
    """Give a file's folder for a while: another one, with nothing else in it; the folder itself if no file is named.

    transformers reads a tokenizer.json, tokenizer_config.json, chat template or generation_config.json that lies beside
    the file, and takes it for the file's own.
    """
    if not file:
        yield folder
        return
    with TemporaryDirectory(prefix="polydraft-") as empty:
        whole, link = (Path(folder) / file).resolve(), Path(empty) / file
        try:
            link.symlink_to(whole)
        except OSError:  # not every system gives everybody links
            shutil.copyfile(whole, link)
        yield empty


def unpacked() -> dict[str, Any]:
    """Return the options by which weights are unpacked as they are loaded.

    Newer versions of transformers may leave them packed, for kernels that compute a little differently.
    """
    packing = getattr(transformers, "GgufConfig", None)
    return {"quantization_config": packing(dequantize=True)} if packing else {}
