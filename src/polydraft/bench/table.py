"""Tables of text: for Markdown, and cut to a terminal's width; means with their intervals as cells."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from polydraft.bench.bootstrap import Estimate

Item = TypeVar("Item")
Key = TypeVar("Key")


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Return items by what they have in common, in the order in which they come."""
    groups: dict[Key, list[Item]] = {}
    for one in items:
        groups.setdefault(key(one), []).append(one)
    return groups


@dataclass(frozen=True)
class Table:
    """A table of text: what it shows, the columns' names, and rows, of which an empty one separates groups."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    @classmethod
    def of_groups(
        cls, title: str, header: Sequence[str], groups: Iterable[tuple[Sequence[str], Iterable[Sequence[str]]]]
    ) -> "Table":
        """Return a table of groups, each with the first cells of the line that heads it and its rows, indented."""
        rows = list[tuple[str, ...]]()
        for heading, lines in groups:
            rows += [(), (*heading, *[""] * (len(header) - len(heading)))]
            rows += [(f" {name}", *cells) for name, *cells in lines]
        return cls(title, tuple(header), tuple(rows[1:]))

    def as_markdown(self) -> str:
        """Return the table in GitHub's Markdown."""
        align = ["---"] + ["---:"] * (len(self.header) - 1)
        rows = ((f"*{row[0]}*" if not row[0].startswith(" ") else row[0].strip(), *row[1:]) for row in self.rows if row)
        lines = (self.header, tuple(align), *rows)
        return "\n".join([f"**{self.title}**", "", *("| " + " | ".join(map(_cell, row)) + " |" for row in lines)])

    def split(self, width: int) -> list["Table"]:
        """Return tables whose lines have at most so many characters, or one column beside the first."""
        names, *columns = [
            max(map(len, column)) + 2 for column in zip(*filter(None, (self.header, *self.rows)), strict=True)
        ]
        groups: list[list[int]] = []
        left = 0
        for place, needed in enumerate(columns, start=1):
            if not groups or needed > left:
                groups.append([])
                left = width - names
            groups[-1].append(place)
            left -= needed
        return [self._part(group) for group in groups]

    def _part(self, places: list[int]) -> "Table":
        header, *rows = [
            tuple(row[place] for place in (0, *places)) if row else () for row in (self.header, *self.rows)
        ]
        return Table(self.title, header, tuple(rows))


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").splitlines())


def spread(one: Estimate, scale: float, digits: int, *, brief: bool) -> str:
    """Return a mean and, unless it is to be brief, half its interval's width; no minus or ±0 with a zero."""
    mean = f"{round(scale * one.mean, 9):.{digits}f}"  # 1.875 less a rounding error is 1.88 too
    mean = mean if mean.strip("-0.") else mean.removeprefix("-")
    if brief or one.low is None or one.high is None:
        return mean
    half = f"{scale * (one.high - one.low) / 2:.{digits}f}"
    return f"{mean} ±{half}" if (mean + half).strip("0.") else mean
