"""Trace and emulator list the same kernels of the same training step, at the same prices."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.emulating import needs_emulator
from tuner.app.estimate import one_configuration
from tuner.cost.operators.timeline import Work
from tuner.cost.speed.roofline import Roofline
from tuner.cost.work_arrays import WorkArrays
from tuner.emulator import Machine
from tuner.emulator.rates import TRANSFER, EmulatedTimes
from tuner.predict.predict import step_work
from tuner.predict.traces import Subject, Traces
from tuner.space.gpus import get_gpu

TINY = "tiny-llama-3m"
SIZES = {"micro_batch": 8, "max_length": 512, "effective_batch": 8}
CASES = {
    "cudnn": ("h100_sxm", {"precision": "bf16", "lora_rank": 16}),
    "quantised": ("a100_80gb", {"precision": "nf4", "lora_rank": 16}),
    "autocast": (
        "a100_80gb",
        {
            "precision": "fp32",
            "mixed_precision": "bf16",
            "lora_rank": 0,
            "gradient_checkpointing": False,
            "optimizer": "adamw_torch",
        },
    ),
}
BATCHES = {"randint", "ones", "zeros", "ones_like", "clone", "_local_scalar_dense"}
"""Operators with which a trace makes tokens, and an emulated step reads its loss."""


def emulated_works(settings: dict[str, Any]) -> list[tuple[list[Any], bool, int]]:
    """The works of the second training step in an emulated process.

    With each, True if it is the optimizer's, and the number of executions.
    """
    from tuner.emulator.inside.activate import ACTIVE
    from tuner.predict.training import get_workload
    from tuner.trial.device import RealEnvironment, open_session

    space, configuration = one_configuration(None, TINY, settings)
    environment = RealEnvironment("cuda:0")
    model = Subject(space.workload, TINY).model_config
    session = open_session(get_workload(space.workload), model, configuration, environment)

    def counted() -> Counter[tuple[bool, int]]:
        total: Counter[tuple[bool, int]] = Counter()
        for _, phase, _, counts in ACTIVE["pricer"].snapshot()["counts"]:
            total.update({(phase == "optimizer", number): count for number, count in counts})
        return total

    session.optimizer_step(1)
    before = counted()
    session.optimizer_step(1)
    ran = counted() - before
    described = ACTIVE["pricer"].snapshot()["described"]
    return [
        (work, updates, count)
        for (updates, number), count in ran.items()
        for work in described[number][2]
    ]


def by_operator(
    works: WorkArrays, counts: Any, gpu: Any, *, streams: bool
) -> dict[str, tuple[int, float]]:
    """Executions and seconds of each operator that computes, in place or not.

    Autograd adds gradients in place, except under the emulator's mode.
    """
    times = EmulatedTimes(Roofline())
    seconds = times.seconds(works, gpu, allow_tf32=False, streams=streams)[:, 0]
    found: dict[str, tuple[int, float]] = {}
    for name, kind, count, each_s in zip(works.names, works.kinds, counts, seconds, strict=True):
        operator = str(name).removesuffix("_")
        if count and kind != TRANSFER and operator not in BATCHES:
            number, total_s = found.get(operator, (0, 0.0))
            found[operator] = (number + int(count), total_s + float(count * each_s))
    return found


@needs_emulator
@pytest.mark.parametrize(
    "name", ["cudnn", "quantised", pytest.param("autocast", marks=pytest.mark.proof)]
)
def test_a_step_has_the_kernels_of_its_prediction(name):
    gpu_name, chosen = CASES[name]
    gpu, settings = get_gpu(gpu_name), {**SIZES, **chosen}
    space, configuration = one_configuration(None, TINY, settings)
    traced = Traces(Subject(space.workload, TINY)).of(configuration, gpu)
    work = step_work(traced, configuration, gpu)
    ran = Machine(gpu).call(emulated_works, settings).value
    for updates, works, executions in (
        (False, work.passes, work.executions[:2].sum(axis=(0, 1))),  # of the first micro-step
        (True, work.optimizer, work.optimizer_executions),
    ):
        listed = [(Work(*w[:3], tuple(w[3]), w[4], w[5], ()), n) for w, u, n in ran if u is updates]
        emulated = by_operator(
            WorkArrays.of_works(one for one, _ in listed),
            [n for _, n in listed],
            gpu,
            streams=updates,
        )
        predicted = by_operator(works, executions, gpu, streams=updates)
        if updates:  # a timeline of all sizes has no names of them
            emulated, predicted = ({"all": summed(found)} for found in (emulated, predicted))
        different = {
            operator: both
            for operator in emulated.keys() | predicted.keys()
            for both in [(emulated.get(operator, (0, 0.0)), predicted.get(operator, (0, 0.0)))]
            if both[0] != pytest.approx(both[1], rel=0.02)
        }
        assert not different


def summed(found: dict[str, tuple[int, float]]) -> tuple[int, float]:
    """Executions and seconds of all operators."""
    return sum(number for number, _ in found.values()), sum(s for _, s in found.values())
