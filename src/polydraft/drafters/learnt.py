"""A draft whose weights were learnt from texts: a version of them is a value, and a text keeps the one it has."""

from dataclasses import dataclass
from typing import Any, cast

from torch import nn

from polydraft.drafters.contract import Drafter, digest_of, owned_models
from polydraft.drafters.heads.drafter import HeadDrafter
from polydraft.drafters.model import ModelDrafter
from polydraft.models import Layer


@dataclass(frozen=True, eq=False)
class DraftVersion:
    """One version of a draft's weights, which never change.

    The law of a text is its target's whatever the weights are, as long as they are fixed before a draft is drawn and do
    not depend on the numbers that it is drawn by. A version may have been learnt from what the same seed wrote, so its
    key goes into the noise (`Outside`).

    Args:
        version: its name, as answers tell it.
        key: tells it from all other versions; nothing for weights that nothing was learnt for.
        mark: of the last time that everything was forgotten; what is learnt from a text is forgotten with it.
    """

    version: str = ""
    key: bytes = b""
    mark: str = ""

    def outside(self, row: int) -> bytes:
        """Return the version's key."""
        return digest_of(b"learnt weights", self.key) if self.key else b""


@dataclass(frozen=True, eq=False)
class LearntDrafter(DraftVersion, ModelDrafter):
    """Draft with one version of a draft model's weights."""

    sound = True


@dataclass(frozen=True, eq=False)
class LearntHead(DraftVersion, HeadDrafter[Any]):
    """Draft with one version of a head's weights; what it keeps of texts is known by its network."""

    sound = True


def learnt(base: Drafter, made: Any, version: str, key: bytes, mark: str) -> LearntDrafter | LearntHead:
    """Return the drafter of a version.

    Args:
        base: the drafter that it began with.
        made: the draft model with the version's weights; of a head its network and its ends.
        version, key, mark: as of `DraftVersion`.
    """
    if isinstance(base, HeadDrafter):
        network, ends = made
        return LearntHead(network, ends, base.shortlist_size, base.params, base.made_for, version, key, mark)
    base = cast(ModelDrafter, base)
    return LearntDrafter(made, base.shortlist_size, base.params, version, key, mark)


def parts_to_learn(drafter: Drafter) -> tuple[nn.Module, ...]:
    """Return what may learn in a drafter: a draft model's module, or a head's network and its ends; () for nothing."""
    if isinstance(drafter, HeadDrafter):
        return drafter.network, drafter.ends
    models = owned_models(drafter) if drafter.name == ModelDrafter.name else ()
    module: Any = getattr(models[0], "model", None) if len(models) == 1 else None
    return () if module is None else (module,)


def states_to_learn(drafter: Drafter | None) -> tuple[Layer, ...]:
    """Return the layers whose states a lesson has beside the last ones: those that a head reads, if it reads others."""
    reads = () if drafter is None else drafter.needs.layers
    return () if reads == ("final",) else reads
