"""The fields that requests for completions and for chats have in common, and what they mean to the worker."""

from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    create_model,
    field_validator,
    model_validator,
)

from polydraft.options.commands.option_groups import DraftingOptions
from polydraft.options.commands.serve_options import DETAILED, LEVELS, SUMMARY
from polydraft.options.sampling_options import FILTERS, Sampling
from polydraft.options.server_fields import fields
from polydraft.server.wire.bodies import is_half_text
from polydraft.server.wire.error_answers import Refused, readable, told
from polydraft.server.worker import GrammarRequest, Speculation

_SAMPLED = tuple(fields(Sampling))
IGNORED = (
    "user",
    "store",
    "metadata",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "verbosity",
    "request_id",
    "priority",
    "spaces_between_special_tokens",
)
"""Fields that clients send and that ask for nothing which this server could do otherwise: they are dropped."""
OF_CHATS = ("parallel_tool_calls", "reasoning_effort")
"""Fields that ask for something in chats alone."""
MOST_STOPS, MOST_CHOICES, MOST_TOP = 16, 128, 20
LARGE = 2**31 - 1
ANY_SEED = -1
"""The seed of a request that wants none, as vLLM has it."""
Count = Annotated[int, Field(strict=True, ge=0, le=LARGE)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
"""A whole number is one too; a text is none, and true is none."""
Text = Annotated[str, Field(strict=True)]
TOKEN = "A token of the model"
Token = Annotated[int, Field(strict=True, ge=0, le=LARGE, title=TOKEN)]


def only(*allowed: object, otherwise: str) -> BeforeValidator:
    """Return a check that a value is one of these, of the same type, which says `otherwise` in its own words."""

    def check(given: Any) -> Any:
        if not any(type(given) is type(one) and given == one for one in allowed):
            raise ValueError(otherwise)
        return given

    return BeforeValidator(check)


class RequestPart(BaseModel):
    """A part of a request: what it does not know is refused by name, what is harmless or null is dropped.

    Attributes:
        ignored: names that are dropped, since they ask for nothing here.
    """

    model_config = ConfigDict(extra="forbid", protected_namespaces=())
    ignored: ClassVar[tuple[str, ...]] = ()

    @model_validator(mode="before")
    @classmethod
    def _given(cls, data: Any) -> Any:
        """Return what is asked for: null is a field that was left out, as clients mean it, at every depth.

        A JSON schema, a tool and a call's arguments are no fields: what they hold stays. Of unknown names the first
        one is kept alone: one error is told, and a million of them would cost gigabytes.
        """
        if not isinstance(data, dict):
            return data
        own = {name: value for name, value in data.items() if value is not None and name not in cls.ignored}
        known = {*cls.model_fields, *(one.alias for one in cls.model_fields.values())}
        strange = [name for name in own if name not in known]
        return {name: value for name, value in own.items() if name in known or name == strange[0]} if strange else own


class PartFields(RequestPart):
    """A part of a content: a text."""

    type: Literal["text"]
    text: Text


Parts = Annotated[list[PartFields], Field(max_length=1000, fail_fast=True)]
"""Long lists stop at their first error: a million of them would cost seconds and gigabytes."""


def joined_parts(parts: list[PartFields]) -> str:
    """Return the text of a content that is given in parts."""
    return "".join(part.text for part in parts)


class Body(RequestPart):
    """A whole request."""

    @model_validator(mode="before")
    @classmethod
    def _check_text(cls, data: Any) -> Any:
        if isinstance(data, dict):
            for name, value in data.items():
                if name not in cls.ignored and is_half_text([name, value]):
                    said = f"{readable(told(name))} holds half of a surrogate pair, which is no text."
                    raise Refused(400, said, told(name))
        return data


_Drafted: Any = create_model("_Drafted", __base__=RequestPart, **fields(DraftingOptions))
"""With the options of drafting, which the command line has too."""


class SpeculativeFields(_Drafted, RequestPart):
    """How to draft for a request: words as for `polydraft generate --drafter`, `--verifier` and `--tree`."""

    enabled: Annotated[bool, Field(strict=True)] = True
    max_draft_tokens: Annotated[int, Field(strict=True, ge=0, le=127)] | None = None
    trace: Annotated[bool, Field(strict=True)] = False
    detailed: Annotated[bool, Field(strict=True)] | None = None
    version: Annotated[Text, Field(min_length=1, max_length=40)] | None = None

    def as_speculation(self) -> Speculation:
        """Return what the worker is told."""
        return Speculation(**self.model_dump(exclude={"detailed"}))


class StreamFields(RequestPart):
    """What a stream tells beside the text."""

    ignored: ClassVar[tuple[str, ...]] = ("include_obfuscation",)
    include_usage: Annotated[bool, Field(strict=True)] = False
    continuous_usage_stats: Annotated[bool, Field(strict=True)] = False


class PredictionFields(RequestPart):
    """What the answer will resemble."""

    type: Literal["content"]
    content: Text | Parts

    @property
    def text(self) -> str:
        """The content as one text."""
        return self.content if isinstance(self.content, str) else joined_parts(self.content)


class SchemaFields(RequestPart):
    """A JSON schema with a name."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)
    name: Text = "answer"
    description: Text | None = None
    strict: Annotated[bool, Field(strict=True)] | None = None
    schema_: dict[str, JsonValue] = Field(alias="schema")


class FormatFields(RequestPart):
    """What the answer must match."""

    type: Literal["text", "json_object", "json_schema", "regex", "grammar"]
    json_schema: SchemaFields | None = None
    regex: Text | None = None
    grammar: Text | None = None

    @model_validator(mode="after")
    def _check(self) -> "FormatFields":
        needed = {"json_schema": self.json_schema, "regex": self.regex, "grammar": self.grammar}
        if self.type in needed and needed[self.type] is None:
            raise ValueError(f"response_format.{self.type} is missing, which the type {self.type} needs")
        return self

    def as_grammar(self) -> GrammarRequest | None:
        """Return what the worker is told; None for any text."""
        if self.type == "text":
            return None
        kind, text = {
            "json_object": ("json_object", None),
            "regex": ("regex", self.regex),
            "grammar": ("lark", self.grammar),
            "json_schema": ("json_schema", self.json_schema and self.json_schema.schema_),
        }[self.type]
        return GrammarRequest(kind, text, "response_format")


class StructuredFields(RequestPart):
    """vLLM's way to say what the answer must match."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)
    json_: dict[str, JsonValue] | Text | None = Field(None, alias="json")
    regex: Text | None = None
    grammar: Text | None = None
    json_object: Annotated[bool, Field(strict=True)] | None = None
    disable_any_whitespace: Annotated[bool, Field(strict=True)] = False


class Named(Body):
    """Which model is asked, and for how many tokens."""

    ignored: ClassVar[tuple[str, ...]] = (*IGNORED, *OF_CHATS)
    model: Text | None = None
    max_tokens: Annotated[int, Field(strict=True, ge=1, le=LARGE)] | None = None


_Sampled: Any = create_model("_Sampled", __base__=Named, **fields(Sampling))
"""With the options of sampling, which the command line has too."""


class Common(_Sampled, Named):
    """What both kinds of requests may say."""

    n: Annotated[int, Field(strict=True, ge=1, le=MOST_CHOICES)] = 1
    seed: Annotated[int, Field(strict=True, ge=-1, lt=2**63)] | None = None
    best_of: Annotated[int, Field(strict=True, ge=1, le=MOST_CHOICES)] | None = None
    learn: Annotated[bool, Field(strict=True)] | None = None
    cache_salt: Annotated[Text, Field(min_length=1, max_length=1000)] | None = None
    stop: Text | Annotated[list[Text], Field(max_length=MOST_STOPS)] | None = None
    stop_token_ids: Annotated[list[Token], Field(max_length=1000, fail_fast=True)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] = 0.0
    logit_bias: Annotated[dict[str, Annotated[Number, Field(ge=-100, le=100)]], Field(max_length=1024)] | None = None
    min_tokens: Count | None = None
    ignore_eos: Annotated[bool, Field(strict=True)] = False
    add_special_tokens: Annotated[bool, Field(strict=True)] | None = None
    detokenize: Annotated[
        Literal[True], only(True, otherwise="detokenize must be true here: answers are texts; leave it out")
    ] = True
    include_stop_str_in_output: Annotated[bool, Field(strict=True)] = False
    skip_special_tokens: Annotated[bool, Field(strict=True)] = True
    stream: Annotated[bool, Field(strict=True)] | None = False
    stream_options: StreamFields | None = None
    prediction: PredictionFields | None = None
    speculative: SpeculativeFields | None = None
    response_format: FormatFields | None = None
    guided_json: dict[str, JsonValue] | Text | None = None
    guided_regex: Text | None = None
    guided_grammar: Text | None = None
    structured_outputs: StructuredFields | None = None
    compact: Annotated[bool, Field(strict=True)] = False
    return_token_ids: Annotated[bool, Field(strict=True)] = False
    prompt_logprobs: Annotated[int, Field(strict=True, ge=0, le=MOST_TOP)] | None = None

    @field_validator("logit_bias")
    @classmethod
    def _check_bias(cls, bias: dict[str, float] | None) -> dict[str, float] | None:
        for token in bias or ():
            if not token.isascii() or not token.isdigit() or len(token) > 10:
                raise ValueError(f"logit_bias must name tokens by their numbers, but has {token[:40]!r}")
        return bias

    @field_validator("stop")
    @classmethod
    def _check_stop(cls, stop: str | list[str] | None) -> str | list[str] | None:
        if any(not one or len(one) > 1000 for one in ([stop] if isinstance(stop, str) else stop or ())):
            raise ValueError("stop must be texts of 1 to 1,000 characters")
        return stop

    @model_validator(mode="after")
    def _check(self) -> "Common":
        most = self.most_tokens
        if most is not None and (self.min_tokens or 0) > most:
            usual = "" if self.limit in self.model_fields_set else " (its default)"
            raise ValueError(f"min_tokens is {self.min_tokens}, which is more than {self.limit}, {most}{usual}")
        if self.best_of not in (None, self.n):
            raise ValueError("best_of must be n here: nothing is written to be thrown away")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is for streams; set stream to true or leave it out")
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs is not for streams; set stream to false or leave it out")
        named = [one.field for one in self._guides()]
        if len(named) > 1:
            raise ValueError(f"{named[0]} and {named[1]} both say what the answer must match; leave one of them out")
        if self._compacts and not any(one.is_json for one in self._guides()):
            said = "is for answers in JSON, whose blanks it leaves out; ask for JSON or leave it out"
            raise ValueError(f"{self._compacts} {said}")
        return self

    @property
    def _compacts(self) -> str:
        """The field by which blanks are left out; none if they are not."""
        if self.compact:
            return "compact"
        inside = self.structured_outputs is not None and self.structured_outputs.disable_any_whitespace
        return "structured_outputs.disable_any_whitespace" if inside else ""

    @property
    def limit(self) -> str:
        """The name of the field that bounds the text."""
        return "max_tokens"

    @property
    def most_tokens(self) -> int | None:
        """The most new tokens; None for as many as fit."""
        return self.max_tokens

    def level(self, usual: str) -> str:
        """Return how much is told of the drafts, where the server usually tells so much."""
        wanted = self.speculative and self.speculative.detailed
        if wanted is None:
            return usual
        return DETAILED if wanted else min(usual, SUMMARY, key=LEVELS.index)

    @property
    def stops(self) -> tuple[str, ...]:
        """The strings at which the text ends."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def grammar(self) -> GrammarRequest | None:
        """What the answer must match."""
        return next((replace(one, compact=bool(self._compacts)) for one in self._guides()), None)

    def _guides(self) -> list[GrammarRequest]:
        own, inside = self.structured_outputs or StructuredFields(), "structured_outputs"  # pyright: ignore
        named = {
            "guided_json": ("json_schema", self.guided_json),
            f"{inside}.json": ("json_schema", own.json_),
            "guided_regex": ("regex", self.guided_regex),
            f"{inside}.regex": ("regex", own.regex),
            "guided_grammar": ("lark", self.guided_grammar),
            f"{inside}.grammar": ("lark", own.grammar),
        }
        found = [GrammarRequest(kind, text, name) for name, (kind, text) in named.items() if text is not None]
        first = self.response_format and self.response_format.as_grammar()
        last = GrammarRequest("json_object", None, f"{inside}.json_object") if own.json_object else None
        return [one for one in (first, *found, last) if one is not None]

    def for_worker(self) -> dict[str, Any]:
        """Return what the worker is told of the fields that both kinds have."""
        given = {name: getattr(self, name) for name in _SAMPLED if self.temperature > 0 or name not in FILTERS}
        if "top_k" in given:
            given["top_k"] = max(given["top_k"], 0)
        options = {name: value for name, value in given.items() if value is not None}  # else the model's own holds
        return {
            "n": self.n,
            "seed": None if self.seed == ANY_SEED else self.seed,
            "options": options,
            "limit": self.limit if self.limit in self.model_fields_set else None,
            "min_tokens": self.min_tokens or 0,
            "presence": self.presence_penalty,
            "frequency": self.frequency_penalty,
            "bias": {int(token): value for token, value in (self.logit_bias or {}).items()},
            "stop": self.stops,
            "stop_included": self.include_stop_str_in_output,
            "stop_tokens": tuple(self.stop_token_ids or ()),
            "ignore_eos": self.ignore_eos,
            "special": not self.skip_special_tokens,
            "alone": self.cache_salt is not None,
            "learn": self.learn,
            "prediction": self.prediction.text if self.prediction else None,
            "grammar": self.grammar,
            "prompt_logprobs": self.prompt_logprobs,
            "token_ids": self.return_token_ids,
            "speculation": self.speculative.as_speculation() if self.speculative else Speculation(),
        }
