"""Draft rows of two weights, whose laws without replacement are exact fractions for any number of drafts."""

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import cache

import torch
from torch import Tensor


@dataclass(frozen=True)
class TwoWeights:
    """`heavy` tokens of a weight, then `light` tokens of weight one."""

    heavy: int
    light: int
    weight: int
    drafts: int

    @property
    def size(self) -> int:
        return self.heavy + self.light

    def row(self) -> Tensor:
        weights = torch.tensor([self.weight] * self.heavy + [1] * self.light, dtype=torch.float64)
        return weights / weights.sum()

    def containment(self, members: Iterable[int]) -> Fraction:
        """Return Pr[all drafts are members], draft after draft."""
        tokens = list(members)
        heavy = sum(token < self.heavy for token in tokens)
        light = len(tokens) - heavy

        @cache
        def rest(drawn_heavy: int, drawn_light: int) -> Fraction:
            if drawn_heavy + drawn_light == self.drafts:
                return Fraction(1)
            left = (self.heavy - drawn_heavy) * self.weight + self.light - drawn_light
            chance = Fraction(0)
            if heavy > drawn_heavy:
                chance += Fraction((heavy - drawn_heavy) * self.weight, left) * rest(drawn_heavy + 1, drawn_light)
            if light > drawn_light:
                chance += Fraction(light - drawn_light, left) * rest(drawn_heavy, drawn_light + 1)
            return chance

        return rest(0, 0)


MANY_DRAFTS = [
    TwoWeights(20, 20, 3, 4),
    TwoWeights(32, 32, 10**6, 16),
    TwoWeights(10, 30, 10**9, 12),
    TwoWeights(20, 20, 3, 17),
    TwoWeights(4, 60, 1000, 24),
    TwoWeights(30, 34, 50, 32),
    TwoWeights(32, 32, 10**6, 40),
]
