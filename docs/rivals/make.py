"""Write the tables of docs/rivals.md from the records of `lab/rivals.py`: `python docs/rivals/make.py RECORDS`.

A record is a line of JSON: the conditions, a text that was written, a tool's versions, or a tool that is missing, and
why. Nothing in the tables comes from elsewhere.
"""

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adapters import DRAFTS, PLAIN
from installing import WEIGHTS

Record = dict[str, Any]
PAGE = Path(__file__).parents[1] / "rivals.md"
MARKED = re.compile(r"(<!-- table: rivals -->\n)(.*?)(<!-- end of table -->)", re.DOTALL)
CELL = ("tool", "weights", "temperature", "arm")
"""What tells texts of one prompt apart."""
OURS = ("polydraft", "float32")
NOTHING = "-"


def read(path: Path) -> list[Record]:
    """Return the records of a file; a last line that was cut off does not count."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def key_of(record: Record) -> tuple[object, ...]:
    """Return what tells a text from all others; other records have keys of no text."""
    return tuple(record.get(name) for name in (*CELL, "prompt"))


def texts(records: Sequence[Record], *cell: object) -> dict[int, Record]:
    """Return the texts of a tool, its weights, a temperature and an arm, by the number of the prompt."""
    return {one["prompt"]: one for one in records if cell == tuple(one.get(name) for name in CELL)}


def speed(records: Sequence[Record], *cell: object) -> float | None:
    """Return all tokens over all seconds."""
    found = texts(records, *cell).values()
    return sum(one["new_tokens"] for one in found) / sum(one["seconds"] for one in found) if found else None


def table(records: Sequence[Record]) -> str:
    """Return the table of speeds and gains, without tools of which nothing was measured."""
    temperatures = sorted({one["temperature"] for one in records if "seconds" in one})
    titles = [f"T = {one:g}: {title}" for one in temperatures for title in ("plain", "drafts", "gain")]
    lines = [["tool, weights", *titles, "same text"], ["---"] + ["---:"] * (len(titles) + 1)]
    for tool, kinds in WEIGHTS.items():
        for weights in kinds:
            speeds = [(speed(records, tool, weights, one, arm)) for one in temperatures for arm in (PLAIN, DRAFTS)]
            if any(speeds):
                same = equal(texts(records, tool, weights, 0, PLAIN), texts(records, *OURS, 0, PLAIN))
                pairs = zip(speeds[::2], speeds[1::2], strict=True)
                lines.append([f"{tool} {weights}", *(cell for pair in pairs for cell in cells(*pair)), same])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cells(plain: float | None, drafts: float | None) -> list[str]:
    """Return two speeds and their quotient."""
    gain = f"{drafts / plain:.2f}x" if plain and drafts else NOTHING
    return [*(f"{one:.1f}" if one else NOTHING for one in (plain, drafts)), gain]


def equal(theirs: dict[int, Record], ours: dict[int, Record]) -> str:
    """Say how many texts are equal, token for token."""
    both = theirs.keys() & ours.keys()
    return f"{sum(theirs[one]['mark'] == ours[one]['mark'] for one in both)}/{len(both)}" if both else NOTHING


def conditions(records: Sequence[Record]) -> list[str]:
    """Say where and how the records were measured, and what is missing."""
    told = next(one["conditions"] for one in records if "conditions" in one)
    loads = [one["load"] for one in records if one.get("load") is not None]
    dates = sorted({one["date"] for one in records if "date" in one})
    versions = {one["tool"]: one["versions"] for one in records if "versions" in one}
    packages = sorted({f"{name} {number}" for one in versions.values() for name, number in one.items()})
    measured = {tuple(one[name] for name in CELL[:2]) for one in records if "seconds" in one}
    missing = {(one["missing"], one["weights"]): one["why"] for one in records if "missing" in one}
    return [
        f"Machine: {told['processor']}, {told['cores']} cores, {told['threads']} threads; up to {max(loads):.1f} "
        "threads of all programs wanted to run.",
        f"Model: {told['model']}. Prompts: the first {told['limit']} of {told['prompts']}, through the chat template, "
        f"{min(told['lengths'])} to {max(told['lengths'])} tokens; {told['max_new_tokens']} new tokens each, batch 1.",
        f"Date: {' and '.join(dict.fromkeys((dates[0], dates[-1])))}. Versions: {', '.join(packages)}.",
        *(f"Missing: {' '.join(one)}, {why}." for one, why in missing.items() if one not in measured),
    ]


def write_page(records: Sequence[Record], page: Path = PAGE) -> str:
    """Put the table and its conditions between the marks of the page; return them.

    Raises:
        ValueError: the page has no marks.
    """
    said = f"{table(records)}\n\n" + "".join(f"* {one}\n" for one in conditions(records))
    text, count = MARKED.subn(lambda mark: mark[1] + said + mark[3], page.read_text())
    if not count:
        raise ValueError(f"{page.name} has no marks of the table")
    page.write_text(text)
    return said


if __name__ == "__main__":
    print(write_page(read(Path(sys.argv[1]))))
