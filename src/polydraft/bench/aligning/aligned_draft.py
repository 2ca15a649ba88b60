"""A draft for the user's own target in five stages: measure, write, make and distil, choose the best step, judge.

Every stage has a share of the budget, and leaves what it found in the work folder, so that the same call goes on there.
"""

import shutil
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any, cast

import torch
from torch import nn

from polydraft.bench.aligning.distilling import (
    Distilling,
    Noting,
    best_folder,
    curve_of,
    distilled,
    tried,
)
from polydraft.bench.aligning.draft_card import CurvePoint, best_of, card_of, curve_svg
from polydraft.bench.aligning.form_costs import PAYS, FormCost, cost_of
from polydraft.bench.aligning.judging import AFTER, REPEATS, AlignmentVerdict, compare, judge, verdict_of
from polydraft.bench.aligning.prompt_split import PromptSplit, own_beginnings, split
from polydraft.bench.aligning.work_folder import SPENT, Budget, WorkFolder
from polydraft.bench.environment import described
from polydraft.bench.prompts import Prompt
from polydraft.bench.speed import (
    Arm,
    SpeedResults,
    SpeedSettings,
    drafting_arm,
    plain_arm,
    prompts_that_fit,
    speed_conditions,
)
from polydraft.drafters import Drafter, drafter_of
from polydraft.engine import load
from polydraft.engine.load import draft_for
from polydraft.errors import InvalidParameter, PolydraftError, UnsupportedModel, VocabularyMismatch
from polydraft.extras import TRAIN
from polydraft.models import HuggingFaceModel, Layer, Pair
from polydraft.probs import SamplingParams
from polydraft.training.alignment.draft_forms import FORMS, TUNED, UNASKED, DraftForm, Material, draft_form, seeded
from polydraft.training.alignment.held_out import HeldOutTexts
from polydraft.training.heads.head_making import end_ids_of
from polydraft.training.heads.losses.row_losses import TargetEnds
from polydraft.training.heads.shards import BYTES_OF_NUMBERS, WritingPlan, WrittenShards, write_shards

AUTO = "auto"
LEAST_MINUTES = 0.2
WRITTEN = 0.33
"""The share of the budget that is spent when the target has written."""
PASSES, HALF = 200, 0.5
"""Measuring a form takes about so many passes, and not more than this share of the budget."""
LENGTH, ROWS, PARTS = 256, (64, 32, 16, 8, 4), 4
"""Tokens of each text, how many are written at once, and into how many parts the writing is cut at least."""
MOST_BYTES = 4_000_000_000
EXACT = 0.05
"""How far logits made of kept states may be from the target's own, relative to the largest: states are rounded."""
GIVEN, FROM_TEXT, ROUNDED = "given draft", "drafts from text", "self:int8"


@dataclass(frozen=True, kw_only=True)
class AlignPlan:
    """What is asked for.

    Args:
        out: the folder of the draft.
        work: what the stages leave, to go on from; None for `out` with "-work" behind it.
        minutes: the time of all stages together.
        form: one of `FORMS`, or "auto" for what can pay.
        losses: which are tried; () for the usual ones of the form.
        temperatures: which are served.
        texts: how many texts are written behind a prompt at most; None for as many as there is time for.
        max_new_tokens: of each text that is judged by the clock.
        seed: of everything that is drawn.

    Raises:
        InvalidParameter: a value out of its range, or folders that cannot be used.
    """

    out: Path
    work: Path | None = None
    minutes: float = 20.0
    form: str = AUTO
    losses: tuple[str, ...] = ()
    temperatures: tuple[float, ...] = (0.0, 1.0)
    texts: int | None = None
    max_new_tokens: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.minutes >= LEAST_MINUTES or self.minutes == float("inf"):
            raise InvalidParameter(f"--minutes must be at least {LEAST_MINUTES}, but is {self.minutes:g}.")
        if self.texts is not None and self.texts < 1:
            raise InvalidParameter(f"At least 1 text is written behind a prompt, not {self.texts}.")
        if self.form != AUTO:
            draft_form(self.form).chosen_losses(self.losses)
        SpeedSettings(temperatures=self.temperatures, max_new_tokens=self.max_new_tokens, seed=self.seed)
        if self.place.resolve() == self.out.resolve():
            raise InvalidParameter("--out and --work are the same folder: the draft belongs into one of its own.")
        if self.out.exists() and (not self.out.is_dir() or any(self.out.iterdir())):
            raise InvalidParameter(f"--out {self.out} is not empty; name a new folder.")

    @property
    def place(self) -> Path:
        """The work folder."""
        return self.work or self.out.with_name(f"{self.out.name}-work")


