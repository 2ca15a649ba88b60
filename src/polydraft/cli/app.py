"""The commands and their options. Nothing heavy is imported before a command runs, so that --help is quick."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from polydraft.cli.options import (
    ArmOption,
    BottomUpOption,
    DeviceOption,
    DrafterOption,
    DraftOption,
    DtypeOption,
    ExcerptOption,
    JsonLinesOption,
    JsonOption,
    LimitOption,
    PromptsOption,
    SchemeOption,
    TargetOption,
    TreeOption,
    VerifierName,
    VerifierOption,
)
from polydraft.errors import PolydraftError

app = typer.Typer(
    name="polydraft",
    help="Faster text generation with exactly the same output distribution, by multi-draft speculative decoding.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
train_app = typer.Typer(help="Train models.", no_args_is_help=True)
app.add_typer(train_app, name="train")


def main() -> None:
    """Run the command line; errors are one sentence on standard error and exit code 2."""
    try:
        app(standalone_mode=True)
    except PolydraftError as error:
        sys.stderr.write(f"polydraft: {error}\n")
        sys.exit(2)


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
    verifier: VerifierOption = VerifierName.auto,
    scheme: SchemeOption = None,
    bottom_up: BottomUpOption = False,
    tree: TreeOption = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy decoding.")] = 0.0,
    top_p: Annotated[float | None, typer.Option(help="Nucleus mass in (0, 1].")] = None,
    top_k: Annotated[int | None, typer.Option(help="Most likely tokens to keep; 0 keeps all.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Share of the top token's probability to keep.")] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="1 is off.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop after this string; may be repeated.")] = None,
    seed: Annotated[int | None, typer.Option(help="Fixes the text.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 128,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the new text and nothing else.")] = False,
    compare: Annotated[bool, typer.Option(help="Measure the speed-up over plain decoding.")] = False,
    plan: Annotated[Path | None, typer.Option(help="A file from `polydraft tune`; or auto: learn by doing.")] = None,
    compiled: Annotated[
        bool, typer.Option("--compile", help="Compile the models' passes first; pays on GPUs, for long texts.")
    ] = False,
    input_file: Annotated[
        str | None, typer.Option("--input", help="A file of prompts: JSON lines, or plain text with one a line.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="File for the texts of --input; the same call goes on.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Texts of --input at a time. Default: 8.")] = None,
) -> None:
    """Generate text: drafted tokens in green, the target's own in white, then a table of what happened."""
    from polydraft.cli.generate import Request, run_generate
    from polydraft.cli.generation import file_job, run_file

    job = file_job(prompt, input_file, output, batch_size, compared=compare)
    sampling: dict[str, Any] = {
        "temperature": temperature,
        "top_p": top_p,
        "top_k": 0 if top_k is None and temperature > 0 else top_k,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
    }
    request = Request(
        prompt=sys.stdin.read() if prompt == "-" else prompt or "",
        target=target,
        draft=draft,
        drafter=drafter.value if drafter else None,
        verifier=verifier.value,
        scheme=scheme.value if scheme else None,
        bottom_up=bottom_up,
        tree=tree,
        sampling={name: value for name, value in sampling.items() if value is not None},
        stop=tuple(stop or ()),
        seed=seed,
        max_new_tokens=max_new_tokens,
        dtype=dtype,
        device=device,
        plan=plan,
        compiled=compiled,
    )
    if job:
        raise typer.Exit(run_file(request, job, as_json=as_json, quiet=quiet))
    raise typer.Exit(run_generate(request, as_json=as_json, quiet=quiet, compared=compare))


