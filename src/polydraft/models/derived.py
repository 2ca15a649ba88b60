"""Models made of another one: with weights of eight or four bits, or without some of its layers."""

import copy
from collections.abc import Callable, Collection, Hashable
from functools import partial
from types import FunctionType
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedModel

from polydraft.errors import InvalidParameter, UnsupportedModel, shown
from polydraft.fetched import DERIVED
from polydraft.models.anatomy import function_of
from polydraft.models.checks.layout import is_offloaded
from polydraft.models.fused.few_bits import GROUP, KINDS, FewBits, Int4Linear, Int8Linear
from polydraft.models.language_model import WHOLE, LayerSet
from polydraft.models.layers.layer_words import AUTO, EXIT, PARTS, SKIP, layer_words, with_layer_word

NUMBER = "layer_idx"


def without_layers(model: PreTrainedModel, skipped: Collection[int]) -> PreTrainedModel:
    """Return a copy without these layers, counted from 0; all weights are shared.

    Source: Zhang et al., "Draft & Verify", arXiv 2309.08168, who skip sublayers; here whole layers, in a model of its
    own with keys of its own.

    Raises:
        InvalidParameter: the model has no such layer, or none would be left.
        UnsupportedModel: its layers are not in one list.
    """
    count = model.config.get_text_config().num_hidden_layers
    wrong = [number for number in skipped if not 0 <= number < count]
    if wrong or len({*skipped}) >= count:
        raise InvalidParameter(
            f"Layers to skip lie between 0 and {count - 1}, and one must be left: {sorted(skipped)}."
        )
    made = sharing_copy(model)
    lists = [name for name, one in made.named_modules() if isinstance(one, nn.ModuleList) and len(one) == count]
    if len(lists) != 1:
        raise UnsupportedModel(f"{type(model).__name__} does not keep its layers in one list, so none can be skipped.")
    layers = [layer for number, layer in enumerate(made.get_submodule(lists[0]).children()) if number not in skipped]
    made.set_submodule(lists[0], nn.ModuleList(layers))
    for number, layer in enumerate(layers):
        for part in layer.modules():
            if NUMBER in vars(part):
                setattr(part, NUMBER, number)
    config = made.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    config.num_hidden_layers = len(layers)
    if kinds:
        config.layer_types = [kind for number, kind in enumerate(kinds) if number not in skipped]
    return made


_MADE = WeakKeyDictionary[PreTrainedModel, dict[Hashable, tuple[object, Any]]]()
Made = TypeVar("Made")


def kept(model: PreTrainedModel, name: Hashable, make: Callable[[], Made], function: object = None) -> Made:
    """Return what is made of a model under a name; it is made once, and anew when the model has changed.

    Args:
        model: the model.
        name: what is made is told apart by it.
        make: makes it.
        function: what the model was when who asks looked at it (`function_of`); None to look at its weights now.
    """
    function, known = function or function_of(model), _MADE.setdefault(model, {})
    if name not in known or known[name][0] != function:
        known[name] = (function, make())
    return known[name][1]


Model = TypeVar("Model", bound=nn.Module)


def sharing_copy(model: Model) -> Model:
    """Return a copy whose modules without parts are the model's own; the modules that hold them are new.

    So layers may be left out of the copy, renumbered or replaced, and no memory is spent on weights. What polydraft has
    found out about the model stays with the model.

    Raises:
        UnsupportedModel: something on the model cannot be copied, or its passes do not run its own modules.
    """
    parts = [one for one in model.modules() if not any(True for _ in one.children())]
    leaves = {*map(id, parts)}
    if any(isinstance(vars(one).get("forward"), FunctionType) for one in model.modules() if id(one) not in leaves):
        raise UnsupportedModel(
            f"No draft can be made of this {type(model).__name__}, since the forward of a part was replaced by a "
            "function that runs the original, as torch.compile(model.forward) does; take another drafter."
        )
    shared = {id(one): one for one in [*parts, *model.parameters(), *model.buffers()]}
    try:
        made = copy.deepcopy(model, memo=shared)
    except Exception as error:  # what users hang onto a model may refuse to be copied in any way
        raise UnsupportedModel(
            f"No draft can be made of this {type(model).__name__}, since something that hangs on it, such as a hook, "
            f"cannot be copied: {type(error).__name__}: {error}."
        ) from error
    for name in [name for name in vars(made) if name.startswith("polydraft_")]:
        delattr(made, name)
    return made


