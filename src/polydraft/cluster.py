"""A Ray cluster: how it is joined, whether its nodes can do the work, and copies that share it."""

import logging
import os
import pickle
import re
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from importlib import import_module
from math import ceil
from pathlib import Path
from typing import Any

from polydraft import __version__
from polydraft.catalogue import drafter_line
from polydraft.errors import ClusterError, InvalidParameter, MissingExtra, PolydraftError
from polydraft.extras import RAY

PATIENCE = 5.0
"""Seconds within which the head of a cluster takes a connection."""
LOOKING = 120.0
"""Seconds within which all nodes say what they have; the first process of ours on a node imports torch."""
ADDRESS = "RAY_ADDRESS"
"""The environment variable that names a cluster where no option does."""
STORES = ("suffix", "rest")
"""Words of drafters behind whose colon a folder stands."""
NAMED = ("target", "draft", "drafter")
"""Options that name models and stores."""
TOO_SMALL = re.compile(r"(object store|shared|shm|plasma)", re.IGNORECASE)


@contextmanager
def joined(address: str | None) -> Iterator[Any]:
    """Join a cluster, or start one of this machine alone for as long as it is needed; give the package `ray`.

    Where this process has joined one already that is used, and stays.

    Args:
        address: HOST:PORT of the head, or "auto" for the cluster that runs on this machine.

    Raises:
        MissingExtra: Ray is not installed.
        InvalidParameter: no such address is possible.
        ClusterError: there is no cluster, this machine is no node of it, or none can be started here.
    """
    RAY.check()
    import ray  # pyright: ignore[reportMissingImports]

    if ray.is_initialized():
        yield ray
        return
    address = named_cluster(address)
    if address not in (None, "auto"):
        _check_reachable(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nobody is told of whoever writes texts
    try:
        ray.init(
            address or "local",
            **({} if address else {"include_dashboard": False}),
            logging_level="ERROR",
            log_to_driver=False,
        )
    except Exception as error:
        raise _unjoined(address, error) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def named_cluster(address: str | None) -> str | None:
    """Return the address of the cluster that is meant; None where one of this machine alone is to be started."""
    told = address or os.environ.get(ADDRESS)
    return None if told in (None, "", "local") else told


def _check_reachable(address: str) -> None:
    """Check that something listens where a cluster's head is to be, for which Ray itself would wait for a minute."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "/" in address:
        raise InvalidParameter(f"--address must be HOST:PORT of a Ray cluster's head, or auto, but is {address!r}.")
    try:
        socket.create_connection((host.strip("[]"), int(port)), PATIENCE).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ClusterError(
            f"There is no Ray cluster at {address} ({reason.lower()}): give the one that `ray start --head` printed."
        ) from error


def _unjoined(address: str | None, error: Exception) -> ClusterError:
    said = first_sentence(error)
    if address is None:
        way = "free memory and /dev/shm (docker run --shm-size)" if TOO_SMALL.search(said) else "see `ray start --head`"
        return ClusterError(f"Ray cannot start a cluster of this machine: {way}, since Ray says: {said}.")
    return ClusterError(
        f"The Ray cluster at {address} cannot be joined: run `ray start --address=HOST:PORT` on this machine, "
        f"which must be one of its nodes, since Ray says: {said}."
    )


def first_sentence(error: BaseException) -> str:
    """Return the beginning of what a library says, on one line and without its last stop."""
    text = " ".join(str(error).split()) or type(error).__name__
    return re.split(r"(?<=[^.\d])\. ", text)[0][:300].rstrip(". ")


def part_of_ray(name: str) -> Any:
    """Return a part of Ray, which has packages of its own.

    Raises:
        MissingExtra: one of these is missing.
    """
    try:
        part = import_module(f"ray.{name}")
    except ImportError as error:
        said, needed = first_sentence(error), RAY.requirements[0]
        raise MissingExtra(f'A part of Ray cannot be imported ({said}): pip install "{needed}".') from error
    logging.getLogger(f"ray.{name}").setLevel(logging.ERROR)  # what it tells as it goes is not for standard error
    return part


def at_its_place(name: str | None) -> str | None:
    """Return what names a folder, maybe behind the word of a drafter, as processes elsewhere find it."""
    if name is None:
        return None
    if _is_folder(name):
        return str(Path(name).expanduser().absolute())
    before, _, behind = name.partition(":")
    return f"{before}:{Path(behind).expanduser().absolute()}" if before in STORES and behind else name


def placed(options: Any) -> Any:
    """Return options whose models and drafter are named as processes elsewhere find them."""
    named = {one.name: getattr(options, one.name) for one in fields(options) if one.name in NAMED}
    return replace(options, **{name: at_its_place(word) for name, word in named.items()})


def store_of(drafter: str) -> tuple[str | None, bool]:
    """Return the folder of texts that a drafter reads, None for none, and whether it writes there too."""
    store = drafter_line(drafter).arguments_in(drafter).get("store")
    return store, store is not None and drafter.startswith("suffix")


def report(paths: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """Return the version of polydraft here, and those of the paths that are not here."""
    return __version__, tuple(path for path in paths if not Path(path).expanduser().exists())


def gpus_of_copy(ray: Any, device: str) -> float:
    """Return how many GPUs a copy of a model takes: where none is asked for or against, one if there are any."""
    return float(device == "cuda" or (device == "auto" and ray.cluster_resources().get("GPU", 0) > 0))


def check_nodes(ray: Any, *, cpus: float, gpus: float, models: Sequence[str | None], store: str | None = None) -> None:
    """Check that the nodes on which copies of a model may run have this version of polydraft, and the folders.

    Args:
        ray: the package.
        cpus: what a copy takes.
        gpus: the same.
        models: what names models and files, as `at_its_place` has it; what is only read.
        store: a folder that drafters of all nodes write to.

    Raises:
        ClusterError: one has not, or there is no node that a copy could run on.
    """
    large = [one for one in ray.nodes() if one["Alive"] and _is_large(one["Resources"], cpus, gpus)]
    if not large:
        wanted = f"{cpus:g} CPUs" + (f" and {gpus:g} GPUs" if gpus else "")
        raise ClusterError(
            f"No node of the Ray cluster has the {wanted} that a copy of the model takes: see --threads."
        )
    folders = [one for one in models if one and _is_folder(one)]
    with _marked(store) as marks:
        for node, found in _reports(ray, large, [*folders, *marks]):
            name = f"Node {node['NodeManagerHostname']} of the Ray cluster"
            if isinstance(found, Exception):
                raise _without_package(name, found)
            version, missing = found
            if version != __version__:
                raise ClusterError(f"{name} has polydraft {version} and this machine {__version__}: install one there.")
            for path in missing:
                if path in folders:
                    raise ClusterError(f"{name} has no {path}: the model must lie at the same place on every node.")
                raise ClusterError(f"{name} does not share the store {store}: use a folder that all nodes share.")


def _is_large(there: Any, cpus: float, gpus: float) -> bool:
    return there.get("CPU", 0) >= cpus and there.get("GPU", 0) >= gpus


def _is_folder(model: str) -> bool:
    """Tell whether a model is named by where it lies; what no file is may be a word or a name on the hub."""
    return Path(model).expanduser().exists() or model.startswith(("/", "./", "../", "~"))


@contextmanager
def _marked(store: str | None) -> Iterator[list[str]]:
    """Put a file into a store's folder for as long as nodes look for it."""
    if store is None:
        yield []
        return
    folder = Path(store).expanduser().absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".shared-") as mark:
            yield [mark.name]
    except OSError as error:
        raise ClusterError(f"The store {store} cannot be written: {error.strerror}.") from error


