"""At temperature 0 every drafter, verifier and tree reproduces plain decoding and Hugging Face token for token."""

from functools import cache

import pytest
import torch
from doubles import TREE_KINDS, perturbed, tiny_model
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import polydraft
from polydraft import (
    EAGLE_25,
    IID,
    MEDUSA_63,
    Chain,
    Fixed,
    GenerationOutput,
    Given,
    HuggingFaceModel,
    JacobiDrafter,
    LookaheadDrafter,
    ModelDrafter,
    NaiveMatch,
    NgramDrafter,
    NoDraft,
    OuroborosDrafter,
    RecursiveRejection,
    RecursiveRejectionWithoutReplacement,
    SpeculativeSampling,
    TopDown,
    TopK,
    TopThenSample,
    TopThenSampleRule,
    Widths,
    WithoutReplacement,
)
from polydraft.drafters import Drafter
from polydraft.trees import TreePolicy
from polydraft.verifiers import NodeVerifier

VOCAB, NEW = 24, 16
PROMPTS = ([3, 1, 4, 1, 5, 9, 2], [7], [2, 7, 1, 8])
POLICIES = {
    "chain": Chain(3),
    "widths": Widths((3, 2, 1)),
    "eagle": Fixed(EAGLE_25),
    "medusa": Fixed(MEDUSA_63),
}
SAMPLED_RULES: tuple[NodeVerifier, ...] = (
    NaiveMatch(IID()),
    NaiveMatch(WithoutReplacement()),
    NaiveMatch(TopK()),
    NaiveMatch(TopThenSample()),
    RecursiveRejection(),
    RecursiveRejectionWithoutReplacement(),
    TopThenSampleRule(),
)
GIVEN = ("n-gram", "jacobi", "lookahead", "ouroboros")
TRIPLES = [
    *(("model", rule, policy) for rule in SAMPLED_RULES for policy in POLICIES),
    ("model", SpeculativeSampling(), "chain"),
    *((name, NaiveMatch(Given()), policy) for name in GIVEN for policy in POLICIES),
    *(("none", rule, "eagle") for rule in (NaiveMatch(), RecursiveRejection(), SpeculativeSampling())),
]


@cache
def target(kind: str = "llama") -> PreTrainedModel:
    return tiny_model(kind, VOCAB)


@cache
def drafter_named(name: str, kind: str = "llama") -> Drafter:
    draft = HuggingFaceModel(perturbed(target(kind), 0.05))
    return {
        "none": NoDraft(),
        "n-gram": NgramDrafter(),
        "jacobi": JacobiDrafter(),
        "lookahead": LookaheadDrafter(3, 4, 3),
        "ouroboros": OuroborosDrafter(draft, 2, 3, 3, 4, 3),
        "model": ModelDrafter(draft),
    }[name]


@cache
def plain(kind: str, prompt: tuple[int, ...], penalty: float = 1.0) -> list[int]:
    """Return Hugging Face's own greedy continuation of one prompt."""
    ids = torch.tensor([prompt])
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": NEW}
    return target(kind).generate(ids, repetition_penalty=penalty, **options)[0, len(prompt) :].tolist()


def padded(side: str) -> tuple[Tensor, Tensor]:
    """Return the prompts as one batch, padded on one side with a token that is not the padding id, and the mask."""
    width = max(map(len, PROMPTS))
    ids, mask = torch.full((len(PROMPTS), width), VOCAB - 1), torch.zeros(len(PROMPTS), width, dtype=torch.int64)
    for row, prompt in enumerate(PROMPTS):
        place = slice(width - len(prompt), width) if side == "left" else slice(0, len(prompt))
        ids[row, place], mask[row, place] = torch.tensor(prompt), 1
    return ids, mask


def generate(drafter: str, rule: NodeVerifier, policy: TreePolicy, kind: str = "llama", **options) -> GenerationOutput:
    ids, mask = padded(options.pop("side", "left"))
    return polydraft.generate(
        target(kind),
        ids,
        attention_mask=mask,
        drafter=drafter_named(drafter, kind),
        verifier=TopDown(rule),
        policy=policy,
        max_new_tokens=NEW,
        seed=1,
        **{"temperature": 0, **options},
    )


def new_tokens(output: GenerationOutput) -> list[list[int]]:
    return output.sequences[:, max(map(len, PROMPTS)) :].tolist()


def name(value: object) -> str:
    return f"{value.name} ({value.scheme.name})" if isinstance(value, NodeVerifier) else str(value)


