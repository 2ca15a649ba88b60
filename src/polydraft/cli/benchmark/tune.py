"""`polydraft tune`: measure a pair on this machine and write the plan that `polydraft generate --plan` drafts by."""

from collections.abc import Callable, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from polydraft.bench.prompts.prompt import encode
from polydraft.cli.clashes import LONE_MODEL, read_asked, refuse_clashes
from polydraft.cli.conformance import progress
from polydraft.cli.generation.one_text import load_pair_of
from polydraft.cli.generation.summaries import unless_faster
from polydraft.cli.printing import console as new_console
from polydraft.cli.printing import print_json_line
from polydraft.cli.process import stopped
from polydraft.engine import Comparison, compare, load_models
from polydraft.engine.tuning import Effort, tune
from polydraft.errors import InvalidParameter
from polydraft.models import HuggingFaceModel, Pair
from polydraft.options.commands.bench_options import TuneOptions
from polydraft.planning import Curve, PairPlan, TunedTree, load_plan
from polydraft.probs import SamplingParams
from polydraft.trees import Fixed, TreeShape

EXCERPT_TOKENS = 64
SHOWN_COUNTS = (1, 4, 8, 16, 32, 64, 128)
Step = Callable[[str, int, int], None]


def run_tune(options: TuneOptions) -> int:
    """Measure, choose, write and print; return the exit code: 0, or 130 after Ctrl-C with nothing written."""
    notes = new_console(errors=True, quiet=options.as_json)
    check_request(options)
    sources = options.prompts or (("python",) if options.target is None else ("humaneval", "gsm8k"))
    prompts = read_asked(sources, options.limit, options.chat_template)
    try:
        with notes.status("Loading the models ..."):
            pair = load_pair_of(options, load_models)
        encoded = [encode(pair, prompt, EXCERPT_TOKENS) for prompt in prompts]
        fitting = _fitting(pair, encoded, options)
        if len(fitting) < len(encoded):
            notes.print(
                f"{len(encoded) - len(fitting)} of {len(encoded)} prompts do not fit into the context; left out."
            )
        with progress(notes) as step:
            plan = _tuned(pair, fitting, options, step)
            measured = _measured(pair, fitting, options, plan, step) if options.check else {}
    except KeyboardInterrupt:
        return stopped("nothing was written")
    plan.save(options.out)
    if options.as_json:
        checks = {f"{heat:g}": {name: one.as_dict() for name, one in runs.items()} for heat, runs in measured.items()}
        print_json_line({"path": str(options.out), **plan.as_dict(), "measured": checks})
    else:
        show(new_console(), plan, options, len(fitting), measured)
    return 0


def check_request(options: TuneOptions) -> None:
    """Check what can be checked before models are loaded.

    Raises:
        InvalidParameter: options that do not go together, a temperature outside its range, or a file that cannot be
            written or is something else than a plan.
    """
    alone, heats = bool(options.target) != bool(options.draft), options.temperatures
    refuse_clashes(
        (alone, LONE_MODEL),
        (len({*heats}) < len(heats), f"A temperature is given twice: {', '.join(f'{heat:g}' for heat in heats)}."),
    )
    for temperature in heats:
        SamplingParams(temperature)
    out = options.out
    if not out.parent.is_dir():
        raise InvalidParameter(f"--out {out}: there is no folder {out.parent}.")
    if out.exists():
        try:
            load_plan(out)
        except InvalidParameter as error:
            raise InvalidParameter(f"--out {out} exists and is no plan that can be read; give another name.") from error


def _fitting(pair: Pair, prompts: Sequence[Tensor], options: TuneOptions) -> list[Tensor]:
    room = HuggingFaceModel(pair.target).context - options.max_tokens
    fitting = [ids for ids in prompts if 0 < ids.shape[1] <= room]
    if not fitting:
        raise InvalidParameter(
            f"No prompt leaves room for {options.max_tokens} new tokens in the model's context; give shorter ones, "
            "or a smaller --max-tokens."
        )
    return fitting


def _tuned(pair: Pair, prompts: Sequence[Tensor], options: TuneOptions, step: Step) -> PairPlan:
    return tune(
        pair,
        prompts,
        temperatures=options.temperatures,
        max_nodes=options.max_nodes,
        max_depth=options.max_depth,
        effort=Effort(options.max_tokens, seed=options.seed),
        names=options.names,
        on_progress=step,
    )


def _measured(
    pair: Pair, prompts: Sequence[Tensor], options: TuneOptions, plan: PairPlan, step: Step
) -> dict[float, dict[str, Comparison]]:
    """Compare the chosen and the default tree with plain decoding, by temperature; other texts than were tuned on."""
    return {
        tree.temperature: {
            name: _compared(pair, prompts, options, tree, shape, step)
            for name, shape in (("tree", tree.shape), ("default tree", tree.usual))
            if shape.counts
        }
        for tree in plan.trees
    }


