"""Options of `polydraft limits` and of the subjects of `polydraft bench`.

What is empty or None is as the settings of what is measured have it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from polydraft.cli.option_words import own_rules
from polydraft.errors import InvalidParameter
from polydraft.options.commands.option_groups import (
    BOTTOM_UP,
    CHAT_TEMPLATE,
    DEVICE,
    DRAFT,
    DRAFTER,
    DRAFTING,
    DTYPE,
    EXCERPT,
    FOLDER,
    JSON_LINES,
    LIMIT,
    MEASURING,
    OUTPUT,
    PROMPT_FILES,
    RESULTS_ALONE,
    SEED,
    TARGET,
    ClusterOptions,
    ModelOptions,
)
from polydraft.options.option import LARGEST_COUNT, Option, count, option
from polydraft.options.sampling_options import SAMPLING
from polydraft.options.value_checks import filled, model_name

LAWS, SHARES, OPTIMUM = "laws", "shares", "optimum"
PARTS = (LAWS, SHARES, OPTIMUM)
"""The tables of `polydraft bench rules`."""


def _model_names(names: Sequence[str] | None) -> list[str]:
    return [str(model_name(name)) for name in names or ()]


NUMBERS = Option('Numbers of drafts: "1,2,4" or "1-8".', DRAFTING, flag="--k", metavar="NUMBERS")
SHORTLIST = Option("Tokens that drafts are drawn from.", DRAFTING, least=2, largest=LARGEST_COUNT)
TEXT_TOKENS = Option("Tokens generated per prompt and temperature.", MEASURING, least=1, largest=LARGEST_COUNT)
NEW_TOKENS = TEXT_TOKENS.but(help="Tokens of every text.")


@dataclass(frozen=True, kw_only=True)
class SourceOptions(ModelOptions):
    """Models and prompts; without a target the embedded pair."""

    prompts: tuple[str, ...] = PROMPT_FILES.usually(("python",))
    limit: int = LIMIT.usually(8)


@dataclass(frozen=True, kw_only=True)
class LimitsOptions(ClusterOptions, SourceOptions):
    """One call of `polydraft limits`; `verifiers` are the words of the user's own rules."""

    prompts: tuple[str, ...] = PROMPT_FILES.usually(("humaneval", "gsm8k"))
    max_tokens: int = TEXT_TOKENS.usually(64)
    excerpt_tokens: int | None = EXCERPT.usually(None)
    temperatures: tuple[float, ...] = option(
        (), "The target's; may be repeated. Default: 0, 0.3, 0.6, 0.9 and 1.2.", SAMPLING, flag="--temperature"
    )
    draft_temperature: float | None = option(None, "The draft model's. Default: the target's.", SAMPLING)
    drafter: str | None = DRAFTER.but(
        help="Measure the drafts of this drafter, as for `polydraft generate`; or FILE.py:CLASS. Default: what a draft "
        "model would draft at every position."
    ).usually(None)
    verifiers: tuple[str, ...] = option(
        (),
        "A lossless rule of your own, beside those of the catalogue; may be repeated.",
        DRAFTING,
        flag="--verifier",
        metavar="FILE.py:CLASS",
        check=own_rules,
    )
    numbers: str = NUMBERS.usually("1,2,3,4,6,8")
    shortlist: int = SHORTLIST.usually(64)
    shapes: tuple[str, ...] = option(
        (), "Trees; may be repeated. Default: chain:4, 2,2,1 and 4,2,1.", DRAFTING, flag="--tree", metavar="TREE"
    )
    tree_every: int = count(4, "Grow trees at every so many positions; 0: none.", MEASURING, least=0)
    seed: int = SEED.usually(0)
    out: Path | None = FOLDER.but(
        help="Folder for records, tables and figures; an interrupted run goes on from it.", panel=OUTPUT
    ).usually(None)
    figures: bool = option(False, "Also draw figures into the folder.", OUTPUT)
    chat_template: bool | None = CHAT_TEMPLATE.usually(None)
    as_json: bool = JSON_LINES.usually(False)


@dataclass(frozen=True, kw_only=True)
class BenchPassesOptions:
    """One call of `polydraft bench passes`."""

    target: str | None = TARGET.usually(None)
    drafts: tuple[str, ...] = DRAFT.but(
        help="Draft model with the same tokens: as --target; or self:int8, self:skip=12-19, made of the target; may be "
        "repeated. Default: the embedded pair's.",
        flag="--draft",
        check=_model_names,
    ).usually(())
    known: tuple[int, ...] = count((), "Tokens read before the pass; may be repeated. Default: 64 and 512.", MEASURING)
    widths: tuple[int, ...] = count(
        (),
        "Tokens scored by the pass; may be repeated. Default: 1, 2, 4, 8, 16, 32 and 64.",
        MEASURING,
        flag="--width",
    )
    repeats: int = count(20, "How often every pass is timed.", MEASURING)
    seed: int = SEED.usually(0)
    dtype: str = DTYPE.usually("auto")
    device: str = DEVICE.usually("auto")
    as_json: bool = JSON_LINES.usually(False)
    quiet: bool = RESULTS_ALONE.usually(False)


