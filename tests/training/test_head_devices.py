"""Where heads learn: texts and tables meet on one device, shown without one by tensors that only say so."""

from typing import Any

import pytest
import torch
from doubles import tiny_model
from on_device import counted, moved, on_device
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import PreTrainedModel

from polydraft.training import MAKERS, HeadSize
from polydraft.training.heads.head_making import _is_copy
from polydraft.training.heads.loop import measured
from polydraft.training.heads.losses.rider_training import PassTraining
from polydraft.training.heads.losses.row_losses import TargetEnds
from polydraft.training.heads.losses.tuned_target import AdaptedTarget

VOCAB, LENGTH, READS = 24, 13, (1, 2)
PARTS = ("ids", "valid", "features", "final", "lse")


class Texts(Dataset[dict[str, Tensor]]):
    """Three held-out texts on the host."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        if place >= len(self):
            raise IndexError
        return {name: torch.zeros(LENGTH) for name in PARTS}


class Elsewhere(nn.Module):
    """A head on a device that is not the host, which notes where its texts are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, device="meta"))
        self.seen = set[str]()

    def forward(self, **texts: Tensor) -> dict[str, Tensor]:
        self.seen |= {one.device.type for one in texts.values()}
        return {"count": torch.ones(2), "overlap": torch.ones(2)}


def test_held_out_texts_go_where_the_head_is() -> None:
    head = Elsewhere()
    measured(head, Texts(), batch=2)
    assert head.seen == {"meta"}


def given(target: PreTrainedModel) -> dict[str, Tensor]:
    ids = torch.randint(VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found = target(ids, output_hidden_states=True)
    features = torch.cat([found.hidden_states[layer] for layer in READS], -1)
    parts: tuple[Any, ...] = (ids, torch.ones_like(ids), features, found.hidden_states[-1], found.logits.logsumexp(-1))
    return dict(zip(PARTS, parts, strict=True))


@pytest.mark.parametrize("loss", ["published", "acceptance"])
@pytest.mark.parametrize("kind", [kind for kind, maker in MAKERS.items() if not maker.encodes])
def test_no_head_mixes_host_and_device_while_it_learns(kind: str, loss: str) -> None:
    if loss not in MAKERS[kind].losses:
        loss = "published"
    target = tiny_model("llama", VOCAB, dtype=torch.float32)
    texts, tokens = given(target), torch.arange(0, VOCAB, 2)
    with counted():
        there = {name: on_device(one) for name, one in texts.items()}
        all_tokens = kind in ("mlp", "arctic-rnn", "arctic-lstm", "redrafter", "pard", "pard-path", "medusa-2", "space")
        own = None if all_tokens else on_device(tokens)
        ends = TargetEnds.of(moved(target), own)  # type: ignore[arg-type]
        whole = tiny_model("llama", VOCAB, dtype=torch.float32)  # of which a copy is moved, if it learns as well
        training = MAKERS[kind].make(whole, ends, READS, HeadSize(loss=loss, rank=4)).training
        for one in training.modules():
            if isinstance(one, AdaptedTarget):
                moved(one.hidden[0])
            if isinstance(one, PassTraining):
                moved(one.model[0])
        found = moved(training)(**there)
    assert bool(found["loss"] > 0)


def test_a_table_is_told_from_its_copy_in_another_precision_on_another_device() -> None:
    table = torch.randn(5, 3)
    with counted():
        assert _is_copy(table.bfloat16(), on_device(table))  # type: ignore[arg-type]
        assert not _is_copy(table + 1, on_device(table))  # type: ignore[arg-type]
