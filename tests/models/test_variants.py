"""Variants of a model: other weights or fewer sub-layers, over the keys that the model itself has written."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from doubles import tiny_model
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from views import close, over_the_models_keys, skipping, without

import polydraft
from polydraft.drafters import SelfDrafter, View
from polydraft.errors import InvalidParameter, UnsupportedModel
from polydraft.models import CompiledModel, HuggingFaceModel, LayerSet
from polydraft.models.derived import derived
from polydraft.models.tiny import tiny_of_type
from polydraft.reading import Reader, Text
from polydraft.trees import TokenTree, TreeShape, topology

ROWS = [[3, 1, 4, 1, 5, 9, 2, 6], [7], [5, 8], [2, 7, 1, 8, 2, 8]]
SHAPES = [TreeShape(((1,),) * 3), TreeShape(((2,), (2, 1)))]
FAMILIES = ("gemma2", "gemma3_text", "gpt_neox", "gpt2", "llama", "mistral", "mixtral", "olmo2", "opt", "phi", "qwen3")


def text_of(rows: Sequence[Sequence[int]]) -> Text:
    tokens = torch.full((len(rows), 24), 11)
    for row, own in enumerate(rows):
        tokens[row, : len(own)] = torch.tensor(own)
    return Text(tokens, torch.tensor([*map(len, rows)]))


def tree_below(text: Text, shape: TreeShape) -> TokenTree:
    batch = len(text.lengths)
    tokens = torch.randint(12, (batch, shape.size), generator=torch.Generator().manual_seed(1))
    tokens[:, 0] = text.last()
    return TokenTree(tokens, topology(shape, batch, torch.device("cpu")), torch.ones_like(tokens, dtype=torch.bool))


def scores(
    model: HuggingFaceModel, variant: Any, rows: list[list[int]], shape: TreeShape
) -> tuple[Tensor, Tensor, TokenTree]:
    """Return a variant's scores of a tree behind texts that the model has read, and the model's own behind those."""
    text = text_of(rows)
    tree = tree_below(text, shape)
    reader = Reader.new(model, len(rows), 24 + shape.size).catch_up(text)[0]
    found = reader.viewed(variant).at(text).score(text, tree)[0].logits
    return found, reader.score(text, tree)[0].logits, tree


SETS = [skipping(0), skipping(attention=[0]), skipping(attention=[1], mlp=[0]), skipping(mlp=[0, 1])]


def model_of(kind: str) -> PreTrainedModel:
    """Return a small model whose weights are far from those of a start; windows are small enough to be met."""
    model, stream = tiny_of_type(kind).double(), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.2 * torch.randn(weight.shape, generator=stream).to(weight))
    return model


@pytest.mark.long(8)
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "own"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_skipped_sub_layers_add_nothing_over_the_models_keys(kind: str, fused: bool) -> None:
    model = model_of(kind)
    target = HuggingFaceModel(model, fused=fused)
    for layers, shape in zip(SETS, SHAPES * 2, strict=True):
        found, own, tree = scores(target, target.variant(layers=layers), ROWS, shape)
        for at, row in enumerate(ROWS):
            close(found[at], over_the_models_keys(model, without(model, layers), row, tree, at))
            close(own[at], over_the_models_keys(model, model, row, tree, at))
        assert float((found - own).abs().max()) > 0.01, "it is another law"


@pytest.mark.long(5)
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "own"])
@pytest.mark.parametrize("kind", ["gpt_neox", "gpt2", "llama", "mistral", "qwen3"])
def test_an_exit_is_the_full_passs_states_through_norm_and_head(kind: str, fused: bool) -> None:
    model: Any = model_of(kind)
    target = HuggingFaceModel(model, fused=fused)
    variant, body = target.variant(layers=skipping(exit=1)), model.base_model
    norm = next(getattr(body, one) for one in ("norm", "ln_f", "final_layer_norm") if hasattr(body, one))
    for shape in SHAPES:
        found, own, tree = scores(target, variant, ROWS, shape)
        for at, row in enumerate(ROWS):
            for node in range(shape.size):
                path = tree.tokens[at, (tree.ancestors[at, node, 1:].nonzero().squeeze(-1) + 1).tolist()].tolist()
                with torch.no_grad():
                    states = model(torch.tensor([[*row, *path]]), output_hidden_states=True).hidden_states[1][0, -1]
                    close(found[at, node], model.get_output_embeddings()(norm(states)))
            close(own[at], over_the_models_keys(model, model, row, tree, at))
        assert float((found - own).abs().max()) > 0.01
    assert variant.facts.layers == 1


@pytest.mark.long(5)
@pytest.mark.parametrize("layers", [LayerSet(), skipping(mlp=[1])], ids=["all", "skip"])
@pytest.mark.parametrize("kind", ["gpt_neox", "llama", "mistral", "qwen2"])
def test_eight_bits_are_the_derived_models_layers_over_the_models_keys(kind: str, layers: LayerSet) -> None:
    """Both are the same numbers but for rounding to bfloat16 on the way; the keys are not the derived model's own."""
    model = tiny_model(kind, dtype=torch.float32)
    target = HuggingFaceModel(model)
    short = without(model, layers)
    found, own, tree = scores(target, target.variant("int8", layers), ROWS, SHAPES[1])
    for at, row in enumerate(ROWS):
        close(found[at], over_the_models_keys(model, derived(short, "self:int8"), row, tree, at), 0.03)
        close(own[at], over_the_models_keys(model, model, row, tree, at), 1e-4)
    alone = Reader.new(HuggingFaceModel(derived(short, "self:int8")), len(ROWS), 32).catch_up(text_of(ROWS))[0]
    apart = alone.score(text_of(ROWS), tree)[0].logits
    assert float((found - apart).abs().max()) > 0, "the model's keys are others than those of eight bits"


