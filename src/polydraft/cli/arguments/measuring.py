"""Options of the commands that fetch, measure, train and report."""

from pathlib import Path
from typing import Annotated

import typer

from polydraft.cli.arguments.options import DRAFTING, MEASURING, OUTPUT, PROMPTS, SAMPLING
from polydraft.cli.arguments.places import folder_to_write, to_read, to_write, to_write_beside
from polydraft.cli.arguments.values import count, filled, seed_number

FromOption = Annotated[
    Path | None,
    typer.Option("--from", metavar="FILE", help="The file that would be downloaded, if you have it.", callback=to_read),
]
DemoTokensOption = Annotated[int, typer.Option(min=8, callback=count, help="Tokens per prompt.")]
DemoRepeatsOption = Annotated[
    int, typer.Option(min=1, callback=count, help="How often every prompt is run with and without drafts.")
]
TuneHeatsOption = Annotated[
    list[float] | None,
    typer.Option(help="One tree for each; may be repeated. Default: 0 and 1.", rich_help_panel=SAMPLING),
]
TunedTokensOption = Annotated[
    int,
    typer.Option(min=2, callback=count, help="Tokens generated per prompt and temperature.", rich_help_panel=MEASURING),
]
MaxNodesOption = Annotated[
    int,
    typer.Option(min=2, max=4096, help="Largest tree, the root included.", rich_help_panel=DRAFTING),
]
MaxDepthOption = Annotated[int, typer.Option(min=1, max=4096, help="Most drafts on a path.", rich_help_panel=DRAFTING)]
CheckOption = Annotated[
    bool,
    typer.Option("--check", help="Also measure the chosen trees' speed-up.", rich_help_panel=MEASURING),
]
BenchHeatsOption = Annotated[
    list[float] | None,
    typer.Option(help="0 is greedy; may be repeated. Default: 0 and 1.", rich_help_panel=SAMPLING),
]
BatchSizesOption = Annotated[
    list[int] | None,
    typer.Option(
        min=1,
        callback=count,
        help="Prompts continued together; may be repeated. Default: 1.",
        rich_help_panel=MEASURING,
    ),
]
RepeatsOption = Annotated[
    int,
    typer.Option(min=1, callback=count, help="How often every batch is measured.", rich_help_panel=MEASURING),
]
BenchTokensOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        callback=count,
        help="Tokens per prompt, for all arms; fewer only with --until-end and --replay. Default: 64; with --replay "
        "the whole text.",
        rich_help_panel=MEASURING,
    ),
]
UntilEndOption = Annotated[
    bool,
    typer.Option(
        "--until-end",
        help="Let the model end a text before it has all its tokens, as users see it.",
        rich_help_panel=MEASURING,
    ),
]
ReplayOption = Annotated[
    bool,
    typer.Option(
        "--replay",
        help="Let every arm write the text that a row has as edited or reference, whatever the target would write.",
        rich_help_panel=MEASURING,
    ),
]
BenchQuietOption = Annotated[
    bool,
    typer.Option("--quiet", "-q", help="Print the results and nothing else.", rich_help_panel=OUTPUT),
]
RuleOption = Annotated[
    str | None,
    typer.Option(
        "--rule",
        "--verifier",
        metavar="TEXT",
        help="Only the rule of this word, or rules whose name contains it; or FILE.py:CLASS, a rule of your own.",
    ),
]
RunsArgument = Annotated[Path, typer.Argument(help='What "polydraft bench --out" wrote.', callback=to_read)]
PageOption = Annotated[
    Path, typer.Option(metavar="FOLDER", help="Folder for the page and its figures.", callback=folder_to_write)
]
PairOption = Annotated[
    Path,
    typer.Option(metavar="FOLDER", help="Where the two model folders are written.", callback=folder_to_write),
]
WorkOption = Annotated[
    Path,
    typer.Option(
        metavar="FOLDER",
        help="Corpus, checkpoints; an interrupted run goes on from here.",
        callback=folder_to_write,
    ),
]
PromptsOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="FILE",
        help="A file of JSON lines or plain text, or humaneval, gsm8k, python, edits, spec-bench-mini, spec-bench; "
        "may be repeated.",
        callback=filled,
        rich_help_panel=PROMPTS,
    ),
]
LimitOption = Annotated[int, typer.Option(min=1, callback=count, help="Prompts of each task.", rich_help_panel=PROMPTS)]
ExcerptOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        callback=count,
        help="Tokens of a plain text's passage to start from. Default: 64.",
        rich_help_panel=PROMPTS,
    ),
]
FixedSeedOption = Annotated[
    int,
    typer.Option(min=0, callback=seed_number, help="Fixes what is drawn at random.", rich_help_panel=MEASURING),
]
SvgOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Also write the drawn token tree to this SVG file.", callback=to_write_beside),
]
RunsOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="File for one JSON line per run; an interrupted benchmark goes on from it.",
        callback=to_write,
        rich_help_panel=OUTPUT,
    ),
]
PlanFileOption = Annotated[
    Path,
    typer.Option(metavar="FILE", help="The plan file to write.", callback=to_write, rich_help_panel=OUTPUT),
]
ArmOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ARM",
        help='What to measure; may be repeated: plain, default, prediction, hf, hf-lookup, "hf-assisted tokens=5 '
        'threshold=0", "tree=3,2,1 verifier=naive", "drafter=ngram tree=chain:8", "name=mine verifier=optimal '
        'bottom-up", "draft=HEAD", "verifier=FILE.py:CLASS drafter=FILE.py:CLASS". '
        "Default: the first three and both others of Hugging Face's.",
        rich_help_panel=DRAFTING,
    ),
]
JsonLinesOption = Annotated[
    bool, typer.Option("--json", help="Print JSON lines and nothing else.", rich_help_panel=OUTPUT)
]
