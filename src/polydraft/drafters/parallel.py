"""Drafters that fill mask slots: all levels of a tree come out of one pass of a draft model.

Behind the text stand mask tokens, and row d of the pass is the draft row of every node of depth d, whatever tokens were
drafted above: rows follow from the committed text alone. A path term adds what it makes of the token above. Either way
each is fixed before a child is drawn from it, and every scheme and rule applies.
"""

from dataclasses import dataclass, replace
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.drafters.contract import Defaults, Drafter, DraftRequest, Needs, Session
from polydraft.drafters.heads.paths import Markov
from polydraft.drafters.model import SAMPLED, ModelDraftState, check_listed, draft_rows, listed, runnable
from polydraft.errors import InvalidParameter, UnsupportedModel, is_whole, shown
from polydraft.models import Encoded, LanguageModel, check_same_size, encoded, filled, module_of
from polydraft.probs import SamplingParams
from polydraft.reading import Features, Reader, Step, Text
from polydraft.rows import per_row, shared
from polydraft.schemes import IID, Scheme, TopK, require_scheme
from polydraft.trees import BestFirst, Chain, Draft, Frontier, Riders, grow

DEPTH = 8
"""How deep PARD's models are trained to draft."""


def refused_mask(model: LanguageModel, mask_id: object) -> str:
    """Return why a token cannot be a draft model's mask; empty if it can."""
    known = model.facts.vocab_size
    if not isinstance(mask_id, int) or isinstance(mask_id, bool):
        return "it must be the number of a token"
    if not 0 <= mask_id < known:
        return f"the model's embedding has {known} rows, so it must be below {known}"
    return "that token ends a text, so it cannot be a mask" if mask_id in _ends(model) else ""


def _ends(model: LanguageModel) -> list[int]:
    """Return the tokens that end a draft model's texts, as far as its configurations say."""
    module = module_of(model)
    configs = [getattr(module, name, None) for name in ("config", "generation_config")]
    ends = [getattr(config, "eos_token_id", None) for config in configs]
    return [token for one in ends if one is not None for token in (one if isinstance(one, list | tuple) else [one])]


def behind(tokens: Int[Tensor, "b k"]) -> Riders | None:
    """Return tokens behind the last ones of texts, each of which sees those before it; None for none."""
    (rows, count), device = tokens.shape, tokens.device
    if not count:
        return None
    places = torch.arange(1, count + 1, device=device).expand(rows, -1)
    seen = torch.ones(count, 1 + count, dtype=torch.bool, device=device).tril_(1)
    return Riders(tokens, places, seen.expand(rows, -1, -1), torch.ones_like(tokens, dtype=torch.bool))


def slot_draft(
    rows: Float[Tensor, "b k V"],
    request: DraftRequest,
    params: SamplingParams,
    asked: int | None,
    vocab_size: int,
    path: Markov | None = None,
) -> Draft:
    """Grow a tree in which all nodes of a depth have one slot; below the last one it is drafted from again.

    Args:
        rows: the logits of the slots, the first draft's first.
        request: what is drafted for.
        params: the draft's sampling settings.
        asked: the length of shortlists, as for `ModelDrafter`.
        vocab_size: the target's number of tokens.
        path: what the rows of nodes below the root gain by their own tokens; None for nothing.
    """
    scheme, policy = request.scheme, request.policy
    size = listed(asked, scheme, policy, vocab_size)

    def propose(frontier: Frontier) -> tuple[Int[Tensor, "b f K"], Float[Tensor, "b f *J K"]]:
        slot, wide = min(frontier.depth, rows.shape[1] - 1), frontier.tokens.shape[1]
        logits = rows[:, slot : slot + 1]
        if path is not None and frontier.depth:
            logits = path.gained(logits, frontier.tokens)
        tokens, probs = draft_rows(logits[..., :vocab_size], params, size, scheme)
        return tokens.expand(-1, wide, -1), probs.expand(-1, wide, *probs.shape[2:])

    draft = grow(request.text.last(), policy, scheme, propose, request.noise, trusted=True)
    return draft.as_whole() if size is None and rows.shape[-1] >= vocab_size else draft


