"""What tokenizers and chat templates return, as prompts: tensors, lists, or mappings of these with a mask."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from polydraft.errors import InvalidParameter
from polydraft.models.sources.prompts import BY_TOKEN, IDS

MASK = "attention_mask"


def prompts_of(input_ids: object, options: dict[str, Any], main: str = IDS) -> tuple[Any, dict[str, Any]]:
    """Return the prompts and the options of a call, wherever the prompts stand.

    Args:
        input_ids: the prompts: a tensor, the list of one prompt's token ids, a list of rows of one length, or a mapping
            with input_ids and attention_mask, each of them such.
        options: the call's other arguments; `inputs` or `main` among them is another name of the prompts.
        main: by which name the model takes its prompts.

    Raises:
        InvalidParameter: prompts are given twice, or not at all, or rows are of different lengths.
    """
    options = dict(options)
    places = [input_ids, *(options.pop(name, None) for name in ("inputs", main))]
    given = [one for one in places if one is not None]
    if len(given) != 1:
        raise InvalidParameter(
            f"Give prompts once, as {main}."
            if given
            else f"There are no prompts: pass {main}" + (", rows of token ids." if main == IDS else ".")
        )
    if not isinstance(given[0], Mapping):
        if not _holds_ids(given[0]):
            return given[0], options
        masks = {MASK: _as_rows(options[MASK])} if _holds_ids(options.get(MASK)) else {}
        return _as_rows(given[0]), {**options, **masks}
    encoded = {str(name): _as_rows(value) for name, value in cast(Mapping[Any, Any], given[0]).items()}
    twice = sorted(encoded.keys() & options.keys())
    if twice or main not in encoded:
        what = f"{twice[0]} is given twice" if twice else f"The prompts have no {main}"
        raise InvalidParameter(f"{what}; pass what the tokenizer returns, or its {main} and attention_mask.")
    return encoded.pop(main), {**options, **encoded}


def prompts_by_name(prompts: object) -> dict[Any, Any]:
    """Return many prompts by name; what a tokenizer returned for several is taken apart, without its padding.

    Args:
        prompts: a mapping by name, a list, whose names are their places, the rows of a tensor, or what a tokenizer or
            chat template returned for one prompt or for several.

    Raises:
        InvalidParameter: they are something else.
    """
    if isinstance(prompts, Mapping):
        if IDS not in prompts:
            return dict(cast(Mapping[Any, Any], prompts))
        return dict(enumerate(_rows_of(cast(Mapping[str, Any], prompts))))
    if _is_row(prompts) or (isinstance(prompts, Tensor | np.ndarray) and len(prompts.shape) == 1):
        return {0: prompts}
    if isinstance(prompts, str) or not isinstance(prompts, Iterable):
        what = "a text" if isinstance(prompts, str) else f"of type {type(prompts).__name__}"
        raise InvalidParameter(f"prompts must be token ids of several prompts, but is {what}.")
    return dict(enumerate(cast(Iterable[Any], prompts)))


def inputs_beside(prompt: object, known: Collection[str]) -> dict[str, Any]:
    """Return what a processor made of one prompt beside its tokens, such as images, of the inputs that are known."""
    if not isinstance(prompt, Mapping) or IDS not in prompt:
        return {}
    given = cast(Mapping[str, Any], prompt)
    mask = None if given.get(MASK) is None else torch.as_tensor(_listed(given[MASK])).bool()
    cut = {name: value for name, value in given.items() if name in known}
    for name in BY_TOKEN:
        if mask is not None and isinstance(cut.get(name), Tensor):
            cut[name] = cut[name][mask.to(cut[name].device)].unsqueeze(0)
    return cut


def one_row(prompt: object, known: Collection[str] = ()) -> object:
    """Return one prompt as a flat row, if it is one row inside of a list or tensor, or what a tokenizer returned.

    What a processor made beside tokens of the inputs that are `known` is left to `inputs_beside`.
    """
    if isinstance(prompt, Mapping) and IDS in prompt:
        text = {name: value for name, value in cast(Mapping[str, Any], prompt).items() if name not in known}
        rows = _rows_of(text)
        if len(rows) != 1:
            raise InvalidParameter(
                f"A prompt must be one row of token ids, but is a mapping of {len(rows)} rows; give one for each."
            )
        return rows[0]
    if isinstance(prompt, Tensor | np.ndarray):
        return prompt[0] if len(prompt.shape) == 2 and prompt.shape[0] == 1 else prompt
    if isinstance(prompt, list) and len(prompt) == 1 and _is_row(prompt[0]):
        return cast(list[Any], prompt)[0]
    return prompt


def _rows_of(encoded: Mapping[str, Any]) -> list[Any]:
    """Return the rows of what a tokenizer returned, without what the mask leaves out.

    Raises:
        InvalidParameter: there is more than ids and a mask, or the mask has another shape.
    """
    others = sorted(str(name) for name in encoded.keys() - {IDS, MASK})
    if others:
        if others[0] in BY_TOKEN:
            raise InvalidParameter(
                f"The tokenizer returned {others[0]} too, which generate_many does not take: pass its input_ids and "
                "attention_mask."
            )
        raise InvalidParameter(
            f"There is {others[0]} for all prompts together, which generate_many does not take apart: give every "
            "prompt by itself, as a mapping of what belongs to it, or its input_ids and attention_mask alone."
        )
    rows, masks = _listed(encoded[IDS]), _listed(encoded.get(MASK))
    if masks is None or not isinstance(rows, list):
        return rows if isinstance(rows, list) else [rows]
    try:
        return [[token for token, kept in zip(*both, strict=True) if kept] for both in zip(rows, masks, strict=True)]
    except (TypeError, ValueError):
        raise InvalidParameter(
            "attention_mask must have the shape of input_ids, with 1 for a token and 0 for padding."
        ) from None


def _listed(value: Any) -> Any:
    """Return ids or a mask as a list of lists, if it can be one."""
    if isinstance(value, Tensor | np.ndarray):
        value = value.tolist()
    return [value] if _is_row(value) else value


def _as_rows(value: Any) -> Any:
    """Return a tokenizer's list or array as a tensor of rows; everything else as it is."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if not isinstance(value, list):
        return value
    try:
        rows = torch.tensor(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # rows of different lengths, or no numbers
        raise InvalidParameter(
            "The tokenizer's rows cannot be put into one tensor; call it with return_tensors='pt' and padding=True."
        ) from None
    return rows.unsqueeze(0) if rows.dim() == 1 else rows


def _holds_ids(value: object) -> bool:
    """Tell whether a value is a list of whole numbers, or of such lists: what a tokenizer makes without tensors."""
    return isinstance(value, list) and bool(value) and (_is_row(value) or all(map(_is_row, cast(list[Any], value))))


def _is_row(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(one) is int for one in cast(list[Any], value))
