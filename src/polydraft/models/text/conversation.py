"""Conversations by a chat template: their tokens, whether the template tells all of them, and how they go on."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

from polydraft.errors import ContextOverflow, InvalidParameter, shown
from polydraft.models.checkpoints.silence import first_sentence

MARK = "qz7"
"""With a number, and itself in reverse behind it, letters that no text has by chance."""
KNOWS_NOT = {
    "tool_calls": "takes no calls of tools",
    "name": "takes no names of those who speak",
    "reasoning_content": "takes no reasoning",
}
"""What is said of a template that leaves out a part of a message beside its content."""


@dataclass(frozen=True)
class Message:
    """What one side of a conversation said.

    Args:
        role: who: "system", "user", "assistant", or what else the template knows.
        content: what.
    """

    role: str
    content: str


def conversation_ids(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message | Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    effort: str | None = None,
) -> list[int]:
    """Return the tokens of a conversation, up to where the model's answer begins.

    The template writes all special tokens itself, so none is added. If the last message is the assistant's, the model
    continues that message, as in Hugging Face's pipelines.

    Args:
        tokenizer: the model's.
        messages: what was said; a mapping may have more than a role and a content, for templates that know it.
        tools: what the template is to tell of tools.
        effort: how much the model is to think; dropped where the template does not take it.

    Raises:
        InvalidParameter: there is no template, it refuses the messages, it makes no tokens of them, or they end with
            calls of tools.
    """
    if not tokenizer.chat_template:
        raise InvalidParameter(
            "This model's tokenizer has no chat template, so it cannot take messages: take a chat model, or give raw "
            "text (--no-chat-template on the command line)."
        )
    _check_results(messages)
    told = [dict(one) if isinstance(one, Mapping) else {"role": one.role, "content": one.content} for one in messages]
    given = None if tools is None else list(map(dict, tools))
    more = {"return_dict": False, "tokenizer_kwargs": {"verbose": False}, **_effort(tokenizer, effort)}
    try:
        ids = _applied_to_calls(tokenizer, told, given, more)
    except Exception as error:  # the template is a program of the model's maker: whatever it raises is its refusal
        raise InvalidParameter(
            f"The tokenizer's chat template refuses the messages: {first_sentence(error)}."
        ) from error
    if not ids:
        raise InvalidParameter("The tokenizer's chat template makes no tokens of the messages: is it the right one?")
    return [int(token) for token in cast(Sequence[Any], ids)]


def _check_results(messages: Sequence[Message | Mapping[str, Any]]) -> None:
    """Check that a conversation does not end with calls: only their results can follow.

    Raises:
        InvalidParameter: it does.
    """
    last = messages[-1] if messages else None
    if isinstance(last, Mapping) and last.get("role") == "assistant" and last.get("tool_calls"):
        raise InvalidParameter(
            f"messages.{len(messages) - 1}.tool_calls has calls without results; add a message of the role tool for "
            "each of them."
        )


def _applied_to_calls(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], tools: list[Any] | None, options: dict[str, Any]
) -> Any:
    """Return what a template makes of a conversation; one that cannot take arguments as objects gets their JSON."""
    try:
        return _applied(tokenizer, messages, tools, **options)
    except Exception:
        texts = [_with_texts(one) for one in messages]
        if texts == messages:
            raise
        return _applied(tokenizer, texts, tools, **options)


def _with_texts(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with the JSON of its calls' arguments."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    functions = [
        {**one["function"], "arguments": json.dumps(one["function"]["arguments"], ensure_ascii=False)}
        if isinstance(one.get("function", {}).get("arguments"), dict)
        else one.get("function")
        for one in calls
    ]
    return {**message, "tool_calls": [{**one, "function": own} for one, own in zip(calls, functions, strict=True)]}


def _effort(tokenizer: PreTrainedTokenizerBase, effort: str | None) -> dict[str, Any]:
    """Return what the template is told of effort: by the name that it knows, or that there is to be no reasoning."""
    template = str(tokenizer.chat_template)
    if effort is not None and "reasoning_effort" in template:
        return {"reasoning_effort": effort}
    return {"enable_thinking": False} if effort == "none" and "enable_thinking" in template else {}


def check_shown(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> None:
    """Check that a template, which takes a conversation, leaves nothing of it out.

    Problem: templates are programs that print what they know of, and say nothing of the rest.
    Rule: a mark is put behind every message's content, behind names, and behind the names of tools and calls. What it
    is whose mark does not come out was left out. Ids of calls, and names in the answers of tools, tell nothing that the
    order of messages does not. What a template shows of reasoning, where it knows of it, is its own business.

    Raises:
        InvalidParameter: it leaves something out.
    """
    marks: dict[str, str] = {}

    def marked(value: object, what: str) -> object:
        if not isinstance(value, str) or not value.strip():
            return value
        mark = f"{MARK}{len(marks)}{MARK[::-1]}"
        marks[mark] = what
        return value + mark

    told = [_marked_message(one, f"messages.{place}", marked) for place, one in enumerate(messages)]
    offered = [_marked_call(one, "tools", marked) for one in tools or ()]
    try:
        text = str(_applied(tokenizer, told, offered or None, tokenize=False))
        same = bool(offered) and text == str(_applied(tokenizer, told, None, tokenize=False))
    except Exception:  # noqa: BLE001  a template that looks into what it is given: it took that, but not the marks
        return
    lost = "tools" if same else next((what for mark, what in marks.items() if mark not in text), None)
    lost = lost or _lost_reasoning(tokenizer, messages)
    if lost is not None:
        raise InvalidParameter(_loss(lost, messages))


def _marked_message(message: Mapping[str, Any], place: str, marked: Callable[[object, str], object]) -> dict[str, Any]:
    found = {**message, "content": marked(message.get("content"), f"{place}.content")}
    if "name" in message and message["role"] != "tool":
        found["name"] = marked(message["name"], f"{place}.name")
    if message.get("tool_calls"):
        found["tool_calls"] = [_marked_call(one, f"{place}.tool_calls", marked) for one in message["tool_calls"]]
    return found


def _marked_call(call: Any, place: str, marked: Callable[[object, str], object]) -> Any:
    """Return a tool, or a call of one, with a mark behind its name."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or "name" not in function:
        return call
    return {**call, "function": {**function, "name": marked(function["name"], place)}}


