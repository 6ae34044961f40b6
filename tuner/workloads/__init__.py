"""Workloads: what is trained, and how one configuration becomes a training session."""

from __future__ import annotations

from tuner.errors import unknown
from tuner.workloads.base import Workload

NAMES = ("causal_lm",)


def get_workload(name: str) -> Workload:
    """The workload with this name. Imports torch. Raises `InputError` for other names."""
    if name == "causal_lm":
        # Imported here, because it loads torch: commands that only read results stay quick.
        from tuner.workloads.causal_lm import CausalLM

        return CausalLM()
    raise unknown("workload", name, NAMES)
