"""`polydraft bench pipelines`: what PPD and SPEED would take by a cost model. Every line says that it is simulated."""

from dataclasses import asdict
from functools import partial

from polydraft.bench.table import Table, grouped
from polydraft.cli.benchmark.bench import settings_of
from polydraft.cli.clashes import refuse_clashes
from polydraft.cli.printing import notes_beside
from polydraft.models import HuggingFaceModel
from polydraft_lab.commands.options import BenchPipelinesOptions
from polydraft_lab.commands.results import conditions_of, gathered, load_source, show, token_ids
from polydraft_lab.subjects import PipelineSettings, PipelineTime, simulate_pipelines

HEAD = ("exit, system", "hand-over", "right", "formula", "simulated", "speed-up", "passes", "tree, measured")
NOTES = (
    "Simulated: milliseconds of a token by the cost model; formula: the same without hand-overs; passes: what all "
    "workers run for a token, as simulated.",
    "Tree, measured: trees of one level of the same guesses on this machine, not simulated, against plain decoding.",
)


def run_pipelines(options: BenchPipelinesOptions) -> int:
    """Simulate and print; return the exit code: 0, or 130 after Ctrl-C."""
    settings, notes = settings_of(PipelineSettings, options), notes_beside(options)
    refuse_clashes((options.draft, "Pipelines guess by the target's own layers: leave --draft out."))
    pair = load_source(options, notes)
    prompts = token_ids(options, pair, settings.max_new_tokens, notes)
    simulate = partial(simulate_pipelines, HuggingFaceModel(pair.target), prompts, settings)
    results, interrupted = gathered(simulate, notes)
    conditions = conditions_of("pipelines", pair, {**asdict(settings), "simulated": True, "prompts": len(prompts)})
    tables = [pipeline_table(results)] if results else []
    return show(conditions, results, tables, NOTES, as_json=options.as_json, interrupted=interrupted)


def pipeline_table(results: list[PipelineTime]) -> Table:
    """Return what pipelines take below each temperature, with the cost model in the title."""

    def cells(one: PipelineTime) -> tuple[str, ...]:
        formula = "" if one.formula_ms is None else f"{one.formula_ms:.2f}"
        tree, times = "" if one.tree is None else f"{one.tree:.2f}x", plain / one.simulated_ms
        taken = (f"{one.costs.hand_over_ms:g} ms", f"{one.right:.3f}", formula, f"{one.simulated_ms:.2f}")
        name = f"{one.costs.exit_layer}, {one.system}, {one.guesses} guess{'es' * (one.guesses > 1)}"
        return name, *taken, f"{times:.2f}x", f"{one.passes:.2f}", tree

    costs = results[0].costs
    plain = costs.layers * costs.layer_ms
    title = (
        f"Simulated, not measured: {costs.layers} layers of {costs.layer_ms:g} ms, hand-overs as in their column, as "
        f"many workers as needed; a token of plain decoding takes {plain:g} ms"
    )
    groups = grouped(results, lambda one: f"temperature {one.temperature:g}, simulated").items()
    return Table.of_groups(title, HEAD, (([name], map(cells, group)) for name, group in groups))
