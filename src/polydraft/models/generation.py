"""Hugging Face's generation arguments, prepared by Hugging Face itself and taken apart for the decode loop.

`model.generate(custom_generate=f)` does all of its usual preparation (configuration, processors, stopping criteria,
expansion for several return sequences) and then calls `f`. polydraft is such an `f`, so every argument of
`generate` keeps its name, its default and its meaning.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.generation.logits_process import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from polydraft.errors import InvalidParameter
from polydraft.models.checks import check_model
from polydraft.probs import SamplingParams

SAMPLING_NAMES = ("temperature", "top_k", "top_p", "min_p", "typical_p")

Call = Callable[..., Tensor]
"""A processor or criterion: Hugging Face annotates them with legacy tensor classes that no tensor is an instance of."""


@dataclass(frozen=True, eq=False)
class Prepared:
    """A generation call as the decode loop needs it.

    Args:
        input_ids: the prompts as given, expanded to one row per returned sequence, padding included.
        tokens: the prompts without padding, right-padded rows.
        lengths: their lengths.
        padding: the left padding of each row, for processors that count it.
        params: temperature and filters.
        processors: per row, the processors that come before them.
        criteria: stopping criteria other than length and end-of-text.
        eos: end-of-text ids.
        pad: the id that fills finished rows.
        max_length: the longest row of `input_ids` plus new tokens.
    """

    input_ids: Int[Tensor, "b t"]
    tokens: Int[Tensor, "b s"]
    lengths: Int[Tensor, "b"]
    padding: tuple[Int[Tensor, " _"], ...]
    params: SamplingParams
    processors: Sequence[Sequence[Call]]
    criteria: Sequence[Call]
    eos: frozenset[int]
    pad: int
    max_length: int


def prepare_by_hugging_face(
    model: object, input_ids: Int[Tensor, "b t"], take: Callable[..., Any], options: dict[str, Any]
) -> Any:
    """Call `model.generate` with `take` in place of its decoding method and return what `take` returns.

    A temperature decides by itself whether to sample: 0 is greedy decoding, anything above is sampling.
    `stop_strings` work with `tokenizer`.

    Raises:
        InvalidParameter: prompts that are no token ids of the model (`check_prompts`), a sampling argument outside
            its range, or something that is no model.
        UnsupportedModel: a model that says itself that it cannot be used.
    """
    check_model(model)
    check_prompts(input_ids, cast(Any, model).config.get_text_config().vocab_size, options.get("attention_mask"))
    options = dict(options)
    given = {name: options[name] for name in SAMPLING_NAMES if options.get(name) is not None}
    SamplingParams(**given)
    if "temperature" in given:
        options.setdefault("do_sample", given["temperature"] > 0)
        if given["temperature"] == 0:
            options["do_sample"], options["temperature"] = False, None
    if options.get("do_sample") is False:
        options.update({name: None for name in SAMPLING_NAMES if name in options})
    options["stopping_criteria"] = _with_stop_strings(options)
    return cast(Any, model).generate(input_ids, custom_generate=take, **options)


def check_prompts(input_ids: object, vocab_size: int, mask: Tensor | None = None) -> None:
    """Check that prompts are rows of token ids; what padding the mask leaves out may be any number.

    Raises:
        InvalidParameter: something else, with what it is and how to get token ids.
    """
    if not isinstance(input_ids, Tensor):
        raise InvalidParameter(
            "input_ids must be a tensor of token ids, such as tokenizer(text, return_tensors='pt').input_ids, but is "
            f"of type {type(input_ids).__name__}."
        )
    shape = tuple(input_ids.shape)
    if input_ids.dim() != 2:
        raise InvalidParameter(
            f"input_ids must have the shape (rows, tokens), but has {shape}; a prompt alone is input_ids[None]."
        )
    if 0 in shape:
        raise InvalidParameter(f"The prompt is empty: input_ids has shape {shape}, not (rows, tokens).")
    if input_ids.is_floating_point() or input_ids.dtype == torch.bool:
        raise InvalidParameter(f"input_ids must be integers, but is of type {input_ids.dtype}.")
    outside = (input_ids < 0) | (input_ids >= vocab_size)
    if mask is not None and mask.shape == input_ids.shape:
        outside &= mask.to(outside.device) != 0
    if bool(outside.any()):
        raise InvalidParameter(
            f"input_ids has the token {int(input_ids[outside][0])}, but the model's tokens are 0 to {vocab_size - 1}; "
            "was the text encoded by another model's tokenizer?"
        )


def _with_stop_strings(options: dict[str, Any]) -> StoppingCriteriaList:
    criteria = StoppingCriteriaList(options.pop("stopping_criteria", None) or [])
    strings = options.pop("stop_strings", None)
    tokenizer: PreTrainedTokenizerBase | None = options.pop("tokenizer", None)
    if strings is not None:
        if tokenizer is None:
            raise InvalidParameter("stop_strings need the tokenizer argument, to know how tokens are spelt.")
        criteria.append(StopStringCriteria(tokenizer, strings))
    return criteria


def is_prepared(options: dict[str, Any]) -> bool:
    """Tell whether a call's arguments come from inside `model.generate`, which always sets a length criterion."""
    criteria = options.get("stopping_criteria")
    return (
        isinstance(criteria, StoppingCriteriaList)
        and any(isinstance(criterion, MaxLengthCriteria) for criterion in criteria)
        and {"logits_processor", "generation_config"} <= options.keys()
    )


