"""Hugging Face's generation arguments, prepared by Hugging Face itself and taken apart for the decode loop.

`model.generate(custom_generate=f)` does all of its usual preparation (configuration, processors, stopping criteria,
expansion for several return sequences) and then calls `f`. polydraft is such an `f`, so every argument of
`generate` keeps its name, its default and its meaning.
"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from sys import maxsize
from typing import Any, cast

import torch
from jaxtyping import Int
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from polydraft.errors import InvalidParameter, PolydraftError
from polydraft.models.checkpoints.silence import first_sentence
from polydraft.models.checks.layout import evaluating
from polydraft.models.checks.supported import check_model, sees
from polydraft.models.generation.arguments import (
    DRAFTING,
    REFUSED,
    Refusal,
    asked_for,
    check_arguments,
    check_config,
    require_count,
)
from polydraft.models.generation.processors import RowProcessor, row_processors
from polydraft.models.generation.prompts import IDS, check_begun, check_own_way, main_input, own_inputs, read_size
from polydraft.models.grammar.masks import GrammarLogitsProcessor, grammar_processor
from polydraft.models.sources import is_encoder_decoder
from polydraft.probs import SamplingParams

Criterion = Callable[..., Any]
KEEPS_NOTHING = (MaxTimeCriteria, StopStringCriteria)
"""Hugging Face's criteria whose answer depends on the row and the clock alone; a class derived from one may not."""


def is_of_rows(criterion: Criterion) -> bool:
    """Tell whether a criterion may be asked for each row alone: by its very class, or as it says `stateless = True`.

    All others see all rows together, as Hugging Face's `generate` shows them.
    """
    return type(criterion) in KEEPS_NOTHING or getattr(criterion, "stateless", False) is True


def copied_criterion(criterion: Criterion) -> Criterion:
    """Return a copy of a criterion, for a text of its own; itself if it is asked for rows alone.

    Raises:
        InvalidParameter: it cannot be copied.
    """
    if is_of_rows(criterion):
        return criterion
    try:
        return copy.deepcopy(criterion)
    except Exception as error:
        name = getattr(criterion, "__name__", None) or type(criterion).__name__
        raise InvalidParameter(
            f"The stopping criterion {name} cannot be copied for each prompt; call polydraft.generate for each."
        ) from error


SAMPLING_NAMES = ("temperature", "top_k", "top_p", "min_p", "typical_p")
COUNTS = ("max_new_tokens", "max_length", "num_return_sequences")
OURS_TO_DECIDE = {"stop_strings", "cache_implementation", *DRAFTING} - {"assistant_model"}
"""What Hugging Face is not told: polydraft sees to it."""


@dataclass(frozen=True, eq=False)
class Prepared:
    """A generation call as the decode loop needs it.

    Args:
        input_ids: the prompts as given, expanded to one row per returned sequence, padding included.
        tokens: the prompts without padding, right-padded rows.
        lengths: their lengths.
        padding: the left padding of each row, for processors that count it.
        params: temperature and filters.
        processors: per row, the processors that come before them, of its own if they keep state.
        criteria: per row, stopping criteria other than length and end-of-text that are asked for a row alone.
        together: those that see all rows of the batch.
        eos: end-of-text ids.
        pad: the id that fills finished rows.
        max_length: the longest row of `input_ids` plus new tokens.
        wants_scores: whether the scores that tokens were chosen by are asked for.
        wants_logits: whether the target's logits are.
    """

    input_ids: Int[Tensor, "b t"]
    tokens: Int[Tensor, "b s"]
    lengths: Int[Tensor, "b"]
    padding: tuple[Int[Tensor, " _"], ...]
    params: SamplingParams
    processors: Sequence[Sequence[RowProcessor]]
    criteria: Sequence[Sequence[Criterion]]
    together: Sequence[Criterion]
    eos: frozenset[int]
    pad: int
    max_length: int
    wants_scores: bool
    wants_logits: bool