@dataclass(frozen=True)
class Alignment:
    """What became of it.

    Args:
        verdict: whether the draft is better than what was there before.
        folder: where it is; None where no form can pay, and nothing was made.
        form: what it is made of.
        loss: what it learnt by.
        curve: what it was worth on held-out text.
        costs: of the forms that were looked at.
        minutes: that all stages took.
    """

    verdict: AlignmentVerdict
    folder: Path | None
    form: str = ""
    loss: str = ""
    curve: tuple[CurvePoint, ...] = ()
    costs: dict[str, FormCost] | None = None
    minutes: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return the values by name, for JSON."""
        return {**asdict(self), "folder": None if self.folder is None else str(self.folder)}


def align(
    target: str | Path,
    draft: str | Path | None = None,
    *,
    prompts: Sequence[str | Prompt] | None = None,
    plan: AlignPlan,
    dtype: str | torch.dtype = "auto",
    device: str = "auto",
    say: Callable[[str], None] = lambda _: None,
    clock: Callable[[], float] = perf_counter,
    noting: Noting = lambda: nullcontext(lambda: False),
) -> Alignment:
    """Make a draft for a target, or tune one, and judge it by the clock against what was there before.

    Args:
        target: folder, GGUF file or hub name.
        draft: the same of a draft model that is there already; None for none.
        prompts: texts of the kind that will be generated behind, three or more; None for beginnings of the target's own.
        plan: what is made, and in how much time.
        dtype: as of `load`.
        device: as of `load`.
        say: is told what is being done, a sentence at a time.
        clock: tells seconds.
        noting: while a draft learns, gives a function that tells whether it was interrupted.

    Raises:
        KeyboardInterrupt: it was interrupted; the same call goes on.
        InvalidParameter: prompts, a form or a draft that cannot be used, or too few minutes.
        UnsupportedModel: rows of the target do not follow from its last states and a table.
        VocabularyMismatch: the draft has other tokens.
        ResultsError: the work folder is of something else.
        OSError: a folder cannot be written.
    """
    TRAIN.check()
    texts = None if prompts is None else [_as_prompt(number, one) for number, one in enumerate(prompts, 1)]
    if texts is not None and len(texts) < 3:
        raise InvalidParameter(
            f"An alignment needs 3 prompts or more, to learn from, to choose by and to judge by, but has {len(texts)}."
        )
    pair = _loaded(target, draft, dtype, device)
    model, ends = checked_target(pair.target), end_ids_of(cast(Any, pair.target))
    forms = wanted_forms(plan, pair)
    length = min(LENGTH, model.context)
    room = min(length * 3 // 4, model.context - plan.max_new_tokens - 1)
    if room < 1:
        raise InvalidParameter(f"--max-new-tokens {plan.max_new_tokens} leaves no room for a prompt in the context.")
    parts = split(pair, own_beginnings(pair, plan.seed, ends) if texts is None else texts, room, plan.seed)
    if parts.left_out:
        say(f"{parts.left_out} prompts are longer than {room} tokens, or empty, and are left out.")
    work = WorkFolder(plan.place, _identity(plan, pair, parts, forms))
    budget = Budget(60 * plan.minutes, clock, clock(), float(work.read(SPENT) or 0.0))
    names = str(target), None if draft is None else str(draft)
    try:
        return _Run(plan, pair, model, parts, work, budget, names, say, noting).stages(forms, length)
    finally:
        with suppress(OSError):
            work.write(SPENT, budget.used)


def _as_prompt(number: int, given: str | Prompt) -> Prompt:
    return given if isinstance(given, Prompt) else Prompt(str(number), "prompts", given)


def _loaded(target: str | Path, draft: str | Path | None, dtype: Any, device: str) -> Pair:
    """Load the models, and say which form needs no tokens of a draft's own where these differ."""
    try:
        return load(target, draft, dtype=dtype, device=device)
    except VocabularyMismatch as error:
        told = str(error).removesuffix(".")
        raise VocabularyMismatch(f"{told}; or leave --draft out: --form small has the target's tokens.") from error


