"""The words that say which layers of a model run, and files of sub-layers to skip."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from os.path import isfile
from pathlib import Path
from typing import Any, cast

from polydraft.errors import InvalidParameter, is_whole, shown
from polydraft.models.language_model import LayerSet

RANGES = re.compile(r"\d{1,4}(-\d{1,4})?(\+\d{1,4}(-\d{1,4})?)*")
SKIP, EXIT = "skip", "exit"
PARTS = {SKIP: ("attention", "mlp"), "skip-attention": ("attention",), "skip-mlp": ("mlp",)}
"""Which sub-layers each word leaves out, by the names that they have in files."""
AUTO = "auto"
"""The value of skip for sub-layers that are chosen while texts are written."""
DEPTH = "layers"
"""How many layers the model of a file's sets has, in files of our own."""


def with_layer_word(layers: LayerSet, word: str, value: str) -> LayerSet:
    """Return a set of layers of which one more word is true: skip, skip-attention, skip-mlp or exit.

    Raises:
        InvalidParameter: the value means no layers, or the file has no sets of sub-layers.
    """
    if word == EXIT:
        if layers.exit is not None or not re.fullmatch(r"\d{1,4}", value):
            raise InvalidParameter(f"exit takes one number of layers, as exit=8, not {shown(value)}.")
        return replace(layers, exit=int(value))
    depth = layers.depth
    if RANGES.fullmatch(value):
        numbers = frozenset(number for part in value.split("+") for number in _range(part))
        sets = {part: numbers for part in PARTS[word]}
    elif word == SKIP:
        sets = _read(value)
        depth = sets.get(DEPTH, depth)
        if layers.depth not in (None, depth):
            raise InvalidParameter(
                f"The layers to skip were chosen for models of {layers.depth} and of {depth} layers; take one file."
            )
    else:
        raise InvalidParameter(f"{word} takes layers, as {word}=3-5+9, not {shown(value)}.")
    return replace(
        layers,
        skipped_attention=layers.skipped_attention | frozenset(sets.get("attention", ())),
        skipped_mlp=layers.skipped_mlp | frozenset(sets.get("mlp", ())),
        depth=depth,
    )


def layer_words(layers: LayerSet) -> list[str]:
    """Return the words that mean a set of layers."""
    both = layers.skipped_attention & layers.skipped_mlp
    named = (both, layers.skipped_attention - both, layers.skipped_mlp - both)
    words = [f"{word}={_ranges(numbers)}" for word, numbers in zip(PARTS, named, strict=True) if numbers]
    return words if layers.exit is None else [*words, f"{EXIT}={layers.exit}"]


def skip_sets(layers: LayerSet) -> dict[str, Any]:
    """Return the skipped sub-layers as a file of our own has them, in JSON, which skip=FILE reads."""
    skipped = {"attention": sorted(layers.skipped_attention), "mlp": sorted(layers.skipped_mlp)}
    return skipped if layers.depth is None else {DEPTH: layers.depth, **skipped}


def _range(part: str) -> range:
    first, _, last = part.partition("-")
    numbers = range(int(first), int(last or first) + 1)
    if not numbers:
        raise InvalidParameter(f"A range of layers begins with its smaller number, as 3-5, not {part}.")
    return numbers


def _ranges(numbers: Iterable[int]) -> str:
    """Return numbers as ranges, as they are written in words."""
    runs = list[list[int]]()
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return "+".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def _read(value: str) -> Mapping[str, Any]:
    """Return the sets in a file: the only ones, or those of the name behind the last colon.

    Files of Draft & Verify (dilab-zju/self-speculative-decoding, skip_layers.json) and of SWIFT (hemingkx/SWIFT, of the
    same name) have sets by name: {"llama-2-13b": {"attention": [3, 5], "mlp": [6]}}. Our own may be one such set, with
    the model's depth: {"layers": 30, "attention": [3, 5], "mlp": [6]}.
    """
    file, name = (value, "") if isfile(value) else value.rpartition(":")[::2]
    if not isfile(file):
        raise InvalidParameter(
            f"There is no file {shown(value)}: skip takes layers below 10,000, as skip=3-5+9, or a JSON file."
        )
    try:
        found: object = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidParameter(f"The skip file {shown(file)} cannot be read: {type(error).__name__}.") from error
    sets = cast(dict[str, Any], found if isinstance(found, dict) else {})
    if not sets.keys() & {"attention", "mlp"}:
        if name not in sets and (name or len(sets) != 1):
            raise InvalidParameter(
                f"The skip file {shown(file)} has sets of {', '.join(sorted(map(str, sets))) or 'no model'}; name one "
                f"behind a colon, as skip={file}:NAME."
            )
        sets = sets[name] if name else next(iter(sets.values()))
    elif name:
        raise InvalidParameter(f"The skip file {shown(file)} has one set, without names; leave :{name} out.")
    if not _are_sets(sets):
        raise InvalidParameter(
            f"The skip file {shown(file)} must have lists of layers named attention and mlp, and may have the model's "
            "number of layers; it has something else."
        )
    return sets


def _are_sets(found: object) -> bool:
    """Tell whether what a file holds says which sub-layers are skipped, and nothing else."""
    if not isinstance(found, dict) or not found.keys() & {"attention", "mlp"}:
        return False
    sets = cast(dict[str, object], dict(found))
    depth = sets.pop(DEPTH, 1)
    fine = [isinstance(one, list) and all(is_whole(number) and number >= 0 for number in one) for one in sets.values()]
    return all(fine) and sets.keys() <= {"attention", "mlp"} and is_whole(depth) and cast(int, depth) > 0