def _lost_reasoning(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]]) -> str | None:
    """Return where reasoning is given, if the template shows none even of the answer that it goes on with."""
    place = next((place for place, one in enumerate(messages) if one.get("reasoning_content")), None)
    answer = {"role": "assistant", "content": "?", "reasoning_content": MARK}
    if place is None or MARK in str(
        _applied(tokenizer, [{"role": "user", "content": "?"}, answer], None, tokenize=False)
    ):
        return None
    return f"messages.{place}.reasoning_content"


def _loss(lost: str, messages: Sequence[Mapping[str, Any]]) -> str:
    if lost == "tools":
        return "tools cannot be told to the model: this model's chat template takes no tools; leave them out."
    field = lost.rpartition(".")[2]
    taken = KNOWS_NOT.get(field)
    if taken is None:
        role = shown(messages[int(lost.split(".")[1])]["role"])
        taken = f"leaves out what a message of the role {role} says there"
    return f"{lost} cannot be told to the model: this model's chat template {taken}."


def _applied(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], tools: list[Any] | None, **options: Any
) -> Any:
    """Return what a template makes of a conversation, up to where the model's answer begins or goes on."""
    continued = bool(messages) and messages[-1]["role"] == "assistant"
    return tokenizer.apply_chat_template(
        messages, tools=tools, add_generation_prompt=not continued, continue_final_message=continued, **options
    )


LETTER, OTHER = "a", "?"
SLACK = 0.25
"""The share of the context that is free once something was dropped, so that the next turns are not read anew too."""


