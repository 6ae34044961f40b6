"""The trace against the same training step run for real, on the CPU.

One code trains in both. On the CPU every tensor has memory, and PyTorch's own profiler sees
what its allocator is asked for. Where no CUDA kernel is stood in for (eager attention, no
dropout, nothing quantised) the two must agree to the byte.
"""

import contextlib
from typing import Any

import pytest
import torch
from estimate_samples import configuration, tiny_config, traced
from live_storages import LiveStorages

from tuner.core.records import MemoryCategory, Phase
from tuner.predict.training import get_workload
from tuner.trial.device import fill, open_session

NEUTRAL = {"precision": "fp32", "attention": "eager", "micro_batch": 3, "max_length": 40}
CASES = [
    ("llama", {}),
    ("llama", {"gradient_checkpointing": True, "max_grad_norm": 0.0}),
    ("llama", {"training_loop": "loop", "grad_accum": 1}),
    ("qwen2", {"optimizer": "sgd"}),
    ("qwen3", {"lora_rank": 0, "precision": "bf16"}),
    ("gemma3", {"gradient_checkpointing": True}),
    ("gemma3", {"precision": "bf16", "lora_targets": ["all-linear"]}),
    # CPU autocast has the lists of CUDA autocast for what these models call.
    ("llama", {"mixed_precision": "bf16", "gradient_checkpointing": True}),
    ("gemma3", {"mixed_precision": "bf16", "lora_rank": 0}),
]


pytestmark = pytest.mark.usefixtures("one_thread")


class CpuEnvironment:
    """`tuner.predict.training.Environment` with random weights on the CPU."""

    device = "cpu"

    def __init__(self, storages: LiveStorages) -> None:
        self._storages = storages

    def materialize(self, model: Any) -> None:
        fill(model, "cpu")
        for tensor in (*model.parameters(), *model.buffers()):
            self._storages.add(tensor)

    def autocast(self, dtype: torch.dtype) -> contextlib.AbstractContextManager[None]:
        return torch.autocast("cpu", dtype)

    def checkpoint_contexts(self, autocast_dtype: Any = None) -> tuple[Any, Any]:
        return contextlib.nullcontext(), contextlib.nullcontext()

    def enter(self, phase: Phase, micro_step: int) -> None:
        self._storages.enter(phase)


def open_on_cpu(model: str, storages: LiveStorages, values: dict) -> Any:
    return open_session(
        get_workload("causal_lm"),
        tiny_config(model),
        configuration(**values),
        CpuEnvironment(storages),
    )


def run_for_real(model: str, values: dict) -> tuple[LiveStorages, Any]:
    storages = LiveStorages()
    with storages:
        session = open_on_cpu(model, storages, values)
        session.optimizer_step(1)
        session.optimizer_step(1 if values.get("grad_accum") == 1 else 2)
    return storages, session


def replay_trace(model: str, values: dict) -> tuple[list[tuple[Phase, int]], list[int]]:
    """Per phase of the trace: bytes when it begins, and its peak; cuBLAS workspace left out."""
    timeline = traced(model, **values).timeline
    phases: list[tuple[Phase, int]] = []
    peaks: list[int] = []
    marks = list(timeline.marks[1:])  # the first stands for the time before loading
    now = 0
    for position, (index, sign) in enumerate(timeline.events):
        while marks and marks[0].event <= position:
            phases.append((marks.pop(0).phase, now))
            peaks.append(now)
        block = timeline.blocks[index]
        if block.category is not MemoryCategory.CONTEXT_AND_WORKSPACE:
            now += sign * block.size_bytes
            if peaks:
                peaks[-1] = max(peaks[-1], now)
    return phases, peaks


@pytest.mark.parametrize(("model", "values"), CASES, ids=str)
def test_trace_agrees_with_a_real_run_in_every_phase(model, values):
    values = {**NEUTRAL, **values}
    run_for_real(model, values)  # once for what libraries keep for good
    real, session = run_for_real(model, values)
    phases, peaks = replay_trace(model, values)

    assert [phase for phase, _ in phases] == [phase for phase, _ in real.phases]
    # torch.optim keeps a step counter of 4 bytes a tensor, always on the CPU: part of the real
    # run's memory here, and on a GPU of no device's memory.
    state = session.optimizer.state
    counters = 4 * sum("step" in values for values in state.values())
    assert counters == (0 if values.get("optimizer") == "sgd" else 4 * len(state))
    first_update = [phase for phase, _ in phases].index(Phase.OPTIMIZER)
    expected = [0] * (first_update + 1) + [counters] * (len(phases) - first_update - 1)
    starts = [own - traced_ for (_, own), (_, traced_) in zip(real.phases, phases, strict=True)]
    assert starts[1:] == expected[1:]
    # The update that creates the counters peaks after they exist. Loading is not compared:
    # a trace has no meta copy of the weights beside the real one.
    expected[first_update] = counters
    differences = [own - traced_ for own, traced_ in zip(real.peaks, peaks, strict=True)]
    assert differences[1:] == expected[1:]


def test_a_step_for_real_trains():
    """The comparison means something only if the real run is a training step."""
    _, session = run_for_real("llama", NEUTRAL)
    trained = [p for p in session.model.parameters() if p.requires_grad]
    assert session.trainable_params == sum(p.numel() for p in trained)
    moments = [state["exp_avg"] for state in session.optimizer.state.values()]
    assert len(moments) == len(trained)
    assert all(torch.isfinite(moment).all() for moment in moments)
    assert sum(bool(moment.any()) for moment in moments) >= len(trained) // 2
