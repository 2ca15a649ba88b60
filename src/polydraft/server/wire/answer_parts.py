"""What was said, thought and called, in OpenAI's shapes: a message, or what a chunk adds to it."""

from collections.abc import Iterable

from polydraft.models import AnswerEvent
from polydraft.server.wire.answer_types import AnswerMessage, CallPiece, Delta, FunctionPiece


def delta_of(events: Iterable[AnswerEvent]) -> Delta:
    """Return what events add to a message; pieces that follow each other are one."""
    delta: Delta = {}
    calls = list[CallPiece]()
    for one in events:
        if one.kind == "content":
            delta["content"] = delta.get("content", "") + one.text
        elif one.kind == "reasoning":
            delta["reasoning_content"] = delta.get("reasoning_content", "") + one.text
        elif one.kind == "call":
            begun: FunctionPiece = {"name": one.text, "arguments": ""}
            calls.append({"index": one.index, "id": one.call, "type": "function", "function": begun})
        elif one.kind == "arguments":
            if not calls or calls[-1]["index"] != one.index:
                calls.append({"index": one.index, "function": {"arguments": ""}})
            calls[-1]["function"]["arguments"] += one.text
    if calls:
        delta["tool_calls"] = calls
    return delta


def message_of(events: Iterable[AnswerEvent]) -> AnswerMessage:
    """Return the message of all events of an answer: its content is null where it only calls."""
    delta = delta_of(events)
    calls = delta.get("tool_calls", [])
    content = delta.get("content", None if calls else "")
    message: AnswerMessage = {"role": "assistant", "content": content, "refusal": None}
    if "reasoning_content" in delta:
        message["reasoning_content"] = delta["reasoning_content"]
    if calls:
        message["tool_calls"] = [
            {
                "id": one.get("id", ""),
                "type": "function",
                "function": {"name": one["function"].get("name", ""), "arguments": one["function"]["arguments"]},
            }
            for one in calls
        ]
    return message
