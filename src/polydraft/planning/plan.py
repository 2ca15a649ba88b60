"""A plan: for a pair of models and a machine, the tree to draft at each temperature, and what it was chosen from."""

import json
import os
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import nn

from polydraft.errors import InvalidParameter
from polydraft.models import Pair
from polydraft.planning.costs import Curve, StepCosts
from polydraft.probs import SamplingParams
from polydraft.trees import Acceptance, TreeShape, expected_tokens, fastest_shape
from polydraft.verifiers import ValueCurves

PROCESSOR = Path("/proc/cpuinfo")
FORMAT = 1
LARGEST_FILE = 2**24


@dataclass(frozen=True)
class ModelIdentity:
    """A model's name as it was given, which may change, its size, and a checksum of a sample of its weights."""

    name: str
    parameters: int
    weights: str

    @classmethod
    def of(cls, model: nn.Module, name: str) -> "ModelIdentity":
        """Describe a model."""
        weights, mark = list(model.parameters()), 0
        for one in weights:
            here = getattr(one.detach(), "to_local", one.detach)()  # of weights on several ranks this one's part
            mark = crc32(here.flatten()[:256].double().cpu().numpy().tobytes(), mark)
        return cls(name, sum(one.numel() for one in weights), f"{mark:08x}")

    def beside(self, other: "ModelIdentity") -> str:
        """Name the model by what tells it from another, its size or its weights; empty if it is the same."""
        if self.parameters != other.parameters:
            return f"{self.name} ({self.parameters:,} parameters)"
        return f"{self.name} (weights {self.weights})" if self.weights != other.weights else ""


@dataclass(frozen=True)
class PairIdentity:
    """A target, a draft model, and a checksum of the tokens that they share."""

    target: ModelIdentity
    draft: ModelIdentity
    vocabulary: str

    @classmethod
    def of(cls, pair: Pair, names: tuple[str, str]) -> "PairIdentity":
        """Describe a pair with a draft model."""
        tokens = sorted((index, token) for token, index in pair.tokenizer.get_vocab().items())
        mark = crc32("\n".join(f"{index} {token}" for index, token in tokens).encode(errors="surrogatepass"))
        models = (pair.target, pair.draft or pair.target)
        target, draft = (ModelIdentity.of(model, name) for model, name in zip(models, names, strict=True))
        return cls(target, draft, f"{len(tokens)} {mark:08x}")

    def differences(self, there: "PairIdentity") -> list[str]:
        """Say in words how a plan's pair, `there`, differs from this one."""
        found = [
            f"{role} {theirs.beside(ours)} there, {ours.beside(theirs)} here"
            for role, ours, theirs in (("target", self.target, there.target), ("draft model", self.draft, there.draft))
            if ours.beside(theirs)
        ]
        if self.vocabulary != there.vocabulary:
            found.append("another vocabulary")
        return found


@dataclass(frozen=True)
class Machine:
    """Where and how passes run: all that their time depends on beside the models."""

    processor: str
    device: str
    threads: int
    dtype: str
    torch: str

    @classmethod
    def of(cls, pair: Pair) -> "Machine":
        """Describe this machine, with the device and precision of the target."""
        return cls.of_model(pair.target)

    @classmethod
    def of_model(cls, model: Any) -> "Machine":
        """Describe this machine, with the device and precision of a model."""
        device = model.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        dtype = str(model.dtype).removeprefix("torch.")
        return cls(processor_name(), name, torch.get_num_threads(), dtype, torch.__version__)

    def differences(self, there: "Machine") -> list[str]:
        """Say in words how a plan's machine, `there`, differs from this one."""
        pairs = ((field.name, getattr(there, field.name), getattr(self, field.name)) for field in fields(self))
        return [f"{name} {theirs} there, {ours} here" for name, theirs, ours in pairs if theirs != ours]


def processor_name() -> str:
    """Return what this machine's processor is called."""
    try:
        lines = PROCESSOR.read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


