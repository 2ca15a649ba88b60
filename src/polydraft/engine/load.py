"""Loading a target with what drafts for it: another model, or a head that was trained on its hidden states."""

import warnings
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from polydraft.catalogue import (
    MANY,
    StackPart,
    WrittenStack,
    drafter_line,
    is_drafter_word,
    meant_drafter,
    parse_stack,
)
from polydraft.drafters import (
    BoostedDrafter,
    ByDepthDrafter,
    Drafter,
    DraftRequest,
    NestedDrafter,
    SelfDrafter,
    Session,
    SkippingDrafter,
    View,
    boosted_members,
    check_adapter,
    check_levels,
    check_target,
    drafter_of,
    has_head_inside,
    has_modules,
    is_boosted,
    is_head,
    load_adapter,
    load_head,
    load_modules,
    model_defaults,
    own_riders,
)
from polydraft.errors import (
    CheckpointError,
    InvalidParameter,
    TargetMismatch,
    UnsupportedModel,
    VocabularyMismatch,
    lowered,
    shown,
)
from polydraft.fetched import MODULES, is_derived, is_stack
from polydraft.models import (
    HuggingFaceModel,
    Pair,
    cheapest,
    check_roundable,
    check_same_tokens,
    device_named,
    is_known,
    load_draft,
    load_tokenizer,
    planned,
    shipped_head,
    sublayers,
)
from polydraft.models import load as load_pair_of_models
from polydraft.probs import Noise, SamplingParams
from polydraft.reading import Reader, Text
from polydraft.schemes import IID, Given
from polydraft.trees import MENDABLE, Chain, TreePolicy, as_chain, in_pieces
from polydraft.verifiers import BlockVerification, NaiveMatch, TopDown, TreeVerifier


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
    """Load a target and, if given, a draft model or a draft head, from folders, GGUF files or hub names.

    "smollm2" is what `polydraft fetch smollm2` brought; if no draft is named, the head that ships for it drafts,
    and so does the head that is inside a model's own folder (Medusa-2). A folder goes before a hub name. The hub is
    asked once whether it has the name; without a connection its cache is used. If no draft is named, a target that
    was tuned to fill in masks (SPACE) drafts from those that its config.json names. Code in a model folder is never
    run. What transformers has to say about a model is said if it was loaded; if not, the error says it in one
    sentence.

    Args:
        target: folder, GGUF file or hub name of the target; or "smollm2", or "pair" for the one that ships.
        draft: the same of the draft model ("pair-draft"), or of a draft head ("pair-head", "smollm2-head"); or
            "self:int8", "self:int4", "self:skip=12-19" (layers), "self:exit=8" or several of these, for the target
            itself in a view over its own keys (`View.named`); or "mtp" for the MTP modules in the target's own
            checkpoint, of which a warning tells where there are some and no draft is named; or a stack of such and of
            drafters from text: "pair-draft < ngram", where the second drafts for the first, "self:int8@2 ngram@6", two
            tokens of the one and then six of the other (docs/choosing.md).
        dtype: "auto" (the checkpoint's own on a GPU; on a CPU bfloat16 where the checkpoint has it and the processor
            multiplies it, else single precision), or a torch name such as "bfloat16".
        device: "auto" (a GPU if there is one), "cpu", "cuda", "cuda:1", ...
        weights: "int8" or "int4" rounds the target's weights to so many bits, on a CPU: another target, whose own law
            texts then have; None leaves them.
        parallel: over how many ranks the target lies, or "mlp:2" to leave attention whole on each; None for one process
            (docs/parallel.md). What drafts is whole, on rank 0; heads and the target itself in part do not draft then.
        draft_device: where the draft model lies, as `device`; None for beside the target. Heads and what is made of the
            target are beside it.

    Returns:
        the models; `draft` is a model, or the drafter of a head. Of several ranks that torchrun has started the first
        alone returns; the others leave when that ends.

    Raises:
        CheckpointError: a folder or file is missing or damaged, nothing was fetched, the hub does not give a model of
            that name, a draft model for masks names none that can be one, or the dtype or device is unknown.
        InvalidParameter: there are not so many ranks.
        MissingExtra: a GGUF file is named, and the package that reads it is not installed.
        RankLost: a process that was to hold a part of the target has ended.
        TargetMismatch: a head for another target.
        UnsupportedModel: a model that cannot score token trees, or that needs code of its own.
        VocabularyMismatch: the two tokenizers differ, or a head has tokens that the target does not have.
    """
    refuse_drafters(draft)
    placed = {"dtype": dtype, "device": device, "weights": weights}
    if draft_device is not None:
        placed |= {"draft_device": _own_device(draft, draft_device)}
    if parallel is not None:
        return _over_ranks(target, draft, parallel, placed)
    if is_stack(draft) or is_derived(draft):
        _check_words(str(draft), target, device)  # before weights are read, which takes longer
        pair = load_pair_of_models(target, **placed)
        return replace(pair, draft=draft_for(str(draft), pair.target))
    if is_boosted(draft):
        pair = load_pair_of_models(target, **placed)
        return replace(pair, draft=draft_for(cast(str, draft), pair.target))
    own = shipped_head(target) if draft is None else None
    if own is not None:
        return with_head(load_pair_of_models(target, **placed), own)
    if draft is None and has_head_inside(target):
        draft = target
    if draft is not None and _names_head(draft):
        pair = load_pair_of_models(target, **placed)
        return replace(pair, draft=head_for(draft, pair.target))
    pair = load_pair_of_models(target, draft, **placed)
    return replace(pair, draft=_of_target(target, pair.target) if draft is None else _checked(pair.draft))


