"""What a drafter proposes, checked before it is verified: what is wrong is repaired if that is exact, or refused."""

from dataclasses import replace

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from polydraft.drafters import Needs
from polydraft.errors import InvalidDraft
from polydraft.reading import Text
from polydraft.schemes import Scheme
from polydraft.trees import Draft, Piece, Pieces, Resume, TokenTree, Topology, TreePolicy
from polydraft.trees.frontier import distinct, laws

NOTHING = Needs()


def checked(
    draft: object,
    text: Text,
    scheme: Scheme,
    policy: TreePolicy,
    vocab_size: int,
    needs: Needs = NOTHING,
    drawn: Draft | None = None,
) -> Draft | Pieces:
    """Return what can be verified of a draft, or of drafts by row; see `checked_draft`.

    Args:
        draft: what a drafter returned.
        text: what it drafted for.
        scheme: how its drafts were to be drawn.
        policy: the trees.
        vocab_size: the target's number of tokens.
        needs: what its drafter says of the riders that it brings, and of the drafts at a node.
        drawn: the only draft that `grow` drew for it, if nothing else was drawn.

    Raises:
        InvalidDraft: nothing can be, or it lacks drafts that were drawn.
    """
    if not isinstance(draft, Pieces):
        return checked_draft(draft, text, scheme, policy, vocab_size, needs, drawn)
    if sorted(row for piece in draft.pieces for row in piece.rows) != list(range(len(text.lengths))):
        raise InvalidDraft("The draft's pieces must have every row once.")
    return Pieces(
        tuple(
            Piece(one.rows, checked_draft(one.draft, text.of(one.rows), scheme, policy, vocab_size, needs))
            for one in draft.pieces
        )
    )


def checked_draft(
    draft: object,
    text: Text,
    scheme: Scheme,
    policy: TreePolicy,
    vocab_size: int,
    needs: Needs = NOTHING,
    drawn: Draft | None = None,
) -> Draft:
    """Return a draft that can be verified; `failure` says what had to be repaired. Arguments are those of `checked`.

    Three things are repaired, none of which depends on the drafts that it changes. Ids that the target does not have
    become the one id `vocab_size`, to which it gives no probability: see `known_tokens`, `with_unknown`. Below a row
    that is no law of distinct tokens no draft counts: the row was known before they were drawn. Nor do drafts count of
    which one has no chance in its row: given that all have one, they are draws from it. Riders that cannot be scored
    are left out; the tree beside them is verified, since they may follow from what was drawn.

    Raises:
        InvalidDraft: nothing can be verified, or drafts that were drawn are missing.
    """
    if not isinstance(draft, Draft):
        raise InvalidDraft(f"draft must return a Draft, but returned a {type(draft).__name__}.")
    _check_tensors(draft, text, scheme)
    _check_places(draft, text)
    _check_size(draft, policy.largest.size, needs.most_children(policy))
    _check_gaps(draft.tree, scheme)
    draft = draft if drawn is None else _as_drawn(draft, drawn, scheme)
    if draft.whole and not _is_whole(draft, vocab_size):
        draft = replace(draft, whole=False)
    known = _with_one_unknown(_with_usable_rows(draft, scheme), vocab_size)
    return _with_usable_riders(known, vocab_size, needs.riders)


def _as_drawn(draft: Draft, drawn: Draft, scheme: Scheme) -> Draft:
    """Return a draft with the rows that its tokens were drawn from, which is what it must say."""
    if draft.tree.parents.equal(drawn.tree.parents):
        told = (draft.tree.tokens, draft.tree.valid, draft.atoms, draft.shortlist, draft.probs)
        true = (drawn.tree.tokens, drawn.tree.valid, drawn.atoms, drawn.shortlist, drawn.probs)
        if all(one.equal(other) for one, other in zip(told, true, strict=True)):
            return draft
        if scheme.deterministic:  # fixed drafts may be changed and dropped
            return draft
        failure = draft.failure or InvalidDraft("The draft is not the one that was drawn: tokens or rows are others.")
        tree = drawn.tree
        rows = {name: getattr(drawn, name) for name in ("atoms", "shortlist", "probs", "sound")}
        return replace(draft, tree=tree, **rows, failure=failure)
    if not scheme.deterministic and bool((_size(draft) < _size(drawn)).any()):
        raise InvalidDraft("The draft lacks drafts that were drawn for it; which ones are dropped may bias the text.")
    return draft


def _size(draft: Draft) -> Int[Tensor, "b"]:
    return draft.tree.valid.sum(dim=-1)


def _with_usable_riders(draft: Draft, vocab_size: int, most: int) -> Draft:
    try:
        _check_riders(draft, vocab_size, most)
    except InvalidDraft as failure:
        return replace(draft, riders=None, embeddings=None, failure=draft.failure or failure)
    return draft