@pytest.mark.long(16)
@pytest.mark.parametrize(("drafter", "rule", "policy"), TRIPLES, ids=name)
def test_every_triple_reproduces_plain_decoding(drafter: str, rule: NodeVerifier, policy: str) -> None:
    output = generate(drafter, rule, POLICIES[policy])
    assert new_tokens(output) == [plain("llama", tuple(prompt)) for prompt in PROMPTS]
    # Something was proposed, some of it accepted and some rejected: the identity is not that of doing nothing.
    if drafter == "none":
        assert output.statistics.drafted == 0
    else:
        assert 0 < output.statistics.accepted < output.statistics.drafted
        assert output.statistics.block_efficiency > 1


@pytest.mark.long(12)
@pytest.mark.parametrize("kind", TREE_KINDS)
@pytest.mark.parametrize("drafter", ["none", "model", *GIVEN])
def test_every_family_reproduces_hugging_face(kind: str, drafter: str) -> None:
    output = generate(drafter, NaiveMatch(Given() if drafter in GIVEN else TopK()), Fixed(EAGLE_25), kind)
    assert new_tokens(output) == [plain(kind, tuple(prompt)) for prompt in PROMPTS]
    assert output.finish == ("length",) * len(PROMPTS)


@pytest.mark.long(6)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("drafter", ["none", "model", *GIVEN])
def test_a_repetition_penalty_sees_each_nodes_own_path(drafter: str, side: str) -> None:
    rule = NaiveMatch(Given()) if drafter in GIVEN else RecursiveRejectionWithoutReplacement()
    output = generate(drafter, rule, Widths((3, 2, 1)), repetition_penalty=1.7, side=side)
    width = max(map(len, PROMPTS))
    # Hugging Face's penalty counts padding tokens too, so the reference is given the padding of the batch.
    ids, mask = padded("left")
    options = {"attention_mask": mask, "do_sample": False, "max_new_tokens": NEW, "repetition_penalty": 1.7}
    left = target().generate(ids, **options)[:, width:].tolist()
    alone = [plain("llama", tuple(prompt), 1.7) for prompt in PROMPTS]
    assert new_tokens(output) == (left if side == "left" else alone)
    assert alone != [plain("llama", tuple(prompt)) for prompt in PROMPTS]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", TREE_KINDS)
def test_padding_on_either_side(kind: str, side: str) -> None:
    output = generate("model", RecursiveRejection(), Widths((3, 2, 1)), kind, side=side)
    assert new_tokens(output) == [plain(kind, tuple(prompt)) for prompt in PROMPTS]


def test_several_return_sequences_of_the_likeliest_tokens() -> None:
    # Hugging Face returns several sequences when sampling only; with top_k=1 there is one to sample.
    output = generate("model", TopThenSampleRule(), Fixed(EAGLE_25), num_return_sequences=2, temperature=1, top_k=1)
    assert new_tokens(output) == [plain("llama", tuple(prompt)) for prompt in PROMPTS for _ in range(2)]


def test_eager_attention() -> None:
    ids = torch.tensor([PROMPTS[0]])
    model = tiny_model("llama", VOCAB, attention="eager")
    output = polydraft.generate(
        model, ids, drafter=drafter_named("model"), policy=Fixed(EAGLE_25), temperature=0, max_new_tokens=NEW
    )
    assert output.sequences[0, ids.shape[1] :].tolist() == plain("llama", tuple(PROMPTS[0]))


def test_rotations_that_switch_by_the_longest_position_are_followed_up_to_there() -> None:
    """A tree that crosses the place would be scored with the frequencies of longer texts."""
    rotation = {"rope_type": "longrope", "long_factor": [4.0] * 2, "short_factor": [1.0] * 2, "factor": 4.0}
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.6,
        rope_parameters={**rotation, "original_max_position_embeddings": 16, "rope_theta": 1e4},
    )
    torch.manual_seed(0)
    model, prompt = LlamaForCausalLM(config).double().eval(), torch.tensor([[1, 2, 3, 4]])
    with pytest.warns(UserWarning, match="cut short by the model's context of 16 tokens"):
        plain = polydraft.generate(model, prompt, drafter="none", max_new_tokens=40, eos_token_id=31)
        drafted = polydraft.generate(model, prompt, drafter="self:skip=1", policy=4, max_new_tokens=40, eos_token_id=31)
    assert plain.sequences.shape[1] == 16 and plain.finish == ("context",)
    assert torch.equal(plain.sequences, drafted.sequences)
