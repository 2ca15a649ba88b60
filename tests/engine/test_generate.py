"""The public calls: what users set on Hugging Face's generate works and means the same."""

from collections.abc import Sequence
from functools import cache
from threading import Thread
from typing import Any

import pytest
import torch
from doubles import perturbed, plain_logits, tiny_model, tiny_tokenizer
from torch import Generator, Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedModel,
    StoppingCriteria,
    TextIteratorStreamer,
    TypicalLogitsWarper,
    pipeline,
)
from transformers.generation.stopping_criteria import MaxLengthCriteria, StoppingCriteriaList
from transformers.generation.utils import GenerateDecoderOnlyOutput

import polydraft
from polydraft import EAGLE_25, Chain, Fixed, GenerationOutput, HuggingFaceModel, ModelDrafter, NoDraft, Widths
from polydraft.errors import InvalidParameter

VOCAB, NEW = 30, 20
PROMPT = torch.tensor([[3, 1, 4, 1, 5]])
ROWS = ([3, 1, 4, 1, 5, 9, 2], [7], [2, 7, 1, 8])


@cache
def target() -> PreTrainedModel:
    return tiny_model("llama", VOCAB)


@cache
def drafter() -> ModelDrafter:
    return ModelDrafter(HuggingFaceModel(perturbed(target(), 0.05)))


def generate(ids: Tensor = PROMPT, **options) -> GenerationOutput:
    settings = {"drafter": drafter(), "policy": Fixed(EAGLE_25), "max_new_tokens": NEW, **options}
    return polydraft.generate(target(), ids, **settings)


def greedy(ids: Tensor = PROMPT, **options) -> Tensor:
    """Return Hugging Face's own greedy text."""
    settings = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": NEW, **options}
    return target().generate(ids, **settings)


def sampled(**options) -> list[int]:
    return generate(temperature=1.0, top_k=0, **options).sequences[0].tolist()


def padded(rows: Sequence[Sequence[int]], side: str) -> tuple[Tensor, Tensor]:
    width = max(map(len, rows))
    ids, mask = torch.full((len(rows), width), VOCAB - 1), torch.zeros(len(rows), width, dtype=torch.int64)
    for row, prompt in enumerate(rows):
        place = slice(width - len(prompt), width) if side == "left" else slice(0, len(prompt))
        ids[row, place], mask[row, place] = torch.tensor(prompt), 1
    return ids, mask


class TestAsCustomGenerate:
    def test_returns_the_tensor_that_generate_returns(self) -> None:
        text = target().generate(PROMPT, custom_generate=polydraft.generate, drafter=drafter(), max_new_tokens=NEW)
        assert isinstance(text, Tensor)
        assert torch.equal(text, greedy())

    @pytest.mark.wrong_types
    def test_return_dict_in_generate_gives_statistics(self) -> None:
        output = target().generate(
            PROMPT,
            custom_generate=polydraft.generate,
            drafter=drafter(),
            do_sample=True,
            max_new_tokens=NEW,
            seed=5,
            return_dict_in_generate=True,
        )
        assert isinstance(output, GenerateDecoderOnlyOutput)  # which pipelines take apart
        assert torch.equal(output.sequences, generate(do_sample=True, seed=5, policy=None).sequences)
        assert output.statistics.new_tokens == NEW
        assert (output.finish, output.verifier, output.lossless) == (
            ("length",),
            "block verification on chains, top then sample on trees",
            True,
        )

    @pytest.mark.parametrize("together", [{}, {"return_dict_in_generate": True}, {"num_return_sequences": 2}])
    @pytest.mark.parametrize("pads", [True, False])
    @pytest.mark.wrong_types
    def test_a_pipeline_with_a_list_of_prompts(self, pads: bool, together: dict[str, Any]) -> None:
        """Without a padding token prompts go one by one, as with Hugging Face, who refuses a batch of them."""
        tokenizer = tiny_tokenizer()
        model = tiny_model("llama", len(tokenizer), eos_token_id=0)
        model.generation_config.eos_token_id, model.generation_config.pad_token_id = 0, 0 if pads else None
        if not pads:
            tokenizer.pad_token = None
        texts, options = ["a winter", "there in the spring"], {"max_new_tokens": 6, "do_sample": False, **together}
        if "num_return_sequences" in together:
            options |= {"do_sample": True, "top_k": 1}
        write = pipeline("text-generation", model=model, tokenizer=tokenizer)
        ours = {"custom_generate": polydraft.generate, "drafter": "ngram"}
        expected = write(texts, **options)
        assert write(texts, **ours, **options) == expected
        if pads:
            assert write(texts, batch_size=2, **ours, **options) == expected
        else:
            with pytest.raises(ValueError, match="without pad_token cannot do batching"):
                write(texts, batch_size=2, **ours, **options)

    def test_batch_with_padding_and_eos(self) -> None:
        ids, mask = padded(ROWS, "left")
        eos = [int(greedy(torch.tensor([ROWS[0]]))[0, len(ROWS[0]) + 4])]
        options = {"attention_mask": mask, "max_new_tokens": NEW, "eos_token_id": eos, "pad_token_id": 0}
        text = target().generate(ids, custom_generate=polydraft.generate, drafter=drafter(), **options)
        assert torch.equal(text, target().generate(ids, do_sample=False, **options))


