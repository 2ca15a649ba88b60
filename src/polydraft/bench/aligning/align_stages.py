"""The five stages of an alignment: measure, write, make and distil, choose the best step, judge.

Every stage has a share of the budget, and leaves what it found in the work folder.
"""

import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch

from polydraft.bench.aligning.align_plan import Alignment, AlignPlan
from polydraft.bench.aligning.distilling import Distilling, Noting, best_folder, distilled, tried
from polydraft.bench.aligning.draft_card import CurvePoint, best_of, card_of, curve_svg
from polydraft.bench.aligning.form_costs import PAYS, FormCost, cost_of
from polydraft.bench.aligning.judging import AFTER, REPEATS, AlignmentVerdict, compare, judge, verdict_of
from polydraft.bench.aligning.prompt_split import PromptSplit
from polydraft.bench.aligning.work_folder import SPENT, Budget, WorkFolder
from polydraft.bench.speed import (
    Arm,
    Generated,
    PromptBatch,
    SpeedResults,
    SpeedSettings,
    drafting_arm,
    plain_arm,
    prompts_that_fit,
    speed_conditions,
)
from polydraft.drafters import Drafter, drafter_of
from polydraft.engine.choices import default_policy
from polydraft.engine.load import draft_for
from polydraft.errors import InvalidParameter, PolydraftError
from polydraft.models import HuggingFaceModel, Layer, Pair
from polydraft.probs import SamplingParams
from polydraft.training.alignment.draft_forms import FORMS, TUNED, DraftForm, Material, seeded
from polydraft.training.alignment.held_out import HeldOutTexts
from polydraft.training.heads.head_making import end_ids_of
from polydraft.training.heads.losses.row_losses import TargetEnds
from polydraft.training.heads.shards import BYTES_OF_NUMBERS, WritingPlan, WrittenShards, write_shards

WRITTEN = 0.33
"""The share of the budget that is spent when the target has written."""
PASSES, HALF = 200, 0.5
"""Measuring a form takes about so many passes, and not more than this share of the budget."""
ROWS, PARTS = (64, 32, 16, 8, 4), 4
"""How many texts are written at once, and into how many parts the writing is cut at least."""
MOST_BYTES = 4_000_000_000
GIVEN, FROM_TEXT, ROUNDED = "given draft", "drafts from text", "self:int8"


