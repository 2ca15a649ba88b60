"""`polydraft models`: which types of models can be decoded with drafts, and how; checked anew if asked."""

import json
import sys
from collections import Counter
from collections.abc import Sequence

from rich.text import Text

from polydraft.cli.clashes import refuse_clashes
from polydraft.cli.conformance import progress
from polydraft.cli.printing import columns
from polydraft.cli.printing import console as new_console
from polydraft.cli.process import stopped
from polydraft.conformance import Families, FamilyReport, check_family, known_families
from polydraft.errors import InvalidParameter, hint
from polydraft.models.tiny import installed_version, registered_types
from polydraft.options.commands.bench_options import FamilyOptions

MEANING = {
    "trees": "token trees are exact",
    "chains": "chains of drafts are exact; drafts cannot branch",
    "refused": "refused, in this sentence",
    "untried": "no tiny model of it could be made, or transformers does not generate with it",
    "wrong": "WRONG: another text than Hugging Face's",
    "error": "WRONG: an error instead of a text or a sentence",
}
STYLES = {"trees": "green", "chains": "cyan", "refused": "yellow", "untried": "dim", "wrong": "red", "error": "red"}


def run_models(options: FamilyOptions) -> int:
    """Print what types can do; return the exit code: 0, 1 if a checked one is wrong, 130 after Ctrl-C.

    Raises:
        InvalidParameter: a type that transformers does not register, or two ways to print.
    """
    kinds, check, as_json = options.types, options.check, options.as_json
    refuse_clashes((options.page and as_json, "--page and --json are two ways to print: leave one out."))
    known = {one.kind for one in known_families().types} if not check else {*registered_types()}
    strange = [kind for kind in kinds if kind not in known]
    if strange:
        meant = hint(strange[0], sorted(known))
        raise InvalidParameter(
            f"{strange[0]!r} is no type of causal model that transformers registers{meant}; a type is `model_type` in "
            "config.json, such as llama, and `polydraft models` lists them."
        )
    try:
        found = _checked(kinds, quiet=as_json) if check else known_families().of(kinds)
    except KeyboardInterrupt:
        return stopped()
    if as_json:
        sys.stdout.write(json.dumps(found.as_dict(), indent=1) + "\n")
    elif options.page:
        sys.stdout.write(markdown(found))
    else:
        _show(found)
    return 1 if any(one.level in ("wrong", "error") for one in found.types) else 0


def _checked(kinds: Sequence[str], *, quiet: bool) -> Families:
    names, found = [*kinds] or [*registered_types()], list[FamilyReport]()
    with progress(new_console(errors=True, quiet=quiet)) as step:
        for place, kind in enumerate(names):
            step(kind, place, len(names))
            found.append(check_family(kind))
    return Families(installed_version(), tuple(found))


def _show(found: Families) -> None:
    console = new_console()
    table = columns(("type", "level", "pass", "reason"))
    for one in found.types:
        way = ("fused" if one.fused else "its own") if one.exact else ""
        table.add_row(one.kind, Text(one.level, STYLES[one.level]), way, Text(one.detail))
    console.print(table)
    console.print()
    for level, count in Counter(one.level for one in found.types).most_common():
        console.print(f"{count:4}  {level}: {MEANING[level]}", soft_wrap=True)
    console.print(
        f"\nWith transformers {found.transformers}: tiny random models in float64, compared with Hugging Face's own "
        "greedy text, alone, in a padded batch, with windows of 16 tokens.",
        soft_wrap=True,
    )


def markdown(found: Families) -> str:
    """Return the table of docs/models.md."""
    lines: list[str] = []
    for level in ("trees", "chains", "refused", "untried"):
        own = [one for one in found.types if one.level == level]
        lines += [f"**{level}** ({len(own)} types): {MEANING[level]}.", ""]
        if level in ("trees", "chains"):
            lines += [", ".join(f"`{one.kind}`" for one in own) + ".", ""]
            fused = [f"`{one.kind}`" for one in own if one.fused]
            lines += [f"Of these, passes of {len(fused)} are fused: {', '.join(fused)}.", ""] if fused else []
        else:
            lines += ["| type | reason |", "|---|---|", *(f"| `{one.kind}` | {_cell(one.detail)} |" for one in own), ""]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
