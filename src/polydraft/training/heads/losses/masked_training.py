"""Training a draft model to fill masks behind a text (PARD): all levels of a draft at all places, in one pass.

An element (a, d) is the d-th mask behind the text up to token a, for d = 0 that token itself. It stands at place a + d,
sees tokens 0 to a and the masks of its own draft up to itself, and predicts token a + d + 1, which is draft d + 1.

Source: arXiv 2504.18583; AMD-AIG-AIMA/PARD, pard/pard_train.py.
"""

import copy
from pathlib import Path
from typing import cast

import torch
from jaxtyping import Bool, Float, Int
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from polydraft.drafters import ModelDrafter, ParallelDrafter, SpecDrafter, drafter_of
from polydraft.drafters.draft_kinds import MASK_KEYS, PATH_FILE, RANK
from polydraft.drafters.heads.paths import Markov
from polydraft.drafters.heads.sublayers import Anatomy
from polydraft.errors import InvalidParameter
from polydraft.models import HuggingFaceModel, module_of, tokenizer_of
from polydraft.models.checkpoints.silence import held_back
from polydraft.models.checks.layout import context_of
from polydraft.training.heads.losses.last_state_training import RowLoss
from polydraft.training.heads.losses.row_losses import (
    HeadBatch,
    HeadTraining,
    TargetEnds,
    agreement,
    cross_entropy,
    summed,
)

KEPT, LEAST = 0.7, 0.2
"""Of the places of a depth so many are learnt at the next one, and so many of all places at least."""


def elements(
    places: int, depths: int, kept: float = KEPT, least: float = LEAST
) -> tuple[Int[Tensor, " e"], Int[Tensor, " e"]]:
    """Return the anchors and depths of what is learnt of a text: conditional drop (COD).

    Depth 0 has all places. Depth d has those behind places of depth d - 1, so that each draft is there from its first
    mask on; they are drawn until they are max(kept^d, least) of all places. The authors' code lets places run around
    the text's end, and learns one element of each depth that sees no token. Here places end where the text does, and
    each sees one.

    Args:
        places: how many tokens of a text have a next one.
        depths: how many.
    """
    drawn = torch.arange(places)
    found = [(drawn, torch.zeros_like(drawn))]
    for depth in range(1, depths):
        behind = drawn[drawn < places - 1] + 1
        some = torch.randperm(len(behind))[: int(places * max(kept**depth, least))]
        drawn = behind[some].sort().values
        found.append((drawn - depth, torch.full_like(drawn, depth)))
    anchors, levels = zip(*found, strict=True)
    return torch.cat(anchors), torch.cat(levels)


def sees(anchors: Int[Tensor, " e"], depths: Int[Tensor, " e"]) -> Bool[Tensor, "e e"]:
    """Tell which elements each one sees: the text up to its anchor, and the masks of its own draft up to itself."""
    own, other = (anchors.unsqueeze(-1), depths.unsqueeze(-1)), (anchors, depths)
    masks = (other[1] > 0) & (other[0] == own[0]) & (other[1] <= own[1])
    return ((other[1] == 0) & (other[0] <= own[0])) | masks


