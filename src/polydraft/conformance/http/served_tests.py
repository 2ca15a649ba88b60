"""Tests of a server: the whole joint law of a tiny model, a real model by betting, or its own log-probabilities."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import log
from typing import Any

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from polydraft.conformance.check import LawReport, check
from polydraft.conformance.http.betting import Culprit, Wallet
from polydraft.conformance.http.copied_law import CopiedModel
from polydraft.conformance.http.engines import MOST_TOLD, SampledText, SampleRequest
from polydraft.conformance.http.features import OWN_SEEDS, TextFeatures
from polydraft.conformance.http.server_client import ServerClient
from polydraft.errors import InvalidParameter, ServerError, require_number
from polydraft.probs import Noise, SamplingParams

PROMPTS = (
    "def add(a, b):\n    return a",
    "Once upon a time there was a",
    "The capital of France is",
    "for i in range(",
)
LENGTH = 64
"""Tokens of every text: fixed, since a text that is cut for what it says would change the law."""
TOGETHER = 32
"""Texts of a request, where an engine gives so many."""
TINY_PROMPT = "abcabcab"
"""Lookups find something in it."""
TINY_TOKENS, TINY_LENGTH = 3, 6
"""Tokens whose joint law is tested; more are asked for, since nothing is drafted for the last ones."""
MOST_TEXTS = 60_000
MOST_TOKENS = 30_000
SEED_STEP = 1_000
"""Between the seeds of requests: engines count the seeds of several texts up from a request's."""
UNLIKELY = log(1e-6)
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class ServerReport:
    """What a test of a server found.

    Args:
        verdict: "passed" or "deviates".
        proves: what that is about.
        url, engine, model: who was asked.
        texts, tokens: how many were tested, and how many texts were lost.
        e_value: the evidence; from 1 / `false_alarm` on it deviates.
        false_alarm: the largest probability of "deviates" for a server that is right within the tolerance.
        tolerance: the total variation a token that is not told.
        detectable: a bias of a feature that would have been seen with probability .95; of the tiny model's law the
            total variation of a text, whatever its direction.
        culprit: what gave it away, or would first.
        findings: what is wrong beside, such as log-probabilities of 0.
        notes: what the tolerance has in it.
    """

    verdict: str
    proves: str
    url: str
    engine: str
    model: str
    texts: int
    tokens: int
    lost: int
    e_value: float
    false_alarm: float
    tolerance: float
    detectable: float
    culprit: Culprit | None
    findings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    law: LawReport | None = None

    @property
    def passed(self) -> bool:
        """Whether nothing was found."""
        return self.verdict == "passed"


@dataclass(frozen=True)
class ServerTest:
    """How a server is tested.

    Args:
        false_alarm: the largest probability of calling a right server wrong.
        most_tokens: tokens that are compared at most; None for 30,000, of a tiny model 180,000.
        tolerance: the total variation a token that may be, for other kernels and precisions.
        params: how the server is asked to sample.
        seed: of the first request.
    """

    false_alarm: float = 1e-3
    most_tokens: int | None = None
    tolerance: float = 0.002
    params: SamplingParams = SamplingParams()
    seed: int = 1

    def __post_init__(self) -> None:
        require_number("false_alarm", self.false_alarm, "between 0 and 1", lambda value: 0 < value < 1)


