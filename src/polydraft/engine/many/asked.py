"""Prompts that wait for a slot: their options, seeds, drafters and rules, and what became of them."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor, nn

from polydraft.engine.choices import (
    Choices,
    chosen_method,
)
from polydraft.engine.generate import check_predictions, predicted_tokens, row_endings, row_laws
from polydraft.engine.loop.batch import Method
from polydraft.engine.many.running import Request
from polydraft.engine.output import Logprob
from polydraft.engine.target_law import TargetLaw
from polydraft.errors import ContextOverflow, InvalidParameter
from polydraft.models import (
    OF_DECODERS,
    OF_ONE_CALL,
    HuggingFaceModel,
    Serial,
    check_arguments,
    check_prompts,
    copied_criterion,
    inputs_beside,
    one_row,
    own_inputs,
    prepare_by_hugging_face,
    prompts_by_name,
    read_size,
    sources_of,
    take_apart,
)
from polydraft.probs import Noise, SamplingParams
from polydraft.trees import GrowingPolicy, LearningPolicy, TreePolicy

Prompt = Int[Tensor, "..."] | np.ndarray | Sequence[int] | Sequence[Sequence[int]] | Mapping[str, Any]
"""One prompt: a row of token ids, or what a tokenizer or a chat template returns."""
LARGEST_SEED = 2**62
CHOICES = ("drafter", "verifier", "policy", "prediction")
NAMES_BYTES = 4
"""A name becomes a number of this many bytes: from small seeds come seeds below 2^53, that JSON readers keep."""


@dataclass
class Completed:
    """What became of one prompt.

    Args:
        name: its name, or its place among the prompts.
        tokens: the new tokens.
        finish: why the text ended: "eos", "stop", "length" or "context"; "refused" if it was never begun.
        error: why it was refused; else empty.
        target_calls: the target's passes that this text took part in, after its prompt.
        accepted: how many of the tokens were drafted.
        logprobs: with output_logprobs, a `Logprob` for each token.
        seed: its own seed: `generate` with it, and with the drafter, verifier and policy of this run, gives this text.
        verifier: the name of the rule that kept drafts.
        lossless: whether that rule keeps the model's law; False for a lossy one.
    """

    name: Hashable
    tokens: list[int] = field(default_factory=list)
    finish: str = ""
    error: str = ""
    target_calls: int = 0
    accepted: int = 0
    seed: int = 0
    logprobs: tuple[Logprob, ...] = ()
    verifier: str = ""
    lossless: bool = True

    @property
    def block_efficiency(self) -> float:
        """Tokens per target call, the next token included; NaN for a text that was refused."""
        return len(self.tokens) / self.target_calls if self.target_calls else float("nan")


@dataclass(frozen=True, eq=False)
class PromptRequest:
    """A prompt that waits: its name, its tokens, its own seed, options that it has instead of the common ones, and its
    own method, if it has one.
    """

    name: Hashable
    tokens: Int[Tensor, " t"]
    seed: int
    own: Mapping[str, Any]
    method: Method | None = None


def asked_prompts(
    target: HuggingFaceModel,
    prompts: object,
    seed: int,
    per_prompt: Mapping[Any, Mapping[str, Any]],
) -> Iterator[PromptRequest]:
    """Give every prompt its own options and its seed."""
    named = prompts_by_name(prompts)
    if not isinstance(per_prompt, Mapping) or not all(isinstance(own, Mapping) for own in per_prompt.values()):
        raise InvalidParameter("per_prompt must hold options by name for prompts by name, such as {0: {'seed': 1}}.")
    strange = [name for name in per_prompt if name not in named]
    if strange:
        raise InvalidParameter(f"per_prompt has options for {strange[0]!r}, but there is no such prompt.")
    for place, (name, tokens) in enumerate(named.items()):
        own = {**inputs_beside(tokens, own_inputs(target.model)), **per_prompt.get(name, {})}
        its_seed = own.pop("seed", None)
        if its_seed is None:
            its_seed = Noise.of_row(_checked_seed(seed), _number(name, place)).generators[0].initial_seed()
        yield PromptRequest(name, _ids(name, tokens, target), _checked_seed(its_seed, 2**63), own)


def _ids(name: Any, tokens: object, target: HuggingFaceModel) -> Int[Tensor, " _"]:
    """Return a prompt's token ids as a tensor."""
    try:
        ids = torch.as_tensor(one_row(tokens, own_inputs(target.model)), device=target.device)
    except InvalidParameter as error:
        raise InvalidParameter(str(error).replace("A prompt", f"Prompt {name!r}", 1)) from error
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidParameter(f"Prompt {name!r} must be token ids, but is of type {type(tokens).__name__}.") from error
    if ids.dim() != 1:
        raise InvalidParameter(f"Prompt {name!r} must be one row of token ids, but has shape {tuple(ids.shape)}.")
    return ids if len(ids) else ids.long()


