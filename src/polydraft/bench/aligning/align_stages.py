"""The five stages of an alignment: measure, write, make and distil, choose the best step, judge.

Every stage has a share of the budget, and leaves what it found in the work folder.
"""

import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch

from polydraft.bench.aligning.align_plan import Alignment, AlignPlan
from polydraft.bench.aligning.alignable import tunable
from polydraft.bench.aligning.distilling import (
    HELD,
    TRIED,
    Distilling,
    Noting,
    best_folder,
    distilled,
    failures,
    measurable,
    tried,
    untried,
)
from polydraft.bench.aligning.draft_card import CURVE_PICTURE, CurvePoint, best_of, card_of, curve_svg
from polydraft.bench.aligning.form_costs import PAYS, FormCost, cost_of, none_pays
from polydraft.bench.aligning.judging import AFTER, REPEATS, AlignmentVerdict, compare, judge, verdict_of
from polydraft.bench.aligning.prompt_split import PromptSplit
from polydraft.bench.aligning.work_folder import SPENT, Budget, Pace, WorkFolder
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
from polydraft.drafters import BoostedDrafter, Drafter, drafter_of, owned_models, owned_networks
from polydraft.engine.choices import default_drafter, default_policy
from polydraft.engine.load import draft_for
from polydraft.errors import InvalidParameter, PolydraftError
from polydraft.models import HuggingFaceModel, Layer, Pair, module_of
from polydraft.probs import Noise, SamplingParams, filters_in_force
from polydraft.training.alignment.draft_forms import TUNED, DraftForm, Material, draft_form, kept_tokens, seeded
from polydraft.training.alignment.held_out import HeldOutTexts
from polydraft.training.heads.head_making import end_ids_of
from polydraft.training.heads.losses.row_losses import TargetEnds
from polydraft.training.heads.shards import (
    BYTES_OF_NUMBERS,
    WritingPlan,
    WrittenShards,
    continued,
    most_written,
    share_written,
    write_shards,
)

