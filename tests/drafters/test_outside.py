"""Seeds that are used again over what they wrote: numbers are forked by what drafters know from outside a text."""

from collections.abc import Callable
from math import comb
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles import perturbed, plain_logits, tiny_model

import polydraft
from polydraft import HuggingFaceModel, LookaheadDrafter, NgramPool, OuroborosDrafter, SuffixStore, TextStore
from polydraft.drafters import (
    Drafter,
    JacobiDrafter,
    LookupFirst,
    MergedDrafter,
    ModelDrafter,
    NgramDrafter,
    NoDraft,
    PredictedDrafter,
    RecyclingDrafter,
    RetrievalDrafter,
    RoutedDrafter,
    Session,
    SuffixDrafter,
    known_outside,
)
from polydraft.drafters.contract import digest_of
from polydraft.probs import Noise, SamplingParams
from polydraft.reading import Text

VOCAB, PROMPT = 10, [3, 1, 4]
TARGET = tiny_model("llama", VOCAB)
POOL = NgramPool(2, 1)
OTHER = ModelDrafter(HuggingFaceModel(perturbed(TARGET, 0.05)))
EVEN: dict[str, Any] = {"temperature": 1000.0, "top_k": 0}


def texts(seed: int, drafter: Any, rows: int = 1, new: int = 2, **options: Any) -> list[list[int]]:
    ids = torch.tensor([PROMPT] * rows)
    found: Any = polydraft.generate(
        TARGET,
        ids,
        attention_mask=torch.ones_like(ids),
        seed=seed,
        drafter=drafter,
        max_new_tokens=new,
        **{**EVEN, **options},
    )
    return found.sequences[:, len(PROMPT) :].tolist()


def over_a_store(folder: Path, seed: int) -> list[int]:
    drafter = SuffixDrafter(store=SuffixStore(folder / str(seed)))
    texts(seed, drafter)
    return texts(seed, drafter)[0]


def over_a_pool(_: Path, seed: int) -> list[int]:
    ((first, _),) = texts(seed, "none")
    return texts(seed, LookaheadDrafter(2, 1, 1, pool=POOL.added([(PROMPT[-1], (first,))])))[0]


def over_a_prediction(_: Path, seed: int) -> list[int]:
    (written,) = texts(seed, "none")
    return texts(seed, PredictedDrafter(written))[0]


@pytest.mark.slow
@pytest.mark.parametrize("again", [over_a_store, over_a_pool, over_a_prediction])
def test_a_seed_that_is_used_again_follows_the_law(again: Callable[[Path, int], list[int]], tmp_path: Path) -> None:
    """What is drafted is what the seed wrote before. With the same numbers a rejected token's place was drawn again.

    All tokens are about as likely. The second text then hardly ever began with the first token or the last: in 6 texts
    of 160, where 32 are expected. No more than 12 come with a probability below 2e-5 if the law is the target's.
    """
    count, bound = 160, 12
    law = (plain_logits(TARGET, PROMPT) / EVEN["temperature"]).softmax(-1)
    chance = float(law[0] + law[-1])
    assert sum(comb(count, k) * chance**k * (1 - chance) ** (count - k) for k in range(bound + 1)) < 2e-5
    assert sum(again(tmp_path, seed)[0] in (0, VOCAB - 1) for seed in range(count)) > bound


def store_of(folder: Path, *added: list[int]) -> SuffixStore:
    store = SuffixStore(folder)
    for text in added:
        store.add(text)
    return store


def test_a_digest_changes_with_what_is_in_a_store_and_is_the_same_where_nothing_changed(tmp_path: Path) -> None:
    store = store_of(tmp_path)
    found = [store.digest()]
    for text in ([1, 2, 3], [1, 2, 3], [4, 5]):
        store.add(text)
        found.append(store.digest())
        assert store.digest() == found[-1]
    store.flush()
    found += [store.digest(), SuffixStore(tmp_path).digest()]
    assert found[0] == b"" and len({*found}) == len(found) - 1 and found[-1] == found[-2]
    assert TextStore(tmp_path).digest() not in (b"", digest_of()) and store.digest() == found[-1]
    store.add([7, 8, 9])
    store.flush()
    assert store.digest() not in found


def test_who_knows_nothing_from_outside_keeps_the_numbers_of_the_seed(tmp_path: Path) -> None:
    members = (NgramDrafter(), RecyclingDrafter(), JacobiDrafter(), SuffixDrafter())
    knowing = SuffixDrafter(store=store_of(tmp_path / "empty"))
    for drafter in (
        *members,
        NoDraft(),
        OTHER,
        LookaheadDrafter(),
        MergedDrafter(members),
        RoutedDrafter(members, OTHER),
        knowing,
    ):
        assert known_outside(drafter, 0) == b""
    noise = Noise.from_seed(3, 2)
    assert noise.keyed([b"", b""]) is noise
    half = noise.keyed([b"", b"something"])
    assert half.generators[0] is noise.generators[0]
    assert half.generators[1].initial_seed() != noise.generators[1].initial_seed()
    again = noise.keyed([b"", b"something"])
    assert torch.equal(again.at(1).uniform(3)[1], half.at(1).uniform(3)[1])
    assert not torch.equal(half.at(1).uniform(3)[1], noise.keyed([b"", b"else"]).at(1).uniform(3)[1])
    assert not torch.equal(half.tied(0, torch.tensor([[1], [1]]))[1], noise.tied(0, torch.tensor([[1], [1]]))[1])


