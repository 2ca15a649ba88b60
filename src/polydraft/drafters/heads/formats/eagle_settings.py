"""What folders of EAGLE-3's heads say of norms, biases and states, and which kinds of drafts among them are not read.

`norm_output` has had two meanings. vLLM, speculators and others: whether the states that are recycled stand behind the
last norm; output rows always do. SpecForge before September 2026: whether output rows do; the states never. No folder
tells which of them it means, so whoever loads it may, by `"recycle"` in its configuration or `load_head(recycle=...)`:
"raw" is what SpecForge's older true means, and "bare" what its older false means.

Sources: vllm-project/vllm (`llama_eagle3.py`), sgl-project/SpecForge (`llama3_eagle.py`, pull request 879),
vllm-project/speculators, NVIDIA/Model-Optimizer.
"""

from polydraft.drafters.heads.eagle_head import Eagle3Norms
from polydraft.drafters.heads.formats.folder_fields import Fields, Tensors, classes_of
from polydraft.drafters.heads.sublayers import Anatomy
from polydraft.errors import CheckpointError

BARE = "bare"
RECYCLE = ("raw", "normed", BARE)
"""What may be recycled: the state that the last layer made, or that behind the last norm; or the former, from which
output rows follow without the norm."""
NORMS = {"norm_before_fc": "input_norm.weight", "fc_norm": "fc_norm.0.weight"}
"""The flags of norms before the projection of the target's states, and the tensors that these have."""
PARALLEL, LATENT = "parallel_draft_heads.", "self_attn.kv_a_proj_with_mqa"
"""Parts of names of tensors that other kinds of drafts have."""


def refuse_other_drafts(fields: Fields, tensors: Tensors) -> None:
    """Refuse by name what stands in folders like EAGLE-3's and is another kind of draft.

    Raises:
        CheckpointError: it drafts several tokens a pass by heads of its own, or its attention is latent.
    """
    if fields.count("parallel_draft_step", 1) > 1:
        told = fields.get("parallel_draft_step")
        raise fields.wrong("parallel_draft_step", told, "drafts with parallel draft heads are not read")
    for part, what in ((PARALLEL, "parallel draft heads"), (LATENT, "latent attention")):
        found = next((name for name in sorted(tensors.left) if part in name), None)
        if found is not None:
            raise CheckpointError(
                f"{tensors.folder.file} in {fields.name} holds {found}: drafts with {what} are not read."
            )
    latent = next((one for one in classes_of(fields.config) if "deepseek" in one.lower()), None)
    if latent is not None:
        raise fields.wrong("architectures", latent, "drafts with latent attention are not read")


def norms_of(fields: Fields, tensors: Tensors) -> Eagle3Norms:
    """Return where a head of EAGLE-3's has norms.

    Raises:
        CheckpointError: a flag and the tensors differ, two exclude each other, or `recycle` is no word for it.
    """
    told = {name: fields.flag(name) for name in NORMS}
    for name, tensor in NORMS.items():
        if told[name] != tensors.has(tensor):
            held = f"hold {tensor}" if tensors.has(tensor) else f"hold no {tensor}"
            raise fields.wrong(name, fields.get(name, False), f"its tensors {held}")
    if all(told.values()):
        raise fields.wrong("fc_norm", True, "norm_before_fc is true as well, and a head has one of the two")
    recycle, output = fields.get("recycle"), fields.flag("norm_output")
    if recycle not in (None, *RECYCLE):
        raise fields.wrong("recycle", recycle, f"it must be {', '.join(RECYCLE[:-1])} or {BARE}")
    return Eagle3Norms(
        residual=fields.flag("norm_before_residual"),
        output=output if recycle is None else recycle == "normed",
        joined=told["norm_before_fc"],
        sources=told["fc_norm"],
        rows=recycle != BARE,
    )


def reads_final(fields: Fields, norms: Eagle3Norms, width: int) -> bool:
    """Tell whether a head reads the target's last state as it is (`use_aux_hidden_state` false), without a projection.

    Raises:
        CheckpointError: it has norms of what is projected, or the target another width.
    """
    if fields.flag("use_aux_hidden_state", True):
        return False
    other = next((name for name, has in zip(NORMS, (norms.joined, norms.sources), strict=True) if has), None)
    if other is not None:
        raise fields.wrong(other, True, "a head that reads no layers of its target projects nothing")
    if fields.count("target_hidden_size", width, each=width) != width:
        told = fields.get("target_hidden_size")
        raise fields.wrong("target_hidden_size", told, f"the head projects no states and is {width} wide")
    return True


def check_bias(fields: Fields, anatomy: Anatomy) -> None:
    """Check that `qkv_bias`, which goes before `attention_bias`, is what the tensors say.

    Raises:
        CheckpointError: it is not.
    """
    told = fields.get("qkv_bias")
    if told is not None and bool(told) != anatomy.bias:
        held = "hold biases" if anatomy.bias else "hold no biases"
        raise fields.wrong("qkv_bias", told, f"its tensors {held} of queries, keys and values")
