"""Optimizer steps compiled from a few parameters of each size, against traces of all of them."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest

from tuner.core.records import MemoryCategory
from tuner.core.setup.optimizers import OPTIMIZERS
from tuner.cost.allocator import settled_size
from tuner.cost.speed.roofline import Roofline
from tuner.cost.work_arrays import WorkArrays, optimizer_executions_of
from tuner.predict.compiler.optimizer_step import (
    CompiledOptimizer,
    compile_optimizer,
    work_arrays,
)
from tuner.predict.predict import predict, resolve_subject
from tuner.predict.predictor import PredictionJob, Predictor
from tuner.predict.tracing.trace import EMBEDDING, trace_optimizer
from tuner.space import configure, default_space
from tuner.space.gpus import get_gpu

# Adapters of two widths in fp32, a small one that 8-bit optimizers keep in fp32, bf16 weights.
TRAINABLE = {
    (98 * 1536, "float32"): 23,
    (16 * 1536, "float32"): 5,
    (2048, "float32"): 7,
    (1536 * 1024, "bfloat16"): 1,
    (1536 * 2048, f"bfloat16{EMBEDDING}"): 1,
}
GIVEN = (MemoryCategory.ADAPTERS, MemoryCategory.GRADIENTS)


@pytest.fixture(scope="module", params=[n for n, o in OPTIMIZERS.items() if not o.needs_shapes])
def name(request) -> str:
    return request.param


HOW = {
    "no clipping": {"max_grad_norm": 0.0},
    "clipping": {"max_grad_norm": 1.0},
    "scaled": {"max_grad_norm": 1.0, "scaled": True},
}


@pytest.fixture(scope="module", params=HOW.values(), ids=HOW)
def both(request, name):
    """The compiled optimizer, and the trace of every parameter."""
    parameters = [kind for kind, count in TRAINABLE.items() for _ in range(count)]
    return (
        compile_optimizer(name, TRAINABLE, **request.param),
        trace_optimizer(name, parameters, **request.param),
    )


def test_memory_is_that_of_the_trace(both):
    compiled, timeline = both
    added = [
        0 if block.paged or block.category in GIVEN else settled_size(block.size_bytes)
        for block in timeline.blocks
    ]
    states = [b.category is MemoryCategory.OPTIMIZER_STATE for b in timeline.blocks]
    state_bytes = sum(size for size, is_state in zip(added, states, strict=True) if is_state)
    peak_bytes = max(accumulate(added[index] * sign for index, sign in timeline.events))
    rests = compiled.state_bytes - state_bytes
    assert rests >= 0
    assert compiled.peak_bytes - peak_bytes == rests
    assert compiled.paged_bytes == sum(b.size_bytes for b in timeline.blocks if b.paged)


def test_state_in_blocks_of_a_few_mib_has_rests():
    """20 MiB hold 13 blocks of 1.5 MiB and 0.5 MiB that are not worth splitting off."""
    numel, blocks = 3 * 2**17, 26
    compiled = compile_optimizer(
        "adamw_torch_fused", {(numel, "float32"): blocks // 2}, max_grad_norm=0.0
    )
    counters = 512 * blocks // 2
    assert compiled.state_bytes == 4 * numel * blocks + counters + 2 * 2**19


def test_work_is_that_of_the_trace(both):
    compiled, timeline = both
    counts = optimizer_executions_of(timeline)
    works = WorkArrays.of_works(timeline.works)
    arrays, executions = work_arrays(compiled)
    assert executions.sum() == counts.sum()
    assert executions @ arrays.bytes_moved == pytest.approx(counts @ works.bytes_moved)
    assert executions @ arrays.flops == pytest.approx(counts @ works.flops)


@pytest.mark.parametrize("gpu", ["t4", "h100_pcie"])
def test_time_is_that_of_the_trace(both, gpu):
    """Kernels shorter than the shortest a GPU can run count each, not all as one."""
    compiled, timeline = both
    arrays, executions = work_arrays(compiled)
    counts = optimizer_executions_of(timeline)
    works, target = WorkArrays.of_works(timeline.works), get_gpu(gpu)
    ours, full = (
        numbers @ Roofline().seconds(kernels, target, allow_tf32=False, streams=True)
        for numbers, kernels in ((executions, arrays), (counts, works))
    )
    # Kernels of one operator count as alike; those of another dtype may be shorter.
    assert ours == pytest.approx(full, rel=0.03)


def test_paged_state_is_managed_memory(both, name):
    compiled, _ = both
    assert (compiled.paged_bytes > 0) == name.startswith("paged")
    assert (compiled.state_bytes > 0) == (name != "sgd")


def test_adamw_keeps_two_numbers_for_each_parameter():
    numel = 4096 * 512  # 8 MiB in fp32: no rounding
    compiled = compile_optimizer("adamw_torch_fused", {(numel, "float32"): 40}, max_grad_norm=0.0)
    # Two moments, and a step counter of one number in a block of 512 bytes each.
    assert compiled.state_bytes == 40 * (2 * 4 * numel + 512)


def test_quantities_are_affine_in_the_number_of_parameters(name):
    kind = (24576, "float32")
    few, some, many = (
        compile_optimizer(name, {kind: count}, max_grad_norm=1.0) for count in (1, 11, 21)
    )
    for quantity in ("state_bytes", "peak_bytes", "paged_bytes"):
        low, middle, high = (getattr(step, quantity) for step in (few, some, many))
        assert high - middle == middle - low


def test_it_survives_json(both):
    compiled, _ = both
    assert CompiledOptimizer.from_dict(compiled.to_dict()) == compiled


@pytest.mark.parametrize(
    "damaged",
    [
        {},
        {"state_bytes": 1, "peak_bytes": 1, "paged_bytes": 0},
        {"state_bytes": "much", "peak_bytes": 1, "paged_bytes": 0, "kernels": []},
        {"state_bytes": 1, "peak_bytes": 1, "paged_bytes": 0, "kernels": [[1, 2]]},
        {"state_bytes": 1, "peak_bytes": 1, "paged_bytes": 0, "kernels": 3},
    ],
    ids=["empty", "no kernels", "no number", "short kernels", "no list"],
)
def test_damaged_json_is_refused(damaged):
    with pytest.raises((KeyError, TypeError, ValueError)):
        CompiledOptimizer.from_dict(damaged)


def test_no_kernels_take_no_time():
    arrays, executions = work_arrays(CompiledOptimizer(0, 0, 0, ()))
    assert (executions @ np.zeros((len(executions), 1))).sum() == 0
    assert arrays.bytes_moved.shape == (0, 1)


@pytest.mark.proof
def test_fp16_takes_a_pass_over_the_gradients_more_than_bf16():
    # Ampere and newer compute both at the same rate: only the scaling of the loss differs.
    subject = PredictionJob("causal_lm", "qwen2.5-1.5b")
    shape = {"lora_rank": 64, "micro_batch": 1, "max_length": 128, "optimizer": "adamw_torch"}
    space = default_space("qwen2.5-1.5b", {})
    bf16, fp16 = (
        configure(space, {**shape, "precision": dtype, "mixed_precision": dtype}, strict=False)
        for dtype in ("bf16", "fp16")
    )
    gpu = get_gpu("a6000")
    first, second = Predictor(subject).predict([bf16, fp16], gpu)
    passes_s = (first.speed.step_s, second.speed.step_s)
    gradients_s = first.trainable_params * 4 / gpu.bandwidth_bytes_per_s
    assert gradients_s < passes_s[1] - passes_s[0] < 4 * gradients_s
    full = [predict(resolve_subject("causal_lm", "qwen2.5-1.5b"), c, gpu) for c in (bf16, fp16)]
    assert second.speed.step_s == pytest.approx(full[1].speed.step_s, rel=1e-3)
    assert full[1].speed.step_s > full[0].speed.step_s
