"""A trial of four tokens: whether a model follows a causal law, and scores a tree, or chains, as it scores the texts.

What a model's class and configuration say is not enough. A BERT without `is_decoder`, or a model with a bidirectional
prefix, would be decoded from another law than its own as soon as it gets our mask; a RoBERTa counts positions from two.
"""

import inspect
from dataclasses import dataclass
from math import inf
from typing import Any, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from polydraft.errors import PolydraftError, UnsupportedModel
from polydraft.models.checks.chain_trial import as_chains, once_and_singly, one_by_one
from polydraft.models.checks.evaluation import evaluating
from polydraft.models.checks.placement import device_of
from polydraft.models.checks.supported import reads_prompts_both_ways
from polydraft.models.checks.windows import Windows, candidates, narrowed, settings_of
from polydraft.models.protocol import LanguageModel
from polydraft.models.sources.encoded import decoder_inputs, is_encoder_decoder, stand_in
from polydraft.models.weights import anatomy_of, chosen_precision

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


class Door(LanguageModel, Protocol):
    """A model as the engine runs it."""

    windows: Windows
    counts: bool

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
    """

    windows: Windows | None
    counts: bool
    uncounted: int | None = None


def check_trial(model: PreTrainedModel, door: Door) -> Tried:
    """Score a few tokens plainly and as a tree, once per model: nothing of the model changes but a note that it passed.

    Where trees cannot be, chains are tried. Costs two to fifteen passes over at most eight tokens, and as many with
    narrow windows if layers have any.

    Args:
        model: the model.
        door: the same model as the engine runs it.

    Raises:
        UnsupportedModel: a token's logits depend on later tokens, or those of a tree and those of chains differ from
            those of the texts by more than rounding, or the model cannot score these tokens at all.
    """
    passed, tried = model.__dict__.get(PLACE, (None, Tried(door.windows, door.counts)))
    if passed == _state(model) or door.context < WIDTH:
        return tried
    with torch.no_grad(), evaluating(list(model.modules())):
        try:
            tried = _tried(model, door)
        except UnsupportedModel as refusal:
            if not door.branches:
                raise
            door.counts = True
            try:
                tried = _tried(model, door)
            except UnsupportedModel:
                raise refusal from None
    model.__dict__[PLACE] = _state(model), tried
    return tried


def _tried(model: PreTrainedModel, door: Door) -> Tried:
    """Try trees, or chains if the door scores those."""
    followed = _followed(model, door)
    if followed is None:
        door.cut_to_windows()
    else:
        door.windows = followed
    try:
        _try(model, door)
    except (PolydraftError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        said = str(error).strip().splitlines() or [type(error).__name__]
        what = "a small token tree" if door.branches else "a text in pieces"
        raise UnsupportedModel(f"{type(model).__name__} cannot score {what}: {said[0]}") from error
    return Tried(followed, door.counts, _uncounted(model, door))


def _uncounted(model: PreTrainedModel, door: Door) -> int | None:
    """Return the padding token of a model that counts positions itself, and does not count it among several tokens."""
    pad = getattr(model.config.get_text_config(decoder=True), "pad_token_id", None)
    if not door.counts or not isinstance(pad, int) or not 0 <= pad < door.vocab_size:
        return None
    _, paths = _texts(door)
    paths[:, 1] = pad
    once, singly = _plain(model, paths), one_by_one(door, paths)
    return pad if _difference(once, singly) > _agreeing(model) * _spread(singly) else None


def _followed(model: PreTrainedModel, door: Door) -> Windows | None:
    """Return the windows with which our pass over the tree is the model's own, all narrowed to two tokens meanwhile.

    Layers may have noted the size of their window themselves, so that theirs is narrowed too.
    """
    config, windows = model.config.get_text_config(), door.windows
    own = settings_of(config)
    if not own:
        return windows
    tried = candidates(config)
    noted = [(one, name, size) for one in (config, *model.modules()) for name, size in settings_of(one).items()]
    try:
        for one, name, _ in noted:
            setattr(one, name, NARROW)
        apart = [_apart(model, door, narrowed(one, NARROW)) for one in tried]
        nearest = min(range(len(tried)), key=apart.__getitem__)
        return tried[nearest] if apart[nearest] < inf else None
    finally:
        door.windows = windows
        for one, name, size in noted:
            setattr(one, name, size)


def _apart(model: PreTrainedModel, door: Door, windows: Windows) -> float:
    """Return how far our pass with masks of these windows is from the model's own; infinite if too far."""
    tokens, paths = _texts(door)
    door.windows = windows
    try:
        ours, plain = _scored(door, tokens, paths), _plain(model, paths)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # noqa: BLE001  whatever it is, the answer is no
        return inf
    return inf if _parts(model, ours, plain) else _difference(ours, plain)


