"""Records in a file: appended when finished, read again, refused where they belong to another run."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from doubles import perturbed, tiny_tokenizer

from polydraft.bench import Prompt
from polydraft.errors import ResultsError
from polydraft.models import Pair
from polydraft_lab.limits import LimitsSettings, Models, Record, Results, conditions_of, keys_of, measure

CONDITIONS = {"seed": 1, "drafts": [1, 2], "target": {"name": "t"}}
ONE = Record("a", "1", 0.5, 3, {"iid": {"2": {"optimum": 1.5}}}, 1, {"2,1": {"iid": {"x": 0.25}}})
TWO = Record("a", "2", 0.5, 3, {"iid": {"2": {"optimum": 2.5}}}, 0, {})


def test_records_come_back_as_they_were(tmp_path: Path) -> None:
    first = Results(CONDITIONS, tmp_path / "new" / "folder")
    first.add(ONE)
    first.add(TWO)
    again = Results(CONDITIONS, tmp_path / "new" / "folder")
    assert again.records == {("a", "1", 0.5): ONE, ("a", "2", 0.5): TWO}
    assert len((tmp_path / "new" / "folder" / "limits.jsonl").read_text().splitlines()) == 3


def test_without_a_folder_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Results(CONDITIONS).add(ONE)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("cut", [1, 40])
def test_a_line_cut_short_by_a_crash_is_dropped_and_written_again(cut: int, tmp_path: Path) -> None:
    results = Results(CONDITIONS, tmp_path)
    results.add(ONE)
    results.add(TWO)
    path = tmp_path / "limits.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])
    again = Results(CONDITIONS, tmp_path)
    assert list(again.records.values()) == [ONE]
    again.add(TWO)
    assert Results(CONDITIONS, tmp_path).records == results.records


def test_a_header_cut_short_is_written_again(tmp_path: Path) -> None:
    (tmp_path / "limits.jsonl").write_text('{"condit')
    Results(CONDITIONS, tmp_path).add(ONE)
    assert list(Results(CONDITIONS, tmp_path).records.values()) == [ONE]


def test_other_conditions_are_refused_and_named(tmp_path: Path) -> None:
    Results(CONDITIONS, tmp_path).add(ONE)
    before = (tmp_path / "limits.jsonl").read_bytes()
    with pytest.raises(ResultsError) as caught:
        Results({**CONDITIONS, "seed": 2, "target": {"name": "u"}}, tmp_path)
    assert "seed is 1 there and 2 here; target name is t there and u here" in str(caught.value)
    assert (tmp_path / "limits.jsonl").read_bytes() == before


@pytest.mark.parametrize("line", ["{oops}", "[]", '{"task": "a"}', '{"conditions": {}}'])
def test_a_damaged_line_is_named(line: str, tmp_path: Path) -> None:
    Results(CONDITIONS, tmp_path).add(ONE)
    with (tmp_path / "limits.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ResultsError, match=r"limits\.jsonl, line 3: this is no line of results"):
        Results(CONDITIONS, tmp_path)


@pytest.mark.parametrize(
    ("field", "value"), [("positions", "many"), ("temperature", None), ("nodes", {"iid": 1}), ("trees", [])]
)
def test_a_field_of_another_type_is_named(field: str, value: object, tmp_path: Path) -> None:
    Results(CONDITIONS, tmp_path).add(ONE)
    with (tmp_path / "limits.jsonl").open("a") as file:
        file.write(json.dumps({**asdict(ONE), field: value}) + "\n")
    with pytest.raises(ResultsError, match=rf"line 3: this is no line of results: {field} is "):
        Results(CONDITIONS, tmp_path)


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResultsError, match="the results cannot be kept there"):
        Results(CONDITIONS, tmp_path / "file")


def test_conditions_tell_weights_and_settings_apart(models: Models, settings: LimitsSettings) -> None:
    names = ("t", "d")
    mine = conditions_of(models, settings, names)
    assert json.loads(json.dumps(mine)) == mine
    assert conditions_of(models, replace(settings, temperatures=(0.3,)), names) == mine
    assert conditions_of(models, replace(settings, seed=1), names) != mine
    other = Models.of(Pair(models.pair.target, perturbed(models.pair.target, 0.1, seed=1), tiny_tokenizer()))
    assert conditions_of(other, settings, names)["draft"] != mine["draft"]
    assert conditions_of(other, settings, names)["target"] == mine["target"]


def test_an_interrupted_run_goes_on_and_ends_as_if_it_had_not(
    models: Models, prompts: list[Prompt], settings: LimitsSettings, records: list[Record], tmp_path: Path
) -> None:
    assert [one.key for one in records] == keys_of(prompts, settings)
    first = Results(CONDITIONS, tmp_path)
    for record in records[:4]:
        first.add(record)
    again = Results(CONDITIONS, tmp_path)
    rest = list(measure(models, prompts, settings, {*again.records}))
    assert [*again.records.values(), *rest] == records