def _own_device(draft: Any, place: str) -> str:
    """Return where a draft model is to lie.

    Raises:
        InvalidParameter: what drafts is no model of its own, so that it lies beside the target.
    """
    if draft is None or is_stack(draft) or is_derived(draft) or _names_head(draft):
        named = "none is named" if draft is None else f"{shown(str(draft))} is none"
        raise InvalidParameter(f"draft_device={place!r} is for a draft model, and {named}; leave it out.")
    return place


def _over_ranks(target: str | Path, draft: Any, parallel: int | str, placed: dict[str, Any]) -> Pair:
    """Load a target over several ranks with a draft model, or a stack of what reads none of its states.

    Raises:
        InvalidParameter: a head is named, or one is inside the target: it reads the target's states.
    """
    if draft is not None and not is_stack(draft) and not is_derived(draft) and _names_head(draft):
        raise InvalidParameter(
            f"{shown(str(draft))} is a draft head, which reads the target's states, and with parallel these are not "
            "handed out; take a draft model, or one that drafts from text, such as ngram."
        )
    if not is_stack(draft):
        return load_pair_of_models(target, draft, **placed, parallel=parallel)
    _check_words(str(draft), target, placed["device"])
    pair = load_pair_of_models(target, **placed, parallel=parallel)
    return replace(pair, draft=draft_for(str(draft), pair.target))


def _check_words(draft: str, target: str | Path, device: str) -> None:
    """Check a view or a stack by its words, by what configurations say, and by tokenizers.

    Raises:
        PolydraftError: it cannot be, or the target or a part cannot be loaded; the text says why.
    """
    words = _words_in(parse_stack(draft)) if is_stack(draft) else [draft]
    views = {word: View.named(word) for word in words if is_derived(word)}
    facts, name = planned(target), repr(str(target))  # there is such a folder or model, however long its name is
    for view in views.values():
        view.check(facts.layers, facts.context)
        view.check_keys(name, remembers=facts.remembers, chooses=facts.chooses)
        if view.weights:
            check_roundable(view.weights, name, device_named(device), is_quantised=facts.is_quantised)
        if view.adapter:
            check_adapter(view.adapter, view.layers.exit, facts.width)
    for word in (one for one in words if one not in views and not _names_head(one)):
        planned(word)
        with suppress(CheckpointError):  # without a tokenizer it is compared by its size, when it is loaded
            check_same_tokens(load_tokenizer(target), load_tokenizer(word), str(target), word)


def _words_in(stack: WrittenStack, above: int = 0) -> list[str]:
    """Return the views and models of a stack, by their words.

    Args:
        stack: the stack.
        above: how many drafters its text is drafted for.

    Raises:
        CheckpointError: a part is a slip of a drafter's word.
        InvalidParameter: there are too many levels, what stands before a < is no model or view, or one drafts nothing.
    """
    check_levels(above + len(stack.levels))
    found, lowest = list[str](), len(stack.levels) - 1
    for level, parts in enumerate(stack.levels):
        for word in (part.drafter for part in parts):
            if isinstance(word, WrittenStack):
                found += _words_in(word, above + level)
            elif level < lowest or not is_drafter_word(word, 0):
                if not is_drafter_word(word, 0):
                    refuse_drafters(word)
                if level < lowest:
                    _check_middle(word)
                found.append(word)
            elif not is_drafter_word(word, 0, proposing=True):
                raise InvalidParameter(f"The drafter {word} drafts nothing, so it cannot stand in a stack.")
    return found


