"""What a chain is worth on the target's own text equals what the real decoder takes; each mistake does not."""

from functools import cache
from itertools import pairwise

import pytest
import torch
from growing import TOKENS
from text_decoder import Rooted, chain_rules, enumerated_calls, share_of_text, step_law
from torch import Tensor

from polydraft.catalogue import every_scheme
from polydraft.schemes import IID, Product, Scheme, TopK, enumerate_drafts
from polydraft.training.alignment.divergences import product_loss
from polydraft.training.alignment.text_calls import (
    accepted,
    begins,
    expected_calls,
    kept_as_block,
    kept_by_token,
    ratios,
    reached_in_draft_text,
    replayed,
)
from polydraft.verifiers import BlockVerification, NaiveMatch, NodeVerifier, PathVerifier, SpeculativeSampling, TopDown

RULES = {name: (verifier, scheme, rule) for name, verifier, scheme, rule in chain_rules(tuple(every_scheme()))}
USUAL = [name for name in RULES if RULES[name][1] == IID()]
PAIR = Rooted.random(5)
LENGTH = 4


def on_text(pair: Rooted, kept: Tensor, length: int = LENGTH) -> Tensor:
    """Return the mean of the calls of all texts, as the target writes them."""
    texts, chance = pair.texts(length)
    return (chance * expected_calls(kept, torch.full((len(texts),), length))).sum()


def path_ratios(pair: Rooted, width: int, length: int = LENGTH) -> Tensor:
    draft, target, tokens = pair.path_rows(pair.texts(length)[0], width)
    return ratios(draft.log(), target, tokens)


def of_rule(pair: Rooted, width: int, scheme: Scheme, rule: NodeVerifier | None) -> Tensor:
    """Return what a rule makes of each token of the text: t / p node by node, the draft's law over p as a block."""
    drafts, targets, tokens = pair.path_rows(pair.texts(LENGTH)[0], width)

    @cache
    def share(draft: tuple, target: tuple, token: int) -> float:
        law, own = torch.tensor(draft, dtype=torch.float64), torch.tensor(target, dtype=torch.float64)
        if rule is not None:
            return float(share_of_text(rule, scheme, law, own, token))
        drawn, chance = enumerate_drafts(scheme, law, 1)
        return float((chance * (drawn[:, 0] == token)).sum() / own[token])

    def hashed(row: list) -> tuple:
        return tuple(map(tuple, row)) if isinstance(row[0], list) else tuple(row)

    first = tokens.dim()
    rows = zip(drafts.flatten(0, first - 1), targets.flatten(0, first - 1), tokens.flatten().tolist(), strict=True)
    found = [share(hashed(draft.tolist()), hashed(target.tolist()), token) for draft, target, token in rows]
    return torch.tensor(found, dtype=torch.float64).view(tokens.shape)


def check_rule(name: str, width: int) -> None:
    verifier, scheme, rule = RULES[name]
    pair = Rooted.random(5, members=(2,)) if isinstance(scheme, Product) else PAIR
    kept = (kept_as_block if rule is None else kept_by_token)(of_rule(pair, width, scheme, rule))
    real = enumerated_calls(pair, verifier, scheme, width, LENGTH)
    torch.testing.assert_close(on_text(pair, kept), real, rtol=0, atol=1e-12)
    assert 1 < float(real) < LENGTH


@pytest.mark.parametrize("name", USUAL)
def test_calls_are_those_of_the_decoder(name: str) -> None:
    check_rule(name, 2)


@pytest.mark.slow
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("name", RULES)
def test_calls_are_those_of_the_decoder_for_every_scheme_and_length(name: str, width: int) -> None:
    check_rule(name, width)


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize(
    ("kept", "verifier"), [(kept_by_token, TopDown(SpeculativeSampling())), (kept_as_block, BlockVerification())]
)
def test_the_two_usual_rules_follow_from_ratios(kept, verifier: PathVerifier, width: int) -> None:
    real = enumerated_calls(PAIR, verifier, IID(), width, 6)
    found = on_text(PAIR, kept(path_ratios(PAIR, width, 6)), 6)
    torch.testing.assert_close(found, real, rtol=0, atol=1e-12)


