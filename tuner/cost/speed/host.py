"""The host's time for a training step, by kind of call.

A launch is the time to issue a plain operator: from Python, with what modules do between, or from
autograd's engine. All other kinds of calls take a number of launches, from trials on one H100
(November 2026: PyTorch 2.11, transformers 5.17, peft 0.21, bitsandbytes 0.50; rows of
benchmarks/emulated_runs/cards.csv).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tuner.core.gpu import Gpu

LAUNCH_S = 20e-6
FASTEST_S, SLOWEST_S = 9e-6, 40e-6
"""A launch on a usual host, on the fastest and on the slowest. Published runs that were host-bound:
12 us (two programs on an A100), 18 us (Qwen's LoRA on an A100), 33 us (the H100), and 40 us
(an RTX 4080 under Windows). The fastest may not have been among them."""

HOSTS: Mapping[str, float] = {"h100_sxm": 33e-6}
"""A launch on the hosts that a GPU type was seen with, by `Gpu.id`. H100 SXM: fitted on the runs of
smollm2-135m, 8 x 1,024, and of the search with 4 x 1,024 tokens; a bare launch took 16 us there."""

RECOMPUTED = 2.0
"""Launches of an operator that repeats a checkpointed forward pass: hooks on saved tensors run
Python for each. Fitted between 2.4 of the search's LoRA with eager attention, 4 x 1,024 tokens, and
1.5 of a reentrant script (Qwen2.5-0.5B's shape in nf4), which no trace tells from the others."""

TRAINED = 1.0
"""Launches of the update for each parameter: to clip, group, update and forget its gradient, while
the device waits. Fitted on LoRA of llama-3.2-1b, 4 x 2,048, and of qwen3-8b, 3 x 2,048."""

BNB_UPDATE = 3.5
"""Further ones where bitsandbytes updates a parameter: a loop in Python. Fitted on LoRA of qwen3-8b
in nf4 with paged_adamw_8bit."""

INT8_LAYER = 12.0
"""Further launches of a product in int8: five operators of bitsandbytes in Python, and a question
to the device, whose answer the host waits for. Fitted on the only run in int8, llama-3.2-1b."""

_INT8 = "int8_linear_matmul"
_UPDATES = "optimizer_update_8bit_blockwise", "optimizer_update_32bit"


class Host(NamedTuple):
    """Seconds of a launch: expected, and on the fastest and the slowest host that it may be."""

    launch_s: float
    fastest_s: float
    slowest_s: float


def host_of(gpu: Gpu, launch_s: float) -> Host:
    """The host of a GPU type, where a usual one takes `launch_s` for a launch."""
    found = HOSTS.get(gpu.id, LAUNCH_S) / LAUNCH_S * launch_s
    return Host(found, min(FASTEST_S, found), max(SLOWEST_S, found))


def launches_of(names: NDArray[np.str_]) -> NDArray[np.float64]:
    """Launches that each operator takes, by its name."""
    return np.where(names == _INT8, 1.0 + INT8_LAYER, 1.0)


def waits_of(names: NDArray[np.str_]) -> NDArray[np.bool_]:
    """True for operators before which the host waits for the device: nothing runs ahead."""
    return np.isin(names, _INT8)


def update_launches(trained: int, names: NDArray[np.str_], executions: NDArray[np.int64]) -> float:
    """Launches of an update of `trained` parameters by these operators."""
    return TRAINED * trained + BNB_UPDATE * float(executions[np.isin(names, _UPDATES)].sum())
