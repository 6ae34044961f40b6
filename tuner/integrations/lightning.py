"""`TunerCallback` for Lightning: `Trainer(..., callbacks=[TunerCallback()])`.

Works with the packages lightning and pytorch_lightning; which one is imported, or else
installed, is looked at when the class is asked for.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from tuner.integrations.reporting import Reporter, callback_class

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
"""Their classes are not each other's, and a trainer takes only its own."""


def __getattr__(name: str) -> Any:
    """The class, made of the installed library's own base class when it is first asked for."""
    if name == "TunerCallback":
        return _callback_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.cache
def _callback_class() -> type:
    return callback_class(__name__, _StepReports, _base_class())


def _base_class() -> type:
    for name in sorted(_PACKAGES, key=lambda name: name not in sys.modules):
        try:
            found: type = importlib.import_module(name).Callback
        except ImportError:
            continue
        return found
    return object  # nothing will call it, and code that imports it still runs


class _StepReports:
    """Reports each optimizer step to the trial, and stops training after enough of them.

    Outside of a trial it compares the training after 10 steps with `prediction`, a file of
    `tuner check --json` or the result of `tuner.check` or `tuner.estimate`, and says once what is
    off and why. `batch_size` overrides that of the first tensor of a batch.
    """

    def __init__(self, batch_size: int | None = None, *, prediction: Any = None) -> None:
        super().__init__()
        self._batch_size = batch_size
        self._reporter = Reporter(prediction)
        self._samples = 0
        self._steps_seen = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Tell the numbers of parameters, and begin to watch."""
        self._steps_seen = trainer.global_step
        if not trainer.is_global_zero:
            self._reporter.watch.stop()
            return
        self._reporter.parameters(pl_module)
        self._reporter.watch.begin()

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """A batch has come."""
        self._reporter.watch.began()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """A batch has ended, and with the last one of an accumulation an optimizer step."""
        if not self._reporter.is_active:
            self._reporter.watch.ended(is_step=trainer.global_step != self._steps_seen)
            self._steps_seen = trainer.global_step
            return
        if not trainer.is_global_zero:
            return
        self._samples += (self._batch_size or _first_size(batch) or 0) * trainer.world_size
        if trainer.global_step == self._steps_seen:
            return
        samples, self._samples, self._steps_seen = self._samples, 0, trainer.global_step
        if self._reporter.step(samples):
            trainer.should_stop = True

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Validation took the time since the last event."""
        self._reporter.watch.idle()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Compare what ran, if the training was short."""
        self._reporter.watch.end()


def _first_size(batch: Any) -> int | None:
    shape = getattr(batch, "shape", None)
    if shape is not None:
        return int(shape[0]) if len(shape) else None
    values = batch.values() if isinstance(batch, Mapping) else batch
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        return None
    return next((size for size in map(_first_size, values) if size is not None), None)
