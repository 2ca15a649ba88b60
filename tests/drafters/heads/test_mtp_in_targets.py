"""MTP modules inside a target's checkpoint: beside transformers' own, by family, by their word, and damaged."""

import copy
import json
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles import tiny_model, tiny_tokenizer
from safetensors.torch import load_file, save_file
from test_block_heads import text_of
from test_mtp import along, begun
from torch import Tensor, nn
from transformers import (
    BailingHybridConfig,
    BailingHybridForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)
from transformers.modeling_layers import MtpModel

import polydraft
from polydraft.drafters import has_modules, load_modules
from polydraft.drafters.heads.formats.mtp_folders import STATES
from polydraft.drafters.heads.mtp_head import MtpHead
from polydraft.errors import CheckpointError
from polydraft.models import HuggingFaceModel
from polydraft.models.anatomy import observed_layers
from polydraft.trees import Chain

LAYERS, WIDTH, ROWS, PATH = 2, 16, [[3, 1, 4, 1, 5], [9, 2, 6]], [7, 2, 11]
SIZES: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": 24,
    "moe_intermediate_size": 8,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.4,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
MIXED: dict[str, Any] = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 6}
LINEAR = {f"linear_{kind}_head_dim": 4 for kind in ("key", "value")} | {
    f"linear_num_{kind}_heads": 2 for kind in ("key", "value")
}


@dataclass(frozen=True)
class Kind:
    """A family: its configuration and model, what its tensors are called, and what is peculiar to it.

    Args:
        published: what its checkpoints call tensors of a layer otherwise than its class does, in this order.
        chain: kinds of the layers of a module, where it has several, without positions.
    """

    config: type
    model: type
    settings: Mapping[str, Any]
    block: str
    names: Mapping[str, str]
    modules: int = 1
    hidden_first: bool = False
    published: tuple[tuple[str, str], ...] = ()
    chain: tuple[str, ...] = ()


def numbered(at: int) -> dict[str, str]:
    block = f"model.layers.{at}"
    return {**{part: f"{block}.{part}" for part in ("enorm", "hnorm", "eh_proj")}, "norm": f"{block}.shared_head.norm"}


LIKE_DEEPSEEK = ("model.layers.{at}", {part: name.replace("7", "{at}") for part, name in numbered(7).items()})
QWEN = {
    "enorm": "mtp.pre_fc_norm_embedding",
    "hnorm": "mtp.pre_fc_norm_hidden",
    "eh_proj": "mtp.fc",
    "norm": "mtp.norm",
}
KINDS = {
    "deepseek": Kind(
        DeepseekV3Config,
        DeepseekV3ForCausalLM,
        {**MIXED, **LATENT, "num_key_value_heads": 4, "first_k_dense_replace": 1, "num_nextn_predict_layers": 2},
        *LIKE_DEEPSEEK,
        modules=2,
    ),
    "glm": Kind(Glm4MoeConfig, Glm4MoeForCausalLM, {**MIXED, "first_k_dense_replace": 1}, *LIKE_DEEPSEEK),
    "bailing": Kind(
        BailingHybridConfig,
        BailingHybridForCausalLM,
        {**MIXED, **LATENT, "num_local_experts": 4, "num_key_value_heads": 4, "first_k_dense_replace": 1}
        | {"layer_types": ["linear_attention", "full_attention"], "num_mtp_layers": 1},
        *LIKE_DEEPSEEK,
        published=(
            (".self_attn.o_proj.", ".self_attn.dense."),
            (".self_attn.", ".attention."),
            (".e_score_correction_bias", ".expert_bias"),
        ),
    ),
    "qwen": Kind(
        Qwen3NextConfig,
        Qwen3NextForCausalLM,
        {**LINEAR, "num_experts": 4, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 8}
        | {"layer_types": ["linear_attention", "full_attention"]},
        "mtp.layers.{at}",
        QWEN,
    ),
    "qwen 3.5": Kind(
        Qwen3_5TextConfig,
        Qwen3_5ForCausalLM,
        {**LINEAR, "layer_types": ["linear_attention", "full_attention"], "mtp_num_hidden_layers": 1},
        "mtp.layers.{at}",
        QWEN,
    ),
    "mimo": Kind(
        Qwen2Config,
        Qwen2ForCausalLM,
        {"num_nextn_predict_layers": 1},
        "model.mtp_layers.{at}",
        {
            "enorm": "model.mtp_layers.{at}.token_layernorm",
            "hnorm": "model.mtp_layers.{at}.hidden_layernorm",
            "eh_proj": "model.mtp_layers.{at}.input_proj",
            "norm": "model.mtp_layers.{at}.final_layernorm",
        },
        hidden_first=True,
    ),
}
CHAIN = "full_attention", "moe"
KINDS |= {
    f"nemotron {modules}": Kind(
        NemotronHConfig,
        NemotronHForCausalLM,
        {**MIXED, "moe_shared_expert_intermediate_size": 8, "num_nextn_predict_layers": modules}
        | {"mamba_num_heads": 8, "mamba_head_dim": 4, "n_groups": 2, "ssm_state_size": 8, "chunk_size": 8}
        | {"layers_block_type": ["linear_attention", "full_attention"], "mtp_layers_block_type": [*CHAIN], **sizes},
        "mtp.layers.{at}",
        {part: f"mtp.layers.{{at}}.{part}" for part in ("enorm", "hnorm", "eh_proj")}
        | {"norm": "mtp.layers.{end}.final_layernorm"},
        modules=modules,
        chain=CHAIN,
    )
    for modules, sizes in ((1, {}), (2, {"moe_latent_size": 8}))
}
RECURRENT = ("bailing", "qwen", "nemotron")