class PardTraining(HeadTraining):
    """A draft model that fills masks, with its loss: the mean over all elements of all depths.

    Args:
        network: the draft model.
        target: the target's ends.
        mask_id: the mask.
        depths: how deep it learns to draft.
        row_loss: a loss of logits against the target's law; None for the cross entropy of the text's tokens, which is
            the authors'.
        path: the path term of its rows, which learns with it; None for none, as the authors have it.
    """

    def __init__(
        self,
        network: PreTrainedModel,
        target: TargetEnds,
        mask_id: int,
        depths: int,
        row_loss: RowLoss | None,
        path: Markov | None = None,
    ) -> None:
        super().__init__(target)
        self.network, self.mask_id, self.depths, self.row_loss = network, mask_id, depths, row_loss
        self.path = path
        self.register_state_dict_post_hook(without_copies)
        self.register_load_state_dict_pre_hook(with_copies)

    def learn(self, batch: HeadBatch) -> dict[str, Tensor]:
        """Return the losses of all depths, at drawn places of the texts, which are the same in all of them."""
        (target,), ids = self.target, batch.ids
        anchors, depths = (one.to(ids.device) for one in elements(ids.shape[1] - 1, self.depths))
        places = anchors + depths
        asked = batch.valid[:, places + 1].bool()
        logits = self.logits(ids, anchors, depths)[asked]
        known = min(logits.shape[-1], len(target.embedding))
        logits, labels = logits[..., :known], ids[:, places + 1][asked]
        laws = target.laws(batch.final[:, places][asked], batch.lse[:, places][asked])[..., :known]
        overlaps, levels = agreement(logits, laws).detach(), depths.expand_as(asked)[asked]
        tokens = labels.where(labels < known, -1)
        values = cross_entropy(logits, tokens) if self.row_loss is None else self.row_loss(logits, laws)
        shares = [levels == depth for depth in range(self.depths)]
        counts = [share.sum() for share in shares]
        losses = [values[share].sum() / max(len(levels), 1) for share in shares]
        means = [overlaps[share].sum() / count.clamp_min(1) for share, count in zip(shares, counts, strict=True)]
        return summed(losses, means, counts)

    def logits(self, ids: Int[Tensor, "b t"], anchors: Int[Tensor, " e"], depths: Int[Tensor, " e"]) -> Tensor:
        """Return the logits of all elements, of one pass over them; masks' rows behind the text's own tokens."""
        places = anchors + depths
        tokens = ids[:, places].where(depths == 0, self.mask_id)
        precision = next(self.network.parameters()).dtype
        hidden = torch.zeros(len(places), len(places), dtype=precision, device=ids.device)
        hidden.masked_fill_(~sees(anchors, depths), torch.finfo(precision).min)
        rows = len(ids)
        found = self.network(
            input_ids=tokens,
            attention_mask=hidden.expand(rows, 1, -1, -1),
            position_ids=places.expand(rows, -1),
            use_cache=False,
        ).logits
        if self.path is None:
            return found
        return self.path.gained(found, ids[:, places]).where((depths > 0).unsqueeze(-1), found)


def without_copies(module: nn.Module, weights: dict[str, Tensor], prefix: str, metadata: object) -> None:
    """Leave tied weights in once, since a checkpoint's file may not hold them twice."""
    known = set[int]()
    for name, weight in [*weights.items()]:
        if weight.data_ptr() in known:
            del weights[name]
        known.add(weight.data_ptr())


def with_copies(module: nn.Module, weights: dict[str, Tensor], prefix: str, *_: object) -> None:
    """Give tied weights of a checkpoint that has them once to all that share them."""
    there = dict[int, Tensor]()
    shared = [*module.named_parameters(prefix.rstrip("."), remove_duplicate=False)]
    for name, weight in shared:
        if name in weights:
            there[id(weight)] = weights[name]
    for name, weight in shared:
        if name not in weights and id(weight) in there:
            weights[name] = there[id(weight)]


def new_draft_model(target: PreTrainedModel, ends: TargetEnds, anatomy: Anatomy, layers: int) -> PreTrainedModel:
    """Return a Llama with the target's ends, layers that have learnt nothing, and one token more, which is its mask."""
    masked = [torch.cat([one, one.mean(0, keepdim=True)]) for one in (ends.embedding, ends.rows)]
    return _for_masks(new_llama(target, masked[0], masked[1], anatomy, layers), len(ends.embedding))


def new_llama(
    target: PreTrainedModel, embedding: Float[Tensor, "V d"], rows: Float[Tensor, "V d"], anatomy: Anatomy, layers: int
) -> PreTrainedModel:
    """Return a Llama with these ends and layers that have learnt nothing, whose ends are tied as a target's are."""
    own = target.config.get_text_config()
    rotation = {} if anatomy.rotation is None else {"rope_theta": anatomy.rotation.theta}
    config = LlamaConfig(
        vocab_size=len(embedding),
        hidden_size=anatomy.width,
        intermediate_size=anatomy.inner,
        num_hidden_layers=layers,
        num_attention_heads=anatomy.heads,
        num_key_value_heads=anatomy.groups,
        head_dim=anatomy.channels,
        max_position_embeddings=context_of(own),
        rope_parameters={"rope_type": "default", **rotation},
        tie_word_embeddings=bool(getattr(own, "tie_word_embeddings", False)),
        bos_token_id=own.bos_token_id,
        eos_token_id=own.eos_token_id,
        pad_token_id=None,
    )
    made = LlamaForCausalLM(config)
    with torch.no_grad():
        for one, weights in ((made.lm_head, rows), (made.model.embed_tokens, embedding)):
            one.weight.copy_(weights)
    return made


