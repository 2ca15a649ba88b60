"""Draft models made of the target: they share its weights, leave it as it was, and cost no exactness."""

import copy
import re
import threading
from pathlib import Path

import pytest
import torch
from doubles import tiny_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import polydraft
from polydraft.drafters import View
from polydraft.errors import InvalidParameter, PolydraftError, UnsupportedModel
from polydraft.models import HuggingFaceModel, draft_model
from polydraft.models.derived import check_word, derived, in_few_bits, without_layers
from polydraft.models.fused.few_bits import FewBits, Int4Linear, Int8Linear

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


def deep(layers: int = 5, inner: int = 48) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config).eval()


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    return model(IDS).logits


@pytest.mark.parametrize("rows", [1, 3, 31, 32, 33])
@pytest.mark.parametrize("width", [64, 48, 33, 24, 16, 7])
def test_a_product_of_eight_bits_is_that_of_the_rounded_weights(rows: int, width: int) -> None:
    """Also of odd widths, for which the kernel would read beyond a row's end."""
    torch.manual_seed(rows)
    biased = rows == 3
    plain = nn.Linear(width, 48, bias=biased)
    short = Int8Linear(plain)
    given = torch.randn(2, rows, width)
    exact = given @ short.weight.T + (plain.bias if biased else 0)
    with torch.no_grad():
        assert (short(given) - exact).abs().max() < 0.02 * exact.abs().max()
        assert (exact - plain(given)).abs().max() < 0.02 * exact.abs().max()
    assert short.numbers.dtype == torch.int8 and short.numbers.abs().max() <= 127


@pytest.mark.parametrize("rows", [1, 3, 64, 65])
@pytest.mark.parametrize("outputs", [48, 40, 7])
def test_a_product_of_four_bits_is_that_of_the_rounded_weights(rows: int, outputs: int) -> None:
    torch.manual_seed(rows)
    plain = nn.Linear(96, outputs, bias=rows == 3)
    short, given = Int4Linear(plain), torch.randn(rows, 96)
    with torch.no_grad():
        exact = given @ short.weight.T + (0 if plain.bias is None else plain.bias)
        assert (short(given) - exact).abs().max() < 0.02 * exact.abs().max()
    step = (plain.weight.view(outputs, 3, 32).amax(-1) - plain.weight.view(outputs, 3, 32).amin(-1)) / 15
    far = (short.weight - plain.weight).view(outputs, 3, 32).abs().amax(-1)
    assert (far <= 0.6 * step).all(), "half a step, and scales are rounded themselves"


def test_it_may_be_made_where_no_gradients_are_kept() -> None:
    model = deep()
    with torch.inference_mode():
        output = polydraft.generate(model, IDS, drafter=in_few_bits(model, "int8"), policy=3, max_new_tokens=6)
    assert output.statistics.new_tokens == 6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rounding_keeps_signs_in_every_precision(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = torch.randn(400, 64).to(dtype)
    found, scales = Int8Linear.shortened(weight)
    assert found.abs().max() == 127
    assert ((found * scales.unsqueeze(1) - weight.float()).abs() <= 0.5001 * scales.unsqueeze(1)).all()


def test_a_model_of_eight_bits_twice_is_the_same() -> None:
    short = in_few_bits(deep(), "int8")
    assert torch.equal(logits(in_few_bits(short, "int8")), logits(short))


def test_rows_of_zeros_stay_zeros() -> None:
    plain = nn.Linear(32, 4, bias=False)
    with torch.no_grad():
        plain.weight[1] = 0
        found = Int8Linear(plain)(torch.randn(3, 32))
    assert torch.equal(found[:, 1], torch.zeros(3)) and found.isfinite().all()


def test_a_model_of_eight_bits_is_close_and_leaves_the_model_alone() -> None:
    model = deep()
    before, state = logits(model), {name: one.clone() for name, one in model.state_dict().items()}
    short = in_few_bits(model, "int8")
    assert 0 < (logits(short) - before).abs().max() < 0.1 * before.abs().max()
    assert torch.equal(logits(model), before)
    assert all(torch.equal(one, state[name]) for name, one in model.state_dict().items())
    assert not any(isinstance(one, Int8Linear) for one in model.modules())
    assert short.get_input_embeddings().weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()


@pytest.mark.fuses
@pytest.mark.parametrize("word", ["int8", "int4"])
def test_the_fused_pass_of_few_bits_is_the_models_own(word: str) -> None:
    short = in_few_bits(deep(inner=64), word)
    fused = draft_model(short)
    assert fused.fused is not None
    places = torch.arange(8).unsqueeze(0)
    mask = torch.ones(1, 8, 8, dtype=torch.bool).tril()
    found = fused.forward(IDS, places, mask, fused.new_cache(1, 8), torch.zeros(1, dtype=torch.int64)).logits
    assert (found - logits(short)).abs().max() < 0.05 * found.abs().max()


@pytest.mark.parametrize("skipped", [[0], [4], [1, 2], [0, 1, 2, 3]])
def test_a_model_without_layers_is_the_model_that_never_had_them(skipped: list[int]) -> None:
    model = deep()
    before = logits(model)
    smaller = without_layers(model, skipped)
    other = deep(5 - len(skipped))
    kept = [number for number in range(5) if number not in skipped]
    state = {
        re.sub(r"layers\.(\d+)", lambda found: f"layers.{kept.index(int(found[1]))}", name): one
        for name, one in model.state_dict().items()
        if not (found := re.search(r"layers\.(\d+)", name)) or int(found[1]) in kept
    }
    other.load_state_dict(state)
    assert torch.equal(logits(smaller), logits(other)) and torch.equal(logits(model), before)
    assert smaller.config.num_hidden_layers == len(kept) and model.config.num_hidden_layers == 5
    assert [one.self_attn.layer_idx for one in model.model.layers] == list(range(5))
    ours = {one.data_ptr() for one in smaller.parameters()}
    assert ours <= {one.data_ptr() for one in model.parameters()}


@pytest.mark.long(6)
@pytest.mark.parametrize("word", ["self:int8", "self:skip=2", "self:skip=1-3", "self:int8,skip=0,skip=2-3"])
@pytest.mark.parametrize("kind", ["llama", "gpt_neox", "qwen2"])
def test_greedy_text_is_the_targets(word: str, kind: str) -> None:
    model = deep() if kind == "llama" else tiny_model(kind, 96, dtype=torch.float32)
    if kind != "llama" and "skip" in word:
        word = re.sub(r"skip=[-\d]+(,skip=[-\d]+)?", "skip=1", word)
    draft = derived(model, word)
    plain = polydraft.generate(model, IDS, drafter="none", max_new_tokens=24)
    for policy in (4, "3,2,1"):
        drafted = polydraft.generate(model, IDS, drafter=draft, policy=policy, max_new_tokens=24)
        assert torch.equal(plain.sequences, drafted.sequences)
        assert drafted.statistics.drafted > 0


def test_a_model_without_linear_layers_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="GPT2LMHeadModel has no linear layers of torch's"):
        in_few_bits(tiny_model("gpt2", 96), "int8")
    draft = without_layers(tiny_model("gpt2", 96, dtype=torch.float32), [0])
    assert draft.config.num_hidden_layers == 1 and logits(draft).isfinite().all()


