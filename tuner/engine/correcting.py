"""What the trials of a space that ran say of a new prediction for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from tuner.engine.estimate import Estimate
from tuner.engine.target import Target, comparable
from tuner.gpu import Gpu
from tuner.records import Source, TrialRecord
from tuner.results.store import ResultsFolder


def corrected(found: Estimate, results: Path) -> Estimate:
    """`found`, corrected by trials in `results` that ran for its space on its GPU type.

    Trials of other GPU types, devices and memory sizes say nothing of it, nor do predicted ones;
    without any others `found` stays what it is. Raises `InputError` for a journal that cannot be
    read.
    """
    from tuner.estimators.calibration.calibrate import calibrations_from

    folder = ResultsFolder(results, found.space.name, found.gpu.id)
    target = Target(found.space, found.gpu, folder, ())
    ran = _on_device(comparable(folder.read().records, target), found.gpu)
    if not ran:
        return found
    prediction = calibrations_from(ran).apply(found.prediction, found.space.name)
    if not prediction.corrections:
        return found
    return dataclasses.replace(found, prediction=prediction, corrected_by=len(ran))


def _on_device(records: Sequence[TrialRecord], gpu: Gpu) -> list[TrialRecord]:
    """The trials that ran on such a device itself, or on an emulated one."""
    names = {gpu.name, *gpu.device_names}
    return [
        record
        for record in records
        if record.source is not Source.PREDICTED
        and record.memory_limit_bytes is None
        and (record.emulated_device is not None or record.device in names)
    ]