@torch.inference_mode(False)
@torch.no_grad()
def in_few_bits(model: PreTrainedModel, word: str) -> PreTrainedModel:
    """Return a copy with weights of few bits in all linear layers; the rest is shared.

    The head has eight bits at least: four change the first choice too often.

    Args:
        model: the model.
        word: `int8` or `int4`.

    Raises:
        UnsupportedModel: the model is not on a CPU, for which the kernels are made, or its weights are elsewhere
            between passes, or its layers are of other kinds, or of sizes that four bits do not fit.
    """
    name, head = type(model).__name__, cast(Any, model).get_output_embeddings()
    bits = f"{WORDS[KINDS[word].bits]} bits"
    if is_offloaded(model):
        raise UnsupportedModel(
            f"Weights of this {name} are offloaded, so none of {bits} can be made; load the model on one device."
        )
    is_quantised = getattr(model.config, "quantization_config", None) is not None
    check_roundable(word, name, model.device, is_quantised=is_quantised)
    if not any(isinstance(one, nn.Linear) and one is not head for one in model.modules()):
        raise UnsupportedModel(f"{name} has no linear layers of torch's that could have {bits}.")
    made = sharing_copy(model)
    for place, module in list(made.named_modules()):
        if isinstance(module, nn.Linear) and not isinstance(module, FewBits):
            kind = Int8Linear if module is head else KINDS[word]
            if kind is Int4Linear and module.in_features % GROUP:
                raise UnsupportedModel(
                    f"Rows of {place} have {module.in_features} weights, and int4 takes {GROUP} at a time; take int8."
                )
            made.set_submodule(place, kind(module))
    made.save_pretrained = partial(_refuse_saving, word)
    return made


def check_roundable(word: str, name: str, device: torch.device, *, is_quantised: bool) -> None:
    """Check what is known of a model before its weights are read, if these are to have few bits.

    Raises:
        UnsupportedModel: they have already, or the model is not for a CPU.
    """
    if is_quantised:
        raise UnsupportedModel(f"The weights of this {name} are quantised already, so they cannot become {word}.")
    if device.type != "cpu":
        bits = f"{WORDS[KINDS[word].bits]} bits"
        raise UnsupportedModel(f"Weights of {bits} are made for CPUs, but the model is on {device}.")


def _refuse_saving(word: str, *_: object, **__: object) -> None:
    raise UnsupportedModel(
        f"Weights that are rounded to {word} are not saved; save the model that they were made of, and load that with "
        f'weights="{word}".'
    )


WORDS = {8: "eight", 4: "four"}


def read_word(name: str) -> tuple[str, LayerSet, dict[str, str]]:
    """Return what a word behind "self:" says: weights, empty for the model's own; layers; and other parts by name.

    Raises:
        InvalidParameter: it says something that cannot be.
    """
    bits, layers, others = "", WHOLE, dict[str, str]()
    for part in name.removeprefix(DERIVED).split(","):
        word, _, value = part.partition("=")
        if part in KINDS and not bits:
            bits = part
        elif value and (word in PARTS or word == EXIT) and (word, value) != (SKIP, AUTO):
            layers = with_layer_word(layers, word, value)
        elif value and word not in others:
            others[word] = value
        else:
            raise refuse_word(name)
    return bits, layers, others


def word_of(weights: str, layers: LayerSet, *others: str) -> str:
    """Return the word that says so, with other parts behind."""
    return DERIVED + ",".join([*filter(None, [weights]), *layer_words(layers), *others])


def refuse_word(name: str) -> InvalidParameter:
    """Return the error for a word that means nothing."""
    return InvalidParameter(
        f"The draft {shown(name)} is not known: one made of the target is self:int8, self:int4, self:skip=12-19 "
        "(layers, counted from 0), self:exit=8, self:keys=recent:16+240, or several of these, as self:int8,skip=12-19."
    )


def check_word(name: str) -> tuple[str, frozenset[int]]:
    """Return how few bits the weights of a model of its own have, empty for all, and which layers are skipped.

    Raises:
        InvalidParameter: the name says something else.
    """
    bits, layers, others = read_word(name)
    if others or layers.exit is not None or layers.skipped_attention != layers.skipped_mlp:
        raise InvalidParameter(
            f"{shown(name)} drafts over the target's own keys, and a model of its own is needed here; take fewer bits "
            "or skip whole layers, as self:int8,skip=12-19."
        )
    return bits, layers.skipped_mlp


def derived(target: PreTrainedModel, name: str) -> PreTrainedModel:
    """Return the draft model that a name means, made of the target; the same one as long as its weights are.

    Raises:
        InvalidParameter: the name says something else, or skips layers that are not there.
        UnsupportedModel: it cannot be made of this target.
    """
    bits, skipped = check_word(name)

    def make() -> PreTrainedModel:
        made = without_layers(target, skipped) if skipped else target
        return in_few_bits(made, bits) if bits else made

    return kept(target, name, make)
