"""Options that several commands share."""

from enum import StrEnum
from typing import Annotated

import typer


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


TargetOption = Annotated[str | None, typer.Option(help="Target model: folder or hub name. Default: embedded pair.")]
DraftOption = Annotated[str | None, typer.Option(help="Draft model with the same tokenizer: folder or hub name.")]
DtypeOption = Annotated[str, typer.Option(help="auto, float32, bfloat16, float16 or float64.")]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")]
PromptsOption = Annotated[
    list[str] | None,
    typer.Option(help="A file of JSON lines or plain text, or humaneval, gsm8k, python; may be repeated."),
]
LimitOption = Annotated[int, typer.Option(min=1, help="Prompts of each task.")]
ExcerptOption = Annotated[int, typer.Option(min=1, help="Tokens of a plain text's passage to start from.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
JsonLinesOption = Annotated[bool, typer.Option("--json", help="Print JSON lines and nothing else.")]
DrafterOption = Annotated[
    DrafterName | None, typer.Option(help="Who drafts. Default: model if there is one, else ngram.")
]
VerifierOption = Annotated[VerifierName, typer.Option(help="Verification rule. LOSSY: typical, lenient, top-beta.")]
SchemeOption = Annotated[
    SchemeName | None, typer.Option(help="How drafts are drawn, for rules that know several ways.")
]
BottomUpOption = Annotated[
    bool, typer.Option("--bottom-up", help="Verify whole paths from the leaves up, instead of node by node.")
]
TreeOption = Annotated[
    str | None,
    typer.Option(
        help='Children per depth such as "4,2,2,1"; or "chain:5", "trunk:2+3,2", "eagle", "medusa"; trees that '
        'follow the draft: "best-first:16", "eagle-2", "confident:8:0.4", "adaptive:8" (docs/trees.md).'
    ),
]
ArmOption = Annotated[
    list[str] | None,
    typer.Option(
        help='What to measure; may be repeated: plain, default, hf, hf-lookup, "hf-assisted tokens=5 threshold=0", '
        '"tree=3,2,1 verifier=naive", "drafter=ngram tree=chain:8", "name=mine verifier=optimal bottom-up". '
        "Default: the first three and both others of Hugging Face's."
    ),
]
