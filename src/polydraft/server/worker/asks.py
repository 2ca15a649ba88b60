"""What a worker is asked for, and what it answers: plain values, which go through a pipe."""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from polydraft.errors import ContextOverflow, PolydraftError

Prompt = str | tuple[int, ...] | tuple[Mapping[str, Any], ...]
"""A text, its tokens, or the messages of a conversation."""
SEED_STEP = 1_000_003
"""From one choice's seed to the next one's, as between the rows of `polydraft.generate`."""
MOST_SEED = 2**63
SEEDS = 2**53
"""Seeds that are drawn are smaller, so that JSON readers keep them."""
NAMED = frozenset(
    "temperature top_p top_k min_p repetition_penalty logit_bias stop_token_ids tokens prediction max_tokens "
    "max_completion_tokens min_tokens logprobs prompt_logprobs n tools tool_choice max_reasoning_tokens".split()
)
"""Fields that errors begin with."""
DRAFTING = "speculative"
OF_DRAFTING = frozenset(("drafter", "verifier", "tree", "max_draft_tokens", "version"))
"""Those inside the field of drafting."""


def nested(value: Any, *, names: bool = False) -> Iterator[Any]:
    """Yield a value and all that is in it, with the names of objects where wanted; rows of tokens count as one."""
    left = [value]
    while left:
        one = left.pop()
        yield one
        if isinstance(one, Mapping):
            left += [*one, *one.values()] if names else one.values()
        elif isinstance(one, list | tuple) and not is_row(one):
            left += one


def is_row(values: Sequence[Any]) -> bool:
    """Tell whether these are tokens, or whole numbers of another kind, and nothing else."""
    return {*map(type, values)} <= {int}


@dataclass(frozen=True)
class Speculation:
    """How a request wants to be drafted for, by the words of the catalogue; None for what the server does."""

    enabled: bool = True
    drafter: str | None = None
    verifier: str | None = None
    tree: str | None = None
    max_draft_tokens: int | None = None
    trace: bool = False
    version: str | None = None

    @property
    def says_how(self) -> bool:
        """Whether something is named."""
        return not self.enabled or any((self.drafter, self.verifier, self.tree, self.max_draft_tokens is not None))


@dataclass(frozen=True)
class GrammarRequest:
    """What the answer must match: the name of a constructor of `polydraft.Grammar`, and its arguments if it has any.

    `field` is where the request says it.
    """

    kind: str
    text: Any = None
    field: str = "response_format"
    compact: bool = False

    @property
    def is_json(self) -> bool:
        """Whether it is of JSON, whose blanks may be left out."""
        return self.kind.startswith("json")


@dataclass(frozen=True)
class CallRequest:
    """Which calls of tools are wanted.

    Args:
        choice: "auto", "none" or "required".
        only: the names of those that may be called; None for all.
        parallel: whether several may be called.
    """

    choice: str = "auto"
    only: tuple[str, ...] | None = None
    parallel: bool = True


