"""Dynamic trees in the engine: greedy text is the target's own, and rows do not disturb each other."""

from dataclasses import dataclass, field
from functools import cache

import pytest
import torch
from doubles import perturbed, tiny_model
from scipy.stats import chi2
from torch import Tensor
from transformers import PreTrainedModel

import polydraft
from polydraft import HuggingFaceModel, ModelDrafter, NgramDrafter, NoDraft, SamplingParams
from polydraft.catalogue import parse_policy
from polydraft.conformance import joint_law, tiny_draft, tiny_target
from polydraft.drafters import Drafter, EnsembleDrafter, LookupFirst
from polydraft.engine import generate_many
from polydraft.errors import UnpairedScheme
from polydraft.probs import Noise
from polydraft.schemes import IID, Coupled, Given, Product, TopK, TopThenSample, WithoutReplacement
from polydraft.trees import Chain, Confident, Draft, Merged, TreePolicy, Verdict, Widths
from polydraft.verifiers import (
    BlockVerification,
    BottomUp,
    ByShape,
    NaiveMatch,
    RecursiveRejection,
    RecursiveRejectionWithoutReplacement,
    SharedNoise,
    SpeculativeSampling,
    TopDown,
    TopThenSampleRule,
    TreeVerifier,
)

VOCAB, NEW = 24, 12
PROMPTS = ([3, 1, 4, 1, 5, 9, 2], [7], [2, 7, 1, 8])
POLICIES: dict[str, TreePolicy] = {
    text: parse_policy(text)
    for text in (
        "best-first:8",
        "best-first:12x3:3",
        "confident:6:0.3",
        "confident:3,2,1:0.2",
        "confident-entropy:3,1,1:0.5",
        "adaptive:6:0.4",
        "trunk:2+2,1",
    )
}
CHAINS = ("confident:6:0.3", "adaptive:6:0.4")
TREE_RULES: tuple[TreeVerifier, ...] = (
    TopDown(NaiveMatch(TopK())),
    TopDown(RecursiveRejectionWithoutReplacement()),
    BottomUp(RecursiveRejection()),
)
CHAIN_RULES: tuple[TreeVerifier, ...] = (TopDown(SpeculativeSampling()), BlockVerification())
MERGED: dict[str, TreePolicy] = {"merged chains": Merged((1, 1, 1)), "merged trees": Merged((2, 1))}
PRUNED = ("eagle-2:3x3:7", "eagle-2:4x4:12")


@cache
def target() -> PreTrainedModel:
    return tiny_model("llama", VOCAB)


@cache
def drafter_named(name: str) -> Drafter:
    one, two = (HuggingFaceModel(perturbed(target(), 0.05, seed)) for seed in (1, 2))
    ensemble = EnsembleDrafter(((one, None), (two, SamplingParams(temperature=1.3))))
    return {"model": ModelDrafter(one), "ensemble": ensemble, "n-gram": NgramDrafter()}[name]


def padded(rows: tuple[list[int], ...]) -> tuple[Tensor, Tensor]:
    width = max(map(len, rows))
    ids, mask = torch.zeros(len(rows), width, dtype=torch.int64), torch.zeros(len(rows), width, dtype=torch.int64)
    for row, prompt in enumerate(rows):
        ids[row, width - len(prompt) :], mask[row, width - len(prompt) :] = torch.tensor(prompt), 1
    return ids, mask


def generate(
    rows: tuple[list[int], ...], drafter: str | Drafter, verifier: TreeVerifier, policy: TreePolicy, **options
):
    ids, mask = padded(rows)
    output = polydraft.generate(
        target(),
        ids,
        attention_mask=mask,
        drafter=drafter_named(drafter) if isinstance(drafter, str) else drafter,
        verifier=verifier,
        policy=policy,
        **{"max_new_tokens": NEW, "top_k": 0, "seed": 11, **options},
    )
    assert output.statistics.fallback == ""
    return output, output.sequences[:, ids.shape[1] :].tolist()


@cache
def plain() -> list[list[int]]:
    return generate(PROMPTS, NoDraft(), TopDown(NaiveMatch(TopK())), parse_policy("chain:1"), temperature=0.0)[1]


def named(value: object) -> str:
    if isinstance(value, TreeVerifier):
        return f"{type(value).__name__} {value.name} {value.scheme.name}"
    return str(value)


CASES = [
    *((text, TREE_RULES[1]) for text in POLICIES),
    *((text, rule) for text in ("best-first:8", "confident:3,2,1:0.2") for rule in TREE_RULES[::2]),
    *((text, rule) for text in CHAINS for rule in CHAIN_RULES),
    *((text, TopDown(NaiveMatch(TopK()))) for text in PRUNED),
]


@pytest.mark.parametrize(("policy", "verifier"), CASES, ids=named)
def test_greedy_text_is_the_targets_own(policy: str, verifier: TreeVerifier) -> None:
    output, tokens = generate(PROMPTS, "model", verifier, parse_policy(policy), temperature=0.0)
    assert tokens == plain()
    assert 0 < output.statistics.accepted < output.statistics.drafted
    assert output.statistics.block_efficiency > 1.1


