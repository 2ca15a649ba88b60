"""The decode loop: draft a tree, score it, verify it, keep the accepted path, yield what was gained."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from polydraft.drafters import Drafter, NoDraft, Session, Text, resumed
from polydraft.engine.block import Block, Emission
from polydraft.engine.calls.past import Past
from polydraft.engine.stopping import Limits
from polydraft.engine.target_law import TargetLaw, target_rows
from polydraft.engine.wrappers.door import known_tokens, with_unknown
from polydraft.errors import ContextOverflow, UnpairedScheme
from polydraft.models import Cache, LanguageModel
from polydraft.probs import Noise
from polydraft.schemes import EVERY_SCHEME, require_pairs
from polydraft.trees import (
    TokenTree,
    TreePolicy,
    Verdict,
    causal_mask,
    check_policy,
    largest_shape,
    policy_after,
    tree_mask,
)
from polydraft.verifiers import TreeVerifier


@dataclass(frozen=True, eq=False)
class Method:
    """What decodes a batch.

    Args:
        target: the model whose law the output follows.
        drafter: proposes token trees.
        verifier: decides what to keep of them, and owns the scheme by which they are drawn.
        policy: the trees' shape.
        keeps_scores: whether blocks hold the target's logits and scores, of every node.
    """

    target: LanguageModel
    drafter: Drafter
    verifier: TreeVerifier
    policy: TreePolicy
    keeps_scores: bool = False


@dataclass(frozen=True, eq=False)
class Rows:
    """A batch in mid-text. `step` uses it up when it returns the next one, and leaves it alone if it does not return.

    Args:
        text: the committed tokens.
        laws: per row, how the target's logits become distributions.
        limits: per row, when it ends.
        noise: one stream of random numbers per row.
        steps: per row, the steps it has taken.
        going: the rows that have not ended.
        cache: the target's keys and values.
        drafts: the drafter's state.
        policy: the policy of the next tree; another than the method's if it learns from what was accepted.
    """

    text: Text
    laws: tuple[TargetLaw, ...]
    limits: tuple[Limits, ...]
    noise: Noise
    steps: tuple[int, ...]
    going: frozenset[int]
    cache: Cache
    drafts: Any
    policy: TreePolicy


def decode(
    method: Method, prompt: Text, laws: Sequence[TargetLaw], limits: Sequence[Limits], noise: Noise
) -> Iterator[Block]:
    """Continue every prompt until its row ends; the output law is the target's, whatever is drafted.

    Args:
        method: target, drafter, verifier and tree policy.
        prompt: at least one token per row.
        laws: per row, how the target's logits become distributions.
        limits: per row, when it ends; the maximum must leave room for a token.
        noise: one stream of random numbers per row; the same streams give the same text.

    Raises:
        ContextOverflow: a prompt leaves no room.
        InvalidProbabilities: the target's logits are NaN or infinite.
        UnpairedScheme: the drafter cannot draft under the verifier's scheme.
    """
    rows = begin(method, prompt, laws, limits, noise, capacity_for(method, limits))
    while rows.going:
        rows, block = step(method, rows)
        yield block


def capacity_for(method: Method, limits: Sequence[Limits]) -> int:
    """Return the key slots that the longest row and one tree need."""
    return max(limit.max_length for limit in limits) + largest_shape(method.policy).size + 1


@torch.inference_mode()
def begin(
    method: Method,
    prompt: Text,
    laws: Sequence[TargetLaw],
    limits: Sequence[Limits],
    noise: Noise,
    capacity: int,
    past: Past | None = None,
) -> Rows:
    """Score the prompts and start the drafter; errors are those of `decode`.

    What the past of a single row knows already is copied and not scored again; the past stays as it is.
    """
    check_room(prompt, limits)
    method.drafter.check(method.verifier.scheme)
    text = _with_room(prompt, capacity)
    batch = len(text.lengths)
    cache = method.target.new_cache(batch, capacity)
    known = past.known(text) if past else 0
    if past and known:
        cache.join(0, past.cache, known)
    _prefill(method.target, text, cache, known)
    idle = not method.policy.shape.counts
    session = Session(laws[0].params, capacity, method.target.vocab_size, idle)
    if past:
        drafts = resumed(method.drafter, past.drafts, past.text, text, known, session)
    else:
        drafts = method.drafter.start(text, session)
    going = frozenset(range(batch))
    return Rows(text, tuple(laws), tuple(limits), noise, (0,) * batch, going, cache, drafts, method.policy)


@torch.inference_mode()
def step(method: Method, rows: Rows) -> tuple[Rows, Block]:
    """Draft, score, verify and commit once, for all rows.

    A step that was interrupted may be taken again with the same rows, and is the same step: its random numbers follow
    from the rows' seeds and steps, and until it returns it writes only where nothing was committed yet.
    """
    text = rows.text
    fresh = rows.noise.at(rows.steps, text.lengths)
    draft = method.drafter.draft(rows.drafts, text, method.verifier.scheme, rows.policy, fresh)
    tree, base = known_tokens(draft, method.target.vocab_size), text.lengths - 1
    mask = tree_mask(tree.ancestors, base, int(base.max()) + tree.tokens.shape[1])
    positions = (base.unsqueeze(-1) + tree.depth).clamp_max(method.target.context - 1)
    logits = method.target.forward(tree.tokens, positions, mask, rows.cache, base).logits
    target = target_rows(rows.laws, logits, tree, text, rows.going)
    verdict = method.verifier.verify(draft, with_unknown(draft, target.probs), fresh)
    rows.cache.keep(base, verdict.path)
    drafts = method.drafter.commit(rows.drafts, text, verdict)
    gains = _emissions(tree, verdict, rows)
    after = replace(
        rows,
        text=_extended(text, gains),
        laws=target.laws_after(rows.laws, verdict),
        steps=tuple(taken + 1 for taken in rows.steps),
        going=rows.going - {row for row, gained in gains.items() if gained.finish},
        drafts=drafts,
        policy=policy_after(rows.policy, tree, verdict),
    )
    kept = (logits, target.scores) if method.keeps_scores else ()
    return after, Block(gains, tree, verdict, *kept)


def check_room(prompt: Text, limits: Sequence[Limits]) -> None:
    """Check that every prompt has a token and leaves room for one.

    Raises:
        ContextOverflow: a prompt is empty, or as long as its limit.
    """
    for length, limit in zip(prompt.lengths.tolist(), limits, strict=True):
        most = limit.max_length
        if length < 1:
            raise ContextOverflow("The prompt is empty: give at least one token.")
        if length >= most:
            raise ContextOverflow(f"The prompt has {length} tokens, but at most {most} fit, one of them new.")


def check_drafting(drafter: Drafter, verifier: TreeVerifier, policy: TreePolicy) -> None:
    """Check that a drafter can draw such trees as the verifier needs them.

    Raises:
        UnpairedScheme: it cannot draft under the verifier's scheme, or the scheme has no drafts for so many children.
    """
    try:
        drafter.check(verifier.scheme)
    except UnpairedScheme as refusal:
        raise UnpairedScheme(f"{str(refusal).rstrip('.')}; {_fitting_verifier(drafter)}.") from refusal
    if not isinstance(drafter, NoDraft):
        require_pairs(verifier.scheme, largest_shape(policy).max_children)
        check_policy(policy, verifier.scheme)


def _fitting_verifier(drafter: Drafter) -> str:
    """Say which verifier to pass: naive match, exact for all drafts, with the first scheme that the drafter takes."""
    for scheme in EVERY_SCHEME:
        try:
            drafter.check(scheme)
        except UnpairedScheme:
            continue
        return f"pass a verifier of such drafts, for example verifier=TopDown(NaiveMatch({scheme}))"
    return "it takes none of this package's schemes, so pass a verifier of its own"


def _with_room(prompt: Text, capacity: int) -> Text:
    tokens = prompt.tokens.new_zeros(len(prompt.lengths), capacity)
    tokens[:, : prompt.tokens.shape[1]] = prompt.tokens[:, :capacity]
    return Text(tokens, prompt.lengths.clone())


def _prefill(target: LanguageModel, text: Text, cache: Cache, first: int) -> None:
    """Score every prompt but for its last token, which is the first tree's root, from the `first` on."""
    inside = text.lengths - 1
    width = int(inside.max())
    if width > first:
        positions = torch.arange(first, width, device=inside.device).expand(len(inside), width - first)
        mask = causal_mask(inside, width, first)
        starts = torch.full_like(inside, first)
        target.forward(text.tokens[:, first:width], positions, mask, cache, starts, logits_to_keep=1)


