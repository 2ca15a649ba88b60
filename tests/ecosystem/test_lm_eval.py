"""lm-eval: the server and the model in process tell what lm-eval's own model `hf` tells, with drafts on."""

import json
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="make test-ecosystem installs lm-eval")

import httpx
import lm_eval
import torch
from lm_eval.tasks import TaskManager
from serving import served

from polydraft.errors import CheckpointError, InvalidParameter
from polydraft.fetched import place
from polydraft.integrations.lm_eval import PolydraftLM, StopsOfRow
from polydraft.models.loading import SHIPPED

pytestmark = [pytest.mark.ecosystem, pytest.mark.filterwarnings("default")]
WORDS = "path name value line index result node count token buffer".split()
ITEMS = 40
CHOICE = """
task: local_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{start}}}}"
doc_to_choice: "{{{{ends}}}}"
doc_to_target: right
target_delimiter: ""
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
GENERATION = """
task: local_generation
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{wanted}}}}"
generation_kwargs: {{until: ["\\n\\n", ":"], max_gen_toks: {tokens}, do_sample: false}}
metric_list: [{{metric: exact_match}}]
"""
ROLLING = """
task: local_rolling
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: bits_per_byte}}]
"""
TASKS = {"local_choice": CHOICE, "local_generation": GENERATION, "local_rolling": ROLLING}


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def write_tasks(folder: Path, tokens: int) -> None:
    """Write the tasks and their data: 40 items each, but for four texts to be scored whole."""
    stream = random.Random(0)

    def call() -> str:
        return f"def {stream.choice(WORDS)}_{stream.choice(WORDS)}({stream.choice(WORDS)}, {stream.choice(WORDS)})"

    ends = (":\n    return 0", ":\n    pass\n", " -> None:\n", " = 3")
    choices = [{"start": call(), "ends": ends, "right": stream.randrange(4)} for _ in range(ITEMS)]
    prompts = [{"prompt": f"{call()}:\n", "wanted": '    """'} for _ in range(ITEMS)]
    texts = [{"text": "\n".join(f"{call()}:\n    return {stream.choice(WORDS)}" for _ in range(4))} for _ in range(4)]
    for name, rows in zip(TASKS, (choices, prompts, texts), strict=True):
        file = written(folder / f"{name}.jsonl", rows)
        (folder / f"{name}.yaml").write_text(TASKS[name].format(file=file, tokens=tokens))


@dataclass(frozen=True)
class Told:
    """What a run told: the scores of each task, the answers to every item, in order, and what it says of the model."""

    scores: dict[str, dict[str, float]]
    answers: dict[str, list[Any]]
    config: dict[str, Any]


def evaluated(folder: Path, model: str, arguments: dict[str, Any], tasks: tuple[str, ...] = (*TASKS,)) -> Told:
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    told = lm_eval.simple_evaluate(
        model=model, model_args=arguments, tasks=list(tasks), task_manager=manager, device="cpu", bootstrap_iters=0
    )
    scores = {
        task: {name: value for name, value in found.items() if isinstance(value, float) and "stderr" not in name}
        for task, found in told["results"].items()
    }
    rows = {task: sorted(told["samples"][task], key=lambda row: row["doc_id"]) for task in tasks}
    return Told(scores, {task: [row["resps"] for row in found] for task, found in rows.items()}, told["config"])


def likelihoods(answers: list[Any]) -> list[tuple[float, bool]]:
    """Return the log-likelihoods of a task, with whether the text would be the greedy one; of rolling ones not."""
    found = [each[0] if isinstance(each, list) else each for row in answers for each in row]
    return [(float(one[0]), bool(one[1])) if isinstance(one, tuple) else (float(one), True) for one in found]


@dataclass(frozen=True)
class Tried:
    """A model to be evaluated: a folder with tasks, the target's own, its drafts, and how many tokens a text has."""

    tasks: Path
    target: Path
    drafts: str
    tokens: int


@contextmanager
def by_server(tried: Tried) -> Iterator[dict[str, Any]]:
    """Serve a model with its drafts, in single precision as `hf` loads it, and yield lm-eval's arguments."""
    settings = {"target": str(tried.target), "draft": tried.drafts, "dtype": "float32", "model_name": "tested"}
    with served(**settings, batch_size=4) as address:
        yield {
            "base_url": f"{address}/v1/completions",
            "model": "tested",
            "tokenizer": str(tried.target),
            "tokenizer_backend": "huggingface",
            "tokenized_requests": True,
            "num_concurrent": 4,
            "max_length": 1024,
        }


