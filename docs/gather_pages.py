"""Gather the pages of the site: `python docs/gather_pages.py`, which `make site` runs before mkdocs.

The site is the pages of docs/, README.md as its first page, CONTRIBUTING.md and CHANGELOG.md, and a reference: a
page for each room of names, which mkdocstrings fills from their docstrings. The names are read from the source, so that
neither torch nor the package need be there. Pages are written to build/pages, with links that lead there.
"""

import ast
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "polydraft"
OUT = ROOT / "build" / "pages"
OUTSIDE = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Pages beside docs/, and where they stand in the site."""
WHOLE = {
    "bench.aligning": "Drafts for one's own target",
    "conformance": "Proofs of rules and tests of drafters",
    "drafters": "Drafters",
    "engine": "Generation: calls and runs",
    "planning": "Plans and planners: the tree for a pair and a machine, and that of every step",
    "reading": "Reading text with a model, for drafters",
    "schemes": "Laws of drafts",
    "server": "The server",
    "theory": "Optima and what a rate is worth",
    "trees": "Trees and policies",
    "verifiers": "Verification rules",
}
"""Rooms of which every exported name has its place: their names are what drafters, rules and programs are made of."""
PUBLIC = {
    "catalogue": "Words for trees",
    "fetching": "Downloads",
    "models": "Models, tokenizers and grammars",
    "probs": "Sampling",
}
"""Rooms of which only those names have a place that `polydraft` itself has."""
MODULES = {"errors": "Errors", "rows": "Rows of a batch, and states that go with them"}
"""Rooms that are one file, shown whole."""
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")


def public_names() -> dict[str, list[str]]:
    """Return the names of `polydraft`, by the room that they come from."""
    body = ast.parse((PACKAGE / "__init__.pyi").read_text()).body
    return {one.module or "": [name.name for name in one.names] for one in body if isinstance(one, ast.ImportFrom)}


def exported(room: str) -> list[str]:
    """Return `__all__` of a room."""
    body = ast.parse((PACKAGE / room.replace(".", "/") / "__init__.py").read_text()).body
    values = {ast.unparse(one.targets[0]): one.value for one in body if isinstance(one, ast.Assign)}
    return ast.literal_eval(values["__all__"])


def reference() -> Iterator[tuple[str, str]]:
    """Yield the pages of the reference: a path and its text."""
    public = public_names()
    lines = [
        "# Reference",
        "Every name of `polydraft`, and of its rooms what drafters, rules and programs are made of. "
        "`polydraft.__version__` is the version, as a string.",
    ]
    for room, title in sorted((WHOLE | PUBLIC | MODULES).items()):
        here = public.get(room, [])
        rest = [name for name in exported(room) if name not in here] if room in WHOLE else []
        text = f"# {title}\n\n"
        if room in MODULES:
            text += f"::: polydraft.{room}\n    options:\n      show_root_heading: false\n"
        else:
            text += _part("Names of `polydraft`", room, here) + _part(f"More names of `polydraft.{room}`", room, rest)
        name = f"{room.replace('.', '_')}.md"
        named = ", ".join(f"[`{one}`][polydraft.{room}.{one}]" for one in here)
        lines.append(f"* [{title}]({name}): `polydraft.{room}`" + (f" has {named}" if named else ""))
        yield f"reference/{name}", text
    yield "reference/index.md", "\n\n".join(lines[:2]) + "\n\n" + "\n".join(lines[2:]) + "\n"


def _part(title: str, room: str, names: list[str]) -> str:
    return f"## {title}\n\n" + "".join(f"::: polydraft.{room}.{one}\n\n" for one in names) if names else ""


def place(path: Path) -> str | None:
    """Return where a file of the repository stands in the site, or None."""
    name = path.relative_to(ROOT).as_posix()
    if name in OUTSIDE:
        return OUTSIDE[name]
    return name.removeprefix("docs/") if name.startswith("docs/") and path.suffix in (".md", ".svg") else None


def relinked(text: str, page: Path) -> str:
    """Let the links of a page lead to places in the site; what has none there is named without a link."""

    def link(found: re.Match[str]) -> str:
        label, (to, _, heading) = found[1], found[2].partition("#")
        if "://" in found[2] or not to:
            return found[0]
        goal = place(Path(os.path.normpath(page.parent / to)))
        if goal is None:
            return label
        way = os.path.relpath(goal, os.path.dirname(place(page) or "") or ".")
        return f"[{label}]({way}{'#' + heading if heading else ''})"

    pieces = re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)
    return "".join(one if one.startswith("```") else LINK.sub(link, one) for one in pieces)


def gather(out: Path) -> list[Path]:
    """Write all pages and pictures of the site into an empty folder, and return the pages."""
    shutil.rmtree(out, ignore_errors=True)
    pages = []
    for path in sorted([*(ROOT / name for name in OUTSIDE), *(ROOT / "docs").rglob("*")]):
        if goal := place(path):
            (out / goal).parent.mkdir(parents=True, exist_ok=True)
            if path.suffix == ".md":
                (out / goal).write_text(relinked(path.read_text(), path))
                pages.append(out / goal)
            else:
                shutil.copy(path, out / goal)
    for goal, text in reference():
        (out / goal).parent.mkdir(parents=True, exist_ok=True)
        (out / goal).write_text(text)
        pages.append(out / goal)
    return pages


if __name__ == "__main__":
    print(f"{len(gather(OUT))} pages in {OUT.relative_to(ROOT)}.")
