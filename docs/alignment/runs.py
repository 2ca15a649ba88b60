"""Run `polydraft align`, keep what it prints with its conditions, and write the table of docs/alignment.md.

    python docs/alignment/runs.py "the embedded target, alone" pair --prompts FILE --minutes 35 --out FOLDER
    python docs/alignment/runs.py                                        # the table alone

A line of docs/alignment/runs.jsonl is a run: its arguments but for folders, and what `--json` prints. Lines with
`rounded` were typed from a page, since what the command printed was not kept.
"""

import argparse
import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from polydraft.bench.environment import machine

RECORD, PAGE = Path(__file__).with_suffix(".jsonl"), Path(__file__).parents[1] / "alignment.md"
MARKS = "<!-- table: runs -->\n", "<!-- end of runs -->"
COMMAND = "from polydraft_command import main; main()"
FOLDERS = "--draft", "--prompts", "--out", "--work"
"""Options whose values are places on this machine."""
COLUMNS = (
    *("run", "`--minutes`", "what came of it", "tokens per call", "times plain"),
    *("times the best before", "verdict"),
)


def run(name: str, arguments: list[str]) -> dict[str, Any]:
    """Run the command, and return what it says."""
    command = [sys.executable, "-c", COMMAND, "align", *arguments, "--json"]
    said = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=False).stdout)
    asked = ["..." if before in FOLDERS else one for before, one in pairwise(arguments)]
    return {"run": name, "asked": asked, "machine": machine(torch.device("cpu")), **said, "folder": None}


def row(line: dict[str, Any]) -> str:
    """Return a run as a row of the table; two figures are those of temperatures 0 and 1."""
    judged, curve = line["verdict"]["judged"], line["curve"]
    best = max(curve, key=lambda one: one["score"]) if curve else None
    over = [one["over_plain"].get("after") for one in judged]
    refused = "refused" if best is None else "*better*" if line["verdict"]["better"] else "*no better*"
    cells = [
        line["run"] + ("\\*" if "rounded" in line else ""),
        line["asked"][line["asked"].index("--minutes") + 1],
        line["verdict"]["reason"] if best is None else made(line, best["step"]),
        ", ".join(f"{one:.2f}" for one in best["calls"].values()) if best else "",
        ", ".join(f"{one['mean']:.2f}" for one in over if one),
        ", ".join("{mean:.3f} ({low:.3f} to {high:.3f})".format(**one["ratio"]) for one in judged),
        refused,
    ]
    return f"| {' | '.join(cells)} |"


def made(line: dict[str, Any], step: int | None) -> str:
    """Say what came of a run, as far as it is known."""
    loss, steps = f" by `{line['loss']}`" if line["loss"] else "", f", {step} steps" if step else ""
    return f"`{line['form']}`{loss}{steps}"


def table() -> str:
    """Return all runs of the record."""
    lines = map(json.loads, RECORD.read_text().splitlines())
    return "\n".join([f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}", *map(row, lines), ""])


def main() -> None:
    """Add a run, if one is asked for, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", help="what the row is called")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of `polydraft align`")
    given = parser.parse_args()
    if given.arguments:
        line = run(given.name, given.arguments)
        with RECORD.open("a") as file:
            file.write(json.dumps(line) + "\n")
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(MARKS[0])
    PAGE.write_text(before + MARKS[0] + table() + MARKS[1] + rest.split(MARKS[1])[1], encoding="utf-8")


if __name__ == "__main__":
    main()