def checked_target(model: nn.Module) -> HuggingFaceModel:
    """Return a target whose rows follow from its last states and a table.

    Raises:
        InvalidParameter: it has an encoder, or its rows are no numbers.
        UnsupportedModel: they do not follow so.
    """
    target = HuggingFaceModel(model)
    if target.facts.encodes:
        raise InvalidParameter(
            f"{type(model).__name__} has an encoder, and drafts are aligned for decoders; the drafter of an "
            "encoder-decoder is made by `polydraft train head spec-drafter`."
        )
    ends = TargetEnds.of(target.model)
    ids = (torch.arange(4, device=target.device) % target.vocab_size).unsqueeze(0)
    with torch.no_grad():
        passed = target.model(input_ids=ids, output_hidden_states=True, use_cache=False)
        own, made = passed.logits.float(), ends.output(passed.hidden_states[-1].float())
    if not bool(own.isfinite().all()):
        raise InvalidParameter(f"The target's logits are no numbers: its weights are damaged, or {own.dtype} overflows.")
    if made.shape != own.shape or float((made - own).abs().max()) > EXACT * (1 + float(own.abs().max())):
        raise UnsupportedModel(
            f"No draft can be aligned for {type(model).__name__} yet: its logits are no product of its last states, "
            "but scaled or capped."
        )
    return target


def wanted_forms(plan: AlignPlan, pair: Pair) -> list[DraftForm]:
    """Return the forms that are looked at, the cheapest first.

    Raises:
        InvalidParameter: the draft is none that can be tuned, there is none to tune, or no form learns by a loss.
    """
    given = pair.draft is not None
    if given and not _tunes(pair.draft):
        name = pair.draft.name if isinstance(pair.draft, Drafter) else type(pair.draft).__name__
        raise InvalidParameter(
            f"--draft is a {name}, and draft models alone are tuned; a head goes on learning by `polydraft train head "
            "KIND --start FOLDER`."
        )
    if given and not all(bool(one.isfinite().all()) for one in pair.draft.parameters()):
        raise InvalidParameter("The draft's weights are no numbers: its folder is damaged.")
    if plan.form == TUNED and not given:
        raise InvalidParameter("There is no draft model to tune: name one by --draft, or take another --form.")
    words = ([TUNED] if given else []) + [*UNASKED] if plan.form == AUTO else [plan.form]
    found = [FORMS[word] for word in words if not plan.losses or {*plan.losses} <= {*FORMS[word].allowed}]
    if not found:
        raise InvalidParameter(f"No form learns by the losses {', '.join(plan.losses)}.")
    return found


def _tunes(draft: Any) -> bool:
    """Tell whether a draft is a model of its own that can be tuned."""
    if not isinstance(draft, nn.Module):
        return False
    return drafter_of(draft).name == "model" and all(one.is_floating_point() for one in draft.state_dict().values())


def _identity(plan: AlignPlan, pair: Pair, parts: PromptSplit, forms: Sequence[DraftForm]) -> dict[str, Any]:
    return {
        "target": described(pair.target)["weights"],
        "draft": None if pair.draft is None else described(pair.draft)["weights"],
        "prompts": parts.digest,
        "seed": plan.seed,
        "form": [one.word for one in forms],
        "losses": plan.losses,
        "temperatures": plan.temperatures,
    }


@dataclass(frozen=True, eq=False)
class _Run:
    """One alignment, with everything that its stages need."""

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
        paying = [form for form in forms if costs[form.word].pays]
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
        """Return the costs of the forms up to the first that can pay and is a given draft's; the others are not asked."""
        known: dict[str, Any] = self.work.read("costs") or {}
        self._check_minutes(len(forms) - len(known))
        for form in forms:
            if form.word not in known:
                drafter = self._untrained(form)
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
        writing = WritingPlan(**made, seed=plan.seed + 1, most_bytes=2 * MOST_BYTES)
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
        beside = f"To be {max(PAYS, fastest):.2f}x of plain decoding it would have to be {needed:.2f}." if needed else ""
        return verdict_of(judged, f"{reached} {beside}".strip())

    def _competitors(self, folder: Path) -> list[Arm]:
        """Return plain decoding, what the user had before, and the new draft."""
        model = self.pair.target
        arms = [plain_arm(model), drafting_arm(FROM_TEXT, model, None)]
        if self.pair.draft is not None:
            arms.append(drafting_arm(GIVEN, model, self.pair.draft))
        with suppress(PolydraftError):  # where its weights cannot be rounded so, nobody had it
            arms.append(drafting_arm(ROUNDED, model, draft_for(ROUNDED, model)))
        made = drafting_arm(AFTER, model, draft_for(folder, model))
        return [*arms, replace(made, description=folder.name)]

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


def kept_best(work: Path) -> Path | None:
    """Return where an interrupted alignment left its best draft; None if there is none yet."""
    try:
        if not work.is_dir():
            return None
        own = WorkFolder(work, {})
        return best_folder(own) if curve_of(own) else None
    except (PolydraftError, OSError):
        return None
