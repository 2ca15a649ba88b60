"""A draft that learns from what its target has just written, and whose versions pass a gate before they are used.

Texts are the target's own whatever the draft was, so that losses and expected calls hold on them without weights. What
learns is a copy: the weights that serve are versions in a folder, each of which stays as it
is. Every so many steps there is a look: the weights in use are compared with their parent, to which the pointer goes
back if they cost calls on texts that came since, and the new ones with those in use.

Source: Online Speculative Decoding (arXiv 2310.07177), which steps in place and takes whatever comes of it; versions,
held-out replay and the gate are this package's.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor, nn

from polydraft.errors import CheckpointError
from polydraft.models.checkpoints.weight_versions import (
    VersionFolder,
    Weights,
    WeightVersion,
    put_weights,
    weights_digest,
    weights_of,
)
from polydraft.training.alignment.draft_losses import CHAIN
from polydraft.training.alignment.text_calls import expected_calls, kept_as_block
from polydraft.training.heads.losses.row_losses import HeadTraining, step_of
from polydraft.training.online.lesson_buffer import LessonBuffer, TaughtText, batched
from polydraft.training.online.version_gate import Saving

COLDEST = 0.01
"""Texts at lower temperatures that are not greedy are left out."""
SLOWER = 1.05
"""Drafts behind some texts may take so many times as long by new weights as by those in use."""
TIMED, PASSED = 5, 2
"""Passes of either, of which the fastest counts; of how many texts these are."""
LATE_TEXTS = 50
"""So many held-out texts must have come since a swap before it is rolled back."""
SWAPPED, KEPT, ROLLED_BACK, FORGOTTEN, UNWRITTEN = "swapped", "kept", "rolled back", "forgotten", "unwritten"


@dataclass(frozen=True)
class LearningPlan:
    """How a draft learns while it serves.

    Args:
        rate: AdamW's rate, which stays.
        texts: lessons of a step.
        together: of how many of these all rows are in memory at once; None for all of them.
        steps: between two looks.
        least: lessons before the first step.
        held_texts, held_tokens: what a swap must be judged on at least.
        most_bytes: of all lessons.
        seed: of what is drawn.
    """

    rate: float = 3e-4
    texts: int = 8
    together: int | None = None
    steps: int = 100
    least: int = 32
    held_texts: int = 200
    held_tokens: int = 20_000
    most_bytes: int = 256 << 20
    seed: int = 0


@dataclass(frozen=True)
class Look:
    """What came of a comparison.

    Args:
        number: of the look.
        outcome: one of the words above.
        version: the version in use behind it; empty for the weights that nothing was learnt for.
        saving: which share of calls the new weights save; None if that was not asked.
        reason: why they were not taken, or what could not be done.
    """

    number: int
    outcome: str
    version: str
    saving: Saving | None = None
    reason: str = ""


class OnlineLearner:
    """Learns a draft's weights, and decides which version of them is used.

    Args:
        training: a copy of the draft in single precision, with its loss.
        network: the module in it whose weights are the versions.
        folder: where versions are kept.
        plan: how it learns.
        clock: tells seconds.
    """

    def __init__(
        self,
        training: HeadTraining,
        network: nn.Module,
        folder: VersionFolder,
        plan: LearningPlan,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.training, self.network = training, network
        self.folder, self.plan, self.clock = folder, plan, clock
        self.base = weights_of(network)
        self.shipped = WeightVersion(0, weights_digest(self.base), {})
        self.buffer = LessonBuffer(plan.most_bytes, plan.seed, 2 * plan.held_texts)
        self._totals = WeakKeyDictionary[TaughtText, Tensor]()
        self.taken = self.steps = 0
        self.parent: WeightVersion | None = None
        self.since = 0
        self.used = self._begin()

    def _begin(self) -> WeightVersion:
        """Go on from the newest whole version that the pointer allows, pinned or not, and return it."""
        own = self.folder.in_use(pins=False)
        self.mark = own.forgotten
        named = [one for one in self.folder.versions() if one.name == own.version]
        for one in (*named, *self.folder.versions()) if own.version else ():
            try:
                self._learn_from(self.folder.read(one))
            except Exception:  # noqa: BLE001  whatever is wrong with it, there is an older one
                continue
            self.parent = self._kept(str(one.facts.get("parent", "")))
            return one
        self._learn_from(self.base)
        return self.shipped

    def _kept(self, name: str) -> WeightVersion | None:
        """Return a version by its name, or what nothing was learnt for; None if it is no longer whole."""
        for one in (one for one in self.folder.versions() if one.name == name):
            with suppress(OSError, CheckpointError):
                self.folder.read(one)
                return one
        return None if name else self.shipped

    def _learn_from(self, weights: Weights) -> None:
        put_weights(self.network, weights)
        self.optimizer = torch.optim.AdamW(
            self.training.parameters(), self.plan.rate, betas=(0.9, 0.95), weight_decay=0.0
        )

    def hear(self, lesson: TaughtText) -> None:
        """Take a finished text; rows at a temperature near 0, but not at it, are too large for a measure."""
        if lesson.written > 0 and lesson.given > 0 and (not lesson.heat or lesson.heat >= COLDEST):
            self.buffer.add(replace(lesson, number=self.buffer.count))

    @property
    def learns(self) -> bool:
        """Whether a step can be taken: there are lessons, and nobody has fixed the version."""
        return len(self.buffer.learnt.lessons) >= self.plan.least and not self.folder.in_use().pinned

    @property
    def looks(self) -> bool:
        """Whether a look is due: that depends on how many texts and steps there were, and not on what was written."""
        return self.taken >= self.plan.steps and len(self.buffer.held_out.lessons) >= self.plan.held_texts

    def digest(self) -> str:
        """Return a digest of all that it knows: its lessons, and its weights."""
        return f"{self.buffer.digest()}{weights_digest(weights_of(self.network))}"

    def step(self) -> float:
        """Take a step; return its loss."""
        lessons = self.buffer.learnt.some(self.plan.texts)
        size = self.plan.together or len(lessons)
        self.optimizer.zero_grad(set_to_none=True)
        parts = [lessons[first : first + size] for first in range(0, len(lessons), size)]
        total = float(step_of(self.training, map(self._learnt, parts)))
        torch.nn.utils.clip_grad_norm_(self.training.parameters(), 1.0)
        self.optimizer.step()
        self.taken, self.steps = self.taken + 1, self.steps + 1
        return total

    def _learnt(self, lessons: Sequence[TaughtText]) -> Mapping[str, Tensor]:
        """Return the loss of some lessons and its weight.

        Heads of fewer tokens are told what the target makes of all of its own.
        """
        batch, (ends,) = batched(lessons), self.training.target
        for row, one in enumerate(lessons if ends.tokens is not None else ()):
            if one not in self._totals:
                self._totals[one] = ends.totals(one.final.float())
            batch.lse[row, : len(one.ids)] = self._totals[one]
        told = replace(batch, heat=batch.heat if self.training.heated else None)
        return {"weight": torch.tensor(float(len(lessons))), **self.training(**vars(told))}

    def look(self) -> Look:
        """Compare, and let another version be used if that is better; the number goes into the keys of texts."""
        self.taken = 0
        own = self.folder.in_use(pins=False)
        if own.forgotten != self.mark:
            return self.forget()
        number = own.look + 1
        try:
            back = self._rolled_back(number)
            found = back or self._gated(number)
            if found.outcome not in (SWAPPED, FORGOTTEN) and not self.folder.use(found.version, number, self.mark):
                return self.forget()
            return found
        except (OSError, CheckpointError) as error:
            if self.folder.mark() != self.mark:
                return self.forget()
            if isinstance(error, CheckpointError):
                raise
            kept = self._name(self.used)
            with suppress(OSError):  # that it came to this follows from the texts: the look counts
                self.folder.use(kept, number, self.mark)
            return Look(number, UNWRITTEN, kept, reason=str(error))

    def forget(self) -> Look:
        """Drop all lessons, and begin again with the weights that nothing was learnt for."""
        self.buffer = LessonBuffer(self.plan.most_bytes, self.plan.seed, 2 * self.plan.held_texts)
        self.taken, self.parent = 0, None
        self.used = self._begin()
        return Look(self.folder.in_use().look, FORGOTTEN, self._name(self.used))

    def _rolled_back(self, number: int) -> Look | None:
        """Go back to the parent if the version in use costs more on what came since; None if it does not."""
        late = [one for one in self.buffer.held_out.lessons if one.number >= self.since]
        if self.parent is None or len(late) < LATE_TEXTS:
            return None
        before = self._weights(self.parent)
        found = self._saving(before, self._weights(self.used), late)
        if not found.is_worse(number):
            return None
        self._learn_from(before)
        self.used, self.parent = self.parent, None
        return Look(number, ROLLED_BACK, self._name(self.used), found)

    def _gated(self, number: int) -> Look:
        """Take the new weights if they are better on all held-out texts."""
        new, old = weights_of(self.network), self._weights(self.used)
        if not all(bool(one.isfinite().all()) for one in new.values()):
            self._learn_from(old)
            return Look(number, KEPT, self._name(self.used), reason="the new weights are no numbers")
        held = self.buffer.held_out.lessons
        found = self._saving(old, new, held)
        if found.is_worse(number):
            self._learn_from(old)
            return Look(number, KEPT, self._name(self.used), found, "the new weights are worse, and were dropped")
        if not found.is_better(number):
            return Look(number, KEPT, self._name(self.used), found, "they are not better yet, as far as can be said")
        if found.texts < self.plan.held_texts or found.tokens < self.plan.held_tokens:
            return Look(number, KEPT, self._name(self.used), found, "there is too little text to judge by")
        if self._is_slower(old, new):
            return Look(number, KEPT, self._name(self.used), found, "a pass of the new weights takes longer")
        return self._swapped(number, new, found)

    def _swapped(self, number: int, new: Weights, found: Saving) -> Look:
        facts = {
            "parent": self._name(self.used),
            "look": number,
            "saving": round(found.share, 5),
            "error": round(found.error, 5),
            "held_out_texts": found.texts,
            "held_out_tokens": found.tokens,
            "lessons": self.buffer.count,
            "steps": self.steps,
        }
        version = self.folder.add(new, facts, self.mark)
        if not self.folder.use(version.name, number, self.mark):
            return self.forget()
        self.parent, self.used, self.since = self.used, version, self.buffer.count
        with suppress(OSError):  # what cannot be deleted is used no more
            self.folder.prune(self.parent.name)
        return Look(number, SWAPPED, version.name, found)

    def _name(self, version: WeightVersion) -> str:
        return version.name if version.number else ""

    def _weights(self, version: WeightVersion) -> Weights:
        return self.folder.read(version) if version.number else self.base

    def _saving(self, before: Weights, after: Weights, lessons: Sequence[TaughtText]) -> Saving:
        calls = [self._calls(one, lessons) for one in (before, after)]
        return Saving.of(*calls, tokens=sum(one.written for one in lessons))

    def _calls(self, weights: Weights, lessons: Sequence[TaughtText]) -> Float[Tensor, " n"]:
        """Return the expected target calls of each text under some weights; what learns stays as it is."""
        own = weights_of(self.network)
        put_weights(self.network, weights)
        try:
            return calls_of(self.training, lessons, self.plan.texts)
        finally:
            _put_back(self.network, own)

    @torch.no_grad()
    def _is_slower(self, before: Weights, after: Weights) -> bool:
        """Tell whether a pass takes longer, as one of numbers that are too small for the machine's usual arithmetic."""
        own, best = weights_of(self.network), [float("inf")] * 2
        lessons = self.buffer.held_out.lessons[:PASSED]
        batch, heat = batched(lessons), max(one.heat for one in lessons)
        for _ in range(TIMED):
            for place, weights in enumerate((before, after)):
                put_weights(self.network, weights)
                begun = self.clock()
                self.training.ratios(batch, heat, CHAIN)
                best[place] = min(best[place], self.clock() - begun)
        _put_back(self.network, own)
        return best[1] > SLOWER * best[0]


def calls_of(training: HeadTraining, lessons: Sequence[TaughtText], texts: int = 8) -> Float[Tensor, " n"]:
    """Return the expected target calls of each text, for chains of five verified as a block; `texts` at once."""
    found = torch.zeros(len(lessons), dtype=torch.float64)
    for heat in sorted({one.heat for one in lessons}):
        places = [place for place, one in enumerate(lessons) if one.heat == heat]
        for first in range(0, len(places), texts):
            some = places[first : first + texts]
            ratio, written = training.ratios(batched([lessons[place] for place in some]), heat, CHAIN)
            found[some] = expected_calls(kept_as_block(ratio), written)
    return found


@torch.no_grad()
def _put_back(network: nn.Module, weights: Weights) -> None:
    """Give a draft the weights that it had, whatever they are."""
    for name, one in network.named_parameters():
        one.copy_(weights[name])
