"""Loading models and tokenizers, by folder or hub name, and the model pair that ships with the package."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from polydraft.errors import CheckpointError, InvalidParameter, UnsupportedModel, VocabularyMismatch, shown
from polydraft.fetched import SHIPPED, is_derived
from polydraft.models.anatomy import pack_linear_layers
from polydraft.models.checkpoints.folders import (
    Source,
    check_tokenizer_files,
    check_weights,
    find,
    is_gguf,
    read_config,
)
from polydraft.models.checkpoints.gguf import alone, check_gguf, unpacked
from polydraft.models.checkpoints.placing import device_named, precision_named
from polydraft.models.checkpoints.silence import held_back, reason
from polydraft.models.checks.layout import context_of
from polydraft.models.checks.supported import check_architecture, chooses, remembers, say_if_tuned
from polydraft.models.derived import check_word, derived, in_few_bits
from polydraft.models.distributed.elsewhere import HOME
from polydraft.models.distributed.mirrored import follow
from polydraft.models.distributed.ranks import Ranks, gathered, on_this_machine
from polydraft.models.distributed.splitting import TargetSplit, check_shared
from polydraft.models.fused.few_bits import KINDS
from polydraft.models.hugging_face import HuggingFaceModel

MOST_PADDING = 1024
PLACE = "polydraft_compared"
FOREIGN_CODE = "contains custom code"
"""What transformers says when a folder's code would have to be run."""


HEADS = {"smollm2": SHIPPED["smollm2-head"]}
"""Draft heads that ship with the package, for targets that `polydraft fetch` brings, by their words."""


@dataclass(frozen=True)
class Planned:
    """What a model's configuration says before its weights are read.

    Args:
        layers: how many layers it has; None of one with an encoder.
        context: how many tokens its longest text has.
        width: how wide its states are; None where that is not said.
        is_quantised: whether its weights have few bits already.
        encodes: whether it is an encoder-decoder.
        remembers: whether layers remember in states, not by keys.
        chooses: whether layers choose what they attend to, by keys of their own.
    """

    layers: int | None
    context: int
    width: int | None
    is_quantised: bool
    encodes: bool = False
    remembers: bool = False
    chooses: bool = False


@dataclass(frozen=True, eq=False)
class Pair:
    """A target, what drafts for it, and their tokenizer.

    Args:
        target: the target.
        draft: a draft model with the same tokens, or the drafter of a head; None for neither.
        tokenizer: the tokenizer of both.
    """

    target: PreTrainedModel
    draft: Any
    tokenizer: PreTrainedTokenizerBase


def load(
    target: str | Path,
    draft: str | Path | None = None,
    *,
    dtype: str | torch.dtype = "auto",
    device: str = "auto",
    weights: str | None = None,
    parallel: int | str | None = None,
    draft_device: str | None = None,
) -> Pair:
    """Load a target and, if given, a draft model, from folders, GGUF files or hub names.

    "smollm2" is what `polydraft fetch smollm2` brought; "pair" and "pair-draft" are the models that ship. A
    folder goes before a hub name. The hub is asked once whether it has the name; without a connection its cache is
    used. Code in a model folder is never run. What transformers has to say about a model is said if it was loaded; if
    not, the error says it in one sentence.

    Args:
        target: folder, GGUF file or hub name of the target; or "smollm2".
        draft: the same of the draft model; or "self:int8", "self:int4", "self:skip=12-19" (layers) or
            "self:int8,skip=12-19" for one that is made of the target.
        dtype: "auto" (the checkpoint's own on a GPU; on a CPU bfloat16 where the checkpoint has it and the processor
            multiplies it, else single precision), or a torch name such as "bfloat16".
        device: "auto" (a GPU if there is one), "cpu", "cuda", "cuda:1", ...
        weights: "int8" or "int4" rounds the target's weights to so many bits, on a CPU: another target, whose own law
            texts then have; None leaves them.
        parallel: over how many ranks the target lies (`TargetSplit.named`); the draft model is whole, on rank 0. Rank 0
            starts the others, unless torchrun has: then this returns on rank 0 alone, and the others leave when that
            ends. None for one process.
        draft_device: where the draft model lies, as `device`; None for beside the target.

    Raises:
        CheckpointError: a folder or file is missing or damaged, nothing was fetched, the hub does not give a model of
            that name, or the dtype or device is unknown.
        RankLost: a process that was to hold a part of the target has ended; why.
        MissingExtra: a GGUF file is named, and the package that reads it is not installed.
        InvalidParameter: `weights` is no such word, or the device is no CPU.
        UnsupportedModel: a model that cannot score token trees, that needs code of its own, or whose weights cannot
            have so few bits.
        VocabularyMismatch: the two tokenizers differ.
    """
    place = device_named(device)
    precision = precision_named(dtype, place)
    _check_weights_word(weights, place)
    if is_derived(draft):
        check_word(str(draft))
    sharing = None if parallel is None else TargetSplit.named(parallel)
    if sharing is not None:
        check_shared(weights=weights, draft=draft, device=device)
    with held_back():
        first = _checked(target)
        second = None if draft is None or is_derived(draft) else _checked(draft)
        tokenizer = _tokenizer(first)
        if second is not None:
            check_same_tokens(tokenizer, _tokenizer(second), str(target), str(draft))
        large = (
            _model(first, precision, place, weights)
            if sharing is None
            else _shared(first, str(target), dtype, precision, place, sharing)
        )
        say_if_tuned(large, str(target))
        beside = large.device if draft_device is None else device_named(draft_device)
        small = None if second is None else _model(second, precision_named(dtype, beside), beside)
    if is_derived(draft):
        return Pair(large, derived(large, str(draft)), tokenizer)
    if small is not None:
        small.__dict__[PLACE] = large.name_or_path
        if beside != large.device:
            small.__dict__[HOME] = large.device
    return Pair(large, small, tokenizer)


