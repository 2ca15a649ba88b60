"""Distributions: logits to probabilities, the shortlist and its tail atom, residuals, and sampling.

Everything here is a pure function of tensors; randomness comes in as uniforms. Rows keep the precision of their
input, at least float32, and always sum to one: temperature 0 is the one-hot row of the largest logit, so greedy
decoding needs no rules of its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from math import isfinite
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Generator, Tensor

from polydraft.errors import InvalidProbabilities
from polydraft.options.option import check_keywords
from polydraft.options.sampling_options import Sampling


@dataclass(frozen=True)
class SamplingParams:
    """How a row of logits becomes a distribution; names and meanings are Hugging Face's.

    Args:
        temperature: divides the logits; 0 means the one-hot row of the largest logit.
        top_k: keep the k largest logits; 0 keeps all.
        top_p: keep the smallest set of most likely tokens with at least this mass, in (0, 1].
        min_p: keep tokens at least this share as likely as the most likely one, in [0, 1].
        typical_p: keep the most typical tokens (arXiv 2202.00666) with at least this mass, in (0, 1].

    Raises:
        InvalidParameter: a value outside its range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0

    def __post_init__(self) -> None:
        check_keywords(Sampling, vars(self))


UNFILTERED = SamplingParams()
"""The whole law of a model."""


def sent(table: Tensor, device: torch.device) -> Tensor:
    """Return a table on a device; one of the host without waiting for what the device has still to do."""
    return table if table.device == device else table.to(device, non_blocking=device.type != "cpu")


def to_probs(logits: Float[Tensor, "*b V"], params: SamplingParams, *, check: bool = True) -> Float[Tensor, "*b V"]:
    """Turn logits into distributions: temperature, then top_k, top_p, min_p and typical_p, in that order.

    The order and the treatment of ties are those of Hugging Face's logits warpers. Logits of minus infinity are
    tokens that cannot occur.

    Args:
        logits: the logits.
        params: what is done with them.
        check: whether they are looked at, for which a device must be waited for; else they are known to be `usable`.

    Raises:
        InvalidProbabilities: a row contains NaN or plus infinity, or nothing but minus infinity.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if params.temperature == 0:
        likeliest = _likeliest(logits)
        if check:
            _check_peaks(logits.gather(-1, likeliest))
        return torch.zeros_like(logits).scatter_(-1, likeliest, 1.0)
    peak = logits.amax(dim=-1, keepdim=True)
    if check:
        _check_peaks(peak)
    return _softened(logits, peak, params)


def usable(logits: Float[Tensor, "*b V"]) -> tuple[Float[Tensor, "*b V"], Bool[Tensor, "*b"]]:
    """Return logits with zeros in place of rows that are no law, and which rows are; nothing is waited for."""
    fine = logits.amax(dim=-1).isfinite()
    return logits.where(fine.unsqueeze(-1), 0.0), fine


def _likeliest(logits: Float[Tensor, "*b V"]) -> Int[Tensor, "*b 1"]:
    """Return the index of each row's largest entry, or of a NaN; on a CPU by NumPy, which takes a tenth of the time."""
    if logits.device.type != "cpu":
        return logits.argmax(dim=-1, keepdim=True)
    places = np.asarray(logits.detach().numpy().argmax(axis=-1, keepdims=True), dtype=np.int64)
    return torch.from_numpy(places)  # pyright: ignore  not typed in torch


def _check_peaks(peak: Float[Tensor, "*b 1"]) -> None:
    if not isfinite(peak.sum(dtype=torch.float64)):  # a sum is NaN or infinite if a summand is
        odd = ", ".join(str(value.item()) for value in peak[~peak.isfinite()].flatten()[:3])
        raise InvalidProbabilities(f"The model's logits are not usable: their largest entries are {odd}.")


def _softened(
    logits: Float[Tensor, "*b V"], peak: Float[Tensor, "*b 1"], params: SamplingParams
) -> Float[Tensor, "*b V"]:
    """Apply a positive temperature and the filters to rows whose largest entries are `peak`."""
    warmth = max(params.temperature, torch.finfo(logits.dtype).tiny)
    scores = logits if warmth == 1 else (logits - peak).div_(warmth)  # the largest stays finite
    return _filtered(scores, params).softmax(dim=-1)


def _filtered(scores: Float[Tensor, "*b V"], params: SamplingParams) -> Float[Tensor, "*b V"]:
    for name, keep, off in _FILTERS:
        value = getattr(params, name)
        scores = scores if value == off else scores.masked_fill(~keep(scores, value), -torch.inf)
    return scores


