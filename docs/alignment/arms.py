"""What the arms of `published.py` share: the target, its texts, the starts, and what becomes of an arm.

Text of all kinds stands behind the same beginnings of Python's own source: what follows there (fixed), what the target
writes (of `target:2` two texts behind half as many beginnings), what the start writes (draft), both, or what both write
by chance, token by token (by-token). The target's final states are kept once and shared by all arms.
"""

import copy
import shutil
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from time import perf_counter
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

import polydraft
from polydraft.bench import read_prompt_sets
from polydraft.bench.aligning.distilling import seconds_of_step
from polydraft.bench.aligning.work_folder import Budget
from polydraft.bench.speed.speed_ups import PairedRuns, speed_up
from polydraft.drafters import BoostedDrafter, Drafter, ModelDrafter, drafter_of, owned_models
from polydraft.errors import NotConverged
from polydraft.models import HuggingFaceModel, Pair, load_pair, module_of
from polydraft.models.derived import without_layers
from polydraft.probs import Noise, SamplingParams
from polydraft.schemes import Product
from polydraft.theory import optimal_acceptance
from polydraft.training.alignment.divergences import reverse_divergence, several_agreement
from polydraft.training.alignment.draft_forms import Material, draft_form
from polydraft.training.alignment.draft_losses import CHAIN, TINY, DraftLoss, draft_loss
from polydraft.training.alignment.draft_training import DraftTraining, chains_from, from_start, written
from polydraft.training.alignment.forms.boosting import BoostTraining, given_to_drafts
from polydraft.training.alignment.held_out import HeldOutTexts, tokens_per_call
from polydraft.training.alignment.model_weights import read_weights, write_weights
from polydraft.training.alignment.own_text import own_texts
from polydraft.training.alignment.text_calls import kept_by_token, reached_in_draft_text, replayed
from polydraft.training.corpus import standard_library
from polydraft.training.heads.loop import HeadRecipe, run_steps
from polydraft.training.heads.losses.masked_training import copied, write_draft_model
from polydraft.training.heads.losses.row_losses import (
    HeadBatch,
    TargetEnds,
    cross_entropy,
    forward_divergence,
    weighted,
)
from polydraft.training.heads.new_heads import NewHead
from polydraft.training.heads.shards import Shards, continued
from polydraft.trees import TreeShape

LENGTH, GIVEN, ROWS, HELD, TEXTS, RATE, LENGTHS = 256, 48, 64, 32, 8, 2e-3, (1, 2, 4)
NEW, TIMED, COUNTED, FEW = 96, 12, 48, 2
"""Tokens of a timed text, timed prompts, rows whose optimum is searched for, and texts that tell that of long rows."""
REPEATED = 2
"""How many texts are written in trees behind each beginning."""
TIMES = "transfer", "twice", "boost"
"""Experiments whose drafts are timed beside plain decoding of the first target."""
IN_TURN = ", in turn"
"""What the name of boosted drafts ends with that learn one after the other, and not at once."""
DRAFTING = "ms of drafting a call"
"""What times of drafting are called beside speeds; the drafts are the last arm that is timed."""
IN_TREES = "trees"
"""The experiment whose drafts decode in trees."""
TREES = {2: TreeShape(((2,), (2, 2), (2,) * 4)), 4: TreeShape(((4,), (4,) * 4))}
"""Trees with so many independent drafts below every node, 14 and 20 tokens."""
YOUNG, SHIPPED, FEW_LAYERS = "young", "shipped", "six layers"
WIDTHS = {"half as wide": 0.5, "as wide": 1.0, "twice as wide": 2.0}
"""New drafts of the shapes of the shipped one but for their widths, which have learnt nothing."""
LARGER = {"four times as deep": (1, 4), "three times as wide": (3, 1), "six times as deep": (1, 6)}
"""Young drafts so many times as wide and as deep: drafting takes as long as that of two or, the last, three drafts."""
RATES = {YOUNG: RATE, SHIPPED: 1e-3, FEW_LAYERS: RATE, **dict.fromkeys(LARGER, RATE)}
NEW_RATE = 4e-3
Line = dict[str, Any]


