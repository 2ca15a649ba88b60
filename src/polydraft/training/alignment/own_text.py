"""Text that the target wrote, and what a drafter makes of it: its rows on every chain of the text, as in decoding.

A drafter is asked at every place of a text, through its own contract, to draft the text's own tokens. So nothing is
assumed of it: heads whose rows depend on where a step begins, views of the target and models of their own give the rows
that they would draw from. Tokens that follow from the text alone are rows of one token each. A nested draft has the
rows of its middle model, whoever drafts for that, and drafters one behind the other have each its own stretch of the
chain. Who drafts from what became of earlier steps is refused: text does not tell what these were.
"""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, fields, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from polydraft.drafters import Drafter, DraftRequest, Session, is_by_text_alone, stretches
from polydraft.errors import InvalidParameter, UnpairedScheme
from polydraft.models import LanguageModel
from polydraft.probs import Noise, SamplingParams, sample, to_probs
from polydraft.reading import Step, Text, reader_of
from polydraft.schemes import IID, Given, Scheme, Uniforms
from polydraft.trees import Chain, Draft, TokenTree, Verdict, in_pieces

NO_TOKEN = -2
"""What stands behind a text's end; -1 is an empty place of a list."""


@dataclass(frozen=True, eq=False)
class OwnTexts:
    """Texts of a target under some sampling settings.

    Args:
        tokens: prompts and what was written behind them; behind that `NO_TOKEN`.
        given: how many tokens are the prompt's.
        written: how many the target wrote, up to its first end token, that included.
    """

    tokens: Int[Tensor, "b t"]
    given: Int[Tensor, "b"]
    written: Int[Tensor, "b"]

    def first(self, tokens: int) -> "OwnTexts":
        """Return the same texts as if they had ended behind so many tokens."""
        written = self.written.clamp_max(tokens)
        there = torch.arange(self.tokens.shape[1]) < (self.given + written).unsqueeze(-1)
        width = int((self.given + written).max())
        return OwnTexts(self.tokens.where(there, NO_TOKEN)[:, :width], self.given, written)

    def of(self, row: int) -> "OwnTexts":
        """Return one of the texts."""
        return OwnTexts(*(getattr(self, one.name)[row : row + 1] for one in fields(self)))

    def before(self, place: int) -> Text:
        """Return the texts before the token that was written at a place, or before the last one."""
        return Text(self.tokens.clamp_min(0), self.given + (self.written - 1).clamp_max(place))


def own_texts(
    target: LanguageModel,
    prompts: Sequence[Int[Tensor, " _"]],
    params: SamplingParams,
    tokens: int,
    ends: Collection[int],
    seed: int,
    other: tuple[LanguageModel, float] | None = None,
) -> OwnTexts:
    """Let a target write so many tokens behind each prompt, or up to an end token.

    Args:
        other: a second model, and the chance that a token is drawn from its row in place of the target's: text mixed
            by token (DistillSpec, arXiv 2310.08461; Online Speculative Decoding, 2310.07177, whose code draws at
            temperature .001 and by the same numbers in each call).
    """
    given, rows = torch.tensor([len(one) for one in prompts]), torch.arange(len(prompts))
    found = torch.full((len(prompts), int(given.max()) + tokens), NO_TOKEN)
    for row, one in enumerate(prompts):
        found[row, : len(one)] = one
    writers = [(target, 1.0)] if other is None else [(target, 1 - other[1]), other]
    readers = [reader_of(model, len(prompts), found.shape[1] + 1) for model, _ in writers]
    noise, done, written = Noise.from_seed(seed, len(prompts)), torch.zeros_like(given, dtype=torch.bool), given * 0
    with torch.inference_mode():
        for place in range(tokens):
            texts = [_sent(Text(found.clamp_min(0), given + place), model) for model, _ in writers]
            passed = [
                reader.score(text, TokenTree.root_only(text.last()))
                for reader, text in zip(readers, texts, strict=True)
            ]
            laws = [to_probs(scored.logits[:, 0].cpu(), params) for scored, _ in passed]
            law = sum((share * one for (_, share), one in zip(writers, laws, strict=True)), torch.zeros(()))
            token = sample(law, noise.at(place).uniform(1).squeeze(-1).cpu())
            readers = [
                reader.keep(text, _nothing_kept(token.to(text.tokens.device)))
                for (_, reader), text in zip(passed, texts, strict=True)
            ]
            found[rows, given + place] = token.where(~done, NO_TOKEN)
            written += ~done
            done |= torch.isin(token, torch.tensor([*ends], dtype=token.dtype))
            if bool(done.all()):
                break
    return OwnTexts(found, given, written)


@dataclass(frozen=True)
class TextsToken(IID):
    """Draw the text's own token, if the row has it; for `TextNoise`, which marks it by 1."""

    name = "the text's own token"
    uniforms = Uniforms.SHARED

    def sample(
        self, draft_probs: Float[Tensor, "*b K"], counts: Int[Tensor, "*b"], uniforms: Float[Tensor, "*b u"], k: int
    ) -> Int[Tensor, "*b k"]:
        """Return the place that is marked, -1 where none is; nodes have one draft."""
        marked = uniforms.max(-1, keepdim=True)
        return marked.indices.where((marked.values == 1) & (counts > 0).unsqueeze(-1), -1)


