"""Options that several commands share, and under which headings help shows them."""

from enum import StrEnum
from typing import Annotated

import typer

from polydraft.cli.arguments.values import device_name, model_name, precision

MODELS, DRAFTING, SAMPLING = "Models", "Drafting", "Sampling"
PROMPTS, MEASURING, OUTPUT, FILES = "Prompts", "Measuring", "Output", "Files of prompts"


class DrafterName(StrEnum):
    """The drafters that the command line offers."""

    model = "model"
    ngram = "ngram"
    lookup_first = "lookup-first"
    none = "none"


class VerifierName(StrEnum):
    """The verification rules that the command line offers; the last three are lossy."""

    auto = "auto"
    naive = "naive"
    speculative = "speculative"
    recursive = "recursive"
    recursive_wo = "recursive-wo"
    top_then_sample = "top-then-sample"
    k_seq = "k-seq"
    spec_hub = "spec-hub"
    importance_weighted = "importance-weighted"
    optimal = "optimal"
    race = "race"
    block = "block"
    traversal = "traversal"
    shared_noise = "shared-noise"
    typical = "typical"
    lenient = "lenient"
    top_beta = "top-beta"


class SchemeName(StrEnum):
    """The ways of drafting that the command line offers."""

    iid = "iid"
    without_replacement = "without-replacement"
    top_k = "top-k"
    top_then_sample = "top-then-sample"
    top_then_iid = "top-then-iid"
    conditional_poisson = "conditional-poisson"
    spec_hub = "spec-hub"
    product = "product"
    coupled = "coupled"
    given = "given"


VERIFIERS = "auto, naive, speculative, recursive, recursive-wo, top-then-sample, k-seq, spec-hub, importance-weighted, "
VERIFIERS += "optimal, race, block, traversal, shared-noise; LOSSY: typical, lenient, top-beta."
SCHEMES = f"{', '.join(list(SchemeName)[:-1])} or {SchemeName.given}."

TargetOption = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        help="Target model: folder, .gguf file, hub name, or smollm2. Default: embedded pair.",
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
    DrafterName | None,
    typer.Option(
        metavar="NAME",
        help="Who drafts: model, ngram, lookup-first or none. Default: model if there is one, else ngram.",
        rich_help_panel=DRAFTING,
    ),
]
VerifierOption = Annotated[
    VerifierName,
    typer.Option(metavar="NAME", help=f"Verification rule: {VERIFIERS}", rich_help_panel=DRAFTING),
]
SchemeOption = Annotated[
    SchemeName | None,
    typer.Option(
        metavar="NAME",
        help=f"How drafts are drawn, for rules that know several ways: {SCHEMES}",
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
        help='Children per depth such as "4,2,2,1"; or "chain:5", "trunk:2+3,2", "eagle", "medusa"; trees that '
        'follow the draft: "best-first:16", "eagle-2", "confident:8:0.4", "adaptive:8" (docs/trees.md).',
        rich_help_panel=DRAFTING,
    ),
]