def test_greedy_texts_are_counted_by_the_same_forms() -> None:
    """At temperature 0 rows are one-hot: a draft is kept where both models' likeliest tokens are the same."""
    one_hot = [torch.nn.functional.one_hot(law.argmax(-1), TOKENS).double() for law in (PAIR.target, PAIR.draft)]
    pair = Rooted(one_hot[0], one_hot[1].clone(), PAIR.root)
    pair.draft[1] = pair.target  # so that some are the same
    real = enumerated_calls(pair, TopDown(NaiveMatch(TopK())), TopK(), 2, 6)
    for kept in (kept_by_token, kept_as_block):
        torch.testing.assert_close(on_text(pair, kept(path_ratios(pair, 2, 6)), 6), real, rtol=0, atol=1e-12)
    assert 2 <= float(real) <= 6


def test_texts_end_where_they_end_and_nothing_behind_counts() -> None:
    kept = kept_by_token(path_ratios(PAIR, 3))[:3]
    behind = torch.cat([kept, torch.ones_like(kept)], 1)
    full = torch.full((3,), LENGTH)
    assert torch.equal(expected_calls(behind, full), expected_calls(kept, full))
    assert expected_calls(kept, torch.tensor([0, 1, 2]))[:2].tolist() == [0.0, 1.0]
    nothing, all_kept = torch.zeros(1, 7, 2), torch.ones(1, 7, 2)
    assert expected_calls(nothing, torch.tensor([7])) == 7 and expected_calls(all_kept, torch.tensor([7])) == 3


def test_the_products_of_overlaps_are_another_number() -> None:
    """Behind one accepted token all is hopeless or certain: J is .5 or 1, the product of overlaps .75 both times."""
    first = torch.tensor([0.5, 0.5], dtype=torch.float64), torch.tensor([1.0, 0.0], dtype=torch.float64)
    hopeless, certain = torch.tensor([0.0, 1.0], dtype=torch.float64), torch.tensor([1.0, 0.0], dtype=torch.float64)
    target = torch.tensor([1.0, 0.0], dtype=torch.float64)
    for second, exact in (((hopeless, certain), 0.5), ((certain, hopeless), 1.0)):
        overlap = torch.stack([torch.minimum(row, target).sum() for row in second])
        path = torch.stack([torch.minimum(*first).sum().expand(2), overlap], -1)
        ratio = torch.stack([first[1] / first[0], overlap], -1)
        found = (first[0] * accepted(kept_by_token(ratio), path)).sum()
        assert float(found) == pytest.approx(exact) and float((first[0] * path.cumprod(-1).sum(-1)).sum()) == 0.75


# --- Gradients -------------------------------------------------------------------------------------------------------

DEPTH = 3


def objective(scores: list[Tensor], target: list[Tensor]) -> Tensor:
    """Return J of a chain of three by the sum over all drafted texts."""
    total, reached = torch.zeros((), dtype=torch.float64), torch.ones((), dtype=torch.float64)
    for score, law in zip(scores, target, strict=True):
        reached = reached.unsqueeze(-1) * torch.minimum(score.softmax(-1), law)
        total = total + reached.sum()
    return total


def worlds() -> tuple[list[Tensor], list[Tensor]]:
    """Return a draft's scores and a target's rows behind every text of up to two tokens."""
    stream = torch.Generator().manual_seed(11)
    shapes = [[TOKENS] * depth for depth in range(1, DEPTH + 1)]
    made = [torch.randn(2, *shape, generator=stream, dtype=torch.float64) for shape in shapes]
    return [one[0] for one in made], [one[1].softmax(-1) for one in made]


def by_differences(of, scores: list[Tensor]) -> Tensor:
    """Return a number's gradient in all scores by central differences."""
    found, step = list[float](), 1e-6
    for part in scores:
        flat = part.view(-1)
        for place in range(len(flat)):
            was, ends = float(flat[place]), list[float]()
            for away in (step, -step):
                flat[place] = was + away
                ends.append(float(of(scores)))
            flat[place] = was
            found.append((ends[0] - ends[1]) / (2 * step))
    return torch.tensor(found, dtype=torch.float64)


def by_autograd(of, scores: list[Tensor]) -> Tensor:
    leaves = [one.clone().requires_grad_() for one in scores]
    return torch.cat([one.flatten() for one in torch.autograd.grad(of(leaves), leaves)])


