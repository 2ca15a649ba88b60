"""Options that have no effect beside others: they are refused by name, since nobody gives an option for nothing."""

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from polydraft.errors import InvalidParameter

if TYPE_CHECKING:
    from polydraft.bench import Prompt


LONE_DRAFT = "--draft needs --target: a draft belongs to its target; that of the embedded pair is --target pair."
LONE_MODEL = "--target and --draft go together: a draft belongs to its target, as pair-draft does to pair."


def refuse_clashes(*clashes: tuple[object, str]) -> None:
    """Refuse the first combination that is there; each comes with its sentence.

    Raises:
        InvalidParameter: one is there.
    """
    for there, sentence in clashes:
        if there:
            raise InvalidParameter(sentence)


def of_this_machine(
    words: Collection[str | None], devices: Collection[str | None]
) -> tuple[tuple[object, str], tuple[object, str]]:
    """Return the clashes with --ray of rules and drafters that are files, and of a GPU that is named by its number."""
    from polydraft.catalogue import digests

    own = next((word for word in words if word in digests()), None)
    device = next((one for one in devices if one and ":" in one), None)
    return (
        (own, f"{own} is a file of this machine: with --ray name a rule or drafter of polydraft's own."),
        (device, f"With --ray the cluster chooses the GPU, not --device {device}: write cuda."),
    )


def read_asked(
    sources: Sequence[str], limit: int | None, chat_template: bool | None, excerpt_tokens: int | None = None
) -> "list[Prompt]":
    """Read the prompts that options name, and refuse options that are for none of them.

    Raises:
        InvalidParameter: --excerpt-tokens without an excerpt of a plain text, or --chat-template with nothing else.
        PromptFileError: a set cannot be read.
    """
    from polydraft.bench.prompts import read_prompt_sets

    prompts = read_prompt_sets(sources, limit, chat_template)
    excerpts = [prompt.excerpt for prompt in prompts]
    refuse_clashes(
        (
            excerpt_tokens is not None and not any(excerpts),
            "--excerpt-tokens is for plain text, and none of the prompts is of one: leave it out.",
        ),
        (
            chat_template and all(excerpts),
            "--chat-template is for prompts, and all that are given are excerpts of plain text: leave it out.",
        ),
    )
    return prompts


def idle_filters(settings: dict[str, float], others: str = "") -> tuple[bool, str]:
    """Return the clash of filters that cut the sampled distribution with temperature 0, which samples nothing."""
    off = {"top_k": 0.0, "top_p": 1.0, "min_p": 0.0}
    given = [f"--{name.replace('_', '-')}" for name, value in off.items() if settings.get(name, value) != value]
    cold = settings.get("temperature", 0.0) == 0
    what, them = " and ".join(given), "it" if len(given) == 1 else "them"
    sentence = f"At temperature 0, which takes the likeliest token, {what} would do nothing{others}: "
    return bool(given) and cold, f"{sentence}give --temperature too, or leave {them} out."
