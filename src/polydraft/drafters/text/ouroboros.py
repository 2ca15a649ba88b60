"""Ouroboros: a draft model that decodes by lookahead, and phrases that draft and target find for one another."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from polydraft.drafters.contract import (
    Decoder,
    Defaults,
    Drafter,
    DraftRequest,
    Session,
    loop_inside,
    owned_models,
    owned_networks,
)
from polydraft.drafters.text.guess import Bounds, GivenDrafter, Guess, check_count, given
from polydraft.drafters.text.lookahead import (
    MOST_SCORED,
    LookaheadDrafter,
    LookaheadRow,
    LookaheadState,
    newest_first,
)
from polydraft.drafters.text.pool import Entry, NgramPool, Phrase
from polydraft.errors import InvalidParameter, UnsupportedModel, shown
from polydraft.models import LanguageModel, check_same_size, module_of, same_model
from polydraft.probs import Noise, SamplingParams
from polydraft.reading import Features, Step, Text
from polydraft.rows import cut, parts, per_row, scratch, shared
from polydraft.schemes import Given, Scheme
from polydraft.trees import Chain, Draft, TokenTree, TreePolicy, TrunkThenBranch, Verdict

LIKELIEST = SamplingParams(temperature=0)


@dataclass(frozen=True)
class FollowLikeliest:
    """The verifier of the loop inside, which decodes at temperature 0: a path goes on as long as it is the likeliest.

    It is naive match where rows are one-hot.
    """

    scheme: Scheme = Given()
    name = "follow the likeliest"
    lossless = True

    def verify(self, draft: Draft, target_probs: Float[Tensor, "b n V"], noise: Noise) -> Verdict:
        """Walk down from the root to the likeliest token's child, until there is none."""
        likeliest, children, height = target_probs.argmax(dim=-1), draft.tree.children, draft.tree.topology.height
        at, going = torch.zeros_like(likeliest[:, 0]), torch.ones_like(likeliest[:, 0], dtype=torch.bool)
        path = draft.tree.tokens.new_full((len(at), height), -1)
        for depth in range(height):
            below = children[torch.arange(len(at)), at]
            wanted = likeliest.gather(1, at.unsqueeze(-1))
            right = (draft.tree.tokens.gather(1, below.clamp_min(0)) == wanted) & (below >= 0)
            going = going & right.any(dim=-1)
            child = below.gather(1, right.int().argmax(dim=-1, keepdim=True)).squeeze(-1)
            at = torch.where(going, child, at)
            path[:, depth] = child.where(going, -1)
        return Verdict(path, (path >= 0).sum(dim=-1), likeliest.gather(1, at.unsqueeze(-1)).squeeze(-1))


@dataclass(frozen=True)
class WrittenChain:
    """What a row was drafted in the step under way: the draft model's tokens, and the phrases behind the last one."""

    chain: tuple[int, ...] = ()
    phrases: tuple[Entry, ...] = ()


@dataclass(frozen=True, eq=False)
class OuroborosState:
    """The draft model's loop, with the rows' pools in it; what rows were drafted, and their pools before the draft."""

    decoder: Decoder = shared()
    loop: Any = parts()
    lookahead: LookaheadDrafter = shared()
    vocab_size: int = shared()
    asked: tuple[WrittenChain, ...] = per_row()
    before: tuple[LookaheadRow, ...] = scratch(())

    @property
    def inner(self) -> LookaheadState:
        """The state of the lookahead inside, which has the pools."""
        return self.decoder.drafts(self.loop)

    def pools(self) -> tuple[NgramPool, ...]:
        """Return the pool of every row."""
        return self.inner.pools()

    def with_inner(self, inner: LookaheadState) -> "OuroborosState":
        """Return the same with another."""
        return replace(self, loop=self.decoder.drafting(self.loop, inner))

    def resumes(self, fresh: "OuroborosState") -> bool:
        """Tell whether both are of the same model and lookahead."""
        same = same_model(self.loop.reader.model, fresh.loop.reader.model)
        return same and self.lookahead is fresh.lookahead


