"""The table of draft heads: what each learnt and costs, and what it brings, beside plain decoding."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polydraft.bench.speed import PLAIN, ArmResult, read_speed_results, summarise_speed
from polydraft.bench.speed.page import NOTHING, conditions_in_words, interval
from polydraft.bench.speed.summary import overall
from polydraft.bench.table import Table

HEADS = "heads"
"""The part of a record's conditions that tells what each head learnt, by the name of its arm."""
COLUMNS = ("head", "M parameters", "trained, s", "tokens learnt", "overlap by draft", "law of a row")
DRIFTED = ("KL per token", "same choice")
"""Columns that are there where a target learnt with its head."""
MEASURED = ("tokens/call", "95 %", "speed-up", "95 %", "draft, passes")
HEAD = """# Draft heads in one table

Written by `polydraft bench heads` from the records in `docs/heads`; a test fails where this page and they differ. All
heads of a target learnt from the same text, by the same number of steps or, with `--seconds`, for the same time;
*untrained* has the weights that it began with. Overlap is the mean of sum_x min(target, head) on held-out text, given
the text's own tokens above a draft. A row's law is that of its *path*, which knows the tokens drafted above it, or of
its *slot*, which is the same for all nodes of a depth. All draft chains of five. *Draft, passes* is what drafting takes
of a step, in plain passes.
Where the target learnt too (`medusa-2`, `space`), the arm runs the tuned target, and its texts are exact for that one
only: *KL per token* is KL(original || tuned), and *same choice* how often both have the same likeliest token.
"""


def records_of_heads(folder: Path) -> list[Path]:
    """Return a folder's records of heads: files of JSON lines whose first line tells of some."""
    found = list[Path]()
    for path in sorted(folder.glob("*.jsonl")):
        with path.open(encoding="utf-8", errors="replace") as file:
            found += [path] if f'"{HEADS}": {{' in file.readline() else []
    return found


def head_page(records: Sequence[Path]) -> str:
    """Return the page of all records.

    Raises:
        ResultsError: a file is no record of heads.
    """
    return "\n\n".join([HEAD.strip(), *map(_section, records)]) + "\n"


def _section(path: Path) -> str:
    conditions, records = read_speed_results(path)
    results = overall(summarise_speed(records, list(conditions["arms"]), conditions["seed"]))
    table = head_table(conditions[HEADS], results, conditions["target"]["name"])
    said = conditions_in_words(conditions, records)
    return "\n\n".join(
        [f"## {conditions['target']['name']}", table.as_markdown(), "\n".join(f"* {one}" for one in said)]
    )


def head_table(heads: Mapping[str, Mapping[str, Any]], results: Sequence[ArmResult], name: str) -> Table:
    """Return what is known of heads beside what was measured, one row for each arm, its temperatures side by side."""
    temperatures = sorted({one.temperature for one in results})
    plain = {one.temperature: one for one in results if one.arm == PLAIN}
    found = {(one.arm, one.temperature): one for one in results}
    drifted = any(one.get("divergence") is not None for one in heads.values())
    known = (*COLUMNS, *(DRIFTED if drifted else ()))
    header = (*known, *(f"T = {at:g}: {column}" for at in temperatures for column in MEASURED))
    rows = list[tuple[str, ...]]()
    for arm in dict.fromkeys(one.arm for one in results if one.arm != PLAIN):
        head = heads.get(arm, {})
        learnt = (*_learnt(head), *(_drifted(head) if drifted else ()))
        rows.append((f" {arm}", *learnt, *(c for at in temperatures for c in _cells(found[arm, at], plain[at]))))
    return Table(f"Heads of {name}", header, tuple(rows))


def _learnt(head: Mapping[str, Any]) -> tuple[str, ...]:
    if not head:
        return (NOTHING,) * (len(COLUMNS) - 1)
    overlaps = " ".join(f"{one:.2f}" for one in head["overlap"])
    seconds, tokens = f"{head['seconds']:.0f}", f"{head['tokens']:,}"
    return f"{head['parameters'] / 1e6:.2f}", seconds, tokens, overlaps, head["law"]


def _drifted(head: Mapping[str, Any]) -> tuple[str, ...]:
    if head.get("divergence") is None:
        return (NOTHING,) * len(DRIFTED)
    return f"{head['divergence']:.4f}", f"{head['agreement']:.1%}"


def _cells(one: ArmResult, plain: ArmResult) -> tuple[str, ...]:
    calls, total = one.block_efficiency, one.speed_up.total
    mean, told = (NOTHING, NOTHING) if calls is None else (f"{calls.mean:.2f}", interval(calls))
    return mean, told, f"{total.mean:.2f}x", interval(total), _drafting(one, plain)


def _drafting(one: ArmResult, plain: ArmResult) -> str:
    """Return the time that drafting takes of a step, in plain passes."""
    own, base = one.statistics, plain.statistics
    if own is None or base is None or not own.steps or not base.seconds.get("target"):
        return NOTHING
    return f"{own.seconds.get('draft', 0.0) / own.steps / (base.seconds['target'] / base.steps):.2f}"
