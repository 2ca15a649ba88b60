"""Targets that several processes can share, and commands that start these."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import polydraft
from polydraft.models import RANKS, load_tokenizer

COMMAND = [sys.executable, "-c", "from polydraft_command import main; main()"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def random_llama(folder: Path, heads: int, keys: int, **sizes: int) -> Path:
    """Write a random Llama with the tokens of the embedded pair, whose draft model then drafts for it."""
    tokenizer = load_tokenizer("pair")
    usual = {"vocab_size": 8192, "hidden_size": 16 * heads, "intermediate_size": 32 * heads, "num_hidden_layers": 2}
    ends: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0, "initializer_range": 0.1}
    config = LlamaConfig(**{**usual, **sizes}, num_attention_heads=heads, num_key_value_heads=keys, **ends)
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def ended(model: Any) -> None:
    """End the ranks of a target, and check that their processes came to their end by themselves."""
    ranks = vars(model)[RANKS]
    ranks.end()
    assert [one.process.returncode for one in ranks._helpers] == [0] * (ranks.count - 1)


def children(pid: int) -> list[int]:
    """Return the processes below one that hold a part of a target."""
    found, left = list[int](), [pid]
    while left:
        out = subprocess.run(
            ["ps", "-ww", "-o", "pid=", "-o", "args=", "--ppid", str(left.pop())], capture_output=True, text=True
        )
        pairs = [line.strip().split(maxsplit=1) for line in out.stdout.splitlines()]
        left += [int(number) for number, _ in pairs]
        found += [int(number) for number, said in pairs if "distributed.following" in said]
    return found


def gone(pid: int) -> bool:
    """Tell whether a process has ended; one that nobody has asked for its exit code has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def run(*command: str, seconds: float = 300, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    given = {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=given, check=False)


def pair_of(folder: Path | str, parallel: str | None = None) -> Any:
    """Load a target with the embedded draft model, in double precision."""
    return polydraft.load(str(folder), "pair-draft", dtype="float64", parallel=parallel)
