"""What `--json-schema`, `--compact`, `--regex` and `--grammar` say of the text."""

from pathlib import Path

from polydraft.errors import InvalidParameter
from polydraft.models import Grammar


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
    """Return the text of a file.

    Raises:
        InvalidParameter: it cannot be read, or is not UTF-8.
    """
    try:
        return path.expanduser().read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidParameter(f"{option}: {path} is not UTF-8: {error.reason} at byte {error.start}.") from error
    except (OSError, ValueError, RuntimeError) as error:
        why = getattr(error, "strerror", None) or "there can be no file of that name"
        raise InvalidParameter(f"{option}: {str(path)[:200]!r} cannot be read: {why}.") from error