@pytest.mark.parametrize("policy", MERGED)
def test_merged_trees_write_the_targets_own_text_and_leave_rows_alone(policy: str) -> None:
    assert generate(PROMPTS, "ensemble", TopDown(NaiveMatch(Product())), MERGED[policy], temperature=0.0)[1] == plain()
    rule = TopDown(RecursiveRejection(Product()))
    output, together = generate(PROMPTS, "ensemble", rule, MERGED[policy], temperature=0.9)
    assert output.statistics.accepted > 0
    for row, prompt in enumerate(PROMPTS):
        seed = 11 + 1_000_003 * row
        assert generate((prompt,), "ensemble", rule, MERGED[policy], temperature=0.9, seed=seed)[1] == [together[row]]


@pytest.mark.parametrize("policy", [*POLICIES, *PRUNED])
def test_greedy_text_of_an_ensemble_is_the_targets_own(policy: str) -> None:
    rule = TopDown(NaiveMatch(Product()))
    if policy in PRUNED:
        with pytest.raises(UnpairedScheme, match="drops drafts after they were drawn"):
            generate(PROMPTS, "ensemble", rule, parse_policy(policy), temperature=0.0)
    else:
        assert generate(PROMPTS, "ensemble", rule, parse_policy(policy), temperature=0.0)[1] == plain()


@pytest.mark.parametrize("policy", [*POLICIES, *PRUNED])
def test_n_grams_take_the_depth_alone(policy: str) -> None:
    rule = TopDown(NaiveMatch(Given()))
    assert generate(PROMPTS, "n-gram", rule, parse_policy(policy), temperature=0.0)[1] == plain()


BATCHED = [
    *((text, TopDown(RecursiveRejectionWithoutReplacement())) for text in POLICIES),
    ("best-first:8", TopDown(TopThenSampleRule())),
    *((text, BottomUp(RecursiveRejection())) for text in ("best-first:8", "confident:3,2,1:0.2")),
    *((text, BlockVerification()) for text in CHAINS),
    *((text, TopDown(NaiveMatch(TopK()))) for text in PRUNED),
    ("best-first:8", SharedNoise()),
]


@pytest.mark.long(6)
@pytest.mark.parametrize(("policy", "verifier"), BATCHED, ids=named)
def test_a_row_is_what_it_is_alone(policy: str, verifier: TreeVerifier) -> None:
    """Rows have trees of their own; a neighbour with a larger one changes neither the drafts nor the verdict."""
    shape = parse_policy(policy)
    together = generate(PROMPTS, "model", verifier, shape, temperature=0.9)[1]
    for row, prompt in enumerate(PROMPTS):
        assert generate((prompt,), "model", verifier, shape, temperature=0.9, seed=11 + 1_000_003 * row)[1] == [
            together[row]
        ]


@pytest.mark.long(1)
@pytest.mark.parametrize("policy", ["best-first:8", "adaptive:6:0.4", "confident:3,2,1:0.2"])
def test_texts_join_a_running_batch(policy: str) -> None:
    shape = parse_policy(policy)
    options = {"drafter": drafter_named("model"), "policy": shape, "max_new_tokens": NEW, "temperature": 0.9}
    rule = TopDown(RecursiveRejectionWithoutReplacement())
    prompts = [torch.tensor(prompt) for prompt in (*PROMPTS, [5, 8, 5], [9, 9])]
    found = [
        {
            one.name: one.tokens
            for one in generate_many(target(), prompts, batch_size=size, verifier=rule, seed=3, **options)
        }
        for size in (1, 2)
    ]
    assert found[0] == found[1] and len(found[0]) == len(prompts)


def test_shared_noise_writes_the_same_text_whatever_the_policy() -> None:
    options = {"temperature": 0.9}
    texts = [
        generate(PROMPTS, "model", SharedNoise(), parse_policy(text), **options)[1]
        for text in ("chain:2", "best-first:8", "confident:3,2,1:0.2", "adaptive:6:0.4")
    ]
    assert all(one == texts[0] for one in texts)


@pytest.mark.parametrize("scheme", [IID(), WithoutReplacement(), TopThenSample()], ids=lambda scheme: scheme.name)
def test_pruning_is_refused_where_drafts_are_sampled(scheme) -> None:
    with pytest.raises(UnpairedScheme, match=f"Eagle2 drops drafts .* not {scheme.name}; BestFirst decides"):
        generate(PROMPTS, "model", TopDown(NaiveMatch(scheme)), parse_policy("eagle-2:3x3:7"), temperature=0.0)


# --- The default verifier, whose rule must not follow from what was drawn --------------------------------------------

LATE = Confident((1, 1, 2), 0.1)
SAMPLES, SMALL = 2000, 4
FALSE_ALARM_RATE = 1e-6
"""Of each chi-square test below, if texts follow the target; seeds are fixed."""


