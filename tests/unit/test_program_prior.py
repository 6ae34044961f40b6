"""What all configurations of a program take, from a few runs: the sums are found exactly."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import pytest

from tuner.app.program_prior import program_predictions
from tuner.core.errors import InputError, TunerError, UnavailableError
from tuner.core.records import KnobValue
from tuner.emulator.emulation import FEW, EmulatedDeviceUse, Emulation
from tuner.emulator.session import DevicePeak
from tuner.emulator.step_time import EmulatedStepTime
from tuner.space.gpus import get_gpu
from tuner.space.load import read_space

SPACE = read_space(
    """
name: mine
program: train.py
knobs:
  micro_batch: [1, 2, 4, 8, 16]
  gradient_checkpointing: [true, false]
  lora_rank: [8, 16, 64]
fixed: {effective_batch: 16}
derived: {grad_accum: effective_batch // micro_batch}
""",
    "mine.yaml",
)
GPU = get_gpu("rtx4090")
GIB = 1 << 30
MIB = 1 << 20


def _device_bytes(values: Mapping[str, KnobValue]) -> int:
    slope = 200 * MIB if values["gradient_checkpointing"] else 3 * GIB
    return 5 * GIB + slope * int(values["micro_batch"]) + 2 * MIB * int(values["lora_rank"])


def _micro_s(values: Mapping[str, KnobValue]) -> float:
    slope = 0.4 if values["gradient_checkpointing"] else 0.3
    return 0.1 + slope * int(values["micro_batch"])


class Runs:
    """In place of `ProgramRuns`: the same answers, from formulas."""

    gpu = GPU
    margin_fraction = None
    log_tail = "Killed"

    def __init__(self, *, error: TunerError | None = None) -> None:
        self.asked: list[Mapping[str, KnobValue]] = []
        self._error = error

    def with_values(
        self, wanted: Sequence[Mapping[str, KnobValue]], *, on_larger_gpu: bool
    ) -> list[Emulation | TunerError]:
        assert on_larger_gpu
        self.asked += wanted
        return [self._error or self._found(values) for values in wanted]

    def _found(self, values: Mapping[str, KnobValue]) -> Emulation:
        device_bytes = _device_bytes(values)
        use = EmulatedDeviceUse(
            rank=0, device=0, peak_allocated_bytes=device_bytes - GIB,
            peak_reserved_bytes=device_bytes - GIB // 2, device_bytes=device_bytes, managed_bytes=0,
            loaded_bytes=4 * GIB, phase_peak_bytes={}, peak_phase="backward", breakdown={},
            allocations=(), alloc_retries=0, ooms=0, trainable_params=1000,
        )  # fmt: skip
        step_s = _micro_s(values) * int(values["grad_accum"]) + 0.05
        time = EmulatedStepTime(
            step=1, step_s=step_s, interval_s=(step_s, step_s), breakdown_s={},
            phases_s={"forward": step_s - 0.05, "optimizer": 0.05}, most_expensive=(),
            model_flops=0.0, mfu=None, unpriced={}, unpriced_share=0.0, estimated_share=0.0,
            notes=(),
        )  # fmt: skip
        return Emulation(
            stands_for=1,
            command=("train.py",), gpu=GPU, gpus=1, torch="2.13.0", cuda="13.0", ended="steps",
            steps=3, margin_bytes=0, exit_status=0, devices=(use,), error=None, refusals=(),
            peaks=(DevicePeak(0, device_bytes, ()),),
            unknown_calls={}, unknown_values=(), duration_s=1.0, time=time, settings={}, inputs=(),
        )  # fmt: skip


def test_few_runs_predict_what_is_a_sum_of_its_settings() -> None:
    runs = Runs()
    configurations = list(SPACE.configurations())
    found = program_predictions(SPACE, configurations, runs)  # type: ignore[arg-type]

    assert len(configurations) == 30
    assert len(runs.asked) == 5
    assert all(int(values["grad_accum"]) <= FEW for values in runs.asked)
    for configuration, prediction in zip(configurations, found, strict=True):
        memory = prediction.memory
        expected = _device_bytes(configuration)
        assert memory.device_bytes == pytest.approx(expected, rel=1e-6)
        assert memory.peak_allocated_bytes == pytest.approx(expected - GIB, rel=1e-6)
        rounds = int(configuration["grad_accum"])
        step_s = _micro_s(configuration) * rounds + 0.05
        assert prediction.speed.step_s == pytest.approx(step_s, rel=1e-6)
        assert prediction.speed.samples_per_s == pytest.approx(16 / step_s, rel=1e-6)
        assert prediction.fits == (expected + prediction.budget.margin_bytes <= GPU.memory_bytes)
        assert str(prediction.source) == "predicted"
        assert "5 emulated runs" in prediction.method


def test_what_never_trains_is_an_answer_with_its_last_lines() -> None:
    with pytest.raises(UnavailableError, match="no run of the program") as caught:
        program_predictions(SPACE, list(SPACE.configurations()), Runs(error=InputError("no")))  # type: ignore[arg-type]
    assert "Killed" in str(caught.value.hint)


def test_a_machine_that_cannot_emulate_says_why() -> None:
    runs = Runs(error=UnavailableError("no PyTorch"))
    with pytest.raises(UnavailableError, match="no PyTorch"):
        program_predictions(SPACE, list(SPACE.configurations()), runs)  # type: ignore[arg-type]


def test_a_number_that_never_varies_costs_no_run() -> None:
    fixed = dataclasses.replace(
        SPACE, knobs={name: knob for name, knob in SPACE.knobs.items() if name != "lora_rank"},
        fixed={**SPACE.fixed, "lora_rank": 8},
    )  # fmt: skip
    runs = Runs()
    program_predictions(fixed, list(fixed.configurations()), runs)  # type: ignore[arg-type]
    assert len(runs.asked) == 4