def _try(model: PreTrainedModel, door: LanguageModel) -> None:
    """Compare the plain passes over both paths with each other and with the pass over the tree."""
    tokens, paths = _texts(door)
    plain = _plain(model, paths)
    other = _difference(plain[0, -1], plain[1, -1])
    if _difference(plain[0, :2], plain[1, :2]) > NOTICEABLE * other:
        raise UnsupportedModel(
            f"{type(model).__name__} lets tokens see later ones, so it has no law for the next token; only causal "
            "models can be used (BERT and its like are with config.is_decoder=True)."
        )
    if not door.branches:
        _check_chains(model, door, paths, plain)
    elif _parts(model, _as_tree(door, tokens), plain):
        raise UnsupportedModel(
            f"{type(model).__name__} scores the branches of a token tree differently from the same texts alone: it "
            "does not follow the attention masks and position ids that it is given."
        )


def _check_chains(
    model: PreTrainedModel, door: LanguageModel, paths: Int[Tensor, "2 n"], plain: Float[Tensor, "2 n V"]
) -> None:
    """Check that a model goes on from what it remembers.

    Raises:
        UnsupportedModel: it does not.
    """
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


def _scored(door: LanguageModel, tokens: Int[Tensor, " t"], paths: Int[Tensor, "2 n"]) -> Float[Tensor, "2 n V"]:
    return _as_tree(door, tokens) if door.branches else as_chains(door, paths)


def _texts(door: LanguageModel) -> tuple[Int[Tensor, " t"], Int[Tensor, "2 n"]]:
    """Return the tokens of the tree, and the texts of its paths."""
    ordinary = door.vocab_size // 3  # first and last tokens are often special
    tokens = (ordinary + torch.arange(len(PARENTS), device=door.device)) % door.vocab_size
    tokens[5] = tokens[4]
    return tokens, tokens[torch.tensor(CHOSEN, device=door.device)]


def _parts(model: PreTrainedModel, tree: Float[Tensor, "2 n V"], plain: Float[Tensor, "2 n V"]) -> bool:
    """Tell whether a tree's logits are further from those of its paths than rounding explains."""
    other = _difference(plain[0, -1], plain[1, -1])
    rounding = _rounding(model) * _spread(plain)
    return _difference(tree, plain) > NOTICEABLE * other + rounding


def _plain(model: PreTrainedModel, paths: Int[Tensor, "2 n"]) -> Float[Tensor, "2 n V"]:
    """Return the logits of whole texts, at positions from 0 as Hugging Face's `generate` gives them.

    A model that reads prompts in both directions is asked for a prompt of one token and then writes the others.
    """
    places = torch.arange(paths.shape[1], device=paths.device).expand_as(paths)
    if reads_prompts_both_ways(model):
        cache = DynamicCache()
        steps = zip(paths.split(1, dim=1), places.split(1, dim=1), strict=True)
        found = [model(input_ids=one, position_ids=at, past_key_values=cache, use_cache=True) for one, at in steps]
        return torch.cat([one.logits for one in found], dim=1).float()
    given = {"position_ids": places} if _takes(model, "position_ids") else {}
    text = decoder_inputs(stand_in(model), paths) if is_encoder_decoder(model) else {"input_ids": paths}
    return model(**text, use_cache=False, **given).logits.float()


def _as_tree(door: LanguageModel, tokens: Int[Tensor, " t"]) -> Float[Tensor, "2 n V"]:
    """Return the logits of both paths from one pass over the tree."""
    size, device = len(tokens), tokens.device
    mask = torch.tensor(_ancestors(), device=device).unsqueeze(0)
    depths = torch.tensor([DEPTHS], device=device)
    start = torch.zeros(1, dtype=torch.int64, device=device)
    found = door.forward(tokens.unsqueeze(0), depths, mask, door.new_cache(1, size), start).logits
    return found[0, torch.tensor(CHOSEN, device=device)].float()


def agree(model: PreTrainedModel, one: Float[Tensor, "..."], other: Float[Tensor, "..."]) -> bool:
    """Tell whether two ways to compute the same logits differ by rounding only."""
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
    """Return how far logits are from their mean."""
    return _difference(logits, logits.mean(-1, keepdim=True))


def _rounding(model: PreTrainedModel) -> float:
    return HALF_ROUNDING if _in_half(model) else ROUNDING


def _agreeing(model: PreTrainedModel) -> float:
    return HALF_AGREEING if _in_half(model) else AGREEING


def _in_half(model: PreTrainedModel) -> bool:
    return torch.finfo(chosen_precision(device_of(model)) or model.dtype).bits < 32


def _takes(model: PreTrainedModel, name: str) -> bool:
    return name in inspect.signature(model.forward).parameters


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
