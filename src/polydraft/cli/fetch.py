"""`polydraft fetch`: bring something onto this machine, with a progress bar, and say where it is."""

from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from polydraft.cli.clashes import refuse_clashes
from polydraft.cli.printing import console as new_console
from polydraft.cli.printing import print_json_line
from polydraft.cli.process import stopped
from polydraft.fetched import is_there, place
from polydraft.fetching import FETCHABLE, Fetchable, fetch
from polydraft.options.commands.making_options import FetchOptions

STEPS = {
    "waiting": "Another fetch is in progress: waiting for it",
    "downloading": "Downloading",
    "checking": "Checking",
    "making": "Converting, which takes half a minute",
}
NEXT = {"smollm2": "Try: polydraft chat, or --target smollm2 anywhere.", "spec-bench": "Try: --prompts spec-bench."}


def run_fetch(options: FetchOptions) -> int:
    """Fetch what the word means, or list what there is; return the exit code: 0, or 130 after Ctrl-C."""
    word, source, as_json = options.what, options.source, options.as_json
    refuse_clashes((word is None and source, "--from needs the word of what is fetched: give one beside it."))
    if word is None:
        return _listed(as_json)
    notes = new_console(errors=True, quiet=as_json)
    try:
        found = _with_bar(word, source, notes)
    except KeyboardInterrupt:
        return stopped(f"`polydraft fetch {word}` goes on from what was downloaded")
    if as_json:
        print_json_line(_row(FETCHABLE[word]))
    else:
        new_console().print(f"{word} is in {found} ({_megabytes(_size(found))}). {NEXT[word]}", soft_wrap=True)
    return 0


def _with_bar(word: str, source: Path | None, notes: Console) -> Path:
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=notes, transient=True, disable=not notes.is_terminal) as bar:
        total = FETCHABLE[word].remote.size if word in FETCHABLE else None
        task, said = bar.add_task("Looking", total=total), set[str]()

        def report(step: str, done: int) -> None:
            sentence = STEPS[step]
            bar.update(task, description=sentence, completed=done, total=total if step == "downloading" else None)
            if not notes.is_terminal and step not in said:
                notes.print(f"{sentence} ...", soft_wrap=True)
            said.add(step)

        return fetch(word, source, report)


def _listed(as_json: bool) -> int:
    rows = [_row(one) for one in FETCHABLE.values()]
    if as_json:
        print_json_line(rows)
        return 0
    table = Table("word", "what", "licence", "download", "here")
    for one, row in zip(FETCHABLE.values(), rows, strict=True):
        here = str(row["path"]) if row["here"] else f"no; `polydraft fetch {one.word}`"
        table.add_row(one.word, one.title, one.licence, _megabytes(one.remote.size), here)
    new_console().print(table)
    return 0


def _row(one: Fetchable) -> dict[str, object]:
    return {
        "word": one.word,
        "title": one.title,
        "licence": one.licence,
        "download": one.remote.size,
        "path": str(place(one.word)),
        "here": is_there(one.word),
    }


def _size(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"
