"""Options that have no effect beside others: they are refused by name, since nobody gives an option for nothing."""

from collections.abc import Sequence
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


def both_outputs(as_json: bool, quiet: bool) -> tuple[bool, str]:
    """Return the clash of --json and --quiet, each of which says that nothing else is printed."""
    return as_json and quiet, "--json and --quiet each print one thing and nothing else: give one of them."


def idle_excerpts(prompts: Sequence["Prompt"], given: bool) -> tuple[bool, str]:
    """Return the clash of --excerpt-tokens with prompts of which none is an excerpt of a plain text."""
    idle = given and not any(prompt.excerpt for prompt in prompts)
    return idle, "--excerpt-tokens is for plain text, and none of the prompts is of one: leave it out."


def idle_template(prompts: Sequence["Prompt"], chat_template: bool | None) -> tuple[object, str]:
    """Return the clash of --chat-template with prompts that are all excerpts of a plain text, which stay raw."""
    idle = chat_template and all(prompt.excerpt for prompt in prompts)
    return idle, "--chat-template is for prompts, and all that are given are excerpts of plain text: leave it out."


def idle_filters(settings: dict[str, float], others: str = "") -> tuple[bool, str]:
    """Return the clash of filters that cut the sampled distribution with temperature 0, which samples nothing.

    Args:
        settings: the sampling settings that were given.
        others: what else might have had a temperature, and has none.
    """
    off = {"top_k": 0.0, "top_p": 1.0, "min_p": 0.0}
    given = [f"--{name.replace('_', '-')}" for name, value in off.items() if settings.get(name, value) != value]
    cold = settings.get("temperature", 0.0) == 0
    what, them = " and ".join(given), "it" if len(given) == 1 else "them"
    sentence = f"At temperature 0, which takes the likeliest token, {what} would do nothing{others}: "
    return bool(given) and cold, f"{sentence}give --temperature too, or leave {them} out."
