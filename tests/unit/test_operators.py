"""The operators that take most of a step: how they are grouped, what limits them, what helps."""

import numpy as np
import pytest

from tuner.cost.operators.timeline import MASK, Work
from tuner.cost.speed.roofline import Roofline, StepWork, step_times
from tuner.cost.step_details import most_expensive
from tuner.cost.work_arrays import SEGMENTS, WorkArrays
from tuner.space.gpus import get_gpu

GIB = 1 << 30


def product(m, n, k, dtype="bfloat16"):
    moved = 2 * (m * k + k * n + m * n)
    return Work("mm", "matmul", 2 * m * n * k, (moved,), dtype, (1, m, n, k), ())


def moving(name, moved, dtype="float32", kind="elementwise"):
    return Work(name, kind, 0, (moved,), dtype, None, ())


def attention(name):
    flops = 4 * 64 * 2048 * 2048 * 128
    return Work(name, "attention", flops, (1 << 20,), "bfloat16", (64, 2048, 2048, 128), ())


def found(*calls, gpu="a6000", grad_accum=1):
    """Of operators, each with how often it runs in a forward pass and is recomputed in backward."""
    works = WorkArrays.of_works([one for one, *_ in calls])
    executions = np.zeros((len(SEGMENTS), 2, len(calls)), dtype=np.int64)
    for row, (_, plain, again) in enumerate(calls):
        executions[0::2, 0, row] = plain
        executions[1::2, 1, row] = again
    work = StepWork(works, executions, works, np.zeros(len(calls), dtype=np.int64), 0)
    device = get_gpu(gpu)
    whole = step_times(work, device, grad_accum=np.array([grad_accum]))
    step_s = float(whole.step_s[0])
    return most_expensive(work, device, Roofline(), grad_accum=grad_accum, step_s=step_s), step_s


def test_products_of_the_same_sizes_are_one_and_calls_are_counted_over_micro_steps():
    (one, other), step_s = found(
        (product(4096, 4096, 16384), 1, 1),
        (product(4096, 16384, 4096), 1, 0),
        (moving("mul", GIB), 2, 0),
        grad_accum=8,
    )
    assert (one.label, one.calls) == ("mm of 4096 x 4096 x 16384, bfloat16", 24)
    assert one.recomputed == pytest.approx(1 / 3)
    assert (other.label, other.calls) == ("mul, float32", 16)
    assert one.seconds + other.seconds == pytest.approx(step_s)
    assert one.share + other.share == pytest.approx(1)


@pytest.mark.parametrize(
    ("work", "gpu", "limit", "says"),
    [
        (product(8192, 8192, 8192), "a100_80gb", "arithmetic", ""),
        (product(8192, 8192, 8192), "t4", "power limit", "fp16: 8 times the peak"),
        (product(8192, 8192, 8192, "float32"), "a6000", "power limit", "bf16: 4 times the peak"),
        (product(129, 8192, 8192), "a100_80gb", "arithmetic", "whole tiles"),
        (moving("mul", GIB), "a6000", "memory traffic", "fused kernels"),
        (moving("_to_copy", GIB), "a6000", "memory traffic", "in the compute type"),
        (moving("_log_softmax", GIB), "a6000", "memory traffic", "a loss in chunks"),
        (moving("dequantize_4bit", GIB, kind="dequantise"), "a6000", "memory traffic", "16-bit"),
        (moving("add_", 64), "a6000", "launch", "a larger micro_batch"),
        (
            attention("_scaled_dot_product_efficient_attention" + MASK),
            "a6000",
            "arithmetic",
            "no dense mask: 1.8 times the rate",
        ),
    ],
)
def test_what_limits_an_operator_and_what_would_make_it_cheaper(work, gpu, limit, says):
    ((one,), _) = found((work, 50, 0), gpu=gpu)
    assert one.limited_by == limit
    assert says in one.cheaper
    assert bool(says) == bool(one.cheaper)


def test_five_are_told_the_longest_first():
    listed, _ = found(*((moving(f"op{n}", n * GIB), 1, 0) for n in range(1, 9)))
    assert [one.label for one in listed] == [f"op{n}, float32" for n in (8, 7, 6, 5, 4)]
