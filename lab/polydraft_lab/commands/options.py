"""Options of `polydraft limits` and of the subjects of `polydraft bench`."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from polydraft.cli.arguments.options import DRAFTING, MEASURING, MODELS, OUTPUT, SAMPLING
from polydraft.cli.arguments.places import folder_to_write
from polydraft.cli.arguments.values import count, filled, model_name
from polydraft.cli.arguments.words import one_of, own_rules, rule_word, scheme_word
from polydraft.errors import InvalidParameter

Words = list[str] | None
LAWS, SHARES, OPTIMUM = "laws", "shares", "optimum"
PARTS = (LAWS, SHARES, OPTIMUM)
"""The tables of `polydraft bench rules`."""


def _each(check: Callable[[str], str | None]) -> Callable[[Words], Words]:
    """Return the check of an option that may be repeated, made of that of one value, which returns its word."""

    def checked(values: Words) -> Words:
        return None if values is None else [str(check(value)) for value in values]

    return checked


def _models(names: Words) -> Words:
    return None if names is None else [str(model_name(name)) for name in names]


def _part(word: str) -> str:
    return one_of(word, PARTS)


PassDraftsOption = Annotated[
    Words,
    typer.Option(
        metavar="MODEL",
        help="Draft model with the same tokens: as --target; or self:int8, self:skip=12-19, made of the target; may be "
        "repeated. Default: the embedded pair's.",
        callback=_models,
        rich_help_panel=MODELS,
    ),
]
KnownOption = Annotated[
    list[int] | None,
    typer.Option(
        min=1,
        callback=count,
        help="Tokens read before the pass; may be repeated. Default: 64 and 512.",
        rich_help_panel=MEASURING,
    ),
]
WidthsOption = Annotated[
    list[int] | None,
    typer.Option(
        min=1,
        callback=count,
        help="Tokens scored by the pass; may be repeated. Default: 1, 2, 4, 8, 16, 32 and 64.",
        rich_help_panel=MEASURING,
    ),
]
PassRepeatsOption = Annotated[
    int,
    typer.Option(min=1, callback=count, help="How often every pass is timed.", rich_help_panel=MEASURING),
]
PartsOption = Annotated[
    Words,
    typer.Option(
        metavar="NAME",
        help=f"What to measure: {', '.join(PARTS[:-1])} or {PARTS[-1]}; may be repeated. Default: all.",
        callback=_each(_part),
        rich_help_panel=MEASURING,
    ),
]
VerifiersOption = Annotated[
    Words,
    typer.Option(
        metavar="NAME",
        help="Verification rule, a word of `polydraft generate --verifier` but auto; may be repeated. Default: all "
        "that are lossless.",
        callback=_each(rule_word),
        rich_help_panel=DRAFTING,
    ),
]
SchemesOption = Annotated[
    Words,
    typer.Option(
        metavar="NAME",
        help="How drafts are drawn, a word of `polydraft generate --scheme`; may be repeated. Default: all that a "
        "draft model draws by.",
        callback=_each(scheme_word),
        rich_help_panel=DRAFTING,
    ),
]
TreesOption = Annotated[
    Words,
    typer.Option(
        metavar="TREE",
        help="For the shares: a tree as for `polydraft generate`, or default; may be repeated. Default: 3,2 and "
        "default.",
        rich_help_panel=DRAFTING,
    ),
]
RulesHeatsOption = Annotated[
    list[float] | None,
    typer.Option(help="Of both models; may be repeated. Default: 1.", rich_help_panel=SAMPLING),
]
VocabularyOption = Annotated[
    int | None,
    typer.Option(
        min=2,
        max=2**20,
        help="Tokens of the rows over which the optimum is timed. Default: 152,000.",
        rich_help_panel=MEASURING,
    ),
]
SettingsOption = Annotated[
    Words,
    typer.Option(
        metavar="TEXT",
        help="Only settings whose name contains this, such as good or useless; may be repeated. Default: all.",
        callback=filled,
        rich_help_panel=MEASURING,
    ),
]
FreshOption = Annotated[
    bool,
    typer.Option("--fresh", help="A new planner for every text, which knows nothing.", rich_help_panel=MEASURING),
]
PlannerRepeatsOption = Annotated[
    int,
    typer.Option(
        min=1,
        callback=count,
        help="How often every text is written; batches eight times as often.",
        rich_help_panel=MEASURING,
    ),
]
LaneTokensOption = Annotated[
    int,
    typer.Option(min=1, callback=count, help="Tokens of every text.", rich_help_panel=MEASURING),
]
LatticeHeatsOption = Annotated[
    list[float] | None,
    typer.Option(help="Of target and head, above 0; may be repeated. Default: 0.6, 0.8, 1.", rich_help_panel=SAMPLING),
]
LatticeDraftsOption = Annotated[
    list[int] | None,
    typer.Option(
        "--drafts",
        min=1,
        max=256,
        help="Most drafts of a tree; may be repeated. Default: 6, 16.",
        rich_help_panel=DRAFTING,
    ),
]
LatticePageOption = Annotated[bool, typer.Option("--page", help="Print the tables in Markdown, for a page.")]
LatticeIntoOption = Annotated[
    Path | None,
    typer.Option(
        "--into",
        help="Put the tables into this page, between <!-- table: lattice --> (with --target: lattice of TARGET) "
        "and <!-- end of table -->.",
    ),
]
LatticeRepeatsOption = Annotated[
    int,
    typer.Option(
        min=0,
        callback=count,
        help="How often every text is written against the clock; 0 takes no time.",
        rich_help_panel=MEASURING,
    ),
]
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


def parse_numbers(text: str) -> tuple[int, ...]:
    """Read "1,2,4" or "1-8" or a mixture.

    Raises:
        InvalidParameter: the text is neither.
    """
    numbers: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        try:
            ends = int(first), int(last if dash else first)
        except ValueError as error:
            raise InvalidParameter(f'Numbers of drafts are written as "1,2,4" or "1-8", not {text!r}.') from error
        if not 1 <= ends[0] <= ends[1] <= 1000:
            raise InvalidParameter(f"Numbers of drafts must lie between 1 and 1000 and ascend, unlike {part!r}.")
        numbers.extend(range(ends[0], ends[1] + 1))
    return tuple(sorted({*numbers}))