class Reference(nn.Module):
    """A module as it is written down: transformers' own classes, over whole texts and without a cache."""

    def __init__(self, model: Any, own: Kind) -> None:
        super().__init__()
        config, like = model.config, model.model.layers[-1]
        self.eh_proj, self.hidden_first = nn.Linear(2 * WIDTH, WIDTH, bias=False), own.hidden_first
        if own.chain:
            config = copy.deepcopy(config)
            config.layers_block_type = [*own.chain]
            norm, eps, self.rotary = type(like.norm), config.layer_norm_epsilon, (None,)
            self.layer = nn.ModuleList(type(like)(config, place) for place in range(len(own.chain)))
        else:
            norm, eps, self.rotary = type(like.input_layernorm), config.rms_norm_eps, (model.model.rotary_emb,)
            self.layer = nn.ModuleList([type(like)(config, LAYERS - 1)])
        self.enorm, self.hnorm, self.norm = (norm(WIDTH, eps=eps) for _ in range(3))
        with torch.no_grad():
            for value in self.state_dict().values():
                value.copy_(0.4 * torch.randn(value.shape))

    def forward(self, embedded: Tensor, hidden: Tensor, gives: str = "normed") -> Tensor:
        pairs, count = [self.enorm(embedded), self.hnorm(hidden)], embedded.shape[1]
        x = self.eh_proj(torch.cat(pairs[::-1] if self.hidden_first else pairs, -1))
        mask = torch.full((count, count), torch.finfo(x.dtype).min).triu(1)[None, None]
        turned = {} if self.rotary[0] is None else {"position_embeddings": self.rotary[0](x, torch.arange(count)[None])}
        for layer in self.layer:
            made = layer(x, attention_mask=mask, position_ids=torch.arange(count)[None], **turned)
            x = made if isinstance(made, Tensor) else made[0]
        return self.norm(x) if gives == "normed" else x


def single_experts(name: str, value: Tensor) -> dict[str, Tensor]:
    """Return a tensor as checkpoints hold it: experts one by one."""
    if ".experts." not in name or value.dim() < 3:
        return {name: value}
    where, _, held = name.rpartition(".")
    parts = ("gate_proj", "up_proj") if held == "gate_up_proj" else (held,)
    return {
        f"{where}.{number}.{part}.weight": own
        for number, each in enumerate(value)
        for part, own in zip(parts, each.chunk(len(parts)), strict=True)
    }