@dataclass(frozen=True)
class Trial:
    """One arm.

    Args:
        experiment: the table that it belongs to.
        loss: what it learns by.
        source: the text that it learns from; "draft-reached" is the draft's with the weights of what decoding reaches,
            "smaller" that of a smaller target, which it then drafts for.
        seed: of its run.
        form: how it learns: all weights of one draft, or several drafts.
        longer: how many times as many steps as others it takes: as many as there are boosted drafts beside it; 0 for
            the start.
        start: what it begins with: the young draft or a larger one, the one that ships, a fifth of the target's
            layers, or a new one.
    """

    experiment: str
    loss: str
    source: str = "target"
    seed: int = 1
    form: str = "tuned"
    longer: int = 1
    start: str = YOUNG

    @property
    def key(self) -> str:
        """What it is known by in the record."""
        return " ".join(str(value) for value in vars(self).values() if value != YOUNG)


class Bench:
    """What all arms share: the pair, the text and the start.

    Args:
        work: where text and start are kept.
        tokens: how many of each kind there are to learn from.
        steps: of an arm.
        target: another target than the embedded one, for the same start.
        pair: another pair than the embedded one.
    """

    def __init__(self, work: Path, tokens: int, steps: int, target: Any = None, pair: Pair | None = None) -> None:
        self.work, self.tokens, self.steps = work, tokens, steps
        self.work.mkdir(parents=True, exist_ok=True)
        self.pair, self.searched = (load_pair(), HELD) if pair is None else (pair, FEW)
        self.target = HuggingFaceModel(self.pair.target if target is None else target)
        self.ends = TargetEnds.of(self.target.model)
        self.fixed = self._fixed()

    def _fixed(self) -> Tensor:
        """Return texts of Python's library, a piece of each file, in an order of their own."""
        found, wanted = list[Tensor](), -(-self.tokens // LENGTH) + 2 * HELD
        for file in standard_library():
            ids = self.pair.tokenizer(file.text, return_tensors="pt", verbose=False)["input_ids"][0]
            found += [one for one in ids[: 16 * LENGTH].split(LENGTH) if len(one) == LENGTH]
        (random,) = Noise.from_seed(5, 1).generators
        order = torch.randperm(len(found), generator=random)[:wanted].tolist()
        if len(order) < wanted:
            raise SystemExit(f"Python's library here has {len(found)} texts; ask for fewer --tokens.")
        return torch.stack([found[place] for place in order])

    def shards(self, source: str, start: str = YOUNG) -> list[Path]:
        """Return the files of a kind of text, which are written where they are missing."""
        if source == "both":
            return self.shards("target") + self.shards("draft")
        return [self._shard(source, number, start) for number in range(-(-len(self._learnt()) // ROWS))]

    def _learnt(self) -> Tensor:
        return self.fixed[2 * HELD :]

    def _shard(self, source: str, number: int, start: str) -> Path:
        path = self.work / f"{source.replace(':', '-')}-{number:03d}.safetensors"
        if not path.is_file():
            texts = self._learnt()[number * ROWS : (number + 1) * ROWS]
            if source == "by-token":
                begun, params = [one[:GIVEN] for one in texts], SamplingParams(temperature=1.0)
                other = HuggingFaceModel(self.start(start)), 0.5
                texts = own_texts(self.target, begun, params, LENGTH - GIVEN, (), 10 + number, other).tokens
            elif source != "fixed":
                each = int(source.partition(":")[2] or 1)
                begun = self._learnt()[number * ROWS // each :][: -(-len(texts) // each)]
                texts = begun.repeat_interleave(each, 0)[: len(texts)]
                writer = HuggingFaceModel(self.start(start)) if source == "draft" else self.target
                texts = self._written(writer, texts, torch.ones(len(texts)), 10 + number)
            self._keep(texts, torch.ones(len(texts)), path)
        return path

    def _written(self, writer: HuggingFaceModel, texts: Tensor, heats: Tensor, seed: int) -> Tensor:
        """Let a model write on behind the beginnings of texts."""
        (random,) = Noise.from_seed(seed, 1).generators
        return continued(writer, [one[:GIVEN] for one in texts], heats, LENGTH, (), random)["ids"].long()

    def _keep(self, texts: Tensor, heats: Tensor, path: Path) -> None:
        """Let the target read texts, and keep them with its final states."""
        (random,) = Noise.from_seed(0, 1).generators
        found = continued(self.target, [*texts], heats, LENGTH, (), random)
        found["valid"][:, GIVEN:] = 1
        beside = path.with_suffix(".part")
        save_file({**found, "heat": heats}, beside, {"layers": "[]"})
        beside.rename(path)

    def held_out(self, kind: str = "held") -> HeldOutTexts:
        """Return texts that the target wrote behind other beginnings, half of them greedily."""
        path = self.work / f"{kind}.safetensors"
        if not path.is_file():
            begun = self.begun(kind)
            heats = torch.tensor([0.0, 1.0]).repeat_interleave(len(begun) // 2)
            self._keep(self._written(self.target, begun, heats, 3), heats, path)
        return HeldOutTexts.of(self.target, [path], (0.0, 1.0))

    def begun(self, kind: str) -> Tensor:
        """Return beginnings that no arm learns behind: of other files, or of questions, of which there are fewer."""
        if kind == "held":
            return self.fixed[: 2 * HELD]
        ids = [self.pair.tokenizer(one.text)["input_ids"][:GIVEN] for one in read_prompt_sets(["gsm8k"])]
        return torch.tensor([one for one in ids if len(one) == GIVEN]).repeat(2, 1)

    def start(self, kind: str) -> Any:
        """Return what arms begin with; young drafts are made where they are missing."""
        draft: Any = self.pair.draft
        if kind == SHIPPED:
            return copied(draft, draft.config.num_hidden_layers, None).eval()
        if kind == FEW_LAYERS:
            material = Material(self.target, self.ends, texts=self.fixed[:TEXTS])
            made: Any = draft_form("layers").make(material, "fkl").training
            return made.network.eval()
        if kind in WIDTHS:
            return self._new(draft, WIDTHS[kind]).eval()
        made, own = self._new(draft, *LARGER.get(kind, (1, 1))), f"-{kind.replace(' ', '-')}" if kind in LARGER else ""
        learner, path = _Reader(made, self.ends, draft_loss("fkl")), self.work / f"start{own}.safetensors"
        if not path.is_file():
            files = self.shards("fixed")
            self._run(learner, files, 2 * self.steps, 0, self.work / f"run-start{own}", NEW_RATE)
            write_weights(learner, path)
        read_weights(learner, path)
        return made.eval()

    def _new(self, draft: Any, wide: float, deep: int = 1) -> Any:
        """Return a draft of another's shapes, so many times as wide and as deep, that has learnt nothing."""
        config = copy.deepcopy(draft.config)
        config.num_hidden_layers *= deep
        for name in ("hidden_size", "intermediate_size", "num_attention_heads"):
            setattr(config, name, int(wide * getattr(config, name)))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            return type(draft)(config).float()

    def _run(self, training: Any, files: list[Path], steps: int, seed: int, folder: Path, rate: float = RATE) -> None:
        recipe = HeadRecipe(
            *(steps, TEXTS, rate, rate / 2), warmup=0.05, measure_every=10**9, save_every=max(50, steps // 4), seed=seed
        )
        run_steps(training, Shards(files, heats=True), folder, recipe, lambda *_: False)

    def smaller(self) -> tuple["Bench", float]:
        """Return the same with a smaller target, and how much of the target's law that has.

        It has every second layer of the target, and was tuned on its text in four times as many steps as an arm.
        """
        cut = without_layers(self.pair.target, range(1, self.target.layers, 2))
        made = copied(cut, cut.config.num_hidden_layers, None)
        learner = DraftTraining(made, self.ends, draft_loss("fkl+lk-alpha"))
        folder = self.work / "smaller"
        folder.mkdir(exist_ok=True)
        path = folder / "target.safetensors"
        if not path.is_file():
            self._run(learner, self.shards("target"), 4 * self.steps, 0, folder / "run-target")
            write_weights(learner, path)
            self.start(YOUNG)
            shutil.copy(self.work / "start.safetensors", folder)
        read_weights(learner, path)
        bench = Bench(folder, self.tokens, self.steps, made.eval())
        found = self.held_out().worth(NewHead(learner, ModelDrafter(bench.target), write_draft_model))
        return bench, found[1.0].overlap[0]

    def arm(self, trial: Trial) -> Line:
        """Run one arm and return what became of it."""
        if trial.source == "smaller":
            bench, kept = self.smaller()
            return {**bench.arm(replace(trial, source="target")), "source": trial.source, "kept": round(kept, 4)}
        folder = self.work / f"run-{trial.key.replace(' ', '_').replace(':', '-')}"
        start, files = self.start(trial.start), self.shards(trial.source.removesuffix("-reached"), trial.start)
        steps, material = self.steps * trial.longer, Material(self.target, self.ends, start)
        began = perf_counter()
        each = 0.0
        if trial.loss == "adaspec":  # as long as the plain arm beside it, the reference included
            other = draft_form("tuned").make(material, "fkl")
            each = seconds_of_step(other, Shards(files, heats=True), self._budget(), self.target.device)
            self._run(other.training, files, steps // 2, trial.seed, folder / "reference")
            reference = folder / "reference.safetensors"
            write_weights(other.training, reference)
            material = Material(self.target, self.ends, start, reference=reference)
        form = draft_form(trial.form.removesuffix(IN_TURN))
        made: NewHead = form.make(material, "fkl" if trial.loss == "replay" else trial.loss)
        if isinstance(made.training, DraftTraining) and trial.source.endswith("-reached"):
            made = replace(made, training=_Reached(made.training.network, self.ends, made.training.loss))
        if isinstance(made.training, DraftTraining) and trial.loss == "replay":
            made = replace(made, training=_Replayed(made.training.network, self.ends, DraftLoss(_both_ways)))
        if trial.loss == "adaspec":
            own = seconds_of_step(made, Shards(files, heats=True), self._budget(), self.target.device)
            steps = max(1, round((steps - steps // 2) * each / own))
        turns: tuple[int | None, ...] = (None,)
        if trial.form.endswith(IN_TURN):
            made = replace(made, training=(own := _InTurn.of(made.training)))
            turns = (*range(len(own.members)),)
        for turn in turns if steps else ():
            if isinstance(made.training, _InTurn):
                made.training.take(turn)
            name = "run" if turn is None else f"run-{turn}"
            self._run(made.training, files, steps, trial.seed, folder / name, RATES.get(trial.start, NEW_RATE))
        seconds = perf_counter() - began
        shutil.rmtree(folder, ignore_errors=True)
        kind = "elsewhere" if trial.experiment == "transfer" else "held"
        found = self.held_out(kind).worth(made)
        return {
            **vars(trial),
            "steps": steps,
            "seconds": round(seconds, 1),
            "tokens": TEXTS * LENGTH * steps,
            "calls": {f"{heat:g}": round(value, 4) for heat, value in tokens_per_call(found).items()},
            "by_token": round(found[1.0].tokens_per_call["token by token"][-1], 4),
            "overlap": round(found[1.0].overlap[0], 4),
            "optimum": self._optimum(made, kind),
            **({"speed": self._speed(made, kind)} if trial.experiment in TIMES else {}),
            **({"trees": self._in_trees(made)} if trial.experiment == IN_TREES else {}),
        }

    def _in_trees(self, made: NewHead) -> dict[str, float]:
        """Return tokens per call of texts that are written at temperature 1 in trees, by the optimal rule."""
        (draft,) = (module_of(one) for one in owned_models(made.drafter))
        rule = polydraft.TopDown(polydraft.Optimal(polydraft.IID()))
        settings: Line = {"temperature": 1.0, "max_new_tokens": NEW, "eos_token_id": None, "verifier": rule}
        begun = self.begun("held")[:, :GIVEN]
        found: dict[str, float] = {}
        for count, shape in TREES.items():
            policy = polydraft.Fixed(shape)
            told = [
                polydraft.generate(self.pair.target, begun, drafter=draft, policy=policy, seed=seed, **settings)
                for seed in range(REPEATED)
            ]
            found[str(count)] = round(fmean(one.statistics.block_efficiency for one in told), 4)
        return found

    def _speed(self, made: NewHead, kind: str) -> Line:
        """Return the speed beside plain decoding of the first target, which writes each text right before.

        A model drafts a chain, and several models their tree.
        """
        first, own = self.pair.target, self.target.model
        models: list[Any] = [module_of(one) for one in owned_models(made.drafter)]  # by the passes that are served
        drafter: Drafter = BoostedDrafter(models)
        chain: Line = {}
        if len(models) == 1:
            drafter, chain = drafter_of(models[0]), {"policy": polydraft.Chain(CHAIN)}
        arms: Line = {"plain of its target": (own, "none", {})} if own is not first else {}
        arms = {**arms, "drafted": (own, drafter, chain)}
        told: Line = {}
        for heat in (0.0, 1.0):
            settings: Line = {"temperature": heat, "max_new_tokens": NEW, "eos_token_id": None}
            runs, drafting = {name: list[list[PairedRuns]]() for name in arms}, list[float]()
            for number, one in enumerate(self.begun(kind)[:TIMED, :GIVEN]):
                for name, (model, drafter, chosen) in arms.items():
                    plain = polydraft.generate(first, one[None], drafter="none", seed=number, **settings).statistics
                    found = polydraft.generate(
                        *(model, one[None]), drafter=drafter, seed=number, **settings, **chosen
                    ).statistics
                    sides = ((side.new_tokens, side.seconds["total"]) for side in (found, plain))
                    runs[name].append([PairedRuns(*next(sides), *next(sides))])
                drafting.append(1000 * found.seconds["draft"] / found.target_calls)
            for name, pairs in runs.items():
                ratio = speed_up(pairs).total
                told.setdefault(name, {})[f"{heat:g}"] = [ratio.mean, ratio.low, ratio.high]
            told.setdefault(DRAFTING, {})[f"{heat:g}"] = [median(drafting)]
        return told

    def _budget(self) -> Budget:
        return Budget(1e9, perf_counter, perf_counter())

    @torch.no_grad()
    def _optimum(self, made: NewHead, kind: str) -> dict[str, float]:
        """Return the mean of alpha* on held-out text at temperature 1, of 1, 2 and 4 drafts or of several models.

        Of another pair, whose rows may be long, it is that of few texts.

        Of several models with a draft of each it is searched for row by row, on few rows, beside what the rule that
        looks at one draft after the other accepts of the same ones.
        """
        training, rows = made.training.eval(), self.held_out(kind).rows[1.0][: self.searched]
        batch = HeadBatch(**{name: torch.stack([one[name] for one in rows]) for name in rows[0]})
        if isinstance(training, BoostTraining):
            pieces = [[*one.laws_of(batch, 1.0)] for one in training.drafts()]
            drafts = [torch.cat([draft for draft, _ in one]) for one in pieces]
            law = torch.cat([law for _, law in pieces[0]])
            some = torch.linspace(0, len(law) - 1, COUNTED).long()
            found = list[tuple[float, float]]()
            for place in some.tolist():
                rows, own = torch.stack([one[place] for one in drafts]).double(), law[place].double()
                with suppress(NotConverged):  # where rounding has the last word the row is left out
                    best = optimal_acceptance(rows, own / own.sum(), Product(), len(drafts))
                    found.append((float(best), float(given_to_drafts(own, [*rows]).sum())))
            names = "several", "in turn"
            return {
                name: round(fmean(one), 4) for name, one in zip(names, zip(*found, strict=True), strict=bool(found))
            }
        assert isinstance(training, DraftTraining)
        parts = [
            [several_agreement(draft.clamp_min(1e-30).log(), law, count) for count in LENGTHS]
            for draft, law in training.laws_of(batch, 1.0)
        ]
        means = [float(torch.cat(one).mean()) for one in zip(*parts, strict=True)]
        return {str(count): round(mean, 4) for count, mean in zip(LENGTHS, means, strict=True)}


def _both_ways(logits: Tensor, target: Tensor) -> Tensor:
    """Return KL(p || q) and KL(q || p) of each row."""
    return torch.stack([forward_divergence(logits, target), reverse_divergence(logits, target.clamp_min(TINY))], -1)


class _Replayed(DraftTraining):
    """Learns accepted places by KL(p || q) and rejected ones by KL(q || p), as decoding comes to them (Draft-OPD)."""

    def learn(self, batch: HeadBatch) -> dict[str, Tensor]:
        """Return the weighted mean of the rows' losses."""
        asked, rows = self.places(batch, batch.heats())
        kept = kept_by_token(chains_from(asked, rows.ratio.detach(), CHAIN))
        weights = [one[written(asked)] for one in replayed(kept, asked.sum(-1))]
        overlap, count = rows.overlap.detach().mean()[None], torch.tensor([len(rows.overlap)])
        return {"loss": weighted(rows.values, torch.stack(weights, -1)), "overlap": overlap, "count": count}


class _InTurn(BoostTraining):
    """Boosted drafts one of which learns at a time; those before it have learnt, and those behind it are not there."""

    turn = 0

    @classmethod
    def of(cls, training: BoostTraining) -> "_InTurn":
        """Return the same drafts."""
        return cls(training.drafts(), training.span)

    def take(self, turn: int) -> None:
        """Let the next one learn."""
        self.turn = turn
        for number, one in enumerate(self.members):
            one.requires_grad_(number == turn)

    def drafts(self) -> list[DraftTraining]:
        """Return those that are there."""
        return super().drafts()[: self.turn + 1]


class _Reached(DraftTraining):
    """Learns from text of the draft, whose places count as often as decoding comes to them."""

    def learn(self, batch: HeadBatch) -> dict[str, Tensor]:
        """Return the weighted mean of the rows' losses."""
        asked, rows = self.places(batch, batch.heats())
        weights = reached_in_draft_text(from_start(asked, rows.ratio.detach()), CHAIN)[written(asked)]
        overlap, count = rows.overlap.detach().mean()[None], torch.tensor([len(weights)])
        return {"loss": weighted(rows.values, weights), "overlap": overlap, "count": count}


class _Reader(DraftTraining):
    """Learns the text's own tokens by cross entropy, whatever the target thinks of them."""

    def learn(self, batch: HeadBatch) -> dict[str, Tensor]:
        """Return the loss of all tokens but the first."""
        logits = self.logits(self.states(batch.ids)[:, :-1].flatten(0, 1))
        loss = cross_entropy(logits, batch.ids[:, 1:].flatten()).mean()
        return {"loss": loss, "overlap": loss.detach()[None], "count": torch.ones(1)}
