"""Makes runners in the worker that runs them: small picklable objects, nothing imported before."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from tuner.core import nvml
from tuner.core.errors import UnavailableError
from tuner.core.units import format_gib
from tuner.emulator.here import is_emulated
from tuner.space.gpus import MEMORY_TOLERANCE
from tuner.trial.base import MeasureOptions, RunnerFactory, TrialJob, TrialRunner, outcome_versions


@dataclass(frozen=True, slots=True)
class EmulatedFactory:
    """Makes runners that train on an emulated machine with `gpus` GPUs; see `RunnerFactory`.

    `environment` has variables for their processes in addition to those of the worker.
    """

    job: TrialJob
    options: MeasureOptions
    gpus: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)

    def __call__(self) -> TrialRunner:
        """See `RunnerFactory`. Raises `UnavailableError` where nothing can be emulated here."""
        from tuner.trial.emulated import EmulatedCommandRunner, EmulatedRunner

        make = EmulatedRunner if self.job.command is None else EmulatedCommandRunner
        # Every step takes the same: one is timed, by its parts.
        options = replace(
            self.options, min_steps=1, budget_s=0.0, short_steps=not self.options.whole_steps
        )
        return make(self.job, options, gpus=self.gpus, environment=self.environment)


@dataclass(frozen=True, slots=True)
class VerifiedFactory:
    """A runner factory that first looks at the worker's GPU.

    `names` are the exact device names that are right, `sizes_bytes` their memory, which may
    differ by 5 %. `identify` says what the GPU is; None asks NVML.
    """

    make: RunnerFactory
    names: tuple[str, ...]
    sizes_bytes: tuple[int, ...]
    identify: Callable[[], nvml.DeviceIdentity | None] | None = None

    def __call__(self) -> TrialRunner:
        """The runner. Raises `UnavailableError` with what is there where it is another GPU."""
        found = (self.identify or nvml.device_identity)()
        wanted = " or ".join(self.names)
        node = socket.gethostname()
        if found is None:
            raise UnavailableError(
                f"a worker on {node} has no NVIDIA driver, where trials need {wanted}",
                hint="start that node of the cluster without the resource of this GPU type",
            )
        sizes = [s for s in self.sizes_bytes if abs(found.total_bytes - s) <= MEMORY_TOLERANCE * s]
        if found.name not in self.names or not sizes:
            expected = " or ".join(format_gib(size) for size in self.sizes_bytes)
            raise UnavailableError(
                f"a worker on {node} has {found.name} with {format_gib(found.total_bytes)}, "
                f"where trials need {wanted} with {expected}",
                hint="start that node of the cluster with the resource of its own GPU type",
            )
        return self.make()


@dataclass(frozen=True, slots=True)
class Facts:
    """A machine's own answer: its first GPU, None without a driver, and its libraries."""

    identity: nvml.DeviceIdentity | None
    versions: Mapping[str, str]
    emulated: bool


def look(identify: Callable[[], nvml.DeviceIdentity | None]) -> Facts:
    """The facts of this machine; runs on a node of a cluster, before its first trial."""
    return Facts(identify(), outcome_versions(), is_emulated())
