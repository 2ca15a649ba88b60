"""Small draft heads with random weights."""

from typing import Any, TypeVar

import torch

from polydraft.drafters import Drafter
from polydraft.drafters.heads.autoregressive import EagleDrafter
from polydraft.drafters.heads.block import BlockHead, BlockShape
from polydraft.drafters.heads.eagle import Eagle3Head, Eagle3Norms
from polydraft.drafters.heads.ends import HeadEnds
from polydraft.drafters.heads.lattice import BlockDrafter
from polydraft.drafters.heads.layers import Anatomy, Rotation
from polydraft.drafters.heads.medusa import MedusaDrafter, MedusaHead, MedusaHeads
from polydraft.drafters.heads.paths import (
    Domino,
    GatedMarkov,
    Markov,
    Mixing,
    PathTerm,
    RecurrentMarkov,
    Selector,
)

Network = TypeVar("Network", bound=torch.nn.Module)
WIDTH, VOCAB = 16, 24
TERMS = ("none", "markov", "gated", "recurrent", "domino", "mixing", "selector")


def path_term(name: str, vocab: int = VOCAB, width: int = WIDTH, rows: int | None = None) -> PathTerm:
    """Return a path term; all of its tables are random."""
    rows = rows or vocab
    term = {
        "none": PathTerm,
        "markov": lambda: Markov(vocab, rows, 6),
        "gated": lambda: GatedMarkov(vocab, rows, 6, width),
        "recurrent": lambda: RecurrentMarkov(vocab, rows, 6, width),
        "domino": lambda: Domino(width, rows, 10, 6, 1),
        "mixing": lambda: Mixing(width, 10, 6),
        "selector": lambda: Selector(vocab, rows, 6, width, 5),
    }[name]()
    return term


def block_head(
    term: str = "mixing",
    *,
    seed: int = 3,
    vocab: int = VOCAB,
    width: int = WIDTH,
    rows: int | None = None,
    confidence: bool = True,
    spread: float = 0.4,
    anatomy: dict[str, Any] | None = None,
    **changes: Any,
) -> BlockHead:
    """Return a head with random weights in double precision."""
    torch.manual_seed(seed)
    sizes = {"width": width, "inner": 24, "heads": 4, "groups": 2, "channels": 4, "normed": True}
    own = Anatomy(**{**sizes, "rotation": Rotation(100.0), **(anatomy or {})})
    shape = BlockShape(
        **{"anatomy": own, "layers": 2, "reads": (0, 1, 2), "target_width": width, "block": 4, "mask_id": 1, **changes}
    )
    path = path_term(term, vocab, width, rows)
    head = BlockHead(shape, path, path.size if confidence and path.size else None).double()
    with torch.no_grad():
        for weights in head.parameters():
            weights.add_(spread * torch.randn(weights.shape, dtype=weights.dtype))
    return head.eval().requires_grad_(False)


def block_drafter(term: str = "mixing", **changes: Any) -> BlockDrafter:
    """Return a drafter with random weights in double precision, whose ends are the target's."""
    return BlockDrafter(block_head(term, **changes), HeadEnds())


def eagle_drafter(width: int = WIDTH, spread: float = 0.4) -> EagleDrafter:
    """Return EAGLE-3's head with random weights, whose ends are the target's."""
    anatomy = Anatomy(width=width, inner=24, heads=4, groups=2, channels=4, rotation=Rotation(100.0))
    head = Eagle3Head(anatomy, (2, 1, 0), width, norms=Eagle3Norms())
    return EagleDrafter(_random(head, spread), HeadEnds())


def medusa_drafter(width: int = WIDTH, spread: float = 0.4) -> MedusaDrafter:
    """Return three of Medusa's heads with random weights, whose output rows are the target's."""
    return MedusaDrafter(_random(MedusaHeads([MedusaHead(width) for _ in range(3)], width), spread))


def every_head() -> dict[str, Drafter]:
    """Return a drafter of every kind of head."""
    return {"a block head": block_drafter(), "an EAGLE head": eagle_drafter(), "Medusa heads": medusa_drafter()}


def _random(network: Network, spread: float) -> Network:
    torch.manual_seed(5)
    with torch.no_grad():
        for weights in network.parameters():
            weights.add_(spread * torch.randn(weights.shape, dtype=weights.dtype))
    return network.double().eval().requires_grad_(False)