@dataclass(frozen=True, eq=False)
class AlignStages:
    """One alignment, with everything that its stages need.

    Args:
        plan: what is asked for.
        pair: the target, and the draft if one is given.
        model: the target.
        parts: the prompts.
        work: what is kept.
        budget: the time.
        names: what target and draft are called.
        say: is told what is being done.
        noting: gives a function that tells whether somebody has interrupted.
    """

    plan: AlignPlan
    pair: Pair
    model: HuggingFaceModel
    parts: PromptSplit
    work: WorkFolder
    budget: Budget
    names: tuple[str, str | None]
    say: Callable[[str], None]
    noting: Noting

    @property
    def heat(self) -> float:
        """The temperature that drafts are learnt at where text is greedy."""
        return max(self.plan.temperatures) or 1.0

    def stages(self, forms: Sequence[DraftForm], length: int) -> Alignment:
        """Carry them out, or go on with them."""
        self._tell(1, "measuring what drafts cost")
        costs = self._costs(forms)
        for word, cost in costs.items():
            self.say(f"{word}: {cost.in_words()}.")
        paying = [form for form in forms if form.word in costs and costs[form.word].pays]
        if not paying:
            told = "; ".join(f"{word}: {cost.in_words()}" for word, cost in costs.items())
            verdict = AlignmentVerdict(better=False, reason=f"No form of draft can pay on this machine. {told}.")
            return Alignment(verdict, None, costs=costs, minutes=self.budget.used / 60)
        paying = paying[:1] if paying[0].word == TUNED else paying
        self._tell(2, "the target writes")
        text = self._text(paying, costs, length)
        self._tell(3, "drafts are made and tried")
        held_out = HeldOutTexts.of(self.model, text.held_out, self.plan.temperatures)
        given = cast(Any, self.pair.draft) if paying[0].word == TUNED else None
        distilling = Distilling(
            *(self.model, given, text, held_out, self.work, self.budget, costs, self.plan.seed, self.noting)
        )
        trial = tried(distilling, self._arms(paying))
        self._tell(4, f"{trial['form']} goes on with the loss {trial['loss']}")
        curve = distilled(distilling, FORMS[trial["form"]], trial)
        self._tell(5, "judging by the clock")
        verdict = self._verdict(curve, costs[trial["form"]])
        return self._written(Alignment(verdict, self.plan.out, trial["form"], trial["loss"], tuple(curve), costs), text)

    def _tell(self, number: int, what: str) -> None:
        self.work.write(SPENT, self.budget.used)
        self.say(f"Stage {number} of 5: {what} ({self.budget.left() / 60:.1f} minutes are left).")

    def _costs(self, forms: Sequence[DraftForm]) -> dict[str, FormCost]:
        """Return the costs of the forms; where a given draft can pay, of that alone."""
        known: dict[str, Any] = self.work.read("costs") or {}
        self._check_minutes((1 if forms[0].word == TUNED else len(forms)) - len(known))
        for form in forms:
            if form.word not in known:
                try:
                    drafter = self._untrained(form)
                except PolydraftError as error:
                    if len(forms) == 1:
                        raise
                    self.say(f"{form.word}: {error}")  # of several forms those count that this target can have
                    continue
                known[form.word] = cost_of(self.model, drafter, self.heat).as_dict()
                self.work.write("costs", known)
            if form.word == TUNED and FormCost.from_dict(known[TUNED]).pays:
                break
        return {word: FormCost.from_dict(one) for word, one in known.items()}

    def _untrained(self, form: DraftForm) -> Drafter:
        """Return a drafter of the speed that a form has, whatever its weights."""
        if form.word == TUNED:
            return drafter_of(self.pair.draft)
        made = seeded(form, Material(self.model, TargetEnds.of(self.model.model)), form.losses[0], self.plan.seed)
        networks = made.training.eval()
        return drafter_of(cast(Any, networks).network) if form.is_model else made.drafter

    def _check_minutes(self, forms: int) -> None:
        """Raise `InvalidParameter` where measuring alone would take most of the time."""
        ids = torch.zeros(1, 1, dtype=torch.int64, device=self.model.device)
        with torch.no_grad():
            self.model.model(input_ids=ids, use_cache=False)
            began = self.budget.used
            self.model.model(input_ids=ids, use_cache=False)
        needed = PASSES * max(0, forms) * (self.budget.used - began)
        if needed > HALF * self.budget.seconds:
            raise InvalidParameter(
                f"--minutes {self.plan.minutes:g} are too few: measuring what drafts cost takes about "
                f"{needed / 60:.1f} here; give {needed / 60 / HALF:.0f} or more."
            )

    def _text(self, forms: Sequence[DraftForm], costs: dict[str, FormCost], length: int) -> WrittenShards:
        """Let the target write for its share of the time, or for so many texts a prompt."""
        plan, model = self.plan, self.model
        heats = tuple(sorted({*plan.temperatures}, reverse=True))
        heats = (heats[0], *heats) if len(heats) > 1 else heats
        reads: tuple[Layer, ...] = max((form.reads(model.layers) for form in forms), key=len)
        made = self.work.read("writing")
        if made is None:
            seconds = self.budget.left(WRITTEN)
            rows = next((one for one in ROWS if self._writes(one, length) <= seconds / PARTS), ROWS[-1])
            shards = max(1, int(seconds / self._writes(rows, length)))
            bytes_of_row = length * (2 * (len(reads) + 1) * model.width + BYTES_OF_NUMBERS)
            shards = max(1, min(shards, MOST_BYTES // (rows * bytes_of_row) - 1))
            if plan.texts is not None:
                rows = min(rows, plan.texts * self.parts.learnt)
                shards = max(1, min(shards, plan.texts * self.parts.learnt // rows))
            made = {"rows": rows, "tokens": shards * rows * length, "length": length}
            self.work.write("writing", made)
        writing = WritingPlan(
            made["tokens"], made["length"], made["rows"], seed=plan.seed + 1, most_bytes=2 * MOST_BYTES
        )
        ends = end_ids_of(cast(Any, self.pair.target))
        return write_shards(
            *(model, self.parts.written, self.work.path / "text", reads, writing, ends),
            held_out=self.parts.choose,
            heats=heats,
            going=lambda: not self.budget.over(WRITTEN),
        )

    def _writes(self, rows: int, length: int) -> float:
        """Return about how long so many texts take: the passes of one token in each of them."""
        ids = torch.zeros(rows, 1, dtype=torch.int64, device=self.model.device)
        began = self.budget.used
        with torch.no_grad():
            for _ in range(2):
                self.model.model(input_ids=ids, use_cache=False)
        return max(1e-6, (self.budget.used - began) / 2 * length)

    def _arms(self, forms: Sequence[DraftForm]) -> list[tuple[DraftForm, str]]:
        """Return what is tried: three losses of one form, or one loss of three forms."""
        if len(forms) == 1:
            return [(forms[0], loss) for loss in forms[0].chosen_losses(self.plan.losses)]
        return [(form, form.chosen_losses(self.plan.losses)[0]) for form in forms]

    def _verdict(self, curve: Sequence[CurvePoint], cost: FormCost) -> AlignmentVerdict:
        """Judge the best draft by the clock, unless it is the given one."""
        best, folder = best_of(curve), best_folder(self.work)
        assert folder is not None
        overlap = best.overlap.get(f"{self.heat:g}", max(best.overlap.values()))
        reached = f"The overlap of the first draft is {overlap:.3f}; {cost.in_words()}."
        if not best.step:
            told = "No step of training was worth more than the given draft on held-out text, which stays."
            return AlignmentVerdict(better=False, reason=f"{told} {reached}")
        arms = self._competitors(folder)
        settings = SpeedSettings(
            temperatures=tuple(sorted(self.plan.temperatures)),
            repeats=REPEATS,
            max_new_tokens=self.plan.max_new_tokens,
            seed=self.plan.seed,
        )
        alone = replace(self.pair, draft=None)
        prompts = prompts_that_fit(alone, self.parts.judge, settings)
        conditions = speed_conditions(alone, arms, settings, self.names)
        results = SpeedResults(conditions, self.work.path / "speed.jsonl")
        compare(alone, arms, prompts, settings, results, self.budget.left)
        judged = judge(results.records, self.plan.seed)
        fastest = max(one.over_plain[one.before].mean for one in judged)
        needed = cost.needed(max(PAYS, fastest))
        beside = (
            f"To be {max(PAYS, fastest):.2f}x of plain decoding it would have to be {needed:.2f}." if needed else ""
        )
        return verdict_of(judged, f"{reached} {beside}".strip())

    def _competitors(self, folder: Path) -> list[Arm]:
        """Return plain decoding, what the user had before, and the new draft."""
        model = self.pair.target
        arms = [plain_arm(model), drafting_arm(FROM_TEXT, model, None)]
        if self.pair.draft is not None:
            arms.append(usual_arm(GIVEN, model, self.pair.draft))
        with suppress(PolydraftError):  # where its weights cannot be rounded so, nobody had it
            arms.append(drafting_arm(ROUNDED, model, draft_for(ROUNDED, model)))
        return [*arms, replace(usual_arm(AFTER, model, draft_for(folder, model)), description=folder.name)]

    def _written(self, made: Alignment, text: WrittenShards) -> Alignment:
        """Write the folder of the best draft, with its card and its curve."""
        folder, out = best_folder(self.work), self.plan.out
        assert folder is not None
        writing = self.work.read("writing")
        tokens = len(text.learnt) * writing["rows"] * writing["length"]
        facts = {
            "target": self.names[0],
            "form": made.form if self.names[1] is None else f"{made.form}, begun with {self.names[1]}",
            "loss": made.loss,
            "text": f"{tokens} tokens that the target wrote behind {self.parts.learnt} prompts",
            "temperatures": ", ".join(f"{one:g}" for one in self.plan.temperatures),
            "chosen by": f"{self.parts.choose} other prompts, judged by {len(self.parts.judge)} more",
            "steps": f"{best_of(made.curve).step} of {made.curve[-1].step}",
            "minutes": f"{self.budget.used / 60:.1f} of {self.plan.minutes:g}",
            "seed": self.plan.seed,
        }
        verdict = f"**{made.verdict.word}**: {made.verdict.reason}"
        shutil.copytree(folder, out, dirs_exist_ok=True)
        (out / "README.md").write_text(card_of(facts, made.curve, verdict))
        (out / "curve.svg").write_text(curve_svg(made.curve))
        return replace(made, minutes=self.budget.used / 60)


def usual_arm(name: str, model: Any, draft: Any) -> Arm:
    """Return an arm whose trees are the usual ones of its drafter at each temperature, with the usual rule.

    `generate` fits trees to what passes take when a draft is first used. A busy moment then would decide for a whole
    comparison, which no interval over prompts shows.
    """
    drafter = draft if isinstance(draft, Drafter) else drafter_of(draft)

    def run(batch: PromptBatch, temperature: float, max_new_tokens: int, seed: int) -> Generated:
        policy = default_policy(drafter, SamplingParams(temperature=temperature))
        return drafting_arm(name, model, drafter, policy=policy).run(batch, temperature, max_new_tokens, seed)

    return Arm(name, run)