@dataclass(frozen=True)
class TextNoise(Noise):
    """Numbers that mark the text's own tokens.

    Args:
        texts: what is drafted.
    """

    texts: Int[Tensor, "b t"] = field(default_factory=lambda: torch.empty(0, 0))

    def tied(self, depth: int, tokens: Int[Tensor, "b *n"]) -> Float[Tensor, "b *n"]:
        """Return 1 for the token that stands `depth` places behind the row's next one, 0 for all others."""
        assert self.lengths is not None
        places = self.lengths + depth
        wanted = self.texts.gather(1, places.clamp_max(self.texts.shape[1] - 1).unsqueeze(-1)).squeeze(-1)
        wanted = wanted.where(places < self.texts.shape[1], NO_TOKEN)
        return (tokens == wanted.view(-1, *[1] * (tokens.dim() - 1))).double()


@dataclass(frozen=True, eq=False)
class ChainsOfText:
    """What a drafter and its target make of the chains that begin at every place of texts and follow them.

    Args:
        ratio: q(x) / p(x) of each draft x, which is the text's token.
        overlap: sum_x min(p, q) of each draft's rows.
        written: how many places each text has.
        reach: how many drafts there are where 1, 2, ... are asked for, if not so many.
    """

    ratio: Float[Tensor, "b n g"]
    overlap: Float[Tensor, "b n g"]
    written: Int[Tensor, "b"]
    reach: tuple[int, ...] = ()

    def mean_overlap(self) -> tuple[float, ...]:
        """Return the mean overlap of each draft over all places that it has in the texts."""
        places, depths = (torch.arange(count) for count in self.ratio.shape[1:])
        there = (places.unsqueeze(-1) + depths < self.written.view(-1, 1, 1)).double()
        return tuple(((self.overlap * there).sum((0, 1)) / there.sum((0, 1)).clamp_min(1)).tolist())


def check_chains(target: LanguageModel, drafter: Drafter, length: int) -> None:
    """Check that a drafter can be asked for so many of the text's own tokens.

    Raises:
        InvalidParameter: its drafts follow from earlier steps, or do with so many drafts, or the target has an encoder.
        UnpairedScheme: it draws from no rows.
    """
    if target.facts.encodes:
        raise InvalidParameter("Texts of a target with an encoder are not measured; give a decoder.")
    for one, _ in stretches(drafter, length):
        try:
            one.check(_scheme(one))
        except UnpairedScheme as refusal:
            raise UnpairedScheme(
                f"The {one.name} drafter does not draw a draft for each place from one row of its own, so that texts "
                "do not tell what it is worth; `polydraft bench` measures it by decoding."
            ) from refusal


def _scheme(drafter: Drafter) -> Scheme:
    return Given() if is_by_text_alone(drafter) else TextsToken()


def chains_of_text(
    target: LanguageModel, drafter: Drafter, texts: OwnTexts, params: SamplingParams, length: int
) -> ChainsOfText:
    """Ask a drafter for a chain at every place of texts that the target wrote under the same settings.

    Raises:
        InvalidParameter: the drafter draws otherwise than from rows of its own, or the target has an encoder.
        UnpairedScheme: likewise.
        TargetMismatch, VocabularyMismatch: it is for another target.
    """
    check_chains(target, drafter, length)
    ratio = torch.zeros(len(texts.given), int(texts.written.max()), length).double()
    overlap, first = torch.zeros_like(ratio), 0
    for one, count in stretches(drafter, length):
        alone = range(len(texts.given)) if one.needs.riders else ()  # a text that has ended has no riders any more
        parts = [_chains(target, one, texts.of(row), params, count) for row in alone]
        for row, found in enumerate(parts or [_chains(target, one, texts, params, count)]):
            rows = slice(row, row + 1) if parts else slice(None)
            for mine, into in ((found.ratio, ratio), (found.overlap, overlap)):
                own = mine[:, first:]
                into[rows, : own.shape[1], first : first + count] = own
        first += count
    reach = tuple(sum(count for _, count in stretches(drafter, asked)) for asked in range(1, length + 1))
    return ChainsOfText(ratio, overlap, texts.written, reach)


