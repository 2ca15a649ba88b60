"""The commands: what each is called, says and takes, also those of `lab/`, which join in a checkout alone.

A command's module is imported when it is called.
"""

import sys
from collections.abc import Callable
from importlib.util import find_spec
from inspect import Parameter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.completion import completion_init  # pyright: ignore[reportPrivateImportUsage]

from polydraft.cli.option_words import KINDS
from polydraft.cli.process import carried_out_by, exit_code_of
from polydraft.errors import InvalidParameter
from polydraft.options.commands.align_options import AlignOptions
from polydraft.options.commands.bench_options import (
    BenchHeadsOptions,
    BenchOptions,
    ConformanceOptions,
    DemoOptions,
    FamilyOptions,
    ReportOptions,
    TuneOptions,
    TuneSkipsOptions,
)
from polydraft.options.commands.generate_options import ChatOptions, GenerateOptions
from polydraft.options.commands.making_options import (
    FetchOptions,
    LearnForgetOptions,
    LearnPinOptions,
    LearnShowOptions,
    StoreBuildOptions,
    StoreShowOptions,
    TrainAdapterOptions,
    TrainConsistencyOptions,
    TrainExitsOptions,
    TrainHeadOptions,
    TrainPairOptions,
)
from polydraft.options.commands.serve_options import Settings
from polydraft.options.commands.setup_options import CompletionOptions, DoctorOptions
from polydraft.options.flags import command

if TYPE_CHECKING:
    Context = typer.Context
else:  # what typer passes is of the class above its own, which versions of typer import from different places
    Context = next(kind for kind in typer.Context.__mro__[1:] if kind.__name__ == "Context")

LAB = Path(__file__).parents[3] / "lab"
"""Where a checkout has the lab; an installed package has no such folder beside it."""
ANYTHING = {"allow_extra_args": True, "ignore_unknown_options": True}
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
learn_app = typer.Typer(
    help="What the draft of a server learnt from its texts (docs/learning.md).", no_args_is_help=True
)
bench_app = typer.Typer(subcommand_metavar="[SUBJECT] [ARGS]...")
tune_app = typer.Typer(subcommand_metavar="[SUBJECT] [ARGS]...")
app.add_typer(bench_app, name="bench")
app.add_typer(tune_app, name="tune")
app.add_typer(train_app, name="train")
app.add_typer(store_app, name="store")
app.add_typer(learn_app, name="learn")


def main() -> None:
    """Run the command line and leave with its exit code; what goes wrong is one sentence on standard error."""
    completion_init()  # scripts of `polydraft completion` ask typer by an environment variable
    sys.exit(exit_code_of(lambda: app(standalone_mode=False)))


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    """Faster text generation with exactly the same output distribution."""
    if version:
        from polydraft import __version__

        typer.echo(__version__)
        raise typer.Exit


def add(group: typer.Typer, name: str, options: type, place: str, help: str, panel: str | None = None) -> None:
    """Add a command to a group: a dataclass of options and the function that takes one, "module:name"."""
    group.command(name, help=help, rich_help_panel=panel)(command(options, carried_out_by(place), KINDS))


def add_from_lab(group: typer.Typer, *calls: str, panel: str | None = None) -> None:
    """Add commands of the lab, such as "bench passes"; where it is missing, each of them says where it is."""
    commands = lab_commands()
    for call in calls:
        name = call.split()[-1]
        if name in commands:
            add(group, name, *commands[name], panel=panel)
        else:
            group.command(name, rich_help_panel=panel, context_settings=ANYTHING)(refusal(call))


def lab_commands() -> dict[str, tuple[type, str, str]]:
    """Return the lab's commands by their names, as `add` takes them; none where it is missing."""
    if LAB.is_dir() and str(LAB) not in sys.path:
        sys.path.append(str(LAB))
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


def bench(context: Any, options: BenchOptions) -> None:
    """Measure arms side by side, unless the name of a subject follows."""
    if context.invoked_subcommand is not None:
        return refuse_options_before(context)
    carried_out_by("polydraft.cli.benchmark.bench:run_bench")(options)


def tune(context: Any, options: TuneOptions) -> None:
    """Tune trees, unless the name of a subject follows."""
    if context.invoked_subcommand is not None:
        return refuse_options_before(context)
    carried_out_by("polydraft.cli.benchmark.tune:run_tune")(options)


