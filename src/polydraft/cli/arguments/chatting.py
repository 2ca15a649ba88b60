"""Options of `polydraft chat` alone."""

from pathlib import Path
from typing import Annotated

import typer

from polydraft.cli.arguments.options import MODELS, OUTPUT, PROMPTS, SAMPLING
from polydraft.cli.arguments.places import to_read
from polydraft.cli.arguments.values import count, model_name, seed_number

ChatTargetOption = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        help="Chat model: folder, .gguf file or hub name. Default: smollm2.",
        callback=model_name,
        rich_help_panel=MODELS,
    ),
]
ChatSeedOption = Annotated[
    int | None,
    typer.Option(
        min=0,
        callback=seed_number,
        help="Fixes the conversation: the seed of the first turn, the next one of the second, ...",
        rich_help_panel=SAMPLING,
    ),
]
AnswerTokensOption = Annotated[
    int,
    typer.Option(min=1, callback=count, help="Most tokens of an answer.", rich_help_panel=SAMPLING),
]
SystemOption = Annotated[
    str | None,
    typer.Option(
        metavar="TEXT", help="The system message. Default: what the model's template has.", rich_help_panel=PROMPTS
    ),
]
MessagesOption = Annotated[
    Path | None,
    typer.Option(
        "--input",
        metavar="FILE",
        help="A file of messages to answer in turn: JSON lines, or plain text with one a line.",
        callback=to_read,
        rich_help_panel=PROMPTS,
    ),
]
AnswersOption = Annotated[
    bool,
    typer.Option("--json", help="Print one JSON object an answer and nothing else.", rich_help_panel=OUTPUT),
]
ChatQuietOption = Annotated[
    bool,
    typer.Option("--quiet", "-q", help="Print no greeting and no lines about answers.", rich_help_panel=OUTPUT),
]
