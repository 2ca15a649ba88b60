"""Ouroboros: chains of a draft model that decodes by lookahead, and phrases that both models find for one another."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles import perturbed, plain_logits, tiny_model
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel

import polydraft
from polydraft import HuggingFaceModel, ModelDrafter, NaiveMatch, NgramDrafter, NgramPool, OuroborosDrafter, TopDown
from polydraft.drafters import DraftRequest, LookaheadDrafter, Session, StoreVocabulary, owned_models
from polydraft.drafters.text.guess import Guess
from polydraft.drafters.text.guess import given as drafted
from polydraft.drafters.text.ouroboros import (
    FollowLikeliest,
    OuroborosState,
    WrittenChain,
    _children,
    confirmed,
    taught,
)
from polydraft.engine.loop.step import LOOP
from polydraft.errors import InvalidParameter, UnpairedScheme, UnsupportedModel, VocabularyMismatch
from polydraft.probs import Noise, SamplingParams
from polydraft.reading import Text
from polydraft.schemes import Given, TopK
from polydraft.trees import Chain, TrunkThenBranch, Widths

VOCAB = 12
PROMPTS = [[3, 1, 4, 1, 5], [7], [2, 7, 2, 7, 2, 7, 1]]
RULE = TopDown(NaiveMatch(Given()))


@cache
def target() -> PreTrainedModel:
    return tiny_model("llama", VOCAB, seed=3)


@cache
def draft(vocab: int = VOCAB, scale: float = 0.05) -> HuggingFaceModel:
    if vocab == VOCAB:
        return HuggingFaceModel(perturbed(target(), scale))
    return HuggingFaceModel(tiny_model("llama", vocab, seed=3))


def ouroboros(**options: Any) -> OuroborosDrafter:
    return OuroborosDrafter(draft(), **{"drafts": 4, "phrases": 2, "level": 3, "window": 3, "guesses": 2, **options})


def text_of(rows: list[list[int]]) -> Text:
    tokens = torch.zeros(len(rows), 40, dtype=torch.int64)
    for row, text in enumerate(rows):
        tokens[row, : len(text)] = torch.tensor(text)
    return Text(tokens, torch.tensor([len(row) for row in rows]))


def begun(drafter: OuroborosDrafter, rows: list[list[int]]) -> Any:
    params = SamplingParams(temperature=0)
    session = Session(params, 100, VOCAB, decoder=LOOP)
    policy = drafter.defaults(params).policy
    return LOOP.begin(HuggingFaceModel(target()), drafter, RULE, policy, text_of(rows), session)


def greedy(model: PreTrainedModel, text: list[int], count: int) -> list[int]:
    whole = list(text)
    for _ in range(count):
        whole.append(int(plain_logits(model, whole).argmax()))
    return whole[len(text) :]


# What the target says of drafts.


def official(drafts: list[int], behind: list[int], level: int) -> list[tuple[int, tuple[int, ...]]]:
    """Collect phrases as the official code does, for each place in turn."""
    found = []
    for first, key in enumerate(drafts):
        completion = list[int]()
        for more in range(min(level - 1, len(drafts) - first)):
            completion.append(behind[first + more])
            if first + more + 1 < len(drafts) and drafts[first + more + 1] != behind[first + more]:
                break
        if len(completion) == level - 1:
            found.append((key, tuple(completion)))
    return found


@given(pairs=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), max_size=9), level=st.integers(2, 5))
def test_phrases_from_verification_are_the_official_ones(pairs: list[tuple[int, int]], level: int) -> None:
    drafts, behind = [one for one, _ in pairs], [one for _, one in pairs]
    assert confirmed(drafts, behind, level) == official(drafts, behind, level)


def test_what_the_target_said_goes_into_the_pool_by_entry() -> None:
    """A chain 5 6 7 of which 5 is kept, and two phrases behind 7; a new phrase of the same key comes between."""
    pool = NgramPool(3, 3).added([(7, (1, 2)), (7, (3, 4)), (7, (9, 9))])
    one, two = pool.of(7)[2], pool.of(7)[1]
    asked = WrittenChain((5, 6, 7), (two, one))
    guess = Guess.paths([torch.tensor([5, 6, 7, *entry.tokens]).numpy() for entry in asked.phrases])
    tree = drafted(Text(torch.tensor([[0]]), torch.tensor([1])), [guess], Given()).tree
    assert tree.tokens.tolist() == [[0, 5, 6, 7, 3, 4, 1, 2]]
    said = [
        5,
        8,
        7,
        7,
        11,
        0,
        12,
        0,
    ]  # behind each node: 8 instead of 6, then as drafted, then 7, 7 -> 3 -> 11, 1 -> 12
    after = taught(pool, asked, [1, 2, 3], _children(tree)[0], said, kept=1)
    found = {key: [(entry.number, entry.tokens) for entry in entries] for key, entries in after.entries.items()}
    # behind the rejected 6 the target says 7, which is drafted there, and 7 again behind it
    assert found == {7: [(one.number, (7, 12)), (two.number, (7, 11)), (2, (9, 9))], 6: [(3, (7, 7))]}


def test_phrases_that_were_not_scored_are_not_refined() -> None:
    pool = NgramPool(4, 3).added([(7, (1, 2, 3))])
    asked = WrittenChain((7,), pool.of(7))
    root = Text(torch.tensor([[0]]), torch.tensor([1]))
    short = drafted(root, [Guess.chain(torch.tensor([7, 1]).numpy())], Given()).tree
    assert taught(pool, asked, [1], _children(short)[0], [7, 9, 9], kept=1).entries == pool.entries
    assert taught(pool, asked, [], {}, [7], kept=0).entries == pool.entries


# The rule inside.


@given(
    paths=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), min_size=1, max_size=4), seed=st.integers(0, 99)
)
def test_the_rule_inside_is_naive_match_at_temperature_0(paths: list[list[int]], seed: int) -> None:
    guesses = [Guess.paths([torch.tensor(path).numpy() for path in paths]), Guess.chain(torch.tensor(paths[0]).numpy())]
    tree = drafted(text_of([[1, 2], [2]]), guesses, Given())
    stream = torch.Generator().manual_seed(seed)
    likeliest = torch.randint(3, tree.tree.tokens.shape, generator=stream)
    probs = torch.nn.functional.one_hot(likeliest, 3).double()
    own, other = (rule.verify(tree, probs, Noise.from_seed(0, 2)) for rule in (FollowLikeliest(), RULE))
    assert own.length.tolist() == other.length.tolist() and own.next_token.tolist() == other.next_token.tolist()
    for row, kept in enumerate(own.length.tolist()):
        assert own.path[row, :kept].tolist() == other.path[row, :kept].tolist()


# Drafts.


def steps(drafter: OuroborosDrafter, rows: list[list[int]], count: int) -> list[tuple[Any, Any, Any]]:
    """Return the loop before and after each step, and the step."""
    loop, found = begun(drafter, rows), []
    for _ in range(count):
        before = loop
        loop, taken = LOOP.step(loop)
        found.append((before, loop, taken))
    return found


def test_chains_are_the_draft_models_greedy_text_and_phrases_stand_behind_them() -> None:
    drafter, phrases, kept = ouroboros(), 0, 0
    for _, loop, taken in steps(drafter, PROMPTS, 8):
        assert not LOOP.drafts(loop).asked[0].chain, "what was asked is for one step"
        kept += sum(taken.verdict.kept)
        for row, count in enumerate(taken.text.counts):
            text = loop.text.tokens[row, :count].tolist()
            tree = taken.tree
            depth = tree.depth[row].where(tree.valid[row], 0)
            chain = [int(tree.tokens[row, int((depth == one).nonzero()[0])]) for one in range(1, 5)]
            assert chain == greedy(draft().model, text, 4)
            assert (depth[depth <= 4] > 0).sum() == 4, "one node at each depth"
            phrases += int((depth > 4).sum())
    assert phrases > 0 and kept > 0


def test_the_pool_is_one_for_draft_and_target() -> None:
    drafter, learnt = ouroboros(drafts=5), 0
    for before, after, taken in steps(drafter, PROMPTS, 10):
        state: OuroborosState = LOOP.drafts(after)
        assert all(own.entries is row.pool.entries for own, row in zip(state.pools(), state.inner.rows, strict=True))
        said = taken.scored.logits.argmax(dim=-1)
        for row, kept in enumerate(taken.verdict.kept):
            chain, tree = (
                greedy(draft().model, before.text.tokens[row, : taken.text.counts[row]].tolist(), 5),
                taken.tree,
            )
            nodes = [int(((tree.depth[row] == one) & tree.valid[row]).nonzero()[0]) for one in range(1, 6)]
            new = official(chain[min(kept, 5) :], said[row, nodes][min(kept, 5) :].tolist(), 3)
            held = {(key, one.tokens) for key, own in state.pools()[row].entries.items() for one in own}
            last = [(key, tokens) for key, tokens in new if key != chain[-1]]
            assert {*last} <= held
            learnt += len(last)
    assert learnt > 0


def test_the_same_state_gives_the_same_draft_again() -> None:
    drafter, text = ouroboros(pool_from_prompt=True), text_of(PROMPTS)
    state = drafter.start(text, Session(SamplingParams(), 80, VOCAB, decoder=LOOP))
    state = drafter.read(state, text, None)
    policy, noise = drafter.defaults(SamplingParams()).policy, Noise.from_seed(0, 3)
    drafts = [drafter.draft(state, DraftRequest(text, Given(), policy, noise)) for _ in range(2)]
    assert torch.equal(drafts[0][0].tree.tokens, drafts[1][0].tree.tokens)
    assert torch.equal(drafts[0][0].tree.parents, drafts[1][0].tree.parents)
    for one, other in zip(drafts[0][1].inner.rows, drafts[1][1].inner.rows, strict=True):
        assert one.window == other.window and one.pool.entries == other.pool.entries
    assert all(not len(pool) for pool in state.pools())


def test_rows_are_drafted_for_as_alone() -> None:
    """Their windows and pools too, though some wait for others."""
    drafter = ouroboros()
    together = steps(drafter, PROMPTS, 6)
    for row, prompt in enumerate(PROMPTS):
        for (_, batch, _), (_, alone, _) in zip(together, steps(drafter, [prompt], 6), strict=True):
            here, there = LOOP.drafts(batch).inner.rows[row], LOOP.drafts(alone).inner.rows[0]
            assert here.window == there.window and here.pool.entries == there.pool.entries
            count = alone.text.counts[0]
            assert batch.text.tokens[row, :count].tolist() == alone.text.tokens[0, :count].tolist()


def generated(drafter: Any, **options: Any) -> Any:
    width = max(map(len, PROMPTS))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in PROMPTS])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in PROMPTS])
    return polydraft.generate(
        target(), ids, attention_mask=mask, drafter=drafter, **{"temperature": 0.0, "max_new_tokens": 20, **options}
    )


@pytest.mark.long(3)
@pytest.mark.parametrize(
    "policy", [None, Chain(1), Chain(3), Chain(9), Widths((3, 2, 1)), TrunkThenBranch(2, (3, 1))], ids=str
)
def test_greedy_text_is_the_targets_own(policy: Any) -> None:
    plain = generated("none")
    found = generated(ouroboros(), policy=policy)
    assert torch.equal(found.sequences, plain.sequences) and not found.statistics.fallback
    assert found.statistics.accepted > 0


@pytest.mark.parametrize("vocab", [VOCAB - 3, VOCAB + 6])
def test_draft_models_with_padded_vocabularies(vocab: int) -> None:
    drafter = OuroborosDrafter(draft(vocab), 3, 2, 3, 3, 2, pool_from_prompt=True)
    found = generated(drafter)
    assert torch.equal(found.sequences, generated("none").sequences) and not found.statistics.fallback
    assert found.statistics.drafted > 0


def test_a_pool_that_was_saved_helps_the_next_text(tmp_path: Path) -> None:
    ids = torch.tensor([PROMPTS[0]])
    options = {"temperature": 0.0, "max_new_tokens": 24, "attention_mask": torch.ones_like(ids)}
    sizes = (2, 3, 3, 3, 6)
    drafter = OuroborosDrafter(draft(VOCAB, 0.0), *sizes, pool_from_prompt=True)
    first = polydraft.generate(target(), ids, drafter=drafter, keep_past=True, **options)
    assert first.past is not None
    (pool,) = first.past.drafts.pools()
    pool.save(tmp_path / "pool.npz")
    warmed = OuroborosDrafter(draft(VOCAB, 0.0), *sizes, pool=NgramPool.load(tmp_path / "pool.npz"))
    warm = polydraft.generate(target(), ids, drafter=warmed, **options)
    assert torch.equal(first.sequences, warm.sequences)
    assert warm.statistics.target_calls < first.statistics.target_calls


def test_a_pool_of_another_tokenizer_is_named(tmp_path: Path) -> None:
    pair = polydraft.load_pair()
    ids = pair.tokenizer("def add(a, b):", return_tensors="pt")
    options: dict[str, Any] = {"max_new_tokens": 4, "temperature": 0, "keep_past": True}
    draft_model = HuggingFaceModel(pair.draft)
    for number, make in enumerate(
        (partial(LookaheadDrafter, 3, 3, 3), partial(OuroborosDrafter, draft_model, level=3))
    ):
        path = tmp_path / f"{number}.npz"
        found = polydraft.generate(pair.target, **ids, drafter=make(), **options)
        assert isinstance(found, polydraft.GenerationOutput) and found.past is not None
        found.past.drafts.pools()[0].save(path)
        pool = NgramPool.load(path)
        assert pool.vocabulary == StoreVocabulary.of(pair.tokenizer, pool.vocabulary.name) and pool.vocabulary.mark
        polydraft.generate(pair.target, **ids, drafter=make(pool=pool), **options)
        other = replace(pool, vocabulary=StoreVocabulary(pool.vocabulary.size, b"m" * 32, "gpt-7"))
        other.save(path)
        with pytest.raises(VocabularyMismatch, match=r"pool holds tokens of gpt-7 .*, and the model's are those of"):
            polydraft.generate(pair.target, **ids, drafter=make(pool=NgramPool.load(path)), **options)
        polydraft.generate(pair.target, **ids, drafter=make(pool=replace(pool, vocabulary=None)), **options)


def test_the_drafter_of_a_model_is_taken_for_the_model() -> None:
    assert OuroborosDrafter(ModelDrafter(draft())).model is draft()
    assert owned_models(OuroborosDrafter(draft())) == (draft(),)


REFUSED: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "drafts": (lambda: ouroboros(drafts=0), InvalidParameter, "drafts must be an integer of at least 1, but is 0"),
    "phrases": (lambda: ouroboros(phrases=-1), InvalidParameter, "phrases must be an integer of at least 0, but is -1"),
    "level": (lambda: ouroboros(level=1), InvalidParameter, "level must be an integer of at least 2, but is 1"),
    "window": (
        lambda: ouroboros(window=90),
        InvalidParameter,
        r"The window has 179 tokens, more than .* context of 128",
    ),
    "pool": (lambda: ouroboros(pool=NgramPool(4, 1)), InvalidParameter, "n-grams of 4 tokens, but level is 3"),
    "no draft model": (lambda: OuroborosDrafter(NgramDrafter()), InvalidParameter, "but ngram is none"),
    "chains": (
        lambda: OuroborosDrafter(HuggingFaceModel(tiny_model("bloom", VOCAB))),
        UnsupportedModel,
        r"Bloom.* scores chains only, but ouroboros needs tokens scored beside them",
    ),
    "an encoder": (
        lambda: OuroborosDrafter(HuggingFaceModel(tiny_model("t5", VOCAB))),
        UnsupportedModel,
        "T5",
    ),
    "a scheme": (lambda: ouroboros().check(TopK()), UnpairedScheme, "works with drafts that are given, not top-k"),
    "another tokenizer": (
        lambda: OuroborosDrafter(draft(VOCAB + 2000)).start(text_of([[1]]), Session(SamplingParams(), 9, VOCAB)),
        VocabularyMismatch,
        "do not share a tokenizer",
    ),
    "no loop": (
        lambda: ouroboros().start(text_of([[1]]), Session(SamplingParams(), 9, VOCAB)),
        InvalidParameter,
        "needs a decode loop",
    ),
}


@pytest.mark.parametrize(("make", "kind", "sentence"), REFUSED.values(), ids=[*REFUSED])
def test_what_it_refuses(make: Callable[[], object], kind: type[Exception], sentence: str) -> None:
    with pytest.raises(kind, match=sentence):
        make()
