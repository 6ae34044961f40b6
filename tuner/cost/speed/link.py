"""How fast two processes of this machine exchange gradients: gloo's all-reduce, measured.

Run as `python -m tuner.cost.speed.link RANK DESCRIPTOR`, with a file that both have open.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from statistics import median

from tuner.core.errors import UnavailableError
from tuner.core.units import MIB

SIZE_BYTES = 8 * MIB
"""Between the first bucket of DDP, of 1 MiB, and the others, of 25."""
REPEATS = 12
WITHIN_S = 120.0
"""Two imports of torch on a busy machine take tens of seconds."""
_RANKS = 2


def measure_link() -> float:
    """Bytes a second through the link of one of two ranks, by a ring's count of what passes.

    Raises `UnavailableError` where the two do not come to a result.
    """
    store = os.memfd_create("tuner-link")
    # Gloo listens on the loopback interface only.
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    started = [
        subprocess.Popen(  # noqa: S603 - this program itself
            [sys.executable, "-m", __name__, str(rank), str(store)],
            pass_fds=[store],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        for rank in range(_RANKS)
    ]
    try:
        said = [process.communicate(timeout=WITHIN_S) for process in started]
    except subprocess.TimeoutExpired:
        raise UnavailableError(f"two processes had not measured after {WITHIN_S:g} s") from None
    finally:
        for process in started:
            process.kill()
            process.wait()
        os.close(store)
    if any(process.returncode for process in started):
        text = said[0][1].decode(errors="replace").strip().splitlines()
        raise UnavailableError(f"gloo does not work here: {text[-1][:160] if text else 'no text'}")
    return float(said[0][0])


def main(rank: int, store: str) -> None:
    """Be one of the ranks; the first one writes the rate to its output."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, _RANKS),  # type: ignore[attr-defined]
        rank=rank,
        world_size=_RANKS,
    )
    values = torch.ones(SIZE_BYTES // 4)
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        dist.all_reduce(values)
        times.append(time.perf_counter() - started)
        values.fill_(1.0)
    dist.destroy_process_group()
    if rank == 0:
        moved = 2 * (_RANKS - 1) / _RANKS * SIZE_BYTES
        print(moved / median(times[REPEATS // 4 :]))


if __name__ == "__main__":
    main(int(sys.argv[1]), f"/proc/self/fd/{sys.argv[2]}")
