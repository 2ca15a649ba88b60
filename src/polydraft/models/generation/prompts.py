"""Prompts: what tokenizers return, what a model reads beside tokens, images among it, and how such prompts are read."""

import inspect
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import GenerationMixin, PreTrainedModel

from polydraft.errors import InvalidParameter, UnsupportedModel
from polydraft.models.cache import TreeCache
from polydraft.models.checkpoints.silence import first_sentence
from polydraft.models.checks.layout import cache_in, cache_name, evaluating, for_logits
from polydraft.models.checks.supported import reads_prompts_both_ways, sees
from polydraft.models.checks.trial import agree
from polydraft.models.hugging_face import HuggingFaceModel
from polydraft.models.sources import ReadPrompt, encoded_rows, is_encoder_decoder


@torch.no_grad()
def read_prompts(
    target: HuggingFaceModel, input_ids: Int[Tensor, "b t"], prepared: Mapping[str, Any]
) -> list[ReadPrompt | None]:
    """Read prompts by the model's own code, and check on their last tokens that a text can go on from there.

    Args:
        target: the model.
        input_ids: the prompts, padded.
        prepared: the inputs of the model that Hugging Face's `generate` prepared.

    Raises:
        UnsupportedModel: the model's own code fails, or what it needs of an image later is not in its keys.
    """
    if target.facts.remembers and input_ids.shape[1] == 1:
        return [None] * len(input_ids)  # the only token is the first tree's root
    if target.facts.remembers:
        return [_with_states(target, input_ids, prepared)]
    (rows, width), model = input_ids.shape, target.model
    mask = prepared.get("attention_mask")
    real = torch.ones_like(input_ids) if mask is None else mask.to(input_ids.device).long()
    cache = target.new_cache(rows, width)
    logits, positions = _own_pass(model, input_ids, prepared, cache)
    found: list[ReadPrompt | None] = []
    for row in range(rows):
        slots = real[row].nonzero().squeeze(-1)
        last, own = int(slots[-1]), cache.empty(1, len(slots))
        own.take(0, cache.select([row]), [slots.unsqueeze(0)], slots, 0)
        place = _position(model, positions, row, last, len(slots))
        read = ReadPrompt(own, len(slots), place - len(slots) + 1)
        if logits.shape[1] == width or last == width - 1:  # else its logits were not asked for
            _check(target, input_ids[row, last], logits[row, last - width], read)
        found.append(read)
    return found


def _with_states(target: HuggingFaceModel, input_ids: Int[Tensor, "b t"], prepared: Mapping[str, Any]) -> ReadPrompt:
    """Read all of a prompt but the last token, behind which the states of layers without keys are wanted."""
    model, (rows, length) = target.model, input_ids.shape
    if rows > 1 or prepared.get("attention_mask") is not None:
        raise UnsupportedModel(
            f"{type(model).__name__} remembers in states, so prompts with images are read one by one: give one row "
            "without padding and ask for one text, or call polydraft.generate_many."
        )
    whole = target.new_cache(1, length)
    logits, positions = _own_pass(model, input_ids, prepared, whole)
    shorter = {name: prepared[name][..., :-1] for name in BY_TOKEN if prepared.get(name) is not None}
    cache = target.new_cache(1, length)
    _own_pass(model, input_ids[:, :-1], {**prepared, **shorter}, cache)
    offset = _position(model, positions, 0, length - 1, length) - length + 1
    read = ReadPrompt(cache, length, offset, cache.states())
    _check(target, input_ids[0, -1], logits[0, -1], read)
    return read


