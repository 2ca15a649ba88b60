"""Riders that draft: mask tokens or learnt embeddings behind the tree's nodes, scored in the target's own pass.

Let v be the node that a step accepts last. Behind it lay K riders, rider i at i places behind v, which saw the text, v
with all above it, and riders 1 to i. The target's logits at rider i are a guess at the token i + 1 places behind v. The
token one place behind v is not theirs: it comes out of the same pass, and becomes the next tree's root. So

    q_d = softmax(logits of v's rider d + 1)  for the children of every node of depth d of the next tree,

whatever the root and the tokens above it are. All rows are known before the first child is drawn, which is all that
exactness asks for; and a draft takes no pass.

SPACE (arXiv 2402.11809) tunes the target to fill in one mask token that is repeated, or tokens mask, mask + 1, ...
PaSS (arXiv 2311.13581) leaves the target as it is and learns K input embeddings. Its authors draft and verify in turns;
here each pass does both. SPACE's authors count a rider's position by the rows that it sees, itself included, less one:
these are all tokens before it, so that positions go on by one behind the node, as PaSS's do. When sampling, their code
accepts a draft with probability min(1, p / q) and else draws from p, not from the residual: that is biased. Here drafts
are verified as all others are.

Sources: cteant/SPACE, `tests/eval_infer.py`; Monea et al. published no code.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from polydraft.drafters.contract import Defaults, Drafter, DraftRequest, Needs, Session
from polydraft.drafters.model import SAMPLED, check_listed, draft_rows, listed
from polydraft.errors import InvalidParameter, TargetMismatch, VocabularyMismatch, is_whole, shown
from polydraft.probs import SamplingParams
from polydraft.reading import Step, Text
from polydraft.rows import per_row, scratch, shared
from polydraft.schemes import IID, Scheme, TopK, require_scheme
from polydraft.trees import Chain, Draft, Frontier, Piece, Pieces, Riders, TokenTree, grow


@dataclass(frozen=True, eq=False)
class RiderState:
    """The rows of each text's next tree.

    Args:
        slots: logits of the riders behind the node that was accepted last; anything where they are not known.
        lengths: how many tokens the text has for which these are; 0 where they are not known.
        params: the draft's sampling settings.
        vocab_size: the target's number of tokens.
        carriers: within a step, the nodes of each row that have riders, in the riders' order, padded with -1; None
            where nothing rides.
    """

    slots: Float[Tensor, "b K V"] = per_row(learnt=True)
    lengths: tuple[int, ...] = per_row(lambda known, length: known if known <= length else 0, learnt=True)
    params: SamplingParams = shared()
    vocab_size: int = shared()
    carriers: Int[Tensor, "b g"] | None = scratch(None)

    def known(self, text: Text) -> list[int]:
        """Return the texts whose rows are known."""
        return [row for row, count in enumerate(text.counts) if self.lengths[row] == count]


@dataclass(frozen=True, eq=False)
class RiderDrafter(Drafter):
    """Drafts from rows that the target gave to mask tokens or learnt embeddings in its last pass.

    A step needs K tokens in the pass for each node that has riders: for a chain of K these are K (K + 1). Where the
    accepted node had none, and behind a prompt, a row drafts nothing and its root has riders again.

    Args:
        masks: K token ids of the target, which was tuned to fill them in (SPACE).
        lookahead: K learnt embeddings (PaSS). Either these or masks are given.
        carriers: how many nodes of a tree have riders: the root and the likeliest ones, by the rows that paths were
            drawn from. None for as many as a chain of K has, K + 1.
        shortlist_size: as for `ModelDrafter`.
        params: the draft's own temperature and filters; None for the target's.

    Raises:
        InvalidParameter: neither masks nor embeddings are given or both, or a number is too small.
        TargetMismatch: at the start, if the embeddings have another width than the target's.
        VocabularyMismatch: at the start, if the target does not have a mask token.
    """

    masks: tuple[int, ...] = ()
    lookahead: nn.Embedding | None = None
    carriers: int | None = None
    shortlist_size: int | None = None
    params: SamplingParams | None = None
    needs: Needs = field(init=False)
    name = "riders"
    sound = True

    def __post_init__(self) -> None:
        check_listed(self.shortlist_size)
        if bool(self.masks) == (self.lookahead is not None):
            raise InvalidParameter("Riders are either mask tokens or learnt embeddings; give masks or lookahead.")
        if not isinstance(self.masks, tuple | list) or not all(is_whole(one) and one >= 0 for one in self.masks):
            raise InvalidParameter(f"masks must be token ids, but are {shown(self.masks)}.")
        if not isinstance(self.lookahead, nn.Embedding | None):
            raise InvalidParameter(f"lookahead must be an embedding, but is {shown(self.lookahead)}.")
        if self.lookahead is not None and not bool(torch.isfinite(self.lookahead.weight).all()):
            raise InvalidParameter("lookahead holds values that are no numbers.")  # their keys would spoil the pass
        if self.carriers is not None and (not is_whole(self.carriers) or self.carriers < 1):
            raise InvalidParameter(
                f"carriers must be a number of nodes, 1 for the root alone, but is {shown(self.carriers)}."
            )
        object.__setattr__(self, "needs", Needs(riders=self.most_carriers * self.count, passes=0))

    @property
    def count(self) -> int:
        """K, the riders of a node."""
        return len(self.masks) if self.lookahead is None else self.lookahead.num_embeddings

    @property
    def most_carriers(self) -> int:
        """The most nodes of a tree that have riders."""
        return self.count + 1 if self.carriers is None else self.carriers

    def defaults(self, params: SamplingParams) -> Defaults:
        """Draft a chain of K tokens, as published: the likeliest at temperature 0, drawn ones above it."""
        return Defaults(IID() if params.temperature else TopK(), Chain(self.count))

    def check(self, scheme: Scheme) -> None:
        """Raise `UnpairedScheme` for `Given`, whose drafts come from outside."""
        require_scheme(scheme, SAMPLED, "A drafter of riders")

    def stretches(self, length: int) -> list[tuple[Drafter, int]]:
        """Return this one, if all nodes of so long a chain have riders.

        Raises:
            InvalidParameter: some have none, so that what is drafted next follows from the step.
        """
        most = self.most_carriers - 1
        if length > most:
            asked = f"ask for {most} drafts at most" if most else "it is not measured"
            raise InvalidParameter(
                f"Riders lie behind {self.most_carriers} of a step's nodes; a longer chain may end at another node, "
                f"and the next step then drafts nothing, which a text does not tell: {asked}."
            )
        return [(self, length)]

    @torch.no_grad()
    def start(self, text: Text, session: Session) -> RiderState:
        """Return rows that are not known yet."""
        rows, device = len(text.lengths), text.tokens.device
        if self.masks and max(self.masks) >= session.vocab_size:
            raise VocabularyMismatch(
                f"The mask is token {max(self.masks)} and the target has {session.vocab_size} tokens: another target "
                "was tuned for it."
            )
        if self.lookahead is not None and session.target is not None:
            like = session.target.model.embedded(torch.zeros(1, 1, dtype=torch.int64, device=device))
            if like.shape[-1] != self.lookahead.embedding_dim:
                raise TargetMismatch(
                    f"The riders' embeddings are {self.lookahead.embedding_dim} wide and the target's "
                    f"{like.shape[-1]}: they were trained for another target."
                )
        slots = torch.zeros(rows, self.count, session.vocab_size, device=device)
        return RiderState(slots, (0,) * rows, self.params or session.params, session.vocab_size)

    @torch.no_grad()
    def draft(self, state: RiderState, request: DraftRequest) -> tuple[Draft | Pieces, RiderState]:
        """Draw trees from the rows that are known, and let the target score riders behind their nodes."""
        roots, apart = request.text.last(), request.scheme.several_rows
        if not request.policy.shape.counts:
            return Draft.nothing(roots, apart=apart), replace(state, carriers=None)
        known = state.known(request.text)
        fresh = [row for row in range(len(roots)) if row not in known]
        drafts = [(known, self._grown(state, request, known))] if known else []
        drafts += [(fresh, Draft.nothing(roots[fresh], apart=apart))] if fresh else []
        carriers = torch.full((len(roots), self.most_carriers), -1, device=roots.device)
        pieces = list[Piece]()
        for rows, draft in drafts:
            nodes = likeliest_nodes(draft, self.most_carriers)
            carriers[rows, : nodes.shape[1]] = nodes
            riders = riders_behind(draft.tree, nodes, self._tokens(state.vocab_size, roots.device))
            table = None if self.lookahead is None else self.lookahead.weight
            pieces.append(Piece(tuple(rows), replace(draft, riders=riders, embeddings=table)))
        return Pieces(tuple(pieces)), replace(state, carriers=carriers)

    @torch.no_grad()
    def commit(self, state: RiderState, step: Step) -> RiderState:
        """Keep the rows of the riders behind each row's last accepted node, if it had some.

        Rows for which another drafter drafted had no riders in the pass.
        """
        logits, carriers = step.scored.riders, state.carriers
        if logits is None or carriers is None:
            return replace(state, lengths=(0,) * len(state.lengths), carriers=None)
        kept = step.whole or step.verdict
        last = nn.functional.pad(kept.path, (1, 0), value=0).gather(1, kept.length.unsqueeze(-1))
        here = carriers == last
        own = here.int().argmax(-1, keepdim=True) * self.count + torch.arange(self.count, device=last.device)
        own = own.clamp_max(logits.shape[1] - 1)  # of rows that no rider is known of
        slots = logits[..., : state.vocab_size].gather(1, own.unsqueeze(-1).expand(-1, -1, state.vocab_size))
        lengths = [
            count + more + 1 if rides and row not in step.others else 0
            for row, (count, more, rides) in enumerate(
                zip(step.text.counts, kept.kept, here.any(-1).tolist(), strict=True)
            )
        ]
        return replace(state, slots=slots, lengths=tuple(lengths), carriers=None)

    def _tokens(self, vocab_size: int, device: torch.device) -> Int[Tensor, " K"]:
        """Return the riders' ids; those of learnt embeddings follow the target's tokens."""
        ids = self.masks or range(vocab_size, vocab_size + self.count)
        return torch.tensor([*ids], device=device)

    def _grown(self, state: RiderState, request: DraftRequest, rows: Sequence[int]) -> Draft:
        """Grow trees of some rows; a node's row is that of its depth, and below the last rider that one again."""
        scheme, policy, everyone = request.scheme, request.policy, len(rows) == len(state.lengths)
        slots, noise = (state.slots, request.noise) if everyone else (state.slots[list(rows)], request.noise.of(rows))
        size = listed(self.shortlist_size, scheme, policy, state.vocab_size)

        def propose(frontier: Frontier) -> tuple[Int[Tensor, "b f K"], Float[Tensor, "b f *J K"]]:
            slot, wide = min(frontier.depth, self.count - 1), frontier.tokens.shape[1]
            tokens, probs = draft_rows(slots[:, slot : slot + 1], state.params, size, scheme)
            return tokens.expand(-1, wide, -1), probs.expand(-1, wide, *probs.shape[2:])

        draft = grow(request.text.last()[list(rows)], policy, scheme, propose, noise, trusted=True)
        return draft.as_whole() if draft.shortlist.shape[-1] == state.vocab_size and size is None else draft


