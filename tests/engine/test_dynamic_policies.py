"""Dynamic trees in the engine: greedy text is the target's own, and rows do not disturb each other."""

from functools import cache

import pytest
import torch
from doubles import perturbed, tiny_model
from torch import Tensor
from transformers import PreTrainedModel

import polydraft
from polydraft import HuggingFaceModel, ModelDrafter, NgramDrafter, NoDraft, SamplingParams
from polydraft.drafters import Drafter, EnsembleDrafter
from polydraft.engine import generate_many
from polydraft.errors import UnpairedScheme
from polydraft.schemes import IID, Given, Product, TopK, TopThenSample, WithoutReplacement
from polydraft.trees import Merged, TreePolicy, parse_policy
from polydraft.verifiers import (
    BlockVerification,
    BottomUp,
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


@pytest.mark.parametrize(("policy", "verifier"), BATCHED, ids=named)
def test_a_row_is_what_it_is_alone(policy: str, verifier: TreeVerifier) -> None:
    """Rows have trees of their own; a neighbour with a larger one changes neither the drafts nor the verdict."""
    shape = parse_policy(policy)
    together = generate(PROMPTS, "model", verifier, shape, temperature=0.9)[1]
    for row, prompt in enumerate(PROMPTS):
        assert generate((prompt,), "model", verifier, shape, temperature=0.9, seed=11 + 1_000_003 * row)[1] == [
            together[row]
        ]


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