def _check_riders(draft: Draft, vocab_size: int, most: int) -> None:
    """Check that there is room for the riders, and a token or a learnt embedding for each."""
    riders, (batch, nodes) = draft.riders, draft.tree.tokens.shape
    if riders is None:
        return
    count = riders.tokens.shape[-1]
    shapes = (riders.tokens.shape, riders.places.shape, riders.valid.shape, riders.sees.shape)
    if shapes != ((batch, count),) * 3 + ((batch, count, nodes + count),):
        raise InvalidDraft(f"The draft's riders must have shapes (b, r) and (b, r, n + r), but have {shapes}.")
    if count > most:
        raise InvalidDraft(f"The draft has {count} riders, but its drafter says that it brings {most} at most.")
    known = vocab_size + (0 if draft.embeddings is None else len(draft.embeddings))
    least, largest = riders.tokens.aminmax() if riders.tokens.numel() else (0, 0)
    if int(least) < 0 or int(largest) >= known:
        raise InvalidDraft(f"Riders must be tokens or learnt embeddings, 0 to {known - 1}.")


def _check_tensors(draft: Draft, text: Text, scheme: Scheme) -> None:
    """Check types, sizes and places in memory, which costs no look at numbers."""
    _check_kind("tree", draft.tree, TokenTree)
    _check_kind("tree.topology", draft.tree.topology, Topology)
    if draft.resume is not None:
        _check_kind("resume", draft.resume, Resume)
    batch, nodes, places = len(text.lengths), _last_size(draft.tree.tokens), _last_size(draft.shortlist)
    several = tuple(draft.probs.shape[2:-1][:1]) if scheme.several_rows else ()
    expected: tuple[tuple[str, object, tuple[int, ...], torch.dtype | None], ...] = (
        ("tree.tokens", draft.tree.tokens, (batch, nodes), torch.int64),
        ("tree.parents", draft.tree.parents, (batch, nodes), torch.int64),
        ("tree.valid", draft.tree.valid, (batch, nodes), torch.bool),
        ("atoms", draft.atoms, (batch, nodes), torch.int64),
        ("shortlist", draft.shortlist, (batch, nodes, places), torch.int64),
        ("probs", draft.probs, (batch, nodes, *several, places), None),
    )
    sound = () if draft.sound is None else (("sound", draft.sound, (batch,), torch.bool),)
    for name, found, shape, kind in (*expected, *sound):
        _check_tensor(name, found, shape, kind, text.tokens.device)


def _check_kind(name: str, found: object, kind: type) -> None:
    if not isinstance(found, kind):
        raise InvalidDraft(f"The draft's {name} must be a {kind.__name__}, but is a {type(found).__name__}.")


def _last_size(found: object) -> int:
    return found.shape[-1] if isinstance(found, Tensor) and found.dim() else 0


def _check_tensor(
    name: str, found: object, shape: tuple[int, ...], kind: torch.dtype | None, device: torch.device
) -> None:
    if not isinstance(found, Tensor):
        raise InvalidDraft(f"The draft's {name} must be a tensor, but is of type {type(found).__name__}.")
    if tuple(found.shape) != shape or 0 in shape:
        raise InvalidDraft(
            f"The draft's {name} must have shape {shape}, all sizes positive, but has {tuple(found.shape)}."
        )
    if found.dtype != kind if kind is not None else not found.is_floating_point():
        wanted = kind or "a floating point type"
        raise InvalidDraft(f"The draft's {name} must be of type {wanted}, but is of type {found.dtype}.")
    if found.device != device:
        raise InvalidDraft(f"The draft's {name} must be on {device}, where the text is, but is on {found.device}.")


def _check_size(draft: Draft, size: int, most: int) -> None:
    """Check that there is room for the trees in the caches, and that the verifier was asked about such trees."""
    tree, nodes = draft.tree, draft.tree.tokens.shape[-1]
    most = most if draft.most_children is None else min(most, draft.most_children)
    if nodes > size:
        raise InvalidDraft(f"The draft's trees have {nodes} nodes, but the policy's have at most {size}.")
    if nodes > 1 and tree.topology.width > most:
        raise InvalidDraft(f"The draft has a node with {tree.topology.width} drafts, but was to have {most} at most.")


def _check_gaps(tree: TokenTree, scheme: Scheme) -> None:
    """Check that no draft comes behind one that is not there: rules take drafts up to the first that is absent.

    What a deterministic scheme takes is verified by its tokens, wherever they stand.
    """
    there = tree.topology.of_children(tree.valid, 0) > 0
    if not scheme.deterministic and bool((there[..., 1:] & ~there[..., :-1]).any()):
        raise InvalidDraft(f"The draft has {scheme.name} drafts behind one that is not there.")


def _check_places(draft: Draft, text: Text) -> None:
    """Check that every tree hangs below the text, and that its drafts are where their parents' lists say."""
    tree = draft.tree
    order = torch.arange(tree.tokens.shape[-1], device=tree.tokens.device)
    above, inside = (
        tree.parents.clamp(0, len(order) - 1),
        (draft.atoms >= 0) & (draft.atoms < draft.shortlist.shape[-1]),
    )
    named = _named(draft.shortlist, above, draft.atoms.where(inside, 0))
    told = {
        "The draft's roots must be the last tokens of the texts.": tree.valid[:, 0]
        & (tree.tokens[:, 0] == text.last()),
        "The draft's parents must be -1 for the root and smaller numbers than their children's, from 0, for others.": (
            (tree.parents >= 0) == (order > 0)
        )
        & (tree.parents >= -1)
        & (tree.parents < order),
        "The draft has valid nodes below nodes that are not.": tree.valid.gather(-1, above) | ~tree.valid,
        "The draft has nodes whose atom is not the place of their token in their parent's shortlist.": (
            inside & ((named == tree.tokens) | (named < 0))
        )
        | (order == 0)
        | ~tree.valid,
    }
    fine = torch.stack([found.all() for found in told.values()]).tolist()
    for text_of_it, holds in zip(told, fine, strict=True):
        if not holds:
            raise InvalidDraft(text_of_it)