def _own_pass(
    model: PreTrainedModel, input_ids: Int[Tensor, "b t"], prepared: Mapping[str, Any], cache: TreeCache
) -> tuple[Float[Tensor, "b k V"], Tensor | None]:
    """Let the model read prompts as in the first pass of Hugging Face's `generate`, into our slots.

    Returns:
        logits, of the last tokens or of all; and the positions that the model was given.
    """
    rows, width = input_ids.shape
    mask = prepared.get("attention_mask")
    real = torch.ones_like(input_ids) if mask is None else mask.to(input_ids.device).long()
    cache.place(input_ids.new_zeros(rows), width, width, (real.cumsum(-1) - 1).clamp_min(0))
    given = {**prepared, cache_name(model): cache}
    try:
        with evaluating(list(model.modules())):
            inputs = cast(Any, model).prepare_inputs_for_generation(input_ids, is_first_iteration=True, **given)
            logits = model(**{**inputs, **for_logits(model), "return_dict": True}).logits
    except torch.OutOfMemoryError:
        raise
    except ValueError as error:
        raise InvalidParameter(f"{type(model).__name__} refuses the prompt: {first_sentence(error)}.") from error
    except Exception as error:
        raise UnsupportedModel(f"{type(model).__name__} cannot read the prompt: {first_sentence(error)}.") from error
    if not cache.stores:
        raise UnsupportedModel(f"{type(model).__name__} keeps nothing of a prompt with images in its cache.")
    return logits, inputs.get("position_ids")


def _position(model: PreTrainedModel, positions: Tensor | None, row: int, last: int, length: int) -> int:
    """Return the position of a prompt's last token, as it was given: one number, or three and the place before."""
    if positions is None:
        return length - 1
    own = positions[..., min(row, positions.shape[-2] - 1), last].reshape(-1)[-3:]  # rows may share them
    if len({*own.tolist()}) > 1:
        raise UnsupportedModel(f"{type(model).__name__} gives the prompt's last token several positions.")
    return int(own[-1])


def _check(target: HuggingFaceModel, token: Int[Tensor, ""], own: Float[Tensor, " V"], read: ReadPrompt) -> None:
    place = torch.tensor([read.known], device=token.device)
    mask = torch.ones(1, 1, read.length, dtype=torch.bool, device=token.device)
    again = target.new_cache(1, read.length, [read])
    again.begin(again.states())
    logits = target.forward(token.view(1, 1), place.unsqueeze(0), mask, again, place).logits[0, -1]
    if not agree(target.model, logits, own):
        raise UnsupportedModel(
            f"{type(target.model).__name__} needs more of the prompt's images later than the keys that it kept, so its "
            "text cannot be verified."
        )


KEPT = ("attention_mask", "position_ids", "logits_to_keep", "use_cache")
"""What `model.generate` made that its first pass takes."""


def _check_padding(target: HuggingFaceModel, begun: Int[Tensor, "b t"], mask: Tensor | None) -> None:
    """Check that a text does not begin with padding inside, which some decoders do not count."""
    if target.uncounted is None:
        return
    inside = begun[:, 1:] == target.uncounted
    if bool((inside if mask is None else inside & mask[:, 1:].bool().to(inside.device)).any()):
        raise InvalidParameter(
            f"decoder_input_ids has the padding token {target.uncounted} inside, which {type(target.model).__name__} "
            "does not count as a place; leave it out, or say by decoder_attention_mask that it is padding."
        )


def sources_of(
    target: HuggingFaceModel, input_ids: Int[Tensor, "b t"], prepared: Mapping[str, Any], read: Tensor | None
) -> Sequence[Any] | None:
    """Return the source of each row: what an encoder made, or a prompt with images that was read; None for text alone.

    Args:
        target: the model.
        input_ids: the beginning of each row's text, padded.
        prepared: the model's inputs.
        read: what an encoder read; None if that is not known.

    Raises:
        UnsupportedModel: prompts with images cannot be read, or a text cannot go on from them.
    """
    if target.facts.encodes:
        _check_padding(target, input_ids, prepared.get("decoder_attention_mask"))
        return encoded_rows(target.model, len(input_ids), prepared, read)
    if not beside_text(target.model, prepared):
        return None
    own = {name: value for name, value in prepared.items() if name in KEPT or name not in MADE_INSIDE}
    return read_prompts(target, input_ids, own)


