"""Small draft heads with random weights, and a target whose texts can be enumerated for them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from choices import Memory, Toy
from sources import encoder_decoder
from torch import Tensor

from polydraft.drafters import Drafter, JacobiBlockDrafter, ParallelDrafter, SpecDrafter
from polydraft.drafters.heads.block_head import BlockHead, BlockShape
from polydraft.drafters.heads.drafter import HeadDrafter, HeadEnds, HeadNetwork, HeadState, TreePass
from polydraft.drafters.heads.eagle_head import Eagle3Head, Eagle3Norms
from polydraft.drafters.heads.falcon import FalconHead
from polydraft.drafters.heads.last_state_heads import MedusaHead, MedusaHeads
from polydraft.drafters.heads.lilicorr import LatticeShape, LiLiCorr
from polydraft.drafters.heads.mtp_head import MtpHead
from polydraft.drafters.heads.parallel_eagle import ParallelEagle
from polydraft.drafters.heads.paths import (
    Domino,
    GatedMarkov,
    Markov,
    Mixing,
    PathTerm,
    RecurrentMarkov,
    Selector,
)
from polydraft.drafters.heads.sublayers import Anatomy, Rotation
from polydraft.drafters.heads.walks.hydra import Hydra
from polydraft.drafters.heads.walks.joined import JoinedWalk
from polydraft.drafters.heads.walks.redrafter import RecurrentHead
from polydraft.drafters.heads.walks.speculators import LstmSpeculator, MlpSpeculator
from polydraft.drafters.heads.xpress import XPress
from polydraft.drafters.itself.adapter import Adapter, AdapterDrafter
from polydraft.drafters.itself.spire import SpireHead
from polydraft.drafters.model import draft_rows
from polydraft.drafters.rider_drafter import RiderDrafter
from polydraft.models import WHOLE, Forward, HuggingFaceModel, LayerSet
from polydraft.reading import Text
from polydraft.schemes import IID
from polydraft.trees import Frontier

Network = TypeVar("Network", bound=torch.nn.Module)
WIDTH, VOCAB = 16, 24
IN_PLACE = ("xpress", "lilicorr")
"""Path terms of heads whose slots draft their own places."""
TERMS = ("none", "markov", "gated", "recurrent", "domino", "mixing", "selector", *IN_PLACE)
LATTICE = LatticeShape(5, 8, 2, 2, 2.0, 6, 1e-4, 3.0)


def path_term(name: str, shape: BlockShape, vocab: int = VOCAB, rows: int | None = None) -> PathTerm:
    """Return a path term; all of its tables are random."""
    width, rows = shape.anatomy.width, rows or vocab
    term = {
        "none": PathTerm,
        "markov": lambda: Markov(vocab, rows, 6),
        "gated": lambda: GatedMarkov(vocab, rows, 6, width),
        "recurrent": lambda: RecurrentMarkov(vocab, rows, 6, width),
        "domino": lambda: Domino(width, rows, 10, 6, 1),
        "mixing": lambda: Mixing(width, 10, 6),
        "selector": lambda: Selector(vocab, rows, 6, width, 5),
        "xpress": lambda: XPress(vocab, rows, 6, width, shape.block, 12),
        "lilicorr": lambda: LiLiCorr(width, shape.drafts, LATTICE),
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
    given = {"reads": (0, 1, 2), "target_width": width, "block": 4, "mask_id": 1, "shifted": term not in IN_PLACE}
    shape = BlockShape(**{"anatomy": own, "layers": 2, **given, **changes})
    path = path_term(term, shape, vocab, rows)
    told = confidence and path.size and term not in IN_PLACE
    head = BlockHead(shape, path, path.told if told else None).double()
    with torch.no_grad():
        for weights in head.parameters():
            weights.add_(spread * torch.randn(weights.shape, dtype=weights.dtype))
    return head.eval().requires_grad_(False)


def block_drafter(term: str = "mixing", **changes: Any) -> HeadDrafter[Any]:
    """Return a drafter with random weights in double precision, whose ends are the target's."""
    return HeadDrafter(block_head(term, **changes), HeadEnds())


def eagle_drafter(width: int = WIDTH, spread: float = 0.4) -> HeadDrafter[Any]:
    """Return EAGLE-3's head with random weights, whose ends are the target's."""
    anatomy = Anatomy(width=width, inner=24, heads=4, groups=2, channels=4, rotation=Rotation(100.0))
    head = Eagle3Head(anatomy, (2, 1, 0), width, norms=Eagle3Norms())
    return HeadDrafter(_random(head, spread), HeadEnds())


