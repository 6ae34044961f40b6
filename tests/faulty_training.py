"""Real training that goes wrong, in the phase and way that the knob `fault` names.

The workload is `causal_lm` with a hook of PyTorch's in the phase that is to fail, so that a
fault happens where the real one would: inside a module's forward, inside the autograd engine,
inside the optimizer's step. The body is the product's own, except that the kernel's counter of
OOM kills is read from a file, so that a test can play the kernel.
"""

import ctypes
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from runner_bodies import CLOCK, family, obey_clock

from tuner.core import processes
from tuner.core.records import Configuration
from tuner.predict.training.causal_lm import CausalLM
from tuner.trial import device as trial_device
from tuner.trial import steps
from tuner.trial.base import MeasureOptions, TrialJob
from tuner.trial.training import Training

COUNTER = "TUNER_TEST_OOM_KILLS"
"""Environment variable with the path of a file in the form of cgroup's memory.events."""
PIDS = "TUNER_TEST_PIDS"
"""Environment variable with the path of a file in which trials leave process ids."""

TOO_MUCH_BYTES = 1 << 40
"""More than any limit of these tests, and than any machine or GPU has."""


def allocate(device: str) -> None:
    """Ask the device's own allocator for too much."""
    torch.empty(TOO_MUCH_BYTES, dtype=torch.uint8, device=device)


def fill_up(device: str) -> None:
    """Take memory bit by bit until there is none: the request that fails is a small one."""
    held = []
    while True:
        held.append(torch.ones(4 << 20, dtype=torch.uint8, device=device))


def killed_by_the_kernel(device: str) -> None:
    counter = Path(os.environ[COUNTER])
    count = int(counter.read_text().split()[1])
    counter.write_text(f"oom_kill {count + 1}\n")
    os.kill(os.getpid(), signal.SIGKILL)


def hang(device: str) -> None:
    pids = [os.getpid(), *family()]
    with Path(os.environ[PIDS]).open("a") as file:
        file.write("".join(f"{pid}\n" for pid in pids))
    Path(os.environ[CLOCK]).touch()  # nobody needs to wait for a time limit
    time.sleep(600)


def fill_the_disk(device: str) -> None:
    with Path("/dev/full").open("wb") as file:
        torch.save(torch.ones(1000), file)


def assert_on_device(device: str) -> None:
    """An index that does not exist: a kernel's assertion poisons the context, for real."""
    torch.zeros(2, device=device)[torch.tensor([5], device=device)]
    torch.cuda.synchronize(device)


def raising(error: Exception) -> Callable[[str], None]:
    def fault(device: str) -> None:
        raise error

    return fault


FAULTS: dict[str, tuple[str, Callable[[str], None]]] = {
    "oom_load": ("load", allocate),
    "oom_forward": ("forward", allocate),
    "oom_backward": ("backward", allocate),
    "oom_optimizer": ("optimizer", allocate),
    "filled_up": ("forward", fill_up),
    "host_oom": ("forward", killed_by_the_kernel),
    "segfault": ("backward", lambda device: ctypes.string_at(0)),
    "hang": ("forward", hang),
    "killed": ("optimizer", lambda device: os.kill(os.getpid(), signal.SIGKILL)),
    "poisoned": (
        "backward",
        raising(RuntimeError("CUDA error: an illegal memory access was encountered")),
    ),
    "asserted": ("forward", raising(RuntimeError("CUDA error: device-side assert triggered"))),
    "asserted_on_device": ("forward", assert_on_device),
    "disk_full": ("optimizer", fill_the_disk),
    "wrong": ("forward", raising(TypeError("expected a tensor"))),
}


class Faulty(CausalLM):
    """`causal_lm` with one fault, or none."""

    def open(self, model_config: Any, configuration: Configuration, environment: Any) -> Any:
        fault = str(configuration["fault"])
        session = super().open(model_config, configuration, environment)
        if fault == "not_finite":
            next(p for p in session.model.parameters() if p.requires_grad).data.fill_(torch.nan)
        if fault == "thrashing":
            _count_retries(session)
        if fault in FAULTS:
            phase, act = FAULTS[fault]
            self._strike(phase, lambda: act(environment.device), session)
        return session

    def _strike(self, phase: str, act: Callable[[], None], session: Any) -> None:
        """In the second step: the first one shows that all was well until then."""
        calls = 0

        def second(*_: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == 2:
                act()

        if phase == "load":
            act()
        elif phase == "forward":
            session.model.register_forward_pre_hook(second)
        elif phase == "backward":
            next(p for p in session.model.parameters() if p.requires_grad).register_hook(second)
        else:
            session.optimizer.register_step_pre_hook(second)


def _count_retries(session: Any) -> None:
    """The allocator's counter as it is where each micro-step finds too little memory at first."""
    retries = 0

    def one_more(*_: Any) -> None:
        nonlocal retries
        retries += 1

    session.model.register_forward_pre_hook(one_more)
    for module in (trial_device, steps):  # of this process of one trial, which ends with it
        vars(module)["alloc_retries"] = lambda device: retries


class FaultyTraining(Training):
    """The product's body, with a kernel that tests can play."""

    def prepare(self, job: TrialJob, options: MeasureOptions) -> None:
        super().prepare(job, options)
        obey_clock()
        if COUNTER in os.environ:
            processes._counters = lambda: iter([Path(os.environ[COUNTER])])


WORKLOAD = Faulty()
BODY = FaultyTraining()
