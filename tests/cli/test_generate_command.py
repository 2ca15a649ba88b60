import inspect
import json
import sys
from pathlib import Path

import pytest
import torch

import polydraft
from polydraft.cli import main
from polydraft.drafters import DraftRequest, ModelDrafter, is_head
from polydraft.drafters.model import ModelDraftState
from polydraft.fetched import SHIPPED
from polydraft.models import compiled as compiled_passes
from polydraft.models import shipped_head

Folders = tuple[Path, Path]

ROUTE = "route-first (ngram or suffix or recycling, else model)"
"""Who drafts by default beside a draft model."""

compiles = pytest.mark.skipif(
    "isolate_recompiles" not in inspect.signature(torch.compile).parameters, reason="compiling needs torch 2.13"
)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["polydraft", *arguments])
    with pytest.raises(SystemExit) as exit_:
        main()
    return int(exit_.value.code or 0)


def models(folders: Folders) -> list[str]:
    return ["--target", str(folders[0]), "--draft", str(folders[1])]


def test_json_is_one_object_with_the_text_that_the_library_gives(
    folders: Folders, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = run(monkeypatch, "generate", "def add", *models(folders), "--json", "--max-new-tokens", "9")
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    pair = polydraft.load(*folders)
    ids = torch.tensor(pair.tokenizer("def add")["input_ids"]).unsqueeze(0)
    expected = polydraft.generate(pair.target, ids, drafter=pair.draft, temperature=0, max_new_tokens=9)
    assert isinstance(expected, polydraft.GenerationOutput)
    assert code == 0 and captured.err == ""
    assert result["tokens"] == expected.sequences[0, ids.shape[1] :].tolist()
    assert result["text"] == pair.tokenizer.decode(result["tokens"], skip_special_tokens=True)
    assert result["settings"]["verifier"] == "naive match" and result["settings"]["scheme"] == "top-k"
    assert result["settings"]["lossless"] is True
    assert result["statistics"]["new_tokens"] == 9


def test_a_target_with_a_head_inside_is_drafted_for_by_it(
    folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, tuned = tmp_path / "prompts.jsonl", tmp_path / "tuned"
    prompts.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("def add", "class Point", "return a")))
    making = ("--work", str(tmp_path / "work"), "--tokens", "100", "--length", "24", "--steps", "2", "--drafts", "2")
    given = ("--target", str(folders[0]), "--prompts", str(prompts), "--out", str(tuned), *making)
    assert run(monkeypatch, "train", "head", "medusa-2", *given) == 0
    capsys.readouterr()
    for more, draft in (((), "its own head"), (("--drafter", "none"), None)):
        asked = ("--target", str(tuned), "--json", "--max-new-tokens", "9", *more)
        assert run(monkeypatch, "generate", "def add", *asked) == 0
        result = json.loads(capsys.readouterr().out)
        assert result["settings"]["draft"] == draft
        assert (result["statistics"]["drafted"] > 0) == (draft is not None)
    pair = polydraft.load(tuned)
    assert pair.draft.network.name == "medusa"  # type: ignore[union-attr]