def _in_top_k(scores: Float[Tensor, "*b V"], top_k: int) -> Bool[Tensor, "*b V"]:
    smallest_kept = scores.topk(min(top_k, scores.shape[-1]), dim=-1).values[..., -1:]
    return scores >= smallest_kept


def _in_top_p(scores: Float[Tensor, "*b V"], top_p: float) -> Bool[Tensor, "*b V"]:
    ascending, order = scores.sort(dim=-1)
    kept = ascending.softmax(dim=-1).cumsum(dim=-1) > 1 - top_p
    kept[..., -1] = True
    return torch.zeros_like(kept).scatter_(-1, order, kept)


def _above_min_p(scores: Float[Tensor, "*b V"], min_p: float) -> Bool[Tensor, "*b V"]:
    probs = scores.softmax(dim=-1)
    return probs >= min_p * probs.amax(dim=-1, keepdim=True)


def _typical(scores: Float[Tensor, "*b V"], mass: float) -> Bool[Tensor, "*b V"]:
    surprise = -scores.log_softmax(dim=-1)
    entropy = (surprise * surprise.neg().exp()).nansum(dim=-1, keepdim=True)
    distance, order = (surprise - entropy).abs().sort(dim=-1)
    reached = (scores.gather(-1, order).softmax(dim=-1).cumsum(dim=-1) < mass).sum(dim=-1, keepdim=True)
    kept = distance <= distance.gather(-1, reached.clamp_max(scores.shape[-1] - 1))
    kept[..., 0] = True
    return torch.zeros_like(kept).scatter_(-1, order, kept)


_FILTERS: tuple[tuple[str, Callable[..., Tensor], float], ...] = (
    ("top_k", _in_top_k, 0),
    ("top_p", _in_top_p, 1.0),
    ("min_p", _above_min_p, 0.0),
    ("typical_p", _typical, 1.0),
)
"""The filters in the order in which they are applied: the setting, what is kept, and the value that keeps all."""


def filtered_scores(scores: Float[Tensor, "*b V"], params: SamplingParams) -> Float[Tensor, "*b V"]:
    """Return scores as Hugging Face's warpers leave them: over the temperature, minus infinity where filtered out.

    At temperature 0 there are no warpers, and the scores are returned as they are.
    """
    if params.temperature == 0:
        return scores
    return _filtered(scores if params.temperature == 1 else scores / params.temperature, params)


def filters_in_force(params: SamplingParams) -> dict[str, float]:
    """Return the settings that change a distribution, by name, in the order in which they are applied."""
    off = SamplingParams()
    return {name: value for name, value in vars(params).items() if value != getattr(off, name)}


def check_probs(probs: Float[Tensor, "*b V"], name: str, tolerance: float = 1e-4) -> None:
    """Check that every row is a distribution.

    Raises:
        InvalidProbabilities: an entry is NaN or negative, or a row does not sum to one within `tolerance`.
    """
    if not bool((probs >= 0).all()):
        raise InvalidProbabilities(f"{name} has a negative or NaN entry: its smallest is {float(probs.min())}.")
    worst = (probs.sum(dim=-1) - 1).abs().max() if probs.numel() else torch.zeros(())
    if not bool(worst <= tolerance):
        raise InvalidProbabilities(f"{name} has a row whose sum differs from 1 by {float(worst):.3g}.")


def shortlist(
    logits: Float[Tensor, "*b V"], params: SamplingParams, size: int, *, check: bool = True
) -> tuple[Int[Tensor, "*b K"], Float[Tensor, "*b K"]]:
    """Return the K likeliest tokens of each row, likeliest first, and their probabilities renormalised to one.

    A draft law is ours to choose, so cutting it to K tokens costs no exactness. The filters of `params` are
    applied to the K tokens instead of the whole row; temperature 0 ranks by the plain softmax, because a
    deterministic draft needs the order and nothing else.
    """
    values, tokens = logits.topk(min(size, logits.shape[-1]), dim=-1)
    return tokens, _draft_law(values, values[..., :1], params, check)


def whole_row(
    logits: Float[Tensor, "*b V"], params: SamplingParams, *, check: bool = True
) -> tuple[Int[Tensor, "*b V"], Float[Tensor, "*b V"]]:
    """Return all tokens, in the order of their ids, and their probabilities: a shortlist that cuts nothing off."""
    tokens = torch.arange(logits.shape[-1], device=logits.device).expand(logits.shape)
    return tokens, _draft_law(logits, logits.amax(dim=-1, keepdim=True), params, check)