@app.command()
def demo(
    max_new_tokens: Annotated[int, typer.Option(min=8, help="Tokens per prompt.")] = 96,
    repeats: Annotated[int, typer.Option(min=1, help="How often every prompt is run with and without drafts.")] = 2,
    svg: Annotated[Path | None, typer.Option(help="Also write the drawn token tree to this SVG file.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show the embedded pair at work: text, a token tree, the statistics, and the speed-up over plain decoding."""
    from polydraft.cli.demo import run_demo

    raise typer.Exit(run_demo(max_new_tokens, repeats, svg, as_json=as_json))


@app.command()
def conformance(
    rule: Annotated[str | None, typer.Option(help="Only rules whose name contains this.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer rows, at most two drafts.")] = False,
    all_pairs: Annotated[
        bool, typer.Option("--all-pairs", help="Also try rules on drafts that they are not made for.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Prove every verification rule by enumeration; exit code 1 if a lossless one deviates from the target's law."""
    from polydraft.cli.conformance import run_conformance

    raise typer.Exit(run_conformance(rule, quick=quick, all_pairs=all_pairs, as_json=as_json))


@app.command()
def limits(
    target: TargetOption = None,
    draft: DraftOption = None,
    prompts: PromptsOption = None,
    limit: LimitOption = 8,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens generated per prompt and temperature.")] = 64,
    excerpt_tokens: ExcerptOption = 64,
    temperature: Annotated[
        list[float] | None, typer.Option(help="The target's; may be repeated. Default: 0, 0.3, 0.6, 0.9 and 1.2.")
    ] = None,
    draft_temperature: Annotated[float | None, typer.Option(help="The draft model's. Default: the target's.")] = None,
    k: Annotated[str, typer.Option("--k", help='Numbers of drafts: "1,2,4" or "1-8".')] = "1,2,3,4,6,8",
    shortlist: Annotated[int, typer.Option(min=2, help="Tokens that drafts are drawn from.")] = 64,
    tree_every: Annotated[int, typer.Option(min=0, help="Grow trees at every so many positions; 0: none.")] = 4,
    seed: Annotated[int, typer.Option(min=0, help="Fixes texts and trees.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Folder for records, tables and figures; an interrupted run goes on from it.")
    ] = None,
    figures: Annotated[bool, typer.Option("--figures", help="Also draw figures into the folder.")] = False,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    as_json: JsonLinesOption = False,
) -> None:
    """Measure on real text what every rule accepts and what the best possible rule would."""
    from polydraft.cli.limits import DEFAULT_PROMPTS, LimitsRequest, Plan, parse_numbers, run_limits

    plan = Plan(
        temperatures=tuple(temperature) if temperature else Plan.temperatures,
        drafts=parse_numbers(k),
        max_tokens=max_tokens,
        excerpt_tokens=excerpt_tokens,
        draft_temperature=draft_temperature,
        shortlist=shortlist,
        tree_every=tree_every,
        seed=seed,
    )
    request = LimitsRequest(plan, target, draft, tuple(prompts or DEFAULT_PROMPTS), limit, out, figures, dtype, device)
    raise typer.Exit(run_limits(request, as_json=as_json))


@app.command()
def tune(
    target: TargetOption = None,
    draft: DraftOption = None,
    temperature: Annotated[
        list[float] | None, typer.Option(help="One tree for each; may be repeated. Default: 0 and 1.")
    ] = None,
    prompts: PromptsOption = None,
    limit: LimitOption = 8,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens generated per prompt and temperature.")] = 64,
    max_nodes: Annotated[int, typer.Option(min=2, max=4096, help="Largest tree, the root included.")] = 32,
    max_depth: Annotated[int, typer.Option(min=1, help="Most drafts on a path.")] = 8,
    check: Annotated[bool, typer.Option("--check", help="Also measure the chosen trees' speed-up.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Fixes the texts.")] = 0,
    out: Annotated[Path, typer.Option(help="The plan file to write.")] = Path("plan.json"),
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Find the fastest tree for a pair of models on this machine, and write it to a plan for `generate --plan`."""
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
        out=out.expanduser(),
        dtype=dtype,
        device=device,
    )
    raise typer.Exit(run_tune(request, as_json=as_json))


@app.command()
def bench(
    target: TargetOption = None,
    draft: DraftOption = None,
    prompts: PromptsOption = None,
    limit: LimitOption = 8,
    arm: ArmOption = None,
    temperature: Annotated[
        list[float] | None, typer.Option(help="0 is greedy; may be repeated. Default: 0 and 1.")
    ] = None,
    batch_size: Annotated[
        list[int] | None, typer.Option(help="Prompts continued together; may be repeated. Default: 1.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="How often every batch is measured.")] = 1,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens per prompt, the same for all arms.")] = 64,
    excerpt_tokens: ExcerptOption = 64,
    seed: Annotated[int, typer.Option(min=0, help="Fixes sampled texts and the order of the arms.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="File for one JSON line per run; an interrupted benchmark goes on from it.")
    ] = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    as_json: JsonLinesOption = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the results and nothing else.")] = False,
) -> None:
    """Measure the speed-up over plain decoding and Hugging Face's loops, side by side on the same prompts."""
    from polydraft.cli.benchmark import BenchRequest, SpeedPlan, run_bench

    plan = SpeedPlan(
        temperatures=tuple(temperature) if temperature else SpeedPlan.temperatures,
        batch_sizes=tuple(batch_size) if batch_size else SpeedPlan.batch_sizes,
        repeats=repeats,
        max_new_tokens=max_new_tokens,
        excerpt_tokens=excerpt_tokens,
        seed=seed,
    )
    chosen = tuple(prompts) if prompts else BenchRequest.prompts
    request = BenchRequest(plan, tuple(arm or ()), target, draft, chosen, limit, out, dtype, device)
    raise typer.Exit(run_bench(request, as_json=as_json, quiet=quiet))


@app.command()
def report(
    runs: Annotated[Path, typer.Argument(help='What "polydraft bench --out" wrote.')],
    out: Annotated[Path, typer.Option(help="Folder for the page and its figures.")] = Path("report"),
) -> None:
    """Make a page with tables and figures of a benchmark's runs."""
    from polydraft.cli.benchmark import run_report

    raise typer.Exit(run_report(runs, out))


@train_app.command()
def pair(
    out: Annotated[Path, typer.Option(help="Where the two model folders are written.")],
    work: Annotated[Path, typer.Option(help="Corpus, checkpoints; an interrupted run goes on from here.")],
) -> None:
    """Train the embedded pair from the Python files on this machine, and export it with its measurements."""
    from polydraft.cli.train import run_train_pair

    run_train_pair(work, out)