@dataclass(frozen=True, eq=False)
class OuroborosDrafter(GivenDrafter):
    """Drafts with a model that itself decodes by lookahead, and lengthens its drafts by phrases.

    The draft model writes a chain at temperature 0, several tokens per pass, thanks to n-grams that it finds beside
    its own text (`LookaheadDrafter`). Behind the chain's last token the newest phrases of the pool follow as branches,
    which cost no pass of the draft model. What the target says of them comes back into the same pool: where it
    rejects, runs of its own tokens that the rejected drafts agree with, one place later, are new phrases; and phrases
    that were scored are replaced by what the target would have said in their place, wherever they stand in the pool by
    then.

    All tokens are fixed when the target's pass begins, so that the text is exact at every temperature.

    Args:
        draft_model: the draft model, or its drafter; `model` is the model itself.
        drafts: tokens of the chain; at most as deep as the policy's trees.
        phrases: branches behind it; 0 for none.
        level, window, guesses: those of the lookahead inside; phrases have `level` - 1 tokens.
        pool_from_prompt: whether n-grams of the prompt and the text go into the pool too.
        pool: what every text begins with, such as the pool of earlier texts of the same kind; None for nothing.
        most_scored: tokens that lookahead may add to a pass of the draft model, in all rows together.

    Raises:
        InvalidParameter: a number is too small, the window is larger than the draft model's context, or what drafts is
            no single model.
        UnsupportedModel: the draft model scores chains only, or has an encoder.
        VocabularyMismatch: at the start, if the vocabularies differ by more than padding, or the pool's is another.

    Source: Zhao et al., arXiv 2402.13720; github.com/thunlp/Ouroboros, which refines by place and not by entry.
    """

    draft_model: LanguageModel | Drafter
    drafts: int = 6
    phrases: int = 3
    level: int = 5
    window: int = 7
    guesses: int = 7
    pool_from_prompt: bool = False
    pool: NgramPool | None = None
    most_scored: int = MOST_SCORED
    model: LanguageModel = field(init=False)
    lookahead: LookaheadDrafter = field(init=False)
    trees: TreePolicy = field(init=False)
    rule: FollowLikeliest = field(init=False)
    name = "ouroboros"
    sound = True

    def __post_init__(self) -> None:
        for name, least in (("drafts", 1), ("phrases", 0)):
            check_count(name, getattr(self, name), least, "an integer")
        model = _single(self.draft_model)
        numbers = (self.level, self.window, self.guesses)
        inner = LookaheadDrafter(*numbers, self.pool_from_prompt, self.pool, self.most_scored)
        if inner.needs.riders >= model.facts.context:
            raise InvalidParameter(
                f"The window has {inner.needs.riders} tokens, more than the draft model's context of "
                f"{model.facts.context}."
            )
        trees = inner.defaults(LIKELIEST).policy  # one for all loops, so that rows of one may join another
        for key, value in {"model": model, "lookahead": inner, "trees": trees, "rule": FollowLikeliest()}.items():
            object.__setattr__(self, key, value)

    def defaults(self, params: SamplingParams) -> Defaults:
        """Give the chain, and the phrases side by side behind it."""
        branches = (self.phrases, *(1,) * (self.level - 2))
        return Defaults(Given(), TrunkThenBranch(self.drafts, branches) if self.phrases else Chain(self.drafts))

    def start(self, text: Text, session: Session) -> OuroborosState:
        """Begin the draft model's loop, which has read nothing."""
        check_same_size(session.vocab_size, self.model.facts.vocab_size)
        decoder, own = loop_inside(self.name, session, LIKELIEST)
        loop = decoder.begin(self.model, self.lookahead, self.rule, self.trees, text, own)
        asked = (WrittenChain(),) * len(text.counts)
        return OuroborosState(decoder, loop, self.lookahead, session.vocab_size, asked)

    def read(self, state: OuroborosState, text: Text, features: Features | None) -> OuroborosState:
        """Read the prompts but for their last tokens."""
        return replace(state, loop=state.decoder.read(state.loop, text))

    def draft(self, state: OuroborosState, request: DraftRequest) -> tuple[Draft, OuroborosState]:
        """Let the draft model write, and put phrases behind."""
        text, scheme, policy, noise = request.text, request.scheme, request.policy, request.noise
        bounds = Bounds.of(policy)
        length = min(self.drafts, bounds.depth, bounds.nodes)
        if not length:
            return Draft.nothing(text.last()), replace(state, asked=(WrittenChain(),) * len(state.asked))
        chains, after = self._written(state, text, length, noise)
        asked = tuple(
            WrittenChain(chain, own.pool.of(chain[-1], min(self.phrases, bounds.children)))
            for chain, own in zip(chains, after.inner.rows, strict=True)
        )
        found = [_guess(one).within(bounds, state.vocab_size) for one in asked]
        return given(text, found, scheme), replace(after, asked=asked, before=state.inner.rows)

    def commit(self, state: OuroborosState, step: Step) -> OuroborosState:
        """Let the draft model go on from what was kept, and put what the target said into the pools.

        Rows for which another drafter drafted have the windows and pools of before, as if nobody had asked.
        """
        likeliest, trees = step.scored.logits.argmax(dim=-1).tolist(), _children(step.tree)
        loop, rows = state.loop, list[LookaheadRow]()
        told = zip(state.asked, state.inner.rows, likeliest, trees, step.verdict.kept, strict=True)
        for row, (asked, own, said, tree, kept) in enumerate(told):
            loop = cut(loop, row, step.text.counts[row] + min(kept, len(asked.chain)))
            if row in step.others:
                rows.append(state.before[row] if state.before else own)
                continue
            nodes = _walk(tree, 0, asked.chain)
            rows.append(replace(own, pool=taught(own.pool, asked, nodes, tree, said, min(kept, len(nodes)))))
        after = replace(state, loop=loop, asked=(WrittenChain(),) * len(state.asked), before=())
        return after.with_inner(replace(after.inner, rows=tuple(rows)))

    def _written(
        self, state: OuroborosState, text: Text, length: int, noise: Noise
    ) -> tuple[list[tuple[int, ...]], OuroborosState]:
        """Let the draft model write so many tokens in each row.

        Rows that have theirs wait for the others, with the windows and pools that they have by then: what comes of a
        row is not to depend on how long its neighbours take.
        """
        rows = range(len(text.counts))
        written, done = [list[int]() for _ in rows], dict[int, LookaheadRow]()
        after = replace(state, loop=state.decoder.on(state.loop, text, noise.fork(0)))
        while len(done) < len(written):
            loop, step = after.decoder.step(after.loop)
            after, tokens = replace(after, loop=loop), step.verdict.tokens(step.tree).tolist()
            for row, kept in enumerate(step.verdict.kept):
                written[row] += tokens[row][: kept + 1]
                if len(written[row]) >= length:
                    done.setdefault(row, after.inner.rows[row])
        inner = replace(after.inner, rows=tuple(done[row] for row in rows))
        return [tuple(own[:length]) for own in written], after.with_inner(inner)


