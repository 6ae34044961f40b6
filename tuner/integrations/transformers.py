"""`TunerCallback` for transformers' Trainer, and so for TRL's trainers.

`Trainer(..., callbacks=[TunerCallback()])`. transformers is imported when the class is asked for.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from typing import Any

from tuner.core.errors import UnavailableError
from tuner.core.setup.schemas import SCHEMAS
from tuner.emulator.inside.arrived import settings_of_arguments, settings_of_model
from tuner.integrations.expected import Asked
from tuner.integrations.reporting import Reporter, callback_class
from tuner.integrations.watching import RunFacts
from tuner.program.arguments import DTYPES
from tuner.program.trainers.trl import is_before
from tuner.space.gpus import match_device


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
    """Reports each optimizer step to the trial, and stops training after enough of them.

    Outside of a trial it compares the training after 10 steps with its prediction, and says once
    what is off and why. `prediction` is a file of `tuner check --json`, or the result of
    `tuner.check` or `tuner.estimate`; by default the run's own objects are predicted in another
    process.

    Samples are micro-batch x accumulation x processes; tokens need `include_num_input_tokens_seen`.
    """

    def __init__(self, prediction: Any = None) -> None:
        self._reporter = Reporter(prediction)
        self._tokens_seen = 0

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **more: Any
    ) -> None:
        """Tell the numbers of parameters, and begin to watch."""
        if not state.is_world_process_zero:
            self._reporter.watch.stop()
            return
        self._reporter.parameters(model)
        self._reporter.watch.begin(lambda: facts_of(args, model, more.get("train_dataloader")))

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """The batches of an optimizer step have come."""
        self._reporter.watch.began()

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> Any:
        """An optimizer step has ended."""
        if not self._reporter.is_active:
            self._reporter.watch.ended()
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

    def on_log(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Logging, evaluation or saving took the time since the last event."""
        self._reporter.watch.idle()

    on_evaluate = on_save = on_log

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Compare what ran, if the training was short."""
        self._reporter.watch.end()


def facts_of(arguments: Any, model: Any, loader: Any) -> RunFacts:
    """A Trainer's training as its objects describe it."""
    config = getattr(model, "config", None)
    fields: dict[str, Any] = {} if config is None else config.to_dict()
    knobs = {**settings_of_arguments(arguments), **settings_of_model(model)}
    knobs |= _quantized(model, fields.pop("quantization_config", None))
    if any(m.__dict__.get("gradient_checkpointing") is True for m in model.modules()):
        knobs["gradient_checkpointing"] = True  # the model is put into training mode later
    lengths = _lengths(getattr(loader, "dataset", None))
    if lengths:
        knobs["max_length"] = max(lengths)
    is_shorter = bool(lengths) and min(lengths) < max(lengths)
    return RunFacts(knobs, is_shorter, lambda: _asked(arguments, fields, knobs))


def _lengths(dataset: Any) -> list[int]:
    """Tokens of the first examples; none where they are made when they are asked for."""
    if isinstance(dataset, list) and dataset and isinstance(dataset[0], Mapping):
        rows = [row.get("input_ids", ()) for row in dataset[:_EXAMPLES]]
    elif "input_ids" in (getattr(dataset, "column_names", None) or ()):
        rows = dataset.with_format(None)[:_EXAMPLES]["input_ids"]
    else:
        return []
    return [len(row) for row in rows if len(row)]


_EXAMPLES = 1000
"""Examples whose lengths are read."""


def _quantized(model: Any, quantization: Any) -> dict[str, Any]:
    """Settings of a quantized model that a prediction needs beside its precision."""
    if quantization is None:
        return {}
    get = quantization.get if isinstance(quantization, Mapping) else vars(quantization).get
    floats = {
        "adapter" if "lora_" in name else "base": str(parameter.dtype).removeprefix("torch.")
        for name, parameter in model.named_parameters()
        if parameter.dtype.is_floating_point
    }
    found: dict[str, Any] = {
        "kbit_preparation": "peft" if floats.get("base") == "float32" else "none",
        "adapter_dtype": DTYPES.get(floats.get("adapter", ""), "fp32"),
    }
    if get("load_in_4bit") or get("_load_in_4bit"):
        computed = str(get("bnb_4bit_compute_dtype")).removeprefix("torch.")
        found["precision"] = "nf4"  # fp4 has the same sizes
        found["compute_dtype"] = DTYPES.get(computed, "fp32")
        found["double_quant"] = bool(get("bnb_4bit_use_double_quant"))
    return found


def _asked(arguments: Any, config: Mapping[str, Any], knobs: Mapping[str, Any]) -> Asked:
    """Start predicting these settings. Raises `UnavailableError` where they do not suffice."""
    kind = type(arguments).__name__
    reasons = {
        f"{kind} of a trainer of its own": kind not in ("TrainingArguments", "SFTConfig"),
        "several processes": arguments.world_size > 1,
        "packing": knobs.get("packing") or knobs.get("padding_free"),
        "other kernels": knobs.get("fused_kernels"),
        "unknown lengths of the examples": "max_length" not in knobs,
    }
    if found := [reason for reason, holds in reasons.items() if holds]:
        raise UnavailableError(f"{', '.join(found)}: not predicted from the run's objects")
    chunked = kind == "SFTConfig" and (knobs.get("loss") == "chunked_nll" or not is_before("1.7"))
    batch = knobs["micro_batch"] * knobs["grad_accum"]
    wanted = {
        "lora_rank": 0,
        **knobs,
        "loss": "chunked" if chunked else "transformers",
        "effective_batch": batch,
    }
    terms = SCHEMAS["causal_lm"].terms
    return Asked(config, _gpu_id(), {n: value for n, value in wanted.items() if n in terms})


def _gpu_id() -> str:
    """The type of the device of this process. Raises `UnavailableError` if it is not known."""
    import torch

    if not torch.cuda.is_available():
        raise UnavailableError("memory and speed of a processor aren't predicted")
    name = torch.cuda.get_device_name()
    gpu = match_device(name, torch.cuda.get_device_properties().total_memory)
    if gpu is None:
        raise UnavailableError(f"{name} isn't in the catalogue of GPUs")
    return gpu.id