def parallel_drafter(width: int = WIDTH, spread: float = 0.4) -> HeadDrafter[Any]:
    """Return P-EAGLE's head of two layers and three slots with random weights, whose ends are the target's."""
    anatomy = Anatomy(width=width, inner=24, heads=4, groups=2, channels=4, rotation=Rotation(100.0))
    head = ParallelEagle(anatomy, (2, 1, 0), width, Eagle3Norms(), mask_id=1, layers=2, drafts=3)
    return HeadDrafter(_random(head, spread), HeadEnds())


def falcon_drafter(
    width: int = WIDTH, spread: float = 0.4, *, block: int = 2, layers: int = 2, recurs: bool = True
) -> HeadDrafter[Any]:
    """Return Falcon's head with random weights, whose ends are the target's."""
    anatomy = Anatomy(width=width, inner=24, heads=4, groups=2, channels=4, rotation=Rotation(100.0))
    return HeadDrafter(_random(FalconHead(anatomy, block, layers, recurs=recurs), spread), HeadEnds())


def medusa_drafter(width: int = WIDTH, spread: float = 0.4) -> HeadDrafter[Any]:
    """Return three of Medusa's heads with random weights, whose output rows are the target's."""
    return of_medusa(_random(MedusaHeads([MedusaHead(width) for _ in range(3)], width), spread))


def mtp_drafter(width: int = WIDTH, spread: float = 0.4, modules: int = 1, **order: bool) -> HeadDrafter[Any]:
    """Return MTP modules with random weights and Qwen3's layers, whose ends are the target's."""
    groups = 2 if width % 8 == 0 else 1
    anatomy = Anatomy(width, 24, 2 * groups, groups, 4, normed=True, rotation=Rotation(100.0))
    return HeadDrafter(_random(MtpHead.plain(anatomy, modules, **order), spread), HeadEnds())


