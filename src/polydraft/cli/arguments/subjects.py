"""Options of the subjects of `polydraft bench`, and what may not stand before a subject."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from polydraft.cli.arguments.options import DRAFTING, MEASURING, MODELS, SAMPLING
from polydraft.cli.arguments.values import count, filled, model_name
from polydraft.cli.arguments.words import one_of, rule_word, scheme_word
from polydraft.errors import InvalidParameter

if TYPE_CHECKING:
    Context = typer.Context
else:  # what typer passes is of the class above its own, which versions of typer import from different places
    Context = next(kind for kind in typer.Context.__mro__[1:] if kind.__name__ == "Context")

Words = list[str] | None
LAWS, SHARES, OPTIMUM = "laws", "shares", "optimum"
PARTS = (LAWS, SHARES, OPTIMUM)
"""The tables of `polydraft bench rules`."""


def refuse_options_before(context: Context) -> None:
    """Refuse options of `polydraft bench` before the name of a subject, which has options of its own.

    Raises:
        InvalidParameter: one was given.
    """
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if source is not None and source.name == "COMMANDLINE":
            raise InvalidParameter(
                f"{parameter.opts[0]} before {context.invoked_subcommand} would do nothing: give the options of a "
                "subject behind its name."
            )


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
