"""What a draft is worth on its target's own text: rows are the models' own, and the number is what decoding takes."""

from dataclasses import replace
from functools import cache
from typing import Any, cast

import pytest
import torch
from doubles import tiny_model
from torch import Tensor

import polydraft
from polydraft.bench.bootstrap import bootstrap_weights, estimate, widening_for_few
from polydraft.drafters import (
    ByDepthDrafter,
    Drafter,
    JacobiBlockDrafter,
    JacobiDrafter,
    NestedDrafter,
    NgramDrafter,
    RiderDrafter,
    SkippingDrafter,
    drafter_of,
)
from polydraft.engine import load
from polydraft.errors import InvalidParameter, PolydraftError
from polydraft.models import HuggingFaceModel, Pair
from polydraft.probs import SamplingParams
from polydraft.schemes import TopK
from polydraft.training.alignment.draft_worth import DraftWorth, measure_draft
from polydraft.training.alignment.own_text import ChainsOfText, OwnTexts, chains_of_text, own_texts
from polydraft.trees import Chain
from polydraft.verifiers import BlockVerification, NaiveMatch, SpeculativeSampling, TopDown

TEXTS = ("def add(a, b):\n", "import os\n\n\nclass Reader:\n", "x", "for line in open(name):\n    if not ")


@cache
def pair(draft: str = "pair-draft") -> Pair:
    return load("pair", draft, dtype="float64")


def drafter(draft: str = "pair-draft") -> Drafter:
    found = pair(draft).draft
    return found if isinstance(found, Drafter) else drafter_of(found)


def target(draft: str = "pair-draft") -> HuggingFaceModel:
    return HuggingFaceModel(pair(draft).target)


def prompts(texts: tuple[str, ...] = TEXTS) -> list[Tensor]:
    return [torch.tensor(pair().tokenizer(text)["input_ids"]) for text in texts]


@cache
def written(draft: str, temperature: float = 1.0, tokens: int = 8) -> OwnTexts:
    return own_texts(target(draft), prompts(), SamplingParams(temperature=temperature), tokens, (), 3)


@cache
def chains(draft: str, temperature: float = 1.0, length: int = 3) -> ChainsOfText:
    texts, params = written(draft, temperature), SamplingParams(temperature=temperature)
    return chains_of_text(target(draft), drafter(draft), texts, params, length)


