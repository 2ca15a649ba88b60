"""A model becomes another function without its weights: whatever is remembered of it between calls notices."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from doubles import fused, tiny_model
from torch import Tensor, nn
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

import polydraft
from polydraft.errors import InvalidParameter, UnsupportedModel
from polydraft.models import CompiledModel, HuggingFaceModel, function_of, pack_linear_layers
from polydraft.models.anatomy import PackedLinear
from polydraft.models.derived import derived

VOCAB, NEW = 48, 8
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3]])
Undo = Callable[[], object]


class Adapter(nn.Module):
    """What PEFT puts in a layer's place: a small product beside it that can be switched off."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer, self.on, self.scaling, self.active = base, True, {"a": 3.0}, ["a"]
        self.low = nn.Linear(base.in_features, base.out_features, bias=False, dtype=base.weight.dtype)
        self.register_buffer("shift", torch.zeros(base.out_features, dtype=base.weight.dtype))

    def forward(self, x: Tensor) -> Tensor:
        added = self.scaling["a"] * self.low(x) if self.on and "a" in self.active else 0
        return self.base_layer(x) + added + self.get_buffer("shift")


def target() -> Any:
    """Return a model with an adapter in its first layer."""
    torch.manual_seed(2)
    model: Any = tiny_model("llama", VOCAB).double()
    layer = model.model.layers[0]
    layer.self_attn.v_proj = Adapter(layer.self_attn.v_proj)
    return model.eval()


def adapter(model: Any) -> Any:
    return model.model.layers[0].self_attn.v_proj


def double(_module: nn.Module, _inputs: object, output: Any) -> Any:
    return output * 2


@torch.no_grad()
def in_place(weight: Tensor) -> None:
    weight.data.mul_(1.5)  # leaves neither place nor version of the weight another


def replaced(model: Any) -> None:
    inner = model.model.layers[0].mlp
    own = inner.forward
    inner.forward = lambda x: 2 * own(x)


CHANGES: dict[str, Callable[[Any], object]] = {
    "an adapter is switched off": lambda model: setattr(adapter(model), "on", False),
    "its scale is another": lambda model: adapter(model).scaling.update(a=0.5),
    "another is active": lambda model: adapter(model).active.__setitem__(0, "b"),
    "a hook is added": lambda model: model.model.layers[0].mlp.register_forward_hook(double),
    "a hook is added before": lambda model: model.model.layers[0].mlp.register_forward_pre_hook(
        lambda _, given: (given[0] * 2,)
    ),
    "a buffer is changed": lambda model: adapter(model).shift.add_(1),
    "a buffer is another": lambda model: adapter(model).register_buffer("shift", adapter(model).shift + 1),
    "a weight is changed behind its version": lambda model: in_place(adapter(model).low.weight),
    "a forward is replaced": replaced,
    "a module is replaced": lambda model: setattr(model.model.layers[0].self_attn, "v_proj", adapter(model).base_layer),
    "an activation is another": lambda model: setattr(model.model.layers[0].mlp, "act_fn", nn.Tanh()),
    "a setting is another": lambda model: setattr(model.model.layers[0].input_layernorm, "variance_epsilon", 0.5),
    "the configuration is another": lambda model: setattr(model.config, "rms_norm_eps", 0.5),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_past_of_another_function_is_refused(change: str) -> None:
    model = target()
    first = polydraft.generate(model, IDS, max_new_tokens=NEW, do_sample=False, keep_past=True)
    options: dict[str, Any] = {"past": first.past, "max_new_tokens": NEW, "do_sample": False}
    polydraft.generate(model, first.sequences, **options)
    CHANGES[change](model)
    with pytest.raises(InvalidParameter, match=r"^past is of other (weights|layers, hooks or settings) than the model"):
        polydraft.generate(model, first.sequences, **options)


@pytest.mark.parametrize("change", CHANGES)
def test_drafts_made_of_a_model_are_made_anew(change: str) -> None:
    model = target()
    before = derived(model, "self:skip=1"), derived(model, "self:int8")
    assert derived(model, "self:int8") is before[1]
    CHANGES[change](model)
    if change == "a forward is replaced":
        with pytest.raises(UnsupportedModel, match="the forward of a part was replaced by a function"):
            derived(model, "self:int8")
        return
    assert derived(model, "self:skip=1") is not before[0] and derived(model, "self:int8") is not before[1]


def test_a_removed_hook_is_noticed_and_our_own_are_no_change() -> None:
    model = target()
    hook = model.model.layers[1].register_forward_hook(double)
    hooked = function_of(model)
    hook.remove()
    plain = function_of(model)
    assert hooked != plain
    door = HuggingFaceModel(model)
    seen: list[object] = []
    inner = model.model.layers[1].mlp.register_forward_hook(lambda *_: seen.append(function_of(model)))
    plain = function_of(model)
    mask, start = torch.ones(1, 10, 10, dtype=torch.bool).tril(), torch.zeros(1, dtype=torch.int64)
    door.forward(IDS, torch.arange(10)[None], mask, door.new_cache(1, 10), start, hidden_layers=(0, 1, 2, "final"))
    inner.remove()
    assert seen == [plain]


def test_a_class_that_is_patched_and_hooks_of_all_modules_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = target()
    plain = function_of(model)
    hook = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert function_of(model) != plain
    hook.remove()
    assert function_of(model) == plain
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: x)
    assert function_of(model) != plain