IDS = "input_ids"
START = "decoder_start_token_id"
OF_DECODERS = frozenset(("decoder_input_ids", START, "decoder_attention_mask"))
"""Arguments of a call that say how the text of an encoder-decoder begins."""
MADE_INSIDE = frozenset(
    "logits_processor stopping_criteria generation_config attention_mask position_ids use_cache "
    "logits_to_keep cache_position synced_gpus inputs_tensor".split()
)
"""What `model.generate` itself hands to a decoding method."""
NOT_INPUTS = frozenset(("self", "kwargs", "labels", "return_dict", "encoder_outputs", *MADE_INSIDE))
"""Parameters of passes that are no inputs of a text."""
BY_TOKEN = ("position_ids", "token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")
"""Inputs that have a number for each token of the prompt."""


def main_input(model: PreTrainedModel) -> str:
    """Return by which name a call takes what is read: token ids, or what the model's encoder reads instead."""
    return model.main_input_name if is_encoder_decoder(model) else IDS


def read_size(model: PreTrainedModel) -> int:
    """Return how many tokens there are of the kind that is read."""
    config = model.config
    if is_encoder_decoder(model):
        return int(getattr(config, "encoder", config).vocab_size)
    return int(config.get_text_config(decoder=True).vocab_size)


def own_inputs(model: PreTrainedModel) -> frozenset[str]:
    """Return the names of what a model reads beside its main input; nothing for models of text alone."""
    if is_encoder_decoder(model):
        return OF_DECODERS | _parameters(model.get_encoder()) - {main_input(model), cache_name(model)}
    if not sees(model):
        return frozenset()
    return (_parameters(model) | {"mm_encoder_outputs"}) - {IDS, "inputs_embeds", cache_name(model)}


def beside_text(model: PreTrainedModel, prepared: Mapping[str, Any]) -> bool:
    """Tell whether the first pass reads more than text, such as images, or in both directions."""
    given = ((name, prepared.get(name)) for name in own_inputs(model))
    return reads_prompts_both_ways(model) or (sees(model) and any(_says_something(*one) for one in given))


def _says_something(name: str, value: Any) -> bool:
    """Tell whether an input is there; kinds of tokens that are all text say nothing."""
    return value is not None and value != {} and not (name == "mm_token_type_ids" and not bool(value.any()))


def _parameters(module: Any) -> frozenset[str]:
    return frozenset(inspect.signature(module.forward).parameters) - NOT_INPUTS


def check_begun(model: PreTrainedModel, rows: int, options: Mapping[str, Any]) -> None:
    """Check how the text of an encoder-decoder is to begin.

    Raises:
        InvalidParameter: rows or a mask do not fit, or the first token is none of the model's.
    """
    size = int(model.config.get_text_config(decoder=True).vocab_size)
    begun, mask, start = (options.get(name) for name in ("decoder_input_ids", "decoder_attention_mask", START))
    if mask is not None and begun is None:
        raise InvalidParameter("decoder_attention_mask needs decoder_input_ids, whose padding it names.")
    if isinstance(begun, Tensor) and begun.shape[:1] != (rows,):
        raise InvalidParameter(f"decoder_input_ids must have a row for each input, {rows}, but has {len(begun)}.")
    if start is not None:
        strange = [one for one in torch.as_tensor(start).reshape(-1).tolist() if not 0 <= one < size]
        if strange:
            raise InvalidParameter(f"{START} must be one of the model's tokens, 0 to {size - 1}, but is {strange[0]}.")


def check_own_way(model: PreTrainedModel) -> None:
    """Check that a model's `generate` is Hugging Face's, which prepares one text for one decoding method.

    Raises:
        InvalidParameter: it is the model's own, which does more, such as cutting audio.
    """
    if getattr(type(model), "generate", None) is not vars(GenerationMixin)["generate"]:
        raise InvalidParameter(
            f"{type(model).__name__} has a generate of its own, which does more than to decode; call "
            "model.generate(..., custom_generate=polydraft.generate)."
        )