def load_pair(*, dtype: str | torch.dtype = "auto", device: str = "auto", weights: str | None = None) -> Pair:
    """Load the model pair that ships with the package: small Python-code models for demos, tests and first steps."""
    return load("pair", "pair-draft", dtype=dtype, device=device, weights=weights)


def embedded_head() -> Path:
    """Return the folder of the draft head that ships with the package, for the embedded pair's target."""
    return SHIPPED["pair-head"]


def shipped_head(target: object) -> Path | None:
    """Return the folder of the draft head that ships with the package for a target of that name; None for none."""
    return HEADS.get(target) if isinstance(target, str) else None


def save(pair: Pair, folder: Path) -> None:
    """Save a target and its tokenizer as a model folder.

    Raises:
        CheckpointError: the files cannot be written; why.
    """
    try:
        with held_back():
            pair.target.save_pretrained(folder)
            pair.tokenizer.save_pretrained(folder)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"The model cannot be saved in {folder}: {reason(error)}.") from error


def load_draft(name: str | Path, like: PreTrainedModel) -> PreTrainedModel:
    """Load a draft model for a target that is there already, onto its device.

    Its precision is what `load` gives it by "auto"; beside a target in double precision it has double precision.

    Args:
        name: folder, GGUF file or hub name of the draft model, or what `load` knows beside.
        like: the target.

    Raises:
        CheckpointError: a folder is missing or damaged, or the hub does not give a model of that name.
        UnsupportedModel: a model that cannot score token trees, or that needs code of its own.
        VocabularyMismatch: its tokens are not the target's, as far as `check_same_source` can tell.
    """
    if is_derived(name):
        return derived(like, str(name))
    precision = like.dtype if like.dtype == torch.float64 else precision_named("auto", like.device)
    with held_back():
        draft = _model(_checked(name), precision, like.device)
    check_same_source(like, draft)
    return draft


def check_same_source(target: nn.Module, draft: nn.Module) -> None:
    """Check that two models that were loaded by transformers have the same tokens.

    A model knows the folder or hub name that it came from, not its tokens. Where the tokenizers of both are found
    there, or in the hub's cache, they are compared, once for a draft model and a target; the hub itself is not asked.
    Where one is not found, only the sizes of the vocabularies can be compared, which is left to the drafter.

    Raises:
        VocabularyMismatch: a token id stands for different tokens.
    """
    names = [str(getattr(one, "name_or_path", "") or "") for one in (target, draft)]
    if not all(names) or names[0] == names[1] or draft.__dict__.get(PLACE) == names[0]:
        return
    tokenizers = [tokenizer_of(one) for one in (target, draft)]
    if tokenizers[0] is not None and tokenizers[1] is not None:
        check_same_tokens(tokenizers[0], tokenizers[1], *names)
    draft.__dict__[PLACE] = names[0]


def check_same_tokens(
    target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase, target_name: str, draft_name: str
) -> None:
    """Check that every token id means the same to both models.

    Raises:
        VocabularyMismatch: an id stands for different tokens; the text shows the first one, and how many there are.
    """
    differing = [*differing_tokens(target, draft)]
    if differing:
        index, token, other = differing[0]
        raise VocabularyMismatch(
            f"{target_name} and {draft_name} have different tokenizers: id {index} is {token!r} in the one and "
            f"{other!r} in the other, and {len(differing)} tokens differ; take a draft model of the same family."
        )
    check_same_size(len(target), len(draft))


