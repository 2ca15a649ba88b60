"""One sentence out of what transformers, torch and safetensors say when they cannot load something."""

import re
from pickle import UnpicklingError

ENDS = re.compile(r"(?<=[\w)'\"`\]])\. ")
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
UNSAFE = re.compile(r"GLOBAL ([\w.]+)")
NO_TOKENIZER = "Couldn't instantiate the backend tokenizer"
NO_MEMORY = ("can't allocate memory", "out of memory")


def reason(error: BaseException) -> str:
    """Return why something could not be loaded, as the rest of a sentence without its full stop."""
    text = COLOURS.sub("", str(error))
    refused = next((one for one in _chain(error) if _is_unsafe(one)), None)
    if refused is not None:
        found = UNSAFE.search(str(refused))
        what = f" ({found[1]})" if found else ""
        return (
            f"its pytorch_model.bin or a part of it holds more than numbers{what}, and may run any code when it is "
            "read; convert the weights to safetensors if you trust who made them"
        )
    if isinstance(error, MemoryError) or any(sign in text.lower() for sign in NO_MEMORY):
        return "there is not enough memory for its weights"
    said = _first_sentence(text) or "no reason is given"
    if NO_TOKENIZER in said:
        return "its files are not those of a tokenizer; tokenizer.json is missing or damaged"
    if isinstance(error, LookupError | EOFError | UnpicklingError):  # these tell what the reader tripped over
        return f"a file in it is damaged ({type(error).__name__}: {said})"
    return said


def _first_sentence(text: str) -> str:
    """Return the first sentence; a line that ends with a colon goes on in the next one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    taken = lines[:1]
    while taken and taken[-1].endswith(":") and len(taken) < len(lines):
        taken.append(lines[len(taken)])
    return ENDS.split(" ".join(taken))[0].rstrip(". :")


def _chain(error: BaseException | None) -> list[BaseException]:
    """Return an error and those that it came from."""
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


def _is_unsafe(error: BaseException) -> bool:
    return isinstance(error, UnpicklingError) and "Weights only load failed" in str(error)
