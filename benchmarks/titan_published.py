"""torchtitan itself on emulated H100s, beside the memory and the speed that it was published with.

    git clone https://github.com/pytorch/torchtitan && git -C torchtitan checkout 2fa6d8367
    pip install torchdata datasets tiktoken blobfile tomli tensorboard
    python -m benchmarks.titan_published torchtitan

Llama 3.1 8B on 8 H100, 1 x 4,096 tokens each, bf16 without compiling. torchtitan's log prints the
peak of what PyTorch's allocator has reserved, in GiB, which the published table calls GB. The
package torchtitan must not be installed: it would be imported in place of the clone.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tuner.core.units import GIB
from tuner.emulator import Machine
from tuner.emulator.emulation import Emulation
from tuner.space.gpus import get_gpu

PROGRAM = Path(__file__).parent / "zoo" / "programs" / "titan_8b.py"
RANKS, TOKENS = 8, 4096
LAUNCHER = (
    str(Path(sys.executable).with_name("torchrun")),
    "--standalone",
    "--nproc-per-node",
    str(RANKS),
)
ASKED_OF_MEMORY, ASKED_OF_SPEED = 0.05, 0.25
"""Shares by which a run may miss."""


@dataclass(frozen=True, slots=True)
class Published:
    """A row of pytorch/ao, torchao/prototype/float8nocompile/README.md: "bfloat16, eager".

    Its memory is in GiB, its speed in tokens a second and GPU.
    """

    name: str
    recomputed: str
    memory_gib: float
    tokens_per_s: float


ROWS = (
    Published("nothing", "none", 53.12, 5339.0),
    Published("every second layer", "2", 40.6, 4882.4),
    Published("every layer", "full", 28.07, 4502.0),
)
HEAD = (
    "| recomputed | allocated | reserved | published | | tokens/s a GPU | published | |",
    "|---|---:|---:|---:|---:|---:|---:|---:|",
)


def run(checkout: Path) -> Iterator[tuple[Published, Emulation]]:
    """Each row, with what the emulator says of it."""
    for row in ROWS:
        command = [*LAUNCHER, str(PROGRAM), str(checkout), row.recomputed]
        with tempfile.TemporaryFile("w+") as output:
            yield row, Machine(get_gpu("h100_sxm"), RANKS).run(command, output=output)


def compare(row: Published, found: Emulation) -> tuple[str, bool]:
    """A line of the table, and whether memory and speed are as near as was asked."""
    if found.error is not None or not found.devices or found.time is None:
        why = found.error.message if found.error else found.ended
        return f"| {row.name} | failed: {why} | | | | | | |", False
    (device,) = found.devices
    reserved_gib, tokens_per_s = device.peak_reserved_bytes / GIB, TOKENS / found.time.step_s
    memory, speed = reserved_gib / row.memory_gib - 1, tokens_per_s / row.tokens_per_s - 1
    line = (
        f"| {row.name} | {device.peak_allocated_bytes / GIB:.2f} GiB | {reserved_gib:.2f} GiB "
        f"| {row.memory_gib:.2f} | {memory:+.1%} "
        f"| {tokens_per_s:,.0f} | {row.tokens_per_s:,.0f} | {speed:+.1%} |"
    )
    return line, abs(memory) <= ASKED_OF_MEMORY and abs(speed) <= ASKED_OF_SPEED


def main() -> int:
    """Print each row as it is there. 1 where one misses."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkout", type=Path, help="a clone of torchtitan at 2fa6d8367")
    print(*HEAD, sep="\n")
    holds = []
    for row, found in run(parser.parse_args().checkout):
        line, near = compare(row, found)
        holds.append(near)
        print(line, flush=True)
    return int(not all(holds))


if __name__ == "__main__":
    raise SystemExit(main())
