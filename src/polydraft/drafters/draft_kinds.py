"""Which drafter a draft model is for, by what its configuration says that it was trained for.

`pard_token`, or `spd_type` "pard"                        fills masks behind the text (`ParallelDrafter`)
`pard_path_rank` r beside it                              and knows the drafted token above, by path_term.safetensors
`spec_drafter` {"block_size": k, "mask_token_id": id}     an encoder-decoder that fills a block (`SpecDrafter`)
`jacobi_block` k                                          mends a block of guesses (`JacobiBlockDrafter`)
none                                                      drafts token by token (`ModelDrafter`)
"""

from collections.abc import Mapping
from typing import Any, cast

import torch

from polydraft.drafters.contract import Drafter
from polydraft.drafters.heads.formats.folder_fields import Fields, Tensors
from polydraft.drafters.heads.paths import Markov
from polydraft.drafters.jacobi_block import JacobiBlockDrafter
from polydraft.drafters.model import ModelDrafter, runnable
from polydraft.drafters.parallel import ParallelDrafter, SpecDrafter, refused_mask
from polydraft.errors import CheckpointError, shown
from polydraft.models import LanguageModel, module_of, read_plain

PARD, SPEC, JACOBI = "pard", "spec_drafter", "jacobi_block"
MASKED = frozenset(("pard_token", "spd_type", SPEC, JACOBI))
"""What a configuration may have that is for masks or guesses; without these a draft model drafts token by token."""
BLOCK, MASK = "block_size", "mask_token_id"
PATH_FILE, RANK = "path_term.safetensors", "pard_path_rank"
"""The file of a path term in a model's folder, which other programs pass over, and how the configuration tells it."""
MASK_KEYS = (MASK, "dspark_noise_token_id", "pard_token", "ptd_token_id")
"""Where a mask token is looked for; the first that there is counts, as in vLLM. `dflash_config` is of block heads."""


def drafter_of(model: object) -> Drafter:
    """Return the drafter of a draft model: the one that its configuration says it was trained for.

    Raises:
        CheckpointError: the configuration names no mask token, one that cannot be it, or a block that cannot be filled.
        InvalidParameter: this is no model.
        UnsupportedModel: a model for masks cannot branch.
    """
    runs = runnable(model)
    module: Any = module_of(runs)
    config: Any = getattr(module, "config", None)
    if getattr(config, SPEC, None) is not None:
        return _spec_drafter(runs, _name(module), getattr(config, SPEC))
    if getattr(config, JACOBI, None) is not None:
        fields = Fields(_name(module), {JACOBI: getattr(config, JACOBI)})
        return JacobiBlockDrafter(runs, fields.count(JACOBI, most=runs.facts.context - 1))
    if getattr(config, "spd_type", None) == PARD or getattr(config, "pard_token", None) is not None:
        mask, rank = _pard_mask(runs, _name(module), config), getattr(config, RANK, None)
        return ParallelDrafter(runs, mask, path=None if rank is None else _path_term(module, rank))
    return ModelDrafter(runs)


def _pard_mask(model: LanguageModel, name: str, config: Any) -> int:
    told = {key: getattr(config, key, None) for key in MASK_KEYS}
    for key, value in told.items():
        if value is not None:
            return _checked(Fields(name, {}), model, key, value)
    raise CheckpointError(
        f"config.json in {name} says that spd_type is {PARD!r}, and names no mask token; it must have one of "
        f"{', '.join(MASK_KEYS)}."
    )


def _path_term(module: Any, rank: object) -> Markov:
    """Read the path term of a draft model from the folder that the model came from."""
    name = getattr(module, "name_or_path", "")
    if not name:
        raise CheckpointError(f"The draft model's configuration has {RANK}, and nothing says where its path term is.")
    folder = read_plain(name, files=(PATH_FILE,))
    size = Fields(_name(module), {RANK: rank}).count(RANK, most=module.get_output_embeddings().weight.shape[1])
    rows, tensors = len(module.get_output_embeddings().weight), Tensors.of(folder)
    with torch.device("meta"):
        made = Markov(rows, rows, size)
    made.to_empty(device="cpu")
    tensors.fill(made, "")
    return made.to(module.device).requires_grad_(False).eval()


def _spec_drafter(model: LanguageModel, name: str, told: object) -> SpecDrafter:
    if not isinstance(told, Mapping) or {*told} != {BLOCK, MASK}:
        raise CheckpointError(
            f"config.json in {name} says that {SPEC} is {shown(told)}; it must be a table of {BLOCK} and {MASK} alone."
        )
    if not model.facts.encodes:
        raise CheckpointError(
            f"config.json in {name} has {SPEC}, but {type(module_of(model)).__name__} has no encoder; it must be an "
            "encoder-decoder."
        )
    fields = Fields(name, cast(Mapping[str, Any], told))
    block = fields.count(BLOCK, most=model.facts.context - 1)
    return SpecDrafter(model, _checked(fields, model, MASK, fields.get(MASK)), block)


def _checked(fields: Fields, model: LanguageModel, key: str, value: Any) -> int:
    why = refused_mask(model, value)
    if why:
        raise fields.wrong(key, value, why)
    return int(value)


def _name(module: Any) -> str:
    """Return where a model came from, quoted; its class where that is not known."""
    return repr(str(getattr(module, "name_or_path", "") or type(module).__name__))