def _draft_law(
    logits: Float[Tensor, "*b K"], peak: Float[Tensor, "*b 1"], params: SamplingParams, check: bool
) -> Float[Tensor, "*b K"]:
    """Return the drafts' law over listed tokens; temperature 0 keeps the plain softmax, for its order."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if check:
        _check_peaks(peak)
    return _softened(logits, peak.to(logits.dtype), params if params.temperature > 0 else SamplingParams())


def to_atoms(target_probs: Float[Tensor, "*b V"], tokens: Int[Tensor, "*b K"]) -> Float[Tensor, "*b K+1"]:
    """Reduce dense rows to K + 1 atoms: the target's mass on each shortlist token, then the mass of all others.

    A token of -1 is an empty place of the shortlist and has no mass.
    """
    listed = target_probs.gather(-1, tokens.clamp_min(0)) * (tokens >= 0)
    tail = (1 - listed.sum(dim=-1, keepdim=True)).clamp_min(0)
    return torch.cat([listed, tail], dim=-1)


def without(probs: Float[Tensor, "*b V"], tokens: Int[Tensor, "*b K"]) -> Float[Tensor, "*b V"]:
    """Return the rows with the given tokens' mass removed (not renormalised); tokens of -1 remove nothing."""
    padded = torch.nn.functional.pad(probs, (0, 1))
    return padded.scatter_(-1, tokens.where(tokens >= 0, probs.shape[-1]), 0.0)[..., :-1]


def normalised(mass: Float[Tensor, "*b V"], fallback: Float[Tensor, "*b V"]) -> Float[Tensor, "*b V"]:
    """Scale rows to sum to one; a row without mass becomes the fallback row."""
    total = mass.sum(dim=-1, keepdim=True)
    return torch.where(total > 0, mass / total.where(total > 0, torch.ones_like(total)), fallback)


def residual(target_probs: Float[Tensor, "*b V"], draft_probs: Float[Tensor, "*b V"]) -> Float[Tensor, "*b V"]:
    """Return norm((target - draft)+), the law after a rejection (arXiv 2211.17192, section 2.3).

    Where the rows are equal nothing is ever rejected; the target itself is returned there.
    """
    return normalised((target_probs - draft_probs).clamp_min(0), target_probs)


def overlap(target_probs: Float[Tensor, "*b V"], draft_probs: Float[Tensor, "*b V"]) -> Float[Tensor, "*b"]:
    """Return sum_x min(target(x), draft(x)): the acceptance rate of one draft, and one minus total variation."""
    return torch.minimum(target_probs, draft_probs).sum(dim=-1)


def sample(weights: Float[Tensor, "*b V"], uniforms: Float[Tensor, "*b"]) -> Int[Tensor, "*b"]:
    """Draw one index per row with probability proportional to its weight, by inverting the distribution function.

    Args:
        weights: non-negative, with positive sum; an index of weight zero is never drawn.
        uniforms: in [0, 1).
    """
    cumulative = weights.double().cumsum(dim=-1)
    total = cumulative[..., -1]
    below = torch.nextafter(total, torch.zeros_like(total))
    point = torch.minimum(uniforms.double() * total, below)
    return torch.searchsorted(cumulative, point.unsqueeze(-1), right=True).squeeze(-1)


@dataclass(eq=False)
class Record:
    """What was drawn from recorded streams: how often numbers were, and what was made of them."""

    numbers: int = 0
    drawn: list[tuple[int, Any, frozenset[int]]] = field(default_factory=list[tuple[int, Any, frozenset[int]]])
    outer: "Record | None" = None

    def count(self) -> None:
        """Take note that numbers were drawn, here and in the record around this one."""
        self.numbers += 1
        if self.outer is not None:
            self.outer.count()

    def only(self) -> tuple[Any, frozenset[int]] | None:
        """Return the only thing that was made of the numbers, and the rows of it that are nobody's.

        None if there are several, or numbers that are not in it. So None with `numbers` above 0 says that something was
        drawn and is lost.
        """
        if len(self.drawn) != 1 or self.drawn[0][0] != self.numbers:
            return None
        return self.drawn[0][1:]


