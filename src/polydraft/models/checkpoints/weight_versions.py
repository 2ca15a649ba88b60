"""Versions of a model's weights on disk: each is whole or not there, and a pointer names the one that is used.

    origin.json                     which target and which weights the versions began with
    versions/17-a3f2c1d0/           model.safetensors, and version.json: digest, parent, figures; no text
    CURRENT                         the version in use, and the number of the look that chose it
    PINNED                          the same, where somebody fixed it
    forgotten                       a mark that is another one after everything was forgotten
    writer.lock, change.lock        held by who learns, and for the moment of a change

A look is a comparison of weights. Each look has a key of its own, whatever came of it, and so has each version: random
numbers that are forked by the key are independent of all that was written before the look, also of what made the look
choose as it did.
"""

import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from polydraft.errors import CheckpointError, InvalidParameter, ResultsError

KEPT = 3
"""How many of the newest versions are kept, beside the one in use."""
FORMAT, FIRST = 1, 64
WEIGHTS, FACTS, VERSIONS, HALF = "model.safetensors", "version.json", "versions", ".part-"
CURRENT, PINNED, ORIGIN, FORGOTTEN = "CURRENT", "PINNED", "origin.json", "forgotten"
NAME = re.compile(r"(\d{1,9})-([0-9a-f]{8})")
USED = re.compile(r"(\d{1,9}-[0-9a-f]{8})\.(\d{1,9})")
Weights = Mapping[str, Tensor]


def weights_of(network: nn.Module) -> dict[str, Tensor]:
    """Return copies of a model's weights on the host, tied ones once."""
    return {name: one.detach().cpu().clone() for name, one in network.named_parameters()}


def put_weights(network: nn.Module, weights: Weights) -> None:
    """Write weights over those of a model, which nobody else may use meanwhile.

    Raises:
        CheckpointError: they are another model's, or no numbers.
    """
    own = dict(network.named_parameters())
    if {name: one.shape for name, one in own.items()} != {name: one.shape for name, one in weights.items()}:
        raise CheckpointError("The weights are not those of this draft: their names or shapes differ.")
    if not all(bool(one.isfinite().all()) for one in weights.values()):
        raise CheckpointError("The weights are no numbers.")
    with torch.no_grad():
        for name, one in own.items():
            one.copy_(weights[name])


def weights_digest(weights: Weights) -> str:
    """Return a digest of weights, by their names, shapes and values in single precision; 32 hexadecimal digits."""
    found = blake2b(digest_size=16)
    for name in sorted(weights):
        value = weights[name].detach().to("cpu", torch.float32).contiguous()
        found.update(f"{name} {tuple(value.shape)} ".encode())
        found.update(value.numpy().tobytes())
    return found.hexdigest()


def rough_digest(network: nn.Module) -> str:
    """Return a digest of a large model: of all names and shapes, and of the first numbers of every weight."""
    found = blake2b(digest_size=16)
    for name, value in sorted(network.state_dict().items()):
        first = value.detach().flatten()[:FIRST].cpu().float().contiguous()
        found.update(f"{name} {tuple(value.shape)} ".encode())
        found.update(first.numpy().tobytes())
    return found.hexdigest()


