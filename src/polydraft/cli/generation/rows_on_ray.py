"""Rows of a file in a Ray cluster: copies of the models take some at a time, and one process writes the file."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any

from polydraft.cli.clashes import of_this_machine, refuse_clashes
from polydraft.cli.generation.one_text import check_request, drafter_name
from polydraft.cli.generation.row_texts import RowTexts
from polydraft.cli.generation.text_file import Line, Row
from polydraft.cli.printing import console
from polydraft.cluster import check_nodes, gpus_of_copy, joined, made_by_copies, placed, store_of
from polydraft.engine import Statistics
from polydraft.models import Grammar
from polydraft.options.commands.generate_options import GenerateOptions
from polydraft.options.commands.option_groups import replica_range

ROUNDS = 4
"""A copy gets so many times as many rows at once as texts are in progress, so that few slots are empty at the end."""


@dataclass
class TextBlock:
    """What became of some rows.

    Args:
        written: the rows with a line of the file, or why they have none.
        refused: rows whose conversation the chat template refuses, and why.
        statistics: of their texts.
    """

    written: list[tuple[Row, Line | str]] = field(default_factory=list[tuple[Row, "Line | str"]])
    refused: list[tuple[Row, str]] = field(default_factory=list[tuple[Row, str]])
    statistics: Statistics = field(default_factory=Statistics)


def check_rows_on_ray(request: GenerateOptions) -> None:
    """Check that texts do not depend on which copy writes which rows beside which others.

    Raises:
        InvalidParameter: an option would make them do so, or is about this machine alone.
    """
    refuse_clashes(
        (request.plan, "--plan chooses trees by what it measured of other rows: with --ray leave it out."),
        (request.parallel, "With --ray every copy of the model is whole, on one device: leave --parallel out."),
        (request.compiled, "--compile would compile in every copy anew: with --ray leave it out."),
        *of_this_machine((request.verifier, request.drafter), (request.device, request.draft_device)),
    )


class RowWriter:
    """A copy of the models, which continues rows."""

    def __init__(self, request: GenerateOptions, batch_size: int, grammar: Grammar | None) -> None:
        self._request = request
        self._texts = RowTexts(request, batch_size, grammar, console(errors=True))

    def __call__(self, rows: Sequence[Row]) -> TextBlock:
        """Return what becomes of rows."""
        prompts, refused = self._texts.encoded(rows)
        found = TextBlock(refused=refused)
        if prompts:
            named: dict[Any, Row] = {row.id: row for row in rows}
            options = check_request(replace(self._request, seed=self._request.seed or 0), drafter_name(self._request))
            run = self._texts.begun(prompts, rows, options, None)
            found.written = [(named[one.name], self._texts.told(named[one.name], one)) for one in run]
            found.statistics = run.statistics
        return found


def texts_on_ray(
    request: GenerateOptions, batch_size: int, grammar: Grammar | None, rows: Sequence[Row]
) -> Iterator[TextBlock]:
    """Yield what becomes of rows, some at a time, each row once; a block whose actor ends is written again by another.

    Raises:
        ClusterError: there is no cluster, or it cannot do the work; the models cannot be loaded, or the texts not be
            written.
        MissingExtra: Ray is not installed.
    """
    copies, request = replica_range(request.replicas), placed(request)
    store, grows = store_of(drafter_name(request))
    with joined(request.address) as ray:
        gpus = gpus_of_copy(ray, request.device)
        read = [request.target, request.draft, None if grows else store]
        check_nodes(ray, cpus=1, gpus=gpus, models=read, store=store if grows else None)
        size = max(1, min(ROUNDS * batch_size, ceil(len(rows) / copies[0])))
        arguments = (request, batch_size, grammar)
        yield from made_by_copies(RowWriter, arguments, rows, size=size, copies=copies, gpus=gpus)
