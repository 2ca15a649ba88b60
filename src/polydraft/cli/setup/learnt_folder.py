"""`polydraft learn show`, `forget` and `pin`: a folder of versions that a server's draft learnt."""

from pathlib import Path
from typing import Any

from rich.table import Table

from polydraft.cli.printing import console, print_json_line
from polydraft.errors import InvalidParameter, ResultsError
from polydraft.models.checkpoints.weight_versions import ORIGIN, VersionFolder, VersionInUse
from polydraft.options.commands.making_options import LearnForgetOptions, LearnPinOptions, LearnShowOptions

NEWEST = "newest"
SHIPPED = "the weights before all learning"


def run_learn_show(options: LearnShowOptions) -> int:
    """Tell which versions there are; return the exit code 0.

    Raises:
        InvalidParameter: the folder holds none.
    """
    folder = opened(options.folder)
    own, versions = folder.in_use(), folder.versions()
    if options.as_json:
        told = [{"version": one.name, **one.facts} for one in versions]
        print_json_line({**facts_of(folder, own), "versions": told})
        return 0
    screen = console()
    screen.print(in_words(folder, own), soft_wrap=True)
    table = Table("version", "look", "saved", "± error", "texts", "tokens", "learnt from", "in use")
    for one in versions:
        facts = one.facts
        shares = [f"{facts[name]:.2%}" if name in facts else "" for name in ("saving", "error")]
        counts = [f"{facts[name]:,}" if name in facts else "" for name in ("held_out_texts", "held_out_tokens")]
        learnt = f"{facts['lessons']:,} texts" if "lessons" in facts else ""
        used = "yes" if one.name == own.version else ""
        table.add_row(one.name, str(facts.get("look", "")), *shares, *counts, learnt, used)
    if versions:
        screen.print(table)
    return 0


def run_learn_forget(options: LearnForgetOptions) -> int:
    """Drop everything that was learnt; return the exit code 0.

    Raises:
        InvalidParameter: the folder holds no versions.
        ResultsError: they cannot be deleted.
    """
    folder = opened(options.folder)
    try:
        count = folder.forget()
    except OSError as error:
        raise ResultsError(f"{folder.path} cannot be changed: {error.strerror or error}.") from error
    if options.as_json:
        print_json_line({"folder": str(folder.path), "forgotten": count})
        return 0
    noun = "version was" if count == 1 else "versions were"
    console().print(
        f"{count} {noun} dropped; a running server drops its texts within seconds, and drafts with {SHIPPED}.",
        soft_wrap=True,
    )
    return 0


def run_learn_pin(options: LearnPinOptions) -> int:
    """Fix the version that is used, or let the newest be used again; return the exit code 0.

    Raises:
        InvalidParameter: the folder holds no versions, or not this one.
        ResultsError: it cannot be written.
    """
    folder = opened(options.folder)
    try:
        own = folder.pin(None if options.version == NEWEST else options.version)
    except OSError as error:
        raise ResultsError(f"{folder.path} cannot be changed: {error.strerror or error}.") from error
    if options.as_json:
        print_json_line(facts_of(folder, own))
        return 0
    console().print(in_words(folder, own), soft_wrap=True)
    return 0


def opened(path: Path) -> VersionFolder:
    """Return a folder that a server has learnt into.

    Raises:
        InvalidParameter: it is none.
    """
    if not (path / ORIGIN).is_file():
        raise InvalidParameter(f"{path} holds nothing that was learnt: name the folder of `polydraft serve --learn`.")
    return VersionFolder(path)


def facts_of(folder: VersionFolder, own: VersionInUse) -> dict[str, Any]:
    """Return which version is used."""
    return {"folder": str(folder.path), "in_use": own.version or None, "look": own.look, "pinned": own.pinned}


def in_words(folder: VersionFolder, own: VersionInUse) -> str:
    """Return which version is used, for people."""
    used = f"version {own.version}" if own.version else SHIPPED
    pinned = "; this is pinned, and nothing is learnt" if own.pinned else ""
    looks = "1 comparison" if own.look == 1 else f"{own.look:,} comparisons"
    return f"{folder.path}: drafts come from {used}, after {looks}{pinned}."