WRITTEN = 0.28
"""The share of the budget that is spent when the target has written."""
PASSES, HALF, MEASURING = 200, 0.5, 120.0
"""Measuring a form takes about so many passes, and all forms not more than this share of the budget, and seconds."""
TRIAL, FEWEST = 150.0, 3
"""So many seconds of the time for trials, or more, are there for each form and loss; so many are tried in any case.

In shorter trials the form wins that begins nearest to the target, whatever its passes cost."""
LARGE = 100_000_000
"""Of several forms those that have more weights than this, and than the target, are left out."""
ROWS, PARTS, WATCHED = (4, 8, 16, 32, 64), 4, 8
"""How many texts are written at once, into how many parts the writing is cut at least, and so many of their tokens are
written beforehand to see how long one takes."""
JUDGED, FEWEST_TOKENS, SLACK = 2, 8, 1.5
"""Texts are judged by as many tokens as asked for; where so many prompts would not fit at each temperature, by fewer,
but never below the second number. A judged token is taken to cost the third times one that is written alone, since
arms begin anew with every prompt."""
CHECKPOINTS, KEPT = 3 * 12, 4 * 4
"""Bytes of a weight that learns: in all checkpoints, with the optimiser's state, and in what is kept beside them: the
weights of the best trial, of the one that ends and of AdaSPEC's reference, and the best folder."""
ARMS_TRIED, GIVEN, FROM_TEXT, ROUNDED = "arms", "given draft", "drafts from text", "self:int8"
ARMS, JUDGING, SIZES = 5, "judging", "sizes"
"""How many arms are judged at most: plain decoding, these three, and the new draft."""


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
    def given(self) -> Any:
        """The draft model that the user named; None for other drafts and for what comes with the target."""
        return self.pair.draft if self.names[1] is not None and tunable(self.pair.draft) else None

    @property
    def heat(self) -> float:
        """The temperature that drafts are learnt at where text is greedy."""
        return max(self.plan.temperatures) or 1.0

    def stages(self, forms: Sequence[DraftForm], length: int) -> Alignment:
        """Carry them out, or go on with them."""
        self._tell(1, "measuring what drafts cost")
        costs, arms = self._chosen(forms, length)
        if not arms:
            verdict = AlignmentVerdict(better=False, reason=none_pays(costs))
            return Alignment(verdict, None, costs=costs, minutes=self.budget.used / 60)
        tried_forms = [*dict.fromkeys(form for form, _ in arms)]
        self._tell(2, "the target writes")
        text = self._text(tried_forms, costs, length)
        self._tell(3, "drafts are made and tried")
        held_out = HeldOutTexts.of(self.model, text.held_out, self.plan.temperatures, self.plan.filters)
        distilling = Distilling(
            *(self.model, self.given, text, held_out, self.work, self.budget, costs, self.plan.seed, self.noting)
        )
        if any(form.cuts for form in tried_forms):
            self.say(f"A cut vocabulary has {self._kept(text):.1%} of the target's held-out text; no more is accepted.")
        distilling = measurable(distilling, arms)
        trial = tried(distilling, arms)
        for name, why in failures(self.work).items():
            self.say(f"{name} was left out: {why}")
        if left := untried(self.work, arms):
            self.say(f"Not tried, for lack of time: {', '.join(left)}.")
        self._tell(4, f"{trial['form']} goes on with the loss {trial['loss']}")
        curve = distilled(distilling, draft_form(trial["form"]), trial)
        self._tell(5, "judging by the clock")
        verdict = self._verdict(curve, costs[trial["form"]])
        return self._written(Alignment(verdict, self.plan.out, trial["form"], trial["loss"], tuple(curve), costs), text)

    def _tell(self, number: int, what: str) -> None:
        self.work.write(SPENT, self.budget.used)
        self.say(f"Stage {number} of 5: {what} ({self.budget.left() / 60:.1f} minutes are left).")

    def _chosen(
        self, forms: Sequence[DraftForm], length: int
    ) -> tuple[dict[str, FormCost], list[tuple[DraftForm, str]]]:
        """Return what forms cost that were looked at, and which are tried by which losses; none where none can pay.

        Forms are looked at in their order until so many can pay as there is time to try.
        """
        known: dict[str, Any] = self.work.read("costs") or {}
        begun: list[tuple[str, str]] | None = self.work.read(ARMS_TRIED)
        self._check_minutes(length, known=bool(known))
        for word, cost in known.items():
            self.say(f"{word}: {FormCost.from_dict(cost).in_words()}.")
        if begun is None:
            began, left = self.budget.used, [form for form in forms if form.word not in known]
            for number, form in enumerate(left):
                if len(self._arms(forms, known, first=True)) >= self._most_arms():
                    self.say(
                        f"Their trials fill the time: {', '.join(one.word for one in left[number:])} are not tried."
                    )
                    break
                if known and self.budget.used - began > min(MEASURING, HALF * self.budget.seconds):
                    self.say(f"There is no time to look at {', '.join(one.word for one in left[number:])}.")
                    break
                self._measure(form, known, length, alone=len(forms) == 1)
            arms = self._arms(forms, known)
            begun = [(form.word, loss) for form, loss in arms]
            self.work.write(ARMS_TRIED, begun or None)
        costs = {word: FormCost.from_dict(one) for word, one in known.items()}
        return costs, [(draft_form(word), loss) for word, loss in begun]

    def _most_arms(self) -> int:
        """Return how many forms and losses are tried at most where the user named none."""
        return max(FEWEST, int((TRIED - WRITTEN) * self.budget.seconds / TRIAL))

    def _measure(self, form: DraftForm, known: dict[str, Any], length: int, *, alone: bool) -> None:
        """Add to what is known what a form costs; where it is one of several that a target cannot have, nothing."""
        try:
            drafter = self._untrained(form)
            cost = self._cost(form, drafter, known, length, alone=alone)
        except PolydraftError as error:
            if alone:
                raise
            self.say(f"{form.word}: {error}")
            return
        self.say(f"{form.word}: {cost.in_words()}.")
        known[form.word] = cost.as_dict()
        self.work.write("costs", known)

    def _cost(
        self, form: DraftForm, drafter: Drafter, known: Mapping[str, Any], length: int, *, alone: bool
    ) -> FormCost:
        """Return what a form costs.

        Raises:
            InvalidParameter: it is too large.
            InvalidDraft: it cannot draft for this target.
        """
        sizes: dict[str, int] = self.work.read(SIZES) or {}
        owned = [module_of(one) for one in owned_models(drafter)] + [*owned_networks(drafter)]
        count = _weights(one for one in owned if one is not None)
        if not alone and count > max(LARGE, _weights([self.model.model])):
            raise InvalidParameter(f"It would have {count / 1e6:.0f} million weights, more than the target.")
        least = 2 * ROWS[0] * self._bytes_of_row(len(form.reads(self.model.layers)), length)
        if known and (CHECKPOINTS + KEPT) * count + least > self.plan.most_bytes:
            raise InvalidParameter(f"Its checkpoints would take more than --most-bytes {self.plan.most_bytes}.")
        self.work.write(SIZES, {**sizes, form.word: count})
        return cost_of(self.model, drafter, self.heat)

    def _untrained(self, form: DraftForm) -> Drafter:
        """Return a drafter of the speed that a form has, whatever its weights."""
        if form.tunes:
            return drafter_of(self.pair.draft)
        material = Material(self.model, TargetEnds.of(self.model.model), self.given)
        made = seeded(form, material, form.losses[0], self.plan.seed)
        made.training.eval()
        if not form.is_model:
            return made.drafter
        models = [cast(Any, module_of(one)) for one in owned_models(made.drafter)]  # by the passes that are served
        return BoostedDrafter(models) if len(models) > 1 else drafter_of(models[0])

    def _check_minutes(self, length: int, *, known: bool) -> None:
        """Raise `InvalidParameter` where measuring takes most of the time, or the least of all stages all of it."""
        alone, least = self._seconds(1), 0.0
        if self.work.read("writing") is None:
            least = 2 * self._lengths(length)[-1] * self._seconds(ROWS[0]) + self._judging(alone, FEWEST_TOKENS, 1)
        needed = 0.0 if known else PASSES * alone
        asked = max(needed / HALF, needed + least)
        if asked > self.budget.seconds:
            raise InvalidParameter(
                f"--minutes {self.plan.minutes:g} are too few: measuring what drafts cost takes about "
                f"{needed / 60:.1f} here, and the least text and judging {least / 60:.1f}; give {asked / 60 + 0.5:.0f} "
                "or more."
            )

    def _seconds(self, rows: int) -> float:
        """Return about how long a token of so many texts takes that are written together, in the quicker of two tries.

        The first may compile what it needs, or meet a busy moment, which would decide for all that follows.
        """
        given = [torch.zeros(1, dtype=torch.int64, device=self.model.device)] * rows
        (random,) = Noise.from_seed(0, 1).generators
        count = min(WATCHED, self.model.context)
        found = list[float]()
        for _ in range(2):
            began = self.budget.used
            continued(self.model, given, torch.ones(rows, device=self.model.device), count, (), random)
            found.append((self.budget.used - began) / count)
        return max(1e-6, min(found))

    def _judging(self, alone: float, tokens: int, prompts: int) -> float:
        """Return about how long it takes to judge by so many prompts of so many tokens at every temperature."""
        return SLACK * alone * ARMS * len(self.plan.temperatures) * (prompts * tokens + FEWEST_TOKENS)

    def _text(self, forms: Sequence[DraftForm], costs: dict[str, FormCost], length: int) -> WrittenShards:
        """Let the target write for its share of the time, or for so many texts a prompt."""
        plan, model = self.plan, self.model
        heats = tuple(sorted({*plan.temperatures}, reverse=True))
        heats = (heats[0], *heats) if len(heats) > 1 else heats
        reads: tuple[Layer, ...] = max((form.reads(model.layers) for form in forms), key=len)
        made = self.work.read("writing") or self._writing([one.word for one in forms], len(reads), length)
        if plan.most_bytes < made.get("most_bytes", 0):
            raise InvalidParameter(
                f"--most-bytes {plan.most_bytes} is less than the {made['most_bytes']} that the text in "
                f"{self.work.path} was planned for; give as many, or name an empty folder."
            )
        self.work.write("writing", made)
        if made["length"] < length:
            self.say(f"Texts have {made['length']} tokens, since there is no time for longer ones.")
        writing = WritingPlan(
            made["tokens"], made["length"], made["rows"], seed=plan.seed + 1, most_bytes=plan.most_bytes
        )
        ends, pace = end_ids_of(cast(Any, self.pair.target)), Pace(self.budget, WRITTEN)

        def going() -> bool:
            pace.done(1 if pace.longest else 2)  # asked behind the held-out shard and the first to learn from
            return pace.fits() and self.work.read(HELD) is None  # what trials have learnt from stays

        return write_shards(
            *(model, self.parts.written, self.work.path / "text", reads, writing, ends),
            held_out=self.parts.choose,
            heats=heats,
            filters=plan.filters,
            going=going,
        )

    def _writing(self, forms: Sequence[str], reads: int, length: int) -> dict[str, int]:
        """Return how many texts are written at once, and how many tokens in all, of that length."""
        plan, seconds = self.plan, self.budget.left(WRITTEN)
        bytes_of_row = self._bytes_of_row(reads, length)
        room = self._room(forms, 2 * ROWS[0] * bytes_of_row)
        rows, one = ROWS[0], self._seconds(ROWS[0])
        allowed = self._lengths(length)
        length = next((few for few in allowed if 2 * few * one <= seconds / 2), allowed[-1])
        each = length * one
        for more in ROWS[1:]:
            taken = length * self._seconds(more)
            if taken > seconds / PARTS or 2 * more * bytes_of_row > room:
                break
            rows, each = more, taken
        shards = max(1, min(int(self.budget.left(WRITTEN) / each), room // (rows * bytes_of_row) - 1))
        if plan.texts is not None:
            rows = min(rows, plan.texts * self.parts.learnt)
            shards = max(1, min(shards, plan.texts * self.parts.learnt // rows))
        return {"rows": rows, "tokens": shards * rows * length, "length": length, "most_bytes": plan.most_bytes}

    def _bytes_of_row(self, reads: int, length: int) -> int:
        """Return how many bytes a text takes with the states of so many layers beside the last."""
        return length * (2 * (reads + 1) * self.model.width + BYTES_OF_NUMBERS)

    def _lengths(self, longest: int) -> list[int]:
        """Return how long texts may be that leave room behind every prompt, the longest first."""
        given = max(len(one) for one in self.parts.written)
        return [one for one in (longest, longest // 2, longest // 4) if one == longest or given <= one * 3 // 4]

    def _room(self, forms: Sequence[str], least: int) -> int:
        """Return how many bytes the target's text may take beside the checkpoints of the largest draft.

        Raises:
            InvalidParameter: there are not so many as the least text takes.
        """
        sizes: dict[str, int] = self.work.read(SIZES) or {}
        learnt = (CHECKPOINTS + KEPT) * max(sizes.get(word, 0) for word in forms)
        if learnt + least > self.plan.most_bytes:
            raise InvalidParameter(
                f"--most-bytes {self.plan.most_bytes} are too few: checkpoints of the draft take up to {learnt}, and "
                f"the least text {least}; give {learnt + 2 * least} or more."
            )
        return self.plan.most_bytes - learnt

    def _kept(self, text: WrittenShards) -> float:
        """Return how much of the held-out text the tokens are that are written most often elsewhere."""
        size = self.model.vocab_size
        tokens = most_written(text.learnt, size, kept_tokens(size), self.model.device)
        return 1.0 if tokens is None else share_written(text.held_out, tokens)

    def _arms(
        self, forms: Sequence[DraftForm], known: Mapping[str, Any], *, first: bool = False
    ) -> list[tuple[DraftForm, str]]:
        """Return what is tried of the forms that can pay: all losses of a given draft, each other form once, and then
        their other losses; as many as there is time for, but all that the user named.

        Args:
            first: whether other losses are left out.
        """
        costs = {word: FormCost.from_dict(one) for word, one in known.items()}
        paying = [form for form in forms if form.word in costs and costs[form.word].pays]
        paying = [form for form in paying if costs[form.word].steps] or paying  # what is known is not left for a guess
        rounds = [
            (0 if form.word == TUNED else number, form, loss)
            for form in paying
            for number, loss in enumerate(form.chosen_losses(self.plan.losses))
        ]
        arms = [(form, loss) for number, form, loss in sorted(rounds, key=lambda one: one[0]) if not (first and number)]
        named = bool(self.plan.losses) or len(forms) == 1
        return arms if named else arms[: self._most_arms()]

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
            max_new_tokens=self._judged_tokens(),
            seed=self.plan.seed,
        )
        alone = replace(self.pair, draft=None)
        prompts = prompts_that_fit(alone, self.parts.judge, settings)
        conditions = speed_conditions(alone, arms, settings, self.names)
        results = SpeedResults(conditions, self.work.path / "speed.jsonl")
        compare(alone, arms, prompts, settings, results, self.budget.left)
        judged = judge(results.records, self.plan.seed)
        fastest = max(one.fastest for one in judged)
        needed = cost.needed(max(PAYS, fastest))
        beside = (
            f"To be {max(PAYS, fastest):.2f}x of plain decoding it would have to be {needed:.2f}." if needed else ""
        )
        return verdict_of(judged, f"{reached} {beside}".strip())

    def _judged_tokens(self) -> int:
        """Return how many tokens texts are judged by: as many as asked for, or as there is time for."""
        known = self.work.read(JUDGING)
        if known is None:
            asked, alone, left = self.plan.max_new_tokens, self._seconds(1), self.budget.left()
            fits = (left / self._judging(alone, 1, 0) - 1) * FEWEST_TOKENS / JUDGED
            known = {"tokens": max(min(FEWEST_TOKENS, asked), min(asked, int(fits)))}
            self.work.write(JUDGING, known)
        if known["tokens"] < self.plan.max_new_tokens:
            self.say(f"Texts are judged by {known['tokens']} tokens, since there is no time for more.")
        return known["tokens"]

    def _competitors(self, folder: Path) -> list[Arm]:
        """Return plain decoding, what the user had before, and the new draft."""
        model, own = self.pair.target, filters_in_force(self.plan.filters)
        arms = [plain_arm(model, own), drafting_arm(FROM_TEXT, model, None, filters=own)]
        if self.pair.draft is not None:
            arms.append(usual_arm(GIVEN, model, self.pair.draft, own))
        with suppress(PolydraftError):  # where its weights cannot be rounded so, nobody had it
            arms.append(drafting_arm(ROUNDED, model, draft_for(ROUNDED, model), filters=own))
        return [*arms, replace(usual_arm(AFTER, model, draft_for(folder, model), own), description=folder.name)]

    def _written(self, made: Alignment, text: WrittenShards) -> Alignment:
        """Write the folder of the best draft, with its card and its curve."""
        folder, out = best_folder(self.work), self.plan.out
        assert folder is not None
        writing, begins = self.work.read("writing"), draft_form(made.form).begins and self.given is not None
        tokens = len(text.learnt) * writing["rows"] * writing["length"]
        facts = {
            "target": self.names[0],
            "form": f"{made.form}, begun with {self.names[1]}" if begins else made.form,
            "loss": made.loss,
            **({"tokens": f"{self._kept(text):.1%} of the target's text"} if draft_form(made.form).cuts else {}),
            "text": f"{tokens} tokens that the target wrote behind {self.parts.learnt} prompts",
            "temperatures": ", ".join(f"{one:g}" for one in self.plan.temperatures),
            **{name: f"{value:g}" for name, value in filters_in_force(self.plan.filters).items()},
            "chosen by": f"{self.parts.choose} other prompts, judged by {len(self.parts.judge)} more",
            "steps": f"{best_of(made.curve).step} of {made.curve[-1].step}",
            "minutes": f"{self.budget.used / 60:.1f} of {self.plan.minutes:g}",
            "seed": self.plan.seed,
        }
        verdict = f"**{made.verdict.word}**: {made.verdict.reason}"
        shutil.copytree(folder, out, dirs_exist_ok=True)
        (out / "README.md").write_text(card_of(facts, made.curve, verdict))
        (out / CURVE_PICTURE).write_text(curve_svg(made.curve))
        return replace(made, minutes=self.budget.used / 60)


def _weights(networks: Iterable[torch.nn.Module]) -> int:
    """Return how many weights there are in networks."""
    return sum(one.numel() for network in networks for one in network.parameters())


def usual_arm(name: str, model: Any, draft: Any, filters: Mapping[str, float]) -> Arm:
    """Return an arm that drafts as `generate` does with a draft, in the usual trees and with the usual rule.

    At temperature 0 on a CPU drafts from text come first (`default_drafter`). `generate` fits trees to what passes take
    when a draft is first used. A busy moment then would decide for a whole comparison, which no interval over prompts
    shows.
    """
    given = draft if isinstance(draft, Drafter) else drafter_of(draft)

    def run(batch: PromptBatch, temperature: float, max_new_tokens: int, seed: int) -> Generated:
        params = SamplingParams(temperature=temperature)
        drafter = default_drafter(given, params, model.device)
        arm = drafting_arm(name, model, drafter, policy=default_policy(drafter, params), filters=filters)
        return arm.run(batch, temperature, max_new_tokens, seed)

    return Arm(name, run)
