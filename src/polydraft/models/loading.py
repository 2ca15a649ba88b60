"""Loading models and tokenizers, by folder or hub name, and the model pair that ships with the package."""

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from polydraft.errors import CheckpointError, VocabularyMismatch
from polydraft.models.packing import pack_linear_layers

MOST_PADDING = 1024


@dataclass(frozen=True, eq=False)
class Pair:
    """A target, a draft model with the same tokens (or none), and their tokenizer."""

    target: PreTrainedModel
    draft: PreTrainedModel | None
    tokenizer: PreTrainedTokenizerBase


def load(target: str | Path, draft: str | Path | None = None, *, dtype: str = "auto", device: str = "auto") -> Pair:
    """Load a target and, if given, a draft model, from folders or hub names.

    Args:
        target: folder or hub name of the target.
        draft: folder or hub name of the draft model.
        dtype: "auto" (single precision on a CPU, the checkpoint's own on a GPU), or a torch name such as "bfloat16".
        device: "auto" (a GPU if there is one), "cpu", "cuda", "cuda:1", ...

    Raises:
        CheckpointError: a folder is missing or damaged, or the dtype or device is unknown.
        VocabularyMismatch: the two tokenizers differ.
    """
    place = _device(device)
    tokenizer = _tokenizer(target)
    if draft is None:
        return Pair(_model(target, dtype, place), None, tokenizer)
    check_same_tokens(tokenizer, _tokenizer(draft), str(target), str(draft))
    return Pair(_model(target, dtype, place), _model(draft, dtype, place), tokenizer)


def load_pair(*, dtype: str = "auto", device: str = "auto") -> Pair:
    """Load the model pair that ships with the package: small Python-code models for demos, tests and first steps."""
    folder = Path(str(files("polydraft") / "data" / "pair"))
    return load(folder / "target", folder / "draft", dtype=dtype, device=device)


def check_same_tokens(
    target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase, target_name: str, draft_name: str
) -> None:
    """Check that every token id means the same to both models.

    Raises:
        VocabularyMismatch: an id stands for different tokens; the text shows the first one.
    """
    theirs = {index: token for token, index in draft.get_vocab().items()}
    for token, index in sorted(target.get_vocab().items(), key=lambda item: item[1]):
        if index in theirs and theirs[index] != token:
            raise VocabularyMismatch(
                f"{target_name} and {draft_name} have different tokenizers: id {index} is {token!r} in the one "
                f"and {theirs[index]!r} in the other; take a draft model of the same family."
            )
    check_same_size(len(target), len(draft))


def check_same_size(target_size: int, draft_size: int) -> None:
    """Check that two vocabularies differ in size by padding at most.

    Raises:
        VocabularyMismatch: they differ by more than 1024 tokens.
    """
    if abs(target_size - draft_size) > MOST_PADDING:
        raise VocabularyMismatch(
            f"The target has {target_size} tokens and the draft model {draft_size}: they do not share a tokenizer."
        )


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:  # torch asserts where it was built without the device's kind
        raise CheckpointError(
            f"There is no device {name!r} here; use cpu, or cuda or cuda:1 on a machine with GPUs."
        ) from error


def _dtype(name: str, device: torch.device) -> torch.dtype | str:
    if name == "auto":
        return "auto" if device.type == "cuda" else torch.float32
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise CheckpointError(f"There is no dtype {name!r}; use auto, float32, bfloat16, float16 or float64.")
    return dtype


def _tokenizer(name: str | Path) -> PreTrainedTokenizerBase:
    _check_folder(name)
    try:
        return AutoTokenizer.from_pretrained(str(name))
    except Exception as error:
        raise CheckpointError(f"No tokenizer can be loaded from {str(name)!r}: {_first_line(error)}") from error


def _model(name: str | Path, dtype: str, device: torch.device) -> PreTrainedModel:
    precision = _dtype(dtype, device)
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        loaded = AutoModelForCausalLM.from_pretrained(
            str(name), dtype=precision, output_loading_info=True, ignore_mismatched_sizes=True
        )
    except Exception as error:
        raise CheckpointError(f"No model can be loaded from {str(name)!r}: {_first_line(error)}") from error
    finally:
        if bars:
            logging.enable_progress_bar()
    model, report = cast(tuple[PreTrainedModel, dict[str, Any]], loaded)
    absent = {*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])}
    if absent:
        raise CheckpointError(f"The model in {str(name)!r} is damaged: {min(absent)} is missing or has another shape.")
    model.to(device).eval()  # pyright: ignore[reportArgumentType]  the stub of `to` counts self twice
    pack_linear_layers(model)
    return model


def _check_folder(name: str | Path) -> None:
    path = Path(name)
    looks_local = isinstance(name, Path) or path.is_absolute() or str(name).startswith((".", "~"))
    if looks_local and not path.expanduser().is_dir():
        raise CheckpointError(f"There is no model folder {str(name)!r}.")


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
