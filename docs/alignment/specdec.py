"""Train a small encoder-decoder and SpecDec's drafter for it, and write docs/alignment.md's table of both rules.

    python docs/alignment/specdec.py --work FOLDER     # train what is not there, measure, write the table
    python docs/alignment/specdec.py                   # the table alone

The target is a BART from nothing that puts tokens back: a seventh of them are missing in what it reads, a piece of
Python's source. Its drafter fills six masks, and learns on what the target writes of other pieces. The exact rule and
SpecDec's own, which is lossy (top-beta) and has the likeliest drafts, verify chains of six, one after the other for
each source. The record is docs/alignment/specdec.jsonl.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor
from transformers import BartConfig, BartForConditionalGeneration

import polydraft
from polydraft.bench.environment import machine
from polydraft.models import load_pair
from polydraft.probs import Noise
from polydraft.schemes import TopK
from polydraft.training import HeadPlan, HeadRecipe, HeadSize, WritingPlan, make_head
from polydraft.training.corpus import standard_library
from polydraft.verifiers import TopBeta, TopDown

DOCS = Path(__file__).parents[1]
RECORD, PAGE = DOCS / "alignment" / "specdec.jsonl", DOCS / "alignment.md"
MARKS = "<!-- table: specdec -->\n", "<!-- end of specdec -->"
WHOLE, MISSING, TEXTS, BLOCK, HELD = 32, 1 / 7, 32, 6, 32
END, PAD, BEGIN, MASK, TOKENS = 0, 8192, 8193, 8194, 8195
Line = dict[str, Any]


def pieces(count: int) -> Tensor:
    """Return so many pieces of Python's library, in an order of their own."""
    tokenizer, found = load_pair().tokenizer, list[Tensor]()
    for file in standard_library():
        ids = tokenizer(file.text, return_tensors="pt", verbose=False)["input_ids"][0]
        found += [one for one in ids.split(WHOLE) if len(one) == WHOLE]
    (random,) = Noise.from_seed(5, 1).generators
    return torch.stack(found)[torch.randperm(len(found), generator=random)[:count]]


def damaged(texts: Tensor, random: torch.Generator) -> list[Tensor]:
    """Return texts without some of their tokens, and with an end."""
    kept = torch.rand(texts.shape, generator=random) >= MISSING
    return [torch.cat([one[there], torch.tensor([END])]) for one, there in zip(texts, kept, strict=True)]


