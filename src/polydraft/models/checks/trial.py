"""A trial of four tokens: whether a model follows a causal law, and scores a tree, or chains, as it scores the texts.

What a model's class and configuration say is not enough. A BERT without `is_decoder`, or a model with a bidirectional
prefix, would be decoded from another law than its own as soon as it gets our mask; a RoBERTa counts positions from two.
"""

import copy
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from polydraft.errors import PolydraftError, UnsupportedModel
from polydraft.models.anatomy import anatomy_of, chosen_precision
from polydraft.models.checks.crowds import known_crowd, tried_crowd
from polydraft.models.checks.layout import (
    Windows,
    cache_name,
    candidates,
    device_of,
    evaluating,
    for_logits,
    narrowed,
    settings_of,
    twin_of,
)
from polydraft.models.checks.supported import reads_prompts_both_ways
from polydraft.models.fused.few_bits import rounds_short
from polydraft.models.language_model import Cache, LanguageModel
from polydraft.models.sources import decoder_inputs, is_encoder_decoder, stand_in
from polydraft.probs import Noise


def as_chains(door: LanguageModel, paths: Int[Tensor, "2 4"]) -> Float[Tensor, "2 4 V"]:
    """Return the logits of two texts that are read in pieces, as chains are: 1, 2 and 1 tokens of the first, 2 and 2.

    Four passes: a token of both; the second's next, from which the first's state goes back; two of both, in slots that
    are not the same; the first's last. So several tokens and single ones go on from a state and are dropped, from
    nothing and from zeros, in rows that are equally far and in others.
    """
    first = paths[:, :1]
    cache = door.new_cache(2, 8)
    scored, ones = _pass(door, cache, first, [0, 0])
    again, twos = _pass(door, cache, paths[:, 1:2], [1, 1])
    states = None if ones is None else ones.taken(twos, [1])
    cache.begin(states)
    both, threes = _pass(door, cache, torch.stack([paths[0, 1:3], paths[1, 2:4]]), [1, 2])
    cache.begin(threes)
    last, _ = _pass(door, cache, torch.stack([paths[0, 3:4], paths[1, 3:4]]), [3, 4])
    one = torch.cat([scored[0], both[0], last[0]])
    other = torch.cat([scored[1], again[1], both[1]])
    if ones is not None:
        cache.begin(ones.nothing(2))
        other = torch.cat([_pass(door, cache, paths[:, :2], [0, 0])[0][1], other[2:]])
    return torch.stack([one, other])


def one_by_one(door: LanguageModel, paths: Int[Tensor, "2 n"]) -> Float[Tensor, "2 n V"]:
    """Return the logits of two texts that are read token by token."""
    cache = door.new_cache(2, 8)
    tokens = enumerate(paths.split(1, dim=1))
    return torch.cat([_pass(door, cache, token, [place, place])[0] for place, token in tokens], dim=1)


def _pass(
    door: LanguageModel, cache: Cache, tokens: Int[Tensor, "2 w"], starts: list[int]
) -> tuple[Float[Tensor, "2 w V"], Any]:
    """Score tokens behind slots, and return the states that are left."""
    begin = torch.tensor(starts, device=tokens.device)
    places = begin.unsqueeze(-1) + torch.arange(tokens.shape[1], device=tokens.device)
    slots = torch.arange(max(starts) + tokens.shape[1], device=tokens.device)
    mask = slots <= places.unsqueeze(-1)
    logits = door.forward(tokens, places, mask, cache, begin).logits
    return logits.float(), cache.states()


def once_and_singly(
    door: LanguageModel, paths: Int[Tensor, "2 4"]
) -> Iterator[tuple[Float[Tensor, "2 2 V"], Float[Tensor, "2 2 V"]]]:
    """Yield the logits of two tokens read at once and one by one, from the same states; nothing without states.

    For each kind of states these are large noise, so that a model shows at any precision whether it heeds them: some
    read single tokens from their states, and several from nothing.
    """
    cache = door.new_cache(2, 8)
    _, real = _pass(door, cache, paths[:, :2], [0, 0])
    if real is None:
        return
    for kind in real.kinds:
        noise: Any = real.noisy(kind, Noise.from_seed(0, 1).generators[0])
        cache.begin(noise)
        once, _ = _pass(door, cache, paths[:, 2:], [2, 2])
        cache.begin(noise)
        singly = [_pass(door, cache, paths[:, place : place + 1], [place, place])[0] for place in (2, 3)]
        yield once, torch.cat(singly, dim=1)


