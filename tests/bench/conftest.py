import pytest
from doubles import perturbed, tiny_model, tiny_tokenizer

from polydraft.bench import Prompt
from polydraft.models import Pair
from polydraft_lab.limits import LimitsSettings, Models, Record, measure

VOCABULARY = 101


@pytest.fixture(scope="session")
def models() -> Models:
    """A tiny pair whose draft is right some of the time."""
    target = tiny_model("llama", VOCABULARY)
    return Models.of(Pair(target, perturbed(target, 0.1), tiny_tokenizer()))


@pytest.fixture(scope="session")
def prompts() -> list[Prompt]:
    """Two prompts of one task and one of another."""
    return [Prompt("1", "code", "def f(a):"), Prompt("1", "tale", "Once upon a time"), Prompt("2", "code", "class A:")]


@pytest.fixture(scope="session")
def settings() -> LimitsSettings:
    """Small settings."""
    return LimitsSettings(
        (0.0, 0.8), drafts=(1, 2, 3), max_tokens=7, shortlist=8, tree_every=3, shapes=("chain:2", "2,1")
    )


@pytest.fixture(scope="session")
def records(models: Models, prompts: list[Prompt], settings: LimitsSettings) -> list[Record]:
    """All records, in order."""
    return list(measure(models, prompts, settings))
