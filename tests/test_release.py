"""What a release and a deployment are made of: README for an index, the workflow, the container, its neighbours."""

import json
import re
import runpy
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import polydraft

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "integrations" / "deploy"
FOR_INDEX = runpy.run_path(str(ROOT / "docs" / "for_index.py"))
REPOSITORY, TAG = "https://github.com/owner/name", "v1.2.3"
RAW = "https://raw.githubusercontent.com/owner/name/v1.2.3/"


def steps(job: str) -> list[dict[str, Any]]:
    return workflow()["jobs"][job]["steps"]


def workflow() -> dict[str, Any]:
    return yaml.safe_load((ROOT / ".github" / "workflows" / "publish.yml").read_text())


def test_every_link_of_readme_is_an_address_on_an_index() -> None:
    text = FOR_INDEX["with_addresses"]((ROOT / "README.md").read_text(), REPOSITORY, TAG)
    links = re.findall(r"(!?)\[[^\]]*\]\(([^)\s]+)\)", text)
    assert len(links) > 30 and all(place.startswith(("https://", "http://127.0.0.1", "#")) for _, place in links)
    pages = [place.removeprefix(f"{REPOSITORY}/blob/{TAG}/") for picture, place in links if not picture]
    pictures = [place.removeprefix(RAW) for picture, place in links if picture]
    for place in (*pages, *pictures):
        if not place.startswith(("http", "#")):
            assert (ROOT / place.partition("#")[0]).is_file(), place
    assert pictures and not any(place.startswith("http") for place in pictures)


def test_the_metadata_gets_the_projects_addresses() -> None:
    plain = (ROOT / "pyproject.toml").read_text()
    found = tomllib.loads(FOR_INDEX["with_urls"](plain, REPOSITORY, TAG))["project"]
    urls = found.pop("urls")
    assert found == tomllib.loads(plain)["project"]
    assert urls["Repository"] == REPOSITORY and urls["Issues"] == f"{REPOSITORY}/issues"
    assert found["authors"] and found["readme"] == "README.md"


@pytest.mark.parametrize("address", ["owner/name", "https://example.org/a/b", f"{REPOSITORY}/tree"])
def test_what_is_no_repository_changes_nothing(address: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="is no address of a repository"):
        FOR_INDEX["main"](tmp_path, address, TAG)


