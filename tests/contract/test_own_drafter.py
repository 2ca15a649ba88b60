"""A drafter of a user's own that meets a verifier which it cannot draft for: the error says which one to pass."""

import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from doubles import tiny_model

import polydraft
import polydraft.schemes as schemes
import polydraft.verifiers as verifiers
from polydraft.catalogue import every_scheme
from polydraft.drafters import Drafter, NgramDrafter, drafters_in, known_outside, owned_models
from polydraft.engine import generate_many
from polydraft.errors import UnpairedScheme
from polydraft.models import HuggingFaceModel
from polydraft.schemes import Given, Scheme, require_scheme

IDS = torch.tensor([[3, 1, 4, 3, 1]])
OPTIONS = {"max_new_tokens": 4, "top_k": 0}


@dataclass(frozen=True)
class Mine(Drafter):
    """Looks texts up; says that its drafts are `allowed`."""

    allowed: tuple[type, ...] = (Given,)
    name = "mine"

    def check(self, scheme: Scheme) -> None:
        require_scheme(scheme, self.allowed, "Mine")

    def start(self, *arguments: Any) -> Any:
        return NgramDrafter().start(*arguments)

    def draft(self, *arguments: Any) -> Any:
        return NgramDrafter().draft(*arguments)

    def commit(self, *arguments: Any) -> Any:
        return NgramDrafter().commit(*arguments)


class Foreign(Given):
    """A scheme of somebody else's."""

    name = "foreign"


def generated(temperature: float, **choices: Any) -> Any:
    mask = torch.ones_like(IDS)
    return polydraft.generate(
        tiny_model("llama"), IDS, attention_mask=mask, temperature=temperature, **choices, **OPTIONS
    )


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_error_names_a_verifier_and_that_verifier_works(temperature: float) -> None:
    assert isinstance(Mine(), Drafter)
    with pytest.raises(UnpairedScheme) as caught:
        generated(temperature, drafter=Mine())
    says = str(caught.value)
    assert says.startswith("Mine works with drafts that are given, not ") and says.count(". ") == 0
    (hint,) = re.findall(r"for example verifier=(.*)\.$", says)
    assert hint == "TopDown(NaiveMatch(Given()))"
    verifier = eval(hint, {**vars(verifiers), **vars(schemes)})
    output = generated(temperature, drafter=Mine(), verifier=verifier)
    assert output.sequences.shape == (1, 9) and output.statistics.drafted > 0


def test_many_texts_say_the_same() -> None:
    with pytest.raises(UnpairedScheme, match=r"verifier=TopDown\(NaiveMatch\(Given\(\)\)\)"):
        generate_many(tiny_model("llama"), [IDS[0]], drafter=Mine(), temperature=0.8, **OPTIONS)


def test_every_scheme_is_hinted_at_by_its_own_name() -> None:
    for scheme in every_scheme():
        other = verifiers.TopDown(verifiers.NaiveMatch(Given() if scheme != Given() else schemes.TopK()))
        with pytest.raises(UnpairedScheme, match=re.escape(f"verifier=TopDown(NaiveMatch({scheme}))")):
            generated(0.8, drafter=Mine((type(scheme),)), verifier=other)


def test_a_drafter_of_a_foreign_scheme_needs_a_verifier_of_its_own() -> None:
    with pytest.raises(UnpairedScheme, match=r"drafts that are foreign, not iid; it takes none of .* of its own"):
        generated(0.8, drafter=Mine((Foreign,)))


def test_drafters_and_models_are_found_wherever_they_stand_in_fields() -> None:
    model = HuggingFaceModel(tiny_model("llama"))

    class Inner(NgramDrafter):
        def outside(self, row: int) -> bytes:
            return b"inner"

    class Slotted(Mine):
        __slots__ = ("inside",)

    class Around(Mine):
        pass

    slotted, around = Slotted(), Around()
    object.__setattr__(slotted, "inside", Inner())
    vars(around).update(listed=[(model, 3)], named={"one": slotted, 4: {5: model}}, itself=around)
    assert [type(one) for one in drafters_in(around)] == [Around, Slotted, Inner]
    assert owned_models(around) == (model,) and known_outside(around, 0) == b"inner"
