"""Workloads: what is trained, and how one configuration becomes a training session."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tuner.errors import unknown
from tuner.records import Configuration

if TYPE_CHECKING:
    from tuner.workloads.base import Workload

NAMES = ("causal_lm",)


def get_workload(name: str) -> Workload:
    """The workload with this name. Imports torch. Raises `InputError` for other names."""
    if name == "causal_lm":
        # Imported here, because it loads torch: commands that only read results stay quick.
        from tuner.workloads.causal_lm import CausalLM

        return CausalLM()
    raise unknown("workload", name, NAMES)


def tokens_per_sample(workload: str, configuration: Configuration) -> int:
    """Tokens of one sample at full length. Raises `InputError` for an unknown workload."""
    if workload == "causal_lm":
        return int(str(configuration["max_length"]))
    raise unknown("workload", workload, NAMES)