def _check_middle(word: str) -> None:
    """Check that others can draft for a part of a stack: it must be one model, the same for all texts."""
    why = ""
    if is_derived(word):
        view = View.named(word)
        why = "chooses for each text by itself" if view.chooses else "has an adapter" if view.adapter else ""
    elif is_drafter_word(word, 0) or _names_head(word):
        why = "is neither"
    if why:
        raise InvalidParameter(
            "Before each < in a stack must be a model, or one view of the target for all texts, for which others "
            f"draft; {word} {why}."
        )


def _of_target(name: str | Path, target: Any) -> Drafter | None:
    """Return the drafter that a target's own folder tells; None if there is none, and say so if it has modules."""
    if has_modules(target):
        warnings.warn(f"{name} has MTP modules, which draft for it if the draft is {MODULES!r}.", stacklevel=3)
    model = HuggingFaceModel(target)
    drafter = own_riders(model, shown(str(name)))
    if drafter is None or 2 * drafter.needs.riders <= model.context:
        return drafter
    needed = f"{drafter.needs.riders} tokens beside each text, and the context has {model.context}"
    warnings.warn(f"{name} does not draft from its own masks: they need {needed}.", stacklevel=3)
    return None


def _names_head(name: object) -> bool:
    return name == MODULES or is_head(name)


def refuse_drafters(draft: object) -> None:
    """Refuse the word of a drafter, or a slip of one, as the name of a draft model: no hub has models of such names.

    Raises:
        CheckpointError: it is one.
    """
    if not isinstance(draft, str) or "/" in draft or is_derived(draft) or is_known(draft) or is_stack(draft):
        return
    meant = meant_drafter(draft, MANY)
    if meant:
        raise CheckpointError(
            f"There is no model folder {shown(draft)} (did you mean the drafter {meant}? --drafter names it, or "
            "drafter=... in Python)."
        )


def with_head(pair: Pair, folder: Path) -> Pair:
    """Return models with the head that ships for their target; without one if another target bears its name."""
    try:
        return replace(pair, draft=head_for(folder, pair.target))
    except (TargetMismatch, VocabularyMismatch):
        return pair


def load_models(
    target: str | Path,
    draft: str | Path | None,
    *,
    dtype: str | torch.dtype = "auto",
    device: str = "auto",
    weights: str | None = None,
) -> Pair:
    """Load a target and a draft model, for what needs a model of both; arguments are those of `load`.

    Raises:
        InvalidParameter: the draft is a head or a stack; beside that what `load` raises.
    """
    refuse_drafters(draft)
    if is_stack(draft):
        raise InvalidParameter(f"{shown(str(draft))} is a stack of drafters, and a draft model is needed here.")
    if draft is not None and not is_derived(draft) and _names_head(draft):
        raise InvalidParameter(f"{shown(str(draft))} is a draft head, and a draft model is needed here.")
    return load_pair_of_models(target, draft, dtype=dtype, device=device, weights=weights)


def draft_for(name: str | Path, target: nn.Module) -> nn.Module | Drafter:
    """Load a draft model, a head, a view or a stack for a target that is there; names and errors are as of `load`."""
    if is_stack(name):
        stack = parse_stack(str(name))
        _words_in(stack)
        drafter = _stacked(stack, target)
        check_target(drafter, HuggingFaceModel(target))
        return drafter
    if is_derived(name):
        return view_for(str(name), target)
    if _names_head(name):
        return head_for(name, target)
    if is_boosted(name):
        return BoostedDrafter([load_draft(one, cast(Any, target)) for one in boosted_members(name)])
    return _checked(load_draft(name, cast(Any, target)))


def view_for(word: str, target: nn.Module) -> nn.Module | Drafter:
    """Return who drafts by a view of a target that is there already: the target, over its own keys.

    Where it has no such view, as one that scores chains only, it is the draft model that the word means too, which
    keeps keys of its own.

    Raises:
        InvalidParameter: the word means no view, or one of layers that are not there.
        UnsupportedModel: the target has no such view, and the word means no draft model; or that cannot be made of it.
    """
    view = View.named(word)
    if view.chooses:
        return _choosing(view, target)
    if view.adapter:
        return load_adapter(view.adapter, target, view.layers.exit)
    try:
        view.model(HuggingFaceModel(target))
    except UnsupportedModel:
        if not view.is_model:
            raise
        return _checked(load_draft(word, cast(Any, target)))
    return SelfDrafter(view)