def copied(given: nn.Module, had: int, layers: int | None) -> PreTrainedModel:
    """Return a copy of a draft model in single precision.

    Args:
        had: how many layers it has.
        layers: how many are asked for.

    Raises:
        InvalidParameter: another number of layers is asked for.
    """
    assert isinstance(given, PreTrainedModel)
    if layers not in (None, had):
        raise InvalidParameter(f"The draft model to begin with has {had} layers, not {layers}; leave layers out.")
    made = type(given)(copy.deepcopy(given.config)).float()
    made.load_state_dict(given.state_dict())
    return made


def begun_with(given: nn.Module, vocab: int, layers: int | None) -> PreTrainedModel:
    """Return a copy of a draft model in single precision, with a mask: its own, or the first token that nobody has.

    Raises:
        InvalidParameter: another number of layers is asked for.
        UnsupportedModel: it cannot branch.
    """
    assert isinstance(given, PreTrainedModel)
    made = copied(given, given.config.get_text_config().num_hidden_layers, layers)
    mask = getattr(drafter_of(given), "mask_id", None)
    if mask is None:
        mask, table = vocab, cast(nn.Embedding, made.get_input_embeddings())
        if table.num_embeddings <= mask:
            made.resize_token_embeddings(mask + 1, mean_resizing=False)
    return _for_masks(made, mask)


def _for_masks(model: PreTrainedModel, mask_id: int) -> PreTrainedModel:
    """Let a model's configuration say that it fills masks, and for now without a path term."""
    others = [key for key in MASK_KEYS if getattr(model.config, key, None) is not None]
    model.config.update({**dict.fromkeys(others), "pard_token": mask_id, "spd_type": "pard", RANK: None})
    return model


def new_path(model: PreTrainedModel, given: nn.Module | None, rank: int | None, usual: int) -> Markov:
    """Return a path term for a model for masks, whose configuration then says so.

    Args:
        model: the model.
        given: what it began with, whose term is copied if it has one; None for nothing.
        rank: of the term; None for that of the given one, else the usual one.

    Raises:
        InvalidParameter: the given one's term has another rank.
    """
    old = None if given is None else getattr(drafter_of(given), "path", None)
    if old is not None and rank not in (None, old.rank):
        raise InvalidParameter(f"The path term to begin with has the rank {old.rank}, not {rank}; leave the rank out.")
    rows = model.config.get_text_config().vocab_size
    made = Markov(rows, rows, rank or (usual if old is None else old.rank)).to(model.device)
    if old is None:
        nn.init.zeros_(made.markov_w2.weight)  # at first it changes nothing
    else:
        made.load_state_dict(old.state_dict())
    model.config.update({RANK: made.rank})
    return made


def write_draft_model(
    drafter: ModelDrafter | ParallelDrafter | SpecDrafter, folder: Path, target: HuggingFaceModel, *, card: str = ""
) -> None:
    """Write the model of a drafter, with the path term that one for masks may have; the rest as of `write_model`."""
    write_model(cast(PreTrainedModel, module_of(drafter.model)), folder, target, card)
    path = getattr(drafter, "path", None)
    if path is not None:
        term = {name: value.to(torch.bfloat16) for name, value in path.state_dict().items()}
        save_file(term, folder / PATH_FILE, metadata={"format": "pt"})


def write_model(model: PreTrainedModel, folder: Path, target: HuggingFaceModel, card: str) -> None:
    """Write a draft model as Hugging Face does, in bfloat16, with the target's tokenizer where that is known.

    Raises:
        OSError: the files cannot be written.
    """
    with held_back():
        made = copy.deepcopy(model)
        cast(nn.Module, made).to(torch.bfloat16)
        made.save_pretrained(folder)
        tokenizer = tokenizer_of(target.model)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
    (folder / "README.md").write_text(card)