class TestSeeds:
    def test_the_same_seed_gives_the_same_text(self) -> None:
        assert sampled(seed=1) == sampled(seed=1)

    def test_different_seeds_differ(self) -> None:
        assert len({tuple(sampled(seed=seed)) for seed in range(4)}) == 4

    def test_without_a_seed_torch_decides(self) -> None:
        texts = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            texts.append(sampled())
        assert texts[0] == texts[1] != texts[2]
        assert sampled() != sampled()

    def test_a_generator_decides_instead(self) -> None:
        texts = [sampled(generator=Generator().manual_seed(seed)) for seed in (1, 1, 2)]
        assert texts[0] == texts[1] != texts[2]

    def test_a_seed_leaves_the_global_state_alone(self) -> None:
        before = torch.get_rng_state()
        sampled(seed=1)
        assert torch.equal(torch.get_rng_state(), before)

    def test_return_sequences_differ(self) -> None:
        texts = generate(temperature=1.0, num_return_sequences=4, seed=1).sequences
        assert texts.shape == (4, PROMPT.shape[1] + NEW)
        assert len({tuple(row) for row in texts.tolist()}) == 4


class TestProcessors:
    class NoRepeat(LogitsProcessor):
        """Forbids the token that the text ends with."""

        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            return scores.scatter(-1, input_ids[:, -1:], -torch.inf)

    def test_a_processor_sees_each_nodes_own_history(self) -> None:
        processors = LogitsProcessorList([self.NoRepeat()])
        output = generate(temperature=0, logits_processor=processors)
        assert torch.equal(output.sequences, greedy(logits_processor=processors))
        assert not torch.equal(output.sequences, greedy())
        assert output.statistics.accepted > 0

    def test_a_processor_sees_the_padding_that_hugging_face_shows(self) -> None:
        seen: list[list[int]] = []

        class Spy(LogitsProcessor):
            stateless = True  # what it notes changes no answer

            def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
                seen.extend(input_ids.tolist())
                return scores

        ids, mask = padded(ROWS, "left")
        output = generate(ids, attention_mask=mask, temperature=0, logits_processor=LogitsProcessorList([Spy()]))
        texts = output.sequences.tolist()
        for row, text in enumerate(texts):
            assert ids[row].tolist() in seen
            assert text[:-1] in seen

    @pytest.mark.parametrize(
        ("option", "warper"),
        [({"min_p": 0.1}, MinPLogitsWarper(0.1)), ({"typical_p": 0.85}, TypicalLogitsWarper(0.85))],
        ids=["min_p", "typical_p"],
    )
    def test_filters_keep_what_hugging_face_keeps(self, option: dict[str, float], warper: LogitsProcessor) -> None:
        prompt = PROMPT[0].tolist()
        kept = warper(PROMPT, plain_logits(target(), prompt).unsqueeze(0)).isfinite()[0]
        texts = generate(temperature=1.0, top_k=0, num_return_sequences=200, max_new_tokens=1, seed=1, **option)
        first = set(texts.sequences[:, -1].tolist())
        assert first <= set(kept.nonzero().flatten().tolist())
        assert 1 < len(first)
        assert int(kept.sum()) < VOCAB