@dataclass(frozen=True, eq=False)
class ParallelDrafter(Drafter):
    """Drafts with a causal model that was trained to fill masks behind the text (PARD).

    One pass reads what is unread, then K - 1 masks: the last token's row drafts depth 1, mask d's row depth d + 1.
    Masks are riders of the pass, which no committed token sees, and the next pass overwrites their keys. K is the depth
    of the tree, and changes no row, since a mask sees only those before it. A path term is this package's own; with it
    q_d(. | x) = softmax(z_d + W2 W1[x]) at depth d > 1 behind a drafted token x, where z_d is the mask's row.

    Args:
        model: the draft model, or the module that it runs.
        mask_id: its mask token.
        shortlist_size: as for `ModelDrafter`.
        params: the draft's own temperature and filters; None for the target's.
        path: the path term; None for the authors' rows, which know nothing of what was drafted.

    Raises:
        InvalidParameter: a shortlist without a token, something that is no model, a token that can be no mask, or a
            path term of another number of tokens.
        UnsupportedModel: a model that cannot branch, so that it cannot forget masks.
        VocabularyMismatch: at the start, if the vocabularies differ by more than padding.

    Source: arXiv 2504.18583; AMD-AIG-AIMA/PARD, pard/pard_infer.py.
    """

    model: LanguageModel
    mask_id: int
    shortlist_size: int | None = None
    params: SamplingParams | None = None
    path: Markov | None = None
    name = "pard"
    needs = Needs(passes=1)
    sound = True

    def __post_init__(self) -> None:
        check_listed(self.shortlist_size)
        object.__setattr__(self, "model", runnable(self.model))
        _check_mask(self.model, self.mask_id)
        if self.path is not None and self.path.known != self.model.facts.vocab_size:
            raise InvalidParameter(
                f"The path term knows {self.path.known} tokens and the draft model {self.model.facts.vocab_size}; they "
                "must be as many."
            )
        if not self.model.facts.branches:
            raise UnsupportedModel(
                f"{_class(self.model)} cannot take back what it has read, so it cannot draft by masks; take a draft "
                "model whose layers all keep keys."
            )

    def defaults(self, params: SamplingParams) -> Defaults:
        """Draft the likeliest paths at temperature 0, and a drawn chain above it, as deep as is trained for."""
        return Defaults(IID(), Chain(DEPTH)) if params.temperature else Defaults(TopK(), BestFirst(DEPTH))

    def check(self, scheme: Scheme) -> None:
        """Raise `UnpairedScheme` for `Given`, whose drafts come from outside."""
        require_scheme(scheme, SAMPLED, "A draft model that fills masks")

    def start(self, text: Text, session: Session) -> ModelDraftState:
        """Return a reader that has read nothing."""
        check_same_size(session.vocab_size, self.model.facts.vocab_size)
        reader = Reader.new(self.model, len(text.lengths), session.capacity)
        return ModelDraftState(reader, self.params or session.params, session.vocab_size)

    def read(self, state: ModelDraftState, text: Text, features: Features | None) -> ModelDraftState:
        """Read the prompts but for their last tokens."""
        return replace(state, reader=state.reader.catch_up(text)[0])

    @torch.no_grad()
    def draft(self, state: ModelDraftState, request: DraftRequest) -> tuple[Draft, ModelDraftState]:
        """Fill the slots in one pass, and grow a tree from them."""
        text, depth = request.text, request.policy.shape.depth
        if not depth:
            return Draft.nothing(text.last()), state
        root = Draft.nothing(text.last())
        masks = torch.full((len(text.lengths), depth - 1), self.mask_id, device=text.tokens.device)
        scored, reader = state.reader.score(text, root.tree, replace(root, riders=behind(masks)))
        rows = scored.logits if scored.riders is None else torch.cat([scored.logits, scored.riders], dim=1)
        draft = slot_draft(rows, request, state.params, self.shortlist_size, state.vocab_size, self.path)
        return draft, replace(state, reader=reader)

    def commit(self, state: ModelDraftState, step: Step) -> ModelDraftState:
        """Keep what was read: the text up to its last token. Of the drafts nothing was read."""
        return state