def along(rows: list[Tensor]) -> Tensor:
    """Return the rows on the path of each of the 27 texts."""
    wide = [row.view(*row.shape[:-1], *[1] * (DEPTH - row.dim()), TOKENS) for row in rows]
    wide = [row.unsqueeze(0) if row.dim() < DEPTH else row for row in wide]
    spread = [row.expand(TOKENS, TOKENS, TOKENS) for row in wide]  # by the first two tokens
    return torch.stack([row.unsqueeze(2).expand(-1, -1, TOKENS, -1).reshape(-1, TOKENS) for row in spread], 1)


TEXTS = torch.cartesian_prod(*[torch.arange(TOKENS)] * DEPTH)


def bracket(scores: list[Tensor], target: list[Tensor], texts_of: list[Tensor], ratio_of, kept=kept_by_token) -> Tensor:
    """Return the mean over all texts of some rows' law of sum_d c_{d-1} alpha_d, or of sum_d c_d as a block."""
    logits, laws, written = along(scores), along(target), along(texts_of)
    chance = written.gather(-1, TEXTS.unsqueeze(-1)).squeeze(-1).prod(-1).detach()
    overlap = torch.minimum(logits.softmax(-1), laws).sum(-1) if kept is kept_by_token else None
    return (chance * accepted(kept(ratio_of(logits, laws, TEXTS)), overlap)).sum()


SCORES, TARGET = worlds()
EXACT = by_differences(lambda scores: objective(scores, TARGET), SCORES)


def test_the_objective_on_the_targets_text_is_exact_and_so_is_its_gradient() -> None:
    def on_target(scores: list[Tensor]) -> Tensor:
        return bracket(scores, TARGET, TARGET, ratios)

    torch.testing.assert_close(on_target(SCORES), objective(SCORES, TARGET), rtol=0, atol=1e-12)
    torch.testing.assert_close(by_autograd(on_target, SCORES), EXACT, rtol=0, atol=1e-8)


def test_the_last_factor_may_be_the_tokens_own() -> None:
    def noisier(scores: list[Tensor]) -> Tensor:
        chance = along(TARGET).gather(-1, TEXTS.unsqueeze(-1)).squeeze(-1).prod(-1)
        return (chance * accepted(kept_by_token(ratios(along(scores), along(TARGET), TEXTS)))).sum()

    torch.testing.assert_close(by_autograd(noisier, SCORES), EXACT, rtol=0, atol=1e-8)


@pytest.mark.parametrize("as_block", [False, True])
def test_the_gradient_of_calls_is_that_of_the_decoders(as_block: bool) -> None:
    verifier = BlockVerification() if as_block else TopDown(SpeculativeSampling())
    kept, scores = kept_as_block if as_block else kept_by_token, [PAIR.draft[:2].log().clone()]

    def real(given: list[Tensor]) -> Tensor:
        return enumerated_calls(Rooted(PAIR.target, given[0].softmax(-1)), verifier, IID(), 2, 3)

    def on_texts(given: list[Tensor]) -> Tensor:
        return on_text(PAIR, kept(path_ratios(Rooted(PAIR.target, given[0].softmax(-1)), 2, 3)), 3)

    torch.testing.assert_close(by_autograd(on_texts, scores), by_differences(real, scores), rtol=0, atol=1e-8)


@pytest.mark.parametrize("as_block", [False, True])
def test_the_gradient_of_accepted_drafts_is_that_of_the_decoders(as_block: bool) -> None:
    """J of a chain of three, as a block too, by what the real rule keeps of all drafts."""
    verifier = BlockVerification() if as_block else TopDown(SpeculativeSampling())
    kept, scores = kept_as_block if as_block else kept_by_token, [PAIR.draft[:DEPTH].log().clone()]

    def real(given: list[Tensor]) -> Tensor:
        law = step_law(Rooted(PAIR.target, given[0].softmax(-1)), verifier, IID(), DEPTH)
        return (torch.arange(DEPTH + 1) * law.sum(-1)).sum()

    def on_texts(given: list[Tensor]) -> Tensor:
        pair = Rooted(PAIR.target, given[0].softmax(-1))
        return (pair.texts(DEPTH)[1] * accepted(kept(path_ratios(pair, DEPTH, DEPTH)[:, 0]))).sum()

    torch.testing.assert_close(on_texts(scores), real(scores), rtol=0, atol=1e-12)
    torch.testing.assert_close(by_autograd(on_texts, scores), by_differences(real, scores), rtol=0, atol=1e-8)


