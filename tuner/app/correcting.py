"""What the trials of a space that ran say of a new prediction for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tuner.app.estimate import Estimate
from tuner.app.target import Target, comparable
from tuner.core.gpu import Gpu
from tuner.core.records import Prediction, Source, TrialRecord
from tuner.searches.store import ResultsFolder

if TYPE_CHECKING:
    from tuner.cost.calibrate import Calibrations


@dataclass(frozen=True, slots=True)
class Corrector:
    """Corrects predictions for a space on a GPU type by the `trials` of it that ran there."""

    trials: int
    _space: str
    _calibrations: Calibrations

    @classmethod
    def of(cls, target: Target, folder: ResultsFolder) -> Corrector:
        """What results in `folder` teach of the target.

        Trials of other GPU types, devices and memory sizes say nothing, nor do predicted ones.
        Raises `InputError` for a journal that cannot be read.
        """
        from tuner.cost.calibrate import calibrations_from

        ran = _on_device(comparable(folder.read().records, target), target.gpu)
        return cls(len(ran), target.space.name, calibrations_from(ran))

    def corrected(self, prediction: Prediction) -> Prediction:
        """The prediction as trials correct it; itself where they say nothing of it."""
        found = self._calibrations.apply(prediction, self._space) if self.trials else prediction
        return found if found.corrections else prediction


def corrected(found: Estimate, results: Path) -> Estimate:
    """`found`, corrected by trials in `results` that ran for its space on its GPU type.

    Without any it stays what it is. Raises `InputError` for a journal that cannot be read.
    """
    folder = ResultsFolder(results, found.space.name, found.gpu.id)
    corrector = Corrector.of(Target(found.space, found.gpu, folder, ()), folder)
    prediction = corrector.corrected(found.prediction)
    if prediction is found.prediction:
        return found
    return dataclasses.replace(found, prediction=prediction, corrected_by=corrector.trials)


def correction_text(trials: int, factors: str = "") -> str:
    """By what predictions were corrected, with the `factors` in words if there are some."""
    plural = "s" if trials > 1 else ""
    by = f"{trials} trial{plural} of this space on this GPU"
    return f"corrected by {by}{factors and f': {factors}'} (--no-calibration: as predicted)"


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
