"""Rules and drafters of a user's own, FILE.py:CLASS: the page's stand as they are, and what can be wrong is named."""

import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import polydraft
import polydraft.catalogue.own as own
import polydraft.catalogue.tables as tables
from polydraft.catalogue import drafter_line, names_file, own_drafter, own_rule, verifier_by_name
from polydraft.cli import main
from polydraft.cli.benchmark.arm_spelling import build_arms, spell_arm
from polydraft.conformance import check_rule
from polydraft.errors import CheckpointError, InvalidParameter, UnpairedScheme
from polydraft.schemes import IID, Given, Product
from polydraft.verifiers import RecursiveRejection, TopDown
from polydraft_lab.limits import LimitsSettings

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "own_rule_and_drafter.md").read_text()
DRAFTER, RULE = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = re.findall(r"^polydraft (.*)$", PAGE, re.MULTILINE)
SHORT = {
    "generate": ["--max-new-tokens", "8", "--json"],
    "bench": ["--limit", "1", "--max-new-tokens", "8", "--temperature", "1", "--json"],
    "conformance": ["--quick", "--json"],
    "limits": ["--limit", "1", "--max-tokens", "3", "--temperature", "1", "--k", "1,2", "--json"],
}
"""What makes the page's commands quick, and their answers readable."""
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Write the page's files into an empty folder, and leave catalogue and interpreter as they were."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tables, "RULES", tables.RULES)
    monkeypatch.setattr(tables, "DRAFTERS", tables.DRAFTERS)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "after_two.py").write_text(DRAFTER)
    (tmp_path / "first_draft.py").write_text(RULE)
    yield
    for name in [one for one in sys.modules if one.startswith(own.OURS) or one in ("first_draft", "after_two")]:
        del sys.modules[name]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Return a function that runs a command and gives its exit code and what it printed."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["polydraft", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        shown = capsys.readouterr()
        return int(end.value.code or 0), shown.out, shown.err

    return run


def test_the_pages_classes_are_short() -> None:
    assert [len([line for line in text.splitlines() if line.strip()]) <= 36 for text in (DRAFTER, RULE)] == [True] * 2
    assert {line.split()[0] for line in COMMANDS} == {*SHORT}


@pytest.mark.long(3)
@pytest.mark.parametrize("line", COMMANDS)
def test_the_pages_commands_run_as_they_stand(line: str, command: Command) -> None:
    words = shlex.split(line)
    code, out, err = command(*words, *SHORT[words[0]])
    assert code == 0, err
    told = [json.loads(row) for row in out.splitlines()]
    if words[0] == "generate":
        assert told[0]["settings"]["drafter"] == "after two" or told[0]["settings"]["verifier"] == "first draft"
        assert told[0]["settings"]["lossless"] and told[0]["statistics"]["new_tokens"] == 8
    if words[0] == "conformance":
        assert told[0]["passed"] and [one["rule"] for one in told[0]["node_rules"]] == ["first draft"]
        assert [one["rule"] for one in told[0]["tree_rules"]] == ["first draft, top down"]
    if words[0] == "limits":
        own, rule = (words[2], "first draft" if "--verifier" in words else "naive match")
        assert [*told[0]["files"]] == [own] and any(one.get("rule") == rule for one in told[1:])
    if words[0] == "bench":
        arm = next(name for name in told[0]["arms"] if ".py" in name)
        assert re.search(r"\(file [0-9a-f]{16}\)$", told[0]["arms"][arm]["description"])


def test_in_python_objects_of_the_classes_do_the_same(tmp_path: Path) -> None:
    sys.path.append(str(tmp_path))
    from after_two import AfterTwo  # pyright: ignore[reportMissingImports]
    from first_draft import FirstDraft  # pyright: ignore[reportMissingImports]

    assert isinstance(AfterTwo(), polydraft.Drafter) and check_rule(FirstDraft(), 2).exact
    pair = polydraft.load_pair()
    ids = pair.tokenizer("def add(a, b):", return_tensors="pt")["input_ids"]
    options: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12}
    plain = polydraft.generate(pair.target, ids, drafter="none", **options)
    found = polydraft.generate(pair.target, ids, drafter=AfterTwo(), **options)
    assert found.sequences.tolist() == plain.sequences.tolist() and found.statistics.drafted > 0
    rule = polydraft.generate(
        pair.target, ids, drafter=pair.draft, verifier=FirstDraft(), policy="2,1", temperature=1.0, seed=1, **options
    )
    assert rule.statistics.accepted > 0