# --- Published mistakes ----------------------------------------------------------------------------------------------


def wrong_side(logits: Tensor, target: Tensor, tokens: Tensor) -> Tensor:
    """Divide the wrong way round on the target's text (Distill-Spec-Research, `losses/ebe.py`)."""
    return 1 / ratios(logits, target, tokens).clamp_min(1e-9)


def detached(logits: Tensor, target: Tensor, tokens: Tensor) -> Tensor:
    """Weigh places by numbers without gradients, as the decays of DSpark, D-PACE and LK do."""
    return ratios(logits, target, tokens).detach()


def unweighted(logits: Tensor, target: Tensor, tokens: Tensor) -> Tensor:
    """Let all places count alike, as DistillSpec and GKD do."""
    return torch.ones_like(ratios(logits, target, tokens))


def early(logits: Tensor, target: Tensor, tokens: Tensor) -> Tensor:
    """Read rows at the token's own index, which predict the one behind it (OSD online)."""
    return ratios(logits.roll(-1, 1), target.roll(-1, 1), tokens)


def argmax_agrees(logits: Tensor, target: Tensor, tokens: Tensor) -> Tensor:
    """Call a place accepted where both likeliest tokens are the same, at temperature 1 (a port of Draft-OPD)."""
    return (logits.argmax(-1) == target.argmax(-1)).to(logits)


def of_greedy_drafts(logits: Tensor, target: Tensor, tokens: Tensor) -> Tensor:
    """Draft the likeliest token whatever the temperature (z-lab/dflash#74, vLLM before 0.18): another law is served."""
    served = torch.nn.functional.one_hot(logits.argmax(-1), TOKENS).to(logits)
    return ratios(served.clamp_min(1e-300).log(), target, tokens)


def in_few_bits(logits: Tensor, target: Tensor, tokens: Tensor) -> Tensor:
    """Take rows in bfloat16 for those that drafts are drawn from."""
    return ratios(logits.bfloat16().double(), target, tokens)


def stale(logits: Tensor, target: Tensor, tokens: Tensor) -> Tensor:
    """Draft from the keys of a step before (vllm-metal#716): the text stays right, the rows are of another place."""
    return ratios(logits.roll(1, 1), target, tokens)


@pytest.mark.parametrize(
    "mistake", [wrong_side, detached, unweighted, early, argmax_agrees, of_greedy_drafts, in_few_bits, stale]
)
def test_the_gradient_check_fails_for_mistakes_in_the_weights(mistake) -> None:
    found = by_autograd(lambda scores: bracket(scores, TARGET, TARGET, mistake), SCORES)
    assert float((found - EXACT).abs().max()) > 1e-5


@pytest.mark.parametrize(
    "mistake", [wrong_side, unweighted, early, argmax_agrees, of_greedy_drafts, in_few_bits, stale]
)
@pytest.mark.parametrize("kept", [kept_by_token, kept_as_block])
def test_the_calls_of_mistakes_are_not_the_decoders(mistake, kept) -> None:
    verifier = TopDown(SpeculativeSampling()) if kept is kept_by_token else BlockVerification()
    real = enumerated_calls(PAIR, verifier, IID(), 2, LENGTH)
    draft, target, tokens = PAIR.path_rows(PAIR.texts(LENGTH)[0], 2)
    assert abs(float(on_text(PAIR, kept(mistake(draft.log(), target, tokens))) - real)) > 1e-6


def drafts_own_text(scores: list[Tensor]) -> Tensor:
    """Take the draft's text without the score function that its law depends on the draft by."""
    own = [score.softmax(-1) for score in scores]
    return bracket(scores, TARGET, own, lambda *given: 1 / ratios(*given))


def greedy_text(scores: list[Tensor]) -> Tensor:
    """Take the target's greedy text for text at temperature 1 (OSD's "student" text, and its mix at T = .001)."""
    one_hot = [torch.nn.functional.one_hot(law.argmax(-1), TOKENS).to(law) for law in TARGET]
    return bracket(scores, TARGET, one_hot, ratios)