def test_a_model_that_is_named_twice_is_made_once_for_the_same_weights() -> None:
    model = deep()
    first = derived(model, "self:int8")
    assert derived(model, "self:int8") is first and derived(model, "self:skip=1") is not first
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(2)
    second = derived(model, "self:int8")
    assert second is not first and second is derived(model, "self:int8")
    plain = polydraft.generate(model, IDS, drafter="self:int8", policy=2, max_new_tokens=6, keep_past=True)
    longer = torch.cat([plain.sequences, torch.tensor([[7]])], dim=1)
    after = polydraft.generate(model, longer, drafter="self:int8", policy=2, max_new_tokens=6, past=plain.past)
    assert after.statistics.prompt_known > IDS.shape[1]


def test_a_model_with_something_on_it_that_cannot_be_copied_is_refused() -> None:
    model = deep()
    model.model.held = threading.Lock()
    with pytest.raises(UnsupportedModel, match=r"cannot be copied: TypeError: cannot pickle"):
        in_few_bits(model, "int8")


@pytest.mark.parametrize("word", ["int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_drafts_do_not_change_the_greedy_text_of_a_target_of_few_bits(word: str, dtype: torch.dtype) -> None:
    target = in_few_bits(deep(inner=64).to(dtype), word)
    plain = polydraft.generate(target, IDS, drafter="none", max_new_tokens=24)
    drafted = polydraft.generate(target, IDS, drafter=deep(inner=64).to(dtype), policy="2,1,1", max_new_tokens=24)
    assert torch.equal(plain.sequences, drafted.sequences)
    own = target.generate(IDS, do_sample=False, max_new_tokens=24)
    assert torch.equal(plain.sequences, own)


def test_a_copy_of_few_bits_computes_the_same_and_shares_nothing_made() -> None:
    short = in_few_bits(deep(inner=64), "int4")
    found, again = logits(short), copy.deepcopy(short)
    assert torch.equal(logits(again), found)
    with torch.no_grad():
        again.model.layers[0].mlp.up_proj.scales.zero_()
    assert torch.equal(logits(short), found)


@pytest.mark.parametrize(
    ("word", "change", "said"),
    [
        ("int4", {}, "Rows of model.layers.0.mlp.down_proj have 48 weights, and int4 takes 32 at a time; take int8"),
        ("int8", {"quantization_config": {}}, "quantised already, so they cannot become int8"),
    ],
)
def test_what_cannot_have_few_bits_is_refused_by_name(word: str, change: dict[str, object], said: str) -> None:
    model = deep()
    for name, value in change.items():
        setattr(model.config, name, value)
    with pytest.raises(UnsupportedModel, match=said):
        in_few_bits(model, word)


@pytest.mark.fuses
@pytest.mark.parametrize("word", ["int8", "int4"])
def test_a_pair_is_loaded_with_weights_of_few_bits(word: str) -> None:
    pair = polydraft.load_pair(weights=word)
    assert any(isinstance(one, FewBits) for one in pair.target.modules())
    assert not any(isinstance(one, FewBits) for one in pair.draft.modules())
    assert HuggingFaceModel(pair.target).fused is not None
    plain = polydraft.generate(pair.target, IDS, drafter="none", max_new_tokens=16)
    drafted = polydraft.generate(pair.target, IDS, drafter=pair.draft, max_new_tokens=16)
    assert torch.equal(plain.sequences, drafted.sequences) and drafted.statistics.accepted > 0


@pytest.mark.parametrize("kind", [Int8Linear, Int4Linear])
def test_what_is_put_into_a_layer_of_few_bits_counts_from_then_on(kind: type[FewBits]) -> None:
    torch.manual_seed(0)
    one, other = kind(nn.Linear(64, 48)), kind(nn.Linear(64, 48))
    given = torch.randn(3, 64)
    with torch.no_grad():
        assert not torch.equal(one(given), other(given))
        one.load_state_dict(other.state_dict())
        assert torch.equal(one(given), other(given))
        one.bias = nn.Parameter(torch.ones(48))
        other.bias.fill_(1.0)
        assert torch.equal(one(given), other(given))
        one.scales.zero_()
        assert torch.equal(one(given), torch.ones(3, 48))


@pytest.mark.parametrize("word", ["int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.bfloat16])
def test_a_model_of_few_bits_may_change_its_precision(word: str, dtype: torch.dtype) -> None:
    short = in_few_bits(deep(inner=64), word)
    wanted = logits(short)
    changed = short.to(dtype)
    found = logits(changed)
    assert found.dtype == dtype and (found - wanted).abs().max() < 0.05 * wanted.abs().max()
    assert all(one.weight.dtype == dtype for one in changed.modules() if isinstance(one, FewBits))


@pytest.mark.parametrize("word", ["int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rows_product_does_not_depend_on_how_many_there_are(word: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    short = (Int8Linear if word == "int8" else Int4Linear)(nn.Linear(576, 64).to(dtype))
    given = torch.randn(200, 576, dtype=dtype)
    with torch.no_grad():
        whole, few = short(given), torch.cat([short(one) for one in given.split(50)])
    unit = torch.finfo(torch.bfloat16).eps * few.abs().max()
    assert (whole - few).abs().max() <= unit
    assert ((whole - few).abs() > 0).float().mean() < 0.05


def test_a_model_of_few_bits_is_not_saved_as_something_else(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="rounded to int4 are not saved; save the model that they were made of"):
        in_few_bits(deep(inner=64), "int4").save_pretrained(tmp_path)


def test_weights_of_unknown_bits_and_other_devices_are_refused() -> None:
    with pytest.raises(InvalidParameter, match="weights must be None, 'int8' or 'int4', but is 'int3'"):
        polydraft.load_pair(weights="int3")
    with pytest.raises(UnsupportedModel, match="made for CPUs, but the model is on meta"):
        in_few_bits(deep().to("meta"), "int8")


def test_words_say_what_they_mean() -> None:
    assert check_word("self:int8") == ("int8", frozenset())
    assert check_word("self:skip=12-14,skip=3") == ("", frozenset({3, 12, 13, 14}))
    for word in (
        "self:",
        "self:int2",
        "self:int8,int4",
        "self:skip=",
        "self:skip=a",
        "self:int8,",
        "self:skip=1-2-3",
        "self:skip=99999",
        "self:skip=3-2",
    ):
        with pytest.raises(
            InvalidParameter, match=r"one made of the target is self:int8|There is no file|begins with its"
        ):
            check_word(word)
    for word in ("self:exit=2", "self:skip-mlp=2", "self:int8,keys=recent"):
        with pytest.raises(InvalidParameter, match="a model of its own is needed here"):
            check_word(word)


@pytest.mark.parametrize("word", ["self:skip=5", "self:skip=0-4"])
def test_layers_that_are_not_there_are_one_sentence(word: str) -> None:
    with pytest.raises(PolydraftError) as caught:
        derived(deep(), word)
    assert "\n" not in str(caught.value)


def test_load_knows_the_words(tmp_path: object) -> None:
    pair = polydraft.load_pair()
    folder = pair.target.name_or_path
    both = polydraft.load(folder, "self:int8")
    assert both.draft.view == View("int8"), "the target drafts for itself, without a model of its own"
    output = polydraft.generate(both.target, torch.tensor([[5, 6, 7]]), drafter="self:skip=0", max_new_tokens=8)
    assert output.statistics.new_tokens == 8
    with pytest.raises(InvalidParameter, match="'self:fp8' is not known"):
        polydraft.load(folder, "self:fp8")