@pytest.mark.wrong_types
def test_a_rule_is_lifted_from_its_file_as_the_catalogues_are() -> None:
    line = own_rule("first_draft.py:FirstDraft")
    assert tables.RULES[-1] is line and line.usual.name == "first draft" and len(line.digest) == 16
    assert own_rule("first_draft.py:FirstDraft").usual == line.usual, "the same file is run once"
    assert [one.word for one in tables.RULES].count(line.word) == 1
    built = build_arms(polydraft.load_pair(), [spell_arm("verifier=first_draft.py:FirstDraft tree=2,1")], ARMS)
    assert built[1].lossless and built[1].description.endswith(f"(file {line.digest})")
    assert "first draft" in {case.label for case in LimitsSettings().node_cases}
    assert TopDown(line.usual) in [case.verifier for case in LimitsSettings().tree_cases]  # pyright: ignore


def test_a_drafter_of_one_scheme_is_verified_under_it() -> None:
    line = own_drafter("after_two.py:AfterTwo")
    assert line.scheme == Given() and drafter_line("after_two.py:AfterTwo") is line
    assert line.named("after_two.py:AfterTwo").name == "after two"


ARMS: Any = type("Settings", (), {"batch_sizes": (1,)})()
LAW = "from first_draft import *\nclass Wrong(FirstDraft):\n    name = 'wrong'\n"
FILES = {
    "undefined.py": "import math\nx = 1\ny = nowhere\n",
    "syntax.py": "x = 1\ndef f(:\n",
    "leaves.py": "import sys\nsys.exit(3)\n",
    "bytes.py": "\ufeffx = '\x00'\n",
    "lossy.py": f"{LAW}    lossless = False\n",
    "short.py": f"{LAW}    def law(self, *a):\n        law = super().law(*a)\n"
    "        return OutcomeLaw(law.child, 0.9 * law.rest)\n",
    "raises.py": f"{LAW}    def law(self, *a):\n        return a[9]\n",
    "twin.py": LAW.replace("'wrong'", "'recursive rejection'"),
    "many.py": "class Needs:\n    def __init__(self, rate): ...\nclass Nothing: ...\nthing = 3\n"
    "class Fails:\n    def __init__(self):\n        self.x = 1 / 0\n",
    "drafters.py": "import polydraft\nclass Part(polydraft.Drafter):\n    def draft(self, *a): ...\n"
    "class Loose:\n    name = 'x'\n",
}
BAD = {
    "no file": ("--verifier nowhere.py:A", "The file nowhere.py cannot be read: no such file or directory."),
    "a folder": ("--verifier folder.py:A", "The file folder.py cannot be read: is a directory."),
    "no class": ("--verifier many.py", "many.py is a file: say which class of it is meant, as many.py:CLASS; it has "),
    "empty class": ("--verifier many.py:", "it has Needs, Nothing, Fails."),
    "a slip": ("--verifier many.py:Neds", "There is no class 'Neds' in many.py (did you mean Needs?)."),
    "another class": ("--verifier many.py:Rule", "There is no class 'Rule' in many.py; it has Needs, Nothing, Fails."),
    "a value": ("--verifier many.py:zzzzzz", "There is no class 'zzzzzz' in many.py;"),
    "arguments": ("--verifier many.py:Needs", "without arguments (missing a required argument: 'rate'): give each"),
    "an error in it": ("--verifier many.py:Fails", "many.py, line 7: ZeroDivisionError: division by zero."),
    "no rule": (
        "--verifier many.py:Nothing",
        "no verification rule: it lacks scheme, name, lossless, law, acceptance (",
    ),
    "an undefined name": ("--verifier undefined.py:A", "line 3: NameError: name 'nowhere' is not defined."),
    "no python": ("--verifier syntax.py:A", "syntax.py, line 2: SyntaxError: invalid syntax."),
    "an exit": ("--verifier leaves.py:A", "leaves.py, line 2: SystemExit: 3."),
    "a null": ("--verifier bytes.py:A", "The file bytes.py ends in an error: "),
    "a rule as drafter": ("--drafter first_draft.py:FirstDraft", "is no drafter: derive it from polydraft.Drafter ("),
    "no drafter": ("--drafter drafters.py:Loose", "is no drafter: derive it from polydraft.Drafter ("),
    "half a drafter": (
        "--drafter drafters.py:Part",
        "is no whole drafter: it lacks name, check, start, commit (",
    ),
    "a drafter as rule": (
        "--verifier after_two.py:AfterTwo",
        "is no verification rule: it lacks scheme, lossless, law",
    ),
}


