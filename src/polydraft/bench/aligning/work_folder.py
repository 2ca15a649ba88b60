"""What an alignment leaves behind so that it goes on where it was: values by name, and how much time is spent."""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polydraft.errors import ResultsError

IDENTITY = "alignment"
SPENT = "spent"


class WorkFolder:
    """A folder of JSON values, each of which is there as a whole or not at all.

    Args:
        path: the folder, which is made where it is missing.
        identity: what the work is for, by name.

    Raises:
        ResultsError: it holds the work of something else, or is damaged.
        OSError: it cannot be written.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any]) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        there, own = self.read(IDENTITY), json.loads(json.dumps(dict(identity)))
        if there is None:
            if any(path.iterdir()):
                raise ResultsError(f"--work {path} holds something else than an alignment; name an empty folder.")
            self.write(IDENTITY, own)
            return
        other = [name for name, value in own.items() if not isinstance(there, dict) or there.get(name) != value]
        if other:
            raise ResultsError(
                f"--work {path} holds an alignment with another {', '.join(other)}; name an empty folder."
            )

    def read(self, name: str) -> Any:
        """Return a value; None where there is none.

        Raises:
            ResultsError: its file is damaged.
        """
        try:
            return json.loads((self.path / f"{name}.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise ResultsError(f"{self.path / name}.json is damaged; begin in an empty folder.") from error

    def write(self, name: str, value: Any) -> None:
        """Keep a value, in place of the one that was there."""
        beside = self.path / f".{name}.part"
        beside.write_text(json.dumps(value, indent=1), encoding="utf-8")
        os.replace(beside, self.path / f"{name}.json")


@dataclass(frozen=True)
class Budget:
    """How much time all stages may take together, those of earlier calls included.

    Args:
        seconds: all of it.
        clock: tells seconds.
        began: what it told when this call began.
        spent: what earlier calls took.
    """

    seconds: float
    clock: Callable[[], float]
    began: float
    spent: float = 0.0

    @property
    def used(self) -> float:
        """The seconds that were spent."""
        return self.spent + self.clock() - self.began

    def left(self, share: float = 1.0) -> float:
        """Return how many seconds are left until a share of all is spent; none are less than 0."""
        return max(0.0, share * self.seconds - self.used)


class Pace:
    """Tells whether there is time for one more of what is done again and again.

    Args:
        budget: the time.
        share: of all of it, when to be done.
        longest: how many seconds one of them takes, as far as is known.
    """

    def __init__(self, budget: Budget, share: float, longest: float = 0.0) -> None:
        self.budget, self.share, self.longest = budget, share, longest
        self.since = budget.used

    def begin(self) -> None:
        """Begin one of them."""
        self.since = self.budget.used

    def done(self, units: int = 1) -> None:
        """Note that so many were done, and the next one begins."""
        now = self.budget.used
        self.longest, self.since = max(self.longest, (now - self.since) / units), now

    def fits(self) -> bool:
        """Tell whether one more fits that takes as long as the longest so far."""
        return self.budget.left(self.share) >= self.longest
