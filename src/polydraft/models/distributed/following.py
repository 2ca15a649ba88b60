"""A process that rank 0 starts for another rank: it loads its part, and does what it is told."""

import json
import os
import sys
from pathlib import Path

from polydraft.errors import PolydraftError
from polydraft.models.distributed.ranks import Ranks, watch_input
from polydraft.models.distributed.splitting import TargetSplit


def main() -> None:
    """Be such a process. What it cannot do it says in a line of standard error, which rank 0 reads."""
    watch_input()
    told = json.loads(sys.argv[1])
    code = 1
    try:
        from polydraft.models.loading import load_part

        ranks = Ranks(int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"]), folder=Path(told["folder"]))
        load_part(ranks, told["target"], told["dtype"], TargetSplit.named(told["parallel"]))
        code = 0
    except PolydraftError as error:
        sys.stderr.write(f"{error}\n")
    except Exception as error:  # noqa: BLE001  rank 0 tells of it, whatever it is
        sys.stderr.write(f"{type(error).__name__}: {' '.join(str(error).split())}\n")
    sys.stderr.flush()
    os._exit(code)
