"""What folders of block heads hold of the path terms of XPress and LiLiCorr: tensors and settings, read and written.

XPress has two forms: that of its authors' release, which vLLM reads (`xpress_head.`), and that of speculators
(`refiner_head.`). LiLiCorr's authors renamed the tensors of its small networks once; both names are read.

Sources: vllm-project/vllm, `model_executor/models/qwen3_xpress.py`; vllm-project/speculators, `models/xpress`;
NVIDIA/Model-Optimizer, `modeling_lilicorr.py`; sgl-project/sglang, `lilicorr_config.py`.
"""

from collections.abc import Mapping
from typing import Any

from polydraft.drafters.heads.block_head import BlockShape
from polydraft.drafters.heads.formats.folder_fields import Fields, Tensors, classes_of
from polydraft.drafters.heads.lilicorr import LatticeShape, LiLiCorr
from polydraft.drafters.heads.xpress import XPress
from polydraft.errors import CheckpointError

REFINER, RELEASED, LATTICE = "refiner_head.", "xpress_head.", "lilicorr."
"""What stands before the names of tensors: of XPress in speculators' form and in its authors', and of LiLiCorr."""
RELEASED_NAMES: Mapping[str, str] = {
    "token_embed.weight": "w1.weight",
    "mix_l": "mix.L",
    "mlp_gate.weight": "mlp.gate_proj.weight",
    "mlp_up.weight": "mlp.up_proj.weight",
    "mlp_down.weight": "mlp.down_proj.weight",
    "readout.weight": "w2.weight",
}
"""XPress's tensors that its authors name otherwise than speculators."""
NEWER_NAMES: Mapping[str, str] = {
    "feature_norm.": "feature_mlp.0.",
    "feature_mlp.up_proj.": "feature_mlp.1.",
    "feature_mlp.down_proj.": "feature_mlp.3.",
    ".mlp.up_proj.": ".mlp.0.",
    ".mlp.down_proj.": ".mlp.2.",
}
"""Parts of newer names of LiLiCorr's tensors, and of those that are written."""
CONVOLUTION = "layers.0.attention_conv.base_kernel"
SELECTOR = ("predecessor_codebook", "successor_codebook", "hidden_projection.weight")
ROUNDS = 6
"""Of Jacobi, that engines run for XPress. A walk needs none."""


def holds_xpress(fields: Fields, tensors: Tensors) -> bool:
    """Tell whether a block head has XPress's term."""
    return fields.get("speculators_model_type") == "xpress" or _any(tensors, REFINER) or _any(tensors, RELEASED)


def holds_lilicorr(fields: Fields, tensors: Tensors) -> bool:
    """Tell whether a block head has LiLiCorr's term."""
    return "LiLiCorrDraftModel" in classes_of(fields.config) or _any(tensors, LATTICE)


def _any(tensors: Tensors, prefix: str) -> bool:
    return any(name.startswith(prefix) for name in tensors.left)


def read_xpress(fields: Fields, tensors: Tensors, shape: BlockShape) -> XPress:
    """Build XPress's term, and fill it.

    A selector only chooses where Jacobi rounds begin; it is left out.

    Raises:
        CheckpointError: a setting is not that of the tensors, or its rows are of some tokens.
    """
    prefix, names = (RELEASED, RELEASED_NAMES) if _any(tensors, RELEASED) else (REFINER, {})
    vocab, rank = tensors.matrix(prefix + names.get("token_embed.weight", "token_embed.weight"))
    rows, _ = tensors.matrix(prefix + names.get("readout.weight", "readout.weight"))
    gate = prefix + names.get("mlp_gate.weight", "mlp_gate.weight")
    inner, _ = tensors.matrix(gate)
    _check_settings(fields, tensors)
    for name, found in (("xpress_rank", rank), ("xpress_mlp_hidden", inner), ("xpress_block_size", shape.block)):
        if fields.get(name) is not None and fields.count(name) != found:
            raise fields.wrong(name, fields.get(name), f"its other settings and its tensors ask for {found}")
    ratio = None if fields.get("xpress_mlp_ratio") is None else fields.count("xpress_mlp_ratio")
    if ratio is not None and ratio * rank != inner:
        raise fields.wrong("xpress_mlp_ratio", ratio, f"{gate} has {inner} rows for a rank of {rank}")
    term = XPress(vocab, rows, rank, shape.anatomy.width, shape.block, inner)
    tensors.fill(term, prefix, names)
    return term


