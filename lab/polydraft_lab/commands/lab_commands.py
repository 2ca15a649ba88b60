"""`polydraft limits` and the subjects of `polydraft bench`: the commands and their options."""

from collections.abc import Callable

import typer

from polydraft.cli.arguments.measuring import (
    BenchQuietOption,
    ExcerptOption,
    FixedSeedOption,
    JsonLinesOption,
    LimitOption,
    PromptsOption,
)
from polydraft.cli.arguments.options import (
    BottomUpOption,
    DeviceOption,
    DraftOption,
    DtypeOption,
    TargetOption,
    TemplateOption,
)
from polydraft.cli.process import importing
from polydraft_lab.commands.options import (
    DraftHeatOption,
    FiguresOption,
    FreshOption,
    KnownOption,
    LaneTokensOption,
    LatticeDraftsOption,
    LatticeHeatsOption,
    LatticeIntoOption,
    LatticePageOption,
    LatticeRepeatsOption,
    LimitsHeatsOption,
    MaxTokensOption,
    NumbersOption,
    OwnRulesOption,
    PartsOption,
    PassDraftsOption,
    PassRepeatsOption,
    PlannerRepeatsOption,
    RecordsOption,
    RulesHeatsOption,
    SchemesOption,
    SettingsOption,
    ShortlistOption,
    TreeEveryOption,
    TreesOption,
    VerifiersOption,
    VocabularyOption,
    WidthsOption,
    parse_numbers,
)


def limits(
    target: TargetOption = None,
    draft: DraftOption = None,
    prompts: PromptsOption = None,
    limit: LimitOption = 8,
    max_tokens: MaxTokensOption = 64,
    excerpt_tokens: ExcerptOption = None,
    temperature: LimitsHeatsOption = None,
    draft_temperature: DraftHeatOption = None,
    verifier: OwnRulesOption = None,
    k: NumbersOption = "1,2,3,4,6,8",
    shortlist: ShortlistOption = 64,
    tree_every: TreeEveryOption = 4,
    seed: FixedSeedOption = 0,
    out: RecordsOption = None,
    figures: FiguresOption = False,
    chat_template: TemplateOption = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    as_json: JsonLinesOption = False,
) -> None:
    """Measure on real text what every rule accepts and what the best possible rule would."""
    with importing():
        from polydraft_lab.commands.results import Source
        from polydraft_lab.commands.run_limits import DEFAULT_PROMPTS, LimitsRequest, LimitsSettings, run_limits

    settings = LimitsSettings(
        temperatures=tuple(temperature) if temperature else LimitsSettings.temperatures,
        drafts=parse_numbers(k),
        max_tokens=max_tokens,
        excerpt_tokens=excerpt_tokens or LimitsSettings.excerpt_tokens,
        draft_temperature=draft_temperature,
        shortlist=shortlist,
        tree_every=tree_every,
        seed=seed,
    )
    source = Source(target, draft, tuple(prompts or DEFAULT_PROMPTS), limit, dtype, device)
    cut, own = excerpt_tokens is not None, tuple(verifier or ())
    request = LimitsRequest(settings, source, out, figures, excerpts=cut, chat_template=chat_template, verifiers=own)
    raise typer.Exit(run_limits(request, as_json=as_json))


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
        from polydraft_lab.commands.results import Source
        from polydraft_lab.commands.run_passes import PassSettings, run_passes

    settings = PassSettings(
        known=tuple(known) if known else PassSettings.known,
        widths=tuple(width) if width else PassSettings.widths,
        repeats=repeats,
        seed=seed,
    )
    source = Source(target, dtype=dtype, device=device)
    raise typer.Exit(run_passes(settings, source, draft or (), as_json=as_json, quiet=quiet))


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
        from polydraft_lab.commands.results import Source
        from polydraft_lab.commands.run_rules import RulesRequest, RulesSettings, refuse_idle_options, run_rules

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
        source=Source(target, draft, tuple(prompts or Source.prompts), limit, dtype, device),
    )
    raise typer.Exit(run_rules(request, as_json=as_json, quiet=quiet))


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
        from polydraft_lab.commands.results import Source
        from polydraft_lab.commands.run_planner import PlannerOptions, run_planner

    options = PlannerOptions(max_new_tokens, repeats, fresh, seed)
    source = Source(target, draft, tuple(prompts or Source.prompts), limit, dtype, device)
    raise typer.Exit(run_planner(options, setting or (), source, as_json=as_json, quiet=quiet))


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
        from polydraft_lab.commands.results import Source
        from polydraft_lab.commands.run_lattice import LatticeOptions, run_lattice

    heats, sizes = tuple(temperature or LatticeOptions.temperatures), tuple(drafts or LatticeOptions.drafts)
    options = LatticeOptions(heats, sizes, max_new_tokens, repeats, seed)
    source = Source(target, draft, tuple(prompts or Source.prompts), limit, dtype, device)
    raise typer.Exit(run_lattice(options, source, as_json=as_json, page=page, quiet=quiet, into=into))


COMMANDS: dict[str, Callable[..., None]] = {one.__name__: one for one in (limits, passes, rules, planner, lattice)}
