"""`polydraft bench` and its subjects: the commands and their options."""

import inspect
from typing import Any

import typer

from polydraft.cli.arguments.measuring import (
    BenchQuietOption,
    FixedSeedOption,
    JsonLinesOption,
    LimitOption,
    MaxTokensOption,
    NumbersOption,
    PromptsOption,
    ShortlistOption,
)
from polydraft.cli.arguments.options import (
    BottomUpOption,
    DeviceOption,
    DraftOption,
    DtypeOption,
    TargetOption,
)
from polydraft.cli.arguments.subjects import (
    Context,
    FreshOption,
    KnownOption,
    LaneTokensOption,
    LatticeDraftsOption,
    LatticeHeatsOption,
    LatticeIntoOption,
    LatticePageOption,
    LatticeRepeatsOption,
    PartsOption,
    PassDraftsOption,
    PassRepeatsOption,
    PlannerRepeatsOption,
    RulesHeatsOption,
    SchemesOption,
    SettingsOption,
    TreesOption,
    VerifiersOption,
    VocabularyOption,
    WidthsOption,
    refuse_options_before,
)
from polydraft.cli.process import importing
from polydraft.cli.words import KINDS
from polydraft.options.commands.bench_options import BenchOptions
from polydraft.options.flags import command

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


@bench_app.command(rich_help_panel="Subjects")
def passes(
    target: TargetOption = None,
    draft: PassDraftsOption = None,
    known: KnownOption = None,
    width: WidthsOption = None,
    repeats: PassRepeatsOption = 20,
    seed: FixedSeedOption = 0,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    as_json: JsonLinesOption = False,
    quiet: BenchQuietOption = False,
) -> None:
    """Time passes of the target and of its drafts, by the tokens that they score and those known before."""
    with importing():
        from polydraft.cli.benchmark.passes import PassesRequest, PassSettings, run_passes

    settings = PassSettings(
        known=tuple(known) if known else PassSettings.known,
        widths=tuple(width) if width else PassSettings.widths,
        repeats=repeats,
        seed=seed,
    )
    request = PassesRequest(settings, target, tuple(draft or ()), dtype, device)
    raise typer.Exit(run_passes(request, as_json=as_json, quiet=quiet))


@bench_app.command(rich_help_panel="Subjects")
def rules(
    target: TargetOption = None,
    draft: DraftOption = None,
    prompts: PromptsOption = None,
    limit: LimitOption = 2,
    part: PartsOption = None,
    verifier: VerifiersOption = None,
    scheme: SchemesOption = None,
    bottom_up: BottomUpOption = False,
    tree: TreesOption = None,
    temperature: RulesHeatsOption = None,
    k: NumbersOption = "2,4",
    shortlist: ShortlistOption = 64,
    max_tokens: MaxTokensOption = 64,
    vocabulary: VocabularyOption = None,
    seed: FixedSeedOption = 0,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    as_json: JsonLinesOption = False,
    quiet: BenchQuietOption = False,
) -> None:
    """Measure what rules cost and accept at a node, what they take of a step, and what the optimum itself costs."""
    with importing():
        from polydraft.cli.benchmark.rules import RulesRequest, RulesSettings, refuse_idle_options, run_rules
        from polydraft.cli.limits import parse_numbers

    refuse_idle_options(part, bottom_up=bottom_up, tree=tree, vocabulary=vocabulary)
    settings = RulesSettings(
        temperatures=tuple(temperature) if temperature else RulesSettings.temperatures,
        drafts=parse_numbers(k),
        trees=tuple(tree) if tree else RulesSettings.trees,
        max_tokens=max_tokens,
        shortlist=shortlist,
        vocabulary=vocabulary or RulesSettings.vocabulary,
        seed=seed,
    )
    request = RulesRequest(
        settings,
        verifiers=tuple(verifier or ()),
        schemes=tuple(scheme or ()),
        parts=tuple(part or ()),
        bottom_up=bottom_up,
        target=target,
        draft=draft,
        prompts=tuple(prompts) if prompts else RulesRequest.prompts,
        limit=limit,
        dtype=dtype,
        device=device,
    )
    raise typer.Exit(run_rules(request, as_json=as_json, quiet=quiet))


@bench_app.command(rich_help_panel="Subjects")
def planner(
    target: TargetOption = None,
    draft: DraftOption = None,
    prompts: PromptsOption = None,
    limit: LimitOption = 8,
    setting: SettingsOption = None,
    fresh: FreshOption = False,
    repeats: PlannerRepeatsOption = 2,
    max_new_tokens: LaneTokensOption = 96,
    seed: FixedSeedOption = 7,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    as_json: JsonLinesOption = False,
    quiet: BenchQuietOption = False,
) -> None:
    """Compare the planner with plain decoding and fixed trees, also where drafts do not pay."""
    with importing():
        from polydraft.cli.benchmark.planner import PlannerOptions, PlannerRequest, run_planner

    options = PlannerOptions(max_new_tokens, repeats, fresh, seed)
    chosen = tuple(prompts) if prompts else PlannerRequest.prompts
    request = PlannerRequest(options, tuple(setting or ()), target, draft, chosen, limit, dtype, device)
    raise typer.Exit(run_planner(request, as_json=as_json, quiet=quiet))


@bench_app.command(rich_help_panel="Subjects")
def lattice(
    target: TargetOption = None,
    draft: DraftOption = None,
    prompts: PromptsOption = None,
    limit: LimitOption = 8,
    temperature: LatticeHeatsOption = None,
    drafts: LatticeDraftsOption = None,
    repeats: LatticeRepeatsOption = 1,
    max_new_tokens: LaneTokensOption = 96,
    seed: FixedSeedOption = 7,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    page: LatticePageOption = False,
    into: LatticeIntoOption = None,
    as_json: JsonLinesOption = False,
    quiet: BenchQuietOption = False,
) -> None:
    """Compare chains and trees of one draft head under many rules, at equal numbers of drafts."""
    with importing():
        from polydraft.cli.benchmark.lattice import LatticeOptions, LatticeRequest, run_lattice

    heats, sizes = tuple(temperature or LatticeOptions.temperatures), tuple(drafts or LatticeOptions.drafts)
    options = LatticeOptions(heats, sizes, max_new_tokens, repeats, seed)
    chosen = tuple(prompts) if prompts else LatticeRequest.prompts
    request = LatticeRequest(options, target, draft, chosen, limit, dtype, device)
    raise typer.Exit(run_lattice(request, as_json=as_json, page=page, quiet=quiet, into=into))
