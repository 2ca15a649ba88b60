"""Models with something around them: adapters, compilers, data parallelism, offloading. The text is the model's own."""

import copy
import functools
import types
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from doubles import tiny_model
from torch import Tensor, nn
from transformers import GenerationConfig, LlamaForCausalLM

import polydraft
from polydraft.errors import CheckpointError, InvalidParameter, UnsupportedModel
from polydraft.models import CompiledModel, HuggingFaceModel, draft_model
from polydraft.models.checks.supported import unwrapped
from polydraft.models.derived import derived

VOCAB, NEW = 48, 8
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 8]])
TEXT: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}


def plain() -> Any:
    torch.manual_seed(2)
    return tiny_model("llama", VOCAB).double().eval()


class Adapted(nn.Module):
    """PEFT's layer: it looks at the precision of the matrices that it multiplies by."""

    def __init__(self, base: nn.Linear, rank: int = 3) -> None:
        super().__init__()
        self.base_layer, self.disabled = base, False
        self.low = nn.Linear(base.in_features, rank, bias=False, dtype=base.weight.dtype)
        self.high = nn.Linear(rank, base.out_features, bias=False, dtype=base.weight.dtype)

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    def forward(self, x: Tensor) -> Tensor:
        out = self.base_layer(x)
        return out if self.disabled else out + 8 * self.high(self.low(x.to(self.low.weight.dtype)))


class PeftModelForCausalLM(nn.Module):
    """A model around another one, with the signatures of PEFT's class of that name."""

    def __init__(self, base: Any, **config: Any) -> None:
        super().__init__()
        self.base_model, self.config, self.device = base, base.config, base.device
        self.peft_config = {"default": types.SimpleNamespace(**{"peft_type": "LORA", **config})}

    def forward(self, input_ids: Any = None, attention_mask: Any = None, **kwargs: Any) -> Any:
        return self.base_model(input_ids=input_ids, attention_mask=attention_mask, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_model.generate(*args, **kwargs)

    def get_base_model(self) -> Any:
        return self.base_model


def adapted(**config: Any) -> Any:
    model = plain()
    for layer in model.model.layers:
        layer.self_attn.v_proj = Adapted(layer.self_attn.v_proj)
        layer.mlp.down_proj = Adapted(layer.mlp.down_proj)
    return PeftModelForCausalLM(model.eval(), **config)


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "torch.compile": lambda model: torch.compile(model, backend="eager"),
    "DataParallel": nn.DataParallel,
    "DistributedDataParallel": nn.parallel.DistributedDataParallel,
    "both": lambda model: torch.compile(nn.parallel.DistributedDataParallel(model), backend="eager"),
    "PEFT": PeftModelForCausalLM,
    "PEFT within": lambda model: nn.DataParallel(PeftModelForCausalLM(model)),
}


@pytest.mark.long(15)
@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.parametrize("drafter", [None, "none", "self:int8", "self:skip=1", "itself"])
def test_the_text_is_that_of_the_model_inside(name: str, drafter: str | None) -> None:
    model = plain()
    expected, wrapped = model.generate(IDS, **TEXT), WRAPPERS[name](model)
    given: Any = wrapped if drafter == "itself" else drafter
    assert torch.equal(polydraft.generate(wrapped, IDS, drafter=given, policy=3, **TEXT).sequences, expected)
    if drafter is None:
        many = polydraft.generate_many(wrapped, IDS.tolist(), **TEXT)
        assert {one.name: one.tokens for one in many} == dict(enumerate(expected[:, IDS.shape[1] :].tolist()))


@pytest.mark.parametrize("disabled", [False, True])
def test_drafts_made_of_a_model_with_adapters_have_the_adapters(disabled: bool) -> None:
    model = adapted()
    off = model.generate(IDS, **TEXT)
    for one in model.modules():
        if isinstance(one, Adapted):
            one.disabled = disabled
    expected = model.generate(IDS, **TEXT)
    output = polydraft.generate(model, IDS, drafter="self:int8", policy=3, **TEXT)
    assert torch.equal(output.sequences, expected) and output.statistics.acceptance_rate > 0.7
    with torch.no_grad():
        near, own = derived(model.base_model, "self:int8")(IDS).logits, model(IDS).logits
    assert (near - own).abs().max() < 0.2 * own.abs().max()
    assert torch.equal(off, expected) is not disabled