@dataclass(frozen=True)
class Prediction:
    """What a tree is expected to do: tokens per target call, the next token included, and seconds per step."""

    tokens: float
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Tokens over seconds."""
        return self.tokens / self.seconds if self.seconds > 0 else float("inf")

    def as_dict(self) -> dict[str, float]:
        """Return everything, for JSON."""
        return {
            "tokens_per_call": round(self.tokens, 4),
            "milliseconds_per_step": round(1000 * self.seconds, 4),
            "tokens_per_second": round(self.tokens_per_second, 2),
        }


@dataclass(frozen=True)
class TunedTree:
    """The tree for one temperature.

    Args:
        temperature: the target's.
        scheme: the name of the way of drafting.
        verifier: the name of the rule.
        shape: the tree; the root alone means plain decoding.
        usual: the tree that is drafted without a plan.
        acceptance: the measured rates.
        visits: from how many nodes.
        costs: the measured times.
        curves: what shares bring in trees of this shape, measured for rules that ask for it (`Valued.measured`).
    """

    temperature: float
    scheme: str
    verifier: str
    shape: TreeShape
    usual: TreeShape
    acceptance: Acceptance
    visits: int
    costs: StepCosts
    curves: ValueCurves | None = None

    def predict(self, shape: TreeShape) -> Prediction:
        """Return what a tree of this shape would do.

        Raises:
            InvalidParameter: the verifier takes fewer drafts at a node.
        """
        return Prediction(expected_tokens(shape, self.acceptance), self.costs.of(shape))

    @property
    def chosen(self) -> Prediction:
        """What the chosen tree is expected to do."""
        return self.predict(self.shape)

    @property
    def plain(self) -> Prediction:
        """What plain decoding is expected to do."""
        return self.predict(TreeShape(()))

    @property
    def default(self) -> Prediction | None:
        """What the tree drafted without a plan is expected to do; None if the verifier cannot verify it."""
        try:
            return self.predict(self.usual)
        except InvalidParameter:
            return None

    def as_dict(self) -> dict[str, object]:
        """Return everything, for JSON; the predictions are for readers and not read back."""
        default = self.default
        return {
            "temperature": self.temperature,
            "scheme": self.scheme,
            "verifier": self.verifier,
            "tree": self.shape.counts,
            "default_tree": self.usual.counts,
            "predicted": {
                "tree": self.chosen.as_dict(),
                "default_tree": default.as_dict() if default else None,
                "plain": self.plain.as_dict(),
            },
            "visits": self.visits,
            "acceptance": self.acceptance.rates,
            "seconds": {
                "target": self.costs.target.points,
                "draft": self.costs.draft.points,
                "start": self.costs.start,
                "overhead": self.costs.overhead,
                "plain_overhead": self.costs.plain_overhead,
            },
            **({"curves": self.curves.slopes} if self.curves else {}),
        }


@dataclass(frozen=True)
class PairPlan:
    """The trees of one pair on one machine.

    Args:
        pair: which models.
        machine: where the passes were timed.
        context: after how many tokens they were timed.
        max_nodes: the largest tree that was allowed, the root included.
        max_depth: the deepest one.
        trees: one per temperature.
    """

    pair: PairIdentity
    machine: Machine
    context: int
    max_nodes: int
    max_depth: int
    trees: tuple[TunedTree, ...]

    def at(self, temperature: float, scheme: str, verifier: str) -> TunedTree | None:
        """Return the tree of the nearest temperature with this scheme and verifier, but never 0 for one above it."""
        fitting = [
            tree
            for tree in self.trees
            if (tree.scheme, tree.verifier) == (scheme, verifier) and (tree.temperature > 0) == (temperature > 0)
        ]
        return min(fitting, key=lambda tree: abs(tree.temperature - temperature), default=None)

    def as_dict(self) -> dict[str, object]:
        """Return everything, for JSON."""
        return {
            "polydraft_plan": FORMAT,
            "pair": asdict(self.pair),
            "machine": asdict(self.machine),
            "context": self.context,
            "max_nodes": self.max_nodes,
            "max_depth": self.max_depth,
            "trees": [tree.as_dict() for tree in self.trees],
        }

    def save(self, path: Path) -> None:
        """Write the plan to a file, in one piece: the file is the old one or the whole new one.

        Raises:
            InvalidParameter: the file cannot be written.
        """
        part = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            part.write_text(_compact(json.dumps(self.as_dict(), indent=1)) + "\n", encoding="utf-8")
            os.replace(part, path)
        except OSError as error:
            raise InvalidParameter(f"{path}: the plan cannot be written there: {error.strerror}.") from error
        finally:
            part.unlink(missing_ok=True)


def searched(acceptance: Acceptance, costs: StepCosts, max_nodes: int, max_depth: int) -> TreeShape:
    """Return the tree with the most tokens per second; the root alone if plain decoding is as fast."""
    return fastest_shape(
        acceptance,
        costs.verifying,
        costs.draft,
        max_nodes=max_nodes,
        max_depth=max_depth,
        overhead=costs.drafting,
    )


def load_plan(path: str | Path) -> PairPlan:
    """Read a plan file.

    Raises:
        InvalidParameter: the file cannot be read, is no plan, is of another format, or is damaged, and where.
    """
    try:
        with Path(path).expanduser().open("rb") as file:
            content = file.read(LARGEST_FILE + 1)
    except OSError as error:
        raise InvalidParameter(f"{path}: the plan cannot be read: {error.strerror}.") from error
    try:
        row = json.loads(content) if len(content) <= LARGEST_FILE else None
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict) or "polydraft_plan" not in row:
        raise InvalidParameter(f"{path}: this is no plan file; `polydraft tune` writes one.")
    if row["polydraft_plan"] != FORMAT:
        raise InvalidParameter(
            f"{path}: the plan has format {row['polydraft_plan']!r}, and this version of polydraft reads {FORMAT}; "
            "run `polydraft tune` again."
        )
    try:
        return _plan(row)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        reason = f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error).rstrip(".")
        raise InvalidParameter(f"{path}: the plan file is damaged: {reason}.") from error


def _plan(row: Mapping[str, Any]) -> PairPlan:
    pair = row["pair"]
    target, draft = (ModelIdentity(**_typed(pair[role], ModelIdentity)) for role in ("target", "draft"))
    return PairPlan(
        PairIdentity(target, draft, str(pair["vocabulary"])),
        Machine(**_typed(row["machine"], Machine)),
        _whole("context", row["context"], 1),
        _whole("max_nodes", row["max_nodes"], 2),
        _whole("max_depth", row["max_depth"], 1),
        tuple(_tree(one) for one in row["trees"]),
    )


def _typed(row: Mapping[str, Any], kind: type[ModelIdentity] | type[Machine]) -> dict[str, Any]:
    return {name: field(row[name]) for name, field in kind.__annotations__.items()}


def _tree(row: Mapping[str, Any]) -> TunedTree:
    seconds = row["seconds"]
    tree = TunedTree(
        SamplingParams(float(row["temperature"])).temperature,
        str(row["scheme"]),
        str(row["verifier"]),
        _shape(row["tree"]),
        _shape(row["default_tree"]),
        Acceptance(tuple(tuple(tuple(map(float, one)) for one in rows) for rows in row["acceptance"])),
        _whole("visits", row["visits"], 0),
        StepCosts(
            _curve(seconds["target"]),
            _curve(seconds["draft"]),
            float(seconds["start"]),
            float(seconds["overhead"]),
            float(seconds["plain_overhead"]),
        ),
        _curves(row["curves"], _shape(row["tree"])) if "curves" in row else None,
    )
    tree.predict(tree.shape)  # a tree with more children than there are rates for
    return tree


def _shape(counts: Sequence[Sequence[Any]]) -> TreeShape:
    return TreeShape(tuple(tuple(_whole("a number of children", count, 0) for count in level) for level in counts))


def _curves(slopes: Sequence[Any], shape: TreeShape) -> ValueCurves:
    found = ((tuple(_whole("a rank", rank, 0) for rank in path), tuple(map(float, parts))) for path, parts in slopes)
    return ValueCurves(tuple(found), shape)


def _curve(points: Sequence[Sequence[Any]]) -> Curve:
    return Curve(tuple((_whole("a count", count, 1), float(seconds)) for count, seconds in points))


def _whole(name: str, value: object, least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InvalidParameter(f"{name} must be an integer >= {least}, but is {value!r}.")
    return value


def _compact(text: str) -> str:
    """Put the innermost lists of indented JSON on one line each."""
    return re.sub(r"\[[^][{}]*\]", lambda found: " ".join(found[0].split()).replace("[ ", "[").replace(" ]", "]"), text)
