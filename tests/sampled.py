"""Many sampled texts of a tiny target, and their exact law: chi-square on the joint law of the first tokens.

The seeds are fixed. If the engine is exact, a test fails for one choice of seeds in a million.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product

import torch
from doubles import perturbed, tiny_model
from scipy.stats import chi2
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

import polydraft
from polydraft import (
    EAGLE_25,
    Chain,
    Fixed,
    Given,
    HuggingFaceModel,
    ModelDrafter,
    NaiveMatch,
    NgramDrafter,
    NoDraft,
    RecursiveRejection,
    RecursiveRejectionWithoutReplacement,
    SamplingParams,
    SpeculativeSampling,
    TopDown,
    TopK,
    TopThenSampleRule,
    Widths,
)
from polydraft.catalogue import parse_policy
from polydraft.drafters import Drafter, EnsembleDrafter
from polydraft.schemes import Product
from polydraft.trees import Merged, TreePolicy
from polydraft.verifiers import NodeVerifier, OutcomeLaw, TreeVerifier

FALSE_ALARM_RATE = 1e-6
VOCAB, NEW, SAMPLES = 6, 3, 2000
PROMPT = [2, 0, 5, 2, 0, 5, 2]


@cache
def target() -> PreTrainedModel:
    return tiny_model("llama", VOCAB)


@cache
def drafter_named(name: str) -> Drafter:
    draft = HuggingFaceModel(perturbed(target(), 0.15))
    return {
        "none": NoDraft(),
        "n-gram": NgramDrafter(),
        "model": ModelDrafter(draft),
        "short": ModelDrafter(draft, shortlist_size=3),
        "cold": ModelDrafter(draft, params=SamplingParams(temperature=0.5)),
        "ensemble": EnsembleDrafter(((draft, None), (draft, SamplingParams(temperature=1.4)))),
    }[name]


def hugging_face_processors(
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    typical_p: float = 1.0,
    repetition_penalty: float = 1.0,
) -> LogitsProcessorList:
    """Return Hugging Face's processors in its order: an account of the law that shares no code with polydraft."""
    candidates = (
        (repetition_penalty != 1, lambda: RepetitionPenaltyLogitsProcessor(repetition_penalty)),
        (temperature != 1, lambda: TemperatureLogitsWarper(temperature)),
        (top_k > 0, lambda: TopKLogitsWarper(top_k)),
        (top_p < 1, lambda: TopPLogitsWarper(top_p)),
        (min_p > 0, lambda: MinPLogitsWarper(min_p)),
        (typical_p < 1, lambda: TypicalLogitsWarper(typical_p)),
    )
    return LogitsProcessorList([make() for wanted, make in candidates if wanted])


def exact_law(prompt: Sequence[int], model: PreTrainedModel | None = None, **options: float) -> Tensor:
    """Return the joint law of the next NEW tokens, as a vector over all VOCAB ** NEW texts."""
    law = torch.ones(1, dtype=torch.float64)
    for length in range(NEW):
        history = torch.tensor([[*prompt, *text] for text in product(range(VOCAB), repeat=length)])
        with torch.no_grad():
            logits = (model or target())(input_ids=history, use_cache=False).logits[:, -1]
        rows = hugging_face_processors(**options)(history, logits).softmax(dim=-1)
        law = (law.unsqueeze(-1) * rows).flatten()
    return law


def p_value(counts: Tensor, law: Tensor) -> float:
    """Return the chi-square tail probability; texts expected less than five times are counted together."""
    assert int(counts[law == 0].sum()) == 0, "a text that cannot occur occurred"
    expected = law * counts.sum()
    common = expected >= 5
    seen, wanted = [*counts[common].tolist()], [*expected[common].tolist()]
    rest = float(expected[~common].sum())
    if rest >= 5:
        seen.append(float(counts[~common].sum()))
        wanted.append(rest)
    assert len(wanted) > 4, "too few different texts for a test with power"
    statistic = sum((a - b) ** 2 / b for a, b in zip(seen, wanted, strict=True))
    return float(chi2.sf(statistic, len(wanted) - 1))