@dataclass(frozen=True)
class Ask:
    """A request for texts, which the worker's answers name: each prompt `n` times.

    Args:
        n: choices of each prompt; choice i of prompt p has the number p n + i.
        seed: of number 0; number i has `seed + 1,000,003 i`, modulo 2^63. None draws one.
        options: Hugging Face's generation arguments.
        max_tokens: new tokens at most; None for as many as fit.
        limit: the field that says `max_tokens`; None if no field does.
        min_tokens: new tokens before any that ends the text, or any stop string.
        presence, frequency, bias: OpenAI's additions to the scores.
        stop: strings at which a text ends; `stop_included` for whether they belong to it.
        special: whether special tokens are told.
        begins: whether the tokenizer adds its special tokens to a text.
        logprobs: how many of the likeliest tokens are told with each; None for no log-probabilities.
        echo: whether prompts are told, with log-probabilities if these are.
        prompt_logprobs: how many of the likeliest tokens are told with each of a prompt's; None for none of these.
        token_ids: whether prompts' tokens are told.
        alone: whether no other request's prompt may show in it, nor its own in theirs (`cache_salt`).
        learn: whether the draft may learn from the text; None where nothing is said.
        planned: whether a planner may choose the trees, if the server has one: nobody named a seed.
        calls: which of the tools may or must be called; None where answers are texts and nothing else.
        effort: how much the model is to think, for templates that take it.
        most_reasoning: tokens of reasoning at most.
        told: new tokens that were told already, and that the text goes on from; `max_tokens` and all else count them.
        unplaced: log-probabilities of the last of these whose place in the text was not certain yet.
    """

    name: str
    prompts: tuple[Prompt, ...]
    n: int = 1
    seed: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    max_tokens: int | None = None
    limit: str | None = None
    min_tokens: int = 0
    presence: float = 0.0
    frequency: float = 0.0
    bias: Mapping[int, float] = field(default_factory=dict[int, float])
    stop: tuple[str, ...] = ()
    stop_included: bool = False
    stop_tokens: tuple[int, ...] = ()
    ignore_eos: bool = False
    special: bool = False
    begins: bool = True
    logprobs: int | None = None
    echo: bool = False
    prompt_logprobs: int | None = None
    token_ids: bool = False
    tools: tuple[Mapping[str, Any], ...] | None = None
    prediction: str | None = None
    grammar: GrammarRequest | None = None
    speculation: Speculation = Speculation()
    alone: bool = False
    learn: bool | None = None
    planned: bool = False
    calls: CallRequest | None = None
    effort: str | None = None
    most_reasoning: int | None = None
    told: tuple[int, ...] = ()
    unplaced: tuple[Mapping[str, Any], ...] = ()

    @property
    def size(self) -> int:
        """How many texts it asks for."""
        return len(self.prompts) * self.n

    @property
    def reads_prompts(self) -> bool:
        """Whether something of the prompts is told that they have to be read for."""
        return self.echo or self.prompt_logprobs is not None

    @property
    def scored(self) -> int | None:
        """With how many of the likeliest tokens each of a prompt's is scored; None if they are not."""
        return max(
            (one for one in (self.logprobs if self.echo else None, self.prompt_logprobs) if one is not None),
            default=None,
        )

    def seeded(self) -> "Ask":
        """Return it with a seed; a planner may choose the trees of one that had none."""
        if self.seed is not None:
            return self
        planned = not (self.speculation.says_how or self.prediction)
        return replace(self, seed=secrets.randbelow(SEEDS), planned=planned)

    def of_text(self, number: int) -> "Ask":
        """Return a request for one of its texts alone, whose prompt is not told back."""
        prompts = (self.prompts[number // self.n],)
        return replace(self, prompts=prompts, n=1, seed=self.seed_of(number), echo=False, prompt_logprobs=None)

    def seed_of(self, number: int) -> int:
        """Return the seed of a text."""
        return ((self.seed or 0) + SEED_STEP * number) % MOST_SEED


@dataclass(frozen=True)
class Spell:
    """A request for the tokens of a prompt, or for the text of tokens.

    Args:
        prompt: text or messages to be made into tokens; None if there are tokens.
        special: whether special tokens are added to a text.
        texts: whether the text of each token is told too.

    Attributes:
        size: how many texts are to be written.
    """

    name: str
    prompt: Prompt | None = None
    tokens: tuple[int, ...] | None = None
    tools: tuple[Mapping[str, Any], ...] | None = None
    special: bool = True
    texts: bool = False
    size = 0


@dataclass(frozen=True)
class Cancel:
    """Nobody waits for a request any more."""

    name: str


@dataclass(frozen=True)
class Unlearning:
    """Nobody learns from finished texts any more."""


@dataclass(frozen=True)
class Stop:
    """The worker is to end, at once."""


@dataclass(frozen=True)
class Event:
    """What a worker says.

    Args:
        kind: "ready" (once, with what it serves), "broken" (it cannot be), "begun" (a request was taken),
            "refused" (it was not), "joined" (a text is read and written now), "gained" (what a step brought it),
            "failed" (a request ended with an error of ours), "spelt", "stepped" (how many tokens a step had in all),
            "lesson" (a finished text to learn from), "closing" (it ends what it has and is to get nothing else), "gone"
            (the last that is said).
        name: of the request.
        said: the rest.
    """

    kind: str
    name: str = ""
    said: Mapping[str, Any] = field(default_factory=dict[str, Any])


OVER = ("spelt", "refused", "failed")
"""What is said last of a request, but for texts, each of which ends with its own "finish"."""


class UnknownVersion(PolydraftError):
    """A request names a version of the draft that there is not; the text says which is the newest."""


CODES: Mapping[type[PolydraftError], str] = {
    ContextOverflow: "context_length_exceeded",
    UnknownVersion: "unknown_version",
}


class Unfit(PolydraftError):
    """A request cannot be done, for an error that is about one of its fields."""

    def __init__(self, error: PolydraftError, field: str) -> None:
        super().__init__(str(error))
        self.field = field
        self.code = CODES.get(type(error))


@contextmanager
def about(field: str) -> Iterator[None]:
    """Say of errors which field they are about.

    Raises:
        Unfit: for an error of polydraft's.
    """
    try:
        yield
    except Unfit:
        raise
    except PolydraftError as error:
        word = str(error).split()[0]
        named = word.split(".")[0]
        if field == DRAFTING and named in OF_DRAFTING:
            raise Unfit(error, f"{DRAFTING}.{named}") from error
        raise Unfit(error, named if named in NAMED else word if named == field else field) from error
