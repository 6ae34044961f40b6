"""The host's time: by kind of call, beside the device's, and around an update."""

import numpy as np
import pytest

from tuner.cost.operators.timeline import Work
from tuner.cost.speed import roofline
from tuner.cost.work_arrays import SEGMENTS, WorkArrays
from tuner.space.gpus import get_gpu

A100, H100 = get_gpu("a100_80gb"), get_gpu("h100_sxm")
KERNEL_S = roofline.Roofline().shortest_s
TINY = Work("mul", "elementwise", 0, (64,), "float32", None, ())
LARGE = Work("mul", "elementwise", 0, (1 << 34,), "float32", None, ())
INT8 = Work("int8_linear_matmul", "matmul", 1, (64,), "int8", (1, 1, 1, 1), ())


def step_s(*calls, gpu=A100, update=(), trained=0, reads_loss=True):
    """Of a step whose backward pass has these calls, each so often and so often recomputed."""
    works = WorkArrays.of_works([one for one, *_ in calls] + [one for one, _ in update])
    executions = np.zeros((len(SEGMENTS), 2, len(works.names)), dtype=np.int64)
    for row, (_, plain, again) in enumerate(calls):
        executions[1, :, row] = plain, again
    updates = np.array([0] * len(calls) + [times for _, times in update], dtype=np.int64)
    work = roofline.StepWork(works, executions, works, updates, trained, reads_loss)
    return float(roofline.step_times(work, gpu, grad_accum=np.array([1])).step_s[0])


def test_recomputed_operators_cost_the_host_more_and_a_card_may_have_a_host_of_its_own():
    assert step_s((TINY, 100, 0)) == pytest.approx(100 * roofline.LAUNCH_S)
    assert step_s((TINY, 100, 50)) == pytest.approx(
        (100 + roofline.RECOMPUTED * 50) * roofline.LAUNCH_S
    )
    assert step_s((TINY, 100, 0), gpu=H100) == pytest.approx(100 * roofline.HOSTS["h100_sxm"])


def test_host_and_device_run_at_once_but_where_the_host_asks_the_device():
    large_s, host_s = step_s((LARGE, 1, 0)), 1000 * roofline.RECOMPUTED * roofline.LAUNCH_S
    assert step_s((LARGE, 1, 0), (TINY, 0, 1000)) == pytest.approx(
        max(large_s + 1000 * KERNEL_S, roofline.LAUNCH_S + host_s)
    )
    asks_s = roofline.RECOMPUTED * (1 + roofline.INT8_LAYER) * roofline.LAUNCH_S
    apart = step_s((LARGE, 1, 0), (TINY, 0, 1000), (INT8, 0, 1))
    assert apart == pytest.approx(large_s + host_s + asks_s)


def test_an_update_waits_for_the_host_where_the_loop_reads_the_loss():
    host_s = 100 * roofline.TRAINED * roofline.LAUNCH_S
    alone = step_s((LARGE, 1, 0))
    assert step_s((LARGE, 1, 0), trained=100) == pytest.approx(alone + host_s)
    assert step_s((LARGE, 1, 0), trained=100, reads_loss=False) == pytest.approx(alone)
    # A host that isn't ahead has the update before it, whatever it reads.
    late = step_s((TINY, 100, 0), trained=100, reads_loss=False)
    assert late == pytest.approx(100 * roofline.LAUNCH_S + host_s)


def test_updates_of_bitsandbytes_are_loops_in_python_and_8_bit_states_are_searched():
    one = Work(roofline.BLOCKWISE, "elementwise", 0, (1 << 30,), "bfloat16", None, ())
    found = step_s((TINY, 1, 0), update=[(one, 3)], trained=3)
    searched_s = 3 * (1 << 30) / (2.7e9 * A100.sm_count)
    host_s = (3 * roofline.TRAINED + 3 * roofline.BNB_UPDATE) * roofline.LAUNCH_S
    assert found == pytest.approx(roofline.LAUNCH_S + host_s + searched_s)
    assert searched_s > 3 * roofline.Roofline().traffic_bytes_per_s(A100, "elementwise") ** -1 * (
        1 << 30
    )
