"""`TunerCallback` for transformers' Trainer, and so for TRL's trainers.

`Trainer(..., callbacks=[TunerCallback()])`. transformers is imported when the class is asked for.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

from tuner.integrations.reporting import Reporter, callback_class


def __getattr__(name: str) -> Any:
    """The class, made of the installed library's own base class when it is first asked for."""
    if name == "TunerCallback":
        return _callback_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.cache
def _callback_class() -> type:
    base: type = object  # without the library nothing calls it, and code that imports it runs
    with contextlib.suppress(ImportError):
        from transformers import TrainerCallback

        base = TrainerCallback
    return callback_class(__name__, _StepReports, base)


class _StepReports:
    """The events that transformers calls.

    Samples are micro-batch x accumulation x processes; tokens need `include_num_input_tokens_seen`.
    """

    def __init__(self) -> None:
        self._reporter = Reporter()
        self._tokens_seen = 0

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **more: Any
    ) -> None:
        """Tell the numbers of parameters."""
        if state.is_world_process_zero:
            self._reporter.parameters(model)

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> Any:
        """An optimizer step has ended."""
        if not self._reporter.is_active:
            return control
        # A trial is short: whatever it saved or evaluated would be for nothing.
        control.should_save = control.should_evaluate = False
        if state.is_world_process_zero:
            samples = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
            seen = int(state.num_input_tokens_seen)
            tokens, self._tokens_seen = seen - self._tokens_seen, seen
            if self._reporter.step(samples, tokens=tokens):
                control.should_training_stop = True
        return control
