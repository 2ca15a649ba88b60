"""`polydraft bench` and its subjects: the commands and their options."""

from typing import TYPE_CHECKING

import typer

from polydraft.cli.arguments.measuring import (
    ArmOption,
    BatchSizesOption,
    BenchHeatsOption,
    BenchQuietOption,
    BenchTokensOption,
    ExcerptOption,
    FixedSeedOption,
    JsonLinesOption,
    LimitOption,
    PromptsOption,
    RepeatsOption,
    ReplayOption,
    RunsOption,
    UntilEndOption,
)
from polydraft.cli.arguments.options import (
    DeviceOption,
    DraftOption,
    DtypeOption,
    TargetOption,
    TemplateOption,
)
from polydraft.cli.lab import join_lab
from polydraft.cli.process import importing
from polydraft.errors import InvalidParameter

if TYPE_CHECKING:
    Context = typer.Context
else:  # what typer passes is of the class above its own, which versions of typer import from different places
    Context = next(kind for kind in typer.Context.__mro__[1:] if kind.__name__ == "Context")

bench_app = typer.Typer(subcommand_metavar="[SUBJECT] [ARGS]...")


@bench_app.callback(invoke_without_command=True)
def bench(
    context: Context,
    target: TargetOption = None,
    draft: DraftOption = None,
    prompts: PromptsOption = None,
    limit: LimitOption = 8,
    arm: ArmOption = None,
    temperature: BenchHeatsOption = None,
    batch_size: BatchSizesOption = None,
    repeats: RepeatsOption = 1,
    max_new_tokens: BenchTokensOption = None,
    until_end: UntilEndOption = False,
    replay: ReplayOption = False,
    excerpt_tokens: ExcerptOption = None,
    seed: FixedSeedOption = 0,
    out: RunsOption = None,
    chat_template: TemplateOption = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    as_json: JsonLinesOption = False,
    quiet: BenchQuietOption = False,
) -> None:
    """Measure the speed-up over plain decoding and Hugging Face's loops, side by side; or one of the subjects below."""
    if context.invoked_subcommand is not None:
        return refuse_options_before(context)
    with importing():
        from polydraft.cli.benchmark.bench import WHOLE, BenchRequest, SpeedSettings, run_bench

    settings = SpeedSettings(
        temperatures=tuple(temperature) if temperature else SpeedSettings.temperatures,
        batch_sizes=tuple(batch_size) if batch_size else SpeedSettings.batch_sizes,
        repeats=repeats,
        max_new_tokens=max_new_tokens or (WHOLE if replay else SpeedSettings.max_new_tokens),
        excerpt_tokens=excerpt_tokens or SpeedSettings.excerpt_tokens,
        seed=seed,
        until_end=until_end,
        replay=replay,
    )
    chosen = tuple(prompts) if prompts else BenchRequest.prompts
    cut = excerpt_tokens is not None
    request = BenchRequest(
        settings, tuple(arm or ()), target, draft, chosen, limit, out, dtype, device, cut, chat_template
    )
    raise typer.Exit(run_bench(request, as_json=as_json, quiet=quiet))


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
