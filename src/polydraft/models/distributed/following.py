"""A process that rank 0 starts for another rank: it loads its part, and does what it is told."""

import json
import os
import shutil
import sys
import threading
from contextlib import suppress
from pathlib import Path

from polydraft.errors import PolydraftError
from polydraft.models.distributed.ranks import Ranks
from polydraft.models.distributed.splitting import TargetSplit


def main() -> None:
    """Be such a process. What it cannot do it says in a line of standard error, which rank 0 reads."""
    told = json.loads(sys.argv[1])
    folder, code = Path(told["folder"]), 1
    threading.Thread(target=_end_with_rank_0, args=(folder,), daemon=True).start()
    try:
        from polydraft.models.loading import load_part

        ranks = Ranks(int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"]), folder=folder)
        load_part(ranks, told["target"], told["dtype"], TargetSplit.named(told["parallel"]))
        code = 0
    except PolydraftError as error:
        sys.stderr.write(f"{error}\n")
    except Exception as error:  # noqa: BLE001  rank 0 tells of it, whatever it is
        sys.stderr.write(f"{type(error).__name__}: {' '.join(str(error).split())}\n")
    sys.stderr.flush()
    os._exit(code)


def _end_with_rank_0(folder: Path) -> None:
    """End this process when standard input does, which rank 0 holds open as long as it lives; leave no folder."""
    with suppress(OSError, ValueError):
        while sys.stdin.buffer.read(1):
            pass
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)
