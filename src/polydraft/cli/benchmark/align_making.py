"""`polydraft align` without --measure: a draft is made, or tuned, and judged."""

from functools import partial
from pathlib import Path

from polydraft.bench.aligning import Alignment, AlignPlan, curve_lines, kept_best, run_alignment
from polydraft.cli.clashes import read_asked, refuse_clashes
from polydraft.cli.printing import console, counted, print_json_line
from polydraft.cli.process import NO_BETTER, noted_interruption, stopped
from polydraft.errors import ResultsError
from polydraft.options.commands.align_options import AlignOptions
from polydraft.probs import SamplingParams

USUAL_OUT = Path("aligned")


def run_making(request: AlignOptions) -> int:
    """Make a draft, judge it and print the verdict; return the exit code: 0, 3 if it is no better, 130 after Ctrl-C.

    Raises:
        PolydraftError: what `run_alignment` raises.
        ResultsError: a folder cannot be written any more; what was finished is there.
    """
    refuse_clashes(
        (request.length is not None, "--length is for --measure: the draft's own chains are judged. Leave it out."),
    )
    plan, notes = plan_of(request), console(errors=True)
    prompts = read_asked(request.prompts, request.limit, request.chat_template) if request.prompts else None
    refuse_clashes(
        (
            prompts is None and request.chat_template is not None,
            "--chat-template is for --prompts: without any the target begins texts of its own. Leave it out.",
        ),
    )
    try:
        found = run_alignment(
            *(request.target, request.draft, prompts, plan),
            dtype=request.dtype,
            device=request.device,
            say=lambda text: notes.print(text, soft_wrap=True),
            noting=partial(noted_interruption, "this step"),
        )
    except KeyboardInterrupt:
        best, curve = kept_best(plan.place)
        for line in curve_lines(curve):
            notes.print(line, soft_wrap=True)
        so_far = "" if best is None else f"the best draft so far is in {best}, and "
        return stopped(f"{so_far}the same command goes on from where it was, in {plan.place}")
    except OSError as error:
        raise ResultsError(
            f"The alignment cannot go on in {plan.place} and {plan.out}: {error.strerror or error}; what was finished "
            "is kept, and the same command goes on from there."
        ) from error
    if request.as_json:
        print_json_line(found.as_dict())
    else:
        show(found)
    return 0 if found.verdict.better else NO_BETTER


def plan_of(request: AlignOptions) -> AlignPlan:
    """Return what is asked for; what is None has the plan's own default.

    Raises:
        InvalidParameter: a value out of its range, or folders that cannot be used.
    """
    names = ("work", "minutes", "forms", "losses", "temperatures", "texts", "max_new_tokens", "seed", "most_bytes")
    given = {name: getattr(request, name) for name in names}
    return AlignPlan(
        out=request.out or USUAL_OUT,
        filters=SamplingParams(**request.filters),
        **{name: value for name, value in given.items() if value not in (None, ())},
    )


def show(found: Alignment) -> None:
    """Print the curve, the speeds and the verdict."""
    own = console()
    if found.curve:
        own.print("Tokens per target call on held-out text:")
        for line in curve_lines(found.curve):
            own.print(line, soft_wrap=True)
    for one in found.verdict.judged:
        speeds = ", ".join(f"{name} {value.mean:.2f}x" for name, value in one.over_plain.items())
        own.print(
            f"Temperature {one.temperature:g}, over plain decoding on {counted(one.prompts, 'prompt')}: {speeds}.",
            soft_wrap=True,
        )
    own.print(f"{found.verdict.word}: {found.verdict.reason}", soft_wrap=True)
    if found.folder is not None:
        own.print(f"The draft is in {found.folder}, with its card and curve.svg.", soft_wrap=True)
