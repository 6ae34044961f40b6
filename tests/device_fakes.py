"""GPUs that a driver would answer for, and trials that were measured, without any GPU."""

import dataclasses

from tuner.core import nvml
from tuner.core.nvml import DeviceIdentity
from tuner.core.records import Measurement, Outcome, Prediction, Status, TrialRecord
from tuner.core.units import GIB
from tuner.cost.speed.profile import DeviceProfile, MatmulRate, TrafficRate
from tuner.space.gpus import get_gpu

A6000 = DeviceIdentity("NVIDIA RTX A6000", get_gpu("a6000").memory_bytes, (8, 6), "580.1")
T4 = DeviceIdentity("Tesla T4", get_gpu("t4").memory_bytes, (7, 5), "580.1")
H200 = DeviceIdentity("NVIDIA H200", get_gpu("h200").memory_bytes, (9, 0), "580.1")
UNKNOWN = DeviceIdentity("NVIDIA GeForce RTX 9999", 32 * GIB, (12, 0), "580.1")


def pretend(monkeypatch, *devices: DeviceIdentity) -> None:
    """Let the driver know exactly these devices; none at all is a machine without a driver."""

    def device_identity(index: int = 0) -> DeviceIdentity | None:
        if not devices:
            return None
        if index >= len(devices):
            raise LookupError(f"the driver knows no CUDA device {index}")
        return devices[index]

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(nvml, "device_identity", device_identity)


def profile_of(device: str, *, gpu: str | None = None, memory_bytes: int = 32 * GIB):
    """A device profile with rates of which the best are easy to know."""
    return DeviceProfile(
        device=device,
        gpu=gpu,
        memory_bytes=memory_bytes,
        compute_capability=None,
        measured_at="2026-05-01T12:00:00+00:00",
        versions={"torch": "2.13.0"},
        launch_s=1e-6,
        kernel_s=1e-6,
        context_bytes=None,
        matmul=tuple(
            MatmulRate(dtype, size, size, size, rate, 0.01)
            for dtype, rate in (("fp32", 1e11), ("bf16", 2e11))
            for size in (64, 512)
        ),
        traffic=(TrafficRate("elementwise", 1 << 20, 1e10, 0.01),),
    )


def measured(record: TrialRecord, *, device: str, factor: float = 1.0, **changes) -> TrialRecord:
    """The record as a trial on `device` leaves it: measured numbers beside the predicted ones.

    Memory is `factor` times the predicted, the time of a step too.
    """
    prediction = record.outcome.prediction
    assert prediction is not None
    outcome = Outcome(
        Status.OK,
        prediction=prediction,
        measurement=measurement_of(prediction, device=device, factor=factor),
        duration_s=3.0,
    )
    return dataclasses.replace(record, outcome=outcome, device=device, **changes)


def measurement_of(prediction: Prediction, *, device: str, factor: float = 1.0) -> Measurement:
    memory, speed = prediction.memory, prediction.speed
    return Measurement(
        memory=dataclasses.replace(
            memory,
            device_bytes=round(memory.device_bytes * factor),
            peak_allocated_bytes=round(memory.peak_allocated_bytes * factor),
        ),
        speed=dataclasses.replace(
            speed,
            step_s=speed.step_s * factor,
            samples_per_s=speed.samples_per_s / factor,
            tokens_per_s=speed.tokens_per_s / factor,
        ),
        trainable_params=prediction.trainable_params,
        total_params=prediction.total_params,
        device=device,
        steps=5,
        loss_finite=True,
    )
