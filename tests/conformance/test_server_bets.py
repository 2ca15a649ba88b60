"""The bets against a server's texts: their mean by enumeration, and what they catch."""

from math import log

import pytest
import torch
from wrong_servers import COLD, Law, colder, lenient, models_of, right, tempered, zipf_rows

from polydraft.conformance.http.betting import STAKES, Wallet
from polydraft.conformance.http.features import PLACES, TextFeatures
from polydraft.errors import InvalidParameter

ALARM = log(1000)


def gains(
    features: TextFeatures, law: torch.Tensor, tokens: list[int], draft: torch.Tensor, eta: float
) -> torch.Tensor:
    """Return what each token multiplies each capital by, without a place."""
    found = []
    for token in tokens:
        wallet = Wallet(features.names, law.shape[-1], eta)
        seen = features.observe([0, 1, 0], [token], law.unsqueeze(0), draft.unsqueeze(0))
        wallet.add(seen, [token])
        found.append(wallet.logs[:, 0].exp())
    return torch.stack(found)


@pytest.mark.parametrize("eta", [0.0, 0.01])
def test_no_bet_wins_on_average_while_a_server_is_within_the_tolerance(eta: float) -> None:
    law = torch.tensor([0.5, 0.3, 0.1, 0.08, 0.02], dtype=torch.float64)
    draft = torch.tensor([0.2, 0.2, 0.2, 0.2, 0.2], dtype=torch.float64)
    features = TextFeatures(5, filtered=True, drafted=True)
    won = gains(features, law, [0, 1, 2, 3, 4], draft, eta)
    random = torch.tensor(["hold" in name for name in features.names])
    for one in range(5):
        for other in range(5):
            moved = law.clone()
            moved[one] += eta
            moved[other] -= eta
            mean = torch.einsum("x,xfsl->fsl", moved, won)
            assert float(mean[~random].max()) <= 1 + 1e-12
    assert float(won.min()) > 0.04, "a token costs no more than a share of the capital"


def test_the_random_part_of_ranks_makes_their_mean_what_is_said() -> None:
    law = torch.tensor([0.4, 0.4, 0.15, 0.05, 0.0], dtype=torch.float64)
    stream = torch.Generator().manual_seed(0)
    tokens = torch.multinomial(law, 20_000, replacement=True, generator=stream).tolist()
    features = TextFeatures(5, filtered=False, drafted=False)
    seen = features.observe([0], tokens, law.expand(len(tokens), -1))
    gap = (seen.values - seen.means).sum(dim=-1) / 20_000**0.5
    assert float(gap[1:].abs().max()) < 3, "three times more than a variance of a quarter allows: chance below 1e-8"


def test_weights_sum_to_one_and_all_is_counted_by_place() -> None:
    features = TextFeatures(4, [3], filtered=False, drafted=False)
    wallet = Wallet(features.names, 4, 0.0)
    assert float(wallet.weights.exp().expand(wallet.logs.shape).sum()) == pytest.approx(1)
    assert wallet.log_e == pytest.approx(0)
    law = torch.full((3, 4), 0.25, dtype=torch.float64)
    wallet.add(features.observe([0], [3, 1, 2], law), [3, 1, 2])
    assert wallet.observed[0].tolist() == [0, 1, 1, 1] and wallet.expected[0].tolist() == [0.75] * 4
    assert wallet.observed[1].tolist() == [0, 0, 0, 1] and wallet.observed[2].tolist() == [0, 1, 0, 0]
    assert wallet.observed[3:].sum(dim=0).tolist() == [0, 1, 1, 1]
    assert len(PLACES) == 5 and wallet.logs.shape[-1] == len(STAKES)


def test_what_followed_the_longest_match_is_what_lookups_draft() -> None:
    features = TextFeatures(10, filtered=False, drafted=False)
    law = torch.full((3, 10), 0.1, dtype=torch.float64)
    seen = features.observe([1, 2, 3, 9, 2, 4, 1, 2], [3, 9, 5], law)
    assert seen.values[0].tolist() == [1, 1, 0] and seen.seen[0].tolist() == [True] * 3
    alone = features.observe([7], [3, 9, 5], law)
    assert alone.seen[0].tolist() == [False] * 3


def test_a_tolerance_outside_its_range_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="tolerance must be in"):
        Wallet(("a",), 4, 0.5)


def tokens_until_caught(
    law: Law, most: int, run: int, *, eta: float, drafted: bool = False, size: int = 400
) -> tuple[int | None, Wallet]:
    """Let a server write until it is called wrong, or nothing after so many tokens."""
    target, draft = (one.table.exp() for one in models_of(size))
    stream = torch.Generator().manual_seed(run)
    features = TextFeatures(size, [3], filtered=False, drafted=drafted, seed=run)
    wallet = Wallet(features.names, size, eta)
    while wallet.tokens < most:
        text = [int(torch.randint(0, size, (1,), generator=stream))]
        for _ in range(64):
            text.append(int(law(target[text[-1:]], draft[text[-1:]], stream)))
        before = torch.tensor(text[:-1])
        wallet.add(features.observe(text[:1], text[1:], target[before], draft[before] if drafted else None), text[1:])
        if wallet.log_e >= ALARM:
            return wallet.tokens, wallet
    return None, wallet


def test_a_lean_towards_drafts_is_caught_within_15000_tokens() -> None:
    caught, wallet = tokens_until_caught(lenient, 15_000, 1, eta=0.002, drafted=True)
    assert caught is not None and "draft model" in wallet.culprit().feature


@pytest.mark.slow
@pytest.mark.parametrize(("law", "most", "drafted"), [(lenient, 15_000, True), (colder, 30_000, False)])
def test_nineteen_of_twenty_biased_servers_are_caught(law: Law, most: int, drafted: bool) -> None:
    """Both are biased by a total variation of .02 a token, and .002 of it is within the tolerance."""
    found = [tokens_until_caught(law, most, 100 + run, eta=0.002, drafted=drafted)[0] for run in range(20)]
    assert sum(one is not None for one in found) >= 19, found


@pytest.mark.slow
def test_a_thousand_right_servers_give_at_most_four_alarms() -> None:
    """At false alarm 1e-3 and no tolerance, 2,048 tokens each: more than four have probability .0037 at most."""
    found = [tokens_until_caught(right, 2_048, 1_000 + run, eta=0.0, size=60)[0] for run in range(1_000)]
    assert sum(one is not None for one in found) <= 4


def test_the_detectable_bias_shrinks_with_the_root_of_the_tokens() -> None:
    wallet = Wallet(("a", "b"), 4, 0.002)
    assert wallet.detectable(1e-3) == 1
    wallet.tokens = 10_000
    many = wallet.detectable(1e-3)
    wallet.tokens = 40_000
    assert wallet.detectable(1e-3) - 0.002 == pytest.approx((many - 0.002) / 2)
    assert 0.02 < many < 0.05


def test_the_cold_double_is_as_wrong_as_it_says() -> None:
    rows = zipf_rows(1)
    assert float((tempered(rows, COLD) - rows).abs().sum(-1).mean()) / 2 == pytest.approx(0.02, abs=1e-3)