def likeliest_nodes(draft: Draft, most: int) -> Int[Tensor, "b g"]:
    """Return each row's root and the likeliest of its other nodes, `most` at most, padded with -1.

    A node is as likely as its path: the product of its tokens' probabilities in the rows that they were drawn from.
    """
    tree, rows = draft.tree, torch.arange(len(draft.atoms), device=draft.atoms.device).unsqueeze(-1)
    below = tree.parents >= 0
    rank = (tree.topology.rank % draft.probs.shape[2],) if draft.probs.dim() == 4 else ()
    chances = draft.probs[rows, tree.parents.clamp_min(0), *rank, draft.atoms.clamp_min(0)].double().log()
    paths = chances.where(below, 0.0).unsqueeze(1).where(tree.ancestors, 0.0).sum(-1)
    paths = paths.where(tree.valid, -torch.inf).where(below, 1.0)
    nodes = paths.argsort(dim=-1, descending=True, stable=True)[:, :most]
    return nodes.where(tree.valid.gather(1, nodes), -1)


def riders_behind(tree: TokenTree, carriers: Int[Tensor, "b g"], tokens: Int[Tensor, " K"]) -> Riders:
    """Return riders behind nodes: for each node K of these tokens, each one place behind the one before.

    A rider sees the node, the node's ancestors, and the riders before it that have the same node.

    Args:
        tree: the tree.
        carriers: the nodes, padded with -1.
        tokens: the ids of a node's riders.
    """
    (batch, groups), count, device = carriers.shape, len(tokens), carriers.device
    nodes, order = carriers.clamp_min(0), torch.arange(groups * count, device=device)
    places = tree.depth.gather(1, nodes).repeat_interleave(count, 1) + order % count + 1
    above = tree.ancestors.gather(1, nodes.unsqueeze(-1).expand(-1, -1, tree.ancestors.shape[-1]))
    before = (order.unsqueeze(-1) // count == order // count) & (order.unsqueeze(-1) >= order)
    sees = torch.cat([above.repeat_interleave(count, 1), before.expand(batch, -1, -1)], dim=-1)
    valid = (carriers >= 0).repeat_interleave(count, 1)
    return Riders(tokens.repeat(groups).expand(batch, -1), places, sees, valid)
