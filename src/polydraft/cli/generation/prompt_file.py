"""`polydraft generate --input`: every prompt of a file through one running batch, each text written as it ends."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from polydraft import __version__
from polydraft.bench.prompts import read_text
from polydraft.catalogue import digests
from polydraft.cli.clashes import idle_filters, refuse_clashes
from polydraft.cli.generation.one_text import check_request, drafter_name, plan_file
from polydraft.cli.generation.row_texts import RowTexts
from polydraft.cli.generation.rows_on_ray import check_rows_on_ray, texts_on_ray
from polydraft.cli.generation.text_file import Line, Output, Row, read_rows
from polydraft.cli.printing import console, counted, notes_beside, print_json_line, progress_bar, warnings_as_sentences
from polydraft.cli.process import FAILED, INTERRUPTED, noted_interruption, stopped
from polydraft.engine import Completed, ManyRun, Statistics, summed
from polydraft.errors import InvalidParameter, PromptFileError
from polydraft.models import Grammar
from polydraft.options.commands.generate_options import GenerateOptions
from polydraft.planning import PairPlan, load_plan

SHOWN_ERRORS, USUAL_TEXTS = 10, 8


@dataclass(frozen=True)
class FileJob:
    """Where the prompts are, where the texts go, and how many are in progress at a time."""

    input: str
    output: Path
    batch_size: int

    @classmethod
    def of(cls, request: GenerateOptions) -> "FileJob":
        """Return what a request says about files."""
        assert request.output is not None
        return cls(str(request.input_file), request.output, request.batch_size or USUAL_TEXTS)


@dataclass
class FileOutcome:
    """What became of the rows.

    Args:
        before: how many texts were there already.
        new: how many were added.
        left: how many are still to do.
        failed: the rows that cannot be used, each with its error.
        statistics: of the texts that were added, and those in progress.
        interrupted: whether the user stopped it.
    """

    before: int = 0
    new: int = 0
    left: int = 0
    failed: list[Line] = field(default_factory=list)
    statistics: Statistics = field(default_factory=Statistics)
    interrupted: bool = False

    @property
    def code(self) -> int:
        """The exit code: 0, 1 if a row failed, 130 if the user stopped it."""
        return INTERRUPTED if self.interrupted else FAILED if self.failed else 0


def run_file(request: GenerateOptions, grammar: Grammar | None = None) -> int:
    """Carry out the request for every row, and say what happened.

    Returns the exit code: 0, 1 if there are rows that cannot be used, or 130 after Ctrl-C with no finished text lost.

    Raises:
        PromptFileError: the input cannot be read, or none of its rows can be used.
        ResultsError: the output cannot be written, or is of a run with other settings or prompts.
        InvalidParameter: options that do not go together, or a batch too large for the memory.
    """
    as_json, quiet = request.as_json, request.quiet
    options = check_request(replace(request, seed=request.seed or 0), drafter_name(request))
    if request.ray:
        check_rows_on_ray(request)
    file = plan_file(request)
    plan = load_plan(file) if file else None
    notes = notes_beside(request)
    job = FileJob.of(request)
    rows = _rows(job, request.chat_template)
    if not any(row.own.get("temperature") for row in rows):
        refuse_clashes(idle_filters(request.sampling, ", and no row has a temperature of its own"))
    output = Output(job.output, settings_of(request, grammar))
    output.check_rows(rows, job.input)
    waiting = [row for row in rows if not row.error and row.id not in output.texts]
    outcome = FileOutcome(before=sum(not row.error for row in rows) - len(waiting), left=len(waiting))
    for row in rows:
        if row.error:
            _note_error(output, outcome, row, row.error)
    try:
        if waiting:
            work = _Work(request, job, grammar, notes, output, outcome)
            if request.ray:
                work.do_on_ray(waiting)
            else:
                work.do(waiting, options, plan)
    except KeyboardInterrupt:
        outcome.interrupted = True
    if outcome.interrupted:
        stopped(f"the same command goes on from {job.output}")
    if as_json:
        print_json_line(_as_json(job, output, outcome))
    elif not quiet:
        print_outcome(job, outcome, notes)
    return outcome.code


def settings_of(request: GenerateOptions, grammar: Grammar | None) -> dict[str, Any]:
    """Return all that determines the texts, but for the rows: batch size, device and places of files do not."""
    settings = {
        "version": __version__,
        "target": request.target or "embedded pair",
        "draft": request.draft,
        "drafter": drafter_name(request),
        "verifier": request.verifier,
        "scheme": request.scheme,
        "bottom_up": request.bottom_up,
        "tree": request.tree,
        "plan": fingerprint(request),
        "files": {word: digest for word, digest in digests().items() if word in (request.verifier, request.drafter)},
        **request.sampling,
        "stop": list(request.stop),
        **({} if grammar is None else grammar.told),
        "seed": request.seed or 0,
        "max_new_tokens": request.max_new_tokens,
        "dtype": request.dtype,
        "weights": request.weights,
    }
    said = {
        name: value
        for name, value in settings.items()
        if value is not None and value is not False and value not in ([], {})
    }
    return said if request.chat_template is None else {**said, "chat_template": request.chat_template}


def fingerprint(request: GenerateOptions) -> str | None:
    """Return what tells one plan from another."""
    file = plan_file(request)
    if file is None:
        return str(request.plan) if request.plan else None
    return blake2b(file.expanduser().read_bytes(), digest_size=8).hexdigest()


def _rows(job: FileJob, chat_template: bool | None) -> list[Row]:
    path, _ = read_text(job.input)
    if job.output.exists() and path.exists() and job.output.samefile(path):
        raise InvalidParameter("--output is the file of the prompts; give it another name.")
    return read_rows(job.input, chat_template)


def _note_error(output: Output, outcome: FileOutcome, row: Row, error: str) -> None:
    output.add_error(row, error)
    outcome.failed.append({"id": row.id, "line": row.line, "error": error})


@dataclass(frozen=True)
class _Work:
    """The part of a run for which models are loaded."""

    request: GenerateOptions
    job: FileJob
    grammar: Grammar | None
    notes: Console
    output: Output
    outcome: FileOutcome

    def do(self, rows: Sequence[Row], options: dict[str, Any], plan: PairPlan | None) -> None:
        """Load the models, and continue every row whose conversation the chat template takes."""
        with self.notes.status("Loading the models ..."):
            texts = RowTexts(self.request, self.job.batch_size, self.grammar, self.notes)
        prompts, refused = texts.encoded(rows)
        self._refuse(rows, refused, some=bool(prompts))
        if prompts:
            self._write(texts, texts.begun(prompts, rows, options, plan), [row for row in rows if row.id in prompts])

    def do_on_ray(self, rows: Sequence[Row]) -> None:
        """Let copies of the models in a Ray cluster continue every row whose conversation the chat template takes."""
        said: list[tuple[Row, str]] = []
        silent = not self.notes.is_terminal
        begun = time.perf_counter()
        with progress_bar(self.notes, silent=silent) as progress, warnings_as_sentences():
            total = self.outcome.before + len(rows)
            task = progress.add_task("Starting the cluster", total=total, completed=self.outcome.before)
            for texts in texts_on_ray(self.request, self.job.batch_size, self.grammar, rows):
                said += texts.refused
                for row, told in texts.written:
                    self._add(row, told)
                    progress.update(task, completed=total - self.outcome.left + len(said))
                statistics = summed([self.outcome.statistics, texts.statistics])
                statistics.seconds = {"total": time.perf_counter() - begun}  # copies write at the same time
                self.outcome.statistics = statistics
                progress.update(task, description=_speed(statistics))
        self._refuse(rows, said, some=len(said) < len(rows))

    def _refuse(self, rows: Sequence[Row], refused: Sequence[tuple[Row, str]], *, some: bool) -> None:
        """Note which conversations the chat template refuses; each costs its row only.

        Raises:
            PromptFileError: all are refused, and there is no text from before.
        """
        if refused and not some and not self.output.texts:
            row, why = refused[0]
            others = f" None of the {len(rows)} rows can be used." if len(rows) > 1 else ""
            raise PromptFileError(f"{self.job.input}, line {row.line}: {why}.{others}")
        for row, why in refused:
            self.outcome.left -= 1
            _note_error(self.output, self.outcome, row, why)

    def _write(self, texts: RowTexts, run: ManyRun, rows: Sequence[Row]) -> None:
        named: dict[Any, Row] = {row.id: row for row in rows}
        self.outcome.statistics = run.statistics
        silent = not self.notes.is_terminal
        with (
            progress_bar(self.notes, silent=silent) as progress,
            warnings_as_sentences(),
            noted_interruption("this step") as interrupted,
        ):
            total = self.outcome.before + len(rows)
            task = progress.add_task("", total=total, completed=self.outcome.before)
            while not (run.over or interrupted()):
                for one in self._step(run):
                    self._add(named[one.name], texts.told(named[one.name], one))
                progress.update(task, completed=total - self.outcome.left, description=_speed(run.statistics))
            self.outcome.interrupted = not run.over

    def _step(self, run: ManyRun) -> list[Completed]:
        try:
            return run.step()
        except torch.OutOfMemoryError as error:
            raise InvalidParameter(
                f"The memory did not suffice for --batch-size {self.job.batch_size}; with a smaller one the same "
                f"command goes on from {self.output.path}."
            ) from error

    def _add(self, row: Row, told: Line | str) -> None:
        self.outcome.left -= 1
        if isinstance(told, str):
            _note_error(self.output, self.outcome, row, told)
        else:
            self.output.add(told)
            self.outcome.new += 1


def _speed(statistics: Statistics) -> str:
    return f"{statistics.tokens_per_second:.1f} tokens/s, {statistics.block_efficiency:.2f} tokens per call"


def _as_json(job: FileJob, output: Output, outcome: FileOutcome) -> dict[str, Any]:
    return {
        "input": job.input,
        "output": str(job.output),
        "before": outcome.before,
        "new": outcome.new,
        "left": outcome.left,
        "failed": outcome.failed,
        "interrupted": outcome.interrupted,
        "batch_size": job.batch_size,
        "settings": output.settings,
        "statistics": outcome.statistics.as_dict(),
    }


def print_outcome(job: FileJob, outcome: FileOutcome, notes: Console) -> None:
    """Print one line of what was done, and on standard error which rows failed."""
    counts = [counted(outcome.new, "new text")]
    counts += [f"{outcome.before} from before"] if outcome.before else []
    counts += [f"{counted(len(outcome.failed), 'row')} failed"] if outcome.failed else []
    counts += [f"{outcome.left} left"] if outcome.left else []
    statistics = outcome.statistics
    speed = f"; {counted(statistics.new_tokens, 'token')}, {_speed(statistics)}" if statistics.new_tokens else ""
    console().print(f"{job.output}: {', '.join(counts)}{speed}", soft_wrap=True)
    for one in outcome.failed[:SHOWN_ERRORS]:
        notes.print(f"{job.input}, line {one['line']}: {one['error']}.", soft_wrap=True)
    more = len(outcome.failed) - SHOWN_ERRORS
    if more > 0:
        said = f'{counted(more, "more row")} failed; lines with "error" in {job.output} say why.'
        notes.print(said, soft_wrap=True)
