"""The commands and their options. A command's modules are imported when it is called."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from polydraft.catalogue import AUTO
from polydraft.cli.arguments.chatting import (
    AnswersOption,
    AnswerTokensOption,
    ChatQuietOption,
    ChatSeedOption,
    ChatTargetOption,
    MessagesOption,
    SystemOption,
)
from polydraft.cli.arguments.generating import (
    BatchOption,
    CompactOption,
    CompareOption,
    CompileOption,
    GrammarOption,
    InputOption,
    JsonSchemaOption,
    MinPOption,
    NewTokensOption,
    PlanOption,
    QuietOption,
    RegexOption,
    RepetitionOption,
    SeedOption,
    StopOption,
    TemperatureOption,
    TextsOption,
    TopKOption,
    TopPOption,
)
from polydraft.cli.arguments.measuring import (
    CheckOption,
    DemoRepeatsOption,
    DemoTokensOption,
    FixedSeedOption,
    FromOption,
    LimitOption,
    MaxDepthOption,
    MaxNodesOption,
    PageOption,
    PairOption,
    PlanFileOption,
    PromptsOption,
    RuleOption,
    RunsArgument,
    SvgOption,
    TunedTokensOption,
    TuneHeatsOption,
    WorkOption,
)
from polydraft.cli.arguments.options import (
    BottomUpOption,
    DeviceOption,
    DrafterOption,
    DraftOption,
    DtypeOption,
    JsonOption,
    SchemeOption,
    TargetOption,
    TemplateOption,
    TreeOption,
    VerifierOption,
)
from polydraft.cli.arguments.training import (
    FrozenRowsOption,
    HeadDraftsOption,
    HeadFolderOption,
    HeadFormOption,
    HeadKindArgument,
    HeadLayersOption,
    HeadLengthOption,
    HeadLimitOption,
    HeadLossOption,
    HeadRankOption,
    HeadRateOption,
    HeadRowsOption,
    HeadStartOption,
    HeadStepsOption,
    HeadTermOption,
    HeadTokensOption,
    HeadWorkOption,
    PastEndOption,
)
from polydraft.cli.arguments.words import drafter_word
from polydraft.cli.benchmark import bench_app
from polydraft.cli.lab import join_lab
from polydraft.cli.process import exit_code_of, importing
from polydraft.cli.serve import serve
from polydraft.cli.stores import store_app

app = typer.Typer(
    name="polydraft",
    help="Faster text generation with exactly the same output distribution, by multi-draft speculative decoding.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
train_app = typer.Typer(help="Train models.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")
app.add_typer(train_app, name="train")
app.add_typer(store_app, name="store")
app.command()(serve)


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


@app.command()
def generate(
    prompt: Annotated[str | None, typer.Argument(help='The prompt; "-" reads standard input.')] = None,
    target: TargetOption = None,
    draft: DraftOption = None,
    drafter: DrafterOption = None,
    verifier: VerifierOption = AUTO,
    scheme: SchemeOption = None,
    bottom_up: BottomUpOption = False,
    tree: TreeOption = None,
    temperature: TemperatureOption = 0.0,
    top_p: TopPOption = None,
    top_k: TopKOption = None,
    min_p: MinPOption = None,
    repetition_penalty: RepetitionOption = None,
    stop: StopOption = None,
    json_schema: JsonSchemaOption = None,
    compact: CompactOption = False,
    regex: RegexOption = None,
    grammar: GrammarOption = None,
    seed: SeedOption = None,
    max_new_tokens: NewTokensOption = 128,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    compare: CompareOption = False,
    plan: PlanOption = None,
    compiled: CompileOption = False,
    chat_template: TemplateOption = None,
    input_file: InputOption = None,
    output: TextsOption = None,
    batch_size: BatchOption = None,
) -> None:
    """Generate text: drafted tokens in green, the target's own in white, then a table of what happened."""
    with importing():
        from polydraft.cli.generate import GenerateRequest, given_prompt, run_generate
        from polydraft.cli.generation import file_job, given_grammar, run_file

    job = file_job(prompt, input_file, output, batch_size, compared=compare)
    request = GenerateRequest(
        prompt=given_prompt(prompt),
        target=target,
        draft=draft,
        drafter=drafter,
        verifier=verifier,
        scheme=scheme,
        bottom_up=bottom_up,
        tree=tree,
        sampling=_sampling(temperature, top_p, top_k, min_p, repetition_penalty),
        stop=tuple(stop or ()),
        grammar=given_grammar(json_schema, regex, grammar, compact=compact),
        seed=seed,
        max_new_tokens=max_new_tokens,
        dtype=dtype,
        device=device,
        plan=plan,
        compiled=compiled,
        chat_template=chat_template,
    )
    if job:
        raise typer.Exit(run_file(request, job, as_json=as_json, quiet=quiet))
    raise typer.Exit(run_generate(request, as_json=as_json, quiet=quiet, compared=compare))