def test_text_comes_without_colour_codes_when_piped_and_ends_with_the_table(
    folders: Folders, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--temperature", "0.8", "--seed", "3", "--max-new-tokens", "9"]
    assert run(monkeypatch, "generate", "def add", *models(folders), *arguments) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert shown.startswith("def add")
    for words in (
        "block verification on chains",
        "block efficiency",
        "acceptance by depth",
        "tokens per second",
        "target calls",
    ):
        assert words in shown
    assert run(monkeypatch, "generate", "def add", *models(folders), *arguments, "--quiet") == 0
    quiet = capsys.readouterr().out
    assert run(monkeypatch, "generate", "def add", *models(folders), *arguments, "--json") == 0
    assert quiet == json.loads(capsys.readouterr().out)["text"] + "\n"


def test_compare_measures_the_speed_up_in_the_same_run(
    folders: Folders, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--max-new-tokens", "8", "--compare", "--json"]
    assert run(monkeypatch, "generate", "def add", *models(folders), *arguments) == 0
    compared = json.loads(capsys.readouterr().out)["compare"]
    assert all(compared["same_text"]) and len(compared["speedups"]) == 5
    assert compared["plain"]["block_efficiency"] == 1.0
    assert compared["speedup"] == sorted(compared["speedups"])[2]


@pytest.mark.long(3)
@pytest.mark.parametrize("drafter", ["ngram", "none", "model", "lookup-first", "jacobi", "lookahead", "ouroboros"])
@pytest.mark.parametrize("verifier", ["auto", "naive"])
def test_every_drafter_gives_the_greedy_text(
    drafter: str,
    verifier: str,
    folders: Folders,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    texts, target = [], models(folders)[:2]
    used = models(folders) if drafter in ("model", "lookup-first", "ouroboros") else target
    how = [] if drafter == "none" else ["--verifier", verifier, "--tree", "2,1"]
    for extra in ([*target, "--drafter", "none"], [*used, "--drafter", drafter, *how]):
        assert run(monkeypatch, "generate", "class", *extra, "-q", "--max-new-tokens", "12") == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]


BAD = {
    "empty prompt": (["generate", ""], "The prompt is empty"),
    "tree": (["generate", "x", "--tree", "4,x"], "A tree is written as children per depth"),
    "temperature": (["generate", "x", "--temperature", "-1"], "temperature must be a finite number >= 0"),
    "parallel": (["generate", "x", "--parallel", "1"], "--parallel must be a number of ranks from 2 to 1024"),
    "top_p": (["generate", "x", "--temperature", "1", "--top-p", "1.5"], "--top-p must be in (0, 1]"),
    "verifier": (["generate", "x", "--verifier", "magic"], "magic"),
    "folder": (["generate", "x", "--target", "./no-such-folder"], "There is no model folder './no-such-folder'"),
    "draft alone": (
        ["generate", "x", "--draft", "pair-head"],
        "--draft needs --target: a draft belongs to its target; that of the embedded pair is --target pair.",
    ),
    "model without draft": (["generate", "x", "--target", "y", "--drafter", "model"], "needs a draft model"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence_and_exit_code_2(
    case: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, sentence = BAD[case]
    assert run(monkeypatch, *arguments) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err and "Traceback" not in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--verifier", "speculative", "--tree", "2,1"], "Speculative sampling verifies one draft per node"),
        (["--plan", "auto", "--tree", "2,1"], "--plan auto chooses the tree of every step"),
        (["--dtype", "float23"], "There is no dtype 'float23'"),
        (["--device", "toaster"], "There is no device 'toaster'"),
    ],
)
def test_pairings_that_cannot_work_are_refused(
    arguments: list[str],
    sentence: str,
    folders: Folders,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(monkeypatch, "generate", "def", *models(folders), *arguments) == 2
    assert sentence in capsys.readouterr().err


def test_lookups_under_a_rule_that_samples_drafts_are_refused(
    folders: Folders, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lookups = ["--drafter", "ngram", "--verifier", "recursive"]
    assert run(monkeypatch, "generate", "def", "--target", str(folders[0]), *lookups) == 2
    assert "The ngram drafter works with drafts that are given" in capsys.readouterr().err


def test_a_long_prompt_is_refused_and_a_long_wish_is_cut(
    folders: Folders, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "generate", "x = 1\n" * 200, *models(folders)) == 2
    assert "at most 128 fit" in capsys.readouterr().err
    assert run(monkeypatch, "generate", "x", *models(folders), "--max-new-tokens", "500", "--json") == 0
    assert json.loads(capsys.readouterr().out)["finish"] in ("context", "eos")


def test_a_planner_writes_the_greedy_text_and_says_that_it_chose(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["generate", "def add", *models(folders), "--max-new-tokens", "30"]
    assert run(monkeypatch, *arguments[:4], *arguments[6:], "--drafter", "none", "-q") == 0
    plain = capsys.readouterr().out
    assert run(monkeypatch, *arguments, "--plan", "auto", "-q") == 0
    assert capsys.readouterr().out == plain
    assert run(monkeypatch, *arguments, "--plan", "auto") == 0
    assert "chosen for every step" in capsys.readouterr().out


def test_ctrl_c_loses_nothing(
    folders: Folders, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = ModelDrafter.draft

    def interrupted(self: ModelDrafter, state: ModelDraftState, request: DraftRequest) -> object:
        if int(request.text.lengths[0]) > 10:
            raise KeyboardInterrupt
        return original(self, state, request)

    monkeypatch.setattr(ModelDrafter, "draft", interrupted)
    arguments = ["generate", "def add", *models(folders), "--drafter", "model", "--max-new-tokens", "50"]
    assert run(monkeypatch, *arguments) == 130
    shown, said = capsys.readouterr()
    assert said == "polydraft: Interrupted: the text that was written is printed.\n"
    assert "new tokens" in shown and len(shown.splitlines()[0]) > len("def add")
    assert run(monkeypatch, *arguments, "--json") == 130
    result = json.loads(capsys.readouterr().out)
    assert result["finish"] == "interrupted" and 0 < len(result["tokens"]) < 50


def test_standard_input_is_a_prompt(
    folders: Folders, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import io

    monkeypatch.setattr(sys, "stdin", io.StringIO("def add"))
    assert run(monkeypatch, "generate", "-", *models(folders), "--json", "--max-new-tokens", "2") == 0
    assert json.loads(capsys.readouterr().out)["prompt"] == "def add"


def test_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "--version") == 0
    assert capsys.readouterr().out.strip() == polydraft.__version__


def by_dynamo_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no code be generated, which takes a minute."""
    kept = compiled_passes._passes_of
    monkeypatch.setattr(compiled_passes, "_passes_of", lambda model, backend: kept(model, "eager"))


@pytest.mark.slow
@compiles
def test_compiling_says_so_first_and_changes_no_text(
    folders: Folders, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    by_dynamo_alone(monkeypatch)
    common = ["generate", "def add", *models(folders), "--max-new-tokens", "12"]
    assert run(monkeypatch, *common) == 0
    plain = capsys.readouterr()
    assert run(monkeypatch, *common, "--compile") == 0
    compiled = capsys.readouterr()
    assert "Compiled in" in compiled.err and "Compiled in" not in plain.err
    assert compiled.out.split("drafter")[0] == plain.out.split("drafter")[0]


@pytest.mark.slow
@compiles
def test_compiled_batches_from_a_file_write_the_same_texts(
    folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    by_dynamo_alone(monkeypatch)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("def add\nclass Point\nreturn\n")
    common = ["generate", "--input", str(prompts), *models(folders), "--max-new-tokens", "9", "--batch-size", "2"]
    texts = []
    for name, more in (("plain", []), ("compiled", ["--compile"])):
        output = tmp_path / f"{name}.jsonl"
        assert run(monkeypatch, *common, "--output", str(output), *more) == 0
        lines = [json.loads(line) for line in output.read_text().splitlines()]
        texts.append({line["id"]: line["text"] for line in lines if "text" in line})
    assert len(texts[0]) == 3 and texts[0] == texts[1]
    assert "Compiled in" in capsys.readouterr().err


def test_compiling_and_a_plan_of_many_trees_exclude_each_other(
    folders: Folders, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "generate", "def add", *models(folders), "--compile", "--plan", "auto") == 2
    assert "--compile is for one tree" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "drafter", "planned"),
    [
        ([], ROUTE, False),
        (["--temperature", "0.9"], "model", False),
        (["--verifier", "recursive"], ROUTE, False),
        (["--tree", "2,1"], "model", False),
        (["--drafter", "model"], "model", False),
        (["--drafter", "lookup-first", "--temperature", "0.9"], "lookup-first (model)", False),
        (["--plan", "auto"], ROUTE, True),
        (["--temperature", "0.9", "--seed", "1", "--plan", "auto"], "model", True),
        (["--plan", "goodput"], "model", True),
    ],
)
def test_the_defaults_are_those_of_python(
    arguments: list[str],
    drafter: str,
    planned: bool,
    folders: Folders,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    common = ["generate", "def add", *models(folders), "--json", "--max-new-tokens", "4"]
    assert run(monkeypatch, *common, *arguments) == 0
    settings = json.loads(capsys.readouterr().out)["settings"]
    assert ("chosen for every step" in settings["tree"]) is planned and settings["drafter"] == drafter


PAIR = Path(polydraft.__file__).parent / "data" / "pair"


@pytest.mark.long(1)
@pytest.mark.parametrize(
    ("drafter", "tree", "name"),
    [("model", "3", "block head"), ("lookup-first", "3", "lookup-first (block head)"), ("ngram", "3", "ngram")],
)
def test_a_head_drafts_by_every_word_that_takes_a_draft(
    drafter: str, tree: str, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("--draft", str(PAIR / "head")) if drafter != "ngram" else ()
    names = ("--target", str(PAIR / "target"), *given, "--drafter", drafter, "--tree", tree)
    code = run(monkeypatch, "generate", "def add(a, b):", *names, "--json", "--max-new-tokens", "12")
    captured = capsys.readouterr()
    assert (code, captured.err) == (0, "")
    result = json.loads(captured.out)
    assert result["settings"]["drafter"] == name
    assert result["settings"]["draft"] == (str(PAIR / "head") if given else None)
    assert result["statistics"]["new_tokens"] == 12 and (
        drafter == "ngram" or result["statistics"]["target_calls"] < 12
    )


def test_the_models_that_ship_have_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pair-head").mkdir()  # a folder of that name is ./pair-head
    texts = set()
    for draft, name in (("pair-head", "block head"), ("pair-draft", "model")):
        names = ("--target", "pair", "--draft", draft, "--drafter", "model", "--tree", "3")
        code = run(monkeypatch, "generate", "def add(a, b):", *names, "--json", "--max-new-tokens", "12")
        captured = capsys.readouterr()
        assert (code, captured.err) == (0, "")
        result = json.loads(captured.out)
        assert (result["settings"]["target"], result["settings"]["draft"]) == ("pair", draft)
        assert result["settings"]["drafter"] == name and result["statistics"]["target_calls"] < 12
        texts.add(result["text"])
    assert len(texts) == 1


def test_words_of_what_ships_are_the_folders_in_the_package() -> None:
    for word, folder in (("pair", "target"), ("pair-draft", "draft"), ("pair-head", "head")):
        assert SHIPPED[word] == PAIR / folder and SHIPPED[word].is_dir()
    assert shipped_head("smollm2") == SHIPPED["smollm2-head"] and is_head("smollm2-head") and not is_head("pair")
    pair = polydraft.load("pair", "pair-head")
    ids = torch.tensor(pair.tokenizer("def add(a, b):")["input_ids"]).unsqueeze(0)
    options = {"temperature": 0, "max_new_tokens": 8}
    found = polydraft.generate(pair.target, ids, drafter="pair-head", **options)
    assert found.statistics.drafted
    assert torch.equal(found.sequences, polydraft.generate(pair.target, ids, drafter="none", **options).sequences)
