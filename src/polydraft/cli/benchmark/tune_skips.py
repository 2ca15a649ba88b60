"""`polydraft tune skips`: search the sub-layers that a target drafts best without, and write them to a file."""

from dataclasses import asdict

from rich import box
from rich.console import Console
from rich.table import Table

from polydraft.bench.prompts.prompt import encode
from polydraft.cli.benchmark.tune import EXCERPT_TOKENS
from polydraft.cli.clashes import read_asked
from polydraft.cli.conformance import progress
from polydraft.cli.printing import console as new_console
from polydraft.cli.printing import print_json_line
from polydraft.cli.process import stopped
from polydraft.engine import load
from polydraft.engine.skips import CheckedSkips, FoundSkips, SkipSettings, tune_skips
from polydraft.errors import InvalidParameter
from polydraft.extras import TUNE
from polydraft.models import HuggingFaceModel
from polydraft.options.commands.bench_options import TuneSkipsOptions


def run_tune_skips(options: TuneSkipsOptions) -> int:
    """Search, time, write and print; return the exit code: 0, or 130 after Ctrl-C with the study kept."""
    TUNE.check()
    notes = new_console(errors=True, quiet=options.as_json)
    settings = SkipSettings(options.trials, options.sampler, options.max_tokens, options.temperature, options.seed)
    prompts = read_asked(options.prompts or ("python",), options.limit, options.chat_template)
    try:
        with notes.status("Loading the model ..."):
            pair = load(options.target or "pair", None, dtype=options.dtype, device=options.device)
        room = HuggingFaceModel(pair.target).context - 2 * options.max_tokens
        encoded = [encode(pair, prompt, EXCERPT_TOKENS) for prompt in prompts]
        fitting = [ids for ids in encoded if 0 < ids.shape[1] <= room]
        if not fitting:
            raise InvalidParameter(f"No prompt of {len(encoded)} has a token and fits into the model's context.")
        with progress(notes) as step:
            found = tune_skips(pair.target, fitting, options.study, settings, on_progress=step)
    except KeyboardInterrupt:
        return stopped(f"{options.study} has every set measured; the same call goes on from it")
    found.save(options.out)
    if options.as_json:
        print_json_line({"path": str(options.out), **asdict(found)})
    else:
        show(new_console(), found, options)
    return 0


def show(console: Console, found: FoundSkips, options: TuneSkipsOptions) -> None:
    """Print the overlap without each sub-layer, the best sets, and how to use the fastest."""
    kinds = ("attention", "mlp", "layer")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="Overlap without one sub-layer")
    shown = [kind for kind in kinds if any(name.startswith(kind) for name in found.singles)]
    for title in ("layer", *(f"without {kind}" for kind in shown)):
        table.add_column(title, justify="right")
    for layer in range(found.layers):
        table.add_row(str(layer), *(f"{found.singles[f'{kind} {layer}']:.3f}" for kind in shown))
    console.print(table)
    sets = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("", "skipped", "overlap", "chain", "predicted", "measured"):
        sets.add_column(title)
    sets.add_row("greedy", *_cells(found.greedy))
    for place, one in enumerate(found.best, start=1):
        sets.add_row(f"{place}", *_cells(one))
    console.print(sets)
    if not any(one.measured is not None and one.measured > 1 for one in found.best):
        console.print("None of them is faster than plain decoding here.")
    used = "" if options.target is None else f" --target {options.target}"
    console.print(
        f"Written to {options.out}. Use it: polydraft generate{used} --draft self:skip={options.out} ...",
        soft_wrap=True,
    )


def _cells(one: CheckedSkips) -> tuple[str, ...]:
    measured = "-" if one.measured is None else f"{one.measured:.2f}x"
    return ", ".join(one.skipped), f"{one.overlap:.3f}", str(one.length), f"{one.predicted:.2f}x", measured