@torch.inference_mode()
def _chains(
    target: LanguageModel, drafter: Drafter, texts: OwnTexts, params: SamplingParams, length: int
) -> ChainsOfText:
    """Ask one that drafts whole chains."""
    rows, needs, policy, places = len(texts.given), drafter.needs, Chain(length), int(texts.written.max())
    capacity, scheme = texts.tokens.shape[1] + policy.shape.size + needs.slots + needs.riders + 1, _scheme(drafter)
    reader = reader_of(target, rows, capacity, needs.layers, None, needs.queries)
    text = _sent(texts.before(0), target)
    state = drafter.start(text, Session(params, capacity, target.facts.vocab_size, reader))
    reader, features = reader.catch_up(text)
    state = drafter.read(state, text, features)
    noise, chains = Noise.from_seed(0, rows).generators, deque[_Chain](maxlen=length)
    drawn, own = torch.zeros(rows, places, length).double(), torch.ones(rows, places + length).double()
    overlap = torch.zeros(rows, places, length).double()
    for place in range(places):
        text = _sent(texts.before(place), target)
        marks = TextNoise(noise, lengths=text.lengths.cpu(), texts=texts.tokens)
        draft, state = drafter.draft(state, DraftRequest(text, scheme, policy, marks, reader))
        chains.appendleft(_Chain.of(draft, drafter, marks, certain=not params.temperature))
        drawn[:, place] = chains[0].chances(length)
        beside = in_pieces(draft)[0].draft if needs.riders else None  # riders of the next step lie behind its nodes
        tree = TokenTree.root_only(text.last()) if beside is None else beside.tree
        scored, after = reader.score(text, tree, beside)
        laws = to_probs(scored.logits, params)
        law, token = laws[:, 0].cpu().double(), texts.tokens.gather(1, text.lengths.cpu().unsqueeze(-1)).squeeze(-1)
        own[:, place] = law.gather(-1, token.clamp_min(0).unsqueeze(-1)).squeeze(-1)
        for depth, chain in enumerate(chains):
            overlap[:, place - depth, depth] = chain.overlap(depth, law)
        kept = _nothing_kept(token.clamp_min(0).to(text.tokens.device))
        state = drafter.commit(state, Step(text, tree, scored, laws, kept))
        reader = after.keep(text, kept)
    ratio = drawn / own.unfold(1, length, 1)[:, :places].clamp_min(torch.finfo(torch.float64).tiny)
    return ChainsOfText(ratio, overlap, texts.written)


@dataclass(frozen=True, eq=False)
class _Chain:
    """A chain of the text's tokens: the rows of its inner nodes, and the chances of its drafts."""

    listed: Int[Tensor, "b d K"]
    rows: Float[Tensor, "b d K"]
    drafts: Float[Tensor, "b d"]

    @classmethod
    def of(cls, found: object, drafter: Drafter, marks: TextNoise, *, certain: bool) -> "_Chain":
        pieces = in_pieces(found)  # pyright: ignore[reportArgumentType]  what the drafter gave
        draft: Draft = pieces[0].draft.on_host
        if draft.failure is not None:
            raise draft.failure
        depth = draft.atoms.shape[1] - 1
        there, tokens = draft.tree.valid[:, 1:], draft.tree.tokens[:, 1:]
        asked = [marks.tied(level, tokens[:, level : level + 1]) for level in range(depth)]
        right = torch.cat([torch.ones(len(tokens), 1).double(), *asked], 1)
        chain = draft.tree.parents[0].tolist() == [*range(-1, depth)]
        if is_by_text_alone(drafter):  # a token is a row of its own, and where it is wrong the next has no place
            kept = (right * nn.functional.pad(there, (1, 0), value=True)).cumprod(-1)
            return cls(tokens.where(there, -1).unsqueeze(-1), kept[:, :-1].unsqueeze(-1), kept[:, 1:])
        if len(pieces) > 1 or draft.probs.dim() != 3 or not chain or bool((right[:, 1:] != 1)[there].any()):
            raise InvalidParameter(
                f"The {drafter.name} drafter does not draw from rows of its own alone; measure the draft model or head "
                "in it."
            )
        inner = draft.probs[:, :-1].double()
        if certain:  # at temperature 0 the likeliest token is drafted, while rows say how likely it is
            inner = torch.zeros_like(inner).scatter_(-1, inner.argmax(-1, keepdim=True), 1.0)
        drafts = inner.gather(-1, draft.atoms[:, 1:].clamp_min(0).unsqueeze(-1)).squeeze(-1)
        return cls(draft.shortlist[:, :-1], inner, drafts.where(there, 0.0))

    def chances(self, length: int) -> Float[Tensor, "b g"]:
        """Return the drafts' chances, 0 where the chain is shorter."""
        return torch.nn.functional.pad(self.drafts, (0, length - self.drafts.shape[1]))

    def overlap(self, depth: int, law: Float[Tensor, "b V"]) -> Float[Tensor, "b"]:
        """Return the overlap of a node's row with the target's law."""
        if depth >= self.rows.shape[1]:
            return law.new_zeros(len(law))
        listed, row = self.listed[:, depth], self.rows[:, depth]
        return torch.minimum(law.gather(-1, listed.clamp_min(0)), row).where(listed >= 0, 0.0).sum(-1)


def _nothing_kept(token: Int[Tensor, "b"]) -> Verdict:
    return Verdict(token.new_zeros(len(token), 0), torch.zeros_like(token), token)


def _sent(text: Text, target: LanguageModel) -> Text:
    device = target.facts.device
    return replace(text, tokens=text.tokens.to(device), lengths=text.lengths.to(device))