def check_tiny(client: ServerClient, copy: CopiedModel, settings: ServerTest, progress: Progress) -> ServerReport:
    """Test the whole joint law of the first tokens that a server writes with a tiny model.

    Raises:
        ServerError: it cannot be asked, its texts depend on each other, or it has another model.
        InvalidParameter: the copy is too large to list its texts, or it is asked in chats.
    """
    if client.chats:
        raise InvalidParameter("A tiny model has no chat template: ask it without chats.")
    prompt = copy.ids(TINY_PROMPT)
    _check_first_texts(client, copy, [prompt], settings)
    most = max(1, (settings.most_tokens or MOST_TEXTS * TINY_TOKENS) // TINY_TOKENS)
    each = min(client.engine.most, 128)
    asked = _request(client, copy, prompt, settings, each, TINY_LENGTH)
    numbers = iter(range(1, 1 << 40))

    def generate(prompts: list[list[int]], seeds: list[int]) -> list[list[int]]:
        counts = [min(each, len(seeds) - done) for done in range(0, len(seeds), each)]
        requests = (replace(asked, count=one, seed=_seed(settings, next(numbers))) for one in counts)
        found = list[list[int]]()
        for texts in client.texts(requests):
            if texts is None:
                raise ServerError(f"{client.url} lost a request: no text may be left out of this test.")
            found += [_checked(client, copy, one, TINY_LENGTH)[0] for one in texts]
        return found

    law = check(
        generate,
        copy.model,
        [prompt],
        new_tokens=TINY_TOKENS,
        params=settings.params,
        batch_size=min(each * 16, most),
        most_samples=most,
        false_alarm=settings.false_alarm,
        on_progress=lambda done, all_: progress("texts written", done, all_),
    )
    client.check_same_models()
    proves = f"the joint law of {TINY_TOKENS} tokens of a tiny model, in any direction"
    return ServerReport(
        verdict=law.verdict,
        proves=proves,
        **_who(client),
        texts=law.samples,
        tokens=law.samples * TINY_TOKENS,
        e_value=law.e_value,
        false_alarm=settings.false_alarm,
        tolerance=0.0,
        detectable=law.worst.detectable,
        culprit=None,
        law=law,
    )


def check_copy(client: ServerClient, copy: CopiedModel, settings: ServerTest, progress: Progress) -> ServerReport:
    """Test what a server writes with a real model against the law of a copy, by betting within a tolerance.

    Raises:
        ServerError: it cannot be asked, its texts depend on each other, it has another model or tokenizer, or so many
            requests were lost that there can be no verdict.
    """
    prompts = [copy.chat_ids(text) if client.chats else copy.ids(text) for text in PROMPTS]
    first = _check_first_texts(client, copy, prompts, settings)
    tolerance, notes = settings.tolerance, list[str]()
    if not first.sure:
        lost = copy.lost_by_spelling(prompts)
        tolerance += lost
        notes.append(f"tokens are not told, and {lost:.2%} of the copy's do not come back from their text: added to it")
    if first.difference is not None:
        notes.append(
            f"log-probabilities that are told differ from the copy's by a total variation of {first.difference:.2g}"
        )
    filtered = settings.params.top_k > 0 or settings.params.top_p < 1
    features = TextFeatures(copy.size, copy.sentence_ends, filtered=filtered, drafted=copy.draft is not None)
    wallet = Wallet(features.names, copy.size, tolerance)

    def add(prompt: Sequence[int], texts: list[list[int]]) -> None:
        laws = copy.rows(copy.model, prompt, texts, settings.params)
        drafts = [None] * len(texts) if copy.draft is None else copy.rows(copy.draft, prompt, texts, settings.params)
        for text, law, draft in zip(texts, laws, drafts, strict=True):
            outcomes = copy.outcomes(text)
            wallet.add(features.observe(prompt, outcomes, law, draft), outcomes)

    requests = _requests(client, copy, prompts, settings)
    texts = _bet(client, copy, wallet, requests, add, settings, progress)
    return _report(client, settings, wallet, texts, first.findings, tuple(notes), copy.spelling, "the law of the copy")


def check_logprobs(
    client: ServerClient, asked: SampleRequest, settings: ServerTest, progress: Progress
) -> ServerReport:
    """Test whether a server's texts follow its own log-probabilities: that it agrees with itself, no more.

    Args:
        client: the server.
        asked: a request whose texts are asked for again and again.
        settings: at temperature 1 without filters, since log-probabilities are told before these.
        progress: called as texts come.

    Raises:
        InvalidParameter: another temperature, or filters.
        ServerError: it cannot be asked, or tells no log-probabilities.
    """
    if settings.params != SamplingParams():
        raise InvalidParameter(
            "--trust-logprobs needs temperature 1 without filters: log-probabilities are told before these."
        )
    features = TextFeatures(MOST_TOLD + 1, filtered=False, drafted=False)
    wallet = Wallet(features.names, MOST_TOLD + 1, settings.tolerance)
    findings, told, stream = list[str](), list[float](), Noise.from_seed(OWN_SEEDS + 1, 1).generators[0]
    seen = set[tuple[str, ...]]()

    def add(_: Sequence[int], texts: list[SampledText]) -> None:
        spelt = tuple(one.text for one in texts)
        if spelt in seen:
            raise ServerError(
                f"{client.url} writes the same text for every seed, and texts must not depend on each other."
            )
        seen.add(spelt)
        for one in texts:
            if not one.told:
                raise ServerError(f"{client.url} tells no log-probabilities: give a copy by --copy.")
            told.extend(token.logprob for token in one.told)
            law, places = _told_law(one, stream)
            wallet.add(features.observe([0], places, law), places)
            if float(law.sum(-1).max()) > 1 + settings.tolerance and not any("sum" in said for said in findings):
                findings.append("the log-probabilities of a place sum to more than 1")

    requests = (
        (asked.prompt, replace(asked, seed=_seed(settings, number), likeliest=MOST_TOLD))
        for number in range(_count(settings, asked.count))
    )
    texts = _bet_told(client, wallet, requests, add, settings, progress)
    findings += _zeros(told)
    notes = ("self-consistent is not exact: the log-probabilities are the server's word",)
    return _report(
        client, settings, wallet, texts, tuple(findings), notes, str, "self-consistency: its own log-probabilities"
    )


def _told_law(sample: SampledText, stream: Generator) -> tuple[Float[Tensor, "t V"], list[int]]:
    """Return the law that log-probabilities tell: of the likeliest tokens by rank, and of all others together.

    Of tokens with one log-probability, as half precision has many, the sampled one is any under the law; so one of them
    is drawn.
    """
    law = torch.zeros(len(sample.told), MOST_TOLD + 1, dtype=torch.float64)
    places = list[int]()
    for row, one in enumerate(sample.told):
        values = sorted(one.likeliest, reverse=True)[:MOST_TOLD]
        law[row, : len(values)] = torch.tensor(values, dtype=torch.float64).exp()
        law[row, MOST_TOLD] = (1 - law[row].sum()).clamp_min(0)
        equal = [at for at, value in enumerate(values) if abs(value - one.logprob) < 1e-9]
        any_ = int(torch.randint(0, max(len(equal), 1), (1,), generator=stream))
        places.append(equal[any_] if equal else MOST_TOLD)
    return law, places


@dataclass(frozen=True)
class _First:
    """What the first texts showed."""

    sure: bool
    difference: float | None
    findings: tuple[str, ...]


def _check_first_texts(
    client: ServerClient, copy: CopiedModel, prompts: Sequence[Sequence[int]], settings: ServerTest
) -> _First:
    """Ask for a few texts with log-probabilities, and refuse a server whose texts cannot be tested.

    Raises:
        ServerError: other tokens, or the same text for every seed.
    """
    counts = [1, 1, min(4, client.engine.most)]
    asked = replace(_request(client, copy, prompts[0], settings, 1, LENGTH), message=_message(client, PROMPTS[0]))
    first = [
        replace(asked, count=count, seed=_seed(settings, -number - 1), likeliest=MOST_TOLD)
        for number, count in enumerate(counts)
    ]
    answers = [one for one in client.texts(iter(first)) if one is not None]
    if len(answers) < len(counts):
        raise ServerError(f"{client.url} does not answer in time: ask it for less at once.")
    samples = [one for answer in answers for one in answer]
    count = samples[0].prompt_tokens
    if count is not None and count != len(prompts[0]):
        why = "chat template" if client.chats else "tokenizer or puts a template around prompts"
        raise ServerError(
            f"{client.url} read {count} tokens of a prompt that has {len(prompts[0])} for the copy: it has another "
            f"{why}."
        )
    read = [_checked(client, copy, one, LENGTH) for one in samples]
    if copy.differs(samples):
        raise ServerError(f"{client.url} spells tokens otherwise than the copy: it has another tokenizer.")
    _check_independent(client, copy, prompts[0], [text for text, _ in read])
    told = [token.logprob for one in samples for token in one.told]
    difference = _difference(copy, prompts[0], samples, [text for text, _ in read])
    return _First(all(sure for _, sure in read), difference, tuple(_zeros(told)))


def _check_independent(
    client: ServerClient, copy: CopiedModel, prompt: Sequence[int], texts: Sequence[list[int]]
) -> None:
    """Refuse texts that are the same though that is unlikely: by seeds, or within a request."""
    law = copy.rows(copy.model, prompt, texts[:1], copy.params)[0]
    own = law.gather(-1, torch.tensor(copy.outcomes(texts[0])).unsqueeze(-1)).clamp_min(1e-300)
    if float(own.log().sum()) > UNLIKELY:
        return  # so likely a text may come again
    if texts[0] == texts[1]:
        greedy = law.argmax(dim=-1).tolist() == copy.outcomes(texts[0])
        said = (
            f"writes the likeliest tokens at temperature {copy.params.temperature:g}: it ignores the temperature"
            if greedy
            else "writes the same text for every seed, and texts must not depend on each other: let it draw seeds"
        )
        raise ServerError(f"{client.url} {said}.")
    if len(texts) > 3 and all(one == texts[2] for one in texts[3:]):
        raise ServerError(f"{client.url} writes the same text for all n choices of a request.")


def _difference(
    copy: CopiedModel, prompt: Sequence[int], samples: Sequence[SampledText], texts: Sequence[list[int]]
) -> float | None:
    """Return the mean total variation between what a server tells of its law and the copy, by the likeliest tokens."""
    found = list[float]()
    for sample, text in zip(samples, texts, strict=True):
        if sample.told and sample.told[0].likeliest and len(sample.told) <= len(text):
            law = copy.rows(copy.model, prompt, [text], SamplingParams())[0]
            for row, one in zip(law, sample.told, strict=False):
                told = torch.tensor(sorted(one.likeliest, reverse=True), dtype=torch.float64).exp()
                own = row.topk(min(len(told), len(row))).values
                gap = (own - told[: len(own)]).abs().sum() + (own.sum() - told[: len(own)].sum()).abs()
                found.append(float(gap) / 2)
    return sum(found) / len(found) if found else None


def _zeros(told: Sequence[float]) -> list[str]:
    wrong = len(told) >= 8 and all(one == 0.0 for one in told)
    return ["log-probabilities of 0 are told for every sampled token, as if each had been certain"] if wrong else []


def _checked(client: ServerClient, copy: CopiedModel, sample: SampledText, length: int) -> tuple[list[int], bool]:
    tokens, sure = copy.read(sample, client.url)
    ended = not client.engine.goes_on and bool(tokens) and tokens[-1] in copy.ends
    if (sure and len(tokens) < length and not ended) or not tokens:
        raise ServerError(
            f"{client.url} ends texts early: one has {len(tokens)} tokens where {length} were asked for; turn stop "
            "strings and limits off."
        )
    return tokens[:length], sure


def _request(
    client: ServerClient, copy: CopiedModel, prompt: Sequence[int], settings: ServerTest, count: int, length: int
) -> SampleRequest:
    params = settings.params
    text = copy.tokenizer.decode(list(prompt), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    law = params.temperature, params.top_p, params.top_k
    return SampleRequest(client.model, tuple(prompt), text, count, settings.seed, length, *law)


def _requests(
    client: ServerClient, copy: CopiedModel, prompts: Sequence[Sequence[int]], settings: ServerTest
) -> Iterator[tuple[Sequence[int], SampleRequest]]:
    each = min(TOGETHER, client.engine.most)
    own = [
        replace(_request(client, copy, prompt, settings, each, LENGTH), message=_message(client, text))
        for prompt, text in zip(prompts, PROMPTS, strict=True)
    ]
    for number in range(_count(settings, each)):
        prompt = prompts[number % len(prompts)]
        yield prompt, replace(own[number % len(prompts)], seed=_seed(settings, number))


def _message(client: ServerClient, text: str) -> str | None:
    return text if client.chats else None


def _count(settings: ServerTest, each: int) -> int:
    return -(-(settings.most_tokens or MOST_TOKENS) // (each * LENGTH))


def _seed(settings: ServerTest, number: int) -> int:
    return settings.seed + SEED_STEP * (number + 4)


def _bet(
    client: ServerClient,
    copy: CopiedModel,
    wallet: Wallet,
    requests: Iterator[tuple[Sequence[int], SampleRequest]],
    add: Callable[[Sequence[int], list[list[int]]], None],
    settings: ServerTest,
    progress: Progress,
) -> int:
    def read(prompt: Sequence[int], texts: list[SampledText]) -> None:
        add(prompt, [_checked(client, copy, one, LENGTH)[0] for one in texts])

    return _bet_told(client, wallet, requests, read, settings, progress)


def _bet_told(
    client: ServerClient,
    wallet: Wallet,
    requests: Iterator[tuple[Sequence[int], SampleRequest]],
    add: Callable[[Sequence[int], list[SampledText]], None],
    settings: ServerTest,
    progress: Progress,
) -> int:
    """Take texts in the order of their requests until the evidence is enough or there are no more; count them."""
    prompts, most, texts = list[Sequence[int]](), settings.most_tokens or MOST_TOKENS, 0

    def asked() -> Iterator[SampleRequest]:
        for prompt, one in requests:
            prompts.append(prompt)
            yield one

    before, lost = client.asked, client.lost
    for number, found in enumerate(client.texts(asked())):
        if found is not None:
            add(prompts[number], found)
            texts += len(found)
            progress("tokens tested", min(wallet.tokens, most), most)
        if wallet.log_e >= -log(settings.false_alarm):
            break
    gone = (client.lost - lost) / max(client.asked - before, 1)
    if gone > settings.tolerance:
        raise ServerError(
            f"{client.url} lost {gone:.1%} of the texts it was asked for, more than the tolerance: there is no verdict."
        )
    client.check_same_models()
    return texts


def _who(client: ServerClient) -> dict[str, Any]:
    return {"url": client.url, "engine": client.engine.name, "model": client.model, "lost": client.lost}


def _report(
    client: ServerClient,
    settings: ServerTest,
    wallet: Wallet,
    texts: int,
    findings: tuple[str, ...],
    notes: tuple[str, ...],
    spell: Callable[[int], str],
    proves: str,
) -> ServerReport:
    deviates = wallet.log_e >= -log(settings.false_alarm) or bool(findings)
    return ServerReport(
        verdict="deviates" if deviates else "passed",
        proves=f"{proves}, within the tolerance",
        **_who(client),
        texts=texts,
        tokens=wallet.tokens,
        e_value=wallet.e_value,
        false_alarm=settings.false_alarm,
        tolerance=wallet.tolerance,
        detectable=wallet.detectable(settings.false_alarm),
        culprit=wallet.culprit(spell),
        findings=findings,
        notes=notes,
    )