def _number(name: Hashable, place: int) -> int:
    """Return the number that a prompt's random numbers follow: its name, or a digest of it; else its place."""
    if isinstance(name, int):
        return name % 256**NAMES_BYTES
    if isinstance(name, str):
        return int.from_bytes(blake2b(name.encode("utf-8", "surrogatepass"), digest_size=NAMES_BYTES).digest())
    return place


def _checked_seed(seed: object, below: int = LARGEST_SEED) -> int:
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < below:
        raise InvalidParameter(f"seed must be an integer >= 0 and below 2^{below.bit_length() - 1}, but is {seed!r}.")
    return seed


def checked_prompt(target: HuggingFaceModel, asked: PromptRequest) -> PromptRequest | Completed:
    """Return the prompt, or why it cannot be continued."""
    count, reason = len(asked.tokens), ""
    if not count:
        reason = "The prompt is empty: give at least one token."
    elif count >= target.context and not target.encodes:  # an encoder has a context of its own
        reason = f"The prompt has {count} tokens, but at most {target.context} fit, one of them new."
    else:
        try:
            check_prompts(asked.tokens.unsqueeze(0), read_size(target.model))
        except InvalidParameter as error:
            reason = str(error)
    return Completed(asked.name, finish="refused", error=reason, seed=asked.seed) if reason else asked


def longest_text(target: HuggingFaceModel, asked: Sequence[PromptRequest], options: Mapping[str, Any]) -> int:
    """Return the length of the longest text: among prompts with the same options, that of the longest prompt."""
    groups: dict[str, PromptRequest] = {}
    for one in asked:
        key = repr(sorted(_of_text(target, one).own.items()))
        if key not in groups or len(groups[key].tokens) < len(one.tokens):
            groups[key] = one
    return max((_limit(target, one, options) for one in groups.values()), default=1)


def _limit(target: HuggingFaceModel, asked: PromptRequest, options: Mapping[str, Any]) -> int:
    try:
        return request_for(target, _of_text(target, asked), options).ending.max_length
    except ContextOverflow:  # a prompt that will be refused; the others end at max_length
        return min({**options, **asked.own}["max_length"], target.context)


def with_methods(
    asked: Sequence[PromptRequest],
    common: Choices,
    target: HuggingFaceModel,
    law: TargetLaw,
    usual: Method,
    options: Mapping[str, Any],
) -> tuple[PromptRequest, ...]:
    """Give every prompt that has a drafter, verifier or policy of its own the method that these mean.

    Prompts that name the same have the same method, and share their passes.
    """
    known: list[tuple[tuple[object, ...], Method]] = []
    found: list[PromptRequest] = []
    for one in asked:
        own = {name: one.own[name] for name in CHOICES if name in one.own}
        if not own:
            found.append(one)
            continue
        if own.get("prediction") is not None:
            own["prediction"] = predicted_tokens(own["prediction"], options.get("tokenizer"))
            check_predictions(own["prediction"], 1, target.vocab_size)
        rest = replace(one, own={name: value for name, value in one.own.items() if name not in CHOICES})
        first = replace(_of_text(target, rest), tokens=rest.tokens[:1])  # the length does not matter: it may be refused
        params = request_for(target, first, options).law.params if rest.own else law.params
        key = (*(own.get(name, getattr(common, name)) for name in CHOICES), params)
        method = next((method for other, method in known if _same(other, key)), None)
        if method is None:
            method = _refused_planner(one, chosen_method(replace(common, **own), target, params))
            known.append((key, method))
        found.append(replace(rest, method=method))
    return tuple(found)


