"""A run's records in a file: conditions first, then one line per record, so that an interrupted run can go on."""

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from polydraft.bench.environment import described, versions
from polydraft.bench.fields import from_fields
from polydraft.bench.limits.measuring import Plan, Record
from polydraft.bench.limits.positions import Models
from polydraft.bench.lines import append_lines, open_lines

FILE = "limits.jsonl"


def conditions_of(models: Models, plan: Plan, names: tuple[str, str]) -> dict[str, Any]:
    """Return all that determines a run's records but prompts and temperatures.

    Args:
        models: the pair.
        plan: what is measured.
        names: the target's and the draft model's.
    """
    target, draft = models.pair.target, models.pair.draft
    return {
        "target": {"name": names[0], **described(target)},
        "draft": {"name": names[1], **described(draft)} if draft is not None else None,
        "vocabulary": models.target.vocab_size,
        **plan.conditions(),
        "versions": versions(),
    }


class Results:
    """The records of one run, in memory and, with a folder, in its file `limits.jsonl`.

    Every record is written in one piece when it is finished. A last line that was cut short by a crash is dropped.

    Args:
        conditions: what determines the records.
        folder: where the file is, or will be; None for memory only.

    Raises:
        ResultsError: the folder cannot be used, its file is damaged, or its records are of other conditions.
    """

    def __init__(self, conditions: dict[str, Any], folder: Path | None = None) -> None:
        self.conditions = json.loads(json.dumps(conditions))
        self.path = None if folder is None else folder / FILE
        kept = [] if self.path is None else open_lines(self.path, self.conditions, partial(from_fields, Record))
        self.records = {record.key: record for record in kept}

    def add(self, record: Record) -> None:
        """Keep a record, in the file first."""
        if self.path is not None:
            append_lines(self.path, [asdict(record)])
        self.records[record.key] = record