def _check_settings(fields: Fields, tensors: Tensors) -> None:
    """Check what the tensors of XPress's term do not show."""
    for name in ("xpress_candidate_topc", "xpress_topc"):
        if fields.count(name, 0, 0):
            raise fields.wrong(name, fields.get(name), "rows of some candidates alone are not read, so it must be 0")
    told = [name for name in ("num_jacobi_passes", "xpress_num_passes") if fields.get(name) is not None]
    if len({fields.count(name) for name in told}) > 1:
        raise fields.wrong(told[1], fields.get(told[1]), f"{told[0]} is {fields.get(told[0])}")
    backbone = fields.get("xpress_backbone", "dflash")
    if backbone not in ("dflash", "dflash2"):
        raise fields.wrong("xpress_backbone", backbone, "it must be dflash or dflash2")
    if backbone == "dflash2" and not tensors.has(CONVOLUTION):
        raise fields.wrong("xpress_backbone", backbone, f"{CONVOLUTION} is missing")
    if fields.get("xpress_selector"):
        tensors.drop(*(f"candidate_selector.{name}" for name in SELECTOR))


def read_lilicorr(fields: Fields, tensors: Tensors, shape: BlockShape) -> LiLiCorr:
    """Build LiLiCorr's term, and fill it.

    Raises:
        CheckpointError: a setting is missing, since none may be guessed; or it is not that of the tensors.
    """
    if shape.shifted:
        raise fields.wrong("shift_label", True, "LiLiCorr's slots draft their own places")
    _check_convolutions(fields, tensors)
    width = shape.anatomy.width
    own = _count(fields, "lilicorr_hidden_size", 0, width) or width
    lattice = LatticeShape(
        candidates=_count(fields, "lilicorr_candidate_topk", 1, own),
        width=own,
        layers=_count(fields, "lilicorr_num_layers", 1, own * own),
        heads=_count(fields, "lilicorr_num_heads", 1, 1),
        ratio=_number(fields, "lilicorr_mlp_ratio"),
        factors=_count(fields, "lilicorr_factor_dim", 1, own),
        vector_eps=_number(fields, "lilicorr_vector_eps"),
        scale=_number(fields, "lilicorr_logit_scale"),
        eps=shape.anatomy.eps,
    )
    if lattice.ratio * own * own > fields.held:
        raise fields.wrong(
            "lilicorr_mlp_ratio", lattice.ratio, f"its tensors hold {fields.held} values, too few for it"
        )
    for name in [name for name in tensors.left if name.startswith(LATTICE)]:
        older = next((name.replace(new, old) for new, old in NEWER_NAMES.items() if new in name), name)
        tensors.left[older] = tensors.left.pop(name)
    term = LiLiCorr(width, shape.drafts, lattice)
    tensors.fill(term, LATTICE)
    return term


def _asked(fields: Fields, name: str) -> None:
    if fields.get(name) is None:
        raise CheckpointError(f"config.json in {fields.name} names no {name}, and a LiLiCorr head's is never guessed.")


def _count(fields: Fields, name: str, least: int, each: int) -> int:
    _asked(fields, name)
    return fields.count(name, least=least, each=each)


def _number(fields: Fields, name: str) -> float:
    _asked(fields, name)
    return fields.number(name, 0.0, above=0)


def _check_convolutions(fields: Fields, tensors: Tensors) -> None:
    """Check that both settings of the convolutions are there and the tensors, or nothing of them."""
    names = ("conv_kernel_size", "conv_group_size")
    told = [name for name in names if fields.get(name)]
    if len(told) == 1:
        (missing,) = {*names} - {*told}
        raise CheckpointError(f"config.json in {fields.name} names {told[0]} and no {missing}; it must name both.")
    if told and not tensors.has(CONVOLUTION):
        raise tensors.incomplete(f"{CONVOLUTION} is missing, and its config.json names {told[0]}")
    if not told and tensors.has(CONVOLUTION):
        raise CheckpointError(f"config.json in {fields.name} names no {names[0]}, and its tensors hold {CONVOLUTION}.")


def released_name(name: str) -> str:
    """Return what XPress's authors call a tensor of speculators' form; other names stay."""
    if not name.startswith(REFINER):
        return name
    short = name.removeprefix(REFINER)
    return RELEASED + RELEASED_NAMES.get(short, short)


def xpress_settings(term: XPress) -> dict[str, Any]:
    """Return what the authors' form says of XPress's term."""
    return {
        "xpress_rank": term.rank,
        "xpress_mlp_hidden": term.inner,
        "xpress_block_size": term.slots,
        "xpress_num_passes": ROUNDS,
    }


def speculators_xpress(term: XPress) -> dict[str, Any]:
    """Return what speculators' form says of XPress's term."""
    ratio = term.inner // term.rank
    return {"xpress_rank": term.rank, "xpress_mlp_ratio": ratio, "num_jacobi_passes": ROUNDS}


def lilicorr_settings(term: LiLiCorr) -> dict[str, Any]:
    """Return what a folder says of LiLiCorr's term."""
    own = term.shape
    return {
        "lilicorr_candidate_topk": own.candidates,
        "lilicorr_hidden_size": own.width,
        "lilicorr_num_layers": own.layers,
        "lilicorr_num_heads": own.heads,
        "lilicorr_mlp_ratio": own.ratio,
        "lilicorr_factor_dim": own.factors,
        "lilicorr_vector_eps": own.vector_eps,
        "lilicorr_logit_scale": own.scale,
    }
