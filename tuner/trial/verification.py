"""The parts of a verification besides its steps: evaluate, and save a checkpoint."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, MutableMapping
from typing import IO, Any, cast

import torch

from tuner.core.records import Phase
from tuner.predict.training.base import TrainingSession
from tuner.trial.device import RealEnvironment, parse_device

EVALUATION_BATCHES = 2
"""Two batches, because the second starts with the cache left by the first."""


class RecordedCall:
    """Records a session's call of its model, so that an evaluation can repeat it.

    A session offers training steps only; the evaluation uses inputs of the same form.
    """

    def __init__(self, session: TrainingSession, environment: RealEnvironment) -> None:
        self._model = session.model
        self._device_type = parse_device(environment.device).type
        self._given: tuple[tuple[Any, ...], Mapping[str, Any]] | None = None
        self._autocast_dtype: torch.dtype | None = None
        self._hook = self._model.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._given = (args, kwargs)
        if torch.is_autocast_enabled(self._device_type):
            self._autocast_dtype = torch.get_autocast_dtype(self._device_type)
        self._hook.remove()

    def evaluate(self) -> bool:
        """Run forward passes in evaluation mode, without gradients; False if no call was recorded.

        The user's own session may train without calling its model as a whole.

        The model's outputs, the logits and the loss, are kept until the loss has been read, as in
        the `prediction_step` of transformers' Trainer. Trainer keeps the logits of all batches
        only if a metric is computed from them; that is not done here.
        """
        if self._given is None:
            return False
        args, kwargs = self._given
        was_training = self._model.training
        self._model.eval()
        with torch.no_grad(), self._precision():
            for _ in range(EVALUATION_BATCHES):
                outputs = self._model(*args, **kwargs)
                if self._autocast_dtype is not None:
                    _convert_logits(outputs)
                _read_loss(outputs)
        del outputs
        self._model.train(was_training)
        return True

    @contextlib.contextmanager
    def _precision(self) -> Iterator[None]:
        if self._autocast_dtype is None:
            yield
            return
        with torch.autocast(self._device_type, dtype=self._autocast_dtype):
            yield


def _convert_logits(outputs: Any) -> None:
    """A second copy in fp32, as accelerate makes of outputs (`convert_outputs_to_fp32`)."""
    if isinstance(outputs, MutableMapping) and outputs.get("logits") is not None:
        outputs["logits"] = outputs["logits"].float()


def _read_loss(outputs: Any) -> None:
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    if isinstance(loss, torch.Tensor):
        loss.detach().mean().item()


class _Sink:
    """A file that discards its data: a verification of a GPU must not depend on a disk."""

    def __init__(self) -> None:
        self.bytes = 0

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        self.bytes += size
        return size

    def flush(self) -> None:
        """Nothing waits to be written."""


def save_checkpoint(session: TrainingSession) -> int:
    """Serialise the trained weights and the optimizer's state, and return their size in bytes.

    As in a checkpoint of Trainer: only adapters if nothing else is trained. As in `torch.save`,
    the parts are copied to the host one by one.
    """
    sink = _Sink()
    trained = {n: p for n, p in session.model.named_parameters() if p.requires_grad}
    torch.save(
        {"model": trained, "optimizer": session.optimizer.state_dict()}, cast("IO[bytes]", sink)
    )
    return sink.bytes


def evaluate_and_save(
    session: TrainingSession, call: RecordedCall, environment: RealEnvironment
) -> tuple[int | None, int]:
    """Evaluate, save, and take one more step; returns the peak allocated bytes and those saved.

    The step shows that training can go on with the cache that evaluating and saving leave behind.
    The peak is part of the trial's own.
    """
    allocated, reserved = environment.meter.peaks()
    highest = max(environment.phase_peak_bytes, key=environment.phase_peak_bytes.__getitem__)
    environment.phase_peak_bytes[highest] = max(environment.peak_allocated_bytes, allocated)
    environment.peak_reserved_bytes = max(environment.peak_reserved_bytes, reserved)
    environment.meter.reset()
    environment.phase = Phase.EVALUATION
    evaluated = call.evaluate()
    checkpoint_bytes = save_checkpoint(session)
    environment.synchronize()
    allocated, _ = environment.meter.peaks()
    session.optimizer_step(1)
    environment.synchronize()
    return allocated if evaluated else None, checkpoint_bytes
