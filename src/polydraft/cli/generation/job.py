"""`polydraft generate`: which options belong to a file of prompts and which to one prompt, and what they mean."""

from dataclasses import replace
from pathlib import Path

from polydraft.cli.generation.one_text import given_prompt, load_pair_of, run_generate
from polydraft.cli.generation.prompt_file import run_file
from polydraft.errors import InvalidParameter
from polydraft.models import Grammar, is_other_rank
from polydraft.options.commands.generate_options import GenerateOptions


def run(options: GenerateOptions) -> int:
    """Continue a prompt, or all of a file; return the exit code."""
    if options.parallel is not None and is_other_rank(options.parallel):
        load_pair_of(options)  # which leaves when rank 0 has ended
    check_files(options)
    options = replace(options, prompt=given_prompt(options.prompt))
    grammar = given_grammar(options.json_schema, options.regex, options.grammar, compact=options.compact)
    return (run_generate if options.input_file is None else run_file)(options, grammar)


def check_files(options: GenerateOptions) -> None:
    """Check that the options are about one prompt, or about a file and where its texts go.

    Raises:
        InvalidParameter: options that do not go together.
    """
    if options.input_file is None:
        of_files = {"--output": options.output, "--batch-size": options.batch_size, "--ray": options.ray or None}
        lonely = [name for name, value in of_files.items() if value is not None]
        if lonely:
            raise InvalidParameter(f"{lonely[0]} needs --input: a file of prompts.")
        if options.prompt is None:
            raise InvalidParameter("Give a prompt, or --input with a file of prompts.")
        return
    if options.prompt is not None:
        raise InvalidParameter("Give either a prompt or --input, not both.")
    if options.compare:
        raise InvalidParameter("--compare is for one prompt; `polydraft bench --prompts FILE` compares on a file.")
    if options.output is None:
        raise InvalidParameter("--input needs --output: the file that the texts are written to.")


def given_grammar(schema: str | None, pattern: str | None, rules: Path | None, *, compact: bool) -> Grammar | None:
    """Return the grammar that the options mean; None if they mean none.

    A schema that begins like JSON is the schema itself, any other text the name of its file.

    Raises:
        InvalidParameter: several are given, a file cannot be read, it is no such grammar, or --compact is without one.
        MissingExtra: llguidance is not installed.
    """
    given = {"--json-schema": schema, "--regex": pattern, "--grammar": rules}
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise InvalidParameter(f"{named[0]} and {named[1]} both say what the text is to be; give one of them.")
    if compact and schema is None:
        raise InvalidParameter("--compact leaves the blanks of JSON out: give --json-schema, or leave it out.")
    if schema is not None:
        text = schema.strip()
        is_schema = text.startswith(("{", "[", '"')) or text in ("true", "false")
        return Grammar.json_schema(schema if is_schema else _read(Path(schema), "--json-schema"), compact=compact)
    if pattern is not None:
        return Grammar.regex(pattern)
    return None if rules is None else Grammar.lark(_read(rules, "--grammar"))


def _read(path: Path, option: str) -> str:
    try:
        return path.expanduser().read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidParameter(f"{option}: {path} is not UTF-8: {error.reason} at byte {error.start}.") from error
    except (OSError, ValueError, RuntimeError) as error:
        why = getattr(error, "strerror", None) or "there can be no file of that name"
        raise InvalidParameter(f"{option}: {str(path)[:200]!r} cannot be read: {why}.") from error
