"""Servers against a copy of their model: wrong ones are caught and named, and what cannot be tested is refused."""

from typing import Any

import pytest
from wrong_servers import (
    Double,
    Law,
    colder,
    cut_to,
    duplicates_skipped,
    greedy,
    greedy_under_drafts,
    lenient,
    min_p,
    noise_shared,
    right,
)

from polydraft.conformance.http.copied_law import CopiedModel
from polydraft.conformance.http.engines import SampleRequest
from polydraft.conformance.http.served_tests import (
    LENGTH,
    ServerReport,
    ServerTest,
    check_copy,
    check_logprobs,
    check_tiny,
)
from polydraft.conformance.http.server_client import ServerClient
from polydraft.errors import InvalidParameter, PolydraftError, ServerError
from polydraft.probs import SamplingParams

TEST = ServerTest(most_tokens=16_000)


def silent(what: str, done: int, total: int) -> None:
    assert what and 0 <= done <= total


def copied(double: Double, params: SamplingParams = TEST.params, *, drafted: bool = False) -> CopiedModel:
    return CopiedModel(double.target, double.tokenizer, double.draft if drafted else None, params)


def checked(double: Double, test: ServerTest = TEST, *, drafted: bool = False, **known: Any) -> ServerReport:
    client = ServerClient("http://double/v1/", transport=double.transport, sleep=lambda _: None, **known)
    try:
        return check_copy(client, copied(double, test.params, drafted=drafted), test, silent)
    finally:
        client.close()


def test_a_right_server_passes_and_is_asked_for_all_that_changes_the_law() -> None:
    double = Double()
    report = checked(double, ServerTest(most_tokens=6_000))
    assert report.passed and report.e_value < 1000 and report.lost == 0
    assert report.tokens == report.texts * LENGTH >= 6_000
    assert 0.02 < report.detectable < 0.1 and not report.findings
    assert "total variation of" in report.notes[0] and float(report.notes[0].split()[-1]) < 1e-6
    for fields in double.asked:
        assert fields["temperature"] == 1 and fields["top_p"] == 1 and fields["top_k"] == -1 and fields["min_p"] == 0
        assert fields["ignore_eos"] and fields["return_token_ids"] and fields["repetition_penalty"] == 1
    seeds = [fields["seed"] for fields in double.asked]
    assert len({*seeds}) == len(seeds), "texts must not share random numbers"


WRONG: list[tuple[Law, int, str]] = [
    (lenient, 16_000, "draft"),
    (colder, 30_000, "tokens|surprise"),
    (cut_to(400), 16_000, "400 likelier"),
    (cut_to(40), 4_000, "likelier|hold|less likely"),
    (min_p, 4_000, "less likely than 5%|likelier|hold"),
    (noise_shared, 8_000, "drafts that are accepted by the number"),
    (greedy_under_drafts, 4_000, "the likeliest token"),
]


@pytest.mark.parametrize(("law", "most", "feature"), WRONG)
def test_wrong_servers_are_caught_and_named(law: Law, most: int, feature: str) -> None:
    report = checked(Double(law), ServerTest(most_tokens=most), drafted=True)
    assert report.verdict == "deviates" and report.e_value >= 1000 and report.tokens <= most + 2_048
    culprit = report.culprit
    assert culprit is not None and any(word in culprit.feature for word in feature.split("|")), culprit
    assert len(culprit.tokens) == 5 and all(one.text for one in culprit.tokens)
    gap = culprit.observed - culprit.expected
    assert gap > 0 if culprit.direction == "too often" else gap < 0


def test_filters_that_were_asked_for_are_part_of_the_law() -> None:
    test = ServerTest(most_tokens=6_000, params=SamplingParams(top_k=40))
    assert checked(Double(cut_to(40)), test).passed
    report = checked(Double(cut_to(60)), test)
    assert not report.passed and report.culprit is not None
    assert report.culprit.feature in ("tokens outside the filters", "tokens with 40 likelier ones or more")
    assert report.culprit.expected == 0 < report.culprit.observed