def test_a_variant_is_made_once_and_anew_when_the_weights_change() -> None:
    model = tiny_model("llama", dtype=torch.float32)
    target, layers = HuggingFaceModel(model), skipping(0)
    before = [target.variant(layers=layers), target.variant("int8"), target.variant("int8", layers)]
    again = HuggingFaceModel(model)
    assert before == [again.variant(layers=layers), again.variant("int8"), again.variant("int8", layers)]
    assert target.variant() is target and target.variant(layers=skipping(exit=2)) is target
    own = {one.data_ptr() for one in model.parameters()}
    assert {one.data_ptr() for one in before[0].model.parameters()} <= own
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(2)
    after = [target.variant(layers=layers), target.variant("int8"), target.variant("int8", layers)]
    assert all(one is not other for one, other in zip(before, after, strict=True))


def test_the_model_itself_stays_as_it_was() -> None:
    model = tiny_model("llama")
    before = [(name, type(part), dict(part._forward_hooks)) for name, part in model.named_modules()]
    HuggingFaceModel(model).variant(layers=skipping(1))
    assert before == [(name, type(part), dict(part._forward_hooks)) for name, part in model.named_modules()]


def test_a_compiled_models_variants_run_over_its_cache() -> None:
    model = tiny_model("llama", dtype=torch.float64)
    compiled = CompiledModel(model, backend="eager")
    found, own, tree = scores(compiled, compiled.variant(layers=skipping(mlp=[0])), ROWS[:1], SHAPES[0])
    close(found[0], over_the_models_keys(model, without(model, skipping(mlp=[0])), ROWS[0], tree, 0))
    close(own[0], over_the_models_keys(model, model, ROWS[0], tree, 0))


WRONG = [
    (skipping(2), "between 0 and 1 in this model of 2 layers, but 2 is one"),
    (skipping(exit=3), "Exits lie behind 1 to 2 layers of this model, not behind 3"),
    (skipping(0, 1), "All 2 layers that run are skipped"),
    (LayerSet(frozenset({1}), depth=40), "chosen for a model of 40 layers, but this one has 2"),
]


@pytest.mark.parametrize(("layers", "said"), WRONG, ids=[said for _, said in WRONG])
def test_layers_that_are_not_there_are_refused(layers: LayerSet, said: str) -> None:
    with pytest.raises(InvalidParameter, match=said):
        HuggingFaceModel(tiny_model("llama")).variant(layers=layers)


@pytest.mark.parametrize(
    ("skipped", "exit", "said"),
    [(0, 0, "not behind 0"), (1, 1, "behind the exit at 1"), (0, 1, "All 1 layers that run")],
)
def test_layers_that_no_model_has_are_refused(skipped: int, exit: int, said: str) -> None:
    with pytest.raises(InvalidParameter, match=said):
        skipping(skipped, exit=exit)


@pytest.mark.parametrize(
    ("kind", "weights", "said"),
    [
        ("bloom", "", "BloomForCausalLM scores chains only, so no variant of it can draft over its keys"),
        ("qwen3_5", "", "scores chains only"),
        ("gpt2", "int8", "has no linear layers of torch's"),
    ],
)
def test_models_without_variants_are_refused_by_name(kind: str, weights: str, said: str) -> None:
    with pytest.raises(UnsupportedModel, match=said):
        HuggingFaceModel(tiny_model(kind)).variant(weights, LayerSet() if weights else skipping(mlp=[0]))