def refuse_options_before(context: Context) -> None:
    """Refuse options of a command before the name of a subject, which has options of its own.

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


CONTEXT = [Parameter("context", Parameter.POSITIONAL_OR_KEYWORD, annotation=Context)]
tune_app.callback(
    invoke_without_command=True,
    help="Find the fastest tree for a pair of models on this machine, and write it to a plan for `generate --plan`; "
    "or the subject below.",
)(command(TuneOptions, tune, KINDS, CONTEXT))
bench_app.callback(
    invoke_without_command=True,
    help="Measure the speed-up over plain decoding and Hugging Face's loops, side by side; or one of the subjects "
    "below.",
)(command(BenchOptions, bench, KINDS, CONTEXT))
add_from_lab(
    bench_app, "bench passes", "bench rules", "bench planner", "bench lattice", "bench pipelines", panel="Subjects"
)
add(
    bench_app,
    "heads",
    BenchHeadsOptions,
    "polydraft.cli.benchmark.heads:run_heads",
    "Train heads of every kind for a target by one recipe, and measure them side by side.",
    panel="Subjects",
)
add(
    app,
    "serve",
    Settings,
    "polydraft.cli.serving:run_serve",
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
    "polydraft.cli.benchmark.demo:run_demo",
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
add(
    app,
    "doctor",
    DoctorOptions,
    "polydraft.cli.setup.doctor:run_doctor",
    "Tell what is installed, what this machine has, and what would fail or be slow; exit code 1 if something fails.",
)
add(
    app,
    "completion",
    CompletionOptions,
    "polydraft.cli.setup.completion:run_completion",
    "Print the script by which a shell completes commands, options and words (docs/command_line.md).",
)
add_from_lab(app, "limits")
add(
    tune_app,
    "skips",
    TuneSkipsOptions,
    "polydraft.cli.benchmark.tune_skips:run_tune_skips",
    "Search the sub-layers that a target drafts best without, and write them to a file for --draft self:skip=FILE.",
)
add(
    app,
    "align",
    AlignOptions,
    "polydraft.cli.benchmark.align:run_align",
    "Make a draft for a target, or tune one, and judge it by the clock; exit code 3 if it is no better. With "
    "--measure: tell how many tokens a target call brings with a draft.",
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
    "polydraft.cli.train:run_train_pair",
    "Train the embedded pair from the Python files on this machine, and export it with its measurements.",
)
add(
    train_app,
    "head",
    TrainHeadOptions,
    "polydraft.cli.train:run_train_head",
    "Train a draft head for a target: the target writes text behind prompts, and the head learns from it.",
)
add(
    train_app,
    "adapter",
    TrainAdapterOptions,
    "polydraft.cli.train:run_train_adapter",
    "Train an adapter that drafts behind the target's first layers (Kangaroo); the target stays as it is.",
)
add(
    train_app,
    "exits",
    TrainExitsOptions,
    "polydraft.cli.train:run_train_exits",
    "Tune a target so that its first layers draft for it (LayerSkip), and write the tuned model, which is another one.",
)
add(
    train_app,
    "consistency",
    TrainConsistencyOptions,
    "polydraft.cli.train:run_train_consistency",
    "Tune a target so that Jacobi decoding takes fewer passes (CLLM), and write the tuned model, which is another one; "
    "or tune a draft so that it fills blocks.",
)
add(
    store_app,
    "build",
    StoreBuildOptions,
    "polydraft.cli.stores:run_build",
    "Fill a store with texts: of a target's tokens, so that its drafters find what followed.",
)
add(
    store_app,
    "show",
    StoreShowOptions,
    "polydraft.cli.stores:run_show",
    "Tell what is in a store, and whether its files are whole.",
)
add(
    learn_app,
    "show",
    LearnShowOptions,
    "polydraft.cli.setup.learnt_folder:run_learn_show",
    "Tell which versions there are, what each saved on held-out text, and which is used.",
)
add(
    learn_app,
    "forget",
    LearnForgetOptions,
    "polydraft.cli.setup.learnt_folder:run_learn_forget",
    "Drop all versions, and the texts that a running server keeps to learn from.",
)
add(
    learn_app,
    "pin",
    LearnPinOptions,
    "polydraft.cli.setup.learnt_folder:run_learn_pin",
    "Let a server draft with one version, and learn nothing, until `pin FOLDER newest`.",
)