def _compared(
    pair: Pair, prompts: Sequence[Tensor], options: TuneOptions, tree: TunedTree, shape: TreeShape, step: Step
) -> Comparison:
    sampling: dict[str, Any] = {"temperature": tree.temperature, "seed": options.seed + 1}
    sampling |= {"top_k": 0} if tree.temperature else {}
    pairs: list[object] = []

    def note(*runs: object) -> None:
        pairs.append(runs)
        step(f"checking, temperature {tree.temperature:g}", len(pairs), len(prompts))

    return compare(
        pair.target,
        prompts,
        on_pair=note,
        drafter=pair.draft,
        policy=Fixed(shape),
        max_new_tokens=options.max_tokens,
        **sampling,
    )


def show(
    console: Console,
    plan: PairPlan,
    options: TuneOptions,
    prompts: int,
    measured: dict[float, dict[str, Comparison]],
) -> None:
    """Print one column per temperature, what the passes cost, and how to use the plan."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    for tree in plan.trees:
        table.add_column(f"temperature {tree.temperature:g}")
    columns = [_column(tree, measured.get(tree.temperature, {})) for tree in plan.trees]
    for name in dict.fromkeys(name for column in columns for name in column):
        style = "bold" if name.startswith("speed-up") else None
        table.add_row(name, *(column.get(name, "") for column in columns), style=style)
    console.print(
        f"Tuned on {prompts} prompt(s), up to {options.max_tokens} tokens each: {plan.pair.target.name} with "
        f"{plan.pair.draft.name}, {plan.machine.device}, {plan.machine.threads} thread(s).",
        soft_wrap=True,
    )
    console.print(table)
    console.print(
        "Children by depth: a line per depth, a number per node; · is a node without children.", soft_wrap=True
    )
    costs = plan.trees[0].costs
    console.print(f"Target's pass, by nodes scored: {_milliseconds(costs.target)}.", soft_wrap=True)
    console.print(f"One level of drafts, by nodes: {_milliseconds(costs.draft)}.", soft_wrap=True)
    if not measured:
        console.print("Speed-ups are predicted from these measurements; --check measures them.", soft_wrap=True)
    used = "" if options.target is None else f" --target {options.target} --draft {options.draft}"
    written = f"Written to {options.out}. Use it: polydraft generate{used} --plan {options.out} ..."
    console.print(written, soft_wrap=True)


def _column(tree: TunedTree, measured: dict[str, Comparison]) -> dict[str, str]:
    shape, chosen, default = tree.shape, tree.chosen, tree.default
    plain = tree.plain.tokens_per_second
    cells = {
        "children by depth": draw_counts(shape),
        "drafts": f"{shape.size - 1}, depth {shape.depth}" if shape.counts else "none",
        "verifier": tree.verifier,
        "drawn by": tree.scheme,
        "accepted by rank": f"{_rates(tree)} ({tree.visits} nodes seen)",
        "tokens per call": f"{chosen.tokens:.2f}",
        "time of a step": f"{1000 * chosen.seconds:.1f} ms",
        "of a plain step": f"{1000 * tree.plain.seconds:.1f} ms",
        "speed-up, predicted": f"{chosen.tokens_per_second / plain:.2f}x",
    }
    if default is not None:
        cells["  default tree's"] = f"{default.tokens_per_second / plain:.2f}x ({tree.usual.size - 1} drafts)"
        cells["  over default tree"] = f"{chosen.tokens_per_second / default.tokens_per_second:.2f}x"
    if "tree" in measured:
        cells["speed-up, measured"] = f"{measured['tree'].speedup:.2f}x{unless_faster(measured['tree'])}"
        cells["  tokens per call"] = f"{measured['tree'].drafted.block_efficiency:.2f}"
    if "default tree" in measured:
        default_too = measured["default tree"]
        cells["  default tree's, too"] = f"{default_too.speedup:.2f}x{unless_faster(default_too)}"
    return cells


def draw_counts(shape: TreeShape) -> str:
    """Return a tree as the numbers of children of its nodes, one line per depth; a node without any is a dot."""
    if not shape.counts:
        return "plain decoding"
    rows = [
        " ".join(str(count or "·") for count in (*counts, *(0,) * (len(nodes) - len(counts))))
        for counts, nodes in zip(shape.counts, shape.levels, strict=False)
    ]
    return "\n".join(rows)


def _rates(tree: TunedTree) -> str:
    children = tree.shape.counts[0][0] if tree.shape.counts else 1
    return " ".join(f"{rate:.2f}" for rate in tree.acceptance.at(0, children)) or "-"


def _milliseconds(curve: Curve) -> str:
    last = curve.points[-1][0]
    counts = [*(count for count in SHOWN_COUNTS if count < last), last]
    return ", ".join(f"{count}: {1000 * curve(count):.3g} ms" for count in counts)
