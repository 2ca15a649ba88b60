"""What a plan is for: two models, their vocabulary, and a machine, as values that tell others from them."""

import platform
from dataclasses import dataclass, fields
from pathlib import Path
from zlib import crc32

import torch
from torch import nn

from polydraft.models import Pair

PROCESSOR = Path("/proc/cpuinfo")


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
            mark = crc32(one.detach().flatten()[:256].double().cpu().numpy().tobytes(), mark)
        return cls(name, sum(one.numel() for one in weights), f"{mark:08x}")

    def same_as(self, other: "ModelIdentity") -> bool:
        """Tell whether this is the same model, under whatever name."""
        return (self.parameters, self.weights) == (other.parameters, other.weights)


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
            f"{role} {_model(theirs, ours)} there, {_model(ours, theirs)} here"
            for role, ours, theirs in (("target", self.target, there.target), ("draft model", self.draft, there.draft))
            if not ours.same_as(theirs)
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
        device = pair.target.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        dtype = str(pair.target.dtype).removeprefix("torch.")
        return cls(_processor(), name, torch.get_num_threads(), dtype, torch.__version__)

    def differences(self, there: "Machine") -> list[str]:
        """Say in words how a plan's machine, `there`, differs from this one."""
        pairs = ((field.name, getattr(there, field.name), getattr(self, field.name)) for field in fields(self))
        return [f"{name} {theirs} there, {ours} here" for name, theirs, ours in pairs if theirs != ours]


def _model(one: ModelIdentity, other: ModelIdentity) -> str:
    """Name a model by what tells it from the other: its size, or its weights."""
    return f"{one.name} ({_size(one)})" if one.parameters != other.parameters else f"{one.name} (weights {one.weights})"


def _size(model: ModelIdentity) -> str:
    return f"{model.parameters:,} parameters"


def _processor() -> str:
    try:
        lines = PROCESSOR.read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())
