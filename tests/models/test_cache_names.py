"""How a model takes its cache is asked by a pass, whatever its parameters and the fields of its output are called."""

import inspect
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Cache, LlamaForCausalLM
from transformers.utils import ModelOutput

import polydraft
from polydraft.errors import UnsupportedModel
from polydraft.models import HuggingFaceModel
from polydraft.models.tiny import tiny_draft, tiny_target

OWN = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"
"""How the installed version of transformers calls it."""
PROMPT = torch.tensor([[1, 5, 2, 6]])


@dataclass
class Told(ModelOutput):
    logits: Tensor | None = None
    memory: Cache | None = None


class Renamed(LlamaForCausalLM):
    """Takes and returns a cache by a name that no version of transformers has."""

    def forward(self, input_ids: Any = None, position_ids: Any = None, memory: Any = None, **more: Any) -> Any:
        made = super().forward(input_ids, position_ids=position_ids, **{OWN: memory}, **more)
        return Told(logits=made.logits, memory=made.get(OWN))


class TakenOtherwise(LlamaForCausalLM):
    """Takes a cache by another name than it returns it."""

    def forward(self, input_ids: Any = None, position_ids: Any = None, history: Any = None, **more: Any) -> Any:
        made = super().forward(input_ids, position_ids=position_ids, **{OWN: history}, **more)
        return Told(logits=made.logits, memory=made.get(OWN))


class NotReturned(LlamaForCausalLM):
    """Fills a cache and does not return it."""

    def forward(self, input_ids: Any = None, position_ids: Any = None, memory: Any = None, **more: Any) -> Any:
        return Told(logits=super().forward(input_ids, position_ids=position_ids, **{OWN: memory}, **more).logits)


class OnlyKeywords(LlamaForCausalLM):
    """Names no parameter, as wrappers do."""

    def forward(self, **given: Any) -> Any:
        return super().forward(**given)


class OldWord(LlamaForCausalLM):
    """Names no parameter, and takes a cache by transformers' older name only."""

    def forward(self, *, use_cache: Any = None, **given: Any) -> Any:
        made = super().forward(use_cache=use_cache, **{OWN: given.pop("past_key_values", None)}, **given)
        return Told(logits=made.logits, memory=made.get(OWN))


class Ignoring(LlamaForCausalLM):
    """Has the right words in its signature, but reads every text anew."""

    def forward(
        self,
        input_ids: Any = None,
        position_ids: Any = None,
        past_key_values: Any = None,
        cache: Any = None,
        **more: Any,
    ) -> Any:
        return super().forward(input_ids, position_ids=position_ids, **more)


class Bare(LlamaForCausalLM):
    """Returns a tuple."""

    def forward(self, *given: Any, **named: Any) -> Any:
        return super().forward(*given, **named).to_tuple()


def of_class(kind: type[LlamaForCausalLM]) -> LlamaForCausalLM:
    """Return a tiny model of a class of ours."""
    plain = tiny_target()
    made = kind(plain.config).double().eval()
    made.load_state_dict(plain.state_dict())
    return made


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (LlamaForCausalLM, OWN),
        (Renamed, "memory"),
        (TakenOtherwise, "history"),
        (NotReturned, "memory"),
        (OnlyKeywords, OWN),
        (OldWord, "past_key_values"),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_may_call_its_cache_as_it_likes(kind: type[LlamaForCausalLM], name: str, temperature: float) -> None:
    plain, model = tiny_target(), of_class(kind)
    assert HuggingFaceModel(model).cached_as == name
    options = {"drafter": tiny_draft(plain), "temperature": temperature, "seed": 3, "max_new_tokens": 16}
    found = polydraft.generate(model, PROMPT, policy="1,1,1", **options)
    assert found.sequences.tolist() == polydraft.generate(plain, PROMPT, policy="1,1,1", **options).sequences.tolist()
    if not temperature:
        greedy = plain.generate(PROMPT, max_new_tokens=16, do_sample=False)
        assert found.sequences.tolist() == greedy.tolist()


def test_the_right_word_alone_is_not_believed() -> None:
    with pytest.raises(UnsupportedModel, match=r"^Ignoring takes no cache that could keep what was read, so every"):
        HuggingFaceModel(of_class(Ignoring))


def test_outputs_without_names_are_refused_with_the_setting() -> None:
    with pytest.raises(UnsupportedModel, match=r"^Bare returns a tuple without names, so its logits are not known\."):
        HuggingFaceModel(of_class(Bare))