class TestWhereTextsEnd:
    def test_max_new_tokens(self) -> None:
        for count in (1, 2, 7):
            output = generate(temperature=0, max_new_tokens=count)
            assert torch.equal(output.sequences, greedy(max_new_tokens=count))
            assert output.finish == ("length",)
            assert output.statistics.new_tokens == count

    def test_a_list_of_ends_of_text(self) -> None:
        new = greedy()[0, PROMPT.shape[1] :].tolist()
        for ends in ([new[6], new[3]], [new[9]], [new[0]]):
            output = generate(temperature=0, eos_token_id=ends, pad_token_id=0)
            assert torch.equal(output.sequences, greedy(eos_token_id=ends, pad_token_id=0))
            assert output.finish == ("eos",)

    @pytest.mark.parametrize("place", [(0, 2), (3, 6), (5, 7), (9, 10)])
    def test_stop_strings_end_the_text_where_hugging_face_does(self, place: tuple[int, int]) -> None:
        tokenizer = tiny_tokenizer()
        model = tiny_model("qwen2", len(tokenizer))
        ids = torch.tensor([tokenizer("a winter there").input_ids])
        options = {"max_new_tokens": NEW, "tokenizer": tokenizer, "pad_token_id": 0}
        plain = {"attention_mask": torch.ones_like(ids), "do_sample": False}
        free = model.generate(ids, **plain, **options)[0, ids.shape[1] :]
        stop = tokenizer.decode(free[slice(*place)])
        expected = model.generate(ids, stop_strings=[stop], **plain, **options)
        draft = ModelDrafter(HuggingFaceModel(perturbed(model, 0.02)))
        output = polydraft.generate(
            model, ids, drafter=draft, policy=Fixed(EAGLE_25), temperature=0, stop_strings=[stop], **options
        )
        assert expected.shape[1] < ids.shape[1] + NEW
        assert torch.equal(output.sequences, expected)
        assert output.finish == ("stop",)

    def test_rows_end_apart_and_are_filled_with_padding(self) -> None:
        ids, mask = padded(ROWS, "left")
        end = int(greedy(torch.tensor([ROWS[2]]))[0, len(ROWS[2]) + 2])
        options = {"attention_mask": mask, "eos_token_id": end, "pad_token_id": 0, "max_new_tokens": 6}
        output = generate(ids, temperature=0, **options)
        assert torch.equal(output.sequences, greedy(ids, **options))
        assert output.finish[2] == "eos"
        assert set(output.finish) == {"eos", "length"}

    def test_a_length_criterion_of_ones_own(self) -> None:
        criteria = StoppingCriteriaList([MaxLengthCriteria(PROMPT.shape[1] + 4)])
        output = generate(temperature=0, stopping_criteria=criteria)
        assert torch.equal(output.sequences, greedy(max_new_tokens=4))


class Raising(LogitsProcessor, StoppingCriteria):
    """Raises when it is asked, the first times excepted."""

    stateless = True

    def __init__(self, error: type[BaseException], after: int = 2) -> None:
        self.error, self.left = error, after

    def __call__(self, input_ids: Tensor, scores: Any, **options: Any) -> Tensor:
        self.left -= 1
        if self.left < 0:
            raise self.error("no more")
        return torch.zeros(len(input_ids), dtype=torch.bool) if scores is None else scores


class TestStreamer:
    class Recorder:
        """Keeps what a streamer is given."""

        def __init__(self) -> None:
            self.calls: list[list[int]] = []
            self.ended = 0

        def put(self, value: Tensor) -> None:
            self.calls.append(value.flatten().tolist())

        def end(self) -> None:
            self.ended += 1

    def test_gets_the_prompt_and_then_the_tokens_of_every_block(self) -> None:
        recorder = self.Recorder()
        output = generate(temperature=1.0, seed=2, streamer=recorder)
        assert recorder.calls[0] == PROMPT[0].tolist()
        assert [token for call in recorder.calls for token in call] == output.sequences[0].tolist()
        assert len(recorder.calls) == 1 + output.statistics.steps
        assert recorder.ended == 1

    def test_serves_one_row_only(self) -> None:
        with pytest.raises(InvalidParameter, match="streamer takes one row, but there are 2"):
            generate(PROMPT.repeat(2, 1), streamer=self.Recorder())

    @pytest.mark.parametrize(
        ("ids", "options", "error"),
        [
            (PROMPT, {"temperature": -1}, InvalidParameter),
            (PROMPT.repeat(2, 1), {}, InvalidParameter),
            (PROMPT, {"num_return_sequences": 3, "temperature": 1.0}, InvalidParameter),
            (PROMPT, {"stopping_criteria": StoppingCriteriaList([Raising(KeyboardInterrupt)])}, KeyboardInterrupt),
            (PROMPT, {"logits_processor": LogitsProcessorList([Raising(OSError)])}, OSError),
        ],
    )
    def test_is_told_that_nothing_more_comes_also_after_an_error(
        self, ids: Tensor, options: dict[str, Any], error: type[BaseException]
    ) -> None:
        recorder = self.Recorder()
        with pytest.raises(error):
            generate(ids, streamer=recorder, **{"temperature": 0, **options})
        assert recorder.ended == 1

    def test_who_reads_from_one_does_not_wait_for_a_generation_that_failed(self) -> None:
        tokenizer = tiny_tokenizer()
        streamer = TextIteratorStreamer(tokenizer, timeout=60)
        model = tiny_model("qwen2", len(tokenizer))
        ids = torch.tensor([tokenizer("a winter there").input_ids])
        failing = LogitsProcessorList([Raising(OSError, after=4)])
        options = {
            "drafter": NoDraft(),
            "attention_mask": torch.ones_like(ids),
            "max_new_tokens": NEW,
            "temperature": 0,
        }

        def write() -> None:
            with pytest.raises(OSError, match="no more"):
                polydraft.generate(model, ids, streamer=streamer, logits_processor=failing, **options)

        writer = Thread(target=write)
        writer.start()
        assert "".join(streamer).startswith("a winter there")
        writer.join()