@pytest.mark.parametrize(("law", "passed"), [(right, True), (duplicates_skipped, False), (lenient, False)])
def test_a_tiny_model_shows_biases_that_have_no_direction(law: Law, passed: bool) -> None:
    """Duplicates that are skipped lean another way in every context, which no feature of a token sees."""
    double = Double(law, size=12)
    client = ServerClient("http://double", transport=double.transport)
    try:
        report = check_tiny(client, copied(double), ServerTest(most_tokens=6_000 if passed else 180_000), silent)
    finally:
        client.close()
    assert report.passed == passed and report.law is not None and report.tolerance == 0
    assert passed or report.law.worst.worst.tokens


def test_log_probabilities_of_0_are_found() -> None:
    report = checked(Double(zeros=True), ServerTest(most_tokens=2_000))
    assert report.verdict == "deviates" and report.e_value < 1000
    assert report.findings == ("log-probabilities of 0 are told for every sampled token, as if each had been certain",)


def trusted(double: Double, most: int = 8_000) -> ServerReport:
    client = ServerClient("http://double", transport=double.transport)
    try:
        asked = SampleRequest("m", (5, 6), "a", 32, 1, LENGTH)
        return check_logprobs(client, asked, ServerTest(most_tokens=most), silent)
    finally:
        client.close()


def test_without_a_copy_a_server_is_held_to_its_own_log_probabilities() -> None:
    report = trusted(Double())
    assert report.passed and report.proves.startswith("self-consistency") and "not exact" in report.notes[0]
    assert not trusted(Double(greedy_under_drafts)).passed
    assert trusted(Double(zeros=True), 2_048).findings


def test_at_another_temperature_log_probabilities_say_nothing() -> None:
    client = ServerClient("http://double", transport=Double().transport)
    with pytest.raises(InvalidParameter, match="--trust-logprobs needs temperature 1"):
        asked = SampleRequest("m", (5,), "a", 1, 1, 8)
        check_logprobs(client, asked, ServerTest(params=SamplingParams(temperature=0.8)), silent)
    client.close()


REFUSED: list[tuple[Double, str]] = [
    (Double(seedless=True), "writes the same text for every seed"),
    (Double(greedy), "writes the likeliest tokens at temperature 1: it ignores the temperature"),
    (Double(same_choices=True), "writes the same text for all n choices"),
    (Double(length=60), "ends texts early: one has 60 tokens where 64"),
    (Double(more=1), "read 29 tokens of a prompt that has 28|another tokenizer or puts a template"),
    (Double(text="something else"), "spells tokens otherwise than the copy: it has another tokenizer"),
    (Double(shift=600), "but the copy's tokens are 0 to 599: it is a copy of another model"),
]


@pytest.mark.parametrize(("double", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_what_cannot_be_tested_is_refused_in_a_sentence(double: Double, said: str) -> None:
    with pytest.raises(ServerError) as found:
        checked(double)
    assert any(one in str(found.value) for one in said.split("|")), found.value
    assert str(found.value).startswith("http://double ") and str(found.value).count(". ") == 0


@pytest.mark.parametrize(("known", "said"), [({"model": "x"}, "no model 'x'; it has m"), ({"engine": "vlm"}, "vllm")])
def test_a_model_or_engine_that_is_not_there_is_refused(known: dict[str, str], said: str) -> None:
    with pytest.raises(PolydraftError, match=said):
        checked(Double(), **known)


def test_a_copy_needs_a_tokenizer_and_a_temperature() -> None:
    double = Double()
    with pytest.raises(InvalidParameter, match="no tokenizer"):
        CopiedModel(double.target, None, None, SamplingParams())
    with pytest.raises(InvalidParameter, match="temperature is 0"):
        CopiedModel(double.target, double.tokenizer, None, SamplingParams(temperature=0))
