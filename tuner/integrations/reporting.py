"""Reports training steps: to the trial that runs them, else for a comparison with a prediction."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Concatenate, ParamSpec, TypeVar

from tuner.emulator.here import is_emulated
from tuner.integrations.watching import RunWatch, say
from tuner.trial.base import MeasureOptions
from tuner.trial.command_progress import TAG
from tuner.trial.stop_rule import StepTimer

_TRIAL = "TUNER_TRIAL"
_STDOUT = 1

T = TypeVar("T")
P = ParamSpec("P")


def harmless(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T | None]:
    """A method of a reporter or of a callback, whose failure is said and ends the reports.

    It then returns None.
    """

    def safe(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T | None:
        reporter = self if isinstance(self, Reporter) else self._reporter
        if reporter.has_failed:
            return None
        try:
            return method(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - the training goes on, whatever failed here
            reporter.has_failed = True
            with contextlib.suppress(Exception):
                reporter.watch.stop()
            say(f"warning: no more of this training is reported: {error!r}")
            return None

    return functools.update_wrapper(safe, method)


def in_trial() -> bool:
    """True in a process that a trial started."""
    return _TRIAL in os.environ


def report_step(samples: float, *, tokens: float = 0, loss: float | None = None) -> bool:
    """Report an optimizer step to the trial; returns True after the last step that it needs.

    `samples` and `tokens` are those of the step, over all processes. Only the first process (RANK)
    reports. Outside a trial it does nothing and returns False.
    """
    if not in_trial() or not _is_first():
        return False
    return _process_reporter().step(samples, tokens=tokens, loss=loss)


def _is_first() -> bool:
    return os.environ.get("RANK", "0") == "0"


@functools.cache
def _process_reporter() -> Reporter:
    return Reporter()


class Reporter:
    """Reports steps to the trial, and knows when there were enough, by the trial's own rule.

    Outside of a trial, steps are timed and compared with `prediction` after some of them: a file
    of `tuner check --json`, or the result of `tuner.check` or `tuner.estimate`. What is off is said
    once on standard error. A loop of one's own, with or without Accelerate, takes its batches from
    `batches(loader)` and calls `step(samples=8)` after each optimizer step.
    """

    def __init__(self, prediction: Any = None) -> None:
        self.watch = RunWatch(prediction)
        self.has_failed = False
        self._options: MeasureOptions | None = None
        self._timer = StepTimer(0)
        self._steps = 0
        self._open()

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, as in the processes of a trainer that spawns them, begins anew."""
        return Reporter, (self.watch.given,)

    @harmless
    def _open(self) -> None:
        text = os.environ.get(_TRIAL)
        # An emulated device measures nothing, and an outer trial listens itself.
        if text is not None or is_emulated() or not _is_first():
            self.watch.stop()
        if text is not None:
            self._options = MeasureOptions(**json.loads(text))
            self._timer = StepTimer(self._options.warmup_steps)

    @property
    def is_active(self) -> bool:
        """True inside a trial."""
        return self._options is not None

    @harmless
    def parameters(self, model: Any) -> None:
        """Tell how many parameters a torch module has, and how many are trained."""
        if self.is_active and model is not None:
            counts = [(p.numel(), p.requires_grad) for p in model.parameters()]
            trainable = sum(number for number, is_trained in counts if is_trained)
            _say({"trainable_params": trainable, "total_params": sum(n for n, _ in counts)})

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """The batches of `loader`, whose waiting counts as that of the training for its data."""
        self.watch.begin()
        batches = iter(loader)
        while True:
            asked = time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return
            self.watch.waited(time.perf_counter() - asked)
            yield batch

    def step(self, samples: float, *, tokens: float = 0, loss: float | None = None) -> bool:
        """See `report_step`."""
        return self._step(samples, tokens, loss) or False

    @harmless
    def _step(self, samples: float, tokens: float, loss: float | None) -> bool:
        if self._options is None:
            self.watch.begin()
            self.watch.ended()
            return False
        peaks = _device_peaks()  # waits for the device: the step has ended then
        line = {"samples": samples, "tokens": tokens, "time_s": time.monotonic(), **peaks}
        if loss is not None:
            # JSON has no word for a number that is not finite; Python reads and writes NaN.
            line["loss"] = float(loss)
        _say(line)
        self._steps += 1
        self._timer.report(self._steps, line["time_s"])
        is_finite = loss is None or math.isfinite(loss)
        return not is_finite or self._timer.reason_to_stop(self._options) is not None


def callback_class(module: str, events: type, base: type) -> type:
    """A library's callback: `events` on its own `base` class."""
    safe = {name: harmless(event) for name, event in vars(events).items() if name[:3] == "on_"}
    about = {"__doc__": events.__doc__, "__module__": module}
    return type("TunerCallback", (events, base), {**safe, **about})


def _say(values: dict[str, Any]) -> None:
    """One write: lines of several processes do not mix (pipe(7), PIPE_BUF)."""
    with contextlib.suppress(Exception):  # the training's own output may have ended
        sys.stdout.flush()
    os.write(_STDOUT, f"{TAG} {json.dumps(values)}\n".encode())


def _device_peaks() -> dict[str, int]:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return {}
    torch.cuda.synchronize()
    return {
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
    }
