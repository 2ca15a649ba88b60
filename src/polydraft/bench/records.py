"""A run's records in a file: conditions first, then one line per record, so that an interrupted run can go on."""

import json
import os
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import nn

from polydraft.bench.limits import Plan, Record
from polydraft.bench.positions import Models
from polydraft.errors import ResultsError

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
        "target": {"name": names[0], **_described(target)},
        "draft": {"name": names[1], **_described(draft)} if draft is not None else None,
        "vocabulary": models.target.vocab_size,
        **plan.conditions(),
        "versions": {"polydraft": version("polydraft"), "torch": torch.__version__},
    }


def _described(model: nn.Module) -> dict[str, object]:
    """Return a model's size, precision and device, and a number that tells its weights from others."""
    weights = list(model.parameters())
    mark = 0
    for one in weights:
        mark = crc32(one.detach().flatten()[:256].double().cpu().numpy().tobytes(), mark)
    return {
        "parameters": sum(one.numel() for one in weights),
        "dtype": str(weights[0].dtype).removeprefix("torch."),
        "device": weights[0].device.type,
        "weights": f"{mark:08x}",
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
        self.records: dict[tuple[str, str, float], Record] = {}
        if self.path is not None:
            try:
                self._open(self.path)
            except OSError as error:
                raise ResultsError(f"{self.path}: the results cannot be kept there: {error.strerror}.") from error

    def add(self, record: Record) -> None:
        """Keep a record, in the file first."""
        if self.path is not None:
            _append(self.path, asdict(record))
        self.records[record.key] = record

    def _open(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        text = path.read_bytes() if path.exists() else b""
        whole = text[: text.rfind(b"\n") + 1]
        if len(whole) < len(text):
            os.truncate(path, len(whole))
        if not whole:
            _append(path, {"conditions": self.conditions})
        for number, line in enumerate(whole.splitlines(), start=1):
            self._take(path, number, line)

    def _take(self, path: Path, number: int, line: bytes) -> None:
        try:
            row = json.loads(line)
            theirs = row["conditions"] if number == 1 else None
            record = None if number == 1 else Record(**row)
        except (ValueError, KeyError, TypeError) as error:
            raise ResultsError(f"{path}, line {number}: this is no line of results; give another folder.") from error
        if record is not None:
            self.records[record.key] = record
        elif theirs != self.conditions:
            raise ResultsError(
                f"{path} is of a run with other settings: {'; '.join(differences(theirs, self.conditions))}. "
                "Give another folder, or these settings."
            )


def _append(path: Path, row: dict[str, Any]) -> None:
    """Write one line at the end of a file by one call of the system."""
    line = json.dumps(row, ensure_ascii=False).encode() + b"\n"
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, line)
        os.fsync(file)
    finally:
        os.close(file)


def differences(theirs: Any, ours: Any, name: str = "") -> list[str]:
    """Say in which settings two nested dictionaries differ."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        fields = dict.fromkeys([*theirs, *ours])
        found = (differences(theirs.get(one), ours.get(one), f"{name} {one}".strip()) for one in fields)
        return [one for some in found for one in some]
    return [] if theirs == ours else [f"{name or 'the header'} is {theirs} there and {ours} here"]