def take_apart(
    input_ids: Int[Tensor, "b t"],
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    attention_mask: Int[Tensor, "b t"] | None,
    pad_token_id: int | None,
) -> Prepared:
    """Turn what `model.generate` hands to its decoding method into what the decode loop needs."""
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask.to(input_ids.device)
    real = mask.bool()
    lengths = real.sum(dim=-1)
    order = (~real).long().argsort(dim=-1, stable=True)
    tokens = input_ids.gather(-1, order)[:, : int(lengths.max())]
    left = real.long().argmax(dim=-1).tolist()
    padding = tuple(row[:count] for row, count in zip(input_ids, left, strict=True)) if any(left) else ()
    params, processors = split_processors(list(logits_processor))
    eos = frozenset(
        int(token)
        for criterion in stopping_criteria
        if isinstance(criterion, EosTokenCriteria)
        for token in criterion.eos_token_id.flatten().tolist()
    )
    return Prepared(
        input_ids=input_ids,
        tokens=tokens,
        lengths=lengths,
        padding=padding,
        params=params,
        processors=[[_for_row(one, row) for one in processors] for row in range(len(input_ids))],
        criteria=[one for one in stopping_criteria if not isinstance(one, MaxLengthCriteria | EosTokenCriteria)],
        eos=eos,
        pad=pad_token_id if pad_token_id is not None else min(eos, default=0),
        max_length=min(one.max_length for one in stopping_criteria if isinstance(one, MaxLengthCriteria)),
    )


def split_processors(processors: list[LogitsProcessor]) -> tuple[SamplingParams, list[LogitsProcessor]]:
    """Split a list of processors into those to run as they are and the sampling parameters that end it.

    The list ends with temperature and filters when sampling; without them the decoding is greedy. A list in which
    something unknown follows them is run as it is.
    """
    names = {
        TemperatureLogitsWarper: ("temperature", lambda one: float(one.temperature)),
        TopKLogitsWarper: ("top_k", lambda one: int(one.top_k)),
        TopPLogitsWarper: ("top_p", lambda one: float(one.top_p)),
        MinPLogitsWarper: ("min_p", lambda one: float(one.min_p)),
        TypicalLogitsWarper: ("typical_p", lambda one: float(one.mass)),
    }
    order = list(names)
    found: dict[str, Any] = {}
    rest, place = list(processors), len(order)
    while rest and type(rest[-1]) in names and order.index(type(rest[-1])) < place:
        warper = rest.pop()
        place = order.index(type(warper))
        name, value = names[type(warper)]
        found[name] = value(warper)
    return SamplingParams(**found), rest


def _for_row(processor: LogitsProcessor, row: int) -> LogitsProcessor:
    """Return a processor that can be called for one row of the batch alone."""
    if isinstance(processor, RepetitionPenaltyLogitsProcessor):
        ignored = processor.prompt_ignore_length
        if isinstance(ignored, Tensor):
            return RepetitionPenaltyLogitsProcessor(processor.penalty, prompt_ignore_length=int(ignored[row]))
    return processor
