"""Folders of walks in this package's own form, which holds heads of some of their target's tokens as well.

    config.json         `model_type` "polydraft_walk", `walk`: one of `WALKS`, `vocab_size` of the target,
                        `rows`: how many of its tokens are drafted, `own_rows`: whether from rows of the
                        head's own, `reads`: the states of the target, and the sizes of the network
    model.safetensors   walk.*, by the network's own names, and `d2t` and `t2d` as EAGLE-3's folders have them

The forms of the heads' authors have a row for each of a target's tokens. Hydra's here draft from the target's own rows
where they were trained so, and need no copies of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from polydraft.drafters.heads.drafter import HeadDrafter, HeadEnds
from polydraft.drafters.heads.formats.folder_fields import (
    MOST,
    Fields,
    Shapes,
    Tensors,
    sizes_of,
    tokens_of_rows,
    write_head,
)
from polydraft.drafters.heads.walks.hydra import Hydra
from polydraft.drafters.heads.walks.joined import JoinedWalk
from polydraft.drafters.heads.walks.redrafter import RecurrentHead
from polydraft.drafters.heads.walks.speculators import LstmSpeculator, MlpSpeculator
from polydraft.drafters.heads.walks.walked_head import WalkedHead
from polydraft.errors import InvalidParameter, is_whole
from polydraft.models import LanguageModel, Layer, PlainFolder

MODEL_TYPE, PREFIX = "polydraft_walk", "walk."
LEAST, LARGEST = {"layers": 0}, {"depths": 16, "layers": 64}
"""The least and the most of what is counted in a configuration, where it is not 1 and what the tensors hold."""


@dataclass(frozen=True)
class WalkKind:
    """How a walk is made.

    Args:
        network: its class.
        counts: which of the class's arguments are numbers.
        flags: which of them are true or false.
        owns: whether it has rows of its own, or the target's; or either.
        joins: whether it reads several states of the target.
    """

    network: type[WalkedHead]
    counts: tuple[str, ...]
    flags: tuple[str, ...] = ()
    owns: tuple[bool, ...] = (True,)
    joins: bool = False


WALKS: Mapping[str, WalkKind] = {
    "mlp": WalkKind(MlpSpeculator, ("width", "inner", "vocab_size", "depths"), ("scaled",)),
    "lstm": WalkKind(LstmSpeculator, ("width", "inner", "vocab_size", "depths"), ("scaled", "shared")),
    "recurrent": WalkKind(RecurrentHead, ("width", "layers", "inner", "depths"), ("recurrent",)),
    "hydra": WalkKind(Hydra, ("width", "depths", "layers"), owns=(True, False)),
    "joined": WalkKind(JoinedWalk, ("width", "depths"), owns=(False,), joins=True),
}
"""All walks, by their words in folders."""


def is_walk(config: Mapping[str, Any]) -> bool:
    """Tell by its configuration whether a folder holds a walk in this form."""
    return config.get("model_type") == MODEL_TYPE


def holds_walk(shapes: Shapes) -> bool:
    """Tell by its tensors whether a folder holds a walk in this form."""
    return any(name.startswith(PREFIX) for name in shapes)


def read_walk(folder: PlainFolder, target_layers: int | None = None) -> HeadDrafter[WalkedHead]:
    """Build the drafter of a walk; the target's depth does not matter here.

    Raises:
        CheckpointError: a key is missing or left over, a shape is another one, or a value is no number.
    """
    fields, tensors = Fields.of(folder, folder.config), Tensors.of(folder, (PREFIX,))
    word = fields.get("walk")
    kind = WALKS.get(word) if isinstance(word, str) else None
    if kind is None:
        raise fields.wrong("walk", word, f"it must be one of {', '.join(WALKS)}")
    rows, vocab = fields.count("rows", each=1), fields.count("vocab_size")
    tokens = tokens_of_rows(tensors, rows, vocab)
    if tokens is not None and not bool((tokens[1:] > tokens[:-1]).all()):
        raise tensors.damaged("d2t names tokens that do not rise")
    given: dict[str, Any] = {
        name: fields.count(name, least=LEAST.get(name, 1), most=LARGEST.get(name, MOST), each=1) for name in kind.counts
    }
    given |= {name: fields.flag(name) for name in kind.flags}
    own, reads = fields.flag("own_rows"), _reads(fields, joins=kind.joins)
    if own not in kind.owns:
        raise fields.wrong("own_rows", own, f"a walk of this kind has {'no ' if own else ''}rows of its own")
    given |= {"rows": rows if own else None} if True in kind.owns else {}
    given |= {"reads": reads} if kind.joins else {}
    prefix = fields.table("prefix")
    if prefix:
        given["prefix"] = Fields(fields.name, prefix, held=fields.held).anatomy()
    with torch.device("meta"):  # sizes that the tensors do not have take no memory
        for name, value in kind.network(**given).named_parameters():
            tensors.shaped(name, value)
    network = kind.network(**given)
    network.reads = reads
    tensors.fill(network)
    return tensors.drafter(network, HeadEnds(tokens=tokens), fields.made_for())


def _reads(fields: Fields, *, joins: bool) -> tuple[Layer, ...]:
    found = fields.get("reads")
    known = isinstance(found, list) and all(one == "final" or (is_whole(one) and one >= 0) for one in found)
    if not known or not found:
        raise fields.wrong("reads", found, 'it must be a list of layers, or of "final"')
    if len(found) > 1 and not joins:
        raise fields.wrong("reads", found, "a walk of this kind reads one")
    return tuple(found)


def write_walk(drafter: HeadDrafter[WalkedHead], folder: Path, target: LanguageModel, *, card: str = "") -> None:
    """Write any walk as a folder, of all of its target's tokens or of some.

    Raises:
        CheckpointError: it cannot be written.
        InvalidParameter: its ends are its own or are scaled.
    """
    network, ends = drafter.network, drafter.ends
    if ends.lm_head is not None or ends.embed_tokens is not None:
        raise InvalidParameter("Walks have no ends but their target's, so that their folders hold none.")
    word, kind = next((word, kind) for word, kind in WALKS.items() if kind.network is type(network))
    tokens, own = ends.tokens, network.own_rows
    vocab = network.vocab_size or (own if tokens is None else None) or target.facts.vocab_size
    rows = own or (vocab if tokens is None else len(tokens))
    config: dict[str, Any] = {"architectures": [type(network).__name__], "model_type": MODEL_TYPE, "walk": word}
    config |= {"vocab_size": vocab, "rows": rows, "own_rows": own is not None, "reads": [*network.reads]}
    config |= {name: getattr(network, name) for name in (*kind.counts, *kind.flags)}
    if isinstance(network, Hydra) and network.anatomy is not None:
        config["prefix"] = sizes_of(network.anatomy, 1)
    tensors = {PREFIX + name: value for name, value in network.named_parameters()}
    write_head(folder, config, tensors, ends, target, torch.bfloat16, card)


__all__ = ["holds_walk", "is_walk", "read_walk", "write_walk"]