def prepare_by_hugging_face(
    model: object,
    input_ids: Int[Tensor, "b t"],
    take: Callable[..., Any],
    options: Mapping[str, Any],
    besides: Mapping[str, Refusal] | None = None,
) -> Any:
    """Let `model.generate` prepare a call, and return what `take` makes of that in place of a decoding method.

    A temperature decides by itself whether to sample: 0 is greedy decoding, anything above is sampling.
    `stop_strings` work with `tokenizer`. `besides` are arguments that this call refuses beside `REFUSED`.

    Raises:
        InvalidParameter: prompts that are no token ids of the model (`check_prompts`), an argument that is refused or
            unknown, one outside its range, one that Hugging Face refuses, or something that is no model.
        UnsupportedModel: a model that says itself that it cannot be used.
    """
    known = check_model(model)
    check_arguments(known, options, besides)
    encodes = is_encoder_decoder(known)
    check_config(options.get("generation_config"), known.generation_config, encodes=encodes)
    check_own_way(known)
    _check_read(known, input_ids, options)
    options = _settled(dict(options), known)
    given: dict[str, Any] = {}

    def keep(_: nn.Module, ids: Int[Tensor, "b t"], inputs_tensor: Tensor, **prepared: Any) -> None:
        given.update(prepared, input_ids=ids, inputs_tensor=inputs_tensor)

    encoders = list(known.modules()) if encodes or sees(known) else []
    try:
        with evaluating(encoders):  # what an encoder makes is part of the law, which is that of evaluation
            cast(Any, known).generate(input_ids, custom_generate=keep, **options)
    except PolydraftError:
        raise
    except Exception as error:  # nothing of ours runs in there: whatever it is, the arguments are its cause
        raise InvalidParameter(f"Hugging Face's generate refuses the arguments: {first_sentence(error)}.") from error
    return take(known, given.pop("input_ids"), **given)


def _settled(options: dict[str, Any], model: PreTrainedModel) -> dict[str, Any]:
    """Return the options with what polydraft decides: whether to sample, stop strings as a criterion, its own cache."""
    config, own = model.generation_config, own_inputs(model)
    given = {name: options[name] for name in SAMPLING_NAMES if options.get(name) is not None}
    SamplingParams(**given)
    for name in COUNTS:
        require_count(name, options.get(name))
    if "temperature" in given:
        options.setdefault("do_sample", given["temperature"] > 0)
        if given["temperature"] == 0:
            options["do_sample"], options["temperature"] = False, None
    if options.get("do_sample") is False:
        options.update({name: None for name in SAMPLING_NAMES if name in options})
    configs = (options.get("generation_config"), config)
    strings = [options.get("stop_strings"), *(getattr(one, "stop_strings", None) for one in configs)]
    options["stopping_criteria"] = _with_stop_strings(options, next((one for one in strings if one is not None), None))
    if options.get("grammar") is not None:  # Hugging Face puts the filters behind it
        grammar = grammar_processor(options["grammar"], options.get("tokenizer"), model)
        options["logits_processor"] = LogitsProcessorList([*_listed(options.get("logits_processor")), grammar])
    # of what is refused, only what asks for nothing comes here
    ours = {"assistant_model", "tokenizer", "grammar", *REFUSED} - own
    told = {name: value for name, value in options.items() if name not in ours}
    said = {name for name in OURS_TO_DECIDE if any(getattr(one, name, None) is not None for one in configs)}
    return {**told, **dict.fromkeys(said | (told.keys() & OURS_TO_DECIDE))}


def _listed(given: Any) -> list[Any]:
    return [] if given is None else list(given) if isinstance(given, list | tuple) else [given]


