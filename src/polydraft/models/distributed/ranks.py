"""The processes that hold a target's parts: how they start and meet, what rank 0 tells them, and how they end.

Rank 0 starts the others on its own machine, or all are started by torchrun. They tell each other whole numbers alone,
through a group of their own that may wait for ever: a server may be idle for days. When a process ends, those that are
connected with it see that at once; that is how rank 0 learns of a lost part, and the others of the end.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from torch import nn

from polydraft.errors import InvalidParameter, PolydraftError, RankLost, UnsupportedModel
from polydraft.models.anatomy import WATCHING
from polydraft.models.distributed.mirrored import END
from polydraft.models.distributed.parcel import RANKS, Parcel
from polydraft.models.distributed.splitting import TargetSplit

FIRST = 512
"""Words of a parcel that go in the first broadcast, which is the only one for most passes."""
PATIENCE = timedelta(minutes=10)
"""So long a rank waits for another one within a pass, or while models are loaded."""
IDLE = timedelta(days=365)
GRACE = 10.0
"""Seconds in which a rank that was told to end has ended, and in which one that was lost says why."""
NETWORK = "GLOO_SOCKET_IFNAME"
FOLLOW = "from polydraft.models.distributed.following import main; main()"


class Ranks:
    """This process among those that hold a target together.

    Args:
        count: how many there are.
        rank: which one this is; 0 decides.
        helpers: the processes that this one has started, each with what it writes to standard error.
        folder: where they meet, which is not needed any more when the parts are loaded; None under torchrun.
    """

    def __init__(self, count: int, rank: int, helpers: tuple["Helper", ...] = (), folder: Path | None = None) -> None:
        self.count, self.rank = count, rank
        self._helpers, self._folder = helpers, folder
        self._lock, self._open, self._over, self._why = threading.RLock(), True, False, ""
        self._group: Any = None

    def meet(self) -> None:
        """Join the other ranks.

        Raises:
            RankLost: one of them does not come.
        """
        kind = torch.accelerator.current_accelerator()
        backend = "cpu:gloo,cuda:nccl" if kind is not None and kind.type == "cuda" else "gloo"
        if self.rank and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is rank 0's to hear
        place: dict[str, Any] = {}
        if self._folder is not None:
            store = dist.FileStore(str(self._folder / "met"), self.count)  # pyright: ignore[reportPrivateImportUsage]
            place = {"store": store, "rank": self.rank}
            place["world_size"] = self.count
            self._gather(self._folder)
        try:
            dist.init_process_group(backend, timeout=PATIENCE, **place)
            self._group = dist.new_group(backend="gloo", timeout=IDLE)
        except (RuntimeError, ValueError) as error:
            self.give_up(error)
            raise

    def _gather(self, folder: Path) -> None:
        """Wait until every helper has come as far as this: one that ends before would be waited for in vain.

        Raises:
            RankLost: one has ended.
        """
        if self.rank:
            (folder / f"rank{self.rank}").touch()
            return
        end = time.monotonic() + PATIENCE.total_seconds()
        while not all((folder / f"rank{one.rank}").exists() for one in self._helpers):
            if time.monotonic() > end or any(one.process.poll() is not None for one in self._helpers):
                self.give_up(TimeoutError("the other ranks do not come"))
            time.sleep(0.02)

    def met(self, model: nn.Module) -> None:
        """Take note that all parts are loaded: from now on passes are told, and no other is run."""
        self._open = False
        vars(model)[RANKS] = self
        self._forget_folder()
        weakref.finalize(model, self.end)

    def guard(self, model: nn.Module) -> None:
        """Let a model refuse passes of which the other ranks are not told, which would wait for them in vain."""
        name = type(model).__name__

        def look(_module: nn.Module, _inputs: Any) -> None:
            if not self._open:
                raise UnsupportedModel(
                    f"This {name} lies on {self.count} ranks, so that its passes are run by "
                    "polydraft.generate and its like alone."
                )

        setattr(look, WATCHING, True)  # what is known of the model does not change by it
        model.register_forward_pre_hook(look)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Hold back other threads and Ctrl-C while something is done and told; a second Ctrl-C is not held back.

        Raises:
            RankLost: a rank has ended before.
        """
        with self._lock, uninterrupted():
            if self._over:
                raise RankLost(self._why or "The ranks of this target have ended; load it anew.")
            yield

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Let a pass run, in which all ranks meet.

        Raises:
            RankLost: it failed here or elsewhere, so that the ranks are no longer at the same place.
        """
        self._open = True
        try:
            yield
        except BaseException as error:
            self.give_up(error)
            raise
        finally:
            self._open = False

    def tell(self, parcel: Parcel) -> None:
        """Tell the other ranks something.

        Raises:
            RankLost: one of them has ended.
        """
        words = parcel.words()
        first = torch.zeros(FIRST, dtype=torch.int64)
        first[: len(words)] = words[:FIRST]
        try:
            dist.broadcast(first, 0, self._group)
            if len(words) > FIRST:
                dist.broadcast(words[FIRST:].contiguous(), 0, self._group)
        except RuntimeError as error:
            self.give_up(error)
            raise

    def receive(self) -> Parcel:
        """Wait for what rank 0 tells next; where it has gone, it told the end."""
        first = torch.zeros(FIRST, dtype=torch.int64)
        try:
            dist.broadcast(first, 0, self._group)
            length = int(first[0])
            if length > FIRST:
                rest = torch.zeros(length - FIRST, dtype=torch.int64)
                dist.broadcast(rest, 0, self._group)
                first = torch.cat([first, rest])
        except RuntimeError:
            return Parcel(END)
        return Parcel.of(first)

    def give_up(self, error: BaseException) -> None:
        """End all ranks after an error.

        Raises:
            RankLost: a rank has ended, or the error does not say itself what is wrong.
        """
        if self._over:
            return
        self._over = True
        said = "" if isinstance(error, KeyboardInterrupt) else self._reason()
        own = " ".join(str(error).split()) or type(error).__name__
        self._why = said or f"A pass over {self.count} ranks failed on rank {self.rank}: {own[:300].rstrip('.')}."
        self._why = f"{self._why.rstrip('.')}; load the target anew."
        self._abandon()
        if not isinstance(error, KeyboardInterrupt) and (said or not isinstance(error, PolydraftError)):
            raise RankLost(self._why) from error

    def end(self) -> None:
        """Tell the other ranks that nothing more comes, and wait until they have ended; later calls do nothing."""
        with self._lock:
            if self._over:
                return
            self._over = True
            with suppress(RuntimeError, PolydraftError):
                self.tell(Parcel(END))
                if not self._helpers:
                    dist.barrier(self._group)
            for one in self._helpers:
                one.end(GRACE)
            self._left()

    def leave(self) -> None:
        """End as one of those that were told to."""
        with suppress(RuntimeError):
            if self._folder is None:
                dist.barrier(self._group)
        self._left()

    def _abandon(self) -> None:
        for one in self._helpers:
            one.end(0.0)
        self._forget_folder()
        self._left()

    def _left(self) -> None:
        with suppress(RuntimeError, ValueError, AssertionError):
            if dist.is_initialized():
                dist.destroy_process_group()

    def _forget_folder(self) -> None:
        if self._folder is not None and self.rank == 0:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _reason(self) -> str:
        """Return which helper has ended, and why; empty if none has."""
        end = time.monotonic() + GRACE / 4
        while self._helpers and time.monotonic() < end:
            for one in self._helpers:
                if one.process.poll() is not None:
                    return one.reason(self.count)
            time.sleep(0.05)
        return ""


class Helper:
    """A process that rank 0 has started for another rank, and what it says.

    Its standard input stays open as long as rank 0 lives: when that ends, whatever ends it, so does this.
    """

    def __init__(self, rank: int, told: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        self.rank, self.said = rank, _unnamed_file()
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", FOLLOW, json.dumps(told)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self.said,
            env=dict(environment),
            start_new_session=True,  # Ctrl-C is rank 0's to hear
        )

    def end(self, seconds: float) -> None:
        """Wait for the process to end, and kill it if it does not."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for one in filter(None, (self.process.stdin, self.said)):
            with suppress(OSError):  # whoever was to read it has gone
                one.close()

    def reason(self, count: int) -> str:
        """Return in a sentence that this process has ended, and what it said last."""
        self.said.seek(0)
        lines = self.said.read().decode(errors="replace").strip().splitlines()
        code = self.process.poll() or 0
        how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        last = f": {lines[-1][:300].rstrip('.')}" if lines and code > 0 else ""
        return f"The process of rank {self.rank} of {count} ended {how}{last}."


