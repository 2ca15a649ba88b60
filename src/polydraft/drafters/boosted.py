"""Draft models that were tuned to cover what others miss, in one folder: a draft of each, and chains below."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

from typing_extensions import override

from polydraft.drafters.contract import Defaults
from polydraft.drafters.ensemble import EnsembleDrafter
from polydraft.errors import CheckpointError
from polydraft.probs import SamplingParams
from polydraft.schemes import Product
from polydraft.trees import Fixed, TreeShape

MEMBERS_FILE = "boosted.json"
MOST_BOOSTED = 8
DEPTH = 5


class BoostedDrafter(EnsembleDrafter):
    """Drafts like an ensemble, from every member's row below the root, and by the first member from there on.

    Source: SpecInfer (arXiv 2305.09781, section 3).
    """

    name = "boosted"

    @override
    def defaults(self, params: SamplingParams) -> Defaults:
        """Draw from every member's row below the root, and go on with one draft below each."""
        count = len(self.members)
        return Defaults(Product(), Fixed(TreeShape(((count,), *[(1,) * count] * (DEPTH - 1)))))


def is_boosted(name: object) -> bool:
    """Tell whether a folder holds several draft models that draft together."""
    return isinstance(name, str | Path) and (Path(os.path.expanduser(name)) / MEMBERS_FILE).is_file()


def member_folders(folder: Path, count: int) -> Sequence[Path]:
    """Return where the models of such a folder are."""
    return [folder / f"draft-{number}" for number in range(1, count + 1)]


def boosted_members(name: str | Path) -> Sequence[Path]:
    """Return where the models of such a folder are, by what it says.

    Raises:
        CheckpointError: it does not say how many there are.
    """
    folder = Path(os.path.expanduser(name))
    try:
        count = json.loads((folder / MEMBERS_FILE).read_text(encoding="utf-8"))["members"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{MEMBERS_FILE} in {folder} is damaged.") from error
    if not isinstance(count, int) or not 1 <= count <= MOST_BOOSTED:
        raise CheckpointError(
            f"{MEMBERS_FILE} in {folder} says that there are {count!r:.40} models, not 1 to {MOST_BOOSTED}."
        )
    return member_folders(folder, count)
