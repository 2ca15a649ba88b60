"""Options that several commands share, and under which headings help shows them."""

from typing import Annotated

import typer

from polydraft.cli.arguments.values import device_name, model_name, precision
from polydraft.cli.arguments.words import (
    drafter_word,
    drafters_in_help,
    rules_in_help,
    scheme_word,
    schemes_in_help,
    trees_in_help,
    verifier_word,
)

MODELS, DRAFTING, SAMPLING = "Models", "Drafting", "Sampling"
PROMPTS, MEASURING, OUTPUT, FILES = "Prompts", "Measuring", "Output", "Files of prompts"

TargetOption = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        help="Target model: folder, .gguf file, hub name, smollm2, or pair. Default: embedded pair.",
        callback=model_name,
        rich_help_panel=MODELS,
    ),
]
DraftOption = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        help="Draft model with the same tokens: as --target; or self:int8, self:skip=12-19, made of the target.",
        callback=model_name,
        rich_help_panel=MODELS,
    ),
]
DtypeOption = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="auto, float32, bfloat16, float16 or float64.",
        callback=precision,
        rich_help_panel=MODELS,
    ),
]
DeviceOption = Annotated[
    str,
    typer.Option(metavar="NAME", help="auto, cpu, cuda, cuda:1, ...", callback=device_name, rich_help_panel=MODELS),
]
TemplateOption = Annotated[
    bool | None,
    typer.Option(
        "--chat-template/--no-chat-template",
        help="Send plain prompts through the tokenizer's chat template too, or nothing. Default: messages and turns.",
        rich_help_panel=PROMPTS,
    ),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON object and nothing else.", rich_help_panel=OUTPUT)
]
DrafterOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help=f"Who drafts: {drafters_in_help()}; or FILE.py:CLASS. Default: model if there is one, else merge; when "
        "sampling, route.",
        callback=drafter_word,
        rich_help_panel=DRAFTING,
    ),
]
VerifierOption = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help=f"Verification rule: {rules_in_help()}; or FILE.py:CLASS.",
        callback=verifier_word,
        rich_help_panel=DRAFTING,
    ),
]
SchemeOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help=f"How drafts are drawn, for rules that know several ways: {schemes_in_help()}.",
        callback=scheme_word,
        rich_help_panel=DRAFTING,
    ),
]
BottomUpOption = Annotated[
    bool,
    typer.Option(
        "--bottom-up",
        help="Verify whole paths from the leaves up, instead of node by node.",
        rich_help_panel=DRAFTING,
    ),
]
TreeOption = Annotated[
    str | None,
    typer.Option(
        metavar="TREE",
        help=f"{trees_in_help()} (docs/trees.md).",
        rich_help_panel=DRAFTING,
    ),
]
