"""Tables for people: what was run, and what came of it."""

from rich.console import Console
from rich.table import Table

from polydraft.catalogue import tree_in_words
from polydraft.cli.printing import named_values
from polydraft.engine import Comparison, Run, Statistics
from polydraft.models import pass_in_words
from polydraft.probs import filters_in_force
from polydraft.trees import LearningPolicy, TreePolicy


def describe_policy(policy: TreePolicy) -> str:
    """Return a tree in words; of a planner the largest."""
    if isinstance(policy, LearningPolicy):
        return f"chosen for every step, at most {policy.largest.size - 1} drafts"
    return tree_in_words(policy)


def describe_setup(run: Run) -> dict[str, object]:
    """Return what determined a run, for tables and JSON; filters and processors only where they are in force."""
    setup = run.setup
    drafts, law = setup.method.drafter.name != "none", setup.laws[0]
    processors = [one.name for one in law.processors]
    return {
        "drafter": setup.method.drafter.name,
        "scheme": setup.method.verifier.scheme.name if drafts else "none",
        "verifier": setup.method.verifier.name,
        "lossless": setup.method.verifier.lossless,
        "tree": describe_policy(setup.method.policy) if drafts else "none",
        **filters_in_force(law.params),
        "temperature": law.params.temperature,
        **({"processors": processors} if processors else {}),
        "passes": pass_in_words(setup.target),
    }


def print_run(console: Console, run: Run, comparison: Comparison | None) -> None:
    """Print the settings and statistics of a run, with its speed-up if that was measured."""
    table = named_values()
    for name, value in describe_setup(run).items():
        shown = (
            ("yes: the output law is the target's" if value else "NO: the output law is not the target's")
            if name == "lossless"
            else value
        )
        table.add_row(name, _cell(shown))
    add_statistics(table, run.statistics)
    if any(run.finish):
        table.add_row("ended by", _REASONS.get(run.finish[0], run.finish[0]))
    if run.statistics.fallback:
        table.add_row("drafter failed", run.statistics.fallback, style="red")
    if comparison is not None:
        add_comparison(table, comparison)
    console.print()
    console.print(table)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


_REASONS = {
    "eos": "end-of-text token",
    "stop": "stop string or criterion",
    "length": "max_new_tokens",
    "context": "the model's context: the text is shorter than asked for",
}


def add_statistics(table: Table, statistics: Statistics) -> None:
    """Add the rows of one generation's counts and times."""
    table.add_row("new tokens", str(statistics.new_tokens))
    table.add_row("target calls", str(statistics.target_calls))
    table.add_row("block efficiency", f"{statistics.block_efficiency:.2f} tokens per target call")
    if statistics.offered_at:
        depths = " ".join(f"{rate:.2f}" for rate in statistics.acceptance_by_depth)
        table.add_row("acceptance by depth", depths)
        table.add_row("drafted / accepted", f"{statistics.drafted} / {statistics.accepted}")
    if statistics.idle:
        table.add_row("drafts", statistics.idle)
    table.add_row("tokens per second", f"{statistics.tokens_per_second:.1f}")
    table.add_row("time", describe_times(statistics))


def describe_times(statistics: Statistics) -> str:
    """Return where the time went, in per cent of the total, and what a step took of it."""
    total = statistics.seconds.get("total", 0.0)
    if not total:
        return "not measured"
    names = [name for name in ("prefill", "draft", "target", "verify", "rest") if name in statistics.seconds]
    shares = {name: f"{name} {100 * statistics.seconds[name] / total:.0f} %" for name in names}
    if statistics.steps:
        for name in (one for one in names if one != "prefill"):
            shares[name] += f" ({1000 * statistics.seconds[name] / statistics.steps:.1f} ms a step)"
    return f"{total:.2f} s: " + ", ".join(shares.values())


def unless_faster(comparison: Comparison) -> str:
    """Return what stands behind a speed-up that the runs do not show to be one."""
    said = {
        "faster": "",
        "slower": ": slower than plain decoding",
        "not told apart": ": not told apart from plain decoding",
    }
    return said[comparison.shows]


def add_comparison(table: Table, comparison: Comparison) -> None:
    """Add the measured speed-up and, at temperature 0, whether the text is the same."""
    low, high = min(comparison.speedups), max(comparison.speedups)
    table.add_row(
        "speed-up",
        f"{comparison.speedup:.2f}x over plain decoding at {comparison.plain.tokens_per_second:.1f} tokens per second "
        f"(median of {len(comparison.speedups)} paired runs, {low:.2f} to {high:.2f}){unless_faster(comparison)}",
        style="bold",
    )