@app.command()
def fetch(
    what: Annotated[str | None, typer.Argument(metavar="WORD", help="What to fetch; none lists all there is.")] = None,
    source: FromOption = None,
    as_json: JsonOption = False,
) -> None:
    """Bring a real chat model, or Spec-Bench's questions, onto this machine: once, checked, into the cache folder."""
    with importing():
        from polydraft.cli.fetch import run_fetch

    raise typer.Exit(run_fetch(what, source, as_json=as_json))


@app.command()
def chat(
    target: ChatTargetOption = None,
    draft: DraftOption = None,
    drafter: DrafterOption = None,
    verifier: VerifierOption = AUTO,
    scheme: SchemeOption = None,
    bottom_up: BottomUpOption = False,
    tree: TreeOption = None,
    temperature: TemperatureOption = 0.0,
    top_p: TopPOption = None,
    top_k: TopKOption = None,
    min_p: MinPOption = None,
    repetition_penalty: RepetitionOption = None,
    seed: ChatSeedOption = None,
    max_new_tokens: AnswerTokensOption = 512,
    system: SystemOption = None,
    input_file: MessagesOption = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    as_json: AnswersOption = False,
    quiet: ChatQuietOption = False,
) -> None:
    """Talk with a chat model: accepted drafts in green; every turn reads only what is new."""
    with importing():
        from polydraft.cli.chat import ChatRequest, run_chat
        from polydraft.cli.generate import GenerateRequest

    request = GenerateRequest(
        prompt="",
        target=target,
        draft=draft,
        drafter=drafter,
        verifier=verifier,
        scheme=scheme,
        bottom_up=bottom_up,
        tree=tree,
        sampling=_sampling(temperature, top_p, top_k, min_p, repetition_penalty),
        seed=seed,
        max_new_tokens=max_new_tokens,
        dtype=dtype,
        device=device,
    )
    raise typer.Exit(run_chat(ChatRequest(request, system, input_file, as_json, quiet)))


def _sampling(
    temperature: float, top_p: float | None, top_k: int | None, min_p: float | None, repetition_penalty: float | None
) -> dict[str, Any]:
    """Return the sampling options that hold; above temperature 0 all tokens are kept unless something else is said."""
    given: dict[str, Any] = {
        "temperature": temperature,
        "top_p": top_p,
        "top_k": 0 if top_k is None and temperature > 0 else top_k,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
    }
    return {name: value for name, value in given.items() if value is not None}


