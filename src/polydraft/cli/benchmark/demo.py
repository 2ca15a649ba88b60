"""`polydraft demo`: the main job on the embedded pair, with everything one would want to see of it."""

import json
import platform
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text as Styled

from polydraft.bench.prompts import Prompt
from polydraft.bench.prompts.prompt import encode
from polydraft.cli.generation.summaries import describe_setup, describe_times, unless_faster
from polydraft.cli.printing import console as new_console
from polydraft.cli.printing import print_json_line, progress_bar, styled, visible
from polydraft.cli.process import stopped
from polydraft.engine import Block, Comparison, Run, compare, stream
from polydraft.errors import ResultsError
from polydraft.models import Pair, StreamDecoder, load_pair
from polydraft.options.commands.bench_options import DemoOptions
from polydraft.trees import Fixed, TreeShape, draw_svg, draw_text

TEMPERATURES = (0.0, 0.8)
SEED = 7
SHOWN = Fixed(TreeShape(((2,), (1, 1), (1, 1), (1, 1), (1, 1), (2, 1))))
"""The tree of the text that is shown: the default at its temperature is a chain, of which there is little to draw."""


def demo_prompts() -> list[str]:
    """Return the demo's prompts: beginnings of Python files."""
    lines = (files("polydraft") / "data" / "prompts" / "python.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["text"] for line in lines if line]


def run_demo(options: DemoOptions) -> int:
    """Run the demo and print it; return the exit code: 0, 1 if greedy text differs from plain decoding, 130."""
    max_new_tokens, repeats, as_json = options.max_new_tokens, options.repeats, options.as_json
    console = new_console(quiet=as_json)
    with new_console(errors=True, quiet=as_json).status("Loading the embedded pair ..."):
        pair = load_pair()
    prompts = demo_prompts()
    title = Styled.assemble(("polydraft", "bold"), f" on its embedded pair, {describe_machine()}\n")
    console.print(title, soft_wrap=True)
    try:
        show_text_and_tree(console, pair, prompts[1], max_new_tokens, options.svg)
        results = {heat: measure(pair, prompts, heat, max_new_tokens, repeats, as_json) for heat in TEMPERATURES}
    except KeyboardInterrupt:
        return stopped()
    same = all(results[0.0][1].same_text)
    if as_json:
        report = {
            str(heat): {"settings": describe_setup(run), **result.as_dict()} for heat, (run, result) in results.items()
        }
        print_json_line({"machine": describe_machine(), "temperatures": report})
    else:
        print_results(console, results, len(prompts), max_new_tokens, repeats)
        console.print(_verdict(same, len(prompts)), soft_wrap=True)
    return 0 if same else 1


def describe_machine() -> str:
    """Return where the demo runs: threads, processor kind, torch version."""
    return f"{torch.get_num_threads()} CPU threads ({platform.machine()}), torch {torch.__version__}"


def show_text_and_tree(console: Console, pair: Pair, prompt: str, max_new_tokens: int, svg: Path | None) -> None:
    """Generate one text, print it with its provenance, and draw the token tree that gained most."""
    options = {"temperature": 0.8, "policy": SHOWN, "seed": SEED, "max_new_tokens": max_new_tokens}
    run = stream(pair.target, encode(pair, Prompt("", "", prompt)), drafter=pair.draft, **options)
    decoder, text, blocks = StreamDecoder(pair.tokenizer), styled(prompt, "dim"), list(run)
    for block in blocks:
        gained = block.rows[0]
        for place, token in enumerate(gained.tokens):
            text.append(visible(decoder.add(token)), style="green" if place < gained.accepted else "bold")
    text.append(visible(decoder.rest()))
    title = Styled.assemble("temperature 0.8: prompt, ", ("accepted drafts", "green"), ", ", ("target's own", "bold"))
    console.print(Panel(text, title=title))
    best = max(blocks, key=_gain)
    picture = draw_text(best.tree, _label(pair), best.verdict.path[0].tolist())
    gained = best.rows[0]
    caption = f"{gained.drafted} drafts scored in one pass of the target, {gained.accepted} accepted (✓)"
    emitted = styled(f"then the target's own token {_label(pair)(gained.tokens[-1])!r}", "bold")
    console.print(Panel(Group(styled(picture, ""), emitted), title="one token tree", subtitle=caption))
    if svg is not None:
        _write(svg, draw_svg(best.tree, _label(pair), best.verdict.path[0].tolist()))
        console.print(f"The tree is drawn in {svg}.", soft_wrap=True)


def _write(path: Path, picture: str) -> None:
    try:
        path.write_text(picture, encoding="utf-8")
    except OSError as error:
        raise ResultsError(f"{path}: the picture cannot be written there: {error.strerror}.") from error


def measure(
    pair: Pair, prompts: Sequence[str], temperature: float, max_new_tokens: int, repeats: int, silent: bool
) -> tuple[Run, Comparison]:
    """Run all prompts with and without drafts at one temperature, with a progress bar."""
    runs: list[Run] = []
    with progress_bar(new_console(errors=True, quiet=silent)) as progress:
        task = progress.add_task(f"pairs at temperature {temperature:g}", total=len(prompts) * repeats)

        def note(plain: Run, drafted: Run) -> None:
            runs.append(drafted)
            progress.advance(task)

        options: dict[str, Any] = {"drafter": pair.draft, "temperature": temperature, "seed": SEED}
        options |= {"max_new_tokens": max_new_tokens, "top_k": 0} if temperature else {"max_new_tokens": max_new_tokens}
        ids = [encode(pair, Prompt("", "", prompt)) for prompt in prompts]
        result = compare(pair.target, ids, repeats=repeats, on_pair=note, **options)
    return runs[0], result


def print_results(
    console: Console, results: dict[float, tuple[Run, Comparison]], prompts: int, max_new_tokens: int, repeats: int
) -> None:
    """Print one column per temperature."""
    table = Table(title=f"{prompts} prompts, {max_new_tokens} new tokens each, {repeats} paired run(s) of each")
    table.add_column("")
    for temperature in results:
        table.add_column(f"temperature {temperature:g}")
    for name, row in _rows(list(results.values())).items():
        table.add_row(name, *row, style="bold" if name.startswith("speed-up") else None)
    console.print(table)


def _rows(results: list[tuple[Run, Comparison]]) -> dict[str, list[str]]:
    rows: dict[str, list[str]] = {}
    for run, result in results:
        drafted, setup = result.drafted, describe_setup(run)
        cells = {
            "drafter": str(setup["drafter"]),
            "scheme": str(setup["scheme"]),
            "verifier": str(setup["verifier"]),
            "tree": str(setup["tree"]),
            "block efficiency (tokens per target call)": f"{drafted.block_efficiency:.2f}",
            "acceptance by depth": " ".join(f"{rate:.2f}" for rate in drafted.acceptance_by_depth),
            "tokens per second, plain": f"{result.plain.tokens_per_second:.1f}",
            "tokens per second, with drafts": f"{drafted.tokens_per_second:.1f}",
            "time": describe_times(drafted).split(": ", 1)[1].replace(", ", "\n"),
            "speed-up (median of pairs)": f"{result.speedup:.2f}x{unless_faster(result)}",
        }
        for name, cell in cells.items():
            rows.setdefault(name, []).append(cell)
    return rows


def _verdict(same: bool, prompts: int) -> Styled:
    if same:
        said = f" At temperature 0 all {prompts} texts equal plain decoding, token for token."
        return Styled.assemble(("✓", "green"), said)
    return Styled.assemble(("✗", "red"), " At temperature 0 some text differs from plain decoding: please report this.")


def _gain(block: Block) -> tuple[int, int]:
    gained = block.rows[0]
    return gained.accepted, gained.drafted


def _label(pair: Pair) -> Any:
    return lambda token: str(pair.tokenizer.decode([token]))