def products(scores: list[Tensor]) -> Tensor:
    """Multiply overlaps (Bebop)."""
    logits, laws = along(scores), along(TARGET)
    chance = laws.gather(-1, TEXTS.unsqueeze(-1)).squeeze(-1).prod(-1)
    return (chance * torch.minimum(logits.softmax(-1), laws).sum(-1).cumprod(-1).sum(-1)).sum()


def overlap_at_token(scores: list[Tensor]) -> Tensor:
    """Take min(p, q) at the sampled token alone for the overlap (OSD)."""
    logits, laws = along(scores), along(TARGET)
    both = torch.minimum(logits.softmax(-1), laws).gather(-1, TEXTS.unsqueeze(-1)).squeeze(-1)
    chance = laws.gather(-1, TEXTS.unsqueeze(-1)).squeeze(-1).prod(-1)
    return (chance * accepted(kept_by_token(ratios(logits, laws, TEXTS)), both)).sum()


def renormalised_target(scores: list[Tensor]) -> Tensor:
    """Under a cut draft vocabulary, take the target's law on it for the target's (SpecForge before #492)."""
    cut = [law * torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64) for law in TARGET]
    return bracket(scores, [law / law.sum(-1, keepdim=True) for law in cut], TARGET, ratios)


@pytest.mark.parametrize("mistake", [drafts_own_text, greedy_text, products, overlap_at_token, renormalised_target])
def test_the_gradient_check_fails_for_mistakes_in_text_and_overlap(mistake) -> None:
    found = by_autograd(mistake, SCORES)
    assert float((found - EXACT).abs().max()) > 1e-3


def test_padding_and_what_follows_the_end_change_the_calls() -> None:
    """A mask of ones, or a loss behind the end token, is seen: the text has fewer tokens than its row."""
    kept = kept_by_token(path_ratios(PAIR, 2))
    ended, whole = (expected_calls(kept, torch.full((len(kept),), length)) for length in (LENGTH - 1, LENGTH))
    assert float((whole - ended).min()) > 0.01


def test_places_of_draft_text_count_as_often_as_decoding_comes_there() -> None:
    """E_q of a row's number under the weights is the mean over the places that chains from all starts come to."""
    ratio = torch.tensor([[2.0, 0.5, 4.0, 1.0]], dtype=torch.float64)
    found = reached_in_draft_text(ratio, 3)
    exact = torch.tensor([[1, 1 + 0.5, 1 + 1 + 0.5, 1 + 0.25 + 0.25]], dtype=torch.float64) / 3
    torch.testing.assert_close(found, exact, rtol=0, atol=1e-12)
    logits, laws = along(SCORES), along(TARGET)
    own = logits.softmax(-1)
    chance = own.gather(-1, TEXTS.unsqueeze(-1)).squeeze(-1).prod(-1)
    kept = torch.minimum(own, laws).sum(-1)
    ratio = ratios(logits, laws, TEXTS)
    sums = [torch.zeros_like(ratio), *(size * reached_in_draft_text(ratio, size) for size in range(1, DEPTH + 1))]
    weights = torch.stack([sums[d + 1][:, d] - sums[d][:, d] for d in range(DEPTH)], -1)  # the chain that begins here
    assert float((chance * (weights * kept).sum(-1)).sum()) == pytest.approx(float(objective(SCORES, TARGET)))


def walked(kept: list[list[float]], decay: float, *, corrects_whole: bool = False) -> Tensor:
    """Return the weights of accepted and rejected places of one text by a walk over all that may become of its steps.

    Args:
        corrects_whole: whether the token behind a wholly accepted chain counts as corrected, as in OSD online.
    """
    places, found = len(kept), torch.zeros(2, len(kept) + len(kept[0]) + 1, dtype=torch.float64)

    def step(start: int, chance: float) -> None:
        if start >= places or not chance:
            return
        chain = [1.0, *kept[start], 0.0]
        for count, (here, further) in enumerate(pairwise(chain)):
            own = chance * (here - further)
            found[0, start : start + count] += own
            for behind in range(len(chain) - 2 - count + corrects_whole):
                found[1, start + count + behind] += own * decay**behind
            step(start + count + 1, own)

    step(0, 1.0)
    return found[:, :places]