def sampled_counts(
    drafter: str, rule: NodeVerifier, policy: TreePolicy, samples: int = SAMPLES, **options: float
) -> tuple[Tensor, polydraft.Statistics]:
    """Generate many texts in one batch and count them."""
    output = polydraft.generate(
        target(),
        torch.tensor([PROMPT]),
        attention_mask=torch.ones(1, len(PROMPT), dtype=torch.int64),
        drafter=drafter_named(drafter),
        verifier=TopDown(rule),
        policy=policy,
        seed=20,
        max_new_tokens=NEW,
        num_return_sequences=samples,
        **{"temperature": 1.0, "top_k": 0, **options},
    )
    place = torch.tensor([VOCAB**power for power in reversed(range(NEW))])
    texts = (output.sequences[:, len(PROMPT) :] * place).sum(dim=-1)
    return texts.bincount(minlength=VOCAB**NEW), output.statistics


def of_many(
    drafter: Drafter,
    samples: int,
    policy: TreePolicy | None = None,
    verifier: TreeVerifier | None = None,
    *,
    model: PreTrainedModel | None = None,
    top_p: float = 1.0,
) -> float:
    """Return how likely counts at least as far from the law are, of many texts at T = 1 that a drafter drafts for."""
    output = polydraft.generate(
        model or target(),
        torch.tensor([PROMPT]),
        attention_mask=torch.ones(1, len(PROMPT), dtype=torch.int64),
        drafter=drafter,
        policy=policy,
        verifier=verifier,
        seed=20,
        max_new_tokens=NEW,
        num_return_sequences=samples,
        temperature=1.0,
        top_k=0,
        top_p=top_p,
        eos_token_id=None,
    )
    assert isinstance(output, polydraft.GenerationOutput)
    assert output.statistics.accepted and not output.statistics.fallback
    place = torch.tensor([VOCAB**power for power in reversed(range(NEW))])
    counts = (output.sequences[:, len(PROMPT) :] * place).sum(dim=-1).bincount(minlength=VOCAB**NEW)
    return p_value(counts, exact_law(PROMPT, model, top_p=top_p))


# Every second one in the ordinary suite, all of them and with more texts in the slow one.
TRIPLES: list[tuple[str, NodeVerifier, TreePolicy]] = [
    ("none", NaiveMatch(), Chain(1)),
    ("n-gram", NaiveMatch(Given()), Chain(3)),
    ("model", SpeculativeSampling(), Chain(2)),
    ("model", NaiveMatch(TopK()), Widths((3, 2))),
    ("model", RecursiveRejection(), Fixed(EAGLE_25)),
    ("model", RecursiveRejectionWithoutReplacement(), Fixed(EAGLE_25)),
    ("model", RecursiveRejectionWithoutReplacement(), Chain(1)),
    ("model", TopThenSampleRule(), Widths((3, 2, 1))),
    ("short", RecursiveRejection(), Widths((2, 2))),
    ("short", RecursiveRejectionWithoutReplacement(), Widths((3, 2, 1))),
    ("cold", TopThenSampleRule(), Widths((2, 2))),
    ("model", RecursiveRejectionWithoutReplacement(), parse_policy("best-first:6x3:3")),
    ("model", SpeculativeSampling(), parse_policy("confident:3:0.3")),
    ("model", TopThenSampleRule(), parse_policy("confident-path:3,2,1:0.1")),
    ("model", SpeculativeSampling(), parse_policy("adaptive:3:0.4")),
    ("model", NaiveMatch(TopK()), parse_policy("eagle-2:2x3:6")),
    ("ensemble", RecursiveRejection(Product()), Merged((2, 1))),
]


@dataclass(frozen=True)
class Generous(RecursiveRejectionWithoutReplacement):
    """A biased rule: it accepts the first draft a little more often than it may."""

    extra: float = 0.15

    def law(self, drafts: Tensor, draft_probs: Tensor, target_probs: Tensor) -> OutcomeLaw:
        honest = super().law(drafts, draft_probs, target_probs)
        share = self.extra * (drafts[..., :1] >= 0)
        first = torch.zeros_like(honest.child)
        first[..., :1] = share
        return OutcomeLaw((1 - share) * honest.child + first, (1 - share) * honest.rest)
