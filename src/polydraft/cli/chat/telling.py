"""What is said about answers: the line below each, the table of all, and JSON."""

from typing import Any

from rich.table import Table

from polydraft.cli.chat.session import Answer, Chat
from polydraft.cli.printing.tables import add_statistics

CUTS = {
    "length": "cut by --max-new-tokens",
    "context": "cut by the model's context",
    "interrupted": "interrupted",
}
"""Why an answer is not whole."""


def counted(count: int, word: str) -> str:
    """Return a number of things in words."""
    return f"{count} {word}{'s' * (count != 1)}"


def summary(answer: Answer) -> str:
    """Return the line below an answer."""
    found = answer.statistics
    prompt = found.prompt_read + found.prompt_known
    parts = [
        counted(found.new_tokens, "token"),
        f"{found.tokens_per_second:.1f} tokens/s",
        f"{found.block_efficiency:.2f} tokens per call",
        f"read {found.prompt_read} of {counted(prompt, 'prompt token')}",
    ]
    parts += [] if found.lossless else [f"LOSSY ({found.verifier})"]
    cut = CUTS.get(answer.finish)
    return ", ".join([*parts, cut] if cut else parts)


def dropping(answer: Answer, context: int) -> str:
    """Return the sentence that says what was dropped; empty if nothing was."""
    if not answer.dropped:
        return ""
    were = "oldest exchange was" if answer.dropped == 1 else f"{answer.dropped} oldest exchanges were"
    return f"The context of {context} tokens is full: the {were} dropped."


def table(chat: Chat) -> Table:
    """Return the table of the conversation so far."""
    told = chat.statistics
    found = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    found.add_row("answers", str(len(chat.told)))
    if chat.dropped:
        found.add_row("exchanges dropped", str(chat.dropped))
    found.add_row("conversation", f"{len(chat.conversation.ids)} of {chat.context} tokens")
    found.add_row("prompt tokens", f"{told.prompt_read} read, {told.prompt_known} known from before")
    if chat.told:
        add_statistics(found, told)
    if not told.lossless:
        found.add_row("law", f"NOT the target's: {told.verifier} is lossy")
    if told.fallback:
        found.add_row("drafter failed", told.fallback, style="red")
    return found


def as_json(answer: Answer) -> dict[str, Any]:
    """Return an answer for JSON."""
    found = answer.statistics
    return {
        "role": "assistant",
        "content": answer.content,
        "finish": answer.finish,
        "tokens": found.new_tokens,
        "accepted": found.accepted,
        "target_calls": found.target_calls,
        "prompt_read": found.prompt_read,
        "prompt_known": found.prompt_known,
        "dropped": answer.dropped,
        "verifier": found.verifier,
        "lossless": found.lossless,
        "seconds": round(found.seconds.get("total", 0.0), 4),
    }
