"""Rows of a file in a Ray cluster: copies of the models take some at a time, and one process writes the file."""

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any

from polydraft.catalogue import digests, drafter_line
from polydraft.cli.clashes import refuse_clashes
from polydraft.cli.generation.one_text import check_request, drafter_name
from polydraft.cli.generation.row_texts import RowTexts
from polydraft.cli.generation.text_file import Line, Row
from polydraft.cli.printing import console
from polydraft.cluster import at_its_place, check_nodes, first_sentence, gpus_of_copy, joined, part_of_ray
from polydraft.engine import Statistics
from polydraft.errors import ClusterError, PolydraftError
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
        failure: why there is nothing of it, in a sentence.
    """

    written: list[tuple[Row, Line | str]] = field(default_factory=list[tuple[Row, "Line | str"]])
    refused: list[tuple[Row, str]] = field(default_factory=list[tuple[Row, str]])
    statistics: Statistics = field(default_factory=Statistics)
    failure: str = ""


def check_rows_on_ray(request: GenerateOptions) -> None:
    """Check that texts do not depend on which copy writes which rows beside which others.

    Raises:
        InvalidParameter: an option would make them do so, or is about this machine alone.
    """
    own = next((word for word in (request.verifier, request.drafter) if word in digests()), None)
    device = next((one for one in (request.device, request.draft_device) if one and ":" in one), None)
    refuse_clashes(
        (request.plan, "--plan chooses trees by what it measured of other rows: with --ray leave it out."),
        (request.parallel, "With --ray every copy of the model is whole, on one device: leave --parallel out."),
        (request.compiled, "--compile would compile in every copy anew: with --ray leave it out."),
        (own, f"{own} is a file of this machine: with --ray name a rule or drafter of polydraft's own."),
        (device, f"With --ray the cluster chooses the GPU, not --device {device}: write cuda."),
    )


class RowWriter:
    """A copy of the models, which an actor of Ray Data holds.

    Models that cannot be loaded are no error here, which Ray would answer with another try, and another: all blocks say
    why.
    """

    def __init__(self, request: GenerateOptions, batch_size: int, grammar: Grammar | None) -> None:
        self._request, self._texts, self._failure = request, None, ""
        try:
            self._texts = RowTexts(request, batch_size, grammar, console(errors=True))
        except PolydraftError as error:
            self._failure = str(error)

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[bytes]]:
        """Return what becomes of the rows of a block."""
        rows: list[Row] = [pickle.loads(one) for one in batch["row"]]
        return {"block": [pickle.dumps(self._block(rows))]}

    def _block(self, rows: Sequence[Row]) -> TextBlock:
        if self._texts is None:
            return TextBlock(failure=self._failure)
        try:
            prompts, refused = self._texts.encoded(rows)
            found = TextBlock(refused=refused)
            if prompts:
                named: dict[Any, Row] = {row.id: row for row in rows}
                options = check_request(
                    replace(self._request, seed=self._request.seed or 0), drafter_name(self._request)
                )
                run = self._texts.begun(prompts, rows, options, None)
                found.written = [(named[one.name], self._texts.told(named[one.name], one)) for one in run]
                found.statistics = run.statistics
            return found
        except PolydraftError as error:
            return TextBlock(failure=str(error))


def texts_on_ray(
    request: GenerateOptions, batch_size: int, grammar: Grammar | None, rows: Sequence[Row]
) -> Iterator[TextBlock]:
    """Yield what becomes of rows, some at a time, each row once; a block whose actor ends is written again by another.

    Raises:
        ClusterError: there is no cluster, or it cannot do the work.
        MissingExtra: Ray is not installed.
        PolydraftError: the models cannot be loaded, or the texts not be written.
    """
    least, most = replica_range(request.replicas)
    names = ("target", "draft", "drafter")
    placed: dict[str, Any] = {name: at_its_place(getattr(request, name)) for name in names}
    request = replace(request, **placed)
    drafter = drafter_name(request)
    store = drafter_line(drafter).arguments_in(drafter).get("store")
    with joined(request.address) as ray:
        gpus = gpus_of_copy(ray, request.device)
        grows = store is not None and drafter.startswith("suffix")
        read = [request.target, request.draft, None if grows else store]
        check_nodes(ray, cpus=1, gpus=gpus, models=read, store=store if grows else None)
        data = part_of_ray("data")
        context = data.DataContext.get_current()
        context.enable_progress_bars = context.print_on_execution_start = False
        size = max(1, min(ROUNDS * batch_size, ceil(len(rows) / least)))
        blocks = data.from_items(
            [{"row": pickle.dumps(row)} for row in rows], override_num_blocks=ceil(len(rows) / size)
        )
        texts = blocks.map_batches(
            RowWriter,
            fn_constructor_args=(request, batch_size, grammar),
            batch_size=None,
            compute=data.ActorPoolStrategy(min_size=least, max_size=most),
            num_cpus=1,
            num_gpus=gpus or None,
        )
        yield from _blocks(texts)


def _blocks(texts: Any) -> Iterator[TextBlock]:
    try:
        for told in texts.iter_rows():
            found: TextBlock = pickle.loads(told["block"])
            if found.failure:
                raise ClusterError(found.failure)
            yield found
    except (PolydraftError, KeyboardInterrupt, GeneratorExit):
        raise
    except Exception as error:
        raise ClusterError(f"Ray cannot write the texts: {first_sentence(error)}.") from error