def _check_read(model: PreTrainedModel, given: object, options: Mapping[str, Any]) -> None:
    """Check what a model is to read: token ids, or what its encoder reads instead; and how its text is to begin."""
    name, begun = main_input(model), options.get("decoder_input_ids")
    if name == IDS:
        check_prompts(given, read_size(model), options.get("attention_mask"))
    elif not isinstance(given, Tensor) or not given.is_floating_point() or 0 in given.shape or given.dim() < 2:
        what = f"{given.dtype} of shape {tuple(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
        raise InvalidParameter(f"{name} must be what the model's processor returns, rows of numbers, but is {what}.")
    if is_encoder_decoder(model):
        check_begun(model, len(cast(Tensor, given)), options)
    if begun is not None:
        size = model.config.get_text_config(decoder=True).vocab_size
        check_prompts(begun, size, options.get("decoder_attention_mask"), "decoder_input_ids")


def check_prompts(input_ids: object, vocab_size: int, mask: object = None, name: str = IDS) -> None:
    """Check that prompts are rows of token ids; what padding the mask leaves out may be any number.

    Raises:
        InvalidParameter: something else, with what it is and how to get token ids; a mask that is no row of ones and
            zeros for every prompt.
    """
    if not isinstance(input_ids, Tensor):
        raise InvalidParameter(
            f"{name} must be a tensor of token ids, such as tokenizer(text, return_tensors='pt').input_ids, but is "
            f"of type {type(input_ids).__name__}."
        )
    shape = tuple(input_ids.shape)
    if input_ids.dim() != 2:
        raise InvalidParameter(
            f"{name} must have the shape (rows, tokens), but has {shape}; a prompt alone is {name}[None]."
        )
    if 0 in shape:
        raise InvalidParameter(f"The prompt is empty: {name} has shape {shape}, not (rows, tokens).")
    if input_ids.layout != torch.strided:
        raise InvalidParameter(f"{name} must be an ordinary tensor, but is sparse; pass {name}.to_dense().")
    if input_ids.is_floating_point() or input_ids.is_complex() or input_ids.dtype == torch.bool:
        raise InvalidParameter(f"{name} must be integers, but is of type {input_ids.dtype}.")
    outside = (input_ids < 0) | (input_ids >= vocab_size)
    if mask is not None:
        outside &= _checked_mask(mask, shape, name).to(outside.device)
    if bool(outside.any()):
        raise InvalidParameter(
            f"{name} has the token {int(input_ids[outside][0])}, but the model's tokens are 0 to {vocab_size - 1}; "
            "was the text encoded by another model's tokenizer?"
        )


def _checked_mask(mask: object, shape: tuple[int, ...], name: str) -> Tensor:
    """Return which tokens a mask keeps."""
    own = "attention_mask" if name == IDS else "decoder_attention_mask"
    if not isinstance(mask, Tensor) or tuple(mask.shape) != shape:
        what = f"has the shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else f"is of type {type(mask).__name__}"
        raise InvalidParameter(
            f"{own} must have the shape of {name}, {shape}, with 1 for a token and 0 for padding, but {what}."
        )
    if not bool(((mask == 0) | (mask == 1)).all()):
        odd = mask[(mask != 0) & (mask != 1)][0].item()
        raise InvalidParameter(f"{own} must hold 1 for a token and 0 for padding, but has {odd}.")
    return mask != 0


