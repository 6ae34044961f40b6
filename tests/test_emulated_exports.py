"""Exports run in the tools that they are for, with the memory that was predicted."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.emulated import ALIKE
from benchmarks.exports import CASES, Case, run
from tests.emulating import needs_emulator
from tuner.space.models.hollow import write_hollow

IN_ONE_ENVIRONMENT = [case for case in CASES if case.tool in ("trainer", "trl", "accelerate")]
QUICK = ("trl nf4",)
"""Of those that take as long as a program takes to start, the ones that always run."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_hollow("tiny-llama-3m", folder)
    return folder


@needs_emulator
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=[] if case.name in QUICK else [pytest.mark.slow])
        for case in IN_ONE_ENVIRONMENT
    ],
)
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