def _of_text(target: HuggingFaceModel, asked: PromptRequest) -> PromptRequest:
    """Return a prompt without what is read beside its text, which costs time and does not matter for its length."""
    inputs = own_inputs(target.model) - OF_DECODERS
    own = {name: value for name, value in asked.own.items() if name not in inputs}
    return replace(asked, own=own, tokens=asked.tokens[:1] if target.encodes else asked.tokens)


def _same(one: Sequence[object], other: Sequence[object]) -> bool:
    """Tell whether two choices are the same objects, or equal words, numbers and trees of one shape."""
    plain, pairs = (str, int, tuple, SamplingParams, TreePolicy), zip(one, other, strict=True)
    return all(
        left is right or (isinstance(left, plain) and not isinstance(left, GrowingPolicy) and left == right)
        for left, right in pairs
    )


def _refused_planner(asked: PromptRequest, method: Method) -> Method:
    """Refuse a planner of one prompt: it plans for a whole batch, and for what drafts and verifies there."""
    if not isinstance(method.policy, LearningPolicy):
        return method
    if "policy" in asked.own:
        raise InvalidParameter(f"Prompt {asked.name!r} has a planner of its own; give it as policy for all prompts.")
    name = next(name for name in CHOICES if name in asked.own)
    raise InvalidParameter(
        f"Prompt {asked.name!r} has a {name} of its own, for which the planner of all prompts does not plan; give it "
        "a policy of its own too."
    )


def request_for(target: HuggingFaceModel, asked: PromptRequest, common: Mapping[str, Any]) -> Request:
    """Prepare a prompt as Hugging Face's `generate` does.

    Raises:
        ContextOverflow: the prompt is longer than the options allow.
        InvalidParameter: an option that is refused, unknown or outside its range, or a processor that cannot be run.
    """

    def take(_: nn.Module, input_ids: Int[Tensor, "b t"], **given: Any) -> Request:
        criteria, config = given["stopping_criteria"], given["generation_config"]
        mask = given.get("decoder_attention_mask") if target.encodes else None
        prepared = take_apart(input_ids, given["logits_processor"], criteria, mask, config, target.vocab_size)
        serial = [one.name for one in prepared.processors[0] if isinstance(one, Serial)]
        if serial:
            raise InvalidParameter(
                f"{serial[0]} keeps state between calls and cannot be copied, so it cannot run beside other texts; "
                "call polydraft.generate for each, or give its class a method fork()."
            )
        (law,), (ending,) = row_laws(prepared), row_endings(prepared, target.context)
        ending = replace(ending, criteria=(*ending.criteria, *map(copied_criterion, prepared.together)))
        tokens, noise = prepared.tokens[0] if target.encodes else asked.tokens, Noise.from_seed(asked.seed, 1)
        sources = sources_of(target, input_ids, given, given.pop("inputs_tensor"))
        return Request(asked.name, tokens, law, ending, noise, source=sources[0] if sources else None)

    options = {**common, **asked.own}
    length, most = len(asked.tokens), options.get("max_length")
    short = most is not None and options.get("max_new_tokens") is None and length >= most
    if short and not target.encodes:
        raise ContextOverflow(f"The prompt has {length} tokens, but at most {most} fit, one of them new.")
    check_arguments(target.model, options, OF_ONE_CALL)
    row = asked.tokens.unsqueeze(0)
    whole = {**options, "attention_mask": torch.ones_like(row)}  # else Hugging Face takes tokens that pad for padding
    return prepare_by_hugging_face(target.model, row, take, whole)
