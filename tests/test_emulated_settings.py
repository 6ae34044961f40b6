"""Trainers take what is predicted of their settings: each emulated once, with a tiny model.

`python -m benchmarks.settings` does the same at full size, with more settings.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from benchmarks.settings.__main__ import predicted, run
from benchmarks.settings.cases import CASES
from tests.emulating import needs_emulator
from tuner.space.models.hollow import write_hollow

HERE = ("dpo_lora", "trainer_qlora", "launched_fsdp2_nf4")
"""Of trainers that are in the tests' own environment."""

OTHERS = {
    "axolotl_qlora": "axolotl",
    "lf_lora": "llamafactory-cli",
    "lf_qlora": "llamafactory-cli",
}
"""Of trainers with an environment of their own, and the command that has to be on PATH."""

ARRIVING = ("micro_batch", "grad_accum", "mixed_precision", "gradient_checkpointing",
            "use_reentrant", "optimizer", "lora_rank", "precision")  # fmt: skip


@pytest.fixture
def model(name: str, tmp_path: Path) -> Path:
    """A checkpoint in fp32, which not all trainers load as it is; in bf16 to be quantised."""
    dtype = "bfloat16" if "qlora" in name or "launched" in name else "float32"
    write_hollow("tiny-llama-3m", tmp_path / "tiny", dtype=dtype)
    return tmp_path / "tiny"


@needs_emulator
@pytest.mark.parametrize(
    "name", ["sft_qlora", *(pytest.param(n, marks=pytest.mark.proof) for n in [*HERE, *OTHERS])]
)
def test_a_trainer_takes_what_is_predicted_of_its_settings(
    name: str, model: Path, tmp_path: Path
) -> None:
    python = sys.executable
    if name in OTHERS:
        command = shutil.which(OTHERS[name])
        if command is None:
            pytest.skip(f"{OTHERS[name]} is not on PATH")
        python = str(Path(command).parent / "python")
    case = next(case for case in CASES if case.name == name)
    log = tmp_path / "log"
    emulated = run(case, model, python, log)
    assert emulated["ended"] == "steps", log.read_text()[-2000:]
    found = predicted(case, model)
    memory = found.prediction.memory
    assert memory.peak_allocated_bytes == pytest.approx(emulated["peak_allocated_bytes"], rel=0.03)
    assert found.prediction.trainable_params == emulated["trainable_params"]
    for knob in ARRIVING:
        if knob in emulated["settings"]:
            assert found.settings[knob] == emulated["settings"][knob], knob
