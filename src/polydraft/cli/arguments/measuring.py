"""Options of `polydraft limits`, some of which subjects of `polydraft bench` have too."""

from pathlib import Path
from typing import Annotated

import typer

from polydraft.cli.arguments.options import (
    DRAFTING,
    MEASURING,
    OUTPUT,
    SAMPLING,
    BenchQuietOption,
    ExcerptOption,
    FixedSeedOption,
    JsonLinesOption,
    LimitOption,
    PromptsOption,
)
from polydraft.cli.arguments.values import count
from polydraft.cli.words import own_rules
from polydraft.options.places import folder_to_write

__all__ = ["BenchQuietOption", "ExcerptOption", "FixedSeedOption", "JsonLinesOption", "LimitOption", "PromptsOption"]
MaxTokensOption = Annotated[
    int,
    typer.Option(min=1, callback=count, help="Tokens generated per prompt and temperature.", rich_help_panel=MEASURING),
]
LimitsHeatsOption = Annotated[
    list[float] | None,
    typer.Option(help="The target's; may be repeated. Default: 0, 0.3, 0.6, 0.9 and 1.2.", rich_help_panel=SAMPLING),
]
DraftHeatOption = Annotated[
    float | None, typer.Option(help="The draft model's. Default: the target's.", rich_help_panel=SAMPLING)
]
NumbersOption = Annotated[
    str,
    typer.Option("--k", metavar="NUMBERS", help='Numbers of drafts: "1,2,4" or "1-8".', rich_help_panel=DRAFTING),
]
OwnRulesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--verifier",
        metavar="FILE.py:CLASS",
        help="A lossless rule of your own, beside those of the catalogue; may be repeated.",
        callback=own_rules,
        rich_help_panel=DRAFTING,
    ),
]
ShortlistOption = Annotated[
    int,
    typer.Option(min=2, callback=count, help="Tokens that drafts are drawn from.", rich_help_panel=DRAFTING),
]
TreeEveryOption = Annotated[
    int,
    typer.Option(
        min=0,
        callback=count,
        help="Grow trees at every so many positions; 0: none.",
        rich_help_panel=MEASURING,
    ),
]
FiguresOption = Annotated[
    bool, typer.Option("--figures", help="Also draw figures into the folder.", rich_help_panel=OUTPUT)
]
RecordsOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Folder for records, tables and figures; an interrupted run goes on from it.",
        callback=folder_to_write,
        rich_help_panel=OUTPUT,
    ),
]