def _choosing(view: View, target: nn.Module) -> Drafter:
    """Return who chooses what to skip, after a look at whether this target can be run so."""
    sublayers(HuggingFaceModel(target))
    return SkippingDrafter(view.weights)


WRITTEN = 6
"""The tokens that the upper drafter of a stack writes if that is not said, as in `NestedDrafter`."""


def _stacked(stack: WrittenStack, target: nn.Module) -> Drafter:
    """Return the drafter that a stack means, built from its lowest level upward."""
    *above, lowest = stack.levels
    lone = lowest[0].length if len(lowest) == 1 else None
    members = [_part(one, target) for one in lowest]
    drafters = tuple(drafter_of(one) if isinstance(one, nn.Module) else one for one in members)
    drafter = drafters[0]
    if len(drafters) > 1:
        drafter = ByDepthDrafter(drafters, tuple(one.length or 1 for one in lowest))
    for (part,) in reversed(above):
        middle = _part(part, target)
        middle = HuggingFaceModel(middle) if isinstance(middle, nn.Module) else middle
        verifier, policy = _inside(drafter, lone)
        drafter = NestedDrafter(cast(Any, middle), drafter, verifier, policy, part.length or WRITTEN)
        lone = None
    return drafter


def _part(part: StackPart, target: nn.Module) -> nn.Module | Drafter:
    """Load one part of a stack, as it would be alone: a drafter without a model by its word, else as a draft."""
    name = part.drafter
    if isinstance(name, WrittenStack):
        return _stacked(name, target)
    if is_drafter_word(name, 0):
        return drafter_line(name).named(name)
    refuse_drafters(name)
    return draft_for(name, target)


def _inside(drafter: Drafter, length: int | None) -> tuple[TreeVerifier, TreePolicy]:
    """Return the rule and the trees with which a drafter drafts inside: trees of fixed tokens, else chains as blocks.

    Both are exact at any temperature, which is not known yet.
    """
    usual = drafter.defaults(SamplingParams()) or model_defaults(SamplingParams())
    policy = usual.policy if length is None else Chain(length)
    if usual.scheme == Given():
        return TopDown(NaiveMatch(Given())), policy
    return BlockVerification(), as_chain(policy)


def _checked(draft: nn.Module) -> nn.Module:
    """Return a draft model whose configuration says of masks only what can be (`drafter_of`)."""
    drafter_of(draft)
    return draft


def head_for(name: str | Path, target: nn.Module) -> Drafter:
    """Load a draft head for a target that is there already, onto its device; on a CPU in its cheapest precision.

    Raises:
        CheckpointError: it is missing or damaged, or cannot draft.
        TargetMismatch: it is a head for another target.
        UnsupportedModel: the target cannot score drafts.
        VocabularyMismatch: it has tokens that the target does not have.
    """
    model = HuggingFaceModel(target)
    dtype = cheapest(cast(torch.dtype, target.dtype), model.device)
    own = name == MODULES
    head = load_modules(target, dtype) if own else load_head(name, model.layers, dtype, model.device)
    check_head(head, model)
    return head


def check_head(head: Drafter, target: HuggingFaceModel) -> None:
    """Check that a head can draft for a target, by drafting two tokens behind a text of one token, the target's last.

    Raises:
        CheckpointError: it cannot draft at all.
        TargetMismatch: it was trained for another target.
        VocabularyMismatch: it has tokens that the target does not have.
    """
    token = torch.full((1, 1), target.vocab_size - 1, device=target.device)
    policy = Chain(2)
    text, room = Text(token, torch.ones(1, dtype=torch.int64, device=target.device)), 2 + policy.shape.size
    reader = Reader.new(target, 1, room, head.needs.layers)
    session = Session(SamplingParams(), room, target.vocab_size, reader)
    request = DraftRequest(text, IID(), policy, Noise.from_seed(0, 1), reader)
    try:
        draft, _ = head.draft(head.start(text, session), request)
    except MENDABLE:
        raise
    except Exception as error:  # it would fail at the first step of every text
        raise CheckpointError(f"The head cannot draft for this target: {lowered(error)}") from error
    drafts = [one.draft for one in in_pieces(draft)]
    failure = next((one.failure for one in drafts if one.failure is not None), None)
    if failure is not None:
        raise CheckpointError(f"The head cannot draft for this target: {lowered(failure)}")
    if not all(one.sound is None or bool(one.sound.all()) for one in drafts):
        raise CheckpointError("The head cannot draft for this target: its logits are not usable.")
