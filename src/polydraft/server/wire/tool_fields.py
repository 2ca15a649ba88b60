"""Fields about tools: those that there are, which may or must be called, and calls in messages."""

import json
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue

from polydraft.server.wire.fields import RequestPart, Text
from polydraft.server.worker import CallRequest

MOST_TOOLS = 128
Name = Annotated[Text, Field(min_length=1, max_length=256)]


class FunctionName(RequestPart):
    """A function by its name."""

    name: Name


class NamedTool(RequestPart):
    """A tool by its name."""

    type: Literal["function"]
    function: FunctionName


class AllowedFields(RequestPart):
    """Some of the tools, of which one may or must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MOST_TOOLS, fail_fast=True)]


class AllowedTools(RequestPart):
    """A choice among some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedFields


Choice = Literal["auto", "none", "required"] | NamedTool | AllowedTools


def checked_tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return tools that can be called: functions with different names, and schemas of their arguments.

    Raises:
        ValueError: one is none.
    """
    names = set[str]()
    for place, tool in enumerate(tools):
        function = tool.get("function")
        if tool.get("type", "function") != "function" or not isinstance(function, dict):
            raise ValueError(
                f"tools.{place} must be of the type function, with a function; nothing else is called here"
            )
        name, own = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or not 0 < len(name) <= 256:
            raise ValueError(f"tools.{place}.function.name must be a text of 1 to 256 characters")
        if name in names:
            raise ValueError(f"tools.{place}.function.name is that of an earlier tool; names must differ")
        if own is not None and not isinstance(own, dict):
            raise ValueError(f"tools.{place}.function.parameters must be a JSON schema, an object")
        if not isinstance(function.get("strict"), bool | None):
            raise ValueError(f"tools.{place}.function.strict must be true or false")
        names.add(name)
    return tools


def call_request(choice: Any, tools: list[dict[str, Any]] | None, *, parallel: bool | None) -> CallRequest:
    """Return what the worker is told of the calls that are wanted.

    Raises:
        ValueError: the choice names a tool that there is not, or asks for a call without tools.
    """
    names = [str(tool["function"]["name"]) for tool in tools or ()]
    mode, only = ("auto", None) if choice is None else (choice, None)
    if isinstance(choice, NamedTool):
        mode, only = "required", (choice.function.name,)
    elif isinstance(choice, AllowedTools):
        mode, only = choice.allowed_tools.mode, tuple(one.function.name for one in choice.allowed_tools.tools)
    strange = next((one for one in only or () if one not in names), None)
    if strange is not None:
        raise ValueError(f"tool_choice names {json.dumps(strange[:40])}, which is none of the tools")
    if mode == "required" and not names:
        raise ValueError("tool_choice asks for a call, but there are no tools; name them or leave it out")
    return CallRequest(mode, only, parallel is not False)


class CallFields(RequestPart):
    """What the model called."""

    name: Text
    arguments: JsonValue = ""


class ToolCallFields(RequestPart):
    """A call of a tool."""

    id: Text | None = None
    type: Text = "function"
    function: CallFields
    index: Annotated[int, Field(strict=True)] | None = None