@pytest.fixture(scope="module", params=["pair", pytest.param("smollm2", marks=pytest.mark.slow)])
def tried(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tried:
    folder = tmp_path_factory.mktemp("tasks")
    if request.param == "pair":
        found = Tried(folder, SHIPPED["pair"], str(SHIPPED["pair-draft"]), tokens=24)
    else:
        found = Tried(folder, place("smollm2"), str(SHIPPED["smollm2-head"]), tokens=12)
    if not found.target.is_dir():
        pytest.skip("needs `polydraft fetch smollm2`")
    write_tasks(folder, found.tokens)
    return found


@pytest.fixture(scope="module")
def plain(tried: Tried) -> Told:
    return evaluated(tried.tasks, "hf", {"pretrained": str(tried.target), "dtype": "float32"})


def check_same(told: Told, plain: Told) -> None:
    """Check scores, log-likelihoods and texts; of these there are several kinds, so that equality says something."""
    assert told.scores == {task: pytest.approx(scores, abs=1e-5) for task, scores in plain.scores.items()}
    for task in ("local_choice", "local_rolling"):
        mine, theirs = likelihoods(told.answers[task]), likelihoods(plain.answers[task])
        assert [one for one, _ in mine] == pytest.approx([one for one, _ in theirs], abs=1e-3, rel=0)
        assert [one for _, one in mine] == [one for _, one in theirs]
    assert told.answers["local_generation"] == plain.answers["local_generation"]


@pytest.mark.parametrize("batch", [1, 8])
def test_the_model_in_process(tried: Tried, plain: Told, batch: int) -> None:
    given = {"pretrained": str(tried.target), "dtype": "float32", "drafter": tried.drafts, "batch_size": batch}
    told = evaluated(tried.tasks, "polydraft", given)
    check_same(told, plain)
    counted = told.config["polydraft"]
    assert counted["lossless"] and counted["accepted"] > ITEMS and counted["block_efficiency"] > 1.3


def test_the_server(tried: Tried, plain: Told) -> None:
    with by_server(tried) as arguments:
        told = evaluated(tried.tasks, "local-completions", arguments)
        measured = httpx.get(arguments["base_url"].replace("v1/completions", "metrics")).text
    check_same(told, plain)
    (accepted,) = re.findall(r"^polydraft:spec_decode_num_accepted_tokens_total{.*} (.*)$", measured, re.MULTILINE)
    assert float(accepted) > ITEMS


def test_texts_differ_and_end_at_strings(plain: Told) -> None:
    """Else the other tests would prove nothing."""
    texts = [row[0][0] if isinstance(row[0], list) else row[0] for row in plain.answers["local_generation"]]
    assert len({*texts}) > 5
    values = [round(one, 3) for one, _ in likelihoods(plain.answers["local_choice"])]
    assert len(values) == 4 * ITEMS and len({*values}) > ITEMS
    assert 0.05 < plain.scores["local_choice"]["acc,none"] < 0.95


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"drafter": "ngramm"}, InvalidParameter, "did you mean ngram"),
        ({"drafter": "/no/such/folder"}, CheckpointError, "/no/such/folder"),
        ({"policy": "2,x"}, InvalidParameter, "2,x"),
        ({"verifier": "optimall"}, InvalidParameter, "optimal"),
    ],
)
def test_what_means_nothing_is_said_before_texts(given: dict[str, str], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        PolydraftLM(str(SHIPPED["pair"]), device="cpu", **given)


class Letters:
    """A tokenizer with a token for each letter."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [*map(ord, text)]

    def batch_decode(self, sequences: Any) -> list[str]:
        return ["".join(map(chr, row)) for row in sequences.tolist()]


@pytest.mark.parametrize(
    ("text", "ends"), [("ab\n", False), ("b\n\n", True), ("a#", False), ("a##", True), ("", False)]
)
def test_a_row_ends_at_a_string_of_its_own_text(text: str, ends: bool) -> None:
    prompt = "x\n\n#"
    stops = StopsOfRow(Letters(), ["\n\n", "##", ""], begin=len(prompt))
    assert stops(torch.tensor([[*map(ord, prompt + text)]]), None) is ends


RUN = """
import runpy, lm_eval.__main__
from lm_eval.api.registry import get_model
lm_eval.__main__.cli_evaluate = lambda: print(get_model("polydraft").__mro__[:2])
runpy.run_module("polydraft.integrations.lm_eval", run_name="__main__")
"""


def test_run_as_a_module_it_is_lm_evals_command_with_one_model_more() -> None:
    ended = subprocess.run([sys.executable, "-c", RUN], capture_output=True, text=True)
    assert ended.stdout.strip().endswith("PolydraftLM'>, <class 'lm_eval.models.huggingface.HFLM'>)"), ended.stderr
