"""The decode loop: draft a tree, score it, verify it, keep the accepted path, yield what was gained."""

from collections.abc import Iterator
from itertools import count

import torch
from jaxtyping import Int
from torch import Tensor

from polydraft.drafters import Drafter, Session, Text
from polydraft.engine.block import Block, Emission
from polydraft.engine.stopping import Limits
from polydraft.engine.target_law import TargetLaw
from polydraft.errors import ContextOverflow
from polydraft.models import Cache, LanguageModel
from polydraft.probs import Noise
from polydraft.trees import TokenTree, TreePolicy, Verdict, causal_mask, tree_mask
from polydraft.verifiers import TreeVerifier


@torch.inference_mode()
def decode(
    target: LanguageModel,
    drafter: Drafter,
    verifier: TreeVerifier,
    policy: TreePolicy,
    prompt: Text,
    law: TargetLaw,
    limits: Limits,
    noise: Noise,
) -> Iterator[Block]:
    """Continue every prompt until its row ends; the output law is the target's, whatever is drafted.

    Args:
        target: the model whose law the output follows.
        drafter: proposes token trees.
        verifier: decides what to keep of them, and owns the scheme by which they are drawn.
        policy: the trees' shape.
        prompt: at least one token per row.
        law: how the target's logits become distributions.
        limits: when rows end; every row's maximum must leave room for a token.
        noise: one stream of random numbers per row; the same streams give the same text.

    Raises:
        ContextOverflow: a prompt leaves no room.
        InvalidProbabilities: the target's logits are NaN or infinite.
        UnpairedScheme: the drafter cannot draft under the verifier's scheme.
    """
    check_room(prompt, limits)
    drafter.check(verifier.scheme)
    capacity = max(limits.max_length) + policy.shape.size + 1
    text = _with_room(prompt, capacity)
    cache = target.new_cache(len(text.lengths), capacity)
    _prefill(target, text, cache)
    state = drafter.start(text, Session(law.params, capacity, target.vocab_size))
    going = set(range(len(text.lengths)))
    for step in count():
        fresh = noise.at(step, text.lengths)
        draft = drafter.draft(state, text, verifier.scheme, policy, fresh)
        tree, base = draft.tree, text.lengths - 1
        mask = tree_mask(tree.ancestors, base, int(base.max()) + tree.tokens.shape[1])
        positions = (base.unsqueeze(-1) + tree.depth).clamp_max(target.context - 1)
        logits = target.forward(tree.tokens, positions, mask, cache, base).logits
        verdict = verifier.verify(draft, law.rows(logits, tree, text), fresh)
        cache.keep(base, verdict.path)
        state = drafter.commit(state, text, verdict)
        rows = _emissions(tree, verdict, text, limits, going)
        text = _extended(text, rows)
        going -= {row for row, gained in rows.items() if gained.finish}
        yield Block(rows, tree, verdict)
        if not going:
            return


def check_room(prompt: Text, limits: Limits) -> None:
    """Check that every prompt has a token and leaves room for one.

    Raises:
        ContextOverflow: a prompt is empty, or as long as its limit.
    """
    for length, most in zip(prompt.lengths.tolist(), limits.max_length, strict=True):
        if length < 1:
            raise ContextOverflow("The prompt is empty: give at least one token.")
        if length >= most:
            raise ContextOverflow(f"The prompt has {length} tokens, but at most {most} fit, one of them new.")


def _with_room(prompt: Text, capacity: int) -> Text:
    tokens = prompt.tokens.new_zeros(len(prompt.lengths), capacity)
    tokens[:, : prompt.tokens.shape[1]] = prompt.tokens[:, :capacity]
    return Text(tokens, prompt.lengths.clone())


def _prefill(target: LanguageModel, text: Text, cache: Cache) -> None:
    """Score every prompt but for its last token, which is the first tree's root."""
    known = text.lengths - 1
    width = int(known.max())
    if width > 0:
        positions = torch.arange(width, device=known.device).expand(len(known), width)
        mask = causal_mask(known, width)
        starts = torch.zeros_like(known)
        target.forward(text.tokens[:, :width], positions, mask, cache, starts, logits_to_keep=1)


def _emissions(tree: TokenTree, verdict: Verdict, text: Text, limits: Limits, going: set[int]) -> dict[int, Emission]:
    """Read the verdict back and cut each unfinished row's gain at its end."""
    tokens, kept = verdict.tokens(tree).tolist(), verdict.length.tolist()
    drafted = (tree.valid.sum(dim=-1) - 1).tolist()
    deeper = _has_drafts(tree, verdict).tolist()
    return {
        row: limits.cut(row, text, tokens[row][: kept[row] + 1], kept[row], drafted[row], deeper[row])
        for row in sorted(going)
    }


def _has_drafts(tree: TokenTree, verdict: Verdict) -> Tensor:
    """Tell for each row whether the node at which the path ends had drafts."""
    ends = torch.cat([torch.zeros_like(verdict.length).unsqueeze(-1), verdict.path], dim=-1)
    last = ends.gather(-1, verdict.length.unsqueeze(-1))
    return ((tree.parents == last) & tree.valid).any(dim=-1)


def _extended(text: Text, rows: dict[int, Emission]) -> Text:
    lengths = text.lengths.clone()
    for row, gained in rows.items():
        first = int(lengths[row])
        new: Int[Tensor, " s"] = torch.tensor(gained.tokens, device=text.tokens.device)
        text.tokens[row, first : first + len(gained.tokens)] = new
        lengths[row] = first + len(gained.tokens)
    return Text(text.tokens, lengths)