@pytest.mark.parametrize("given", BAD)
def test_what_is_wrong_with_a_file_is_said_in_one_sentence(given: str, command: Command, tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "folder.py").mkdir()
    asked, says = BAD[given]
    code, _, err = command("generate", "def", *asked.split())
    assert code == 2 and says in err and err.count("\n") == 1, err
    if asked.startswith("--verifier"):
        assert command("bench", "--arm", f"verifier={asked.split()[1]}")[2].split(": ", 1)[-1] == err.split(": ", 1)[-1]


def test_an_error_in_a_rule_while_it_decides_names_its_line(command: Command, tmp_path: Path) -> None:
    (tmp_path / "raises.py").write_text(FILES["raises.py"])
    code, _, err = command("generate", "def", "--verifier", "raises.py:Wrong", "--temperature", "1")
    assert code == 2 and "raises.py, line 5: IndexError: tuple index out of range" in err


def test_an_error_in_a_drafter_names_its_line(tmp_path: Path) -> None:
    lines = [*DRAFTER.splitlines(), "class Wrong(AfterTwo):", "    def draft(self, *a): return a[9]"]
    (tmp_path / "wrong.py").write_text("\n".join(lines))
    pair, line = polydraft.load_pair(), own_drafter("wrong.py:Wrong")
    options: dict[str, Any] = {"drafter": line.kind(), "temperature": 0, "max_new_tokens": 4}
    with pytest.warns(RuntimeWarning, match=rf"wrong.py, line {len(lines)}: IndexError: tuple index out of range\);"):
        found = polydraft.generate(pair.target, torch.tensor([[5, 6, 7]]), **options)
    assert found.statistics.fallback.endswith(f"wrong.py, line {len(lines)}: IndexError: tuple index out of range")


def test_a_rule_whose_law_is_short_is_noticed_everywhere(command: Command, tmp_path: Path) -> None:
    (tmp_path / "short.py").write_text(FILES["short.py"])
    (tmp_path / "lossy.py").write_text(FILES["lossy.py"])
    code, out, err = command("generate", "def", "--verifier", "short.py:Wrong", "--temperature", "1", "--json")
    assert code == 2 and not out and "The rule 'wrong' gives no law: at a node the probabilities of its outcomes" in err
    code, out, _ = command("conformance", "--verifier", "short.py:Wrong", "--quick", "--json")
    assert code == 1 and not json.loads(out)["passed"]
    code, _, err = command("limits", "--verifier", "short.py:Wrong")
    assert code == 2 and "short.py:Wrong is not exact, its law deviates by 0.1" in err
    code, _, err = command("limits", "--verifier", "lossy.py:Wrong")
    assert code == 2 and "lossy.py:Wrong says that it is lossy" in err
    code, _, err = command("limits", "--verifier", "optimal")
    assert code == 2 and "--verifier adds FILE.py:CLASS, not 'optimal'" in err


def test_rules_of_one_name_are_told_apart_by_their_words(tmp_path: Path) -> None:
    (tmp_path / "twin.py").write_text(FILES["twin.py"])
    own_rule("twin.py:Wrong")
    own_rule("first_draft.py:FirstDraft")
    names = [case.label for case in LimitsSettings().node_cases if case.scheme == IID()]
    assert {"recursive rejection", "twin.py:Wrong", "first draft"} < {*names} and len({*names}) == len(names)
    trees = [(case.chain, case.label) for case in LimitsSettings().tree_cases if case.verifier.scheme == IID()]
    assert {(False, "top-down twin.py:Wrong"), (False, "top-down first draft")} < {*trees}
    assert len({*trees}) == len(trees)
    assert verifier_by_name("recursive rejection", "model") == TopDown(RecursiveRejection())