def _emissions(tree: TokenTree, verdict: Verdict, rows: Rows) -> dict[int, Emission]:
    """Read the verdict back and cut each unfinished row's gain at its end."""
    tokens, kept = verdict.tokens(tree).tolist(), verdict.length.tolist()
    drafted = (tree.valid.sum(dim=-1) - 1).tolist()
    deeper, lengths = _has_drafts(tree, verdict), rows.text.lengths.tolist()
    return {
        row: rows.limits[row].cut(
            rows.text.tokens[row, : lengths[row]], tokens[row][: kept[row] + 1], kept[row], drafted[row], deeper[row]
        )
        for row in sorted(rows.going)
    }


def _has_drafts(tree: TokenTree, verdict: Verdict) -> list[bool]:
    """Tell for each row whether the node at which the path ends had drafts."""
    if tree.tokens.shape[-1] == 1:
        return [False] * len(verdict.length)
    if tree.tokens.device.type == "cpu":
        rows = zip(
            verdict.path.tolist(), verdict.length.tolist(), tree.parents.tolist(), tree.valid.tolist(), strict=True
        )
        ends = [([0, *path][length], parents, valid) for path, length, parents, valid in rows]
        return [(end, True) in zip(parents, valid, strict=True) for end, parents, valid in ends]
    ends = torch.cat([torch.zeros_like(verdict.length).unsqueeze(-1), verdict.path], dim=-1)
    last = ends.gather(-1, verdict.length.unsqueeze(-1))
    return ((tree.parents == last) & tree.valid).any(dim=-1).tolist()


def _extended(text: Text, rows: dict[int, Emission]) -> Text:
    lengths = text.lengths.clone()
    for row, gained in rows.items():
        first = int(lengths[row])
        new: Int[Tensor, " s"] = torch.tensor(gained.tokens, device=text.tokens.device)
        text.tokens[row, first : first + len(gained.tokens)] = new
        lengths[row] = first + len(gained.tokens)
    return Text(text.tokens, lengths)