PLACE = "polydraft_tried"
WIDTH = 4
NARROW = 2
"""Windows are tried with this size, because a text beyond their own would be long."""
NOTICEABLE = 0.3
"""A wrong mask or position moves logits about as far as another token before them does. In one pass earlier logits do
not move at all in any causal model that was tried, in single and in half precision, with and without experts."""
ROUNDING, HALF_ROUNDING = 0.02, 0.1
"""How far two ways to compute the same logits may be apart, relative to them; the second in half precision."""
AGREEING, HALF_AGREEING = 0.001, 0.1
"""The same for chains. Tiny exact models came to 1e-6 and 0.02, others to 0.4 and more behind noise; deep ones round
more."""
PARENTS = (-1, 0, 1, 1, 2, 3)
DEPTHS = (0, 1, 2, 2, 3, 3)
CHOSEN = ((0, 1, 2, 4), (0, 1, 3, 5))
"""The tree: two tokens, two children of the second, a child of each; and its two paths."""


class TriedModel(LanguageModel, Protocol):
    """A model as the engine runs it."""

    model: PreTrainedModel
    modules: tuple[nn.Module, ...]
    windows: Windows
    counts: bool

    def plain(self) -> "TriedModel":
        """Return the model run by its own passes."""
        ...

    def cut_to_windows(self) -> None:
        """Give up masks of windows."""
        ...


@dataclass(frozen=True)
class Tried:
    """What a trial found.

    Args:
        windows: the windows of the model's layers; None if it does not follow masks of windows, so that its context is
            to be cut.
        counts: whether it counts positions itself, so that it scores chains only.
        uncounted: a token that it does not count where it reads several, its padding; None for none.
        crowded: why a token's logits depend on the others of its pass, in words; None if they do not.
    """

    windows: Windows | None
    counts: bool
    uncounted: int | None = None
    crowded: str | None = None


def check_trial(model: PreTrainedModel, door: TriedModel) -> Tried:
    """Score a few tokens plainly and as a tree, once per model: nothing of the model changes but a note that it passed.

    Where trees cannot be, chains are tried. Costs six passes over at most eight tokens, more where chains
    are tried, and two or three with narrow windows if layers have any.

    Args:
        model: the model.
        door: the same model as the engine runs it.

    Raises:
        UnsupportedModel: a token's logits depend on later tokens, or those of a tree and those of chains differ from
            those of the texts by more than rounding, or the model cannot score these tokens at all.
    """
    passed, tried = model.__dict__.get(PLACE, (None, Tried(door.windows, door.counts)))
    if passed == _state(model) or door.facts.context < WIDTH:
        return tried
    plain = door.plain()
    if plain is not door:  # which was tried when it was made
        return check_trial(model, plain)
    with torch.no_grad(), evaluating(list(model.modules())):
        try:
            tried = _tried(model, door)
        except UnsupportedModel as refusal:
            if not door.facts.branches:
                raise
            door.counts = True
            try:
                tried = _tried(model, door)
            except UnsupportedModel:
                raise refusal from None
    model.__dict__[PLACE] = _state(model), tried
    return tried