@dataclass(frozen=True)
class Noise:
    """One stream of random numbers per batch row, so that a row's text never depends on its neighbours.

    Two draws from one stream share their beginning whatever their length, and every decoding step has streams of its
    own (`at`), so that a row is not disturbed by a neighbour with a larger tree either. Beside the streams there are
    numbers tied to a place in the text (`tied`), which are the same in whatever step the place is reached.

    How different streams are: seeds are mixed to 63 bits, but torch's generator on a CPU reads the last 32 of a seed,
    on a GPU all. So there are 2^32 streams on a CPU, and two steps of one row or two rows share theirs by chance: among
    n of them some pair does with probability about n^2 / 2^33, a tenth for 30 000 steps. Over seeds, the law of what
    these write together is off by no more than that probability. Two calls whose seeds differ by a multiple of 2^32
    have other streams in every step, since `at` mixes whole seeds. Tied numbers use all 64 bits.

    Args:
        generators: one stream per row.
        seeds: what the tied numbers depend on, per row; empty for the streams' own seeds.
        lengths: the tokens that each row had before this step; None for none.
        record: what was drawn from these streams, and from those that were made of them; None where nobody asks.
        unused: the rows that are nobody's, whose streams are not theirs.
    """

    generators: tuple[Generator, ...]
    seeds: tuple[int, ...] = ()
    lengths: Int[Tensor, "b"] | None = None
    record: Record | None = field(default=None, compare=False, repr=False)
    unused: frozenset[int] = frozenset()

    @classmethod
    def from_seed(cls, seed: int, rows: int, device: torch.device | str = "cpu") -> "Noise":
        """Return `rows` streams of their own (up to 32 bits of their seeds, see above), fixed by `seed`."""
        return cls(tuple(Generator(device).manual_seed(seed + 1_000_003 * row) for row in range(rows)))

    @classmethod
    def of_row(cls, seed: int, row: int, device: torch.device | str = "cpu") -> "Noise":
        """Return one stream: that of row `row` of a batch with this seed."""
        return cls.from_seed(seed + 1_000_003 * row, 1, device)

    def at(self, steps: int | Sequence[int], lengths: Int[Tensor, "b"] | None = None) -> "Noise":
        """Return fresh streams that depend on these streams' seeds and the step, not on what was drawn before.

        `steps` are the rows' own where they differ. `lengths` are the rows' tokens before the step, from which `tied`
        counts.
        """
        seeds = self._own_seeds()
        each = [steps] * len(self.generators) if isinstance(steps, int) else steps
        pairs = zip(self.generators, each, strict=True)
        mixed = (Generator(one.device).manual_seed(_mixed(one.initial_seed(), step)) for one, step in pairs)
        return Noise(tuple(mixed), seeds, lengths, self.record, self.unused)

    def joined(self, row: int, other: "Noise") -> "Noise":
        """Return these streams with the only stream of another in place of a row's, or behind the last."""
        return Noise((*self.generators[:row], other.generators[0], *self.generators[row + 1 :]))

    def of(self, rows: Sequence[int]) -> "Noise":
        """Return the streams of some rows, in the state that they are in; of -1 some other."""
        own = self._own_seeds()
        places = torch.tensor([max(row, 0) for row in rows])
        lengths = None if self.lengths is None else self.lengths[sent(places, self.lengths.device)]
        generators = tuple(
            self.generators[row] if row >= 0 else Generator(self.generators[0].device).manual_seed(0) for row in rows
        )
        unused = frozenset(place for place, row in enumerate(rows) if row < 0 or row in self.unused)
        return Noise(generators, tuple(own[max(row, 0)] for row in rows), lengths, self.record, unused)

    def recorded(self) -> "Noise":
        """Return the same streams with a record of their own, so that it is known whether a number was drawn."""
        return replace(self, record=Record())

    def inside(self) -> "Noise":
        """Return the same streams for a loop inside a drafter: what it makes of its numbers is not the drafter's."""
        return self if self.record is None else replace(self, record=Record(outer=self.record))

    def note(self, drawn: Any) -> None:
        """Say what was made of the numbers drawn so far, for whoever reads the record."""
        if self.record is not None:
            self.record.drawn.append((self.record.numbers, drawn, self.unused))

    def again(self) -> "Noise":
        """Return the same streams, put back to their beginnings, for whoever shares them too."""
        for one in self.generators:
            one.manual_seed(one.initial_seed())
        return self

    def places(self) -> tuple[Tensor, ...]:
        """Return where each stream stands."""
        return tuple(one.get_state() for one in self.generators)

    def moved_to(self, places: Sequence[Tensor]) -> None:
        """Put streams where they stood, for whoever shares them too."""
        for one, place in zip(self.generators, places, strict=True):
            one.set_state(place)

    def fork(self, level: int) -> "Noise":
        """Return streams of their own for a decoder inside a decoder, which depend on these streams' seeds."""
        mixed = (
            Generator(one.device).manual_seed(_mixed(one.initial_seed() ^ _FORK, level)) for one in self.generators
        )
        return Noise(tuple(mixed), record=self.record, unused=self.unused)

    def further(self, places: Sequence[int]) -> "Noise":
        """Return streams of their own for what comes so many places on in each row's text; tied numbers stay tied."""
        moved = torch.tensor(places)
        moved = moved if self.lengths is None else self.lengths.to(moved.device) + moved
        return replace(self.fork(_FURTHER), seeds=self._own_seeds(), lengths=moved)

    def keyed(self, keys: Sequence[bytes]) -> "Noise":
        """Return streams that depend on these streams' seeds and a key each; a row whose key is empty keeps its own."""
        if not any(keys):
            return self
        mixed = (
            Generator(one.device).manual_seed(_mixed(one.initial_seed() ^ _KEYED, _number(key))) if key else one
            for one, key in zip(self.generators, keys, strict=True)
        )
        return Noise(tuple(mixed))

    def uniform(self, *shape: int) -> Shaped[Tensor, "b ..."]:
        """Draw float64 uniforms in [0, 1) of the given shape for every row."""
        if self.record is not None:
            self.record.count()
        rows = [torch.rand(shape, generator=one, device=one.device, dtype=torch.float64) for one in self.generators]
        return torch.stack(rows) if len(rows) > 1 else rows[0].unsqueeze(0)

    def tied(self, depth: int, tokens: Int[Tensor, "b *n"]) -> Float[Tensor, "b *n"]:
        """Return float64 uniforms in [0, 1) tied to the row's seed, a position in its text, and a token id.

        The position is `depth` places after the row's next token. The number does not depend on the step, the tree or
        what else was drawn; numbers of different positions or tokens are independent (SplitMix64's stream).
        """
        seeds = self._own_seeds()
        lengths = [0] * len(seeds) if self.lengths is None else map(int, self.lengths)
        places = [
            _signed(_scrambled(_scrambled(seed) + (length + depth) * _WEYL))
            for seed, length in zip(seeds, lengths, strict=True)
        ]
        start = torch.tensor(places, device=tokens.device).view(-1, *[1] * (tokens.dim() - 1))
        return _hashed((tokens + 1).mul_(_signed(_WEYL)).add_(start))

    def _own_seeds(self) -> tuple[int, ...]:
        return self.seeds or tuple(one.initial_seed() for one in self.generators)