def _named(listed: Int[Tensor, "b n K"], above: Int[Tensor, "b n"], atoms: Int[Tensor, "b n"]) -> Int[Tensor, "b n"]:
    """Return the ids that stand at the nodes' atoms in the lists above them; `grow` makes a negative one 0 in trees."""
    return listed[torch.arange(len(above), device=above.device).unsqueeze(-1), above, atoms]


def _with_usable_rows(draft: Draft, scheme: Scheme) -> Draft:
    """Drop what was drawn below rows that are no laws, and these rows with their lists, so that the node is a leaf."""
    tree, probs = draft.tree, draft.probs
    empty = (probs == 0).flatten(2).all(dim=-1) & ~_have_drafts(tree)
    usable = (laws(probs).all(dim=-1) | empty) & (draft.whole | distinct(draft.shortlist))
    if not scheme.deterministic:
        usable &= _possible(draft)
    if bool(usable.all()):
        return draft
    own = torch.eye(tree.tokens.shape[-1], dtype=torch.bool, device=tree.tokens.device)
    kept = ~(tree.ancestors & ~own & ~usable.unsqueeze(-2)).any(dim=-1)
    failure = InvalidDraft(
        "The draft has rows that are no laws of distinct tokens: negative, NaN, of a sum other than 1, or without the "
        "tokens that were drawn."
    )
    return replace(
        draft,
        tree=replace(tree, valid=tree.valid & kept),
        shortlist=draft.shortlist.where(usable.unsqueeze(-1), -1),
        probs=probs.where(usable.view(*usable.shape, *[1] * (probs.dim() - 2)), 0),
        whole=False,
        failure=draft.failure or failure,
    )


def _possible(draft: Draft) -> Bool[Tensor, "b n"]:
    """Tell at which nodes every draft has a chance in the row that it is said to be drawn from."""
    tree, order = draft.tree, torch.arange(len(draft.atoms), device=draft.atoms.device).unsqueeze(-1)
    above, atoms = tree.parents.clamp_min(0), draft.atoms.clamp(0, draft.probs.shape[-1] - 1)
    rows = (tree.topology.rank % draft.probs.shape[2],) if draft.probs.dim() == 4 else ()
    strange = (draft.probs[order, above, *rows, atoms] <= 0) & tree.valid & (tree.parents >= 0)
    return ~torch.zeros_like(strange, dtype=torch.int64).scatter_add_(-1, above, strange.long()).bool()


def _have_drafts(tree: TokenTree) -> Bool[Tensor, "b n"]:
    counts = torch.zeros_like(tree.tokens)
    return counts.scatter_add_(-1, tree.parents[:, 1:], tree.valid[:, 1:].long()) > 0


def _with_one_unknown(draft: Draft, vocab_size: int) -> Draft:
    """Give all ids that the target does not have one id, the first after its own; padding gets any id."""
    tree, listed = draft.tree, draft.shortlist
    named = _named(listed, tree.parents.clamp_min(0), draft.atoms.clamp(0, listed.shape[-1] - 1))
    given = named.where((named < 0) & tree.valid & (tree.parents >= 0), tree.tokens)
    strange = (given < 0) | (given >= vocab_size)
    drawn_from = draft.probs if draft.probs.dim() == 3 else draft.probs.amax(dim=-2)
    unlisted = (listed >= vocab_size) | (listed < -1) | ((listed == -1) & (drawn_from > 0))
    in_tree, in_lists, _ = found = torch.stack([(strange & tree.valid).any(), unlisted.any(), strange.any()]).tolist()
    if not any(found):
        return draft
    tokens = tree.tokens.masked_fill(strange & tree.valid, vocab_size).masked_fill(strange & ~tree.valid, 0)
    draft = replace(draft, tree=replace(tree, tokens=tokens))
    if not (in_tree or in_lists):
        return draft
    ids = [*given[strange & tree.valid].tolist(), *listed[unlisted].tolist()]
    failure = InvalidDraft(f"The draft has the token {ids[0]}, but the target's tokens are 0 to {vocab_size - 1}.")
    listed = listed.masked_fill(unlisted, vocab_size)
    return replace(draft, shortlist=listed, whole=False, failure=draft.failure or failure)


def _is_whole(draft: Draft, vocab_size: int) -> bool:
    listed: Int[Tensor, "b n K"] = draft.shortlist[:, : draft.tree.topology.inner]
    order = torch.arange(vocab_size, device=listed.device)
    return listed.shape[-1] == vocab_size and bool((listed == order).all())
