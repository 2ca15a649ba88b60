"""Draw the pictures of README.md: `python lab/draw_pictures.py`, in a clone with `pip install ".[figures]"`.

`tree.svg` is a real step of the embedded pair. `speed.svg` shows rows of the tables of docs/performance; nothing is
measured here, so that a number stands in one place.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polydraft
from polydraft.bench.bootstrap import Estimate
from polydraft.bench.speed import ArmResult
from polydraft.bench.speed.figures import speed_ups
from polydraft.bench.speed.speed_ups import SpeedUp
from polydraft.bench.style import save

DOCS = Path(__file__).parents[1] / "docs"
PAGES = DOCS / "performance"
PICTURES = DOCS / "pictures"
PROMPT = "def read_json(path):\n    with open("
STEP = 2
"""Which step is drawn, counted from 0."""
SHOWN = {
    "Against Hugging Face's loops": {
        "default": "code pair, draft model: polydraft",
        "Hugging Face's assisted generation, as it is set": "code pair, draft model: Hugging Face",
    },
    "With its draft head, on Spec-Bench": {"default": "SmolLM2, its draft head: polydraft"},
    "Drafting without training, on Spec-Bench": {
        "merge": "SmolLM2, text drafters: polydraft",
        "Hugging Face's prompt lookup": "SmolLM2, prompt lookup: Hugging Face",
    },
}
"""Section of a page of docs/performance -> arm as its table names it -> name in the picture."""
CELL = re.compile(r"\**([\d.]+)x\**(?: \(([\d.]+) to ([\d.]+)\))?")


def tree() -> str:
    """Return a drawing of one step: the tree that was drafted, and the path that was kept."""
    pair = polydraft.load_pair()
    prompt = pair.tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    run = polydraft.stream(pair.target, prompt, drafter=pair.draft, temperature=0, max_new_tokens=29)
    block = [next(run) for _ in range(STEP + 1)][-1]
    path = block.verdict.path[0, : int(block.verdict.length[0])].tolist()
    return polydraft.draw_svg(block.tree, lambda token: str(pair.tokenizer.decode([token])), path)


def measured() -> str:
    """Return the pages of what was measured, one after the other."""
    return "\n".join(path.read_text() for path in sorted(PAGES.glob("*.md")))


def rows_of(page: str, section: str) -> Iterator[list[str]]:
    """Return the cells of the first table with speed-ups below a heading."""
    text = re.split(rf"^##+ {re.escape(section)}$", page, flags=re.MULTILINE)[1]
    lines = iter(text[text.index("| arm |") :].splitlines())
    for line in lines:
        if not line.startswith("|"):
            return
        yield [cell.strip() for cell in line.strip("|").split("|")]


def results(page: str) -> list[ArmResult]:
    """Return what the tables say of the arms that are shown, as the benchmark's own values."""
    found: list[ArmResult] = []
    for section, arms in SHOWN.items():
        rows = {cells[0]: cells for cells in rows_of(page, section)}
        for arm, name in arms.items():
            for temperature, column in ((0.0, 2), (1.0, 5)):
                match = CELL.fullmatch(rows[arm][column])
                if match is None:
                    raise ValueError(f"{arm} of {section!r} has no speed-up in column {column}: {rows[arm]}")
                speed = Estimate(
                    float(match[1]), *(None if part is None else float(part) for part in match.groups()[1:])
                )
                rest: dict[str, Any] = dict.fromkeys(("block_efficiency", "statistics", "memory", "equal", "bound"))
                rate = float(rows[arm][column - 1])
                up = SpeedUp(total=speed, paired=speed, by_prompt=())
                found.append(ArmResult(name, "all", temperature, 1, 0, 0, rate, up, setup={}, **rest))
    return found


def draw(folder: Path) -> list[Path]:
    """Write both pictures into a folder."""
    page = measured()
    (folder / "tree.svg").write_text(tree())

    def figure() -> Any:
        drawn = speed_ups(results(page), "")
        drawn.suptitle("Times as fast as plain decoding (1), with 95 % intervals; two CPU cores, batch 1", fontsize=10)
        return drawn

    return [folder / "tree.svg", save(figure, folder / "speed.svg")]


if __name__ == "__main__":
    draw(PICTURES)