def test_everybody_around_hands_it_on(tmp_path: Path) -> None:
    drafter = SuffixDrafter(store=store_of(tmp_path, [1, 2, 3]))
    (store,) = (drafter.store,)
    assert isinstance(store, SuffixStore)
    own, ngram = store.digest(), (NgramDrafter(),)
    around: tuple[Drafter, ...] = (
        drafter,
        MergedDrafter((*ngram, drafter)),
        RoutedDrafter((*ngram, drafter), OTHER),
        RoutedDrafter(ngram, drafter),
        LookupFirst(drafter),
        LookupFirst(RoutedDrafter((drafter,))),
    )
    assert {known_outside(one, 0) for one in around} == {own} != {b""}
    both = RoutedDrafter((PredictedDrafter([5]), drafter))
    assert (
        known_outside(both, 0)
        == digest_of(PredictedDrafter([5]).outside(0), known_outside(drafter, 0))
        not in (own, b"")
    )


def test_a_drafter_whose_answer_is_no_digest_does_not_draft_and_no_text_is_lost() -> None:
    class Odd(NgramDrafter):
        def outside(self, row: int) -> Any:
            return "x"

    ids = torch.tensor([[1, 2, 1, 2, 1]])
    options: dict[str, Any] = {"temperature": 0, "max_new_tokens": 6}
    with pytest.warns(RuntimeWarning, match="outside must return bytes, but is str"):
        found = polydraft.generate(TARGET, ids, drafter=Odd(), **options)
    assert torch.equal(found.sequences, polydraft.generate(TARGET, ids, drafter="none", **options).sequences)


def test_predictions_pools_and_shared_tables_are_told_apart(tmp_path: Path) -> None:
    rows = PredictedDrafter([[1, 2], [1, 2, 3], [1, 2]])
    assert (
        known_outside(rows, 0)
        == known_outside(rows, 2)
        == known_outside(PredictedDrafter([1, 2]), 7)
        != known_outside(rows, 1)
    )
    pools = [POOL, *(POOL.added([(1, (token,))]) for token in (2, 3))]
    told = [known_outside(LookaheadDrafter(2, 1, 1, pool=pool), 0) for pool in pools]
    assert told[0] == b"" and len({*told}) == 3
    assert known_outside(OuroborosDrafter(OTHER, level=2, pool=pools[1]), 0) == told[1]
    pools[1].save(tmp_path / "pool")
    assert NgramPool.load(tmp_path / "pool").digest == told[1]
    read = RetrievalDrafter(_written(tmp_path / "read"))
    assert known_outside(read, 0) == known_outside(RetrievalDrafter(tmp_path / "read"), 1) != b""

    shared, text = RecyclingDrafter(shared=True), Text(torch.tensor([PROMPT]), torch.tensor([3]))
    state = shared.start(text, Session(SamplingParams(), 9, VOCAB))
    assert known_outside(shared, 0) == b""
    shared.read(state, text, None)
    once = known_outside(shared, 0)
    shared.read(state, text, None)
    assert known_outside(shared, 0) == once != b""


def _written(folder: Path) -> Path:
    store_of(folder, [1, 2, 3, 4]).close()
    return folder


def test_a_row_has_the_text_of_its_seed_alone_and_over_a_store_that_stays(tmp_path: Path) -> None:
    drafter = SuffixDrafter(store=store_of(tmp_path, [*PROMPT, 5, 6, 7, 1, 4, 2, 2], [4, 4, 1, 4]), keeps=False)
    prompts, options = [PROMPT, [1, 4], [4, 4, 1]], {"max_new_tokens": 12, "temperature": 1.0, "top_k": 0}
    done = [*polydraft.generate_many(TARGET, prompts, batch_size=3, drafter=drafter, seed=3, **options)]
    for one in done:
        ids = torch.tensor([prompts[one.name]])
        again: Any = polydraft.generate(
            TARGET, ids, attention_mask=torch.ones_like(ids), drafter=drafter, seed=one.seed, **options
        )
        assert one.tokens == again.sequences[0, ids.shape[1] :].tolist()


def test_one_that_cannot_answer_does_not_draft() -> None:
    class Mute(NgramDrafter):
        def outside(self, row: int) -> bytes:
            raise KeyError("outside")

    with pytest.warns(RuntimeWarning, match="failed"):
        found = texts(5, Mute(), new=12)
    assert found == texts(5, "none", new=12)
