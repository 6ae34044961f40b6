"""pytest on a GPU that is not there: the fixture `emulated_gpu`, and `pytest --emulated-gpu NAME`.

pytest imports this in every environment that has tuner, so all but pytest is imported at its use.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

import pytest

if TYPE_CHECKING:
    from tuner.emulator.machine import Machine

_VARIABLE = "TUNER_PYTEST_GPU"
"""In the environment of an emulated session: its `--emulated-gpu`."""

_PEAK, _MADE_UP = "emulated_peak_allocated_bytes", "emulated_values_made_up"
"""Properties of a test: they reach JUnit's XML, and pass from workers of xdist to their session."""


class EmulatedGpu(Protocol):
    """The fixture `emulated_gpu`: makes a machine with emulated GPUs of one type."""

    def __call__(self, name: str, count: int = 1) -> Machine:
        """A machine with `count` GPUs of a type of `tuner gpus`."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of emulated sessions."""
    group = parser.getgroup("tuner")
    group.addoption(
        "--emulated-gpu",
        metavar="NAME",
        help="Run all tests on an emulated GPU, e.g. a100_80gb (`tuner gpus` lists them).",
    )
    group.addoption(
        "--emulated-gpus", metavar="N", type=int, default=1, help="Number of GPUs. [default: 1]"
    )
    group.addoption(
        "--emulated-gpu-report",
        action="store_true",
        help="Print the peak of allocated GPU memory by test.",
    )


@pytest.fixture
def emulated_gpu() -> EmulatedGpu:
    """Make a machine with emulated GPUs: `emulated_gpu("a100_80gb").call(function, ...)`.

    The test is skipped, with the reason, where nothing can be emulated.
    """
    from tuner.emulator.build import unavailable
    from tuner.emulator.machine import Machine
    from tuner.space.gpus import get_gpu

    if (reason := unavailable()) is not None:
        pytest.skip(reason)
    return lambda name, count=1: Machine(get_gpu(name), count)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> int | None:
    """Run the session again in a process with an emulated GPU; its exit status is this one's."""
    name, inside = config.option.emulated_gpu, os.environ.get(_VARIABLE)
    if config.option.emulated_gpu_report and not name:
        raise pytest.UsageError("--emulated-gpu-report needs --emulated-gpu NAME")
    if not name or inside == name:
        return None
    from tuner.core.errors import EXIT_UNAVAILABLE, TunerError
    from tuner.emulator.ending import own_fault
    from tuner.emulator.here import is_emulated
    from tuner.emulator.session import Session
    from tuner.space.gpus import get_gpu

    if is_emulated():
        raise pytest.UsageError("--emulated-gpu: this process has an emulated GPU already")
    try:
        with Session(get_gpu(name), count=config.option.emulated_gpus) as session:
            status = _run_again(config, session.environment({**os.environ, _VARIABLE: name}))
            if (fault := own_fault(session.events())) is None:
                return status
    except TunerError as error:
        raise pytest.UsageError(f"--emulated-gpu: {error.message}: {error.hint}") from None
    sys.stderr.write(f"{fault}\n")
    return status or EXIT_UNAVAILABLE


def _run_again(config: pytest.Config, environment: dict[str, str]) -> int:
    from tuner.core.environment import this_python

    given = config.invocation_params
    # `python -m pytest` finds modules in the working folder, and `pytest` doesn't.
    options = [] if {"", str(given.dir)} & set(sys.path) else ["-P"]
    process = subprocess.Popen(  # noqa: S603 - pytest itself
        [this_python(), *options, "-m", "pytest", *map(str, given.args)],
        cwd=given.dir,
        env=environment,
    )
    # Ctrl-C reaches that process as well, which ends with its summary.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return process.wait()
    finally:
        signal.signal(signal.SIGINT, before)


def pytest_configure(config: pytest.Config) -> None:
    """Watch the tests of an emulated session."""
    if os.environ.get(_VARIABLE) and config.option.emulated_gpu:
        config.pluginmanager.register(_Watch(config.option.emulated_gpu_report), "tuner-emulated")


class _Watch:
    """Notes the peak memory of each test, and the tests that read made-up values."""

    def __init__(self, reports: bool) -> None:
        self._reports = reports
        self._highest = self._made_up = 0
        self._reset: Any = None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Iterator[None]:
        """Start each test with a new peak."""
        if (torch := sys.modules.get("torch")) is not None:
            self._keep_peaks(torch)
            if torch.cuda.is_initialized():
                torch.cuda.reset_peak_memory_stats()
        self._highest, self._made_up = 0, _values_made_up()
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[None]:
        """Give the report of each phase what was found up to its end."""
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            for device in range(torch.cuda.device_count()):
                self._keep_peak(torch, device)
        found = {_PEAK: self._highest, _MADE_UP: _values_made_up() - self._made_up}
        kept = [one for one in item.user_properties if one[0] not in found]
        item.user_properties[:] = [*kept, *found.items()]
        return (yield)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print the number of tests that read made-up values, and the peaks, highest first."""
        peaks: dict[str, int] = {}
        made_up: set[str] = set()
        for report in itertools.chain(*terminalreporter.stats.values()):
            found = dict(getattr(report, "user_properties", ()))
            if _PEAK in found:
                peaks[report.nodeid] = max(found[_PEAK], peaks.get(report.nodeid, 0))
            if found.get(_MADE_UP):
                made_up.add(report.nodeid)
        if self._reports:
            terminalreporter.section("emulated: peak allocated memory by test")
            for name in sorted(peaks, key=lambda name: -peaks[name]):
                note = " (read made-up values)" if name in made_up else ""
                terminalreporter.write_line(f"{peaks[name] / 2**20:12,.1f} MiB  {name}{note}")
        if made_up:
            terminalreporter.write_line(
                f"{len(made_up)} of {len(peaks)} tests read values that the emulated GPU made up:"
                " their assertions of numbers mean nothing"
            )

    def _keep_peaks(self, torch: Any) -> None:
        """Keep the peak whenever a test resets it."""
        if self._reset is not None:
            return
        self._reset = torch._C._cuda_resetPeakMemoryStats

        def keep_and_reset(device: int) -> None:
            self._keep_peak(torch, device)
            self._reset(device)

        torch._C._cuda_resetPeakMemoryStats = keep_and_reset

    def _keep_peak(self, torch: Any, device: int) -> None:
        self._highest = max(self._highest, torch.cuda.max_memory_allocated(device))


def _values_made_up() -> int:
    """Reads by this process of values that the emulated GPU made up."""
    activate = sys.modules.get("tuner.emulator.inside.activate")
    unknowns = activate.ACTIVE.get("unknowns") if activate is not None else None
    return 0 if unknowns is None else int(unknowns.times)