def differing_tokens(one: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> Iterator[tuple[int, str, str]]:
    """Yield, in order, the ids that stand for different tokens of two tokenizers, with both tokens."""
    theirs = {index: token for token, index in other.get_vocab().items()}
    for token, index in sorted(one.get_vocab().items(), key=lambda item: item[1]):
        if theirs.get(index, token) != token:
            yield index, token, theirs[index]


def check_same_size(target_size: int, draft_size: int) -> None:
    """Check that two vocabularies differ in size by padding at most.

    Raises:
        VocabularyMismatch: they differ by more than 1024 tokens.
    """
    if abs(target_size - draft_size) > MOST_PADDING:
        raise VocabularyMismatch(
            f"The target has {target_size} tokens and the draft model {draft_size}: they do not share a tokenizer."
        )


def _checked(name: object) -> Source:
    """Find a model and check what can be seen of it before it is loaded: the kind first, since damage matters less."""
    source = find(name)
    if source.gguf:
        check_gguf(Path(source.path) / source.gguf)
    else:
        read_config(source)
    try:
        config = _config(source)
        built = _kind(config)[1]
    except Exception as error:
        place = source.name if source.gguf else f"config.json in {source.name}"
        raise CheckpointError(f"{place} is damaged: {reason(error)}.") from error
    kind = config.model_type
    if built is None:
        raise UnsupportedModel(f"{source.name} is a model ({kind}) that predicts no next token; take a causal one.")
    check_architecture(built, config, f"{source.name} ({built.__name__})")
    if not source.gguf:
        check_weights(source)
    return source


def _config(source: Source) -> PreTrainedConfig:
    with alone(source.path, source.gguf) as path:
        return AutoConfig.from_pretrained(path, **source.arguments)


def planned(name: object) -> Planned:
    """Return what can be known of a model without its weights.

    Raises:
        CheckpointError: the model is missing or damaged.
        UnsupportedModel: it is one that cannot verify drafts.
    """
    with held_back():
        config = _config(_checked(name))
    own = config.get_text_config(decoder=True)
    layers = None if config.is_encoder_decoder else getattr(own, "num_hidden_layers", None)
    is_quantised = getattr(config, "quantization_config", None) is not None
    encodes = bool(config.is_encoder_decoder)
    size = (layers, context_of(own), getattr(own, "hidden_size", None))
    return Planned(*size, is_quantised, encodes, not encodes and remembers(own), not encodes and chooses(own))


def _kind(config: PreTrainedConfig) -> tuple[Any, type | None]:
    """Return the door through which transformers loads a model that writes text, and its class; None if it writes none.

    What a decoder's configuration can be loaded as comes before what reads images too, but for encoder-decoders, whose
    decoders are registered as well.
    """
    causal = (AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING)
    encoding = (
        (AutoModelForSeq2SeqLM, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING),
        (AutoModelForSpeechSeq2Seq, MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING),
    )
    seeing = (AutoModelForImageTextToText, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING)
    for door, known in (*(encoding if config.is_encoder_decoder else (causal,)), seeing):
        built = known.get(type(config), None)
        if built is not None:
            return door, cast(type, built[0] if isinstance(built, tuple) else built)
    return causal[0], None


def _tokenizer(source: Source) -> PreTrainedTokenizerBase:
    if not source.gguf:
        check_tokenizer_files(source)
    try:
        with alone(source.path, source.gguf) as path:
            found = AutoTokenizer.from_pretrained(path, **source.arguments)
    except Exception as error:
        if FOREIGN_CODE in str(error):
            raise UnsupportedModel(
                f"The tokenizer in {source.name} needs code of its own (auto_map in its tokenizer_config.json), and "
                "polydraft runs no code from a model folder."
            ) from error
        raise CheckpointError(f"No tokenizer can be loaded from {source.name}: {reason(error)}.") from error
    found.name_or_path = source.path
    return found


def load_tokenizer(name: str | Path | None = None) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a target without its weights; None is the embedded pair's.

    Raises:
        CheckpointError: the model's folder or file is missing or damaged, or the hub does not give it.
        UnsupportedModel: a model that cannot score token trees, or that needs code of its own.
    """
    with held_back():
        return _tokenizer(_checked("pair" if name is None else name))


def tokenizer_of(model: nn.Module) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer that lies where a model came from, on this machine; None if none can be the model's."""
    if not str(getattr(model, "name_or_path", "") or ""):
        return None
    config, name = cast(PreTrainedModel, model).config, Path(str(cast(PreTrainedModel, model).name_or_path))
    place, file = (str(name.parent), name.name) if is_gguf(name) else (str(name), "")
    told = {"gguf_file": file} if file else {}
    with held_back():
        try:
            with alone(place, file) as path:
                found = AutoTokenizer.from_pretrained(path, trust_remote_code=False, local_files_only=True, **told)
        except (OSError, ValueError, TypeError, AttributeError, KeyError, ImportError):
            return None
    return found if len(found) <= config.get_text_config().vocab_size + MOST_PADDING else None


def _check_weights_word(weights: object, device: torch.device) -> None:
    if weights is None:
        return
    if weights not in KINDS:
        raise InvalidParameter(f"weights must be None, {' or '.join(map(repr, KINDS))}, but is {shown(weights)}.")
    if device.type != "cpu":
        raise InvalidParameter(f"Weights of few bits are for CPUs, but the device is {device}; leave them out.")


def _shared(
    source: Source,
    name: str,
    dtype: str | torch.dtype,
    precision: torch.dtype | str,
    device: torch.device,
    sharing: TargetSplit,
) -> PreTrainedModel:
    """Load a target over several ranks: this process's part, and the others' in theirs.

    Raises:
        SystemExit: this is not rank 0, and that has ended.
    """
    if source.gguf:
        raise InvalidParameter(f"{name} is a GGUF file, which is loaded whole; leave parallel out.")
    config = AutoConfig.from_pretrained(source.path, **source.arguments)
    sharing.check(config, name)
    if remembers(config):
        raise UnsupportedModel(f"{name} remembers in states, which are not shared among ranks; leave parallel out.")
    told = {"target": name, "dtype": str(dtype).removeprefix("torch."), "parallel": str(sharing)}
    ranks = gathered(sharing.ranks, told)
    model = _part(ranks, source, precision, device, sharing)
    if model is None:
        raise SystemExit(0)
    return model


def load_part(ranks: Ranks, target: str, dtype: str, sharing: TargetSplit) -> None:
    """Load the part of a rank that is not the first, and follow the first until it ends; errors are those of `load`."""
    place = device_named("auto")
    with held_back():
        _part(ranks, _checked(target), precision_named(dtype, place), place, sharing)


def _part(
    ranks: Ranks, source: Source, precision: torch.dtype | str, device: torch.device, sharing: TargetSplit
) -> PreTrainedModel | None:
    """Load this rank's part and try it, as all ranks do at once; return it on rank 0, None on others, at the end."""
    with on_this_machine(ranks):
        try:
            ranks.meet()
            model = _model(source, precision, device, sharing=sharing)
            ranks.guard(model)
            part = HuggingFaceModel(model, fused=False)
            if not part.facts.branches:
                raise UnsupportedModel(f"{source.name} scores chains only, so it lies on one rank; leave parallel out.")
        except BaseException as error:
            ranks.give_up(error)
            raise
    if ranks.rank:
        follow(part, ranks.receive)
        ranks.leave()
        return None
    ranks.met(model)
    return model


def _model(
    source: Source,
    precision: torch.dtype | str,
    device: torch.device,
    weights: str | None = None,
    sharing: TargetSplit | None = None,
) -> PreTrainedModel:
    try:
        with alone(source.path, source.gguf) as path:
            config = AutoConfig.from_pretrained(path, **source.arguments)
            door, built = _kind(config)
            extra = unpacked() if source.gguf else {}
            if sharing is not None:
                extra |= sharing.arguments(config, cast(Any, built).base_model_prefix)
            if precision == "auto" and device.type == "cpu":
                precision = torch.bfloat16 if config.dtype == torch.bfloat16 else torch.float32
            loaded = door.from_pretrained(
                path,
                dtype=precision,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                **source.arguments,
                **extra,
            )
    except Exception as error:
        raise CheckpointError(f"No model can be loaded from {source.name}: {reason(error)}.") from error
    model, report = cast(tuple[PreTrainedModel, dict[str, Any]], loaded)
    absent = {*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])}
    if absent:
        raise CheckpointError(f"The model in {source.name} is damaged: {min(absent)} is missing or has another shape.")
    if sharing is not None:
        return model.eval()
    try:
        model.to(device).eval()  # pyright: ignore[reportArgumentType]  the stub of `to` counts self twice
    except RuntimeError as error:
        raise CheckpointError(f"The model in {source.name} does not go onto {device}: {reason(error)}.") from error
    if source.gguf:
        model.name_or_path = str(Path(source.path) / source.gguf)
    if weights is not None:
        return in_few_bits(model, weights)
    if HuggingFaceModel(model).fused is None:
        pack_linear_layers(model)
        HuggingFaceModel(model)
    return model
