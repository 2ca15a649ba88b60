"""Who measures: this process, or actors of a Ray cluster with cores of their own, which take prompts in turn."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from rich.console import Console

from polydraft.bench.environment import RayActor, machine
from polydraft.bench.result_lines import differences
from polydraft.cli.clashes import of_this_machine, refuse_clashes
from polydraft.cluster import check_nodes, gpus_of_copy, joined, made_by_copies, store_of
from polydraft.errors import ClusterError
from polydraft.models import Pair
from polydraft.options.commands.option_groups import replica_range

Measure = Callable[[Sequence[Any]], Iterator[tuple[Any, RayActor | None]]]
"""Measures what is due, each thing once, in any order; beside each result stands who measured it in a cluster."""


class LoadedJob(Protocol):
    """A job of measuring with its models."""

    pair: Pair
    conditions: dict[str, Any]

    def plan(self) -> Any:
        """Return what else is to be known before one can say what is due; it can be sent."""
        ...

    def measured(self, due: Any) -> Any:
        """Measure one thing that is due."""
        ...


def check_measured_on_ray(options: Any, words: Collection[str | None], drafters: Collection[str | None]) -> None:
    """Check that what is measured does not depend on which actor measures which prompts.

    Args:
        options: a command's, with those of a cluster and the device.
        words: what rules and drafters are named by.
        drafters: those that are drafters.

    Raises:
        InvalidParameter: a rule, a drafter or a device is of this machine alone, or a store would grow meanwhile.
    """
    if options.ray:
        refuse_clashes(*of_this_machine(words, [options.device]))
        grows = next((word for word in drafters if word and store_of(word)[1]), None)
        told = (
            f"{grows} writes to its store, by which actors would change what others measure: with --ray leave it out."
        )
        refuse_clashes((grows, told))


class MeasuringCopy:
    """A job with its models in an actor, which tells conditions and plan where none are known, else measures.

    Raises:
        ClusterError: its conditions are others than those that are known, as with other weights.
        PolydraftError: the models cannot be loaded.
    """

    def __init__(
        self, load: Callable[[Any], LoadedJob], job: Any, threads: int, known: dict[str, Any] | None = None
    ) -> None:
        torch.set_num_threads(threads)
        self._job, self._tells = load(job), known is None
        others = differences(known, self._job.conditions) if known else []
        if others:
            raise ClusterError(f"The nodes of the Ray cluster do not have the same models: {'; '.join(others)}.")

    def __call__(self, due: Sequence[Any]) -> Any:
        """Return conditions and plan, or what was measured, and who did it."""
        if self._tells:
            return self._job.conditions, self._job.plan()
        import ray  # pyright: ignore[reportMissingImports]

        there = machine(self._job.pair.target.device)
        actor, cores = ray.get_runtime_context().get_actor_id()[:8], there["cores"]
        place = RayActor(
            actor, str(there["accelerator"] or there["processor"]), cores if isinstance(cores, int) else None
        )
        return [(self._job.measured(one), place) for one in due]


@contextmanager
def measuring(
    options: Any, load: Callable[[Any], LoadedJob], job: Any, reads: Sequence[str | None], notes: Console
) -> Iterator[tuple[dict[str, Any], Any, Measure]]:
    """Give a job's conditions and plan, and what measures: this process, or actors of a Ray cluster.

    Args:
        options: a command's, with those of a cluster and the device.
        load: loads a job's models; a function or class that all nodes have.
        job: what is measured; of a cluster it is sent to actors.
        reads: what names models, heads and stores in a cluster, as `at_its_place` has it.
        notes: where it is said that models are loaded.

    Raises:
        ClusterError: there is no cluster, or it cannot do the work; the models cannot be loaded there.
        MissingExtra: Ray is not installed.
    """
    with ExitStack() as cluster:
        if not options.ray:
            with notes.status("Loading the models ..."):
                loaded = load(job)
            yield loaded.conditions, loaded.plan(), lambda due: ((loaded.measured(one), None) for one in due)
            return
        threads, copies = options.threads or 1, replica_range(options.replicas)
        with notes.status("Starting the cluster, and loading the models ..."):
            ray = cluster.enter_context(joined(options.address))
            size: dict[str, Any] = {"cpus": threads, "gpus": gpus_of_copy(ray, options.device)}
            check_nodes(ray, **size, models=reads)
            ((conditions, plan),) = made_by_copies(MeasuringCopy, (load, job, threads), [None], **size)

        def measure(due: Sequence[Any]) -> Iterator[tuple[Any, RayActor]]:
            if due:
                arguments = (load, job, threads, conditions)
                for made in made_by_copies(MeasuringCopy, arguments, due, copies=copies, **size):
                    yield from made

        yield conditions, plan, measure