def test_a_draft_models_ratios_are_those_of_two_teacher_forced_passes() -> None:
    texts, found = written("pair-draft"), chains("pair-draft")
    for row, (given, count) in enumerate(zip(texts.given.tolist(), texts.written.tolist(), strict=True)):
        ids = texts.tokens[row : row + 1, : given + count]
        models = (pair().draft, pair().target)
        with torch.no_grad():
            laws = [model(ids).logits[0, given - 1 : -1].softmax(-1) for model in models]  # pyright: ignore[reportOptionalCall]
        own = [law.gather(-1, ids[0, given:].unsqueeze(-1)).squeeze(-1) for law in laws]
        ratio, overlap = own[0] / own[1], torch.minimum(*laws).sum(-1)
        for depth in range(3):
            last = count - depth
            torch.testing.assert_close(found.ratio[row, :last, depth], ratio[depth:count], rtol=1e-6, atol=1e-9)
            torch.testing.assert_close(found.overlap[row, :last, depth], overlap[depth:count], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("draft", ["pair-head", "self:skip=5-9"])
def test_a_place_is_drafted_from_as_if_the_text_had_just_come_to_it(draft: str) -> None:
    """Nothing that a drafter keeps of the steps before is stale, whatever its rows depend on."""
    whole, found = written(draft), chains(draft)
    for place in (1, 5):
        texts = OwnTexts(whole.tokens, whole.given + place, whole.written - place)
        alone = chains_of_text(target(draft), drafter(draft), texts, SamplingParams(temperature=1.0), 3)
        torch.testing.assert_close(found.ratio[:, place], alone.ratio[:, 0], rtol=1e-6, atol=1e-9)
    assert float(found.ratio[:, 1:4].std()) > 0.01


def test_rows_do_not_depend_on_their_neighbours_and_end_where_they_end() -> None:
    whole, found = written("pair-draft"), chains("pair-draft")
    shorter = OwnTexts(whole.tokens[:2].clone(), whole.given[:2], torch.tensor([3, 8]))
    shorter.tokens[0, int(whole.given[0]) + 3 :] = -2
    alone = chains_of_text(target(), drafter(), shorter, SamplingParams(temperature=1.0), 3)
    torch.testing.assert_close(alone.ratio[1], found.ratio[1], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(alone.ratio[0, :3, 0], found.ratio[0, :3, 0], rtol=1e-9, atol=1e-12)
    calls = DraftWorth.of(alone).calls["token by token"]
    assert alone.written.tolist() == [3, 8] and float(calls[0].max()) <= 3


def test_texts_are_the_targets_and_end_with_its_end_token() -> None:
    params = SamplingParams(temperature=0.0)
    texts = own_texts(target(), prompts(), params, 6, (), 0)
    ids = torch.tensor([pair().tokenizer(TEXTS[0])["input_ids"]])
    alone = polydraft.generate(pair().target, ids, temperature=0.0, max_new_tokens=6, drafter="none").sequences
    new = texts.tokens[0, int(texts.given[0]) : int(texts.given[0]) + 6]
    assert torch.equal(new, alone[0, ids.shape[1] :])
    ended = own_texts(target(), prompts(TEXTS[:1]), params, 6, {int(new[2])}, 0)
    assert int(ended.written[0]) == new.tolist().index(int(new[2])) + 1
    assert bool((ended.tokens[0, int(ended.given[0]) + int(ended.written[0]) :] == -2).all())


def test_text_mixed_by_token_draws_each_from_either_model() -> None:
    """How often the target likes a token better than a model of random weights does, within four standard errors."""
    given, many, share, params = prompts(TEXTS[:1])[0], 48, 0.4, SamplingParams(temperature=1.0)
    other = tiny_model("llama", pair().target.config.vocab_size)
    texts = own_texts(target(), [given] * many, params, 2, (), 3, (HuggingFaceModel(other), share)).tokens
    for place in (len(given), len(given) + 1):
        first, back = texts[:, :place].unique(dim=0, return_inverse=True)
        with torch.no_grad():
            laws = [one(first).logits[:, -1].double().softmax(-1) for one in (pair().target, other)]
        liked = laws[0] > laws[1]
        seen = float(liked[back, texts[:, place]].double().sum())
        of_target, of_other = ((law * liked).sum(-1)[back] for law in laws)
        chance = (1 - share) * of_target + share * of_other
        error = float((chance * (1 - chance)).sum().sqrt())
        assert abs(seen - float(chance.sum())) < 4 * error
        for alone in (of_target, of_other):
            assert abs(seen - float(alone.sum())) > 4 * error, "the text is neither's alone"


def test_a_target_that_drafts_for_itself_without_loss_is_always_kept() -> None:
    found = measure_draft(
        target(), drafter_of(pair().target), prompts(TEXTS[:2]), SamplingParams(temperature=1.0), length=3, new_tokens=8
    )
    assert found.tokens_per_call["token by token"] == pytest.approx((2, 8 / 3, 4), abs=1e-9)
    assert found.tokens_per_call["as a block"] == found.tokens_per_call["token by token"]
    assert found.overlap == pytest.approx((1, 1, 1))


def test_a_block_keeps_more_and_longer_chains_bring_more() -> None:
    found = DraftWorth.of(chains("pair-draft")).tokens_per_call
    token, block = found["token by token"], found["as a block"]
    assert 1 < token[0] < token[1] < token[2] and token[0] == pytest.approx(block[0])
    assert token[1] < block[1] and token[2] < block[2]


@pytest.mark.parametrize(
    ("what", "told"),
    [
        (JacobiDrafter(), "texts do not tell what it is worth"),
        (ByDepthDrafter((NgramDrafter(), drafter()), (2, 2)), "A text drafter above another"),
        (
            replace(cast(NestedDrafter, load("pair", "self:int8 < ngram").draft), params=SamplingParams()),
            "settings of its own is not measured",
        ),
        (JacobiBlockDrafter(HuggingFaceModel(tiny_model("llama", 24))), "guesses of earlier steps"),
        (SkippingDrafter(), "self:skip=auto chooses its layers anew"),
        (RiderDrafter((7, 7)), "behind 3 of a step's nodes; .* ask for 2 drafts at most"),
        (RiderDrafter((7, 7), carriers=1), "behind 1 of a step's nodes; .* it is not measured"),
    ],
)
def test_what_cannot_be_measured_is_refused_by_name(what: Drafter, told: str) -> None:
    with pytest.raises(PolydraftError, match=told):
        measure_draft(target(), what, prompts(), SamplingParams())


def test_weights_that_are_no_numbers_are_refused() -> None:
    broken = tiny_model("llama", 24)
    broken.get_output_embeddings().weight.data[3] = torch.nan
    with pytest.raises(InvalidParameter, match="The draft's weights are no numbers: its folder is damaged"):
        measure_draft(target(), drafter_of(broken), prompts(), SamplingParams())


REPEATS = torch.tensor([5, 6, 7, 5, 6, 8, 5, 6, 7, 5, 6, 8, 5, 6, 7, 5])


def test_what_is_looked_up_is_kept_as_far_as_the_text_agrees() -> None:
    """Of tokens that are not drawn it is known whether they are the text's; a coin decides nothing."""
    texts = OwnTexts(REPEATS.unsqueeze(0), torch.tensor([4]), torch.tensor([12]))
    found = chains_of_text(target(), NgramDrafter(longest=2, shortest=2), texts, SamplingParams(temperature=1.0), 3)
    agreed = []
    for place in range(4, 16):
        text = REPEATS[:place].tolist()
        at = next((one for one in range(place - 3, -1, -1) if text[one : one + 2] == text[-2:]), None)
        guess = [] if at is None else text[at + 2 : at + 5]
        own = REPEATS[place : place + 3].tolist()
        agreed.append([guess[: depth + 1] == own[: depth + 1] and len(own) > depth for depth in range(3)])
    assert torch.equal(found.ratio[0] > 0, torch.tensor(agreed)) and found.ratio.any()
    calls = DraftWorth.of(found).calls
    assert torch.equal(calls["token by token"], calls["as a block"])


def test_a_stack_has_the_rows_of_its_middle() -> None:
    nested = cast(NestedDrafter, load("pair", "pair-draft < ngram", dtype="float64").draft)
    params = SamplingParams(temperature=1.0)
    found = chains_of_text(target(), replace(nested, length=2), written("pair-draft"), params, 3)
    torch.testing.assert_close(found.ratio[..., :2], chains("pair-draft").ratio[..., :2], rtol=1e-9, atol=1e-12)
    assert not found.ratio[..., 2].any()


def test_drafters_by_depth_have_each_its_stretch() -> None:
    both = ByDepthDrafter((drafter(), NgramDrafter(longest=2, shortest=1)), (1, 2))
    texts, params = written("pair-draft", 1.0, 24), SamplingParams(temperature=1.0)
    found = chains_of_text(target(), both, texts, params, 3)
    first, second = (chains_of_text(target(), one, texts, params, 3) for one in both.members)
    assert torch.equal(found.ratio[..., 0], first.ratio[..., 0])
    assert torch.equal(found.ratio[:, :-1, 1:], second.ratio[:, 1:, :2]) and bool(second.ratio[..., 0].any())


def test_riders_are_asked_behind_every_token() -> None:
    """Rider d behind the token before a place has the row of its draft d, by the target's own pass with masks."""
    masks, texts, params = (7, 7), written("pair-draft"), SamplingParams(temperature=1.0)
    found = chains_of_text(target(), RiderDrafter(masks), texts, params, 2)
    for row, (given, count) in enumerate(zip(texts.given.tolist(), texts.written.tolist(), strict=True)):
        assert not found.ratio[row, 0].any(), "nothing rode behind the prompt"
        for place in range(1, count):
            before = texts.tokens[row, : given + place - 1].tolist()  # and the riders stand for the next tokens
            with torch.no_grad():
                own = pair().target(torch.tensor([[*before, *masks]])).logits[0, len(before) :].softmax(-1)
                law = pair().target(texts.tokens[row : row + 1, : given + count]).logits[0].softmax(-1)
            for depth in range(min(2, count - place)):
                token = int(texts.tokens[row, given + place + depth])
                wanted = own[depth, token] / law[given + place + depth - 1, token]
                torch.testing.assert_close(found.ratio[row, place, depth], wanted, rtol=1e-5, atol=1e-8)


def test_no_prompts_are_refused() -> None:
    with pytest.raises(InvalidParameter, match="prompts of at least one token"):
        measure_draft(target(), drafter(), [], SamplingParams())


# --- Beside decoding -------------------------------------------------------------------------------------------------


def decoded(
    draft: str, temperature: float, seeds: int, *, block: bool = False, tokens: int = 24
) -> tuple[list[tuple[Tensor, list[int]]], Tensor]:
    """Return prompts with what was decoded behind them, and the target calls that it took."""
    rule = BlockVerification() if block else TopDown(SpeculativeSampling() if temperature else NaiveMatch(TopK()))
    written, calls, models = list[tuple[Tensor, list[int]]](), list[int](), pair(draft)
    for seed in range(seeds):
        for ids in prompts():
            run = polydraft.stream(
                models.target,
                ids.unsqueeze(0),
                drafter=models.draft,
                verifier=rule,
                policy=Chain(3),
                temperature=temperature,
                top_k=0,
                max_new_tokens=tokens,
                seed=seed,
            ).exhaust()
            written.append((ids, run.new_tokens[0]))
            calls.append(run.statistics.target_calls)
    return written, torch.tensor(calls).double()


FIXED = {"ngram": (0.0, 3), "ngram at 1": (1.0, 3), "pair-draft < ngram": (0.0, 3), "pair-draft@1 ngram@2": (0.0, 3)}
FIXED |= dict.fromkeys(("(pair-draft < ngram)@2 pair-draft@2", "(pair-draft@1 < ngram)@2 ngram@2"), (0.0, 4))
FIXED |= {"(pair-draft@1 < ngram)@2 ngram@1": (0.0, 2)}


@pytest.mark.parametrize("name", FIXED)
def test_of_fixed_tokens_calls_are_those_that_decoding_took(name: str) -> None:
    """At any temperature where tokens are looked up: given the text, no coin decides whether they were kept.

    A loop that writes less than its stretch leaves the rest of it to nobody.
    """
    draft, (temperature, length) = name.removesuffix(" at 1"), FIXED[name]
    models = pair("pair-draft" if draft == "ngram" else draft)
    drafted = NgramDrafter() if draft == "ngram" else cast(Drafter, models.draft)
    written, calls = list[tuple[Tensor, list[int]]](), list[int]()
    for ids in prompts():
        given: dict[str, Any] = {"temperature": temperature, "top_k": 0, "max_new_tokens": 40, "seed": 2}
        run = polydraft.stream(
            models.target, ids.unsqueeze(0), drafter=drafted, policy=Chain(length), **given
        ).exhaust()
        written.append((ids, run.new_tokens[0]))
        calls.append(run.statistics.target_calls)
    params = SamplingParams(temperature=temperature)
    found = DraftWorth.of(chains_of_text(HuggingFaceModel(models.target), drafted, texts_of(written), params, 4))
    assert found.calls["token by token"][:, length - 1].tolist() == pytest.approx(calls, abs=1e-9)
    assert sum(calls) < sum(len(new) for _, new in written)


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["pair-draft", "pair-head"])
@pytest.mark.parametrize("block", [False, True])
def test_generate_takes_as_many_calls(draft: str, block: bool) -> None:
    """The difference of both means lies within its interval of four standard errors."""
    seeds = 16
    found = measure_draft(
        target(draft),
        drafter(draft),
        prompts() * seeds,
        SamplingParams(temperature=1.0),
        length=3,
        new_tokens=24,
        ends={int(pair(draft).tokenizer.eos_token_id)},
    )
    calls = found.calls["as a block" if block else "token by token"][:, 2].numpy()
    texts, taken = decoded(draft, 1.0, seeds, block=block)
    tokens = torch.tensor([len(new) for _, new in texts]).double()
    both = [(tokens.numpy(), taken.numpy()), (found.tokens.numpy(), calls)]
    ends = [estimate(*one, bootstrap_weights(len(one[0]), 0), widening_for_few(len(one[0]))) for one in both]
    spread = sum(((one.high or 0) - (one.low or 0)) ** 2 for one in ends) ** 0.5 / 3.92
    assert abs(ends[0].mean - ends[1].mean) < 4 * spread
    assert spread < 0.1 and ends[1].mean > 1.2
    wrong = 1 + torch.tensor(found.overlap).cumprod(-1).sum()
    assert float(wrong) > ends[1].mean or block


@pytest.mark.slow
@pytest.mark.parametrize("block", [False, True])
def test_calls_are_within_two_percent_of_those_that_decoding_took_on_the_same_texts(block: bool) -> None:
    """Decoded text is the target's own. Given it, calls differ from what is expected by the coins of its steps alone.

    With 96 texts of 64 tokens the difference is known within about 0.7 percent; four standard errors are a false alarm
    in one seed of 16,000.
    """
    written, taken = decoded("pair-draft", 1.0, 24, block=block, tokens=64)
    found = list[Tensor]()
    params, rule = SamplingParams(temperature=1.0), "as a block" if block else "token by token"
    for first in range(0, len(written), 16):
        texts = texts_of(written[first : first + 16])
        found.append(DraftWorth.of(chains_of_text(target(), drafter(), texts, params, 3)).calls[rule][:, 2])
    difference = taken - torch.cat(found)
    spread = float(difference.std() / len(taken) ** 0.5 / taken.mean())
    apart = float(difference.mean() / taken.mean())
    assert spread < 0.01 and abs(apart) < min(0.02, 4 * spread)


def texts_of(written: list[tuple[Tensor, list[int]]]) -> OwnTexts:
    """Return texts as the target's own."""
    given, count = (torch.tensor(one) for one in ([len(ids) for ids, _ in written], [len(new) for _, new in written]))
    tokens = torch.full((len(written), int((given + count).max())), -2)
    for row, (ids, new) in enumerate(written):
        tokens[row, : len(ids) + len(new)] = torch.cat([ids, torch.tensor(new)])
    return OwnTexts(tokens, given, count)


@pytest.mark.slow
def test_greedy_texts_take_exactly_as_many_calls() -> None:
    params = SamplingParams(temperature=0.0)
    found = measure_draft(target(), drafter(), prompts(), params, length=3, new_tokens=24)
    _, taken = decoded("pair-draft", 0.0, 1)
    torch.testing.assert_close(found.calls["token by token"][:, 2], taken, rtol=0, atol=1e-9)
