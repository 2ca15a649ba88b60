"""`polydraft bench` and its subjects: the commands and their options."""

import inspect
from typing import TYPE_CHECKING, Any

import typer

from polydraft.cli.lab import join_lab
from polydraft.cli.option_words import KINDS
from polydraft.cli.process import importing
from polydraft.errors import InvalidParameter
from polydraft.options.commands.bench_options import BenchOptions
from polydraft.options.flags import command

if TYPE_CHECKING:
    Context = typer.Context
else:  # what typer passes is of the class above its own, which versions of typer import from different places
    Context = next(kind for kind in typer.Context.__mro__[1:] if kind.__name__ == "Context")

bench_app = typer.Typer(subcommand_metavar="[SUBJECT] [ARGS]...")


def bench(context: Any, options: BenchOptions) -> None:
    """Measure arms side by side, unless the name of a subject follows."""
    if context.invoked_subcommand is not None:
        return refuse_options_before(context)
    with importing():
        from polydraft.cli.benchmark.bench import run_bench

    raise typer.Exit(run_bench(options))


_CONTEXT = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=Context)
bench_app.callback(
    invoke_without_command=True,
    help="Measure the speed-up over plain decoding and Hugging Face's loops, side by side; or one of the subjects "
    "below.",
)(command(BenchOptions, bench, KINDS, [_CONTEXT]))


join_lab(bench_app, "bench passes", "bench rules", "bench planner", "bench lattice", panel="Subjects")


def refuse_options_before(context: Context) -> None:
    """Refuse options of `polydraft bench` before the name of a subject, which has options of its own.

    Raises:
        InvalidParameter: one was given.
    """
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if source is not None and source.name == "COMMANDLINE":
            raise InvalidParameter(
                f"{parameter.opts[0]} before {context.invoked_subcommand} would do nothing: give the options of a "
                "subject behind its name."
            )
