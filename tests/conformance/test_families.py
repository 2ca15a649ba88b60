"""What types of models can do: the shipped table, the page and the command that show it, and what it rests on."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from polydraft.cli.commands import app
from polydraft.cli.models import markdown
from polydraft.conformance import check_family, families, known_families
from polydraft.models.tiny import installed_version, registered_types

KNOWN = {one.kind: one for one in known_families().types}


@pytest.mark.families
@pytest.mark.parametrize("kind", registered_types())
def test_every_type_does_what_the_table_says(kind: str) -> None:
    found = check_family(kind)
    assert (found.level, found.fused) == (KNOWN[kind].level, KNOWN[kind].fused), found


def test_the_table_is_of_all_types_of_this_version_and_none_is_wrong() -> None:
    known, pins = known_families(), (Path(__file__).parents[2] / "constraints.txt").read_text()
    if f"transformers=={installed_version()}\n" not in pins:
        pytest.skip("the table is made for the pinned version of transformers")
    assert known.transformers == installed_version()
    assert tuple(one.kind for one in known.types) == registered_types()
    assert not [one for one in known.types if one.level in ("wrong", "error")]
    assert known.share >= 0.9


def test_the_page_shows_the_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    assert markdown(known_families()).strip() in page


def test_one_type_is_checked_by_the_command() -> None:
    found = CliRunner().invoke(app, ["models", "opt", "xlnet", "--check", "--json"])
    told = json.loads(found.stdout)
    assert found.exit_code == 0 and [one["level"] for one in told["types"]] == ["trees", "refused"]
    shown = CliRunner().invoke(app, ["models", "lfm2", "mamba"])
    assert "chains" in shown.stdout and "goes on from its states otherwise" in " ".join(shown.stdout.split())


def test_a_wrong_type_is_said_to_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that writes another text is found out, and the exit code says so."""
    right = families.generate

    def wrong(*given: Any, **named: Any) -> Any:
        found = right(*given, **named)
        if named.get("policy") is not None:
            found.sequences[0, -1] += 1
        return found

    monkeypatch.setattr(families, "generate", wrong)
    assert check_family("opt").level == "wrong"
    assert CliRunner().invoke(app, ["models", "opt", "--check"]).exit_code == 1


def test_a_type_that_there_is_not_is_refused() -> None:
    found = CliRunner().invoke(app, ["models", "lama"])
    assert found.exit_code and "'lama' is no type of causal model" in str(found.exception)