@dataclass(frozen=True)
class Conversation:
    """Messages and their tokens, to the end of the last message.

    Problem: a template makes text of messages, and a tokenizer makes other tokens of an answer's text than the model
    wrote: what it wrote above temperature 0 is seldom what the tokenizer would write. Then the model would see other
    tokens than its own, and nothing behind them in its cache could be used.
    Rule: only the text that a new turn adds is made into tokens, and put behind the tokens that are there. That is
    possible where the template's text up to the end of the last answer begins the text with the new turn; where it is
    not, as with templates that take out an answer's reasoning later, the whole is made anew.

    Args:
        messages: a system message, if there is one; then user and assistant in turn.
        ids: the tokens of all messages, and after a user's message those that begin the answer. Empty if they are still
            to be made.
    """

    messages: tuple[Message, ...] = ()
    ids: tuple[int, ...] = ()

    @property
    def exchanges(self) -> int:
        """How many messages the user sent."""
        return sum(one.role == "user" for one in self.messages)

    def asked(self, tokenizer: PreTrainedTokenizerBase, content: str) -> "Conversation":
        """Add a message of the user, and what begins the answer.

        Raises:
            InvalidParameter: there is no template, or it refuses the messages.
        """
        messages = (*self.messages, Message("user", content))
        new = _new_text(tokenizer, self.messages, messages) if self.ids else None
        tokens = None if new is None else _tokens_behind(tokenizer, new)
        if tokens is None:
            return Conversation(messages, tuple(conversation_ids(tokenizer, messages)))
        return Conversation(messages, (*self.ids, *tokens))

    def answered(self, content: str, tokens: Sequence[int], *, ended: bool) -> "Conversation":
        """Add the model's answer.

        Args:
            content: its text.
            tokens: its tokens.
            ended: whether the last of them ends the turn; the template writes that one itself.
        """
        own = tokens[:-1] if ended else tokens
        return Conversation((*self.messages, Message("assistant", content)), (*self.ids, *own))

    def without_oldest(self) -> "Conversation":
        """Drop the user's first message and its answer; a system message stays. The tokens are to be made anew."""
        system = [one for one in self.messages[:1] if one.role == "system"]
        return Conversation((*system, *self.messages[len(system) + 2 :]))


def asked_within(
    conversation: Conversation, tokenizer: PreTrainedTokenizerBase, content: str, context: int, room: int
) -> tuple[Conversation, int]:
    """Add a message of the user to as much of a conversation as the model's context holds.

    Nothing is dropped while message and answer fit. If they do not, the oldest exchanges are dropped until a quarter of
    the context is free beside the answer: whatever is dropped, all that remains is read anew.

    Args:
        conversation: what was said before, to the end of an answer.
        tokenizer: the model's.
        content: the message.
        context: the most tokens of the model.
        room: tokens that an answer should have; fewer if nothing is left to be dropped.

    Returns:
        the conversation with the message, and how many exchanges were dropped.

    Raises:
        ContextOverflow: the message does not fit, whatever is dropped.
        InvalidParameter: there is no template, or it refuses the messages.
    """
    asked, dropped = conversation.asked(tokenizer, content), 0
    most = context - room
    while len(asked.ids) > most and conversation.exchanges:
        conversation, dropped = conversation.without_oldest(), dropped + 1
        asked, most = conversation.asked(tokenizer, content), context - room - int(SLACK * context)
    if len(asked.ids) >= context:
        raise ContextOverflow(
            f"The message makes {len(asked.ids)} tokens, but the model's context holds {context} with the answer: "
            "send a shorter one."
        )
    return asked, dropped


def check_template(tokenizer: PreTrainedTokenizerBase, system: str | None = None) -> None:
    """Check that a tokenizer has a chat template, and that this takes a system message, if there is one.

    Raises:
        InvalidParameter: it does not.
    """
    if not tokenizer.chat_template:
        raise InvalidParameter("This model's tokenizer has no chat template: take a chat model, such as smollm2.")
    question = Message("user", "?")
    if system is None:
        conversation_ids(tokenizer, (question,))
        return
    two = [conversation_ids(tokenizer, (Message("system", said), question)) for said in (system, OTHER + system)]
    if two[0] == two[1]:
        raise InvalidParameter("This model's chat template leaves system messages out: say it in a message of yours.")


def _new_text(tokenizer: PreTrainedTokenizerBase, before: Sequence[Message], messages: Sequence[Message]) -> str | None:
    """Return what the last message adds to the template's text; None if that is not all that changes.

    Templates that trim answers also trim what is behind an empty one; such an answer is made anew.
    """
    if not before[-1].content.strip():
        return None
    try:
        known = _rendered(tokenizer, before, continue_final_message=True)
        whole = _rendered(tokenizer, messages, add_generation_prompt=True)
    except Exception:  # noqa: BLE001  a template that refuses is asked again for the whole, and what it says is said
        return None
    return whole[len(known) :] if whole.startswith(known) else None


def _tokens_behind(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int] | None:
    """Return the tokens of a text that stands behind another; None where the two cannot be told apart.

    Some tokenizers put a space before whatever they are given. So the text is given behind a letter.
    """
    letter, both = (
        cast(list[int], tokenizer(one, add_special_tokens=False, verbose=False)["input_ids"])
        for one in (LETTER, LETTER + text)
    )
    return both[len(letter) :] if both[: len(letter)] == letter else None


def _rendered(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], **how: Any) -> str:
    told = [{"role": one.role, "content": one.content} for one in messages]
    return str(tokenizer.apply_chat_template(told, tokenize=False, **how))
