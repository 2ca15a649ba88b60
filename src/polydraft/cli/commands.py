"""The commands: what each is called, says and takes. A command's module is imported when it is called."""

import sys
from typing import Annotated

import typer

from polydraft.cli.benchmark import bench_app
from polydraft.cli.lab import join_lab
from polydraft.cli.option_words import KINDS
from polydraft.cli.process import carried_out_by, exit_code_of
from polydraft.options.commands.bench_options import (
    ConformanceOptions,
    DemoOptions,
    FamilyOptions,
    ReportOptions,
    TuneOptions,
)
from polydraft.options.commands.generate_options import ChatOptions, GenerateOptions
from polydraft.options.commands.serve_options import Settings
from polydraft.options.commands.store_options import FetchOptions, StoreBuildOptions, StoreShowOptions
from polydraft.options.commands.train_options import TrainHeadOptions, TrainPairOptions
from polydraft.options.flags import command

app = typer.Typer(
    name="polydraft",
    help="Faster text generation with exactly the same output distribution, by multi-draft speculative decoding.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
train_app = typer.Typer(help="Train models.", no_args_is_help=True)
store_app = typer.Typer(
    help="Stores of texts, for drafters that look up what followed (docs/drafting_without_training.md).",
    no_args_is_help=True,
)
app.add_typer(bench_app, name="bench")
app.add_typer(train_app, name="train")
app.add_typer(store_app, name="store")


def main() -> None:
    """Run the command line and leave with its exit code; what goes wrong is one sentence on standard error."""
    sys.exit(exit_code_of(lambda: app(standalone_mode=False)))


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    """Faster text generation with exactly the same output distribution."""
    if version:
        from polydraft import __version__

        typer.echo(__version__)
        raise typer.Exit


def add(group: typer.Typer, name: str, options: type, place: str, help: str) -> None:
    """Add a command to a group.

    Args:
        group: the group.
        name: what it is called.
        options: the dataclass of its options.
        place: the function that carries it out, "module:name".
        help: what it does.
    """
    group.command(name, help=help)(command(options, carried_out_by(place), KINDS))


add(
    app,
    "serve",
    Settings,
    "polydraft.cli.serve.serving:run_serve",
    "Serve a model to OpenAI's clients, with a page at / and metrics at /metrics.",
)
add(
    app,
    "generate",
    GenerateOptions,
    "polydraft.cli.generation.job:run",
    "Generate text: drafted tokens in green, the target's own in white, then a table of what happened.",
)
add(
    app,
    "fetch",
    FetchOptions,
    "polydraft.cli.fetch:run_fetch",
    "Bring a real chat model, or Spec-Bench's questions, onto this machine: once, checked, into the cache folder.",
)
add(
    app,
    "chat",
    ChatOptions,
    "polydraft.cli.chat.command:run_chat",
    "Talk with a chat model: accepted drafts in green; every turn reads only what is new.",
)
add(
    app,
    "demo",
    DemoOptions,
    "polydraft.cli.demo:run_demo",
    "Show the embedded pair at work: text, a token tree, the statistics, and the speed-up over plain decoding.",
)
add(
    app,
    "conformance",
    ConformanceOptions,
    "polydraft.cli.conformance:run_conformance",
    "Prove every verification rule by enumeration; exit code 1 if a lossless one deviates from the target's law.",
)
add(
    app,
    "models",
    FamilyOptions,
    "polydraft.cli.models:run_models",
    "Tell which types of models can be decoded with drafts, and how; exit code 1 if a checked one is wrong.",
)


join_lab(app, "limits")


add(
    app,
    "tune",
    TuneOptions,
    "polydraft.cli.tune:run_tune",
    "Find the fastest tree for a pair of models on this machine, and write it to a plan for `generate --plan`.",
)
add(
    app,
    "report",
    ReportOptions,
    "polydraft.cli.benchmark.bench:run_report",
    "Make a page with tables and figures of a benchmark's runs.",
)
add(
    train_app,
    "pair",
    TrainPairOptions,
    "polydraft.cli.train.train_pair:run_train_pair",
    "Train the embedded pair from the Python files on this machine, and export it with its measurements.",
)
add(
    train_app,
    "head",
    TrainHeadOptions,
    "polydraft.cli.train.train_head:run_train_head",
    "Train a draft head for a target: the target writes text behind prompts, and the head learns from it.",
)
add(
    store_app,
    "build",
    StoreBuildOptions,
    "polydraft.cli.stores.store_commands:run_build",
    "Fill a store with texts: of a target's tokens, so that its drafters find what followed.",
)
add(
    store_app,
    "show",
    StoreShowOptions,
    "polydraft.cli.stores.store_commands:run_show",
    "Tell what is in a store, and whether its files are whole.",
)
