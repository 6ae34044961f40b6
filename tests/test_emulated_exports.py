"""Exports run in the tools that they are for, with the memory that was predicted."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.emulated import ALIKE
from benchmarks.exports import CASES, Case, run
from tests.emulating import needs_emulator
from tuner.space.models.hollow import write_hollow

IN_ONE_ENVIRONMENT = [
    next(case for case in reversed(CASES) if case.tool == tool)
    for tool in ("trainer", "trl", "accelerate")
]
"""Of each tool the last case: quantised and with reentrant checkpoints, where it has such ones."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_hollow("tiny-llama-3m", folder)
    return folder


@needs_emulator
@pytest.mark.proof
@pytest.mark.parametrize("case", IN_ONE_ENVIRONMENT, ids=lambda case: case.name)
def test_an_export_takes_what_was_predicted(case: Case, model: Path) -> None:
    predicted_bytes, found, tail = run(case, model)
    assert found.steps > 0, tail
    assert found.limiting is not None
    allocated_bytes = found.limiting.peak_allocated_bytes
    assert predicted_bytes == pytest.approx(allocated_bytes, rel=ALIKE)
    assert found.settings.get("micro_batch", 2) == case.settings["micro_batch"]
    told = case.settings["gradient_checkpointing"]
    assert found.settings["gradient_checkpointing"] is told
    if told:
        assert found.settings["use_reentrant"] is bool(case.settings.get("use_reentrant"))
