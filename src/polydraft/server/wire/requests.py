"""The bodies of requests."""

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, JsonValue, field_validator, model_validator

from polydraft.server.wire.bodies import MOST_PROMPTS
from polydraft.server.wire.fields import (
    IGNORED,
    MOST_TOP,
    Body,
    Common,
    Count,
    Parts,
    RequestPart,
    Text,
    Token,
    joined_parts,
    only,
)
from polydraft.server.wire.tool_fields import MOST_TOOLS, Choice, ToolCallFields, call_request, checked_tools
from polydraft.server.worker import Ask, Spell

USUAL_TOKENS = 16
"""New tokens of a completion that does not say how many, as with OpenAI's."""
Tools = Annotated[list[dict[str, JsonValue]], Field(max_length=MOST_TOOLS)]
Row = Annotated[list[Token], Field(min_length=1, fail_fast=True)]


class CompletionBody(Common):
    """`POST /v1/completions`."""

    prompt: (
        Text
        | Row
        | Annotated[list[Text], Field(min_length=1, max_length=MOST_PROMPTS, fail_fast=True)]
        | Annotated[list[Row], Field(min_length=1, max_length=MOST_PROMPTS, fail_fast=True)]
    )
    max_tokens: Annotated[int, Field(strict=True, ge=0, le=2**31 - 1)] | None = None
    echo: Annotated[bool, Field(strict=True)] = False
    logprobs: Annotated[int, Field(strict=True, ge=0, le=MOST_TOP)] | None = None
    suffix: Annotated[
        Literal[""] | None,
        only(
            None,
            "",
            otherwise="suffix is for models that fill in a middle, which this server does not do; leave it out",
        ),
    ] = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _check_prompt(cls, given: Any) -> Any:
        if given == []:
            raise ValueError("prompt is an empty list; give a text, a row of tokens, or several of these")
        if isinstance(given, list) and [] in given:
            raise ValueError(f"prompt has an empty row at place {given.index([])}; give at least one token there")
        return given

    @model_validator(mode="after")
    def _check_length(self) -> "CompletionBody":
        if self.max_tokens == 0 and (not self.echo or self.stream):
            raise ValueError("max_tokens is 0, which is for echo without a stream; ask for a token at least")
        return self

    @property
    def most_tokens(self) -> int:
        """The most new tokens."""
        return USUAL_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def prompts(self) -> tuple[str | tuple[int, ...], ...]:
        """The prompts."""
        given = self.prompt
        if isinstance(given, str):
            return (given,)
        if isinstance(given[0], int):
            return (tuple(one for one in given if isinstance(one, int)),)
        return tuple(one if isinstance(one, str) else tuple(one) for one in given if not isinstance(one, int))

    def as_ask(self, name: str) -> Ask:
        """Return what the worker is asked."""
        told = {"logprobs": self.logprobs, "echo": self.echo, "begins": self.add_special_tokens is not False}
        return Ask(name, self.prompts, max_tokens=self.most_tokens, **told, **self.for_worker())


class MessageFields(RequestPart):
    """A message of a conversation."""

    role: Annotated[Text, Field(min_length=1, max_length=64)]
    content: Text | Parts | None = None
    name: Text | None = None
    tool_calls: Annotated[list[ToolCallFields], Field(max_length=1000, fail_fast=True)] | None = None
    tool_call_id: Text | None = None
    reasoning_content: Text | None = None
    refusal: Text | None = None
    annotations: Annotated[
        Annotated[list[JsonValue], Field(max_length=0)] | None,
        only([], otherwise="annotations must be empty here: no template shows them; leave them out"),
    ] = None

    def for_template(self) -> dict[str, Any]:
        """Return the message as templates take it."""
        content = self.content if isinstance(self.content, str) else joined_parts(self.content or [])
        rest = self.model_dump(exclude={"role", "content", "refusal", "annotations"}, exclude_none=True)
        for call in rest.get("tool_calls", ()):
            call["function"]["arguments"] = _opened(call["function"]["arguments"])
        return {"role": self.role, "content": content, **rest}


