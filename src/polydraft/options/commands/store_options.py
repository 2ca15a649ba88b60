"""Options of the commands that keep things: `polydraft fetch`, `polydraft store build` and `polydraft store show`."""

from dataclasses import dataclass
from pathlib import Path

from polydraft.options.commands.option_groups import FILE_TO_READ, FOLDER, JSON, OUTPUT, TARGET
from polydraft.options.option import Option, count, option
from polydraft.options.places import to_look_at


@dataclass(frozen=True, kw_only=True)
class FetchOptions:
    """One call of `polydraft fetch`."""

    what: str | None = option(None, "What to fetch; none lists all there is.", argument=True, metavar="WORD")
    source: Path | None = FILE_TO_READ.but(
        help="The file that would be downloaded, if you have it.", flag="--from"
    ).usually(None)
    as_json: bool = JSON.usually(False)


@dataclass(frozen=True, kw_only=True)
class StoreBuildOptions:
    """One call of `polydraft store build`."""

    files: tuple[Path, ...] = Option(
        "Plain text, JSON lines, or folders of both, looked through to the end.", argument=True, metavar="FILES"
    ).needed()
    out: Path = FOLDER.but(help="The store's folder.", panel=OUTPUT).needed()
    kind: str = option(
        "suffix",
        "suffix: add to a store that grows with use; rest: a store that is only read.",
        OUTPUT,
        metavar="NAME",
        words=("suffix", "rest"),
    )
    target: str | None = TARGET.usually(None)
    most_mb: int | None = count(
        None,
        "The largest size. suffix drops its oldest texts (default: its own, 268 if new), rest takes no more.",
        OUTPUT,
    )
    as_json: bool = JSON.usually(False)

    @property
    def most_bytes(self) -> int | None:
        """The store's largest size, if it was given."""
        return None if self.most_mb is None else 1_000_000 * self.most_mb


@dataclass(frozen=True, kw_only=True)
class StoreShowOptions:
    """One call of `polydraft store show`."""

    folder: Path = Option(
        "The store's folder, or one of its files.", argument=True, metavar="FOLDER", check=to_look_at
    ).needed()
    as_json: bool = JSON.usually(False)