@cache
def small_pair() -> tuple[PreTrainedModel, PreTrainedModel]:
    pair = tiny_target(0, SMALL)
    return pair, tiny_draft(pair, 0.2)


def joint_p_value(texts: Tensor, prompt: list[int]) -> float:
    """Return the chi-square tail probability of texts of three tokens, rare ones counted together."""
    law = joint_law(small_pair()[0], prompt, 3, SamplingParams()).probs.flatten()
    places = (texts * torch.tensor([SMALL**2, SMALL, 1])).sum(dim=-1)
    seen, wanted = places.bincount(minlength=SMALL**3).double(), law * len(texts)
    common = wanted >= 5
    seen, wanted = (torch.cat([one[common], one[~common].sum().view(1)]) for one in (seen, wanted))
    return float(chi2.sf(float(((seen - wanted) ** 2 / wanted.clamp_min(1e-9)).sum()), len(wanted) - 1))


@pytest.mark.long(1)
@pytest.mark.parametrize("policy", [LATE, Confident((1, 2, 1), 0.4)], ids=str)
def test_texts_of_the_default_verifier_follow_the_target(policy: TreePolicy) -> None:
    target_model, draft = small_pair()
    prompt = [1, 2, 0]
    output = polydraft.generate(
        target_model,
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, 3, dtype=torch.int64),
        drafter=draft,
        policy=policy,
        temperature=1.0,
        top_k=0,
        max_new_tokens=3,
        seed=4,
        num_return_sequences=SAMPLES,
    )
    assert 0.05 < output.statistics.acceptance_rate < 0.99
    assert joint_p_value(output.sequences[:, 3:], prompt) > FALSE_ALARM_RATE


def test_the_chi_square_test_would_notice_the_drafters_own_text() -> None:
    draft = small_pair()[1]
    law = joint_law(draft, [1, 2, 0], 3, SamplingParams()).probs.flatten()
    places = torch.multinomial(law, SAMPLES, replacement=True, generator=torch.Generator().manual_seed(0))
    texts = torch.stack([places // SMALL**2, places // SMALL % SMALL, places % SMALL], dim=-1)
    assert joint_p_value(texts, [1, 2, 0]) < FALSE_ALARM_RATE


@dataclass(frozen=True)
class Watched(ByShape):
    """The default, which notes for every step how wide the tree was and which rule it met."""

    seen: list[tuple[int, str]] = field(default_factory=list)

    def verify(self, draft: Draft, target_probs: Tensor, noise: Noise) -> Verdict:
        if draft.most_children:  # nothing is drafted for a last token
            self.seen.append((draft.tree.topology.width, self.rule_for(draft).name))
        return super().verify(draft, target_probs, noise)


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize(
    ("policy", "drafter", "rule"),
    [
        (Confident((1, 1, 2), 0.5), "model", TopDown(TopThenSampleRule()).name),
        (Confident((1, 1, 1), 0.5), "model", BlockVerification().name),
        (Chain(3), "lookup", BlockVerification().name),
        (Chain(3), "model", BlockVerification().name),
    ],
    ids=str,
)
def test_every_step_of_a_run_meets_the_same_rule(policy: TreePolicy, drafter: str, rule: str, rows: int) -> None:
    """Whether a tree came out as a chain or not, alone and beside others; lookups are chains in every run."""
    target_model, draft = small_pair()
    model, watched = ModelDrafter(HuggingFaceModel(draft)), Watched()
    polydraft.generate(
        target_model,
        torch.tensor([[1, 2, 0, 1, 2, 0]]),
        attention_mask=torch.ones(1, 6, dtype=torch.int64),
        drafter=LookupFirst(model, trusted=1) if drafter == "lookup" else model,
        verifier=watched,
        policy=policy,
        temperature=1.0,
        top_k=0,
        max_new_tokens=40,
        seed=4,
        num_return_sequences=rows,
    )
    branching = policy.shape.max_children > 1
    assert {name for _, name in watched.seen} == {rule}
    assert {width for width, _ in watched.seen} <= {1, 2}
    if branching and rows == 1:
        assert {width for width, _ in watched.seen} == {1, 2}, "some trees came out as chains, and some did not"


def test_naive_match_of_coupled_drafts_follows_the_target_over_several_steps() -> None:
    """Drafts at one position are the same in every step that reaches it; naive match must not mind."""
    target_model, draft = small_pair()
    output = polydraft.generate(
        target_model,
        torch.tensor([[1, 2, 0]]),
        attention_mask=torch.ones(1, 3, dtype=torch.int64),
        drafter=draft,
        verifier=TopDown(NaiveMatch(Coupled())),
        policy=Widths((2, 1)),
        temperature=1.0,
        top_k=0,
        max_new_tokens=3,
        seed=5,
        num_return_sequences=SAMPLES,
    )
    assert output.statistics.acceptance_rate > 0.05
    assert joint_p_value(output.sequences[:, 3:], [1, 2, 0]) > FALSE_ALARM_RATE
