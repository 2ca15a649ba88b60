"""What is asked of an alignment, and what became of it."""

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from polydraft.bench.aligning.draft_card import CurvePoint
from polydraft.bench.aligning.form_costs import FormCost
from polydraft.bench.aligning.judging import AlignmentVerdict
from polydraft.bench.speed import SpeedSettings
from polydraft.errors import InvalidParameter, hint
from polydraft.probs import UNFILTERED, SamplingParams, filters_in_force
from polydraft.training.alignment.draft_forms import FORMS, draft_form

AUTO = "auto"
LEAST_MINUTES, MOST_BYTES = 0.2, 8_000_000_000


@dataclass(frozen=True, kw_only=True)
class AlignPlan:
    """What is asked for.

    Args:
        out: the folder of the draft.
        work: what the stages leave, to go on from; None for `out` with "-work" behind it.
        minutes: the time of all stages together.
        forms: which are looked at, of `FORMS`; () or "auto" alone for what can pay.
        losses: which are tried; () for the usual ones of each form.
        temperatures: which are served.
        filters: which are served (top_k, top_p, ...), at their temperature of 1; they do nothing at temperature 0.
        texts: how many texts are written behind a prompt at most; None for as many as there is time for.
        max_new_tokens: of each text that is judged by the clock.
        seed: of everything that is drawn.
        most_bytes: of the work folder.

    Raises:
        InvalidParameter: a value out of its range, or folders that cannot be used.
    """

    out: Path
    work: Path | None = None
    minutes: float = 20.0
    forms: tuple[str, ...] = ()
    losses: tuple[str, ...] = ()
    temperatures: tuple[float, ...] = (0.0, 1.0)
    filters: SamplingParams = UNFILTERED
    texts: int | None = None
    max_new_tokens: int = 64
    seed: int = 0
    most_bytes: int = MOST_BYTES

    def __post_init__(self) -> None:
        if not self.minutes >= LEAST_MINUTES or self.minutes == float("inf"):
            raise InvalidParameter(f"--minutes must be at least {LEAST_MINUTES}, but is {self.minutes:g}.")
        if self.most_bytes < 1:
            raise InvalidParameter(f"--most-bytes must be at least 1, but is {self.most_bytes}.")
        if self.texts is not None and self.texts < 1:
            raise InvalidParameter(f"At least 1 text is written behind a prompt, not {self.texts}.")
        if AUTO in self.forms and len(self.forms) > 1:
            raise InvalidParameter(
                f"--form {AUTO} is all forms that can pay; leave it out, or name no others beside it."
            )
        for form in self.named_forms:
            draft_form(form).chosen_losses(self.losses)
        known = sorted({loss for form in FORMS.values() for loss in form.allowed})
        for loss in self.losses:
            if loss not in known:
                raise InvalidParameter(f"A draft learns by one of {', '.join(known)}, not {loss!r}{hint(loss, known)}.")
        if self.filters.temperature != 1:
            raise InvalidParameter(
                f"The filters have a temperature of {self.filters.temperature:g}; name it among the temperatures."
            )
        if self.filters != UNFILTERED and not any(self.temperatures):
            idle = ", ".join(filters_in_force(self.filters))
            raise InvalidParameter(
                f"{idle} would do nothing at temperature 0; name a temperature above 0 or leave it out."
            )
        SpeedSettings(temperatures=self.temperatures, max_new_tokens=self.max_new_tokens, seed=self.seed)
        if self.place.resolve() == self.out.resolve():
            raise InvalidParameter("--out and --work are the same folder: the draft belongs into one of its own.")
        if self.out.exists() and (not self.out.is_dir() or any(self.out.iterdir())):
            raise InvalidParameter(f"--out {self.out} is not empty; name a new folder.")
        for flag, folder in (("--out", self.out), ("--work", self.place)):
            there = next(one for one in (folder.absolute(), *folder.absolute().parents) if one.exists())
            if not there.is_dir() or not os.access(there, os.W_OK):
                raise InvalidParameter(
                    f"{flag} {folder} cannot be written: {there} is no folder, or not yours to write."
                )

    @property
    def named_forms(self) -> tuple[str, ...]:
        """The forms that the user named; () where all count that can pay."""
        return () if self.forms == (AUTO,) else self.forms

    @property
    def place(self) -> Path:
        """The work folder."""
        return self.work or self.out.with_name(f"{self.out.name}-work")


@dataclass(frozen=True)
class Alignment:
    """What became of it.

    Args:
        verdict: whether the draft is better than what was there before.
        folder: where it is; None where no form can pay, and nothing was made.
        form: what it is made of.
        loss: what it learnt by.
        curve: what it was worth on held-out text.
        costs: of the forms that were looked at.
        minutes: that all stages took.
    """

    verdict: AlignmentVerdict
    folder: Path | None
    form: str = ""
    loss: str = ""
    curve: tuple[CurvePoint, ...] = ()
    costs: dict[str, FormCost] | None = None
    minutes: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return the values by name, for JSON."""
        return {**asdict(self), "folder": None if self.folder is None else str(self.folder)}