def target_of(work: Path, learnt: Tensor, steps: int) -> Any:
    """Return the target, which is trained where it is missing."""
    sizes = {"d_model": 128, "encoder_layers": 2, "decoder_layers": 4, "max_position_embeddings": 96, "dropout": 0.0}
    sizes |= {f"{side}_{part}": size for side in ("encoder", "decoder") for part, size in SIDES.items()}
    ends = {"pad_token_id": PAD, "bos_token_id": BEGIN, "decoder_start_token_id": BEGIN, "eos_token_id": END}
    torch.manual_seed(3)
    model: Any = BartForConditionalGeneration(BartConfig(vocab_size=TOKENS, forced_eos_token_id=None, **ends, **sizes))
    file = work / "target.pt"
    if file.is_file():
        model.load_state_dict(torch.load(file, weights_only=True))
        return model.eval()
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3, weight_decay=0.01)
    rise = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps, pct_start=0.1)
    (random,) = Noise.from_seed(6, 1).generators
    for step in range(steps):
        texts = learnt[torch.randint(len(learnt), (TEXTS,), generator=random)]
        source = torch.nn.utils.rnn.pad_sequence(damaged(texts, random), True, PAD)
        labels = torch.cat([texts, torch.full((TEXTS, 1), END)], 1)
        loss = model(input_ids=source, attention_mask=(source != PAD).long(), labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rise.step()
        optimizer.zero_grad()
        if step % 100 == 99:
            sys.stdout.write(f"step {step + 1}: {float(loss.detach()):.3f} nats a token\n")
            sys.stdout.flush()
    torch.save(model.state_dict(), file)
    return model.eval()


SIDES = {"attention_heads": 4, "ffn_dim": 512}


def drafter_of(work: Path, target: Any, sources: list[Tensor], steps: int, tokens: int) -> tuple[Any, Line]:
    """Return the drafter's model, which is trained where it is missing, and what its training said of it."""
    out = work / "drafter"
    if not (out / "made.json").is_file():
        plan = HeadPlan(
            "spec-drafter",
            HeadSize(drafts=BLOCK),
            WritingPlan(tokens=tokens, length=48),
            HeadRecipe(steps=steps, texts=TEXTS, measure_every=10**9),
            name="a small BART",
        )
        made = make_head(target, sources, work / "drafter-work", out, plan)
        told = {name: one for name, one in made.as_dict().items() if name != "folder"}
        (out / "made.json").write_text(json.dumps({**told, "seconds": made.seconds}, default=str))
    model = BartForConditionalGeneration.from_pretrained(out).float().eval()
    return model, json.loads((out / "made.json").read_text())


def measured(target: Any, drafter: Any, sources: list[Tensor]) -> Iterator[Line]:
    """Yield what became of each rule's texts, beside plain ones at the same temperature."""
    rules: dict[str, tuple[float, dict[str, Any]]] = {
        "exact": (0.0, {}),
        "exact ": (1.0, {}),
        "top 3, within 1 nat (SpecDec)": (1.0, {"verifier": TopDown(TopBeta(TopK(), 3, 1.0))}),
        "top 5, within 3 nats": (1.0, {"verifier": TopDown(TopBeta(TopK(), 5, 3.0))}),
    }
    for name, (heat, rule) in rules.items():
        found = list[Line]()
        for seed, source in enumerate(sources):
            settings: dict[str, Any] = {"max_new_tokens": WHOLE + 4, "temperature": heat, "seed": seed}
            chosen: dict[str, Any] = {"drafter": drafter, "policy": polydraft.Chain(BLOCK), **rule}
            plain: Any = polydraft.generate(target, source[None], drafter="none", **settings)
            own: Any = polydraft.generate(target, source[None], **chosen, **settings)
            seconds = [one.statistics.seconds["total"] for one in (plain, own)]
            found.append(
                {
                    "ratio": seconds[0] / seconds[1],
                    "calls": own.statistics.new_tokens / own.statistics.target_calls,
                    "plain_nats": nats(target, source, plain.sequences[0].tolist()),
                    "nats": nats(target, source, own.sequences[0].tolist()),
                    "lossless": own.statistics.lossless,
                }
            )
        means = {key: mean(float(one[key]) for one in found) for key in found[0]}
        yield {"rule": name.strip(), "heat": heat, **means, "texts": len(found)}


@torch.no_grad()
def nats(target: Any, source: Tensor, text: list[int]) -> float:
    """Return the log-probability per token of a text."""
    ids = torch.tensor([text])
    rows = target(input_ids=source[None], decoder_input_ids=ids[:, :-1]).logits[0].log_softmax(-1)
    return float(rows.gather(-1, ids[0, 1:, None]).mean())


def table() -> str:
    """Return the table of the record."""
    columns = "rule", "T", "law", "tokens per call", "speed", "nats a token", "of plain text"
    rows = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for one in json.loads(RECORD.read_text())["rules"]:
        law = "the target's" if one["lossless"] == 1 else "**lossy**"
        told = f"{one['calls']:.2f} | {one['ratio']:.2f}x | {-one['nats']:.2f} | {-one['plain_nats']:.2f}"
        rows.append(f"| {one['rule']} | {one['heat']:g} | {law} | {told} |")
    return "\n".join(rows) + "\n"


def main() -> None:
    """Train, measure, and write the page's table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, help="where the models are; without it nothing is run")
    parser.add_argument("--steps", type=int, default=3000, help="of the target")
    parser.add_argument("--drafter-steps", type=int, default=600)
    parser.add_argument("--tokens", type=int, default=200_000, help="that the target writes for its drafter")
    given = parser.parse_args()
    if given.work is not None:
        given.work.mkdir(parents=True, exist_ok=True)
        texts = pieces(40_000)
        (random,) = Noise.from_seed(7, 1).generators
        held, others = damaged(texts[:HELD], random), damaged(texts[HELD:5000], random)
        target = target_of(given.work, texts[5000:], given.steps)
        drafter, made = drafter_of(given.work, target, others, given.drafter_steps, given.tokens)
        asked = [given.steps, given.drafter_steps, given.tokens]
        line = {
            "machine": machine(torch.device("cpu")),
            "asked": asked,
            "made": made,
            "rules": [*measured(target, drafter, held)],
        }
        RECORD.write_text(json.dumps(line, default=str) + "\n")
    if not RECORD.exists():
        raise SystemExit("There is no record yet: name a folder by --work.")
    text = PAGE.read_text(encoding="utf-8")
    if all(mark in text for mark in MARKS):
        before, rest = text.split(MARKS[0])
        PAGE.write_text(before + MARKS[0] + table() + MARKS[1] + rest.split(MARKS[1])[1], encoding="utf-8")


if __name__ == "__main__":
    main()