def _reports(ray: Any, nodes: Sequence[Any], paths: Sequence[str]) -> Iterator[tuple[Any, Any]]:
    """Yield what each node says, or the error that it ends in."""
    strategies = import_module("ray.util.scheduling_strategies")
    asked = ray.remote(num_cpus=0, max_retries=0)(report)
    refs = list[Any]()
    for node in nodes:
        there = strategies.NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        refs.append(asked.options(scheduling_strategy=there).remote(paths))
    for node, ref in zip(nodes, refs, strict=True):
        try:
            yield node, ray.get(ref, timeout=LOOKING)
        except Exception as error:  # noqa: BLE001  whatever keeps a node from saying it
            yield node, error


def _without_package(name: str, error: Exception) -> ClusterError:
    missing = re.search(r"No module named '([\w.]+)'", str(error))
    if missing is None:
        return ClusterError(f"{name} cannot be asked what it has: {first_sentence(error)}.")
    package = missing[1].split(".")[0]
    return ClusterError(f"{name} has no {package}: install the same polydraft with its extra `ray` on every node.")


class ModelCopy:
    """What an actor of Ray Data holds: something made of models, and what it makes of items.

    Models that cannot be loaded are no error here, which Ray would answer with another try, and another: whatever is
    made says why.
    """

    def __init__(self, make: Callable[..., Callable[[Sequence[Any]], Any]], arguments: Sequence[Any]) -> None:
        self._make, self._failure = None, ""
        try:
            self._make = make(*arguments)
        except PolydraftError as error:
            self._failure = str(error)

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[bytes]]:
        """Return what is made of a block of items, or why there is nothing of it."""
        return {"made": [pickle.dumps(self._made([pickle.loads(one) for one in batch["item"]]))]}

    def _made(self, items: Sequence[Any]) -> tuple[Any, str]:
        if self._make is None:
            return None, self._failure
        try:
            return self._make(items), ""
        except PolydraftError as error:
            return None, str(error)


def made_by_copies(
    make: Callable[..., Callable[[Sequence[Any]], Any]],
    arguments: Sequence[Any],
    items: Sequence[Any],
    *,
    size: int = 1,
    copies: tuple[int, int] = (1, 1),
    cpus: float = 1,
    gpus: float = 0,
) -> Iterator[Any]:
    """Yield what copies make of items, so many at a time, as it comes; what a copy that ends had is made by another.

    Args:
        make: makes a copy, in a process of its own: a function of several items.
        arguments: of `make`.
        items: what is shared out, in this order.
        size: how many of them a copy gets at once.
        copies: how many copies there are, at least and at most.
        cpus: what a copy takes.
        gpus: the same.

    Raises:
        ClusterError: the models cannot be loaded, or the work cannot be done.
        MissingExtra: a part of Ray is not installed.
    """
    data = part_of_ray("data")
    context = data.DataContext.get_current()
    context.enable_progress_bars = context.print_on_execution_start = False
    blocks = data.from_items(
        [{"item": pickle.dumps(one)} for one in items], override_num_blocks=max(1, ceil(len(items) / size))
    )
    made = blocks.map_batches(
        ModelCopy,
        fn_constructor_args=(make, arguments),
        batch_size=None,
        compute=data.ActorPoolStrategy(min_size=copies[0], max_size=copies[1]),
        num_cpus=cpus,
        num_gpus=gpus or None,
    )
    try:
        for told in made.iter_rows():
            found, failure = pickle.loads(told["made"])
            if failure:
                raise ClusterError(failure)
            yield found
    except (PolydraftError, KeyboardInterrupt, GeneratorExit):
        raise
    except Exception as error:
        raise ClusterError(f"Ray cannot do the work: {first_sentence(error)}.") from error