def _number(key: bytes) -> int:
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "little")


_FORK, _KEYED = 0xD1B54A32D192ED03, 0xA24BAED4963EE407
_FURTHER = 0x466F72636564
_WEYL = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _mixed(seed: int, step: int) -> int:
    """Mix a seed and a step number into a seed without pattern, of 63 bits."""
    return _scrambled(seed + (step + 1) * _WEYL) >> 1


def _scrambled(state: int) -> int:
    """Apply SplitMix64's finaliser to a state of 64 bits."""
    state %= 2**64
    state = (state ^ (state >> 30)) * _FIRST % 2**64
    state = (state ^ (state >> 27)) * _SECOND % 2**64
    return state ^ (state >> 31)


def _hashed(states: Int[Tensor, "*b"]) -> Float[Tensor, "*b"]:
    """Turn states into uniforms in [0, 1) by the same finaliser, in place; its products overflow on purpose."""
    states.bitwise_xor_(_shifted(states, 30)).mul_(_signed(_FIRST))
    states.bitwise_xor_(_shifted(states, 27)).mul_(_signed(_SECOND))
    states.bitwise_xor_(_shifted(states, 31))
    return _shifted(states, 11).double().mul_(2.0**-53)


def _shifted(states: Int[Tensor, "*b"], places: int) -> Int[Tensor, "*b"]:
    """Shift right, filling with zeros: torch's own shift repeats the sign."""
    return states.bitwise_right_shift(places).bitwise_and_((1 << (64 - places)) - 1)


def _signed(number: int) -> int:
    """Return the signed 64-bit integer with the same bits."""
    return (number + 2**63) % 2**64 - 2**63
