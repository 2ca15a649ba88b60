"""Sizes in a head's config.json that its tensors cannot have are refused by name, before memory is allotted."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
from test_block_folders import FLAT, SIZES, folder_of, named
from test_eagle_folders import FOLDERS, put
from test_medusa import config_c, heads, layout_c

from polydraft.drafters import load_head
from polydraft.errors import CheckpointError, shown
from polydraft.models import write_plain

ABSURD = (10**12, 10**9, 10**40, -1, 16.0, "16", True, [16])
ANATOMY = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
FIELDS = {
    "eagle": ANATOMY,
    "vllm": (*ANATOMY, "num_hidden_layers"),
    "eagle 3": (*ANATOMY, "num_hidden_layers", "draft_vocab_size", "target_hidden_size"),
    "speculators": (*ANATOMY, "num_hidden_layers", "draft_vocab_size", "target_hidden_size"),
    "block": (*ANATOMY, "num_hidden_layers", "block_size", "mask_token_id"),
    "medusa": ("num_heads", "num_hidden_layers", "vocab_size"),
}


def with_field(config: dict[str, Any], name: str, value: object) -> dict[str, Any]:
    """Return a configuration with a value in the table that has it, or its sizes."""
    changed = copy.deepcopy(config)
    tables = [changed, *(one for one in changed.values() if isinstance(one, dict))]
    place = next((one for one in tables if name in one), None)
    place = next((one for one in tables if "hidden_size" in one), changed) if place is None else place
    place[name] = value
    return changed


def written(kind: str, name: str, value: object, folder: Path) -> Path:
    if kind == "block":
        return folder_of(folder, with_field({**SIZES, **FLAT}, name, value), named("markov")[1])
    if kind == "medusa":
        own = heads(2)
        write_plain(folder, with_field(config_c(own), name, value), layout_c(own))
        return folder
    config, tensors = FOLDERS[kind]
    return put(folder, with_field(config, name, value), tensors)


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in FIELDS.items() for name in names])
def test_a_size_that_is_none_is_named(kind: str, name: str, tmp_path: Path) -> None:
    for number, value in enumerate(ABSURD):
        if name in ("mask_token_id", "vocab_size") and value == 10**9:
            continue  # another target may have as many tokens
        folder = written(kind, name, value, tmp_path / str(number))
        with pytest.raises(CheckpointError, match=re.escape(f"says that {name} is {shown(value)}; ")) as said:
            load_head(folder, target_layers=6)
        assert str(said.value).count(". ") == 0 and "\n" not in str(said.value)
