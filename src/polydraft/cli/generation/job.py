"""Which options belong to a file of prompts, and which to one prompt."""

from dataclasses import dataclass
from pathlib import Path

from polydraft.errors import InvalidParameter


@dataclass(frozen=True)
class FileJob:
    """Where the prompts are, where the texts go, and how many are in progress at a time."""

    input: str
    output: Path
    batch_size: int = 8


def file_job(
    prompt: str | None, source: Path | None, output: Path | None, batch_size: int | None, *, compared: bool
) -> FileJob | None:
    """Return what the options say about files; None if they are about one prompt.

    Raises:
        InvalidParameter: options that do not go together.
    """
    if source is None:
        lonely = [name for name, value in (("--output", output), ("--batch-size", batch_size)) if value is not None]
        if lonely:
            raise InvalidParameter(f"{lonely[0]} needs --input: a file of prompts.")
        if prompt is None:
            raise InvalidParameter("Give a prompt, or --input with a file of prompts.")
        return None
    if prompt is not None:
        raise InvalidParameter("Give either a prompt or --input, not both.")
    if compared:
        raise InvalidParameter("--compare is for one prompt; `polydraft bench --prompts FILE` compares on a file.")
    if output is None:
        raise InvalidParameter("--input needs --output: the file that the texts are written to.")
    return FileJob(str(source), output, batch_size or FileJob.batch_size)
