"""Processors of grammar libraries, as faithful imitations that are always there; `make test-grammars` has the real."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from doubles import perturbed, tiny_model
from torch import Tensor
from transformers import LogitsProcessor

import polydraft
from polydraft import Fixed, Widths
from polydraft.models.generation.processors import ReplayedGuide
from polydraft.trees import EAGLE_25

VOCAB, NEW = 24, 16


class Index:
    """A language over tokens that no copy can be made of: each token is at most 4 more than the last, round."""

    def __deepcopy__(self, memo: object) -> None:
        raise TypeError("cannot pickle 'Index' object")

    def get_initial_state(self) -> int:
        return 0

    def allowed(self, state: int) -> list[int]:
        return [(state + step) % VOCAB for step in range(5)]


class Guide:
    """outlines-core's guide: it takes tokens, and raises at one that is not allowed."""

    def __init__(self, index: Index) -> None:
        self.index, self.state = index, index.get_initial_state()

    def __deepcopy__(self, memo: object) -> None:
        raise TypeError("cannot pickle 'Guide' object")

    __copy__ = None

    def get_state(self) -> int:
        return self.state

    def is_finished(self) -> bool:
        return False

    def accepts_tokens(self, tokens: Sequence[int]) -> bool:
        return tokens[0] in self.index.allowed(self.state)

    def advance(self, token_id: int, return_tokens: bool = True) -> None:
        if token_id not in self.index.allowed(self.state):
            raise ValueError("No next state found")
        self.state = token_id

    def deep_copy(self) -> "Guide":
        return self.fork()

    def fork(self) -> "Guide":
        twin = Guide(self.index)
        twin.state = self.state
        return twin


class OutlinesCoreLogitsProcessor(LogitsProcessor):
    """With the calls, the fields and the order of outlines' own: guides and masks are made at the first call."""

    matchers, masks, bias = "_guides", "_bitmasks", "bias_logits"

    def __init__(self, index: Index) -> None:
        self.index, self.is_first_token, self.library = index, True, torch

    def __call__(self, input_ids: Tensor, logits: Tensor) -> Tensor:
        if self.is_first_token:
            setattr(self, self.matchers, [Guide(self.index) for _ in input_ids])
            setattr(self, self.masks, [torch.zeros(VOCAB, dtype=torch.bool) for _ in input_ids])
            setattr(self, self.bias, self.biased)
            self.is_first_token = False
        else:
            for guide, row in zip(getattr(self, self.matchers), input_ids, strict=True):
                if not guide.is_finished() or guide.accepts_tokens([int(row[-1])]):
                    guide.advance(token_id=int(row[-1]), return_tokens=False)
        return getattr(self, self.bias)(logits)

    def biased(self, logits: Tensor) -> Tensor:
        pairs = zip(getattr(self, self.matchers), getattr(self, self.masks), strict=True)
        for row, (guide, mask) in enumerate(pairs):
            mask.fill_(False)
            mask[self.index.allowed(guide.get_state())] = True
            logits[row, ~mask] = -torch.inf
        return logits


class LLGuidanceLogitsProcessor(OutlinesCoreLogitsProcessor):
    """The same with the fields of outlines' processor for llguidance."""

    matchers, masks, bias = "ll_matchers", "bitmask", "_bias_logits"


class XGrammarLogitsProcessor(OutlinesCoreLogitsProcessor):
    """The same with those of outlines' processor for xgrammar."""

    matchers, masks, bias = "_matchers", "_bitmask", "_bias_logits"


KINDS = {
    "outlines_core": OutlinesCoreLogitsProcessor,
    "llguidance": LLGuidanceLogitsProcessor,
    "xgrammar": XGrammarLogitsProcessor,
}
for place, kind in KINDS.items():
    kind.__module__ = f"outlines.backends.{place}"


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("policy", [Widths((3, 2, 2)), Fixed(EAGLE_25)], ids=["wide", "deep"])
@pytest.mark.parametrize("rows", [1, 2])
def test_outlines_processors_are_forked(kind: Any, policy: Any, rows: int) -> None:
    model, ids = tiny_model("llama", VOCAB), torch.tensor([[3, 5], [4, 6]])[:rows]
    usual: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW}
    usual |= {"eos_token_id": None, "pad_token_id": 0}
    plain = model.generate(ids, do_sample=False, logits_processor=[kind(Index())], **usual)
    own = kind(Index())
    settings = {"drafter": perturbed(model, 0.03), "policy": policy, "temperature": 0, **usual}
    output = polydraft.generate(model, ids, logits_processor=[own], **settings)
    assert torch.equal(output.sequences, plain)
    assert output.statistics.accepted > 0 and not output.statistics.fallback
    assert own.is_first_token, "the user's own stays as it was"


def test_they_run_beside_other_texts() -> None:
    model = tiny_model("llama", VOCAB)
    usual: dict[str, Any] = {"max_new_tokens": NEW, "eos_token_id": None, "pad_token_id": 0, "temperature": 0}
    own = {row: {"logits_processor": [OutlinesCoreLogitsProcessor(Index())]} for row in range(3)}
    prompts = [[3, 5], [4, 6, 1], [2]]
    for one in polydraft.generate_many(model, prompts, per_prompt=own, drafter=perturbed(model, 0.03), **usual):
        ids = torch.tensor([prompts[int(str(one.name))]])
        masks = [OutlinesCoreLogitsProcessor(Index())]
        alone = polydraft.generate(model, ids, drafter="none", logits_processor=masks, **usual)
        assert one.tokens == alone.sequences[0, ids.shape[1] :].tolist()


def test_a_guide_is_copied_by_what_it_took() -> None:
    index = Index()
    one = ReplayedGuide(Guide(index))
    one.advance(3)
    other = one.fork(index)
    other.advance(5)
    assert (one.get_state(), one.tokens) == (3, [3]) and (other.get_state(), other.tokens) == (5, [3, 5])
