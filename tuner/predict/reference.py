"""Small trainings that run on a processor, to calibrate the predictions for it.

On a processor the parts of a step do not add up to the step: every operator finds its tensors in
memory instead of the cache, new memory arrives page by page, and each operator wakes threads.
So whole steps of a small model are timed, and their resident memory is measured. Each training
runs in a fork of a process that has imported the training libraries, as a trial does.

Run as `python -m tuner.predict.reference`, it prints one JSON object a line.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from statistics import fmean
from typing import Any

import numpy as np

from tuner.core.environment import own_python
from tuner.core.errors import UnavailableError
from tuner.core.gpu import Gpu
from tuner.core.host import give_back_freed, peak_resident_bytes, resident_bytes
from tuner.core.records import Configuration, Phase
from tuner.cost.compiled import Floats
from tuner.cost.library_memory import PROCESSOR
from tuner.cost.memory import peak_memory
from tuner.cost.speed.kernel_times import ProcessorKernelTimes
from tuner.cost.speed.processor import processor
from tuner.cost.speed.profile import DeviceProfile
from tuner.cost.speed.roofline import StepWork, step_times
from tuner.predict.predict import step_work
from tuner.predict.tracing.trace import trace
from tuner.predict.training import get_workload

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
    "max_position_embeddings": 256,
}
POINTS = (("fp32", 2, 48), ("fp32", 8, 96), ("bf16", 2, 48), ("bf16", 8, 96))
"""Precision, micro-batch and length of the steps."""
WORKLOAD = "causal_lm"

_WARM_UP, _LEAST_STEPS, _TIME_S = 2, 5, 0.6
_WITHIN_S = 240.0
_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_MARK = "reference "


@dataclass(frozen=True, slots=True)
class ReferenceRun:
    """One measured training: the median time of its steps, and their spread.

    `resident_bytes` is the largest growth of the process. `spread` is the interquartile range of
    the step times over their median. `resident_bytes` is used if malloc `gives_back` freed memory.
    """

    precision: str
    micro_batch: int
    length: int
    step_s: float
    spread: float
    resident_bytes: int
    gives_back: bool = False

    @property
    def configuration(self) -> Configuration:
        """The reference training."""
        return configuration(self.precision, self.micro_batch, self.length)


def configuration(precision: str, micro_batch: int, length: int) -> Configuration:
    """LoRA of a small llama, with autocast where weights are in 16 bits."""
    return Configuration(
        {
            "micro_batch": micro_batch,
            "grad_accum": 1,
            "max_length": length,
            "lora_rank": 8,
            "lora_targets": _TARGETS,
            "precision": precision,
            "mixed_precision": "bf16" if precision == "bf16" else "no",
            "gradient_checkpointing": False,
            "optimizer": "adamw_torch",
            "attention": "sdpa",
        }
    )


def model_config() -> Any:
    """The architecture, as a configuration of transformers."""
    from transformers import LlamaConfig

    return LlamaConfig(**SIZES)


def run_reference(points: Sequence[tuple[str, int, int]] = POINTS) -> list[ReferenceRun]:
    """Train at each of these points in its own process, and once more giving back freed memory.

    Raises `UnavailableError` if that fails.
    """
    # One thread until the fork: numpy's linear algebra would start others.
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    environment["CUDA_VISIBLE_DEVICES"] = ""  # no context on a GPU for trainings on the processor
    command = own_python(__name__, json.dumps(points))
    try:
        ended = subprocess.run(  # noqa: S603 - this program itself
            command,
            check=False,
            env=environment,
            capture_output=True,
            text=True,
            timeout=_WITHIN_S,
        )
    except subprocess.TimeoutExpired:
        raise UnavailableError("small trainings for reference took too long") from None
    lines = [line for line in ended.stdout.splitlines() if line.startswith(_MARK)]
    if ended.returncode != 0 or len(lines) != 2 * len(points):
        last = (ended.stderr.strip().splitlines() or ["no reason was given"])[-1]
        raise UnavailableError(f"small trainings for reference failed: {last[:300]}")
    return [ReferenceRun(**json.loads(line.removeprefix(_MARK))) for line in lines]


def main() -> int:
    """Run the points named on the command line, each in a fork."""
    points = json.loads(sys.argv[1])
    import bitsandbytes  # noqa: F401
    import peft  # noqa: F401

    get_workload(WORKLOAD)
    model_config()
    for (precision, micro_batch, length), gives_back in product(points, (False, True)):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                if gives_back:
                    give_back_freed()
                found = replace(_measured(precision, micro_batch, length), gives_back=gives_back)
                print(_MARK + json.dumps(asdict(found)), flush=True)
                code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        if status != 0:
            return 1
    return 0


def _measured(precision: str, micro_batch: int, length: int) -> ReferenceRun:
    """Train in this process, which has not computed anything yet."""
    before = resident_bytes()
    asked = configuration(precision, micro_batch, length)
    session = get_workload(WORKLOAD).open(model_config(), asked, _Processor())
    for _ in range(_WARM_UP):
        session.optimizer_step(1)
    times: list[float] = []
    while len(times) < _LEAST_STEPS or sum(times) < _TIME_S:
        started = time.perf_counter()
        session.optimizer_step(1)
        times.append(time.perf_counter() - started)
    low, median, high = statistics.quantiles(times, n=4)
    grown = peak_resident_bytes() - before
    return ReferenceRun(precision, micro_batch, length, median, (high - low) / median, grown)


class _Processor:
    """The environment of a reference; see `tuner.predict.training.base.Environment`."""

    device = "cpu"

    def materialize(self, model: Any) -> None:
        """Small random weights."""
        import torch

        model.to_empty(device="cpu")
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                if tensor.is_floating_point():
                    tensor.uniform_(-0.02, 0.02)

    def autocast(self, dtype: Any) -> contextlib.AbstractContextManager[None]:
        """PyTorch's own."""
        import torch

        context: Any = torch.autocast("cpu", dtype=dtype)
        return context  # type: ignore[no-any-return]

    def checkpoint_contexts(
        self, autocast_dtype: Any | None
    ) -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
        """Nothing."""
        return contextlib.nullcontext(), contextlib.nullcontext()

    def enter(self, phase: Phase, micro_step: int) -> None:
        """Does nothing: phases are not recorded."""