def test_both_files_are_changed_in_place(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("[a](docs/design.md) ![b](b.svg) [c](https://c.org) [d](#d)")
    (tmp_path / "pyproject.toml").write_text("[project]\n[project.scripts]\n")
    FOR_INDEX["main"](tmp_path, REPOSITORY, TAG)
    assert (tmp_path / "README.md").read_text() == (
        f"[a]({REPOSITORY}/blob/{TAG}/docs/design.md) ![b]({RAW}b.svg) [c](https://c.org) [d](#d)"
    )
    assert "[project.urls]\nRepository" in (tmp_path / "pyproject.toml").read_text()


def test_only_the_job_that_uploads_may_name_itself() -> None:
    """Trusted publishing: an identity in one job, which runs no code of the repository."""
    found, (build, publish) = workflow(), (workflow()["jobs"][name] for name in ("build", "publish"))
    assert found["permissions"] == {"contents": "read"} and "permissions" not in build
    assert publish["permissions"] == {"id-token": "write"} and publish["environment"] == "pypi"
    assert publish["needs"] == "build" and all("run" not in step for step in publish["steps"])
    assert steps("publish")[-1]["uses"].startswith("pypa/gh-action-pypi-publish@")
    assert found[True] == {"push": {"tags": ["v*"]}}, "YAML reads the key `on` as true"


def test_the_workflow_reads_the_version_where_it_stands() -> None:
    (run,) = (step["run"] for step in steps("build") if step.get("name") == "The tag is the version")
    pattern = re.search(r"s/(.*)/\\1/p", run)
    assert pattern is not None and "src/polydraft/__init__.py" in run
    found = re.findall(
        pattern[1].replace(r"\(", "(").replace(r"\)", ")"),
        (ROOT / "src" / "polydraft" / "__init__.py").read_text(),
        re.MULTILINE,
    )
    assert found == [polydraft.__version__]


def test_the_workflow_checks_addresses_before_it_builds() -> None:
    runs = [step.get("run", "") for step in steps("build")]
    places = [
        next(place for place, run in enumerate(runs) if word in run) for word in ("for_index", "build\n", "twine check")
    ]
    assert places == sorted(places)


def test_the_container_is_built_from_files_that_there_are() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    named = [name for line in re.findall(r"^COPY (?!--from)(.*)$", text, re.MULTILINE) for name in line.split()[:-1]]
    assert {"src", "pyproject.toml", "constraints.txt"} <= {*named}
    assert all((ROOT / name).exists() for name in named)
    sent = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    assert sent[0] == "*" and {line[1:] for line in sent if line.startswith("!")} == {*named}, "nothing else is sent"
    order = [
        text.index(word)
        for word in ("install --quiet --no-cache-dir -c /tmp/constraints.txt --extra-index-url", "[serve,gguf]", "USER")
    ]
    assert order == sorted(order), "torch for CPUs first, and rights are given up last"


def test_the_container_installs_pinned_packages_alone() -> None:
    text, project = (DEPLOY / "Dockerfile").read_text(), tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = {
        canonical(name) for name in re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    }
    lines = re.findall(r"pip install (.*)$", text, re.MULTILINE)
    assert len(lines) == 2 and all("-c /tmp/constraints.txt" in line for line in lines)
    (extras,) = re.findall(r"\.whl\)\[([\w,]+)\]", text)
    wanted = [
        *project["dependencies"],
        *(one for name in extras.split(",") for one in extras_of(project, name)),
        "torch",
    ]
    assert len(wanted) > 8 and not [one for one in wanted if canonical(one) not in pins]


def extras_of(project: dict[str, Any], name: str) -> list[str]:
    return project["optional-dependencies"][name]


def canonical(requirement: str) -> str:
    """Return the name of a requirement's package, as indexes have it."""
    return re.sub(r"[-_.]+", "-", re.split(r"[\[<>=!~; ]", requirement)[0]).lower()


def test_the_containers_calls_are_read_by_the_command_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parser of `polydraft` takes what Dockerfile and compose file call, and its port and times are theirs."""
    pytest.importorskip("fastapi", reason="the server needs the extra serve")
    from polydraft.cli.commands import app
    from polydraft.options.commands.serve_options import Settings

    image, found = (DEPLOY / "Dockerfile").read_text(), yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    service = found["services"]["polydraft"]
    called = list[Settings]()
    monkeypatch.setattr("polydraft.cli.serving.run_serve", lambda options: called.append(options) or 0)
    (key,) = (name for name in service["environment"] if name.endswith("API_KEY"))
    monkeypatch.setenv(key, "secret")
    command = [re.sub(r"\$\{\w+:-(\w+)\}", r"\1", word) for word in service["command"]]
    for call in (json.loads(image.rpartition("\nCMD ")[2]), command):
        assert app(call, standalone_mode=False) == 0, call
    assert json.loads(re.findall(r"^ENTRYPOINT (.*)$", image, re.MULTILINE)[0]) == ["python", "-m", "polydraft"]
    assert [(one.host, one.target, one.keys) for one in called] == [
        ("0.0.0.0", None, ("secret",)),
        ("0.0.0.0", "pair", ("secret",)),
    ]
    port, probe = called[0].port, json.loads(re.findall(r"^HEALTHCHECK .* CMD (.*)$", image, re.MULTILINE)[0])
    assert f"EXPOSE {port}" in image and f"http://127.0.0.1:{port}/health" in probe[2]
    assert service["ports"] == [f"{port}:{port}"]
    assert service["stop_grace_period"] == "40s" and called[0].grace < 40
    compile(probe[2], "HEALTHCHECK", "exec")


def test_models_lie_on_the_volumes() -> None:
    from polydraft.fetched import PLACE

    image, found = (DEPLOY / "Dockerfile").read_text(), yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    places = dict(one.split("=") for one in re.findall(r"^ENV (.*)$", image, re.MULTILINE)[0].split())
    assert places.keys() == {PLACE, "HF_HOME"}
    mounted = {volume.split(":")[1] for volume in found["services"]["polydraft"]["volumes"]}
    assert mounted == {*places.values()}, "what is fetched outlives the container"
    assert f"mkdir -p {' '.join(places.values())}" in image, "a volume begins with the folder's owner"


def test_the_neighbours_find_their_files() -> None:
    found = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    services = found["services"]
    assert (DEPLOY / services["polydraft"]["build"]["context"] / services["polydraft"]["build"]["dockerfile"]).is_file()
    for service in services.values():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert source in found["volumes"] or (DEPLOY / source).is_dir(), source
    assert all(port.startswith("127.0.0.1:") for name in ("prometheus", "grafana") for port in services[name]["ports"])
    scraped = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    assert all((DEPLOY / "prometheus" / name).is_file() for name in scraped["rule_files"])
    (job,) = scraped["scrape_configs"]
    assert job["static_configs"][0]["targets"] == ["polydraft:8000"] and "polydraft" in services
    (source,) = yaml.safe_load(next((DEPLOY / "grafana").rglob("prometheus.yaml")).read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090" and source["uid"] == "prometheus"
    (provider,) = yaml.safe_load(next((DEPLOY / "grafana").rglob("polydraft.yaml")).read_text())["providers"]
    assert f"./grafana/dashboards:{provider['options']['path']}:ro" in services["grafana"]["volumes"]


def queries() -> Iterator[str]:
    """Yield every query of the dashboard and of the alerts."""
    (board,) = (DEPLOY / "grafana" / "dashboards").glob("*.json")
    for panel in json.loads(board.read_text())["panels"]:
        assert panel["datasource"]["uid"] == "prometheus"
        yield from (target["expr"] for target in panel["targets"])
    for group in yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())["groups"]:
        yield from (rule["expr"] for rule in group["rules"])


def unknown(query: str, series: dict[str, set[str]]) -> list[str]:
    """Return the metrics of a query that there are not, and the labels that its metrics have not."""
    strange = [name for name in re.findall(r"polydraft:\w+", query) if name not in series]
    named = [one.strip() for part in re.findall(r"by \(([^)]*)\)", query) for one in part.split(",")]
    chosen = re.findall(r"(\w+)=~?\"", query)
    known = {"instance", "job"}.union(*(series.get(name, set()) for name in re.findall(r"polydraft:\w+", query)))
    return strange + [label for label in (*named, *chosen) if label not in known]


def test_every_metric_of_dashboard_and_alerts_occurs_in_a_real_answer() -> None:
    pytest.importorskip("fastapi", reason="the server needs the extra serve")
    from prometheus_client.parser import text_string_to_metric_families
    from serving import ask, client, error

    with client(batch_size=2) as app:
        ask(app, temperature=0, max_tokens=24)
        assert error(app, prompt="a", temprature=1)[0] == 400
        text = app.get("/metrics").text
    samples = [one for family in text_string_to_metric_families(text) for one in family.samples]
    series: dict[str, set[str]] = {}
    for one in samples:
        series.setdefault(one.name, set()).update(one.labels)
    found = [*queries()]
    assert len(found) > 25
    assert not [(query, unknown(query, series)) for query in found if unknown(query, series)]
    bad = 'sum by (nobody) (rate(polydraft:no_such_total[5m])) / polydraft:num_requests_running{nothing="1"}'
    assert unknown(bad, series) == ["polydraft:no_such_total", "nobody", "nothing"]
