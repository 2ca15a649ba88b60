"""Write docs/results.md from the records in docs/results: `python docs/results/make.py`.

A record is a file that `polydraft bench ... --out docs/results/NAME.jsonl` wrote, committed as it is. The page says
nothing that is not in one, and the conditions of each stand below its table. Times of runs beside which other programs
kept the processor busy are left out; counts do not depend on that.
"""

from pathlib import Path
from typing import Any

from polydraft.bench.speed import (
    PLAIN,
    ArmResult,
    differences_in,
    equality_in_words,
    lossy_arms,
    read_speed_results,
    speed_table,
    summarise_speed,
    typical_load,
)
from polydraft.bench.speed.page import NOTHING, conditions_in_words, interval, setting_in_words
from polydraft.bench.speed.summary import overall
from polydraft.bench.table import Table

DOCS = Path(__file__).parents[1]
RECORDS, PAGE = DOCS / "results", DOCS / "results.md"
HEAD = """# Results with records

Written by `python docs/results/make.py` from the records in `docs/results`, a line for each run; a test fails where
this page and they differ. To measure again, or more: `polydraft bench ... --out docs/results/NAME.jsonl` with a new
name on a machine with nothing else to do, then the command above. Figures of runs whose records were not kept have
their dates in [performance.md](performance.md).
"""


def page() -> str:
    """Return the page of all records."""
    return "\n\n".join([HEAD.strip(), *map(section, sorted(RECORDS.glob("*.jsonl")))]) + "\n"


def section(path: Path) -> str:
    """Return what the records of a file say, with their conditions.

    Raises:
        ResultsError: the file is none of `polydraft bench`.
    """
    conditions, records = read_speed_results(path)
    results = summarise_speed(records, list(conditions["arms"]), conditions["seed"])
    busy = is_busy(conditions, typical_load(records))
    table = counts_table(results) if busy else speed_table(results, brief=False)
    arms = ", ".join(f"*{name}* is `{one['description']}`" for name, one in conditions["arms"].items())
    said = conditions_in_words(conditions, records)
    if busy:  # the last sentences say so
        said = [one for one in said if not one.startswith("Speed is ")]
        said.append("So times are left out. Tokens per call do not depend on them.")
    return "\n\n".join(
        [
            f"## `{path.name}`",
            table.as_markdown(),
            equality_in_words(results, differences_in(records), lossy_arms(conditions)),
            "\n".join(f"* {sentence}" for sentence in [f"Arms: {arms}.", *said]),
        ]
    )


def is_busy(conditions: dict[str, Any], load: float | None) -> bool:
    """Return whether other programs wanted the processor; unknown counts as busy."""
    return load is None or load > 1.5 * conditions["machine"]["threads"]


def counts_table(results: list[ArmResult]) -> Table:
    """Return tokens per call of the target, acceptance and equality, without any time."""
    rows: list[tuple[str, ...]] = []
    for setting in dict.fromkeys(one.setting for one in results):
        rows += [()] if rows else []
        rows.append((setting_in_words(setting, short=True), "", "", "", ""))
        rows += [cells(one) for one in overall(results) if one.setting == setting]
    header = ("arm", "tokens/call", "95 % interval", "acceptance by depth", "same text")
    return Table("Tokens per call of the target, all tasks", header, tuple(rows))


def cells(one: ArmResult) -> tuple[str, ...]:
    """Return a row of the table."""
    found, rates = one.block_efficiency, one.statistics.acceptance_by_depth if one.statistics else []
    return (
        f" {one.arm}",
        NOTHING if found is None else f"{found.mean:.2f}",
        NOTHING if found is None or one.arm == PLAIN else interval(found),
        " ".join(f"{rate:.2f}" for rate in rates[:8]) or NOTHING,
        NOTHING if one.equal is None or one.arm == PLAIN else f"{one.equal}/{one.runs}",
    )


if __name__ == "__main__":
    PAGE.write_text(page())
