"""Rollback: its law by enumeration, greedy text at threshold 0, another text above it, and temperature 0 alone."""

import math
from collections.abc import Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles import perturbed, tiny_model
from torch import Tensor, nn
from worlds import VOCABULARY, World, every_tree

import polydraft
from polydraft.engine.target_law import TargetLaw, target_rows
from polydraft.errors import InvalidParameter, UnpairedScheme
from polydraft.probs import Noise, SamplingParams
from polydraft.reading import Text
from polydraft.schemes import IID, Coupled, Given, TopK
from polydraft.trees import Chain, Draft, TokenTree, Widths, grow
from polydraft.verifiers import PathVerifier, Rollback

THRESHOLDS = (0.0, 0.3, 1.0, 2.0, 5.0, 40.0)
each_threshold = pytest.mark.parametrize("threshold", THRESHOLDS)


def kept(law: Tensor, threshold: float) -> Tensor:
    """Return the set A of the rule as ones and zeros: the first likeliest token, and all that are likely enough."""
    found = (law >= math.exp(-threshold)).double()
    found[int(law.argmax())] = 1
    return found


def emitted(law: Tensor, drafted: Tensor, threshold: float) -> Tensor:
    """Return the law that the rule states of a node: 1[x in A] q(x) + 1[x = x*] (1 - q(A))."""
    stays = kept(law, threshold) * drafted
    stays[int(law.argmax())] += 1 - float(stays.sum())
    return stays


def on_tokens(world: World, path: Sequence[int]) -> Tensor:
    """Return the draft law behind a path over the whole vocabulary."""
    listed, row = (one[len(path)] for one in (world.shortlist, world.draft))
    listed, row = (listed, row) if not path else (listed[path[0]], row[path[0]])
    return torch.zeros(VOCABULARY).double().scatter(-1, listed, row)


@each_threshold
@pytest.mark.parametrize("seed", range(6))
def test_the_law_of_a_text_is_the_one_that_is_stated(threshold: float, seed: int) -> None:
    """All chains of two drafts, weighted by any law: the first tokens, up to the first that was not drafted."""
    world = World.random(seed, likeness=0.3)
    draft, chance = every_tree(world, IID(), (1, 1))
    verdict = Rollback(Given(), threshold).verify(draft, world.target_rows(draft.tree), Noise.from_seed(0, len(chance)))
    found, stated = torch.zeros(VOCABULARY**3 * 3).double(), torch.zeros(VOCABULARY**3 * 3).double()

    def place(tokens: Sequence[int]) -> int:
        return (len(tokens) - 1) * VOCABULARY**3 + sum(one * VOCABULARY**at for at, one in enumerate(tokens))

    for row, tokens in enumerate(verdict.tokens(draft.tree).tolist()):
        found[place([one for one in tokens if one >= 0])] += chance[row]
    for first, second in product(range(VOCABULARY), repeat=2):
        rows = world.target[0], world.target[1][first], world.target[2][first, second]
        one, two = (on_tokens(world, path) for path in ((), (first,)))
        stays = [
            float((kept(law, threshold) * q)[x]) for law, q, x in zip(rows, (one, two), (first, second), strict=False)
        ]
        stated[place([first, second, int(rows[2].argmax())])] += stays[0] * stays[1]
    for first in range(VOCABULARY):
        rows = world.target[0], world.target[1][first]
        one, two = (on_tokens(world, path) for path in ((), (first,)))
        stays, ends = (kept(law, threshold) * q for law, q in zip(rows, (one, two), strict=True))
        stated[place([first, int(rows[1].argmax())])] += float(stays[first]) * (1 - float(ends.sum()))
    ends = kept(world.target[0], threshold) * on_tokens(world, ())
    stated[place([int(world.target[0].argmax())])] += 1 - float(ends.sum())
    assert torch.allclose(found, stated, rtol=0, atol=1e-14) and float(found.sum()) == pytest.approx(1)


@each_threshold
def test_the_law_of_a_node_is_the_one_that_is_stated(threshold: float) -> None:
    world = World.random(7)
    draft, chance = every_tree(world, IID(), (1, 1))
    verdict = Rollback(TopK(), threshold).verify(draft, world.target_rows(draft.tree), Noise.from_seed(0, len(chance)))
    first = verdict.tokens(draft.tree)[:, 0]
    found = torch.zeros(VOCABULARY).double().scatter_add(0, first, chance)
    stated = emitted(world.target[0], on_tokens(world, ()), threshold)
    assert torch.allclose(found, stated, rtol=0, atol=1e-14)
    if threshold == 0:
        assert stated.max() == 1
    assert bool((found > 0).equal(stated > 0))