def _unnamed_file() -> IO[bytes]:
    return tempfile.TemporaryFile()


def rank_under_torchrun(count: int) -> int | None:
    """Return which rank this process is; None if it was not started by torchrun or its like.

    Raises:
        InvalidParameter: another number of processes was started.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    size = os.environ["WORLD_SIZE"]
    if size != str(count):
        raise InvalidParameter(
            f"parallel asks for {count} ranks, but {size} processes were started (WORLD_SIZE); start torchrun with "
            f"--nproc-per-node {count}, or ask for as many as there are."
        )
    return int(os.environ["RANK"])


def is_other_rank(parallel: object) -> bool:
    """Tell whether torchrun has started this process for another rank than the first; errors are those of `load`."""
    return bool(rank_under_torchrun(TargetSplit.named(parallel).ranks))


def gathered(count: int, told: Mapping[str, Any]) -> Ranks:
    """Return this process's place among the ranks, which are started here unless torchrun has started them.

    Args:
        count: how many.
        told: what the others need to know to load their parts, as plain values.

    Raises:
        InvalidParameter: torchrun has started another number, there are too few GPUs, or this process is in a group
            already, as with another target over several ranks.
    """
    rank = rank_under_torchrun(count)
    if dist.is_initialized():
        raise InvalidParameter(
            "This process belongs to a torch.distributed group already, as with another target over several ranks; "
            "load such a target in a process of its own."
        )
    gpus = torch.cuda.device_count()
    here = int(os.environ.get("LOCAL_WORLD_SIZE", count))
    if 0 < gpus < here:
        raise InvalidParameter(f"There are {gpus} GPUs here for {here} ranks; ask for as many ranks, or fewer.")
    if rank is not None:
        return Ranks(count, rank)
    folder = Path(tempfile.mkdtemp(prefix="polydraft-ranks-"))
    shared = {**os.environ, "WORLD_SIZE": str(count), "OMP_NUM_THREADS": str(torch.get_num_threads())}
    shared["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    shared |= {NETWORK: "lo"} if sys.platform == "linux" else {}
    helpers = list[Helper]()
    try:
        for number in range(1, count):
            own = {"RANK": str(number), "LOCAL_RANK": str(number)}
            helpers.append(Helper(number, {**told, "folder": str(folder)}, {**shared, **own}))
    except BaseException:
        for one in helpers:
            one.end(0.0)
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return Ranks(count, 0, tuple(helpers), folder)


@contextmanager
def on_this_machine(ranks: Ranks) -> Iterator[None]:
    """Let ranks that were started here meet at this machine's own address, while their groups are made."""
    before = os.environ.get(NETWORK)
    if ranks._folder is not None and sys.platform == "linux":
        os.environ[NETWORK] = "lo"
    try:
        yield
    finally:
        os.environ.pop(NETWORK, None)
        if before is not None:
            os.environ[NETWORK] = before


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold back Ctrl-C until something is done; pressed again, it comes through.

    Where ranks meet, an exception in the midst would leave the others waiting.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    pressed = list[tuple[int, Any]]()

    def note(number: int, frame: Any) -> None:
        pressed.append((number, frame))
        if len(pressed) > 1:
            before(number, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if pressed:
            before(*pressed[0])
