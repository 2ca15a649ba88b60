"""`polydraft store build` and `polydraft store show`: the commands and their options."""

from pathlib import Path
from typing import Annotated

import typer

from polydraft.cli.arguments.options import OUTPUT, JsonOption, TargetOption
from polydraft.cli.arguments.places import folder_to_write, to_look_at
from polydraft.cli.arguments.values import count
from polydraft.cli.arguments.words import one_of
from polydraft.cli.process import importing

KINDS = ("suffix", "rest")
store_app = typer.Typer(
    help="Stores of texts, for drafters that look up what followed (docs/drafting_without_training.md).",
    no_args_is_help=True,
)


def _kind(word: str) -> str:
    return one_of(word, KINDS)


@store_app.command()
def build(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILES", help="Plain text, JSON lines, or folders of both, looked through to the end."),
    ],
    out: Annotated[
        Path,
        typer.Option(metavar="FOLDER", help="The store's folder.", callback=folder_to_write, rich_help_panel=OUTPUT),
    ],
    kind: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="suffix: add to a store that grows with use; rest: a store that is only read.",
            callback=_kind,
            rich_help_panel=OUTPUT,
        ),
    ] = "suffix",
    target: TargetOption = None,
    most_mb: Annotated[
        int | None,
        typer.Option(
            "--most-mb",
            min=1,
            callback=count,
            help="The largest size. suffix drops its oldest texts (default: its own, 268 if new), rest takes no more.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Fill a store with texts: of a target's tokens, so that its drafters find what followed."""
    with importing():
        from polydraft.cli.stores.build import BuildRequest, run_build

    raise typer.Exit(run_build(BuildRequest(tuple(files), out, kind, target, most_mb), as_json=as_json))


@store_app.command()
def show(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="The store's folder, or one of its files.", callback=to_look_at)
    ],
    as_json: JsonOption = False,
) -> None:
    """Tell what is in a store, and whether its files are whole."""
    with importing():
        from polydraft.cli.stores.show import run_show

    raise typer.Exit(run_show(folder, as_json=as_json))