@pytest.mark.slow
def test_records_of_a_changed_file_are_of_another_run(command: Command, tmp_path: Path) -> None:
    arm = ["--arm", "name=mine drafter=after_two.py:AfterTwo"]
    bench = ["bench", *arm, "--prompts", "python", *SHORT["bench"], "--out", "runs.jsonl"]
    limits = ["limits", "--verifier", "first_draft.py:FirstDraft", "--prompts", "python", *SHORT["limits"]]
    texts = [
        "generate",
        "--input",
        "rows.txt",
        "--output",
        "texts.jsonl",
        "--drafter",
        "after_two.py:AfterTwo",
        "--json",
    ]
    (tmp_path / "rows.txt").write_text("def add(a, b):\n")
    calls = [bench, [*limits, "--tree-every", "0", "--out", "limits"], [*texts, "--max-new-tokens", "4"]]
    for call in calls:
        assert [command(*call)[0] for _ in range(2)] == [0, 0], "the same file goes on"
    for name in ("after_two.py", "first_draft.py"):
        (tmp_path / name).write_text(f"{(tmp_path / name).read_text()}# changed\n")
    for call in calls:
        code, _, err = command(*call)
        assert code == 2 and "is of a run with other settings" in err, err


def test_servers_and_python_run_no_file(command: Command, tmp_path: Path) -> None:
    (tmp_path / "mark.py").write_text("from pathlib import Path\nPath('ran').touch()\n")
    for option in ("--verifier", "--drafter"):
        code, _, err = command("serve", option, "mark.py:A")
        assert code == 2 and f"A server runs no file of rules or drafters: give {option} a word" in err
    pair, ids = polydraft.load_pair(), torch.tensor([[1, 2, 3]])
    for name in ("verifier", "drafter"):
        with pytest.raises(InvalidParameter, match=f"pass {name}=CLASS"):
            polydraft.generate(pair.target, ids, max_new_tokens=2, **{name: "mark.py:A"})
    with pytest.raises(CheckpointError):
        polydraft.load("pair", "mark.py:A")
    assert not (tmp_path / "ran").exists()
    with pytest.raises(InvalidParameter, match=r"There is no class 'A' in mark\.py"):
        own_rule("mark.py:A")
    assert (tmp_path / "ran").exists(), "the command line would have run it"


def test_words_of_the_catalogue_are_no_files() -> None:
    assert names_file("my.py:A") and names_file("/a b/c.py") and names_file("C:\\x.py:A")
    assert not any(map(names_file, ("ngram:3", "rest:texts.py", "suffix:a.py:b", "optimal", "org/name", "a.pyc:B", "")))


SAMPLED = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / "design" / "extending.md").read_text(), re.M | re.S)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_drafter_that_samples_runs_as_it_stands(temperature: float, tmp_path: Path) -> None:
    (text,) = [one for one in SAMPLED if "class Unigram" in one]
    named = dict[str, Any]()
    exec(text, named)
    pair = polydraft.load_pair()
    ids = pair.tokenizer("def add(a, b):", return_tensors="pt")["input_ids"]
    options: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "temperature": temperature}
    found = polydraft.generate(pair.target, ids, drafter=named["Unigram"](), seed=1, **options)
    assert found.statistics.drafted > 10 and not found.statistics.fallback
    for scheme in (Product(), Given()):
        with pytest.raises(UnpairedScheme):
            named["Unigram"]().check(scheme)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*decoded without drafts")
def test_a_drafter_of_fewer_tokens_than_it_says_does_not_pass_unseen(command: Command) -> None:
    page = next(one for one in SAMPLED if "class Unigram" in one)
    Path("wide.py").write_text(page.replace("return session.vocab_size", "return session.vocab_size + 9"))
    Path("fits.py").write_text(page)
    code, out, _ = command("conformance", "--drafter", "fits.py:Unigram", "--quick", "--json")
    assert code == 0 and json.loads(out)["passed"] and json.loads(out)["failed"] == []
    code, out, _ = command("conformance", "--drafter", "wide.py:Unigram", "--quick", "--json")
    assert code == 1 and not json.loads(out)["passed"] and "target's tokens are 0 to 4" in json.loads(out)["failed"][0]
