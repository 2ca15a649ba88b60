"""A run's records in a file: conditions first, then one line per record, so that an interrupted run can go on."""

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from polydraft.bench.environment import described, versions
from polydraft.bench.result_lines import from_fields, keep_lines, open_lines
from polydraft.catalogue import digests
from polydraft_lab.limits.measuring import LimitsSettings, Record
from polydraft_lab.limits.positions import Models

FILE = "limits.jsonl"
ROUNDING = 1e-3
DEEPEST = 10_000
"""More drafts than any path of a tree has."""


def conditions_of(
    models: Models,
    settings: LimitsSettings,
    names: tuple[str, str],
    chat_template: bool | None = None,
    drafter: str | None = None,
) -> dict[str, Any]:
    """Return all that determines a run's records but prompts and temperatures.

    Args:
        models: the pair.
        settings: what is measured.
        names: the target's and the draft model's.
        chat_template: which prompts go through a chat template: None for conversations, True for all, False for none.
        drafter: the word of the drafter whose drafts are measured; None for a draft model's rows.
    """
    target, draft = models.pair.target, models.pair.draft
    return {
        "target": {"name": names[0], **described(target)},
        "draft": {"name": names[1], **described(draft)} if draft is not None else None,
        "vocabulary": models.target.facts.vocab_size,
        **settings.conditions(),
        **({} if drafter is None else {"drafter": drafter}),
        **({"files": digests()} if digests() else {}),
        **({} if chat_template is None else {"chat_template": chat_template}),
        "versions": versions(),
    }


def record_of(settings: LimitsSettings | None, row: dict[str, Any]) -> Record:
    """Return the record of a line.

    Raises:
        ValueError: it is none, or none of such a settings.
    """
    record = from_fields(Record, row)
    most = 2**31
    if not (1 <= record.positions < most and 0 <= record.tree_positions < most and 0 <= record.temperature < most):
        raise ValueError("a number is negative or too large, or there are no positions")
    if settings is None:
        return record
    nodes = {scheme: {k: {*rules} for k, rules in by_k.items()} for scheme, by_k in record.nodes.items()}
    trees = {shape: {scheme: {*rules} for scheme, rules in found.items()} for shape, found in record.trees.items()}
    if nodes != settings.layout() or trees != (settings.tree_layout() if record.tree_positions else {}):
        raise ValueError("its rules, schemes or trees are not those that are measured")
    sums = [value for by_k in record.nodes.values() for rules in by_k.values() for value in rules.values()]
    on_trees = [value for found in record.trees.values() for rules in found.values() for value in rules.values()]
    if not all(-ROUNDING <= value <= record.positions + ROUNDING for value in sums):
        raise ValueError("a rule accepts more than every draft, or less than none")
    if not all(-ROUNDING <= value <= record.tree_positions * DEEPEST for value in on_trees):
        raise ValueError("a rule for trees accepts more than every draft, or less than none")
    return record


class Results:
    """The records of one run, in memory and, with a folder, in its file `limits.jsonl`.

    Every record is written in one piece when it is finished. A last line that was cut short by a crash is dropped.

    Args:
        conditions: what determines the records.
        folder: where the file is, or will be; None for memory only.

        settings: what is measured, by which the records are checked; None for no check but of types.

    Raises:
        ResultsError: the folder cannot be used, its file is damaged, or its records are of other conditions.
    """

    def __init__(
        self, conditions: dict[str, Any], folder: Path | None = None, settings: LimitsSettings | None = None
    ) -> None:
        self.conditions = json.loads(json.dumps(conditions))
        self.path = None if folder is None else folder / FILE
        kept = [] if self.path is None else open_lines(self.path, self.conditions, partial(record_of, settings))
        self.records = {record.key: record for record in kept}

    def add(self, record: Record) -> None:
        """Keep a record, in the file first."""
        if self.path is not None:
            keep_lines(self.path, [asdict(record)])
        self.records[record.key] = record
