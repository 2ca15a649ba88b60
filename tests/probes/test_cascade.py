"""A drafter whose draft is another decode loop: a small model drafts for a middle one, whose text is the draft."""

from dataclasses import dataclass
from typing import Any

import torch
from doubles import perturbed, tiny_model
from scipy.stats import chi2
from transformers import PreTrainedModel

import polydraft
from polydraft import BlockVerification, Chain, HuggingFaceModel, ModelDrafter
from polydraft.drafters import Decoder, Drafter, DraftRequest, Session
from polydraft.models import LanguageModel
from polydraft.reading import Step, Text
from polydraft.schemes import Scheme
from polydraft.trees import Draft, TokenTree, topology

VOCAB, SAMPLES, FALSE_ALARM = 6, 1500, 1e-6


@dataclass(frozen=True, eq=False)
class Cascade(Drafter):
    """Lets a decode loop over the middle model write a chain; its laws are the middle model's rows."""

    middle: LanguageModel
    small: Drafter
    name = "cascade"

    def check(self, scheme: Scheme) -> None: ...

    def start(self, text: Text, session: Session) -> tuple[Decoder, Any]:
        assert session.decoder is not None
        rule = BlockVerification()
        return session.decoder, session.decoder.begin(self.middle, self.small, rule, Chain(2), text, session)

    def draft(self, state: tuple[Decoder, Any], request: DraftRequest) -> tuple[Draft, Any]:
        text, policy, noise = request.text, request.policy, request.noise
        decoder, depth, rows = state[0], policy.shape.depth, range(len(text.counts))
        loop, tokens, laws = decoder.on(state[1], text, noise.fork(0)), [[] for _ in rows], [[] for _ in rows]
        while min(map(len, tokens)) < depth:
            loop, step = decoder.step(loop)
            written = step.verdict.tokens(step.tree).tolist()
            for row, kept in enumerate(step.verdict.kept):
                nodes = [0, *step.verdict.path[row, :kept].tolist()]
                tokens[row] += written[row][: kept + 1]
                laws[row] += [*step.probs[row, nodes]]
        chain = torch.cat([text.last().unsqueeze(-1), torch.tensor([one[:depth] for one in tokens])], dim=1)
        probs = torch.stack([torch.stack([*one[:depth], torch.zeros_like(one[0])]) for one in laws])
        tree = TokenTree(chain, topology(policy.shape, len(rows), chain.device), torch.ones_like(chain).bool())
        atoms, listed = chain.clone(), torch.arange(probs.shape[-1]).expand(probs.shape)
        atoms[:, 0] = -1
        return Draft(tree, atoms, listed.clone(), probs, most_children=1), (decoder, loop)

    def commit(self, state: tuple[Decoder, Any], step: Step) -> tuple[Decoder, Any]:
        decoder, loop = state
        for row, (count, kept) in enumerate(zip(step.text.counts, step.verdict.kept, strict=True)):
            loop = loop.cut(row, count + kept)
        return decoder, loop

    def join(self, state: tuple[Decoder, Any], row: int, other: tuple[Decoder, Any]) -> tuple[Decoder, Any]:
        return state[0], state[0].join(state[1], row, other[1])


def cascade(target: PreTrainedModel) -> Cascade:
    middle, small = HuggingFaceModel(perturbed(target, 0.1)), HuggingFaceModel(perturbed(target, 0.2))
    return Cascade(middle, ModelDrafter(small))


def test_its_text_is_the_targets(target: PreTrainedModel, beside: Any) -> None:
    assert beside(cascade(target), 4).statistics.accepted > 0


def test_its_law_is_the_targets() -> None:
    target = tiny_model("llama", VOCAB)
    ids = torch.tensor([[2, 3, 5, 2]]).repeat(SAMPLES, 1)
    options = {"max_new_tokens": 3, "temperature": 1.0, "top_k": 0, "eos_token_id": None}
    found = polydraft.generate(target, ids, drafter=cascade(target), verifier="block", policy=3, seed=1, **options)
    assert found.statistics.acceptance_rate > 0.3 and not found.statistics.fallback
    texts = found.sequences[:, 4:] @ torch.tensor([VOCAB**2, VOCAB, 1])
    every = torch.cartesian_prod(*[torch.arange(VOCAB)] * 3)
    logits = target(torch.cat([ids[:1].repeat(len(every), 1), every], dim=1)).logits[:, 3:6]
    law = logits.softmax(dim=-1).gather(-1, every.unsqueeze(-1)).squeeze(-1).prod(dim=-1).detach()
    expected, seen = SAMPLES * law, torch.bincount(texts, minlength=VOCAB**3)
    rare = expected < 5
    pooled = [torch.cat([one[~rare], one[rare].sum().unsqueeze(0)]) for one in (expected, seen.double())]
    statistic = float(((pooled[1] - pooled[0]) ** 2 / pooled[0]).sum())
    assert chi2.sf(statistic, len(pooled[0]) - 1) > FALSE_ALARM