@app.command()
def demo(
    max_new_tokens: DemoTokensOption = 96,
    repeats: DemoRepeatsOption = 2,
    svg: SvgOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the embedded pair at work: text, a token tree, the statistics, and the speed-up over plain decoding."""
    with importing():
        from polydraft.cli.demo import run_demo

    raise typer.Exit(run_demo(max_new_tokens, repeats, svg, as_json=as_json))


@app.command()
def conformance(
    rule: RuleOption = None,
    drafter: Annotated[
        str | None,
        typer.Option(
            metavar="WORD",
            help="Test by sampling whether texts with this drafter follow the law of the model; also FILE.py:CLASS.",
            callback=drafter_word,
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer rows, at most two drafts; fewer texts.")] = False,
    all_pairs: Annotated[
        bool, typer.Option("--all-pairs", help="Also try rules on drafts that they are not made for.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Prove every verification rule by enumeration; exit code 1 if a lossless one deviates from the target's law."""
    with importing():
        from polydraft.cli.conformance import run_conformance

    raise typer.Exit(run_conformance(rule, drafter=drafter, quick=quick, all_pairs=all_pairs, as_json=as_json))


@app.command()
def models(
    types: Annotated[
        list[str] | None, typer.Argument(help="Types, as `model_type` in config.json; all if none.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Try them with the transformers that is installed; all take ten minutes.")
    ] = False,
    page: Annotated[bool, typer.Option("--page", help="Print the table of docs/models.md.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Tell which types of models can be decoded with drafts, and how; exit code 1 if a checked one is wrong."""
    with importing():
        from polydraft.cli.arguments import refuse_clashes
        from polydraft.cli.models import run_models

    refuse_clashes((page and as_json, "--page and --json are two ways to print: leave one out."))
    raise typer.Exit(run_models(types or [], check=check, page=page, as_json=as_json))


join_lab(app, "limits")


@app.command()
def tune(
    target: TargetOption = None,
    draft: DraftOption = None,
    temperature: TuneHeatsOption = None,
    prompts: PromptsOption = None,
    limit: LimitOption = 8,
    max_tokens: TunedTokensOption = 64,
    max_nodes: MaxNodesOption = 32,
    max_depth: MaxDepthOption = 8,
    check: CheckOption = False,
    seed: FixedSeedOption = 0,
    out: PlanFileOption = Path("plan.json"),
    chat_template: TemplateOption = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Find the fastest tree for a pair of models on this machine, and write it to a plan for `generate --plan`."""
    with importing():
        from polydraft.cli.tune import Effort, TuneRequest, run_tune

    request = TuneRequest(
        target=target,
        draft=draft,
        temperatures=tuple(temperature) if temperature else TuneRequest.temperatures,
        prompts=tuple(prompts or ()),
        limit=limit,
        effort=Effort(max_tokens, seed=seed),
        max_nodes=max_nodes,
        max_depth=max_depth,
        checked=check,
        out=out,
        dtype=dtype,
        device=device,
        chat_template=chat_template,
    )
    raise typer.Exit(run_tune(request, as_json=as_json))


@app.command()
def report(
    runs: RunsArgument,
    out: PageOption = Path("report"),
) -> None:
    """Make a page with tables and figures of a benchmark's runs."""
    with importing():
        from polydraft.cli.benchmark.report import run_report

    raise typer.Exit(run_report(runs, out))


@train_app.command()
def pair(
    out: PairOption,
    work: WorkOption,
) -> None:
    """Train the embedded pair from the Python files on this machine, and export it with its measurements."""
    with importing():
        from polydraft.cli.train import run_train_pair

    raise typer.Exit(run_train_pair(work, out))


@train_app.command()
def head(
    kind: HeadKindArgument,
    prompts: PromptsOption = None,
    out: HeadFolderOption = Path("head"),
    work: HeadWorkOption = Path("head-work"),
    target: TargetOption = None,
    limit: HeadLimitOption = 100_000,
    tokens: HeadTokensOption = 500_000,
    length: HeadLengthOption = 384,
    past_end: PastEndOption = False,
    steps: HeadStepsOption = 2000,
    rate: HeadRateOption = 0.004,
    loss: HeadLossOption = "published",
    layers: HeadLayersOption = None,
    drafts: HeadDraftsOption = None,
    term: HeadTermOption = None,
    rank: HeadRankOption = None,
    rows: HeadRowsOption = None,
    start: HeadStartOption = None,
    frozen_rows: FrozenRowsOption = False,
    form: HeadFormOption = "official",
    seed: FixedSeedOption = 1,
    chat_template: TemplateOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train a draft head for a target: the target writes text behind prompts, and the head learns from it."""
    with importing():
        from polydraft.cli.train import HeadRequest, run_train_head
        from polydraft.training import HeadPlan, HeadRecipe, HeadSize, Writing

    plan = HeadPlan(
        kind,
        HeadSize(layers=layers, drafts=drafts, rank=rank, term=term, loss=loss, frozen_rows=frozen_rows),
        Writing(tokens=tokens, length=length, past_end=past_end, seed=seed),
        HeadRecipe(steps=steps, matrix_rate=rate, other_rate=rate / 2, seed=seed),
        rows,
        form,
        target or "the embedded target",
        start,
    )
    request = HeadRequest(target, tuple(prompts or ()), limit, chat_template, work, out, plan)
    raise typer.Exit(run_train_head(request, as_json=as_json))