def check_made_inside(model: PreTrainedModel, input_ids: Tensor, inputs: Mapping[str, Any]) -> None:
    """Check, of a call from inside `model.generate`, that the model's inputs are those that are handed on.

    Raises:
        InvalidParameter: there are others, positions of the user's own, or keys of another text.
    """
    known, keys = MADE_INSIDE | own_inputs(model) | {"encoder_outputs"}, cache_in(inputs)
    for name, value in inputs.items():
        if name not in known and value is not None and value is not keys:
            raise InvalidParameter(
                f"{name} is an input of the model beside its tokens, which polydraft does not hand on; leave it out."
            )
    if keys is not None and keys.get_seq_length() > 0:
        name = next(name for name, value in inputs.items() if value is keys)
        raise InvalidParameter(f"{name} is refused: polydraft reads the whole prompt; leave it out.")
    if is_encoder_decoder(model):
        return
    mask, places = inputs.get("attention_mask"), inputs.get("position_ids")
    usual = (input_ids * 0 + 1 if mask is None else mask.long()).cumsum(dim=-1) - 1
    if beside_text(model, inputs) or places is None:
        return
    if places.shape[-2:] != usual.shape or bool(((places - usual) * (usual >= 0)).any()):
        raise InvalidParameter("position_ids is refused: positions follow from attention_mask; leave it out.")


MASK = "attention_mask"


def prompts_of(input_ids: object, options: dict[str, Any], main: str = IDS) -> tuple[Any, dict[str, Any]]:
    """Return the prompts and the options of a call, wherever the prompts stand.

    Args:
        input_ids: the prompts: a tensor, the list of one prompt's token ids, a list of rows of one length, or a mapping
            with input_ids and attention_mask, each of them such.
        options: the call's other arguments; `inputs` or `main` among them is another name of the prompts.
        main: by which name the model takes its prompts.

    Raises:
        InvalidParameter: prompts are given twice, or not at all, or rows are of different lengths.
    """
    options = dict(options)
    places = [input_ids, *(options.pop(name, None) for name in ("inputs", main))]
    given = [one for one in places if one is not None]
    if len(given) != 1:
        raise InvalidParameter(
            f"Give prompts once, as {main}."
            if given
            else f"There are no prompts: pass {main}" + (", rows of token ids." if main == IDS else ".")
        )
    if not isinstance(given[0], Mapping):
        if not _holds_ids(given[0]):
            return given[0], options
        masks = {MASK: _as_rows(options[MASK])} if _holds_ids(options.get(MASK)) else {}
        return _as_rows(given[0]), {**options, **masks}
    encoded = {str(name): _as_rows(value) for name, value in cast(Mapping[Any, Any], given[0]).items()}
    twice = sorted(encoded.keys() & options.keys())
    if twice or main not in encoded:
        what = f"{twice[0]} is given twice" if twice else f"The prompts have no {main}"
        raise InvalidParameter(f"{what}; pass what the tokenizer returns, or its {main} and attention_mask.")
    return encoded.pop(main), {**options, **encoded}


def prompts_by_name(prompts: object) -> dict[Any, Any]:
    """Return many prompts by name; what a tokenizer returned for several is taken apart, without its padding.

    Args:
        prompts: a mapping by name, a list, whose names are their places, the rows of a tensor, or what a tokenizer or
            chat template returned for one prompt or for several.

    Raises:
        InvalidParameter: they are something else.
    """
    if isinstance(prompts, Mapping):
        if IDS not in prompts:
            return dict(cast(Mapping[Any, Any], prompts))
        return dict(enumerate(_rows_of(cast(Mapping[str, Any], prompts))))
    if _is_row(prompts) or (isinstance(prompts, Tensor | np.ndarray) and len(prompts.shape) == 1):
        return {0: prompts}
    if isinstance(prompts, str) or not isinstance(prompts, Iterable):
        what = "a text" if isinstance(prompts, str) else f"of type {type(prompts).__name__}"
        raise InvalidParameter(f"prompts must be token ids of several prompts, but is {what}.")
    return dict(enumerate(cast(Iterable[Any], prompts)))


