"""The verdict on the host's memory, from the results of the processes."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from tests.unit.test_emulated_ending import emulation
from tuner.app.cli.emulated_text import host_phases_text, reason_text
from tuner.core.records import Verdict
from tuner.core.units import GIB
from tuner.emulator.emulation import EmulatedDeviceUse, Emulation, _HostUse, host_use
from tuner.emulator.ending import Ended


def result(*, ranks: int = 1, **phases: tuple[float, float]) -> dict[str, Any]:
    sizes = {phase: [int(size * GIB) for size in pair] for phase, pair in phases.items()}
    return {"host": {"phases": sizes, "own_bytes": GIB}, "stands_for": ranks}


def emulated(host: _HostUse | None) -> Emulation:
    """A run of three steps that takes no memory of the device."""
    sizes = dict.fromkeys(field.name for field in dataclasses.fields(EmulatedDeviceUse))
    use = EmulatedDeviceUse(**{**sizes, "device": 0, "device_bytes": 0, "growth": ()})  # type: ignore[arg-type]
    return emulation(ended=Ended.END, steps=3, devices=(use,), host=host)


def test_a_run_that_takes_more_than_the_stated_memory_does_not_fit() -> None:
    found = [result(ranks=2, steps=(10, 2), end=(29.9, 0), save=(30, 0))]
    fits = emulated(host_use(found, 64 * GIB))
    assert fits.fits
    assert host_phases_text(fits) == "save 60.0, end 59.8, steps 24.0 of 64.0 GiB"

    killed = emulated(host_use(found, 48 * GIB))
    assert (killed.fits, killed.verdict, killed.exit_code) == (False, Verdict.DOES_NOT_FIT, 1)
    assert killed.host is not None
    told = json.loads(json.dumps(killed.host.to_dict()))
    assert (told["peak_phase"], told["phases"]["save"], told["is_killed"]) == (
        "save",
        60 * GIB,
        True,
    )
    assert reason_text(killed) == (
        "host memory: 60.0 GiB in save, of 48.0 GiB: Linux kills it (out-of-memory killer)"
    )


def test_this_machines_memory_decides_nothing_and_shows_only_when_it_is_near() -> None:
    on_larger_gpu = emulated(_HostUse({"save": 2}, 0, 0, 64, is_stated=False))
    assert (on_larger_gpu.fits, host_phases_text(on_larger_gpu)) == (True, "")
    over = emulated(_HostUse({"save": 71 * GIB}, 0, 0, 64 * GIB, is_stated=False))
    assert over.fits
    assert host_phases_text(over) == (
        "save 71.0 of this machine's 64.0 GiB: Linux would kill it here"
    )


def test_processes_without_an_account_leave_it_unknown() -> None:
    assert host_use([{"host": None, "stands_for": 1}], None) is None