def test_likely_drafts_change_the_text_and_nothing_is_drawn() -> None:
    rows = torch.tensor([[[0.6, 0.3, 0.1], [0.2, 0.3, 0.5]]]).double()
    draft = grow(torch.zeros(1, dtype=torch.int64), Chain(1), Given(), guess(1), Noise.from_seed(0, 1))
    noise = Noise.from_seed(0, 1)
    before = noise.generators[0].get_state()
    texts = {
        nats: Rollback(Given(), nats).verify(draft, rows, noise).tokens(draft.tree).tolist() for nats in (1.2, 1.3)
    }
    assert texts == {1.2: [[0, -1]], 1.3: [[1, 2]]}, "-log .3 = 1.204"
    assert torch.equal(before, noise.generators[0].get_state())
    assert not Rollback(threshold=0.0).lossless and not isinstance(Rollback(), PathVerifier)


def guess(token: int) -> Any:
    def propose(frontier: Any) -> tuple[Tensor, Tensor]:
        return torch.full((*frontier.tokens.shape, 1), token), torch.ones(*frontier.tokens.shape, 1).double()

    return propose


def test_equal_and_nearly_equal_scores_keep_the_greedy_token() -> None:
    """The softmax of two scores may be equal by rounding: the rule follows the scores, as greedy decoding does."""
    low = torch.tensor(1e-9)
    scores = torch.stack([low, torch.nextafter(low, torch.tensor(1.0)), low]).view(1, 1, 3)
    assert len({*scores[0, 0].softmax(-1).tolist()}) == 1
    law, root = TargetLaw(SamplingParams(temperature=0)), TokenTree.root_only(torch.zeros(1, dtype=torch.int64))
    found = target_rows([law], scores, root, Text(torch.zeros(1, 1, dtype=torch.int64), torch.tensor([1])), [0])
    assert int(found.softened.argmax()) == int(found.probs.argmax()) == 1
    assert torch.allclose(found.softened, scores.softmax(-1), rtol=0, atol=1e-6)


VOCAB, NEW = 24, 16
PROMPTS = ([3, 1, 4, 1, 5, 9, 2], [7], [2, 7, 1, 8])


@cache
def models() -> tuple[nn.Module, nn.Module]:
    target = tiny_model("llama", VOCAB)
    return target, perturbed(target, 0.15)


def law(model: nn.Module, text: Sequence[int]) -> Tensor:
    with torch.no_grad():
        return model(torch.tensor([text])).logits[0, -1].softmax(-1)


def big_little(prompt: Sequence[int], length: int, fallback: float, threshold: float) -> list[int]:
    """Write as the papers' two models do, without caches or trees; a doubtful token is the last of its chain."""
    (target, draft), text = models(), [*prompt]
    end = len(prompt) + NEW
    while len(text) < end:
        chain = list[int]()
        while len(chain) < length * (len(text) < end - 1):  # with room for one token nothing is drafted
            row = law(draft, [*text, *chain])
            chain.append(int(row.argmax()))
            if row.max() < fallback:
                break
        for token in chain:
            row = law(target, text)
            if token != int(row.argmax()) and -math.log(float(row[token])) > threshold:
                break
            text.append(token)
        text.append(int(law(target, text).argmax()))
    return text[len(prompt) : end]


def written(prompt: Sequence[int], policy: str, verifier: str | Rollback, **options: Any) -> list[int]:
    target, draft = models()
    given: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": NEW, **options}
    output = polydraft.generate(
        target, torch.tensor([prompt]), drafter=draft, policy=policy, verifier=verifier, **given
    )
    assert isinstance(output, polydraft.GenerationOutput)
    assert not output.lossless and output.verifier.startswith("rollback:")
    return output.sequences[0, len(prompt) :].tolist()