def _opened(arguments: Any) -> Any:
    """Return arguments as the object that their JSON says, which templates write in their own way."""
    try:
        found = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments
    return found if isinstance(found, dict) else arguments


class ChatBody(Common):
    """`POST /v1/chat/completions`."""

    ignored: ClassVar[tuple[str, ...]] = IGNORED
    messages: Annotated[list[MessageFields], Field(min_length=1, max_length=4096)]
    max_completion_tokens: Annotated[int, Field(strict=True, ge=1, le=2**31 - 1)] | None = None
    logprobs: Annotated[bool, Field(strict=True)] = False
    top_logprobs: Annotated[int, Field(strict=True, ge=0, le=MOST_TOP)] | None = None
    modalities: Annotated[
        Annotated[list[Literal["text"]], Field(min_length=1, max_length=1)] | None,
        only(None, ["text"], otherwise='modalities must be ["text"] here: answers are texts'),
    ] = None
    tools: Tools | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: Annotated[bool, Field(strict=True)] | None = None
    reasoning_effort: Annotated[Text, Field(min_length=1, max_length=64)] | None = None
    max_reasoning_tokens: Count | None = None
    add_special_tokens: Annotated[  # pyright: ignore[reportIncompatibleVariableOverride]
        Literal[False] | None,
        only(
            None,
            False,
            otherwise="add_special_tokens must be false for chats: the template writes them; leave it out",
        ),
    ] = None

    @property
    def limit(self) -> str:
        """The name of the field that bounds the text."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def most_tokens(self) -> int | None:
        """The most new tokens; None for as many as fit."""
        return self.max_completion_tokens or self.max_tokens

    @model_validator(mode="after")
    def _check_top(self) -> "ChatBody":
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs to be true")
        checked_tools(self.tools or [])
        call_request(self.tool_choice, self.tools, parallel=True)
        return self

    def as_ask(self, name: str) -> Ask:
        """Return what the worker is asked."""
        tools = self.tools if self.tool_choice != "none" else None
        return Ask(
            name,
            (tuple(one.for_template() for one in self.messages),),
            max_tokens=self.most_tokens,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            tools=None if tools is None else tuple(tools),
            calls=call_request(self.tool_choice, self.tools, parallel=self.parallel_tool_calls),
            effort=self.reasoning_effort,
            most_reasoning=self.max_reasoning_tokens,
            **self.for_worker(),
        )


def _given(name: str, kind: str) -> dict[str, Any]:
    return {"required": [name], "properties": {name: {"type": kind}}}


class TokenizeBody(Body):
    """`POST /tokenize`: a text or a conversation."""

    model_config = ConfigDict(json_schema_extra={"oneOf": [_given("prompt", "string"), _given("messages", "array")]})
    model: Text | None = None
    prompt: Text | None = None
    messages: Annotated[list[MessageFields], Field(min_length=1, max_length=4096)] | None = None
    tools: Tools | None = None
    add_special_tokens: Annotated[bool, Field(strict=True)] = True
    return_token_strs: Annotated[bool, Field(strict=True)] = False

    @model_validator(mode="after")
    def _check(self) -> "TokenizeBody":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt or messages must be given, one of them")
        if self.tools and self.messages is None:
            raise ValueError("tools are told with messages, which are missing; leave them out")
        return self

    def as_spell(self, name: str) -> Spell:
        """Return what the worker is asked."""
        told = tuple(one.for_template() for one in self.messages or ())
        prompt = self.prompt if self.prompt is not None else told
        tools = None if self.tools is None else tuple(self.tools)
        return Spell(name, prompt, tools=tools, special=self.add_special_tokens, texts=self.return_token_strs)


class DetokenizeBody(Body):
    """`POST /detokenize`: tokens."""

    model: Text | None = None
    tokens: Annotated[list[Token], Field(max_length=1_000_000, fail_fast=True)]

    def as_spell(self, name: str) -> Spell:
        """Return what the worker is asked."""
        return Spell(name, tokens=tuple(self.tokens))
