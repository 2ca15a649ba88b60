"""What a set of skipped sub-layers is worth: overlaps measured in one pass a text, times measured once."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.drafters import tokens_per_work
from polydraft.engine.measured import Rounds, time_target, timed
from polydraft.errors import InvalidParameter
from polydraft.models import HuggingFaceModel, LanguageModel, SubLayer, layer_set, without
from polydraft.planning.costs import Curve
from polydraft.probs import SamplingParams, to_probs
from polydraft.reading import Reader, Text, first_drafts

LONGEST = 8
"""The longest chain of drafts that is looked at."""


@dataclass(frozen=True)
class SkipCosts:
    """What sub-layers save, in seconds.

    Args:
        parts: of each sub-layer.
        draft: a pass over one token with all of them.
        scoring: the target's passes by their numbers of tokens.
    """

    parts: tuple[float, ...]
    draft: float
    scoring: Curve

    def speed(self, skipped: Sequence[int], overlap: float) -> tuple[float, int]:
        """Return the tokens per second that are predicted with the best chain of drafts, and how long that is.

        The overlap is taken to be the same at every depth, so that a chain of g drafts yields
        (1 - a^(g + 1)) / (1 - a) tokens; see `tokens_per_work`.
        """
        draft = max(self.draft - sum(self.parts[number] for number in skipped), 0.0)
        return max(
            (tokens_per_work(overlap, draft, self.scoring(length + 1), length), length)
            for length in range(1, LONGEST + 1)
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the table, for JSON."""
        return {"parts": self.parts, "draft": self.draft, "scoring": self.scoring.points}

    @classmethod
    def read(cls, table: dict[str, Any]) -> "SkipCosts":
        """Return the costs of a table."""
        points = tuple((int(count), float(seconds)) for count, seconds in table["scoring"])
        return cls(tuple(table["parts"]), table["draft"], Curve(points))

    @property
    def plain(self) -> float:
        """The tokens per second without drafts."""
        return 1 / self.scoring(1)


def time_skips(
    model: HuggingFaceModel, parts: Sequence[SubLayer], tokens: Int[Tensor, "1 t"], on_progress: Rounds
) -> SkipCosts:
    """Time the target's passes, and what all attentions and all inner layers take of a pass over one token.

    A kind's time is shared by its sub-layers as the bytes that they read (`SubLayer.work`): single ones take less than
    the clock's noise.
    """
    scoring = time_target(model, tokens, LONGEST + 1, on_progress=on_progress)
    listed = [[number for number, part in enumerate(parts) if part.attention is one] for one in (True, False)]
    kinds = [own for own in listed if own]
    sets = [(), *(kinds if len(kinds) > 1 else [kinds[0][1:]])]  # something must run
    text = Text(tokens, torch.full_like(tokens[0, :1], tokens.shape[1]))
    reader, last = Reader.new(model, 1, tokens.shape[1] + 1).catch_up(text)[0], tokens.shape[1] - 1

    def draft(skipped: Sequence[int]) -> None:
        own = without(model, layer_set(parts[number] for number in skipped))
        first_drafts(own, reader.cache, tokens[0], range(last, last + 1), last)

    seconds = timed({place: partial(draft, own) for place, own in enumerate(sets)}, model.device, 9, on_progress)
    whole, saved = median(seconds[0]), [0.0] * len(parts)
    for place, kind in enumerate(kinds, start=1):
        read = sum(parts[number].work(last) for number in sets[place])
        for number in kind:
            saved[number] = max(whole - median(seconds[place]), 0.0) * parts[number].work(last) / max(read, 1)
    return SkipCosts(tuple(saved), whole, scoring)


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Texts of the target, and what it says behind each of their new tokens.

    Args:
        readers: per text, who has read it.
        texts: the texts.
        places: per text, the places whose next tokens are new.
        laws: the target's laws there.
        params: its temperature.
    """

    readers: tuple[Reader, ...]
    texts: tuple[Int[Tensor, "t"], ...]
    places: tuple[range, ...]
    laws: tuple[Float[Tensor, "n V"], ...]
    params: SamplingParams

    @classmethod
    @torch.inference_mode()
    def of(cls, model: LanguageModel, texts: Sequence[tuple[Tensor, int]], params: SamplingParams) -> "HeldOut":
        """Read texts, each with how many of its tokens are given.

        Raises:
            InvalidParameter: none has a new token.
        """
        found = [(own, range(known - 1, len(own) - 1)) for own, known in texts if len(own) > known]
        if not found:
            raise InvalidParameter("The target wrote nothing behind the prompts, so nothing can be measured on it.")
        readers, laws = list[Reader](), list[Tensor]()
        for tokens, places in found:
            text = Text(tokens.unsqueeze(0), torch.tensor([len(tokens)], device=tokens.device))
            reader = Reader.new(model, 1, len(tokens) + len(places)).catch_up(text)[0]
            free = len(tokens) - 1
            laws.append(to_probs(first_drafts(model, reader.cache, tokens, places, free), params))
            readers.append(reader)
        tokens, places = zip(*found, strict=True)
        return cls(tuple(readers), tokens, places, tuple(laws), params)

    @torch.inference_mode()
    def overlap(self, model: LanguageModel) -> float:
        """Return the mean of sum_x min(p(x), q(x)) over all places, of the target's law p and the model's q.

        It is the chance that a lone draft there is accepted, with the target's own keys before it.
        """
        shares = [
            to_probs(first_drafts(model, one.cache, tokens, places, len(tokens) - 1), self.params).minimum(law).sum(-1)
            for one, tokens, places, law in zip(self.readers, self.texts, self.places, self.laws, strict=True)
        ]
        return float(torch.cat(shares).double().mean())