def test_passes_and_texts_change_no_function() -> None:
    model = target()
    polydraft.generate(model, IDS, max_new_tokens=3, do_sample=False, drafter="self:skip=1")
    model.generate(IDS, max_new_tokens=3, do_sample=False)
    before = function_of(model)
    model.generate(IDS, max_new_tokens=3, do_sample=False, generation_config=None)
    polydraft.generate(model.train(), IDS, max_new_tokens=3, temperature=0.7, drafter="self:int8", keep_past=True)
    assert function_of(model) == before


def test_joined_weights_are_joined_anew() -> None:
    model: Any = tiny_model("llama", VOCAB).eval()
    before = fused(model).fused
    assert fused(model).fused is before
    in_place(model.model.layers[0].mlp.up_proj.weight)
    assert fused(model).fused is not before
    model.model.layers[0].mlp.register_forward_hook(double)
    assert HuggingFaceModel(model).fused is None and "has a hook" in HuggingFaceModel(model).why_not_fused


@pytest.mark.parametrize("change", ["an adapter is switched off", "a hook is added", "a setting is another"])
def test_compiled_passes_are_compiled_anew(change: str) -> None:
    model = target()
    text = {"max_new_tokens": NEW, "do_sample": False}
    before = CompiledModel(model, backend="eager").passes
    assert CompiledModel(model, backend="eager").passes is before
    CHANGES[change](model)
    assert CompiledModel(model, backend="eager").passes is not before
    expected = model.generate(IDS, **text)
    assert torch.equal(polydraft.generate(model, IDS, **text).sequences, expected)


def test_a_model_is_tried_anew_when_it_is_another() -> None:
    model = target()
    HuggingFaceModel(model)

    def forward(_module: nn.Module, _inputs: object, output: Any) -> Any:
        return output.roll(-1, dims=1) * 9  # a token sees the next one

    hook = model.model.layers[0].mlp.register_forward_hook(forward)
    with pytest.raises(UnsupportedModel, match="lets tokens see later ones"):
        HuggingFaceModel(model)
    hook.remove()
    HuggingFaceModel(model)


def test_what_made_a_first_pass_fail_may_go() -> None:
    model = target()

    def fail(*_: object) -> None:
        raise RuntimeError("not now")

    hook = model.model.layers[0].register_forward_pre_hook(fail)
    with pytest.raises(UnsupportedModel, match="not now"):
        HuggingFaceModel(model)
    hook.remove()
    assert HuggingFaceModel(model).kept.layers == 2


@torch.no_grad()
def test_packed_weights_that_are_merged_behind_their_version_are_let_go() -> None:
    """PEFT merges an adapter by `weight.data += ...`."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny_model("llama", VOCAB).config.__class__(**SIZES)).eval()
    pack_linear_layers(model)
    packed = [one for one in model.modules() if isinstance(one, PackedLinear)]
    assert packed
    for one in packed:
        one.weight.data += torch.randn_like(one.weight) / 8
    plain = LlamaForCausalLM(model.config).eval()
    plain.load_state_dict(model.state_dict())
    text = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    expected = plain.generate(IDS, **text)
    assert torch.equal(polydraft.generate(model, IDS, **text).sequences, expected)


SIZES = {
    "vocab_size": 300,
    "hidden_size": 256,
    "intermediate_size": 300,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "eos_token_id": None,
    "initializer_range": 0.1,
}


def test_a_past_of_another_precision_is_refused() -> None:
    model: Any = tiny_model("llama", VOCAB).eval()
    first = polydraft.generate(model, IDS, max_new_tokens=NEW, do_sample=False, keep_past=True)
    again = functools.partial(
        polydraft.generate, model, first.sequences, past=first.past, max_new_tokens=2, do_sample=False
    )
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(InvalidParameter, match="past is of other layers"):
        again()
    again()
