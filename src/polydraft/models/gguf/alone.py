"""A GGUF file in a folder of its own, since transformers prefers what lies beside it to what the file says."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory


@contextmanager
def alone(folder: str, file: str) -> Iterator[str]:
    """Give a file's folder for a while: another one, with nothing else in it; the folder itself if no file is named.

    transformers reads a tokenizer.json, tokenizer_config.json, chat template or generation_config.json that lies beside
    the file, and takes it for the file's own.
    """
    if not file:
        yield folder
        return
    with TemporaryDirectory(prefix="polydraft-") as empty:
        whole, link = (Path(folder) / file).resolve(), Path(empty) / file
        try:
            link.symlink_to(whole)
        except OSError:  # not every system gives everybody links
            shutil.copyfile(whole, link)
        yield empty