@dataclass(frozen=True, kw_only=True)
class BenchRulesOptions(SourceOptions):
    """One call of `polydraft bench rules`: no rules are all that are lossless, no schemes and no parts are all."""

    limit: int = LIMIT.usually(2)
    parts: tuple[str, ...] = option(
        (),
        "What to measure: {words}; may be repeated. Default: all.",
        MEASURING,
        flag="--part",
        metavar="NAME",
        words=PARTS,
    )
    verifiers: tuple[str, ...] = option(
        (),
        "Verification rule, a word of `polydraft generate --verifier` but auto; may be repeated. Default: all "
        "that are lossless.",
        DRAFTING,
        flag="--verifier",
        metavar="NAME",
        words="rule",
    )
    schemes: tuple[str, ...] = option(
        (),
        "How drafts are drawn, a word of `polydraft generate --scheme`; may be repeated. Default: all that a "
        "draft model draws by.",
        DRAFTING,
        flag="--scheme",
        metavar="NAME",
        words="scheme",
    )
    bottom_up: bool = BOTTOM_UP.usually(False)
    trees: tuple[str, ...] = option(
        (),
        "For the shares: a tree as for `polydraft generate`, or default; may be repeated. Default: 3,2 and default.",
        DRAFTING,
        flag="--tree",
        metavar="TREE",
    )
    temperatures: tuple[float, ...] = option(
        (), "Of both models; may be repeated. Default: 1.", SAMPLING, flag="--temperature"
    )
    numbers: str = NUMBERS.usually("2,4")
    shortlist: int = SHORTLIST.usually(64)
    max_tokens: int = TEXT_TOKENS.usually(64)
    vocabulary: int | None = option(
        None,
        "Tokens of the rows over which the optimum is timed. Default: 152,000.",
        MEASURING,
        least=2,
        most=2**20,
    )
    seed: int = SEED.usually(0)
    as_json: bool = JSON_LINES.usually(False)
    quiet: bool = RESULTS_ALONE.usually(False)


@dataclass(frozen=True, kw_only=True)
class BenchPlannerOptions(SourceOptions):
    """One call of `polydraft bench planner`; `settings` are parts of their names, none are all."""

    settings: tuple[str, ...] = option(
        (),
        "Only settings whose name contains this, such as good or useless; may be repeated. Default: all.",
        MEASURING,
        flag="--setting",
        metavar="TEXT",
        check=filled,
    )
    fresh: bool = option(False, "A new planner for every text, which knows nothing.", MEASURING)
    repeats: int = count(2, "How often every text is written; batches eight times as often.", MEASURING)
    max_new_tokens: int = NEW_TOKENS.usually(96)
    seed: int = SEED.usually(7)
    as_json: bool = JSON_LINES.usually(False)
    quiet: bool = RESULTS_ALONE.usually(False)


@dataclass(frozen=True, kw_only=True)
class BenchLatticeOptions(SourceOptions):
    """One call of `polydraft bench lattice`; without models the embedded target and its head.

    `into` is a page, whose part between `marks_of` the target is written anew if the run comes to its end.
    """

    temperatures: tuple[float, ...] = option(
        (), "Of target and head, above 0; may be repeated. Default: 0.6, 0.8, 1.", SAMPLING, flag="--temperature"
    )
    drafts: tuple[int, ...] = option(
        (), "Most drafts of a tree; may be repeated. Default: 6, 16.", DRAFTING, least=1, most=256
    )
    repeats: int = count(1, "How often every text is written against the clock; 0 takes no time.", MEASURING, least=0)
    max_new_tokens: int = NEW_TOKENS.usually(96)
    seed: int = SEED.usually(7)
    page: bool = option(False, "Print the tables in Markdown, for a page.")
    into: Path | None = option(
        None,
        "Put the tables into this page, between <!-- table: lattice --> (with --target: lattice of TARGET) "
        "and <!-- end of table -->.",
    )
    as_json: bool = JSON_LINES.usually(False)
    quiet: bool = RESULTS_ALONE.usually(False)


@dataclass(frozen=True, kw_only=True)
class BenchPipelinesOptions(SourceOptions):
    """One call of `polydraft bench pipelines`; a draft model is refused."""

    exits: tuple[int, ...] = count(
        (),
        "Layer behind which guesses are made; may be repeated. Default: a quarter, half and three quarters.",
        flag="--exit",
    )
    guesses: tuple[int, ...] = count((), "Guesses of PPD; may be repeated. Default: 1 and 3.", flag="--guesses")
    layer_ms: float = option(1.0, "Cost model: milliseconds of a layer.")
    hand_over_ms: tuple[float, ...] = option(
        (), "Cost model: milliseconds of a hand-over; may be repeated. Default: 0 and 1.", flag="--hand-over-ms"
    )
    temperatures: tuple[float, ...] = option(
        (), "0 is greedy; may be repeated. Default: 0 and 1.", SAMPLING, flag="--temperature"
    )
    repeats: int = count(1, "How often trees of the same guesses are timed here; 0 times none.", MEASURING, least=0)
    max_new_tokens: int = NEW_TOKENS.usually(96)
    seed: int = SEED.usually(0)
    as_json: bool = JSON_LINES.usually(False)
    quiet: bool = RESULTS_ALONE.usually(False)


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