class TestBatches:
    @pytest.mark.parametrize("side", ["left", "right"])
    def test_greedy_rows_are_the_texts_of_single_runs(self, side: str) -> None:
        ids, mask = padded(ROWS, side)
        batched = generate(ids, attention_mask=mask, temperature=0)
        assert torch.equal(batched.sequences[:, : ids.shape[1]], ids)
        for row, prompt in enumerate(ROWS):
            alone = generate(torch.tensor([prompt]), temperature=0)
            assert batched.sequences[row, ids.shape[1] :].tolist() == alone.sequences[0, len(prompt) :].tolist()

    def test_a_sampled_row_does_not_depend_on_its_neighbours(self) -> None:
        ids, mask = padded(ROWS, "left")
        batched = generate(ids, attention_mask=mask, temperature=1.0, seed=9).sequences[0, ids.shape[1] :]
        alone = generate(torch.tensor([ROWS[0]]), temperature=1.0, seed=9).sequences[0, len(ROWS[0]) :]
        assert batched.tolist() == alone.tolist()


class TestStream:
    @pytest.mark.parametrize("temperature", [0, 1.0])
    def test_blocks_add_up_to_the_output_and_its_statistics(self, temperature: float) -> None:
        ids, mask = padded(ROWS, "left")
        options = {"attention_mask": mask, "temperature": temperature, "seed": 4, "max_new_tokens": NEW}
        run = polydraft.stream(target(), ids, drafter=drafter(), policy=Widths((3, 2, 1)), **options)
        blocks = list(run)
        output = generate(ids, policy=Widths((3, 2, 1)), **options)
        assert torch.equal(run.sequences(ids, 0), output.sequences)
        totals = run.statistics
        gained = [row for block in blocks for row in block.rows.values()]
        assert totals.steps == len(blocks)
        assert totals.target_calls == len(gained)
        assert totals.new_tokens == sum(len(row.tokens) for row in gained) == NEW * len(ROWS)
        assert totals.drafted == sum(row.drafted for row in gained)
        assert totals.accepted == sum(row.accepted for row in gained)
        assert totals.block_efficiency == pytest.approx(NEW * len(ROWS) / len(gained))
        assert totals.accepted_at == [
            sum(row.kept > depth for row in gained) for depth in range(len(totals.accepted_at))
        ]
        assert totals.offered_at[0] == sum(row.drafted > 0 for row in gained)
        last = [row for row in gained if row.finish and len(row.tokens) == 1]
        assert all(not row.drafted for row in last)  # what has room for one token needs no drafts
        assert {**output.statistics.as_dict(), "seconds": 0, "tokens_per_second": 0} == {
            **totals.as_dict(),
            "seconds": 0,
            "tokens_per_second": 0,
        }

    def test_every_block_tells_which_tokens_were_drafted(self) -> None:
        run = polydraft.stream(target(), PROMPT, drafter=drafter(), policy=Chain(3), temperature=0, max_new_tokens=NEW)
        text = PROMPT[0].tolist()
        for block in run:
            row = block.rows[0]
            kept = block.verdict.path[0, : row.kept]
            assert int(block.tree.tokens[0, 0]) == text[-1]
            assert block.tree.tokens[0, kept].tolist()[: row.accepted] == list(row.tokens[: row.accepted])
            assert len(row.tokens) <= row.kept + 1
            assert row.offered == (min(row.kept + 1, 3) if row.drafted else 0)
            text += row.tokens
        assert text == greedy()[0].tolist()

    def test_times_add_up(self) -> None:
        seconds = generate(temperature=0).statistics.seconds
        assert set(seconds) == {"prefill", "draft", "target", "verify", "total", "rest"}
        assert all(value > 0 for value in seconds.values())
        assert sum(value for name, value in seconds.items() if name != "total") == pytest.approx(seconds["total"])

    def test_plain_decoding_is_the_same_loop(self) -> None:
        statistics = generate(temperature=0, drafter=NoDraft()).statistics
        assert statistics.block_efficiency == 1
        assert (statistics.drafted, statistics.steps) == (0, NEW)


class TestDefaults:
    @pytest.mark.parametrize("temperature", [0, 0.8])
    def test_a_model_is_a_drafter_and_none_is_prompt_lookup(self, temperature: float) -> None:
        draft = drafter().model.model
        for chosen in (draft, None):
            output = generate(drafter=chosen, policy=None, temperature=temperature, seed=1)
            assert output.statistics.drafted > 0
            if temperature == 0:
                assert torch.equal(output.sequences, greedy())