def taught(
    pool: NgramPool, asked: WrittenChain, nodes: Sequence[int], tree: "Children", said: Sequence[int], kept: int
) -> NgramPool:
    """Return a pool with what the target said of a row's drafts.

    Args:
        pool: the row's.
        asked: what was drafted.
        nodes: the nodes of the chain, as far as it was scored.
        tree: the children of each node, by token.
        said: the target's likeliest token behind each node.
        kept: how many of the chain were accepted.
    """
    chain = asked.chain[: len(nodes)]
    behind = [said[node] for node in nodes]
    pool = pool.added(confirmed(chain[kept:], behind[kept:], pool.level))
    if not nodes or len(nodes) < len(asked.chain):
        return pool
    better = dict[int, tuple[int, ...]]()
    for one in asked.phrases:
        along = _walk(tree, nodes[-1], one.tokens[:-1])
        if len(along) == len(one.tokens) - 1:
            better[one.number] = (behind[-1], *(said[node] for node in along))
    return pool.refined(chain[-1], better)


def confirmed(drafts: Sequence[int], behind: Sequence[int], level: int) -> list[Phrase]:
    """Return the phrases that rejected drafts and the target agree on.

    What the target holds likeliest behind a draft, behind the next one, and so on, is a phrase of the target's own as
    long as each draft is what it held likeliest behind the one before.

    Args:
        drafts: the chain from the first rejected draft on.
        behind: the target's likeliest token behind each.
        level: tokens of an n-gram, the key included.
    """
    found = list[Phrase]()
    for first in range(len(drafts) - level + 2):
        if all(drafts[place + 1] == behind[place] for place in range(first, first + level - 2)):
            found.append((drafts[first], tuple(behind[first : first + level - 1])))
    return found


Children = dict[tuple[int, int], int]
"""The children of a row's nodes: by node and token."""


def _guess(asked: WrittenChain) -> Guess:
    if not asked.phrases:
        return Guess.chain(np.array(asked.chain, np.int64))
    return newest_first([(*asked.chain, *one.tokens) for one in asked.phrases])


def _children(tree: TokenTree) -> list[Children]:
    rows = zip(tree.parents.tolist(), tree.tokens.tolist(), tree.valid.tolist(), strict=True)
    return [
        {(above, token): node for node, (above, token, there) in enumerate(zip(*row, strict=True)) if there and node}
        for row in rows
    ]


def _walk(tree: Children, node: int, tokens: Sequence[int]) -> list[int]:
    """Return the nodes that tokens lead through below a node, as far as they are there."""
    found = list[int]()
    for token in tokens:
        if (node, token) not in tree:
            break
        node = tree[node, token]
        found.append(node)
    return found


def _single(given: object) -> LanguageModel:
    """Return the draft model that is meant, if it can decode by lookahead."""
    model: Any = given
    if isinstance(given, Drafter):
        models = owned_models(given)
        if len(models) != 1 or owned_networks(given):
            raise InvalidParameter(f"Ouroboros drafts with one draft model, but {given.name} is none.")
        model = models[0]
    if not isinstance(model, LanguageModel):
        raise InvalidParameter(
            f"Ouroboros drafts with a draft model such as HuggingFaceModel(...), not {shown(given)}."
        )
    name = type(module_of(model) or model).__name__
    if not model.facts.branches:
        raise UnsupportedModel(f"{name} scores chains only, but ouroboros needs tokens scored beside them.")
    if model.facts.encodes:
        raise UnsupportedModel(f"{name} has an encoder, whose input ouroboros cannot hand on.")
    return model