@pytest.mark.parametrize(("fallback", "threshold"), [(0.3, 1.0), (0.6, 0.0), (0.6, 3.0)])
@pytest.mark.parametrize("prompt", PROMPTS[1:], ids=str)
def test_the_text_is_that_of_two_models_side_by_side(prompt: list[int], fallback: float, threshold: float) -> None:
    assert written(prompt, f"confident:5:{fallback}", f"rollback:{threshold:g}") == big_little(
        prompt, 5, fallback, threshold
    )


def test_the_text_is_the_greedy_one_at_threshold_0_and_another_above_it() -> None:
    greedy = [big_little(prompt, 0, 0.0, 0.0) for prompt in PROMPTS]
    assert [written(prompt, "chain:4", Rollback(threshold=0.0)) for prompt in PROMPTS] == greedy
    lossy = [written(prompt, "chain:4", "rollback:3") for prompt in PROMPTS]
    assert lossy != greedy
    for text, prompt in zip(lossy, PROMPTS, strict=True):
        target, whole = models()[0], [*prompt]
        for token in text:
            row = law(target, whole)
            assert token == int(row.argmax()) or -math.log(float(row[token])) <= 3
            whole.append(token)


def test_rows_beside_each_other_keep_their_own_rules_and_texts() -> None:
    target, draft = models()
    rules = dict(enumerate(("rollback:3", "rollback:0", "rollback:1")))
    run = polydraft.generate_many(
        target, dict(enumerate(PROMPTS)), drafter=draft, policy="chain:4", temperature=0.0, max_new_tokens=NEW,
        per_prompt={name: {"verifier": rule} for name, rule in rules.items()},
    )  # fmt: skip
    texts = {one.name: list(one.tokens) for one in run}
    assert texts == {name: written(PROMPTS[name], "chain:4", rule) for name, rule in rules.items()}


def test_a_token_that_a_processor_rules_out_is_never_kept() -> None:
    usual = written(PROMPTS[0], "chain:4", "rollback:40")
    other = written(PROMPTS[0], "chain:4", "rollback:40", bad_words_ids=[[usual[0]]])
    assert usual[0] not in other


def test_it_refuses_temperatures_by_name_before_anything_is_loaded(tmp_path: Path) -> None:
    target, draft = models()
    told = r"The verifier rollback:2 is for temperature 0 alone, but the temperature is 0.7"
    options: dict[str, Any] = {"verifier": "rollback:2", "temperature": 0.7, "max_new_tokens": 4}
    prompt = torch.tensor([PROMPTS[0]])
    for verifier in ("rollback:2", Rollback(threshold=2.0)):
        for call in (polydraft.generate, polydraft.stream):
            with pytest.raises(InvalidParameter, match=told):
                call(target, prompt, drafter=tmp_path / "nowhere", **{**options, "verifier": verifier})
    with pytest.raises(InvalidParameter, match=told):
        polydraft.generate_many(
            target,
            {"a": PROMPTS[0]},
            drafter=draft,
            per_prompt={"a": {"verifier": "rollback:2"}},
            temperature=0.7,
            max_new_tokens=4,
        )


def test_it_refuses_branches_other_schemes_and_bad_numbers() -> None:
    with pytest.raises(UnpairedScheme, match="Rollback:3 verifies one draft per node, but the tree has 2"):
        written([1], "2,1", "rollback")
    world = World.random(1)
    wide = grow(torch.zeros(2, dtype=torch.int64), Widths((2,)), TopK(), world.propose, Noise.from_seed(0, 2))
    with pytest.raises(UnpairedScheme, match="one draft per node"):
        Rollback().verify(wide, world.target_rows(wide.tree), Noise.from_seed(0, 2))
    for scheme in (IID(), Coupled()):
        with pytest.raises(UnpairedScheme, match="Rollback works with drafts that are top-k or given"):
            Rollback(scheme)
    for number in (-1.0, math.inf, math.nan):
        with pytest.raises(InvalidParameter, match="threshold must be a number of nats >= 0"):
            Rollback(threshold=number)


def test_without_drafts_the_likeliest_token_comes() -> None:
    rows = World.random(3).target[2].view(1, 16, VOCABULARY).transpose(0, 1)
    verdict = Rollback().verify(Draft.nothing(torch.zeros(16, dtype=torch.int64)), rows, Noise.from_seed(0, 16))
    assert verdict.path.shape == (16, 0) and torch.equal(verdict.next_token, rows[:, 0].argmax(-1))
