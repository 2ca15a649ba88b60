"""Commands of `lab/`, which lies beside `src/` in the repository and is in no wheel: they join in a checkout."""

import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import typer

from polydraft.cli.option_words import KINDS
from polydraft.cli.process import carried_out_by
from polydraft.errors import InvalidParameter
from polydraft.options.flags import command

PLACE = Path(__file__).parents[3] / "lab"
"""Where a checkout has it; an installed package has no such folder beside it."""
ANYTHING = {"allow_extra_args": True, "ignore_unknown_options": True}


def join_lab(app: typer.Typer, *calls: str, panel: str | None = None) -> None:
    """Add commands of the lab; where it is missing, each of them says in one sentence where it is.

    Args:
        app: what they become commands of.
        calls: how they are called: "limits", "bench passes".
        panel: the heading under which help shows them.
    """
    commands = lab_commands()
    for call in calls:
        name = call.split()[-1]
        if name in commands:
            options, place, help = commands[name]
            app.command(name, help=help, rich_help_panel=panel)(command(options, carried_out_by(place), KINDS))
        else:
            app.command(name, rich_help_panel=panel, context_settings=ANYTHING)(refusal(call))


def lab_commands() -> dict[str, tuple[type, str, str]]:
    """Return the lab's commands by their names; none where it is missing.

    Each is the dataclass of its options, the function that carries it out, "module:name", and what it does.
    """
    if PLACE.is_dir() and str(PLACE) not in sys.path:
        sys.path.append(str(PLACE))
    if find_spec("polydraft_lab") is None:
        return {}
    from polydraft_lab.commands.lab_commands import COMMANDS

    return COMMANDS


def refusal(call: str) -> Callable[[], None]:
    """Return a command that stands for one of the lab and takes whatever that takes."""

    def refuse() -> None:
        """Measure for research; only in a checkout of the repository."""
        raise InvalidParameter(
            f"`polydraft {call}` is in the folder lab/ of the repository, not in the installed package: clone the "
            "repository and run `make env` there."
        )

    return refuse