def test_an_adapter_that_reads_the_matrix_reads_the_one_that_eight_bits_stand_for() -> None:
    model = plain()
    short: Any = derived(model, "self:int8")
    for mine, own in zip(short.modules(), model.modules(), strict=True):
        if isinstance(own, nn.Linear):
            assert mine.weight.dtype == own.weight.dtype
            assert (mine.weight - own.weight).abs().max() <= own.weight.abs().max() / 250


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"peft_type": "PeftType.PROMPT_TUNING", "is_prompt_learning": True}, "adapter of type PROMPT_TUNING"),
        ({"peft_type": "XLORA"}, "adapter of type XLORA, which is not in the layers alone; call its own generate"),
        ({"alora_invocation_tokens": [3]}, "has an activated LoRA .* call its own generate, or take a plain LoRA"),
    ],
)
def test_adapters_outside_of_the_layers_are_refused(config: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedModel, match=said):
        polydraft.generate(adapted(**config), IDS, **TEXT)


def test_an_adapter_for_each_row_is_refused_by_name() -> None:
    model = adapted()
    with pytest.raises(InvalidParameter, match=r"adapter_names=.* is refused: .* by set_adapter and make a call for"):
        polydraft.generate(model, IDS, adapter_names=["default", "__base__"], **TEXT)

    class Chosen:
        """The hook that PEFT's generate puts on its layers meanwhile."""

        keywords = types.MappingProxyType({"adapter_names": ["default", "__base__"]})

        def __call__(self, *_: Any) -> None:
            return None

    model.base_model.model.layers[0].self_attn.v_proj.register_forward_pre_hook(Chosen())
    with pytest.raises(InvalidParameter, match="adapter_names gives each row an adapter of its own"):
        model.generate(IDS, custom_generate=polydraft.generate, **TEXT)


def test_settings_of_a_wrapper_alone_are_refused() -> None:
    model = adapted()
    model.generation_config = GenerationConfig(max_new_tokens=3, do_sample=True)
    with pytest.raises(InvalidParameter, match="has a generation_config of its own"):
        polydraft.generate(model, IDS, **TEXT)
    model.generation_config = copy.deepcopy(model.base_model.generation_config)
    assert unwrapped(model) is model.base_model


