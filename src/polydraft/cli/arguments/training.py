"""Options of `polydraft train head`."""

from pathlib import Path
from typing import Annotated

import typer

from polydraft.cli.arguments.options import OUTPUT, PROMPTS
from polydraft.cli.arguments.places import folder_to_write
from polydraft.cli.arguments.values import count

TEXT, TRAINING = "Text", "Training"
HeadKindArgument = Annotated[
    str, typer.Argument(metavar="KIND", help="medusa, eagle, eagle-3, dspark, or mixing (rows know the drafted path).")
]
HeadFolderOption = Annotated[
    Path,
    typer.Option(metavar="FOLDER", help="The head's folder.", callback=folder_to_write, rich_help_panel=OUTPUT),
]
HeadWorkOption = Annotated[
    Path,
    typer.Option(
        metavar="FOLDER",
        help="The target's text and checkpoints; an interrupted run goes on from here.",
        callback=folder_to_write,
        rich_help_panel=OUTPUT,
    ),
]
HeadFormOption = Annotated[
    str,
    typer.Option(
        help="Form of the folder: official, or speculators (medusa: vllm; dspark: deepspec too).",
        rich_help_panel=OUTPUT,
    ),
]
HeadLimitOption = Annotated[int, typer.Option(min=1, callback=count, help="Prompts per task.", rich_help_panel=PROMPTS)]
HeadTokensOption = Annotated[
    int, typer.Option(min=1, callback=count, help="Tokens of text that the target writes.", rich_help_panel=TEXT)
]
HeadLengthOption = Annotated[
    int,
    typer.Option(
        min=16,
        callback=count,
        help="Tokens of each text, of which its prompt is three quarters at most.",
        rich_help_panel=TEXT,
    ),
]
PastEndOption = Annotated[
    bool,
    typer.Option("--past-end", help="Also learn what the target writes behind an end token.", rich_help_panel=TEXT),
]
HeadStepsOption = Annotated[
    int, typer.Option(min=1, callback=count, help="Optimiser steps of 8 texts.", rich_help_panel=TRAINING)
]
HeadRateOption = Annotated[
    float,
    typer.Option(
        help="Peak learning rate of weight matrices (Muon); tables, norms and biases (AdamW) have half of it.",
        rich_help_panel=TRAINING,
    ),
]
HeadLossOption = Annotated[
    str,
    typer.Option(
        help="published (by the head's authors), entropy, acceptance, lk-alpha, lk-lambda, or of block heads d-pace.",
        rich_help_panel=TRAINING,
    ),
]
HeadLayersOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        callback=count,
        help="Layers. Default: those of --start, or 1, of block heads 2.",
        rich_help_panel=TRAINING,
    ),
]
HeadDraftsOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        callback=count,
        help="Tokens deep that it learns to draft. Default: those of --start, or 6.",
        rich_help_panel=TRAINING,
    ),
]
HeadRankOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        callback=count,
        help="Of dspark: rank of its term. Default: that of --start, or 64.",
        rich_help_panel=TRAINING,
    ),
]
HeadTermOption = Annotated[
    str | None,
    typer.Option(
        help="Of dspark: its rows know the last token (vanilla, gated), or the whole drafted path (rnn). "
        "Default: that of --start, or vanilla.",
        rich_help_panel=TRAINING,
    ),
]
HeadStartOption = Annotated[
    Path | None,
    typer.Option(
        "--start",
        metavar="FOLDER",
        help="Begin with the weights of this head, of the same kind; of a block head with another term, its layers. "
        "Default: new ones.",
        rich_help_panel=TRAINING,
    ),
]
FrozenRowsOption = Annotated[
    bool,
    typer.Option(
        "--frozen-rows",
        help="Of eagle-3: keep the target's output rows instead of learning own ones; steps are cheaper.",
        rich_help_panel=TRAINING,
    ),
]
HeadRowsOption = Annotated[
    int | None,
    typer.Option(
        "--rows",
        min=1,
        callback=count,
        help="Draft only so many of the target's tokens, the most written ones. Default: all.",
        rich_help_panel=TRAINING,
    ),
]
