"""What answers hold, as models: for the description at /openapi.json and for tests. No answer is made by them."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict
from pydantic.json_schema import models_json_schema

from polydraft.server.wire.fields import TOKEN


class Told(BaseModel):
    """A part of an answer: nothing else is in it."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class ErrorFields(Told):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(Told):
    """An error in OpenAI's shape."""

    error: ErrorFields


class CachedTokens(Told):
    """Tokens of prompts that were known from before."""

    cached_tokens: int


class PredictionTokens(Told):
    """Tokens of the prediction that the texts have, and those that they have not."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(Told):
    """Counts of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: PredictionTokens


class SourceCounts(Told):
    """Drafts of one source, and those of them that were accepted."""

    drafted: int
    accepted: int


class DraftCounts(Told):
    """How drafts fared; with details also in each step with drafts."""

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int
    target_calls: int
    tokens_per_call: float | None
    acceptance_by_depth: list[float]
    sources: dict[str, SourceCounts]
    per_step_accepted: list[int] = []
    per_step_drafted: list[int] = []


class AllDraftCounts(DraftCounts):
    """The rule that verified drafts, how they fared, and with several choices each of them."""

    verifier: str | None
    lossless: bool
    choices: list[DraftCounts] = []


class Measures(Told):
    """Numbers about the texts."""

    speculative_decoding: AllDraftCounts


class Seeds(Told):
    """The seed of every choice, the rule that verified drafts, and whether the texts follow the target's law."""

    seeds: list[int]
    verifier: str | None
    lossless: bool


class TraceToken(Told):
    """A token, and who drafted it."""

    id: int
    text: str
    origin: str


class Tree(Told):
    """The token tree of a step: 0 is the root."""

    ids: list[int]
    tokens: list[str]
    parents: list[int]
    depth: list[int]
    valid: list[bool]
    accepted: list[int]
    next: str


class Trace(Told):
    """A step, where a request asked for it; in the last chunk what `Seeds` has, also where none was asked for."""

    index: int = 0
    step: int = 0
    source: str = ""
    tokens: list[TraceToken] = []
    tree: Tree | None = None
    elapsed: float = 0
    tokens_per_second: float | None = None
    tokens_per_call: float = 0
    drafted: int = 0
    accepted: int = 0
    acceptance_by_depth: list[float] = []
    seeds: list[int] = []
    verifier: str | None = None
    lossless: bool = True


class TextLogprobs(Told):
    """Log-probabilities of a completion; of a prompt's first token there is none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(Told):
    """A text, or a piece of one."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: int | str | None


class Top(Told):
    """A token with its log-probability."""

    token: str
    logprob: float
    bytes: list[int]


class ChatToken(Top):
    """A token of an answer, with the likeliest in its place."""

    top_logprobs: list[Top]


class ChatLogprobs(Told):
    """Log-probabilities of a chat."""

    content: list[ChatToken]


class Message(Told):
    """An answer to a conversation."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(Told):
    """An answer of a chat, whole."""

    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: int | str | None


class Delta(Told):
    """A piece of an answer; who speaks, in the first one."""

    role: Literal["assistant"] = "assistant"
    content: str = ""


class ChatPiece(Told):
    """A piece of an answer of a chat."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class Head(Told):
    """What all answers begin with."""

    id: str
    created: int
    model: str


class Whole(Head):
    """What whole answers end with."""

    usage: Usage
    metrics: Measures | None
    polydraft: Seeds


class Chunk(Head):
    """What chunks may have beside."""

    usage: Usage | None = None
    metrics: Measures | None = None
    polydraft: Trace | None = None


class Completion(Whole):
    """The answer to a request for completions."""

    object: Literal["text_completion"]
    choices: list[TextChoice]


class ChatCompletion(Whole):
    """The answer to a conversation."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class CompletionChunk(Chunk):
    """An event of a stream of completions."""

    object: Literal["text_completion"]
    choices: list[TextChoice]


class ChatCompletionChunk(Chunk):
    """An event of a stream of a chat."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatPiece]


class ModelCard(Told):
    """The model, the rule of requests that name none, and whether texts then follow the model's law."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int | None
    verifier: str | None
    lossless: bool


class ModelList(Told):
    """All models: one."""

    object: Literal["list"]
    data: list[ModelCard]


class Tokenized(Told):
    """The tokens of a text or a conversation."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(Told):
    """The text of tokens."""

    prompt: str


class Health(Told):
    """Requests are taken."""

    status: Literal["ok"]


class Version(Told):
    """The version."""

    version: str


STREAMED: tuple[type[BaseModel], ...] = (CompletionChunk, ChatCompletionChunk)
"""Kinds of events: each is a line `data: ` with one of them; an error ends a stream, and then comes `DONE`."""
DONE = "[DONE]"
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": said}
    for status, said in {
        400: "The request is wrong: fields that this description does not allow, or what it cannot say, such as fields "
        "that do not go together, words and grammars that mean nothing, too long a text, or messages for a model "
        "without a chat template.",
        401: "The API key is missing or wrong.",
        404: "There is no such model.",
        408: "The body took too long.",
        413: "The body is too long.",
        415: "The body is compressed.",
        429: "The queue is full.",
        500: "An error of the server's own.",
        503: "The model is not there, or not yet.",
        504: "The request took too long.",
    }.items()
}
ASKED: dict[int | str, dict[str, Any]] = {status: ERRORS[status] for status in (400, 401, 500, 503)}
"""What may be said of a request without a body."""


def answers(kind: type[BaseModel], streamed: type[BaseModel] | None = None) -> dict[int | str, dict[str, Any]]:
    """Return the description of what may be answered to a body.

    Args:
        kind: the answer.
        streamed: the events of a stream; None if there is none.
    """
    told: dict[str, Any] = {"model": kind, "description": "The answer, whole or as events."}
    if streamed is None:
        return {200: {"model": kind}, **ERRORS}
    parts = [{"$ref": f"#/components/schemas/{one.__name__}"} for one in (streamed, ErrorBody)]
    said = {"type": "string", "contentMediaType": "application/json", "contentSchema": {"anyOf": parts}}
    data = {"anyOf": [{"const": DONE}, said]}
    event = {"type": "object", "required": ["data"], "properties": {"data": data}}
    return {200: told | {"content": {"text/event-stream": {"itemSchema": event}}}, **ERRORS}


def described(schema: dict[str, Any], vocab_size: int | None) -> dict[str, Any]:
    """Return an OpenAPI description with the events of streams, and without the framework's own kind of error.

    Args:
        schema: the framework's.
        vocab_size: the model's tokens are smaller numbers; None as long as the model is not known.
    """
    for path in schema.get("paths", {}).values():
        for operation in path.values():
            operation.get("responses", {}).pop("422", None)
    parts = schema.setdefault("components", {}).setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        parts.pop(name, None)
    events = [(one, "serialization") for one in STREAMED]
    _, found = models_json_schema(events, ref_template="#/components/schemas/{model}")  # pyright: ignore
    for name, part in found["$defs"].items():
        parts.setdefault(name, part)
    return schema if vocab_size is None else _with_largest(schema, vocab_size - 1)


def _with_largest(schema: Any, token: int) -> Any:
    """Return a description in which tokens have a largest number."""
    if isinstance(schema, list):
        return [_with_largest(one, token) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: _with_largest(one, token) for name, one in schema.items()}
    return {**found, "maximum": token} if found.get("title") == TOKEN else found