def adapter_drafter(width: int = WIDTH, exit_layer: int = 1, heads: int = 4, spread: float = 0.4) -> AdapterDrafter:
    """Return Kangaroo's adapter with random weights."""
    anatomy = Anatomy(width, width, heads, heads // 2, width // heads)
    return AdapterDrafter(_random(Adapter(anatomy), spread), exit_layer)


def spire_drafter(
    width: int = WIDTH, spread: float = 0.4, *, sinks: int = 1, window: int | None = 3, feedback: bool = True
) -> HeadDrafter[Any]:
    """Return SPIRe's head of two layers with random weights, whose ends are the target's."""
    anatomy = Anatomy(width, 24, 4, 2, 4, rotation=Rotation(100.0))
    return HeadDrafter(_random(SpireHead(anatomy, 2, sinks, window, feedback=feedback), spread), HeadEnds())


def every_head(vocab: int = VOCAB) -> dict[str, Drafter]:
    """Return a drafter of every kind of head, for targets of so many tokens."""
    return {
        "a block head": block_drafter(),
        "an EAGLE head": eagle_drafter(),
        "a P-EAGLE head": parallel_drafter(),
        "a Falcon head": falcon_drafter(),
        "Medusa heads": medusa_drafter(),
        "MTP modules": mtp_drafter(modules=2),
        "a SPIRe head": spire_drafter(),
        "Hydra++ heads": walk("hydra++", vocab=vocab),
        "an MLP speculator": walk("mlp", vocab=vocab),
    }


WALKS = (
    "joined",
    "mlp",
    "lstm",
    "lstm, own tables",
    "redrafter",
    "redrafter, summed",
    "hydra",
    "hydra, rows",
    "hydra++",
)


def walk(
    kind: str, width: int = WIDTH, vocab: int = VOCAB, spread: float = 0.4, tokens: Tensor | None = None
) -> HeadDrafter[Any]:
    """Return a head that walks, with random weights, three depths deep, which drafts these tokens alone."""
    rows = vocab if tokens is None else len(tokens)
    groups = 2 if width % 8 == 0 else 1
    prefix = Anatomy(width, 24, 2, groups, width // 2, rotation=Rotation(100.0))
    network: HeadNetwork = {
        "mlp": lambda: MlpSpeculator(width, 12, vocab, 3, rows=rows, scaled=True),
        "lstm": lambda: LstmSpeculator(width, 12, vocab, 3, rows=rows, scaled=True),
        "lstm, own tables": lambda: LstmSpeculator(width, 12, vocab, 3, rows=rows, shared=False),
        "redrafter": lambda: RecurrentHead(width, 2, rows, depths=3),
        "redrafter, summed": lambda: RecurrentHead(width, 1, rows, 20, recurrent=False, depths=3),
        "hydra": lambda: Hydra(width, 3, 1, None),
        "joined": lambda: JoinedWalk(width, 3, (1, 0, "final")),
        "hydra, rows": lambda: Hydra(width, 3, 3, rows),
        "hydra++": lambda: Hydra(width, 3, 4, rows, prefix),
    }[kind]()
    return HeadDrafter(_random(network, spread), HeadEnds(tokens=tokens))


class Seen(Toy):
    """A law over the whole text that also has hidden states: those of layer k say what was read, in k ways.

    The final ones, behind the last norm, are those of the last layer.
    """

    layers = 2
    width = 4

    def __init__(self, vocab: int, seed: int = 0) -> None:
        super().__init__(vocab, seed)
        stream = torch.Generator().manual_seed(seed + 99)
        self.states = torch.randn(3, vocab, 4, generator=stream, dtype=torch.float64)

    def forward(
        self, tokens: Tensor, positions: Tensor, mask: Tensor, cache: Memory, starts: Tensor, **named: Any
    ) -> Forward:
        logits = super().forward(tokens, positions, mask, cache, starts).logits
        known = cache.slots[0, :, : mask.shape[-1]]
        wanted = named.get("hidden_layers", ())
        places = {layer: self.layers if layer == "final" else layer for layer in wanted}
        hidden = {layer: (mask.double() @ self.states[place][known]).sin() for layer, place in places.items()}
        keep = named.get("logits_to_keep") or 0
        return Forward(logits[:, -keep:], hidden)

    def variant(self, weights: str = "", layers: LayerSet = WHOLE) -> "Seen":
        return self

    def embedded(self, tokens: Tensor, table: Tensor | None = None) -> Tensor:
        return self.states[0][tokens]

    def unembedded(self, states: Tensor) -> Tensor:
        return states @ self.states[1].T

    def output_rows(self, tokens: Tensor) -> Tensor:
        return self.states[1][tokens]


NARROW = {"heads": 2, "groups": 1, "channels": 2}
TOY_HEADS: dict[str, Callable[[int], Drafter]] = {
    "block": lambda vocab: block_drafter(vocab=vocab, width=4, block=3, anatomy=NARROW),
    "XPress": lambda vocab: block_drafter("xpress", vocab=vocab, width=4, block=3, anatomy=NARROW),
    "LiLiCorr": lambda vocab: block_drafter("lilicorr", vocab=vocab, width=4, block=3, anatomy=NARROW),
    "EAGLE": lambda vocab: eagle_drafter(4),
    "P-EAGLE": lambda vocab: parallel_drafter(4),
    "Falcon": lambda vocab: falcon_drafter(4),
    "Medusa": lambda vocab: medusa_drafter(4),
    "Hydra++": lambda vocab: walk("hydra++", 4, vocab),
    "LSTM": lambda vocab: walk("lstm", 4, vocab),
    "joined walk": lambda vocab: walk("joined", 4, vocab),
    "ReDrafter": lambda vocab: walk("redrafter", 4, vocab),
    "MTP": lambda vocab: mtp_drafter(4),
    "MTP, two modules": lambda vocab: mtp_drafter(4, modules=2),
    "SPIRe": lambda vocab: spire_drafter(4),
    "adapter": lambda vocab: adapter_drafter(4, 1, 2),
    "PARD": lambda vocab: ParallelDrafter(Toy(vocab + 1, 1), vocab),
    "PARD, path term": lambda vocab: ParallelDrafter(Toy(vocab + 1, 1), vocab, path=term_of_masks(vocab + 1)),
    "guesses": lambda vocab: JacobiBlockDrafter(Toy(vocab, 1), 3),
    "guesses, mended twice": lambda vocab: JacobiBlockDrafter(Toy(vocab, 1), 3, 2),
    "SpecDec": lambda vocab: SpecDrafter(HuggingFaceModel(encoder_decoder("t5", vocab_size=6)), 5, 2),
}
"""Heads for `Seen`, with so many tokens, and draft models for masks."""


def term_of_masks(vocab: int, seed: int = 5) -> Markov:
    """Return a path term that changes rows a good deal."""
    made, random = Markov(vocab, vocab, 3).double().requires_grad_(False), torch.Generator().manual_seed(seed)
    for weight in made.parameters():
        weight.copy_(torch.randn(weight.shape, generator=random, dtype=weight.dtype))
    return made


def of_few(head: str, tokens: Tensor, vocab: int) -> HeadDrafter[Any]:
    """Return a head for `Seen` with so many tokens that drafts these alone, of the target's rows or of its own."""
    if head in WALKS:
        return walk(head, 4, vocab, tokens=tokens)
    if head in TERMS:
        drafter = block_drafter(head, vocab=vocab, rows=len(tokens), width=4, block=3, anatomy=NARROW)
    else:
        drafter = {"EAGLE": eagle_drafter, "P-EAGLE": parallel_drafter, "MTP": mtp_drafter}[head](4)
    return replace(drafter, ends=HeadEnds(tokens=tokens))


OF_FEW = (*WALKS, "mixing", *IN_PLACE, "EAGLE", "P-EAGLE", "MTP")
"""The heads that `of_few` makes."""


class RidingMemory(Memory):
    """Also what entered the first layer, in every slot."""

    def __init__(self, batch: int, capacity: int, width: int) -> None:
        super().__init__(batch, capacity)
        self.entered = torch.zeros(batch, capacity, width, dtype=torch.float64)

    def keep(self, base: Tensor, path: Tensor) -> None:
        super().keep(base, path)
        before = self.entered.clone()
        for row, nodes in enumerate(path.tolist()):
            for depth, node in enumerate(nodes):
                if node >= 0:
                    self.entered[row, base[row] + 1 + depth] = before[row, base[row] + node]


class Riding(Toy):
    """A law over the whole text that also takes learnt embeddings: a token's own is one-hot."""

    def new_cache(self, batch: int, capacity: int, sources: Any = None) -> RidingMemory:
        return RidingMemory(batch, capacity, self.vocab_size)

    def forward(
        self, tokens: Tensor, positions: Tensor, mask: Tensor, cache: Memory, starts: Tensor, **named: Any
    ) -> Forward:
        super().forward(tokens, positions, mask, cache, starts)
        given = named.get("embeddings")
        slots = (starts.unsqueeze(-1) + torch.arange(tokens.shape[1])).clamp_min(0)
        assert isinstance(cache, RidingMemory)
        entered = self.embedded(tokens) if given is None else given
        cache.entered.scatter_(1, slots.unsqueeze(-1).expand_as(entered), entered)
        places, known = cache.slots[1, :, : mask.shape[-1]], cache.entered[:, : mask.shape[-1]]
        return Forward(self._logits(mask.double() @ (known.unsqueeze(-2) @ self.table[places]).squeeze(-2)), {})

    def embedded(self, tokens: Tensor, table: Tensor | None = None) -> Tensor:
        own = torch.eye(self.vocab_size, dtype=torch.float64)
        return (own if table is None else torch.cat([own, table]))[tokens]


RIDERS: dict[str, Callable[[int], RiderDrafter]] = {
    "SPACE": lambda vocab: RiderDrafter(masks=(1, 1)),
    "SPACE, two masks": lambda vocab: RiderDrafter(masks=(0, 1)),
    "PaSS": lambda vocab: RiderDrafter(lookahead=_random(torch.nn.Embedding(2, vocab), 1.0)),
    "PaSS, roots alone": lambda vocab: RiderDrafter(lookahead=_random(torch.nn.Embedding(2, vocab), 1.0), carriers=1),
}
"""Riders for `Riding`, with so many tokens; some steps draft nothing."""


def _random(network: Network, spread: float) -> Network:
    torch.manual_seed(5)
    with torch.no_grad():
        for weights in network.parameters():
            weights.add_(spread * torch.randn(weights.shape, dtype=weights.dtype))
    return network.double().eval().requires_grad_(False)


def of_medusa(heads: MedusaHeads, **options: Any) -> HeadDrafter[MedusaHeads]:
    """Return the drafter of Medusa's heads, whose ends are their own."""
    return HeadDrafter(heads, heads.ends(), **options)


def rows_of(grown: TreePass, state: HeadState, frontier: Frontier) -> Tensor:
    """Return the draft rows that a head gives the nodes of a depth, of all tokens in the order of their ids."""
    return draft_rows(grown.logits(frontier)[..., : state.vocab_size], state.params, None, IID())[1]


def slots_of(drafter: HeadDrafter[BlockHead], state: HeadState, text: Text) -> Tensor:
    """Return the hidden states of the slots that a block head drafts from behind a text."""
    slots = drafter.network.filled(state.memory, text, state.ends)
    return slots if drafter.network.shape.shifted else slots[:, 1:]