@pytest.mark.parametrize("decay", [0.0, 0.8])
def test_replayed_places_count_as_often_as_decoding_accepts_and_rejects_them(decay: float) -> None:
    """At a decay of 0 only the places that are corrected count: what OSD means to buffer."""
    kept = kept_by_token(path_ratios(PAIR, 2, 5))[::20]
    lengths = torch.full((len(kept),), 5)
    found = torch.stack(replayed(kept, lengths, decay), 1)
    exact = torch.stack([walked(one.tolist(), decay) for one in kept])
    torch.testing.assert_close(found, exact, rtol=0, atol=1e-12)
    whole = torch.stack([walked(one.tolist(), decay, corrects_whole=True) for one in kept])
    assert float((whole - found)[:, 1].max()) > 0.05, "wholly accepted chains would count as corrected"
    ended = replayed(kept, lengths - 1, decay)
    for some, own in zip(ended, found.unbind(1), strict=True):
        torch.testing.assert_close(some[:, :-1], own[:, :-1], rtol=0, atol=1e-12)
        assert not bool(some[:, -1].any())


def test_only_whole_chains_that_are_kept_are_without_a_correction() -> None:
    """Calls are corrections and wholly accepted chains: OSD's count, by which every call corrects, is too large."""
    kept = torch.cat([kept_by_token(path_ratios(PAIR, 2, 5)), torch.zeros(243, 1, 2)], 1)
    lengths = torch.full((len(kept),), 6)
    corrected = replayed(kept, lengths, 0.0)[1].sum(-1)
    whole = (begins(kept) * kept[..., -1]).sum(-1)
    torch.testing.assert_close(corrected + whole, expected_calls(kept, lengths), rtol=0, atol=1e-12)
    assert float(whole.min()) > 0.01


def test_products_have_the_gradient_of_their_own_sum() -> None:
    """1 - (1 / g) E_p sum_d prod_{j <= d} alpha_j, by loops over the 27 texts."""

    def summed(scores: list[Tensor]) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for text in TEXTS.tolist():
            chance, product = torch.ones((), dtype=torch.float64), torch.ones((), dtype=torch.float64)
            found = torch.zeros((), dtype=torch.float64)
            for depth, (score, law) in enumerate(zip(scores, TARGET, strict=True)):
                above = tuple(text[:depth])
                own, row = (one[above] if above else one.reshape(-1, TOKENS)[0] for one in (score, law))
                product = product * torch.minimum(own.softmax(-1), row).sum()
                found, chance = found + product, chance * row[text[depth]]
            total = total + chance * (1 - found / DEPTH)
        return total

    def learnt(scores: list[Tensor]) -> Tensor:
        logits, laws = along(scores), along(TARGET)
        chance = laws.gather(-1, TEXTS.unsqueeze(-1)).squeeze(-1).prod(-1)
        return (chance * product_loss(torch.minimum(logits.softmax(-1), laws).sum(-1))).sum()

    torch.testing.assert_close(learnt(SCORES), summed(SCORES), rtol=0, atol=1e-12)
    torch.testing.assert_close(by_autograd(learnt, SCORES), by_differences(summed, SCORES), rtol=0, atol=1e-8)
    assert float((by_autograd(learnt, SCORES) + EXACT / DEPTH).abs().max()) > 1e-3  # it is not that of accepted drafts


def test_a_draft_text_needs_its_score_function() -> None:
    """grad J = E_q sum_i 1[q_i < p_i] grad log q_i R_i, R_i = sum_{d >= i} prod_{j <= d} min(1, p_j / q_j)."""

    def scored(scores: list[Tensor]) -> Tensor:
        logits, laws = along(scores), along(TARGET)
        chosen = logits.log_softmax(-1).gather(-1, TEXTS.unsqueeze(-1)).squeeze(-1)
        chance = chosen.detach().sum(-1).exp()
        ratio = 1 / ratios(logits, laws, TEXTS).detach()
        rest = kept_by_token(ratio).flip(-1).cumsum(-1).flip(-1)
        return (chance * ((ratio > 1) * rest * chosen).sum(-1)).sum()

    torch.testing.assert_close(by_autograd(scored, SCORES), EXACT, rtol=0, atol=1e-8)