@cache
def made(kind: str, place: Path) -> tuple[Any, list[Reference], Path]:
    """Return a target, its modules by transformers' classes, and the folder of both."""
    own = KINDS[kind]
    torch.manual_seed(4)
    model: Any = own.model(own.config(vocab_size=len(tiny_tokenizer()), **{**SIZES, **own.settings})).eval()
    if own.chain:  # Nemotron-H's time steps: a lower bound would hold where several tokens are read, and not for one
        model.config.time_step_min = 0.0
    modules = [Reference(model, own) for _ in range(own.modules)]
    folder = place / kind
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for number, one in enumerate(modules):
        behind, length = "model.layers.{at}.enorm" in own.names["enorm"], len(own.chain or "1")
        at = number * length + (LAYERS if behind else 0)
        for name, value in one.state_dict().items():
            part, _, rest = name.partition(".")
            called = own.names.get(part, own.block)
            if part == "layer":
                place, _, rest = rest.partition(".")
                called = own.block.replace("{at}", str(at + int(place)))
            for ours, theirs in own.published:
                rest = f".{rest}".replace(ours, theirs)[1:]
            called = called.replace("{at}", str(at)).replace("{end}", str(at + length - 1))
            tensors |= single_experts(f"{called}.{rest}", value)
    save_file({name: value.contiguous().clone() for name, value in tensors.items()}, folder / "model.safetensors")
    model = own.model.from_pretrained(folder, dtype=torch.float32).eval()
    return model, [one.eval() for one in modules], folder


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("targets")


@pytest.fixture
def copied(request: pytest.FixtureRequest, place: Path, tmp_path: Path) -> Path:
    """Return a copy of a family's folder, to be damaged."""
    kind = getattr(request, "param", "deepseek")
    return Path(shutil.copytree(made(kind, place)[2], tmp_path / kind))


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "rows"),
    [(kind, rows) for kind in KINDS for rows in ([[row] for row in ROWS] if kind.startswith(RECURRENT) else [ROWS])],
)
def test_the_rows_are_those_of_the_targets_own_classes(kind: str, rows: list[list[int]], place: Path) -> None:
    """Some targets have recurrent layers, whose states know no padding, so their texts are read one by one."""
    model, modules, _ = made(kind, place)
    drafter, text = load_modules(model, torch.float32), text_of(rows)
    state, _ = begun(HuggingFaceModel(model), drafter, text)
    depths = min(len(modules), len(PATH)) if len(modules) > 1 else len(PATH) + 1
    found = along(drafter, state, text, PATH)
    for row, tokens in enumerate(rows):
        whole = torch.tensor([tokens + PATH])
        embedded = model.get_input_embeddings()(whole)
        states = model.model(torch.tensor([tokens[:-1]])).last_hidden_state
        count = states.shape[1]
        for depth in range(depths):
            if len(modules) > 1:  # each reads the token one place further on, at the same places
                states = modules[depth](embedded[:, 1 + depth : 1 + depth + count], states)
            else:  # what was made of the last pair goes on
                again = modules[0](embedded[:, 1 : 1 + count + depth], states)
                states = torch.cat([states, again[:, -1:]], 1)
            wanted = model.lm_head(states[:, -1])
            torch.testing.assert_close(found[depth][row : row + 1], wanted, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("told", ["argument", "config.json"])
@pytest.mark.parametrize("recycle", ["normed", "raw"])
@pytest.mark.parametrize("reads", ["normed", "raw"])
@pytest.mark.parametrize("copied", ["deepseek", "glm"], indirect=True)
def test_which_states_go_on_can_be_told(reads: str, recycle: str, told: str, copied: Path, place: Path) -> None:
    """Each of the four ways has rows of its own, by the target's classes; of two modules and of one that goes on.

    A norm whose weights are equal would change nothing before another norm, so the target's final one gets others.
    """
    uneven = {"model.norm.weight": torch.linspace(0.2, 2, WIDTH)}
    config = {"mtp_reads": reads, "mtp_recycle": recycle} if told == "config.json" else {}
    model, modules = altered(copied, lambda own: own | uneven, **config), made(copied.name, place)[1]
    given = {} if config else {"reads": reads, "recycle": recycle}
    drafter, text = load_modules(model, torch.float32, **given), text_of(ROWS[:1])
    assert drafter.needs.layers == ("final" if reads == "normed" else LAYERS,)
    state, _ = begun(HuggingFaceModel(model), drafter, text)
    found, embedded = (
        along(drafter, state, text, PATH[:1]),
        model.get_input_embeddings()(torch.tensor([ROWS[0] + PATH])),
    )
    count, rows = len(ROWS[0]) - 1, dict[tuple[str, str], Tensor]()
    states = {"normed": model.model(torch.tensor([ROWS[0][:-1]])).last_hidden_state}
    with observed_layers(model, (LAYERS,), [*model.modules()]) as seen:
        model.model(torch.tensor([ROWS[0][:-1]]))
    states["raw"] = seen[LAYERS]
    for one, other in product(STATES, STATES):
        hidden = states[one]
        first = modules[0](embedded[:, 1 : 1 + count], hidden, other)
        if len(modules) > 1:
            last = modules[1](embedded[:, 2 : 2 + count], first)
        else:
            last = modules[0](embedded[:, 1 : 2 + count], torch.cat([hidden, first[:, -1:]], 1))
        rows[one, other] = model.lm_head(last[:, -1])
    for way, wanted in rows.items():
        assert (float((found[1] - wanted).abs().max()) < 1e-4) == (way == (reads, recycle))


@pytest.mark.parametrize("name", ["mtp_reads", "mtp_recycle"])
@pytest.mark.parametrize("copied", ["glm"], indirect=True)
def test_a_state_by_another_word_is_named(name: str, copied: Path) -> None:
    model = altered(copied, **{name: "bare"})
    with pytest.raises(CheckpointError, match=f"says that {name} is 'bare'; it must be normed or raw"):
        load_modules(model, torch.float32)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["deepseek", "glm"])
