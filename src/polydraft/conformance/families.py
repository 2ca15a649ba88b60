"""Every type of causal model that transformers registers: its text with drafts beside Hugging Face's own."""

import json
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Int
from torch import Tensor

from polydraft.drafters import Drafter, ModelDrafter, NgramDrafter
from polydraft.engine import generate
from polydraft.errors import PolydraftError
from polydraft.models import HuggingFaceModel, first_sentence
from polydraft.models.tiny import their_greedy_text, tiny_draft, tiny_of_type
from polydraft.probs import Noise
from polydraft.trees import Chain, TreePolicy, Widths

Level = Literal["trees", "chains", "refused", "untried", "wrong", "error"]
PROMPT, NEW, SHORT = 24, 56, 9
"""Tokens of the prompt, of the text behind it, and of the shorter prompt in a batch: far beyond a window of 16."""
CHECKED = Path(__file__).parents[1] / "data" / "models.json"
"""What `polydraft models --check --json` printed."""
NEAR = 0.02
"""How far a draft model's weights are from the target's: most drafts are right, and some at every place wrong."""


@dataclass(frozen=True)
class FamilyReport:
    """What a type of model can do.

    Args:
        kind: the type, as configurations name it.
        level: "trees" or "chains" if all texts were Hugging Face's; "refused" if polydraft says so; "untried" if
            no tiny model of the type could be made (`models.families`), or transformers does not generate with it;
            "wrong" if a text was another; "error" if there was a traceback.
        detail: the reason, or the case that failed.
        fused: whether its passes are fused (`FusedPass`); else its own modules are called.
    """

    kind: str
    level: Level
    detail: str = ""
    fused: bool = False

    @property
    def exact(self) -> bool:
        """Whether all texts were Hugging Face's."""
        return self.level in ("trees", "chains")


@dataclass(frozen=True)
class Families:
    """What the types of a version of transformers can do."""

    transformers: str
    types: tuple[FamilyReport, ...]

    @property
    def share(self) -> float:
        """The share of exact types among those whose tiny model transformers itself generates with."""
        tried = [one for one in self.types if one.level != "untried"]
        return sum(one.exact for one in tried) / max(1, len(tried))

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, as they are written to a file."""
        return {"transformers": self.transformers, "types": [asdict(one) for one in self.types]}

    def of(self, kinds: Sequence[str]) -> "Families":
        """Return those of some types; of none given all."""
        return Families(self.transformers, tuple(one for one in self.types if not kinds or one.kind in kinds))


def known_families() -> Families:
    """Return what was found with the version of transformers that polydraft is tested with."""
    found = json.loads(CHECKED.read_text())
    return Families(found["transformers"], tuple(FamilyReport(**one) for one in found["types"]))


def check_family(kind: str) -> FamilyReport:
    """Build a tiny model of a type, decode with it in four ways, and compare with Hugging Face's own greedy text.

    At a prompt of 24 tokens and 56 new ones, with windows of 16: looked-up chains; drafts of a model near the target,
    in trees of widths 3, 2, 1 where trees can be scored, else in chains of 3; the same in a left-padded batch with a
    prompt of 9 tokens; and a sampled text twice with the same seed. In float64, but for three types that transformers
    cannot run in double precision.
    """
    try:
        model = tiny_of_type(kind)
        prompt = torch.randint(2, 64, (1, PROMPT), generator=Noise.from_seed(3, 1).generators[0])
        expected = their_greedy_text(model, prompt, torch.ones_like(prompt), NEW)
        short = their_greedy_text(model, prompt[:, :SHORT], torch.ones_like(prompt[:, :SHORT]), NEW)
    except Exception as error:  # noqa: BLE001  nothing of ours runs in there
        return FamilyReport(kind, "untried", f"{type(error).__name__}: {first_sentence(error)}"[:300])
    if expected.shape[1] < NEW:
        return FamilyReport(kind, "untried", f"transformers wrote {expected.shape[1]} tokens instead of {NEW}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _compared(kind, model, prompt, expected, short)
    except PolydraftError as refusal:
        return FamilyReport(kind, "refused", str(refusal))
    except Exception as error:  # noqa: BLE001  that there was one is the result
        return FamilyReport(kind, "error", f"{type(error).__name__}: {first_sentence(error)}"[:300])


def _compared(
    kind: str, model: Any, prompt: Int[Tensor, "1 t"], expected: Int[Tensor, "1 n"], short: Int[Tensor, "1 n"]
) -> FamilyReport:
    door = HuggingFaceModel(model)
    level: Level = "trees" if door.facts.branches else "chains"
    policy: TreePolicy = Widths((3, 2, 1)) if door.facts.branches else Chain(3)
    near = ModelDrafter(HuggingFaceModel(tiny_draft(model, NEAR)))
    padded, mask = _padded(prompt)
    both = torch.cat([expected, short])
    cases: list[tuple[str, Drafter, Int[Tensor, "b t"], Int[Tensor, "b t"], Int[Tensor, "b n"]]] = [
        ("looked-up chains", NgramDrafter(), prompt, torch.ones_like(prompt), expected),
        (f"drafts in {level}", near, prompt, torch.ones_like(prompt), expected),
        (f"a batch with drafts in {level}", near, padded, mask, both),
    ]
    for name, drafter, ids, seen, wanted in cases:
        drawn = policy if drafter is near else None
        found = _text(model, ids, attention_mask=seen, drafter=drafter, policy=drawn, temperature=0.0)
        found = found[:, ids.shape[1] :]
        if found.shape != wanted.shape:
            return FamilyReport(kind, "wrong", f"{name}: {found.shape[1]} tokens instead of {wanted.shape[1]}")
        if not torch.equal(found, wanted):
            place = int((found != wanted).any(dim=0).nonzero()[0])
            return FamilyReport(kind, "wrong", f"{name}: another token at place {place} of {wanted.shape[1]}")
    sampled = [_text(model, prompt, drafter=near, policy=policy, seed=7) for _ in range(2)]
    if not torch.equal(*sampled):
        return FamilyReport(kind, "wrong", "the same seed gave two texts")
    return FamilyReport(kind, level, fused=door.fused is not None)


def _text(model: Any, ids: Int[Tensor, "b t"], **options: Any) -> Int[Tensor, "b s"]:
    """Return prompts and what polydraft writes behind them."""
    found: Any = generate(model, ids, max_new_tokens=NEW, eos_token_id=None, pad_token_id=0, **options)
    return found.sequences


def _padded(prompt: Int[Tensor, "1 t"]) -> tuple[Int[Tensor, "2 t"], Int[Tensor, "2 t"]]:
    """Return a prompt and its beginning, padded on the left, with their mask."""
    short = torch.nn.functional.pad(prompt[:, :SHORT], (PROMPT - SHORT, 0))
    mask = torch.ones(2, PROMPT, dtype=torch.int64)
    mask[1, : PROMPT - SHORT] = 0
    return torch.cat([prompt, short]), mask
