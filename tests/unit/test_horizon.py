"""The code of a training loop that a run did not reach."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from tuner.emulator.inside.horizon import Horizon

PROGRAM = """\
def evaluate(): allocate()
def allocate(n=1): return zeros(n)
def log(step): print(step)
def train():
    step = 0
    for epoch in range(30):
        for i in range(100):
            note()
            step += 1
            {code}
train()
"""

REACHED = (
    "if step % 500 == 499: log(step)",
    "if i % 10 == 0: evaluate()",
    "if step == -1: evaluate()",
    "if i == 200: evaluate()",
    "lr = 1e-3 if step < 500 else 1e-4",
)
LEFT = (
    "if step % 500 == 0: evaluate()",
    "if epoch > 25: evaluate()",
    "if i == 50: kept = zeros(9)",
    "allocate(8 if step < 500 else 64)",
)


class StoppedError(Exception):
    """Ends the program after its first steps."""


@pytest.mark.parametrize("code", [*REACHED, *LEFT])
def test_branches_on_a_counter_that_may_allocate_are_told(code: str, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(PROGRAM.format(code=code))
    horizon, found = Horizon(), []

    def note() -> None:
        horizon.note_step(sys._getframe(1))
        if horizon.steps_left == 3000 - 20:
            found.append(horizon.result(20, 1, (), None))
            raise StoppedError

    def run() -> Any:
        return runpy.run_path(str(path), {"note": note, "zeros": bytearray})

    with pytest.raises(StoppedError):
        run()
    (result,) = found
    assert result["of_steps"] == 3000
    assert [one.rpartition(":")[2] for one in result["unreached"]] == ["10"] * (code in LEFT)