def _with_stop_strings(options: Mapping[str, Any], strings: Any) -> StoppingCriteriaList:
    """Return the criteria with one for stop strings: Hugging Face hands no tokenizer on to do so itself."""
    given, tokenizer = options.get("stopping_criteria"), options.get("tokenizer")
    criteria = _listed(given)
    if not all(map(callable, criteria)):
        raise InvalidParameter(f"stopping_criteria must be criteria that can be called, but is {given!r:.200}.")
    result = StoppingCriteriaList(criteria)
    if strings is None:
        return result
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise InvalidParameter("stop_strings need the tokenizer argument, to know how tokens are spelt.")
    texts = [strings] if isinstance(strings, str) else strings
    if not isinstance(texts, list | tuple) or not texts or any(not isinstance(one, str) or not one for one in texts):
        raise InvalidParameter(f"stop_strings must be texts of at least one character, but is {strings!r}.")
    result.append(StopStringCriteria(tokenizer, list(texts)))
    return result


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
    config: GenerationConfig,
    vocab_size: int,
) -> Prepared:
    """Turn what `model.generate` hands to its decoding method into what the decode loop needs.

    Raises:
        InvalidParameter: a processor that cannot be run (`row_processors`).
    """
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask.to(input_ids.device)
    real = mask.bool()
    lengths = real.sum(dim=-1)
    order = (~real).long().argsort(dim=-1, stable=True)
    tokens = input_ids.gather(-1, order)[:, : int(lengths.max())]
    left = real.long().argmax(dim=-1).tolist()
    padding = tuple(row[:count] for row, count in zip(input_ids, left, strict=True)) if any(left) else ()
    eos = frozenset(
        int(token)
        for criterion in stopping_criteria
        if type(criterion) is EosTokenCriteria
        for token in criterion.eos_token_id.flatten().tolist()
    )
    own = [count + length for count, length in zip(left, lengths.tolist(), strict=True)]
    begins = [begin + (begin == 1 and config.forced_bos_token_id is not None) for begin in own]
    flat = _flat(logits_processor)
    given = [one.placed(begins, eos) if isinstance(one, GrammarLogitsProcessor) else one for one in flat]
    params, processors = split_processors(given) if config.do_sample else (SamplingParams(temperature=0), given)
    pad = config.pad_token_id
    criteria: list[Criterion] = [
        one for one in stopping_criteria if type(one) not in (MaxLengthCriteria, EosTokenCriteria)
    ]
    alone = [one for one in criteria if is_of_rows(one)]
    ends: list[Any] = [one.endings for one in given if isinstance(one, GrammarLogitsProcessor)]
    return Prepared(
        input_ids=input_ids,
        tokens=tokens,
        lengths=lengths,
        padding=padding,
        params=params,
        processors=row_processors(processors, len(input_ids), input_ids, vocab_size),
        criteria=tuple((*alone, *(one[row] for one in ends)) for row in range(len(input_ids))),
        together=tuple(one for one in criteria if not is_of_rows(one)),
        eos=eos,
        pad=pad if pad is not None else min(eos, default=0),
        max_length=min(
            (one.max_length for one in stopping_criteria if type(one) is MaxLengthCriteria), default=maxsize
        ),
        wants_scores=asked_for("output_scores", config.output_scores),
        wants_logits=asked_for("output_logits", config.output_logits),
    )


def _flat(processors: Sequence[Any]) -> list[Any]:
    """Return processors without the lists that they may stand in; a list of a class of its own is called itself."""
    plain = (list, LogitsProcessorList)
    return [each for one in processors for each in (_flat(one) if type(one) in plain else [one])]


def split_processors(processors: Sequence[Any]) -> tuple[SamplingParams, list[Any]]:
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
    while rest and type(rest[-1]) in names and _is_plain(rest[-1]) and order.index(type(rest[-1])) < place:
        warper = rest.pop()
        place = order.index(type(warper))
        name, value = names[type(warper)]
        found[name] = value(warper)
    return SamplingParams(**found), rest


def _is_plain(warper: Any) -> bool:
    """Tell whether a warper does what its parameter does, with nothing of the user's own beside."""
    return getattr(warper, "min_tokens_to_keep", 1) == 1 and getattr(warper, "filter_value", -math.inf) == -math.inf


NAMES = ("sequences", "scores", "logits")


def as_hugging_faces(found: Mapping[str, Any], *, encodes: bool) -> Any:
    """Return an output of Hugging Face's own class, which pipelines and models' own `generate` take apart.

    What Hugging Face has no name for, such as statistics, is an attribute and no field.

    Args:
        found: the output by name.
        encodes: whether the model has an encoder.
    """
    kind: Any = GenerateEncoderDecoderOutput if encodes else GenerateDecoderOnlyOutput
    made = kind(**cast(Any, {name: found.get(name) for name in NAMES}))
    for name, value in found.items():
        if name not in NAMES:
            setattr(made, name, value)
    return made
