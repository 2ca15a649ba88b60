"""What answers hold: the types of the values that are sent, from which `/openapi.json` describes them."""

from typing import Literal, NotRequired

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict

Finish = Literal["stop", "length", "tool_calls"]
"""Why a text ended."""


@with_config(ConfigDict(extra="forbid"))
class AnswerPart(TypedDict):
    """A part of an answer: nothing else is in it."""


class ErrorFields(AnswerPart):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(AnswerPart):
    """An error in OpenAI's shape."""

    error: ErrorFields


class CachedTokens(AnswerPart):
    """Tokens of prompts that were known from before."""

    cached_tokens: int


class PredictionTokens(AnswerPart):
    """Tokens of the prediction that the texts have, and those that they have not; tokens of reasoning."""

    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(AnswerPart):
    """Counts of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: PredictionTokens


class SourceCounts(AnswerPart):
    """Drafts of one source, and those of them that were accepted."""

    drafted: int
    accepted: int


class DraftCounts(AnswerPart):
    """How drafts fared; with details also in each step with drafts."""

    per_step_accepted: NotRequired[list[int]]
    per_step_drafted: NotRequired[list[int]]
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


class Rule(AnswerPart):
    """The rule that verified drafts, and whether the texts follow the target's law."""

    verifier: str | None
    lossless: bool


class AllDraftCounts(Rule, DraftCounts):
    """The rule that verified drafts, how they fared, and with several choices each of them."""

    choices: NotRequired[list[DraftCounts]]


class Measures(AnswerPart):
    """Numbers about the texts."""

    speculative_decoding: AllDraftCounts


class Resumed(AnswerPart):
    """A choice that another worker went on with behind so many tokens, with another seed."""

    index: int
    tokens: int
    seed: int


class Seeds(Rule):
    """The seed of every choice, the rule that verified drafts, and whether the texts follow the target's law.

    `version` is that of the learnt weights that drafted, where a server learns.
    """

    seeds: list[int]
    version: NotRequired[str]
    resumed: NotRequired[list[Resumed]]


class TraceToken(AnswerPart):
    """A token, and who drafted it."""

    id: int
    text: str
    origin: str


class Tree(AnswerPart):
    """The token tree of a step: 0 is the root."""

    ids: list[int]
    tokens: list[str]
    parents: list[int]
    depth: list[int]
    valid: list[bool]
    accepted: list[int]
    next: str


class Trace(AnswerPart):
    """A step, where a request asked for it; in the last chunk what `Seeds` has, also where none was asked for."""

    index: NotRequired[int]
    step: NotRequired[int]
    source: NotRequired[str]
    tokens: NotRequired[list[TraceToken]]
    tree: NotRequired[Tree | None]
    elapsed: NotRequired[float]
    tokens_per_second: NotRequired[float | None]
    tokens_per_call: NotRequired[float]
    drafted: NotRequired[int]
    accepted: NotRequired[int]
    acceptance_by_depth: NotRequired[list[float]]
    seeds: NotRequired[list[int]]
    version: NotRequired[str]
    resumed: NotRequired[list[Resumed]]
    verifier: NotRequired[str | None]
    lossless: NotRequired[bool]


class PromptScore(AnswerPart):
    """A token that could stand in a place of a prompt: its log-probability, and its place among the likeliest."""

    logprob: float
    rank: int
    decoded_token: str


PromptScores = list[dict[str, PromptScore] | None]
"""Of every token of a prompt by their numbers: its own, and the likeliest; of the first there is none."""


class TextLogprobs(AnswerPart):
    """Log-probabilities of a completion; of a prompt's first token there is none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(AnswerPart):
    """A text, or a piece of one; tokens by their numbers and scores of the prompt where a request asks for them."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Finish | None
    stop_reason: int | str | None
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[PromptScores]


class Top(AnswerPart):
    """A token with its log-probability."""

    token: str
    logprob: float
    bytes: list[int]


class ChatToken(Top):
    """A token of an answer, with the likeliest in its place."""

    top_logprobs: list[Top]


class ChatLogprobs(AnswerPart):
    """Log-probabilities of a chat."""

    content: list[ChatToken]


class CalledFunction(AnswerPart):
    """A function, and the JSON of its arguments."""

    name: str
    arguments: str


class AnswerCall(AnswerPart):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AnswerMessage(AnswerPart):
    """An answer to a conversation."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[AnswerCall]]


class ChatChoice(AnswerPart):
    """An answer of a chat, whole."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish | None
    stop_reason: int | str | None
    token_ids: NotRequired[list[int]]


class FunctionPiece(AnswerPart):
    """A piece of the JSON of arguments; the function's name, in the first one."""

    name: NotRequired[str]
    arguments: str


class CallPiece(AnswerPart):
    """A piece of a call; its id, in the first one."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionPiece


class Delta(AnswerPart):
    """A piece of an answer; who speaks, in the first one."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[CallPiece]]


class ChatPiece(AnswerPart):
    """A piece of an answer of a chat."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: Finish | None
    token_ids: NotRequired[list[int]]


class Head(AnswerPart):
    """What all answers begin with."""

    id: str
    created: int
    model: str


class TextHead(Head):
    """What completions begin with, whole or in chunks."""

    object: Literal["text_completion"]


class ChatHead(Head):
    """What a whole answer of a chat begins with."""

    object: Literal["chat.completion"]


class AnswerEnding(AnswerPart):
    """What whole answers end with."""

    usage: Usage
    metrics: Measures | None
    polydraft: Seeds


class Chunk(Head):
    """What chunks may have beside."""

    usage: NotRequired[Usage | None]
    metrics: NotRequired[Measures | None]
    polydraft: NotRequired[Trace | None]


class Completion(TextHead, AnswerEnding):
    """The answer to a request for completions."""

    choices: list[TextChoice]


class ChatPrompt(AnswerPart):
    """What is told of a conversation, where a request asks for it: its tokens, and their scores."""

    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[PromptScores]


class ChatCompletion(ChatHead, ChatPrompt, AnswerEnding):
    """The answer to a conversation."""

    choices: list[ChatChoice]


class CompletionChunk(TextHead, Chunk):
    """An event of a stream of completions."""

    choices: list[TextChoice]


class ChatCompletionChunk(ChatPrompt, Chunk):
    """An event of a stream of a chat."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatPiece]


class ModelCard(AnswerPart):
    """The model, the rule of requests that name none, and whether texts then follow the model's law.

    `tuned_from` names the model that it was before its weights were tuned, if it says that it is another one now.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int | None
    verifier: str | None
    lossless: bool
    tuned_from: str | None


class ModelList(AnswerPart):
    """All models: one."""

    object: Literal["list"]
    data: list[ModelCard]


class Tokenized(AnswerPart):
    """The tokens of a text or a conversation."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(AnswerPart):
    """The text of tokens."""

    prompt: str


class Health(AnswerPart):
    """Requests are taken."""

    status: Literal["ok"]


class Version(AnswerPart):
    """The version."""

    version: str
