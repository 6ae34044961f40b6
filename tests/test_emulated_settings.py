"""Trainers do what `tuner.program.trainers` says of them: their programs, emulated and predicted.

`python -m benchmarks.settings` does the same at full size, and with Axolotl and LLaMA-Factory.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

from benchmarks.programs.models import make
from benchmarks.settings.__main__ import prepared
from benchmarks.settings.cases import CASES
from tests.emulating import needs_emulator
from tuner.engine.emulating import EmulateOptions, emulate
from tuner.engine.program_predictions import ProgramPredictions
from tuner.gpus import get_gpu
from tuner.program.program import read_program

ARRIVING = (
    "micro_batch",
    "mixed_precision",
    "gradient_checkpointing",
    "use_reentrant",
    "optimizer",
)


@needs_emulator
@pytest.mark.parametrize("name", ["sft_lora", "dpo_lora", "trainer_full"])
def test_a_trainer_does_what_is_predicted_of_it(name: str, tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == name)
    model = make("llama", tmp_path / "models", tiny=True)
    folder = tmp_path / "run"
    folder.mkdir()
    prepared(dataclasses.replace(case, model="tiny"), model, folder)
    with (folder / "log").open("w") as log:
        found = emulate(
            [sys.executable, *case.words],
            get_gpu(case.gpu),
            EmulateOptions(steps=2),
            output=log,
            cwd=folder,
        )
    assert found.ended == "steps", (folder / "log").read_text()[-2000:]
    use = found.limiting
    assert use is not None
    program = read_program(case.words, folder, is_run=False)
    predicted = ProgramPredictions(program, get_gpu(case.gpu)).as_it_is()

    memory = predicted.prediction.memory
    assert memory.peak_allocated_bytes == pytest.approx(use.peak_allocated_bytes, rel=0.03)
    assert predicted.prediction.trainable_params == use.trainable_params
    for knob in ARRIVING:
        assert predicted.settings[knob] == found.settings[knob], knob