def inputs_beside(prompt: object, known: Collection[str]) -> dict[str, Any]:
    """Return what a processor made of one prompt beside its tokens, such as images, of the inputs that are known."""
    if not isinstance(prompt, Mapping) or IDS not in prompt:
        return {}
    given = cast(Mapping[str, Any], prompt)
    mask = None if given.get(MASK) is None else torch.as_tensor(_listed(given[MASK])).bool()
    cut = {name: value for name, value in given.items() if name in known}
    for name in BY_TOKEN:
        if mask is not None and isinstance(cut.get(name), Tensor):
            cut[name] = cut[name][mask.to(cut[name].device)].unsqueeze(0)
    return cut


def one_row(prompt: object, known: Collection[str] = ()) -> object:
    """Return one prompt as a flat row, if it is one row inside of a list or tensor, or what a tokenizer returned.

    What a processor made beside tokens of the inputs that are `known` is left to `inputs_beside`.
    """
    if isinstance(prompt, Mapping) and IDS in prompt:
        text = {name: value for name, value in cast(Mapping[str, Any], prompt).items() if name not in known}
        rows = _rows_of(text)
        if len(rows) != 1:
            raise InvalidParameter(
                f"A prompt must be one row of token ids, but is a mapping of {len(rows)} rows; give one for each."
            )
        return rows[0]
    if isinstance(prompt, Tensor | np.ndarray):
        return prompt[0] if len(prompt.shape) == 2 and prompt.shape[0] == 1 else prompt
    if isinstance(prompt, list) and len(prompt) == 1 and _is_row(prompt[0]):
        return cast(list[Any], prompt)[0]
    return prompt


def _rows_of(encoded: Mapping[str, Any]) -> list[Any]:
    """Return the rows of what a tokenizer returned, without what the mask leaves out."""
    others = sorted(str(name) for name in encoded.keys() - {IDS, MASK})
    if others:
        if others[0] in BY_TOKEN:
            raise InvalidParameter(
                f"The tokenizer returned {others[0]} too, which generate_many does not take: pass its input_ids and "
                "attention_mask."
            )
        raise InvalidParameter(
            f"There is {others[0]} for all prompts together, which generate_many does not take apart: give every "
            "prompt by itself, as a mapping of what belongs to it, or its input_ids and attention_mask alone."
        )
    rows, masks = _listed(encoded[IDS]), _listed(encoded.get(MASK))
    if masks is None or not isinstance(rows, list):
        return rows if isinstance(rows, list) else [rows]
    try:
        return [[token for token, kept in zip(*both, strict=True) if kept] for both in zip(rows, masks, strict=True)]
    except (TypeError, ValueError):
        raise InvalidParameter(
            "attention_mask must have the shape of input_ids, with 1 for a token and 0 for padding."
        ) from None


def _listed(value: Any) -> Any:
    """Return ids or a mask as a list of lists, if it can be one."""
    if isinstance(value, Tensor | np.ndarray):
        value = value.tolist()
    return [value] if _is_row(value) else value


def _as_rows(value: Any) -> Any:
    """Return a tokenizer's list or array as a tensor of rows; everything else as it is."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if not isinstance(value, list):
        return value
    try:
        rows = torch.tensor(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # rows of different lengths, or no numbers
        raise InvalidParameter(
            "The tokenizer's rows cannot be put into one tensor; call it with return_tensors='pt' and padding=True."
        ) from None
    return rows.unsqueeze(0) if rows.dim() == 1 else rows


def _holds_ids(value: object) -> bool:
    """Tell whether a value is a list of whole numbers, or of such lists: what a tokenizer makes without tensors."""
    return isinstance(value, list) and bool(value) and (_is_row(value) or all(map(_is_row, cast(list[Any], value))))


def _is_row(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(one) is int for one in cast(list[Any], value))