class Doubled(LlamaDecoderLayer):
    def forward(self, hidden_states: Tensor, *given: Any, **named: Any) -> Tensor:
        return 2 * super().forward(hidden_states, *given, **named)


class Renamed(LlamaDecoderLayer):
    def forward(self, hidden_states: Tensor, *given: Any, **named: Any) -> Tensor:
        seen = hidden_states + self.self_attn(self.input_layernorm(hidden_states), *given, **named)[0]
        inside: Any = self.inside
        return seen + inside(self.post_attention_layernorm(seen))


def test_layers_of_other_parts_are_refused_by_name() -> None:
    model = tiny_model("llama", num_hidden_layers=3)
    first, _, last = model.model.layers
    first.__class__, last.__class__, last.inside = Doubled, Renamed, last.mlp
    del last.mlp
    target = HuggingFaceModel(model, fused=False)
    assert target.variant(layers=skipping(mlp=[1])).layers == 3
    with pytest.raises(UnsupportedModel, match="Layer 0 of LlamaForCausalLM does more than to add what its attention"):
        target.variant(layers=skipping(mlp=[0]))
    with pytest.raises(UnsupportedModel, match="Renamed of LlamaForCausalLM has no part called mlp"):
        target.variant(layers=skipping(attention=[2]))


@pytest.mark.parametrize("change", ["an indexer", "offloaded"])
def test_models_whose_keys_are_not_shared_are_refused_by_name(change: str) -> None:
    target = HuggingFaceModel(tiny_model("llama"))
    if change == "an indexer":
        target.shapes = ((2, 4),) * 6
    else:
        target.model.model.layers[0]._hf_hook = SimpleNamespace(offload=True)
    said = {"an indexer": "choose what they attend to", "offloaded": "are offloaded, so it has no variants"}[change]
    with pytest.raises(UnsupportedModel, match=said):
        target.variant(layers=skipping(mlp=[0]))


def test_a_step_reads_no_weights_to_see_whether_parts_are_still_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts of a fused pass belong to it; what changes behind a text is seen when the next one begins."""
    target, ids = tiny_model("llama", num_hidden_layers=3), torch.tensor([ROWS[0]])
    options: dict[str, Any] = {"policy": 2, "do_sample": False, "eos_token_id": None, "max_new_tokens": 12}
    drafter = SelfDrafter(View(layers=skipping(exit=2)), resumes=True)

    def written(drafter: Any) -> Tensor:
        found: Any = polydraft.generate(target, ids, drafter=drafter, **options)
        return found.sequences

    plain = written("none")
    run = polydraft.stream(target, ids, drafter=drafter, **options)
    texts = [next(run)]
    with monkeypatch.context() as during:
        for looked in ("polydraft.models.derived.function_of", "polydraft.models.anatomy.weights_of"):
            during.setattr(looked, pytest.fail)
        during.setattr(HuggingFaceModel, "__init__", pytest.fail)
        texts += [*run]
    assert run.sequences(ids, 0).equal(plain) and len(texts) > 2 and run.statistics.drafted
    target.model.layers[2].mlp.up_proj.weight.data.mul_(-3)
    changed = written("none")
    assert written(drafter).equal(changed) and not changed.equal(plain)


@pytest.mark.parametrize("fused", [True, False])
def test_parts_are_of_the_weights_that_their_models_passes_multiply_by(fused: bool) -> None:
    module = tiny_model("llama", num_hidden_layers=3)
    before = HuggingFaceModel(module, fused=fused)
    parts = before.last_layers(2), before.variant("int8")
    assert before.variant("int8") is parts[1] and (before.last_layers(2) is parts[0]) == fused
    module.model.layers[2].mlp.up_proj.weight.data.mul_(-3)  # leaves place and version alone
    after = HuggingFaceModel(module, fused=fused)
    assert after.last_layers(2) is not parts[0] and after.variant("int8") is not parts[1]
    tokens = torch.tensor([[3, 1]])
    mask, start = torch.ones(1, 2, 2, dtype=torch.bool).tril_(), tokens[:, 0] * 0
    for model in (before, after):
        whole = model.forward(tokens, tokens, mask, model.new_cache(1, 2), start, hidden_layers=(2,))
        rest = model.last_layers(2)
        cut = rest.forward(tokens, tokens, mask, rest.new_cache(1, 2), start, embeddings=whole.hidden[2])
        assert cut.logits.allclose(whole.logits, atol=1e-5)
