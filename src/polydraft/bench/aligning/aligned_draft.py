"""A draft for the user's own target, made or tuned, and judged by the clock against what was there before."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from time import perf_counter
from typing import Any, cast

import torch

from polydraft.bench.aligning.align_plan import AUTO, MOST_BYTES, Alignment, AlignPlan
from polydraft.bench.aligning.align_stages import AlignStages
from polydraft.bench.aligning.alignable import LENGTH, check_asked, checked_target, loaded, room_of, wanted_forms
from polydraft.bench.aligning.distilling import Noting, best_folder, curve_of
from polydraft.bench.aligning.draft_card import CurvePoint
from polydraft.bench.aligning.prompt_split import PromptSplit, own_beginnings, split
from polydraft.bench.aligning.work_folder import IDENTITY, SPENT, Budget, WorkFolder
from polydraft.bench.environment import described
from polydraft.bench.prompts import Prompt
from polydraft.errors import PolydraftError
from polydraft.extras import TRAIN
from polydraft.models import Pair
from polydraft.models.checkpoints.weight_versions import disk_errors
from polydraft.probs import UNFILTERED, SamplingParams, filters_in_force
from polydraft.training.heads.head_making import end_ids_of


def align(
    target: str | Path,
    draft: str | Path | None = None,
    *,
    out: str | Path,
    prompts: Sequence[str | Prompt] | None = None,
    work: str | Path | None = None,
    minutes: float = 20.0,
    form: str | Sequence[str] = AUTO,
    losses: Sequence[str] = (),
    temperatures: Sequence[float] = (0.0, 1.0),
    filters: SamplingParams = UNFILTERED,
    texts: int | None = None,
    max_new_tokens: int = 64,
    seed: int = 0,
    most_bytes: int = MOST_BYTES,
    dtype: str | torch.dtype = "auto",
    device: str = "auto",
    say: Callable[[str], None] = lambda _: None,
) -> Alignment:
    """Make a draft for a target, or tune one, and judge it by the clock against what was there before.

    What comes out is an ordinary folder, which `load(target, out)` takes. After an interruption the same call goes on.

    Args:
        target: folder, GGUF file or hub name.
        draft: the same of a draft that is there already, with which new ones are compared; None for none. A draft model
            is tuned, too.
        out: the folder of the draft.
        prompts: texts of the kind that will be generated behind, three or more; None for the target's own beginnings.
        work: what the stages leave, to go on from; None for `out` with "-work" behind it.
        minutes: the time of all stages together.
        form: "auto" for what can pay, "tuned", "lora", "layers", "width", "small", "vocabulary", "boost:N", or a kind
            of head; of several those that can pay are tried.
        losses: which are tried; () for the usual ones of each form.
        temperatures: which are served.
        filters: which are served, as `SamplingParams(top_p=0.9)`.
        texts: how many texts are written behind a prompt at most; None for as many as there is time for.
        max_new_tokens: of each text that is judged by the clock.
        seed: of everything that is drawn.
        most_bytes: of the work folder.
        dtype: as of `load`.
        device: as of `load`.
        say: is told what is being done, a sentence at a time.

    Raises:
        KeyboardInterrupt: it was interrupted.
        PolydraftError: what `run_alignment` raises.
        OSError: a folder cannot be written.
    """
    plan = AlignPlan(
        out=Path(out),
        work=None if work is None else Path(work),
        minutes=minutes,
        forms=(form,) if isinstance(form, str) else tuple(form),
        losses=tuple(losses),
        temperatures=tuple(temperatures),
        filters=filters,
        texts=texts,
        max_new_tokens=max_new_tokens,
        seed=seed,
        most_bytes=most_bytes,
    )
    return run_alignment(target, draft, prompts, plan, dtype=dtype, device=device, say=say)


def run_alignment(
    target: str | Path,
    draft: str | Path | None,
    prompts: Sequence[str | Prompt] | None,
    plan: AlignPlan,
    *,
    dtype: str | torch.dtype = "auto",
    device: str = "auto",
    say: Callable[[str], None] = lambda _: None,
    clock: Callable[[], float] = perf_counter,
    noting: Noting = lambda: nullcontext(lambda: False),
) -> Alignment:
    """Carry out a plan; arguments are as of `align`.

    Args:
        clock: tells seconds.
        noting: while a draft learns, gives a function that tells whether it was interrupted.

    Raises:
        KeyboardInterrupt: it was interrupted.
        InvalidParameter: prompts, a form or a draft that cannot be used, or too few minutes.
        UnsupportedModel: rows of the target do not follow from its last states and a table.
        VocabularyMismatch: the draft has other tokens.
        ResultsError: the work folder is of something else.
        OSError: a folder cannot be written.
    """
    TRAIN.check()
    texts = None if prompts is None else [_as_prompt(number, one) for number, one in enumerate(prompts, 1)]
    check_asked(target, draft, plan, texts)
    check_kept(plan)
    say("Loading the models.")
    pair = loaded(target, draft, dtype, device)
    began = clock()
    model, ends = checked_target(pair.target), end_ids_of(cast(Any, pair.target))
    forms = wanted_forms(plan, None if draft is None else pair.draft, str(draft))
    length, room = min(LENGTH, model.context), room_of(model.context, plan)
    if texts is None:
        say("There are no prompts: the target begins texts of its own.")
        texts = own_beginnings(pair, plan.seed, ends)
    parts = split(pair, texts, room, plan.seed)
    if parts.left_out:
        say(f"{parts.left_out} prompts are longer than {room} tokens, or empty, and are left out.")
    work = WorkFolder(plan.place, _identity(plan, pair, parts))
    budget = Budget(60 * plan.minutes, clock, began, float(work.read(SPENT) or 0.0))
    names = str(target), None if draft is None else str(draft)
    try:
        with disk_errors():
            return AlignStages(plan, pair, model, parts, work, budget, names, say, noting).stages(forms, length)
    finally:
        with suppress(OSError):
            work.write(SPENT, budget.used)


def _as_prompt(number: int, given: str | Prompt) -> Prompt:
    return given if isinstance(given, Prompt) else Prompt(str(number), "prompts", given)


def check_kept(plan: AlignPlan) -> None:
    """Refuse a work folder of another seed, form, loss or temperature, or other texts, before models are loaded.

    Raises:
        ResultsError: it is of something else, or damaged.
    """
    if plan.place.is_dir() and any(plan.place.iterdir()):
        WorkFolder(plan.place, _asked(plan))


def _asked(plan: AlignPlan) -> dict[str, Any]:
    names = ("seed", "losses", "temperatures", "texts", "max_new_tokens")
    named = {"form": plan.named_forms or AUTO, **{name: getattr(plan, name) for name in names}}
    return {**named, "filters": filters_in_force(plan.filters)}


def _identity(plan: AlignPlan, pair: Pair, parts: PromptSplit) -> dict[str, Any]:
    return {
        "target": described(pair.target)["weights"],
        "draft": None if pair.draft is None else described(pair.draft)["weights"],
        "prompts": parts.digest,
        **_asked(plan),
    }


def kept_best(work: Path) -> tuple[Path | None, list[CurvePoint]]:
    """Return where an interrupted alignment left its best draft, if there is one yet, and its curve."""
    with suppress(PolydraftError, OSError):
        if (work / f"{IDENTITY}.json").is_file():
            own = WorkFolder(work, {})
            curve = curve_of(own)
            return (best_folder(own), curve) if curve else (None, [])
    return None, []
