"""Options of `polydraft generate` alone."""

from pathlib import Path
from typing import Annotated

import typer

from polydraft.cli.arguments.options import DRAFTING, FILES, MODELS, OUTPUT, SAMPLING
from polydraft.cli.arguments.places import to_read, to_write
from polydraft.cli.arguments.values import count, seed_number, stop_strings

TemperatureOption = Annotated[
    float,
    typer.Option(
        help="0 is greedy decoding. Above 0 the whole distribution is sampled from, unless --top-k, --top-p or "
        "--min-p cut it; in Python top_k is 50, Hugging Face's default, unless it is given.",
        rich_help_panel=SAMPLING,
    ),
]
TopPOption = Annotated[float | None, typer.Option(help="Nucleus mass in (0, 1].", rich_help_panel=SAMPLING)]
TopKOption = Annotated[
    int | None,
    typer.Option(
        callback=count,
        help="Most likely tokens to keep; 0, the default here, keeps all (Hugging Face's default is 50).",
        rich_help_panel=SAMPLING,
    ),
]
MinPOption = Annotated[
    float | None, typer.Option(help="Share of the top token's probability to keep.", rich_help_panel=SAMPLING)
]
RepetitionOption = Annotated[float | None, typer.Option(help="Above 0; 1 is off.", rich_help_panel=SAMPLING)]
NewTokensOption = Annotated[
    int,
    typer.Option(min=1, callback=count, help="Most tokens of the new text.", rich_help_panel=SAMPLING),
]
QuietOption = Annotated[
    bool,
    typer.Option("--quiet", "-q", help="Print the new text and nothing else.", rich_help_panel=OUTPUT),
]
CompareOption = Annotated[
    bool,
    typer.Option("--compare", help="Measure the speed-up over plain decoding.", rich_help_panel=OUTPUT),
]
InputOption = Annotated[
    Path | None,
    typer.Option(
        "--input",
        metavar="FILE",
        help="A file of prompts: JSON lines, or plain text with one a line.",
        callback=to_read,
        rich_help_panel=FILES,
    ),
]
BatchOption = Annotated[
    int | None,
    typer.Option(min=1, callback=count, help="Texts of --input at a time. Default: 8.", rich_help_panel=FILES),
]
StopOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TEXT",
        help="Stop after this string; may be repeated.",
        callback=stop_strings,
        rich_help_panel=SAMPLING,
    ),
]
JsonSchemaOption = Annotated[
    str | None,
    typer.Option(
        "--json-schema",
        metavar="FILE|TEXT",
        help="Let the text be a JSON value of this schema: a file, or the schema itself.",
        rich_help_panel=SAMPLING,
    ),
]
CompactOption = Annotated[
    bool,
    typer.Option("--compact", help="Leave the blanks of --json-schema's JSON out.", rich_help_panel=SAMPLING),
]
RegexOption = Annotated[
    str | None,
    typer.Option(metavar="PATTERN", help="Let the text match this, as a whole.", rich_help_panel=SAMPLING),
]
GrammarOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Let the text follow this Lark grammar.", callback=to_read, rich_help_panel=SAMPLING
    ),
]
SeedOption = Annotated[
    int | None,
    typer.Option(min=0, callback=seed_number, help="Fixes the text.", rich_help_panel=SAMPLING),
]
TextsOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="File for the texts of --input; the same call goes on.",
        callback=to_write,
        rich_help_panel=FILES,
    ),
]
PlanOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="A file from `polydraft tune`; or auto, goodput: learn by doing.",
        callback=to_read,
        rich_help_panel=DRAFTING,
    ),
]
CompileOption = Annotated[
    bool,
    typer.Option(
        "--compile",
        help="Compile the models' passes first; pays on GPUs, for long texts.",
        rich_help_panel=MODELS,
    ),
]