class Holding(nn.Module):
    """A wrapper that nobody knows, such as those with a head for values."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.pretrained_model, self.config, self.device = model, model.config, model.device

    def forward(self, **given: Any) -> Any:
        return self.pretrained_model(**given)

    def generate(self, *given: Any, **options: Any) -> Any:
        return self.pretrained_model.generate(*given, **options)


def test_a_wrapper_that_is_not_known_is_refused_with_what_it_holds() -> None:
    said = (
        "Holding is a wrapper around LlamaForCausalLM; pass the model that it holds, its attribute `pretrained_model`"
    )
    with pytest.raises(UnsupportedModel, match=said):
        polydraft.generate(Holding(plain()), IDS, **TEXT)


def test_weights_in_pieces_are_refused() -> None:
    kind = type("FullyShardedDataParallel", (Holding,), {"__module__": "torch.distributed.fsdp"})
    wrapped = kind(plain())
    wrapped.module = wrapped.pretrained_model
    with pytest.raises(UnsupportedModel, match=r"within FullyShardedDataParallel.summon_full_params\(model\) pass"):
        polydraft.generate(wrapped, IDS, **TEXT)


@pytest.mark.parametrize("part", ["whole", "body"])
def test_a_forward_that_was_replaced_runs_but_makes_no_drafts(part: str) -> None:
    """As by `model.forward = torch.compile(model.forward)`."""
    model = plain()
    expected = model.generate(IDS, **TEXT)
    held = model if part == "whole" else model.model
    own = held.forward
    held.forward = functools.wraps(own)(lambda *given, **named: own(*given, **named))
    assert torch.equal(polydraft.generate(model, IDS, **TEXT).sequences, expected)
    with pytest.raises(UnsupportedModel, match=r"as torch.compile\(model.forward\) does; take another drafter"):
        polydraft.generate(model, IDS, drafter="self:skip=1", **TEXT)


def on_disk(model: Any, folder: Path) -> None:
    disk_offload(model, str(folder), execution_device=torch.device("cpu"))


def in_parts(model: Any, folder: Path, first: str = "cpu", last: str = "disk") -> None:
    names = "model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "lm_head"
    places = dict(zip(names, (first, "cpu", "disk", "cpu", last), strict=True))
    dispatch_model(model, {**places, "model.rotary_emb": "cpu"}, main_device="cpu", offload_dir=str(folder))


OFFLOADED: dict[str, Callable[[Any, Path], object]] = {
    "memory": lambda model, _: cpu_offload(model, execution_device=torch.device("cpu")),
    "disk": on_disk,
    "the last parts": in_parts,
    "the first parts": lambda model, folder: in_parts(model, folder, "disk", "cpu"),
}


@pytest.mark.long(2)
@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.parametrize("way", OFFLOADED)
def test_weights_that_are_offloaded_are_brought_for_passes(way: str, tmp_path: Path) -> None:
    model = plain()
    expected = model.generate(IDS, **TEXT)
    OFFLOADED[way](model, tmp_path)
    assert HuggingFaceModel(model).device == torch.device("cpu")
    for drafter in (None, "self:skip=1", plain(), model):
        found = polydraft.generate(model, IDS, drafter=drafter, policy=3, **TEXT)
        assert torch.equal(found.sequences, expected)
    first = polydraft.generate(model, IDS[:1], keep_past=True, **{**TEXT, "max_new_tokens": 3})
    more = polydraft.generate(model, first.sequences, past=first.past, **{**TEXT, "max_new_tokens": NEW - 3})
    assert torch.equal(more.sequences, expected[:1])
    with pytest.raises(UnsupportedModel, match="LlamaForCausalLM are offloaded, so none of eight bits can be made"):
        polydraft.generate(model, IDS, drafter="self:int8", **TEXT)
    with pytest.raises(InvalidParameter, match="offloaded, so its passes are not compiled; leave compile out"):
        CompiledModel(model)
    if way != "the first parts":
        with pytest.raises(UnsupportedModel, match="output head of LlamaForCausalLM is offloaded"):
            HuggingFaceModel(model).output_rows(torch.tensor([1, 2]))


def test_a_model_without_weights_is_refused_still() -> None:
    with torch.device("meta"):
        empty = LlamaForCausalLM(plain().config)
    with pytest.raises(UnsupportedModel, match="is on the meta device, which holds no weights"):
        HuggingFaceModel(empty)


def test_a_folder_of_an_adapter_is_refused_with_what_to_do(tmp_path: Path) -> None:
    plain().save_pretrained(tmp_path)  # transformers would load another base from there if peft is installed
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "elsewhere"}')
    said = r"holds an adapter \(adapter_config.json\) .*AutoPeftModelForCausalLM and pass that model, or save what its"
    for load in (polydraft.load, lambda name: polydraft.generate(plain(), IDS, drafter=name, **TEXT)):
        with pytest.raises(CheckpointError, match=said):
            load(str(tmp_path))


@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.parametrize("state", ["on", "off", "another", "both", "merged", "unloaded", "compiled", "DoRA", "mixed"])
def test_models_of_peft_itself(state: str) -> None:
    peft = pytest.importorskip("peft")

    def with_noise(model: Any) -> Any:
        torch.manual_seed(9)
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, std=0.4)
        return model.eval()

    def lora(*parts: str, **options: Any) -> Any:
        return peft.LoraConfig(r=3, target_modules=[*parts], task_type="CAUSAL_LM", **options)

    options = {"use_dora": True} if state == "DoRA" else {}
    made = peft.get_peft_model(plain(), lora("q_proj", "v_proj", **options), mixed=state == "mixed")
    model = with_noise(made)
    if state in ("another", "both"):
        model.add_adapter("second", lora("v_proj", "down_proj"))
        with_noise(model).base_model.set_adapter(["default", "second"] if state == "both" else "second")
    if state == "merged":
        model.merge_adapter()
    own = model.merge_and_unload() if state == "unloaded" else model.base_model.model
    given = {"unloaded": own, "compiled": torch.compile(model, backend="eager")}.get(state, model)
    with model.disable_adapter() if state == "off" else nullcontext():
        expected = own.generate(IDS, **TEXT)
        for drafter in ("self:int8", "self:skip=1", "ngram"):
            output = polydraft.generate(given, IDS, drafter=drafter, policy=3, **TEXT)
            assert torch.equal(output.sequences, expected)
            assert drafter != "self:int8" or output.statistics.acceptance_rate > 0.7
    assert draft_model(given).model is own


@pytest.mark.filterwarnings("ignore:.*")
def test_a_past_with_adapters_of_peft_is_refused_without_them() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(plain(), peft.LoraConfig(r=3, target_modules=["v_proj"], task_type="CAUSAL_LM")).eval()
    first = polydraft.generate(model, IDS[:1], keep_past=True, **TEXT)
    again = functools.partial(polydraft.generate, model, first.sequences, past=first.past, **TEXT)
    again()
    with model.disable_adapter(), pytest.raises(InvalidParameter, match="past is of other layers"):
        again()
    again()
    model.merge_adapter()
    with pytest.raises(InvalidParameter, match="past is of other layers"):
        again()


@pytest.mark.filterwarnings("ignore:.*")
def test_adapters_of_peft_that_are_elsewhere_are_refused() -> None:
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(UnsupportedModel, match="adapter of type PROMPT_TUNING"):
        polydraft.generate(peft.get_peft_model(plain(), config), IDS, **TEXT)