def test_the_rows_are_those_of_transformers_own_modules(
    kind: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It drafts greedily, one token a module; which tensors are theirs it tells by the published models' layers."""
    model, modules, _ = made(kind, place)
    monkeypatch.setattr(model, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.[23]\."])
    theirs = MtpModel.from_pretrained(model)
    assert theirs.num_mtp_layers == len(modules)
    drafter = load_modules(model, torch.float32)
    for tokens in ROWS:
        ids = torch.tensor([tokens])
        states = model.model(ids[:, :-1]).last_hidden_state
        drafted, logits, _ = theirs(ids[:, 1:], states, None, torch.arange(1, len(tokens))[None], None)
        state, _ = begun(HuggingFaceModel(model), drafter, text_of([tokens]))
        found = along(drafter, state, text_of([tokens]), drafted[0, :-1].tolist())
        torch.testing.assert_close(torch.stack(found, 1), logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_the_word_takes_the_targets_own_modules_and_the_text_stays(kind: str, place: Path) -> None:
    folder = made(kind, place)[2]
    pair = polydraft.load(folder, "mtp", dtype="float32", device="cpu")
    assert isinstance(pair.draft.network, MtpHead) and has_modules(pair.target)
    given: dict[str, Any] = {"max_new_tokens": 10, "temperature": 0.0}
    plain: Any = polydraft.generate(pair.target, ROWS[0], drafter="none", **given)
    found: Any = polydraft.generate(pair.target, ROWS[0], drafter="mtp", policy=Chain(2), **given)
    assert torch.equal(found.sequences, plain.sequences)
    assert found.statistics.drafted > 0 and not found.statistics.fallback


def test_a_target_that_came_from_nowhere_has_no_modules() -> None:
    with pytest.raises(CheckpointError, match="was not loaded from a folder, so there are no MTP modules"):
        polydraft.generate(tiny_model(), ROWS[0], drafter="mtp", max_new_tokens=2)


def test_only_the_modules_tensors_are_read(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from polydraft.drafters.heads.formats import mtp_folders

    read, names = mtp_folders.read_plain, list[str]()

    def noted(name: object, wanted: Any = bool) -> Any:
        folder = read(name, wanted)
        names.extend(folder.tensors)
        return folder

    monkeypatch.setattr(mtp_folders, "read_plain", noted)
    load_modules(made("deepseek", place)[0], torch.float32)
    assert names and all(int(one.split(".")[2]) >= LAYERS for one in names)


def test_a_target_with_modules_says_so_where_no_draft_is_named(place: Path, tmp_path: Path) -> None:
    folder = made("glm", place)[2]
    with pytest.warns(UserWarning, match="has MTP modules, which draft for it if the draft is 'mtp'"):
        pair = polydraft.load(folder, dtype="float32", device="cpu")
    without, _ = tmp_path / "without", pair
    pair.target.save_pretrained(without)
    pair.tokenizer.save_pretrained(without)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert not has_modules(polydraft.load(without, dtype="float32", device="cpu").target)


def altered(folder: Path, tensors: Any = None, **config: Any) -> Any:
    """Change a folder's tensors and configuration, and return the target that is loaded from it."""
    file, said = folder / "model.safetensors", folder / "config.json"
    own = load_file(file)
    own = own if tensors is None else tensors(own)
    save_file({name: value.clone() for name, value in own.items()}, file, metadata={"format": "pt"})
    said.write_text(json.dumps(json.loads(said.read_text()) | config))
    return KINDS[folder.name].model.from_pretrained(folder, dtype=torch.float32).eval()


def less(*beginnings: str) -> Any:
    return lambda own: {name: one for name, one in own.items() if not name.startswith(beginnings)}


def moved(beginning: str, to: str) -> Any:
    return lambda own: {name.replace(beginning, to): one for name, one in own.items()}


def beside(*names: str) -> Any:
    return lambda own: own | {f"{name}.weight": torch.ones(2) for name in names}


OF_MIMO = [f"model.mtp.layers.0.{one}" for one in ("enorm", "hnorm", "eh_proj", "pre_mlp_layernorm", "mlp.up_proj")]
WINDOW = "the newest tokens alone, within sliding_window"
DAMAGED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "promised and absent": (
        less("model.layers.2.", "model.layers.3."),
        {},
        r"num_nextn_predict_layers is 2, but no tensor .* begins with mtp\.layers\.0\. or .* or model\.layers\.2\.",
    ),
    "none": (less("model.layers.2.", "model.layers.3."), {"num_nextn_predict_layers": 0}, "has no MTP modules; name a"),
    "fewer than promised": (less("model.layers.3."), {}, "is 2, but its weights hold 1 MTP modules"),
    "more than promised": (None, {"num_nextn_predict_layers": 1}, "is 1, but its weights hold 2 MTP modules"),
    "one between them missing": (moved("layers.2.", "layers.9."), {}, r"has the MTP modules \[1, 7\]"),
    "an expert missing": (
        less("model.layers.3.mlp.experts.1."),
        {},
        r"model\.layers\.3\.mlp\.experts\.1\.gate_proj\.weight is missing, and it has 3 of 4 experts",
    ),
    "an expert too many": (
        lambda own: own | {f"model.layers.2.mlp.experts.4.{one}_proj.weight": torch.zeros(8, 16) for one in ("gate",)},
        {},
        r"holds model\.layers\.2\.mlp\.experts\.4\.gate_proj\.weight, which this kind",
    ),
    "no projection of one": (less("model.layers.3.hnorm"), {}, r"model\.layers\.3\.hnorm\.weight is missing"),
    "scales": (
        lambda own: own | {"model.layers.2.eh_proj.weight_scale_inv": torch.ones(1)},
        {},
        r"holds model\.layers\.2\.eh_proj\.weight_scale_inv: MTP modules with quantised weights are not read",
    ),
    "Step's": (
        beside(*(f"model.layers.2.transformer.{one}" for one in ("shared_head.norm", "shared_head.output"))),
        {},
        f"Step's kind, which are not read: their layers see {WINDOW}",
    ),
    "MiMo-V2-Flash's": (
        beside(*OF_MIMO, "model.mtp.layers.0.self_attn.q_proj", "model.mtp.layers.1.final_layernorm"),
        {},
        f"MiMo-V2's kind, which are not read: their layers see {WINDOW}",
    ),
    "MiMo-V2-Pro's": (
        beside(*OF_MIMO, "model.mtp.layers.0.self_attn.qkv_proj"),
        {},
        f"MiMo-V2's kind, which are not read: their layers see {WINDOW}",
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_modules_are_one_sentence(case: str, copied: Path) -> None:
    tensors, config, said = DAMAGED[case]
    target = altered(copied, tensors, **config)
    with pytest.raises(CheckpointError, match=said) as raised:
        load_modules(target, torch.float32)
    assert "\n" not in str(raised.value) and copied.name in str(raised.value)


ROW = {"mtp_layers_block_type": ["full_attention", "linear_attention"]}
OF_A_ROW: dict[str, tuple[Any, dict[str, Any], str]] = {
    "an expert missing": (
        less("mtp.layers.1.mixer.experts.2."),
        {},
        r"mtp\.layers\.1\.mixer\.experts\.2\.up_proj\.weight is missing, and it has 3 of 4 experts",
    ),
    "its last norm missing": (less("mtp.layers.1.final_layernorm"), {}, r"1\.final_layernorm\.weight is missing"),
    "a block too many": (beside("mtp.layers.2.norm"), {}, r"holds mtp\.layers\.2\.norm\.weight, which this kind"),
    "a block of another kind": (None, ROW, r"mtp_layers_block_type is \['full_attention', 'linear_attention'\]; a mod"),
    "more than promised": (moved("mtp.layers.0.eh_proj", "mtp.layers.2.eh_proj"), {}, r"is 1, .* hold 2 MTP modules"),
    "no projection": (less("mtp.layers.0.eh_proj"), {}, r"mtp\.layers\.0\.eh_proj\.weight is missing"),
    "output rows of its own": (beside("mtp.lm_head"), {}, r"holds mtp\.lm_head\.weight, which this kind"),
    "whole numbers": (
        lambda own: own | {"mtp.layers.0.eh_proj.weight": own["mtp.layers.0.eh_proj.weight"].int()},
        {},
        r"holds mtp\.layers\.0\.eh_proj\.weight: MTP modules with quantised weights are not read",
    ),
}


@pytest.mark.parametrize("case", OF_A_ROW)
@pytest.mark.parametrize("copied", ["nemotron 1"], indirect=True)
def test_damaged_modules_of_several_layers_are_one_sentence(case: str, copied: Path) -> None:
    tensors, config, said = OF_A_ROW[case]
    target = altered(copied, tensors, **config)
    with pytest.raises(CheckpointError, match=said) as raised:
        load_modules(target, torch.float32)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("copied", ["nemotron 2", "glm"], indirect=True)
def test_modules_inside_a_model_for_images_are_found(copied: Path, place: Path) -> None:
    wanted = load_modules(made(copied.name, place)[0], torch.float32).network.state_dict()
    own = KINDS[copied.name].block.partition("{")[0]
    found = load_modules(altered(copied, moved(own, f"language_model.{own}")), torch.float32).network.state_dict()
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_copies_of_the_targets_ends_are_dropped_where_equal_and_taken_where_not(copied: Path) -> None:
    head, embed = "shared_head.head.weight", "embed_tokens.weight"

    def with_copies(own: dict[str, Tensor], scale: float) -> dict[str, Tensor]:
        both = {head: scale * own["lm_head.weight"], embed: own["model.embed_tokens.weight"]}
        return own | {f"model.layers.{at}.{name}": one for at in (2, 3) for name, one in both.items()}

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        equal = load_modules(altered(copied, lambda own: with_copies(own, 1.0)), torch.float32)
    assert equal.ends.lm_head is None and equal.ends.embed_tokens is None
    target = altered(copied, lambda own: with_copies(own, 2.0))
    with pytest.warns(UserWarning, match="draft with shared_head.head.weight of their own") as said:
        other = load_modules(target, torch.float32)
    assert len(said) == 1 and other.ends.embed_tokens is None and other.ends.lm_head is not None
    torch.testing.assert_close(other.ends.lm_head.weight, 2 * target.lm_head.weight, rtol=0, atol=0)
    target = altered(copied, lambda own: own | {f"model.layers.3.{head}": 3 * own["lm_head.weight"]})
    with pytest.raises(CheckpointError, match=r"the modules' shared_head.head.weight differ from each other"):
        load_modules(target, torch.float32)
