"""The words of models and prompts that are neither folders nor hub names, and where what they mean lies.

What `polydraft fetch` brings lies in one folder of the user's cache once it is there; what ships, in the package.
"""

import os
import re
from importlib.resources import files
from pathlib import Path

from platformdirs import user_cache_path

PLACE = "POLYDRAFT_CACHE"
"""The environment variable that names another folder for what is fetched."""
MODELS = ("smollm2",)
DATA = Path(str(files("polydraft") / "data"))
SHIPPED = {
    "pair": DATA / "pair" / "target",
    "pair-draft": DATA / "pair" / "draft",
    "pair-head": DATA / "pair" / "head",
    "smollm2-head": DATA / "smollm2" / "head",
}
"""Folders of the embedded pair, of the head for its target, and of the head for what `fetch smollm2` brings."""
DERIVED = "self:"
"""How the names of drafts begin that are the target itself in part."""
MADE = ("self:int8", "self:int4", "self:skip=12-19", "self:exit=8")
"""Examples of them."""
STACKED = re.compile(r"<|@\d+(?:[\s)]|$)")
"""What a stack of drafters has, and no name on the hub."""
MODULES = "mtp"
"""The word for the MTP modules in the target's own checkpoint."""
PROMPTS = ("spec-bench",)


def is_derived(name: object) -> bool:
    """Tell whether a name means a draft model made of the target."""
    return isinstance(name, str) and name.startswith(DERIVED) and not is_stack(name)


def is_stack(name: object) -> bool:
    """Tell whether a name means drafters one upon the other, such as "pair-draft < ngram"; a folder goes before."""
    return isinstance(name, str) and STACKED.search(name) is not None and not os.path.lexists(os.path.expanduser(name))


def cache_folder() -> Path:
    """Return the folder of all that is fetched; it need not be there yet."""
    named = os.environ.get(PLACE)
    return Path(os.path.expanduser(named)) if named else user_cache_path("polydraft", appauthor=False)


def is_there(word: str) -> bool:
    """Tell whether something was fetched."""
    return place(word).is_file() if word in PROMPTS else place(word).is_dir()


def place(word: str) -> Path:
    """Return where something lies once it is fetched: a model's folder, or a file of prompts.

    What is there is complete: it is made elsewhere, and takes this name last.
    """
    return cache_folder() / (f"{word}.jsonl" if word in PROMPTS else word)
