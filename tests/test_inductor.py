"""Operators that torch.compile fuses: predicted, and by inductor itself on a processor."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from estimate_samples import configuration
from torch import nn

from tuner.core.kinds import MemoryCategory, Phase
from tuner.cost.memory import peak_memory
from tuner.cost.operators.inductor import fused_by_inductor
from tuner.cost.operators.timeline import FUSED, Timeline, Work
from tuner.cost.speed.roofline import step_times
from tuner.cost.work_arrays import WorkArrays, executions_of
from tuner.predict.compiler.deepening import trace_deep
from tuner.predict.compiler.structure import Structure
from tuner.predict.compiling import compile_one
from tuner.predict.predict import resolve_subject, step_work
from tuner.predict.tracing.recorder import Recorder
from tuner.space.gpus import get_gpu

BATCH, WIDTH, INNER, WORDS = 64, 256, 640, 1024


class Norm(nn.Module):
    """RMSNorm as transformers' Llama has it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, dtype=torch.bfloat16))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        wide = hidden.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(hidden.dtype)


class Block(nn.Module):
    """The second half of a Llama layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = Norm()
        self.gate, self.up = (nn.Linear(WIDTH, INNER, bias=False) for _ in range(2))
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        normed = self.norm(hidden)
        inner = nn.functional.silu(self.gate(normed)) * self.up(normed)
        return hidden + self.down(inner)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm, self.head = Norm(), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.norm(self.blocks(self.first(values))))
        return nn.functional.cross_entropy(logits.float(), labels)


def batch(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    values = torch.zeros(BATCH, WIDTH, dtype=torch.bfloat16, device=device)
    return values, torch.zeros(BATCH, dtype=torch.long, device=device)


def traced() -> Timeline:
    """A forward and a backward pass without data, as inductor runs them."""
    with torch.device("meta"):
        model = Model().to(torch.bfloat16)
    recorder = Recorder(workspace_bytes=0, notes_accesses=True)
    with recorder:
        recorder.start()
        for parameter in model.parameters():
            recorder.label(parameter, MemoryCategory.WEIGHTS)
        given = batch("meta")
        recorder.enter(Phase.FORWARD, 1, 0)
        loss = model(*given)
        recorder.enter(Phase.BACKWARD, 1, 0)
        loss.backward()
        recorder.enter(Phase.OPTIMIZER, 1, 0)
    assert recorder.accesses is not None
    return fused_by_inductor(recorder.timeline, recorder.accesses)


def works_of(timeline: Timeline, phase: Phase) -> list[Work]:
    return [
        timeline.works[op.work] for op in timeline.ops if timeline.marks[op.mark].phase is phase
    ]


@pytest.fixture(scope="module")
def compiled() -> tuple[dict[Phase, tuple[int, int, int]], int]:
    """What inductor makes of the model on a processor.

    By pass: its own kernels, the bytes that they move, and those of libraries. And the bytes that
    are saved for the backward pass, without parameters and inputs.
    """
    found = []

    def note(nodes: list[Any]) -> list[Any]:
        own = [n for n in nodes if not n.is_extern() and "Nop" not in type(n).__name__]
        moved = sum(node.get_read_write_buffers_sizes() for node in own)
        found.append((len(own), moved, sum(node.is_extern() for node in nodes)))
        return nodes

    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    torch._dynamo.reset()
    settings = {"_post_fusion_custom_pass": note, "force_disable_caches": True}
    given, model = batch("cpu"), Model().to(torch.bfloat16)
    with torch._inductor.config.patch(settings):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = torch.compile(model)(*given)
        loss.backward()
    known = {tensor.data_ptr() for tensor in (*given, *model.parameters())}
    by_pass = dict(zip((Phase.FORWARD, Phase.BACKWARD), found, strict=True))
    return by_pass, sum(size for at, size in saved.items() if at not in known)


@pytest.mark.parametrize("phase", [Phase.FORWARD, Phase.BACKWARD])
def test_kernels_are_those_of_inductor(compiled, phase):
    works = works_of(traced(), phase)
    own = [work for work in works if work.kind == FUSED]
    number, moved, others = compiled[0][phase]
    assert len(works) - len(own) == others
    # On a processor inductor fuses no sum into the norm that follows where that needs a loop order.
    assert len(own) == pytest.approx(number, abs=2)
    assert sum(work.bytes_moved for work in own) == pytest.approx(moved, rel=0.15)


def test_saved_for_the_backward_pass_is_what_inductor_saves(compiled):
    timeline = traced()
    start, end = (mark.event for mark in timeline.marks[1:3])
    saved = sum(
        block.size_bytes
        for block in timeline.blocks
        if start <= block.born_event < end and not 0 <= block.died_event < end
    )
    assert saved == pytest.approx(compiled[1], rel=0.02)


# -- the training of a model ---------------------------------------------------------------------

LORA = {"lora_rank": 8, "lora_targets": ("q_proj", "v_proj")}
SETTINGS = (
    {},
    {"gradient_checkpointing": True, "grad_accum": 2},
    {"gradient_checkpointing": True, "loss": "chunked"},
    {"precision": "fp32", "mixed_precision": "bf16", "attention": "eager"},
    {**LORA, "lora_dropout": 0.1, "padding": "max_length"},
    {**LORA, "precision": "nf4", "compute_dtype": "bf16", "adapter": "dora"},
)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_compiled_training_takes_no_more_and_its_other_kernels_stay(settings):
    subject, gpu = resolve_subject("causal_lm", "tiny-llama-3m"), get_gpu("a100_80gb")
    plain = configuration(**{"lora_rank": 0, **settings})
    traces = {
        fused: trace_deep(
            subject.workload,
            subject.model_config,
            plain.replace(torch_compile=fused),
            compute_capability=gpu.compute_capability,
        )
        for fused in (False, True)
    }
    kernels, seconds, moved = {}, {}, {}
    for fused, found in traces.items():
        works = [
            work
            for phase in (Phase.FORWARD, Phase.BACKWARD)
            for work in works_of(found.timeline, phase)
        ]
        # What is left of "elementwise" are operators that inductor takes from ATen.
        kernels[fused] = Counter(w for w in works if w.kind not in (FUSED, "elementwise"))
        moved[fused] = sum(w.bytes_moved for w in works if w.kind in (FUSED, "elementwise"))
        times = step_times(step_work(found), gpu, grad_accum=np.array([2]))
        seconds[fused] = float(times.step_s[0])
    assert kernels[True] == kernels[False]
    assert moved[True] < 0.6 * moved[False]
    assert seconds[True] < seconds[False]
    peaks = [peak_memory(traces[fused].timeline, context_bytes=0) for fused in (True, False)]
    assert peaks[0].peak_allocated_bytes <= peaks[1].peak_allocated_bytes
    assert peaks[0].loaded_bytes == peaks[1].loaded_bytes


def test_many_configurations_follow_from_one_compiled_trace():
    """A search prices a trace's sizes as polynomials: of compiled programs too."""
    subject = resolve_subject("causal_lm", "tiny-llama-3m")
    asked = configuration(precision="bf16", lora_rank=0, torch_compile=True, micro_batch=3)
    structure = Structure.of(asked, window=None, compute_capability=(8, 0))
    passes = compile_one(subject, structure)
    assert not isinstance(passes, str), passes
    found = trace_deep(
        subject.workload, subject.model_config, asked, compute_capability=(8, 0)
    ).timeline
    point = np.array([[3, asked["max_length"], 0, 0]], dtype=float)
    of_points = WorkArrays.of_compiled(passes, point)
    ours, theirs = (
        sum(works.bytes_moved[works.kinds == FUSED, 0] * runs[works.kinds == FUSED])
        for works, runs in (
            (of_points, passes.executions[:2].sum(axis=(0, 1))),
            (
                WorkArrays.of_works(found.works),
                executions_of(found, step=1)[:2].sum(axis=(0, 1)),
            ),
        )
    )
    assert ours == pytest.approx(theirs, rel=1e-3)
