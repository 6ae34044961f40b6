"""The page beside FakeGPU and torch-preflight: docs/notebook/emulated_rivals.md."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from benchmarks.accuracy.rows import Row
from benchmarks.emulated_runs.page import page
from benchmarks.emulated_runs.running import Outcome

_START = """# Runs of FakeGPU and torch-preflight

Written by `python -m benchmarks.emulated_runs --rivals --environments FOLDER --markdown
docs/notebook/emulated_rivals.md`. FakeGPU (MIT) and torch-preflight (MIT) published what their own
programs take on real GPUs. Here **the same programs, not changed in a line and taken from their
repositories at the commit of the row, ran on the emulated GPU**, with checkpoints without weights,
in the row's releases of PyTorch and transformers where nothing else is said. Of several ranks,
rank 0 stands for all. Values are in GiB; *exact* means equal in all digits that the source has.
"""

_FOUND = """## What the rows show

- **The emulator needed no change** for these stacks: torch 2.8 for CUDA 12.8, and 2.11 for 13.0.
- **torch-preflight's rows** are 0.3 to 0.8 MiB off in what is allocated, and one of four is 20 MiB,
  one segment, off in what is reserved. Its authors' second run on another T4 differed from the
  first by up to 0.51 %. CUDA is 13.0 in place of 12.8; the blocks that differ were not found.
- **FakeGPU** resets the statistics before each phase and reports the largest peak; its ranks share
  one GPU. Its NF4 is its own, in plain PyTorch: bitsandbytes takes other amounts.
- Of torch-preflight's script, the parts after its last row were left out: a sweep of vocabularies
  and its guard. Quantization, which FakeGPU's program does on the host, may run in pieces of 512
  blocks, which the device doesn't see.
- The runs of 2026-11-26 were started by `tuner emulate` with the commands that this script makes,
  those of the 72 GB card on the 48 GB card of the catalogue, which has the same chip.
"""


def rivals_page(outcomes: Sequence[Outcome], rows: Mapping[int, Row]) -> str:
    """The page in Markdown."""
    return page(outcomes, rows, start=_START + _theirs(outcomes, rows), found=_FOUND)


def _theirs(outcomes: Sequence[Outcome], rows: Mapping[int, Row]) -> str:
    """How far off their own estimates of these rows are, as they published it."""
    lines = []
    for name in ("FakeGPU", "torch-preflight"):
        ran = [rows[one.row] for one in outcomes if rows[one.row].framework.startswith(name)]
        off = [value for row in ran if (value := row.note("own_estimate_off_percent")) is not None]
        if off:
            median, worst = statistics.median(off), max(off)
            lines.append(f"- {name}: {len(off)} rows, median {median:.2f} %, worst {worst:.2f} %.")
    return "\nTheir own estimates of the rows below, as they published them:\n\n" + "\n".join(
        [*lines, ""]
    )