if __name__ == "__main__":
    sys.exit(main())


_LEAST_FACTOR = 0.1


def calibrated_on_reference(profile: DeviceProfile, runs: Sequence[ReferenceRun]) -> DeviceProfile:
    """The profile with the values calibrated from the trainings `runs`."""
    config, workload, gpu = model_config(), get_workload(WORKLOAD), processor(profile)
    without_launches = replace(profile, launch_s=0.0)
    plain = [run for run in runs if not run.gives_back]
    launch, kernels, live = [], [], []
    beside: dict[str, list[int]] = {}
    for run in runs:
        traced = trace(workload, config, run.configuration, compute_capability=PROCESSOR)
        live_bytes = peak_memory(
            traced.timeline, context_bytes=0, caching=False
        ).peak_allocated_bytes
        if run.gives_back:
            beside.setdefault(run.precision, []).append(run.resident_bytes - live_bytes)
            continue
        work = step_work(traced)
        whole_s, kernels_s = (_step_s(work, gpu, alone) for alone in (profile, without_launches))
        launch.append(whole_s - kernels_s)
        kernels.append(kernels_s)
        live.append(live_bytes)
    ones = [1.0] * len(plain)
    launch_factor, step_factor = two_parts(launch, kernels, [run.step_s for run in plain])
    context, live_factor = two_parts(ones, live, [run.resident_bytes for run in plain])
    return replace(
        profile,
        # None of them can be zero.
        launch_s=profile.launch_s * max(launch_factor, _LEAST_FACTOR),
        step_factor=max(step_factor, _LEAST_FACTOR),
        context_bytes=round(context),
        live_factor=max(live_factor, 1.0),
        pages_bytes={name: max(0, round(fmean(sizes))) for name, sizes in beside.items()} or None,
        step_spread=max(run.spread for run in plain),
    )


def _step_s(work: StepWork, gpu: Gpu, profile: DeviceProfile) -> float:
    times = ProcessorKernelTimes(profile)
    return float(step_times(work, gpu, grad_accum=np.array([1]), kernel_times=times).step_s[0])


def two_parts(
    first: Sequence[float], second: Sequence[float], total: Sequence[float]
) -> tuple[float, float]:
    """Factors of two parts that make up totals, none below 0; relative errors weigh alike.

    If the best factor of one part is negative, it is set to 0 and the other is fitted alone.
    """
    parts = np.array([first, second], dtype=float) / np.array(total, dtype=float)
    both, *_ = np.linalg.lstsq(parts.T, np.ones(len(total)), rcond=None)
    if (both >= 0).all():
        return float(both[0]), float(both[1])
    alone = [_alone(part) for part in parts]
    errors = [
        float(((factor * part - 1) ** 2).sum()) for factor, part in zip(alone, parts, strict=True)
    ]
    return (alone[0], 0.0) if errors[0] < errors[1] else (0.0, alone[1])


def _alone(part: Floats) -> float:
    return float(part.sum() / (part @ part))