@dataclass(frozen=True, eq=False)
class SpecDraftState:
    """What the decoder reads of each row's source, the sampling settings, and the target's number of tokens."""

    sources: tuple[Encoded, ...] = per_row()
    params: SamplingParams = shared()
    vocab_size: int = shared()


@dataclass(frozen=True, eq=False)
class SpecDrafter(Drafter):
    """Drafts with an encoder-decoder whose decoder fills a block of masks behind the text (SpecDec), for another one.

    The decoder has no causal mask: every token of text and block sees all others. So its keys hold for one step only, a
    step costs a pass over the whole text, and there are always as many masks as it was trained with. Rows of a batch
    are read one by one, as those of encoder-decoders are, since each has a source of its own.

    Args:
        model: the draft model, or the module that it runs.
        mask_id: its mask token.
        block: how many masks it was trained with.
        shortlist_size: as for `ModelDrafter`.
        params: the draft's own temperature and filters; None for the target's.

    Raises:
        InvalidParameter: a shortlist without a token, a model without an encoder, a token that can be no mask, or a
            block that its context has no room for.
        VocabularyMismatch: at the start, if the vocabularies differ by more than padding.

    Source: Xia et al., arXiv 2203.16487; hemingkx/SpecDec, specdec_plugins/models/BlockNAT.py and inference_paper.py.
    """

    model: LanguageModel
    mask_id: int
    block: int
    shortlist_size: int | None = None
    params: SamplingParams | None = None
    name = "spec-drafter"
    needs = Needs(passes=1)
    sound = True

    def __post_init__(self) -> None:
        check_listed(self.shortlist_size)
        object.__setattr__(self, "model", runnable(self.model))
        if not self.model.facts.encodes:
            raise InvalidParameter(f"SpecDec's drafter has an encoder, and {_class(self.model)} has none.")
        _check_mask(self.model, self.mask_id)
        context = self.model.facts.context
        if not is_whole(self.block) or not 1 <= self.block < context:
            raise InvalidParameter(
                f"A spec-drafter's block has 1 to {context - 1} masks, as its model reads {context} tokens, but "
                f"{shown(self.block)} are asked for."
            )

    def defaults(self, params: SamplingParams) -> Defaults:
        """Draft a chain through the block: the likeliest tokens at temperature 0, drawn ones above it."""
        return Defaults(IID() if params.temperature else TopK(), Chain(self.block))

    def check(self, scheme: Scheme) -> None:
        """Raise `UnpairedScheme` for `Given`, whose drafts come from outside."""
        require_scheme(scheme, SAMPLED, "SpecDec's drafter")

    def start(self, text: Text, session: Session) -> SpecDraftState:
        """Read the sources; a row without one gets a stand-in, for what is no text."""
        check_same_size(session.vocab_size, self.model.facts.vocab_size)
        sources = session.sources or (None,) * len(text.lengths)
        made = tuple(encoded(self.model, source) for source in sources)
        return SpecDraftState(made, self.params or session.params, session.vocab_size)

    def draft(self, state: SpecDraftState, request: DraftRequest) -> tuple[Draft, SpecDraftState]:
        """Fill the block of every row, and grow a tree from it."""
        text = request.text
        if not request.policy.shape.counts:
            return Draft.nothing(text.last()), state
        fill = partial(filled, self.model, mask_id=self.mask_id, block=self.block)
        texts = [text.tokens[row : row + 1, :count] for row, count in enumerate(text.counts)]
        rows = torch.cat([fill(source, own) for source, own in zip(state.sources, texts, strict=True)])
        return slot_draft(rows, request, state.params, self.shortlist_size, state.vocab_size), state

    def commit(self, state: SpecDraftState, step: Step) -> SpecDraftState:
        """Return the state: nothing is kept of a text."""
        return state


def _check_mask(model: LanguageModel, mask_id: object) -> None:
    why = refused_mask(model, mask_id)
    if why:
        raise InvalidParameter(f"The mask of {_class(model)} is token {shown(mask_id)}; {why}.")


def _class(model: LanguageModel) -> str:
    return type(module_of(model) or model).__name__
