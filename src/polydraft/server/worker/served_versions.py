"""The versions of the draft's weights that a worker drafts with: the one in use, or the one that a request names."""

import copy
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

from polydraft.drafters import Drafter
from polydraft.drafters.learnt import LearntDrafter, LearntHead, learnt, parts_to_learn, states_to_learn
from polydraft.errors import CheckpointError, InvalidParameter, UnsupportedModel
from polydraft.models import HuggingFaceModel, pack_linear_layers
from polydraft.models.checkpoints.weight_versions import (
    USED,
    VersionFolder,
    WeightVersion,
    put_weights,
    rough_digest,
    weights_digest,
    weights_of,
)
from polydraft.options.commands.serve_options import Settings
from polydraft.server.worker.asks import UnknownVersion

MOST_TOKENS = 512
"""Tokens of a text to learn from at most, its prompt included; of longer texts the beginning counts."""
USUAL_BYTES, HELD_TEXTS = 256 << 20, 200
"""Of the texts that are kept in memory, and how many of them a comparison needs, for which there is half the memory."""
MOST_LOADED = 2
"""Versions in memory beside the weights that the server was started with; texts in progress keep what they have."""
MOST_NAMED = 16
"""Drafters in memory: of a version there is one for each look since it came into use."""


class ServedVersions:
    """Give out drafters, each with one version.

    Args:
        folder: where versions are.
        draft: the drafter that the server was started with.
        target: whose drafts it draws.

    Raises:
        InvalidParameter: the draft is none that can learn.
        ResultsError: the folder is of other models.
        UnsupportedModel: the target's rows do not follow from its last states.
    """

    def __init__(self, folder: Path, draft: Drafter | None, target: HuggingFaceModel) -> None:
        from polydraft.training.online.taught_drafts import module_to_learn  # which takes seconds as well

        self._module = module_to_learn(draft, target.model)
        self._draft: Any = draft
        check_target_to_learn_from(target)
        self._shipped = WeightVersion(0, weights_digest(weights_of(self._module)), {})
        self._folder = VersionFolder(folder)
        self._folder.check_origin(rough_digest(target.model), self._shipped.digest)
        self._models: OrderedDict[str, Any] = OrderedDict()
        self._drafters: OrderedDict[str, LearntDrafter | LearntHead] = OrderedDict()
        self._known: dict[str, WeightVersion] = {}
        self._damaged = set[str]()
        self._mark = ""

    def named(self, wanted: str | None) -> LearntDrafter | LearntHead:
        """Return the drafter of a version; of the one in use if none is named.

        Raises:
            UnknownVersion: there is no such version.
        """
        own = self._folder.in_use()
        if own.forgotten != self._mark:  # what was forgotten is not kept here either
            self._models.clear()
            self._drafters.clear()
            self._mark = own.forgotten
        newest = self._whole(own.version)
        if wanted is None:
            return self._drafter(newest, own.look)
        found = USED.fullmatch(wanted)
        version = self._version(found[1]) if found else None
        if version is None or int(found[2] if found else 0) > own.look:
            name = f"{newest.name}.{own.look}"
            raise UnknownVersion(f"version is {wanted!r}, which this server does not have; the newest one is {name}.")
        return self._drafter(version, int(found[2] if found else 0))

    def _version(self, name: str) -> WeightVersion | None:
        if name == self._shipped.name:
            return self._shipped
        if name in self._models:
            self._models.move_to_end(name)  # the one in use stays, whatever requests name
            return self._known[name]
        try:
            self._known[name] = version = self._folder.version(name)
            self._model(version)
        except CheckpointError:
            return None
        return version

    def _whole(self, name: str) -> WeightVersion:
        """Return the version in use; where that is damaged, the newest whole one, or what the server began with."""
        names = [name, *(one.name for one in self._folder.versions())] if name else []
        for one in names:
            if one not in self._damaged:
                found = self._version(one)
                if found is not None:
                    return found
                self._damaged.add(one)
                warnings.warn(f"The version {one} of the draft is damaged; an older one drafts.", stacklevel=2)
        return self._shipped

    def _drafter(self, version: WeightVersion, look: int) -> LearntDrafter | LearntHead:
        name = f"{version.name}.{look}"
        if name not in self._drafters:
            made = self._model(version)
            self._drafters[name] = learnt(self._draft, made, name, version.key(look), self._mark)
        self._drafters.move_to_end(name)
        while len(self._drafters) > MOST_NAMED:
            self._drafters.popitem(last=False)
        return self._drafters[name]

    def _model(self, version: WeightVersion) -> Any:
        """Return a version's model, or its network and ends, of its own weights, which nobody writes to again."""
        shipped = parts_to_learn(self._draft)
        if not version.number:
            return shipped if len(shipped) > 1 else self._draft.model
        if version.name not in self._models:
            module = copy.deepcopy(self._module, {id(one): one for one in self._module.buffers()})
            put_weights(module, self._folder.read(version))
            module.requires_grad_(False).eval()
            if len(shipped) > 1:
                like = next(shipped[0].parameters())
                self._models[version.name] = (*pack_linear_layers(module.to(like.device, like.dtype)).children(),)
            else:
                self._models[version.name] = HuggingFaceModel(module)
        self._models.move_to_end(version.name)
        while len(self._models) > MOST_LOADED:
            gone, _ = self._models.popitem(last=False)
            for name in [one for one in self._drafters if one.startswith(f"{gone}.")]:
                del self._drafters[name]
        return self._models[version.name]


def check_target_to_learn_from(target: HuggingFaceModel) -> None:
    """Check that a target's rows are its last states times a table, which is all that a learner has of it.

    Raises:
        UnsupportedModel: they are not.
    """
    from polydraft.training.alignment.draft_training import splits  # which takes seconds, and only who learns needs it
    from polydraft.training.heads.losses.row_losses import TargetEnds

    try:
        TargetEnds.of(target.model)
        fits = splits(target.model)
    except UnsupportedModel:
        fits = False
    if not fits:
        raise UnsupportedModel(
            f"--learn is for targets whose logits are their last states times a table of floating point numbers, which "
            f"{type(target.model).__name__} as it is loaded here does not have; leave --learn out."
        )


def bytes_to_learn(settings: Settings, draft: Drafter | None, width: int) -> int:
    """Return how many bytes of texts a learner keeps, for a target whose states have so many channels.

    A lesson has a state of each token for the last layer, and for each that a head reads.

    Raises:
        InvalidParameter: so few are asked for that no comparison would ever have texts enough.
    """
    least = 2 * HELD_TEXTS * MOST_TOKENS * (2 * width * (1 + len(states_to_learn(draft))) + 8)
    if settings.learn_bytes is None:
        return max(USUAL_BYTES, least)
    if settings.learn_bytes < least:
        raise InvalidParameter(
            f"--learn-bytes is {settings.learn_bytes}, but with this target {HELD_TEXTS} texts to choose by and as "
            f"many to learn from take {least}: give as many, or leave it out."
        )
    return settings.learn_bytes


def refuse_version(wanted: str | None) -> None:
    """Refuse a version where the server does not learn.

    Raises:
        InvalidParameter: one is named.
    """
    if wanted is not None:
        raise InvalidParameter("version names one of learnt weights, but this server does not learn; leave it out.")