@dataclass(frozen=True)
class WeightVersion:
    """A version.

    Args:
        number: of the version, from 1 on; 0 for the weights that nothing was learnt for.
        digest: of its weights.
        facts: what is known of it: its parent, counts and figures.
    """

    number: int
    digest: str
    facts: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Its name, as folders have it."""
        return f"{self.number}-{self.digest[:8]}"

    def key(self, look: int) -> bytes:
        """Return what no other version, and no other look at this one, has; nothing before all learning."""
        return b"" if not self.number and not look else f"{self.digest} {self.number} {look}".encode()


@dataclass(frozen=True)
class VersionInUse:
    """Which version is used, since which look.

    Args:
        version: its name; empty for the weights that nothing was learnt for.
        look: the number of the last look.
        pinned: whether somebody fixed it.
        forgotten: the mark of the last time that everything was forgotten.
    """

    version: str = ""
    look: int = 0
    pinned: bool = False
    forgotten: str = ""


@dataclass(frozen=True)
class VersionFolder:
    """A folder of versions; any number of processes may read it, and one learns."""

    path: Path

    @contextmanager
    def written(self) -> Iterator[bool]:
        """Be the one who learns, as long as the context lasts; False where somebody else is."""
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / "writer.lock").open("a") as file:
            yield _locked(file, waits=False)

    def check_origin(self, target: str, draft: str) -> None:
        """Note of which models the versions are, or check that they are of these.

        Raises:
            ResultsError: they are of others, or it cannot be noted.
        """
        own, path = {"format": FORMAT, "target": target, "draft": draft}, self.path / ORIGIN
        there = _read_json(path)
        if there is None:
            try:
                with self._changed():  # several workers may start at once
                    there = _read_json(path) or own
                    _write_whole(path, json.dumps(there))
            except OSError as error:
                reason = error.strerror or error
                raise ResultsError(f"{self.path} cannot be written: {reason}; name another folder.") from error
        if there != own:
            kind = "target" if there.get("target") != target else "draft"
            raise ResultsError(f"{self.path} holds what was learnt for another {kind}; name another folder by --learn.")

    def versions(self) -> list[WeightVersion]:
        """Return the versions that are there, the newest first; their weights are not read."""
        found = list[WeightVersion]()
        for folder in (self.path / VERSIONS).glob("*-*"):
            facts = _read_json(folder / FACTS) if NAME.fullmatch(folder.name) else None
            if facts is not None and isinstance(facts.get("digest"), str) and isinstance(facts.get("number"), int):
                found.append(WeightVersion(facts["number"], facts["digest"], facts))
        return sorted(found, key=lambda one: -one.number)

    def version(self, name: str) -> WeightVersion:
        """Return a version by its name.

        Raises:
            CheckpointError: there is none.
        """
        for one in self.versions():
            if one.name == name:
                return one
        raise CheckpointError(f"{self.path} has no version {name}.")

    def read(self, version: WeightVersion) -> dict[str, Tensor]:
        """Return a version's weights.

        Raises:
            CheckpointError: they are not there, or damaged.
        """
        path = self.path / VERSIONS / version.name / WEIGHTS
        try:
            weights = load_file(path)
        except Exception as error:  # whatever a damaged file makes of its reader
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        if weights_digest(weights) != version.digest:
            raise CheckpointError(f"{path} is damaged: its digest is another one.")
        return weights

    def in_use(self, *, pins: bool = True) -> VersionInUse:
        """Return which version is used; a pointer that cannot be read, or names what is not there, is none.

        Then the newest version counts, if there is one.

        Args:
            pins: whether a pin counts; else it is told which version is used without it.
        """
        mark = self.mark()
        for name in (PINNED, CURRENT) if pins else (CURRENT,):
            found = _read_json(self.path / name) or {}
            version, look = found.get("version"), found.get("look")
            if isinstance(version, str) and isinstance(look, int):
                if not version or (self.path / VERSIONS / version / FACTS).is_file():
                    return VersionInUse(version, look, name == PINNED, mark)
        newest = next(iter(self.versions()), None)
        if newest is None:
            return VersionInUse(forgotten=mark)
        return VersionInUse(newest.name, int(newest.facts.get("look", 0)), forgotten=mark)

    def mark(self) -> str:
        """Return the mark of the last time that everything was forgotten; empty if it never was."""
        with suppress(OSError):
            return (self.path / FORGOTTEN).read_text()
        return ""

    def add(self, weights: Weights, facts: Mapping[str, Any], mark: str | None = None) -> WeightVersion:
        """Write a version, which is not used yet.

        Args:
            weights: its weights.
            facts: what is known of it.
            mark: the mark when the texts came that it was learnt from; None where there are none.

        Raises:
            OSError: it cannot be written, or everything was forgotten since the mark was read; nothing of it is left.
        """
        folder = self.path / VERSIONS
        folder.mkdir(parents=True, exist_ok=True)
        self.sweep()
        numbers = [int(found[1]) for one in folder.iterdir() if (found := NAME.fullmatch(one.name))]
        version = WeightVersion(max(numbers, default=0) + 1, weights_digest(weights), facts)
        half = folder / f"{HALF}{version.name}"
        try:
            half.mkdir()
            kept = {name: one.detach().cpu().contiguous() for name, one in weights.items()}
            with disk_errors():
                save_file(kept, half / WEIGHTS)
            _flush(half / WEIGHTS)
            told = {**facts, "number": version.number, "digest": version.digest}
            _write_whole(half / FACTS, json.dumps(told))
            with self._changed():
                if mark not in (None, self.mark()):
                    raise OSError("Everything was forgotten meanwhile.")
                os.replace(half, folder / version.name)
            _flush(folder)
        except OSError:
            shutil.rmtree(half, ignore_errors=True)
            raise
        return WeightVersion(version.number, version.digest, told)

    def use(self, version: str, look: int, mark: str) -> bool:
        """Let a version be used from now on; False, and nothing, if everything was forgotten since the mark was read.

        Raises:
            OSError: it cannot be written; what was used before is.
        """
        with self._changed():
            if self.mark() != mark:
                return False
            _write_whole(self.path / CURRENT, json.dumps({"version": version, "look": look}))
            return True

    def prune(self, *others: str) -> None:
        """Drop versions but for the newest ones, those in use and others that are named.

        A version that is half deleted has another name.

        Raises:
            OSError: they cannot be deleted.
        """
        with self._changed():
            own = self.in_use().version, self.in_use(pins=False).version, *others
            for one in self.versions()[KEPT:]:
                if one.name not in own:
                    self._drop(one.name)

    def sweep(self) -> None:
        """Delete what somebody who was interrupted left half written."""
        for one in (self.path / VERSIONS).glob(f"{HALF}*"):
            shutil.rmtree(one, ignore_errors=True)

    def forget(self) -> int:
        """Drop all versions, whoever learns and serves meanwhile; return how many there were.

        Raises:
            OSError: they cannot be deleted.
        """
        with self._changed():
            found = self.versions()
            _write_whole(self.path / FORGOTTEN, secrets.token_hex(8))
            for name in (PINNED, CURRENT):
                (self.path / name).unlink(missing_ok=True)
            for one in found:
                self._drop(one.name)
            self.sweep()
        return len(found)

    def pin(self, version: str | None) -> VersionInUse:
        """Fix the version that is used, until None is given.

        Raises:
            InvalidParameter: there is no such version; the text names those there are.
            OSError: it cannot be written.
        """
        with self._changed():
            if version is None:
                (self.path / PINNED).unlink(missing_ok=True)
            else:
                names = [one.name for one in self.versions()]
                known = {one.partition("-")[0]: one for one in names} | {one: one for one in names} | {"0": ""}
                if version not in known:
                    there = ", ".join([*names, "0 (the weights before all learning)"])
                    raise InvalidParameter(f"VERSION is {version!r}, but {self.path} has {there}; name one of these.")
                look = int((_read_json(self.path / CURRENT) or {}).get("look", 0))
                _write_whole(self.path / PINNED, json.dumps({"version": known[version], "look": look}))
        return self.in_use()

    @contextmanager
    def _changed(self) -> Iterator[None]:
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / "change.lock").open("a") as file:
            _locked(file, waits=True)
            yield

    def _drop(self, name: str) -> None:
        half = self.path / VERSIONS / f"{HALF}{name}"
        shutil.rmtree(half, ignore_errors=True)
        os.replace(self.path / VERSIONS / name, half)
        shutil.rmtree(half, ignore_errors=True)


def _locked(file: IO[str], *, waits: bool) -> bool:
    """Lock a file until it is closed, also by the end of the process; True where this system has no such locks."""
    try:
        import fcntl
    except ImportError:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
    except OSError:
        return False
    return True


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _write_whole(path: Path, text: str) -> None:
    """Write a file beside its place and put it there, so that it is the old one or the new one whatever happens."""
    half = path.with_name(f"{HALF}{path.name}")
    try:
        half.write_text(text)
        _flush(half)
        os.replace(half, path)
        _flush(path.parent)
    except OSError:
        with suppress(OSError):
            half.unlink(missing_ok=True)
        raise


def _flush(path: Path) -> None:
    """Have a file, or the names in a folder, on the disk itself."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


@contextmanager
def disk_errors() -> Iterator[None]:
    """Raise as `OSError` what safetensors and torch raise where a file cannot be written, such as on a full disk."""
    try:
        yield
    except SafetensorError as error:
        if "I/O error" not in str(error):  # a file that is read, and damaged
            raise
        raise OSError(str(error)) from error
    except RuntimeError as error:
        writes = any(mark in str(error) for mark in ("inline_container", "PytorchStreamWriter"))
        if not writes or "PytorchStreamReader" in str(error):
            raise
        raise OSError("a checkpoint could not be written to its end; is the disk full?") from error