def _tried(model: PreTrainedModel, door: TriedModel) -> Tried:
    """Try trees, or chains if the door scores those."""
    try:
        followed = _followed(model, door)
        if followed is None:
            door.cut_to_windows()
        else:
            door.windows = followed
        crowd = _try(model, door)
        uncounted = None if crowd else _uncounted(model, door)
    except (PolydraftError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        said = str(error).strip().splitlines() or [type(error).__name__]
        what = "a small token tree" if door.facts.branches else "a text in pieces"
        raise UnsupportedModel(f"{type(model).__name__} cannot score {what}: {said[0]}") from error
    return Tried(followed, door.counts, uncounted, crowd)


def _uncounted(model: PreTrainedModel, door: TriedModel) -> int | None:
    """Return the padding token of a model that counts positions itself, and does not count it among several tokens."""
    pad = getattr(model.config.get_text_config(decoder=True), "pad_token_id", None)
    if not door.counts or not isinstance(pad, int) or not 0 <= pad < door.facts.vocab_size:
        return None
    _, paths = _texts(door)
    paths[:, 1] = pad
    once, singly = _plain(model, paths), one_by_one(door, paths)
    return pad if _difference(once, singly) > _agreeing(model) * _spread(singly) else None


def _followed(model: PreTrainedModel, door: TriedModel) -> Windows | None:
    """Return the windows with which our pass over the tree is the model's own, all narrowed to two tokens.

    They are narrowed on a copy of the model, whose configuration nobody else reads. Layers may have noted the size of
    their window themselves, so that theirs is narrowed too.
    """
    config = model.config.get_text_config()
    if not settings_of(config):
        return door.windows
    twin, narrow = twin_of(model), copy.copy(door)
    for one in (twin.config.get_text_config(), *twin.modules()):
        for name in settings_of(one):
            setattr(one, name, NARROW)
    narrow.model, narrow.modules = twin, tuple(twin.modules())
    tokens, paths = _texts(door)
    plain, apart = _plain(twin, paths), dict[Windows, float]()
    errors: list[Exception] = []
    for windows in candidates(config):
        narrow.windows = narrowed(windows, NARROW)
        try:
            ours = _as_tree(narrow, tokens) if narrow.facts.branches else as_chains(narrow, paths)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001  masks of another form than the model takes may fail in any way
            errors.append(error)
        else:
            if not _parts(model, ours, plain):
                apart[windows] = _difference(ours, plain)
    if errors and not apart:
        raise errors[0]
    return min(apart, key=apart.__getitem__, default=None)


def _try(model: PreTrainedModel, door: TriedModel) -> str | None:
    """Compare the plain passes over both paths with each other and with the pass over the tree.

    Chains in pieces may differ from the whole because a token's logits depend on others of its pass.

    Returns:
        why they depend on others; None if they do not.
    """
    crowd = known_crowd(model)
    if crowd is not None:
        return crowd
    tokens, paths = _texts(door)
    plain = _plain(model, paths)
    other = _difference(plain[0, -1], plain[1, -1])
    if _difference(plain[0, :2], plain[1, :2]) > NOTICEABLE * other:
        raise UnsupportedModel(
            f"{type(model).__name__} lets tokens see later ones, so it has no law for the next token; only causal "
            "models can be used (BERT and its like are with config.is_decoder=True)."
        )
    if door.facts.branches:
        if _parts(model, _as_tree(door, tokens), plain):
            raise UnsupportedModel(
                f"{type(model).__name__} scores the branches of a token tree differently from the same texts alone: it "
                "does not follow the attention masks and position ids that it is given."
            )
        return tried_crowd(door)
    try:
        _check_chains(model, door, paths, plain)
    except UnsupportedModel:
        crowd = tried_crowd(door)
        if crowd is None:
            raise
        return crowd
    return tried_crowd(door)


def _check_chains(
    model: PreTrainedModel, door: LanguageModel, paths: Int[Tensor, "2 n"], plain: Float[Tensor, "2 n V"]
) -> None:
    name, agreeing = type(model).__name__, _agreeing(model)
    if any(_bounds_steps(part) for part in model.modules()):
        raise UnsupportedModel(
            f"{name} bounds its time steps where it reads several tokens, but not where it reads one, in this version "
            "of transformers, so drafts cannot be verified in one pass."
        )
    both = once_and_singly(door, paths)
    if any(_difference(once, singly) > agreeing * _spread(singly) for once, singly in both):
        raise UnsupportedModel(
            f"{name} goes on from its states otherwise with several tokens than with one, in this version of "
            "transformers, so drafts cannot be verified in one pass."
        )
    if _difference(as_chains(door, paths), plain) > agreeing * _spread(plain):
        raise UnsupportedModel(
            f"{name} scores a text differently in one pass and in pieces, so its cache is not to be relied on."
        )


def _bounds_steps(part: Any) -> bool:
    """Tell whether a layer has a lower bound of its time steps, which transformers heeds with several tokens only."""
    limit = getattr(part, "time_step_limit", None)
    return isinstance(limit, tuple) and bool(limit) and isinstance(limit[0], float) and limit[0] > 0


def _texts(door: LanguageModel) -> tuple[Int[Tensor, " t"], Int[Tensor, "2 n"]]:
    """Return the tokens of the tree, and the texts of its paths."""
    ordinary = door.facts.vocab_size // 3  # first and last tokens are often special
    tokens = (ordinary + torch.arange(len(PARENTS), device=door.facts.device)) % door.facts.vocab_size
    tokens[5] = tokens[4]
    return tokens, tokens[torch.tensor(CHOSEN, device=door.facts.device)]


def _parts(model: PreTrainedModel, tree: Float[Tensor, "2 n V"], plain: Float[Tensor, "2 n V"]) -> bool:
    """Tell whether a tree's logits are further from those of its paths than rounding explains."""
    other = _difference(plain[0, -1], plain[1, -1])
    rounding = HALF_ROUNDING if _in_half(model) else ROUNDING
    return _difference(tree, plain) > NOTICEABLE * other + rounding * _spread(plain)


def _plain(model: PreTrainedModel, paths: Int[Tensor, "2 n"]) -> Float[Tensor, "2 n V"]:
    """Return the logits of whole texts, at positions from 0 as Hugging Face's `generate` gives them.

    A model that reads prompts in both directions is asked for a prompt of one token and then writes the others.
    """
    places, told = torch.arange(paths.shape[1], device=paths.device).expand_as(paths), for_logits(model)
    if reads_prompts_both_ways(model):
        cache = {cache_name(model): DynamicCache()}
        steps = zip(paths.split(1, dim=1), places.split(1, dim=1), strict=True)
        found = [model(input_ids=one, position_ids=at, use_cache=True, **cache, **told) for one, at in steps]
        return torch.cat([one.logits for one in found], dim=1).float()
    given = {"position_ids": places} if "position_ids" in inspect.signature(model.forward).parameters else {}
    text = decoder_inputs(stand_in(model), paths) if is_encoder_decoder(model) else {"input_ids": paths}
    logits = model(**text, use_cache=False, **given, **told).logits.float()
    if logits.shape[1] != paths.shape[1]:
        raise UnsupportedModel(
            f"{type(model).__name__} was given {paths.shape[1]} tokens and returned logits of {logits.shape[1]}, but "
            "drafts are verified by those of every token; return one row for each unless logits_to_keep says otherwise."
        )
    return logits


def _as_tree(door: LanguageModel, tokens: Int[Tensor, " t"]) -> Float[Tensor, "2 n V"]:
    """Return the logits of both paths from one pass over the tree."""
    size, device = len(tokens), tokens.device
    mask = torch.tensor(_ancestors(), device=device).unsqueeze(0)
    depths = torch.tensor([DEPTHS], device=device)
    start = torch.zeros(1, dtype=torch.int64, device=device)
    found = door.forward(tokens.unsqueeze(0), depths, mask, door.new_cache(1, size), start).logits
    return found[0, torch.tensor(CHOSEN, device=device)].float()


def agree(model: PreTrainedModel, one: Float[Tensor, "..."], other: Float[Tensor, "..."]) -> bool:
    """Tell whether two ways to compute the same logits, or keys, differ by rounding only."""
    return not _difference(one.float(), other.float()) > _agreeing(model) * _spread(other.float())


def _ancestors() -> list[list[bool]]:
    """Return for each node which nodes lie on its way to the root, itself among them."""
    rows: list[list[bool]] = []
    for node, parent in enumerate(PARENTS):
        above = rows[parent] if parent >= 0 else [False] * len(PARENTS)
        rows.append([seen or place == node for place, seen in enumerate(above)])
    return rows


def _difference(one: Float[Tensor, "..."], other: Float[Tensor, "..."]) -> float:
    """Return the root mean square of a difference; NaN, which is no refusal, where logits are not finite."""
    return float((one - other).square().mean().sqrt())


def _spread(logits: Float[Tensor, "..."]) -> float:
    return _difference(logits, logits.mean(-1, keepdim=True))


def _agreeing(model: PreTrainedModel) -> float:
    return HALF_AGREEING if _in_half(model) else AGREEING


def _in_half(model: PreTrainedModel) -> bool:
    return rounds_short(model) or torch.finfo(chosen_precision(device_of(model)) or model.dtype).bits < 32


def _state(model: PreTrainedModel) -> tuple[Any, ...]:
    """Return what a trial holds for: a change of it asks for another one."""
    config = model.config
    text = config.get_text_config()
    windows = (*settings_of(text).items(), *(getattr(text, "layer_types", None) or ()))
    return (
        config._attn_implementation,
        getattr(config, "is_decoder", None),
        str(model.dtype),
        str(device_of(model)),
        chosen_precision(device_of(model)),
        windows,
        anatomy_of(model),
    )
