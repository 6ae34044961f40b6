"""One emulated machine: its devices, the accounts of its processes, and their reports.

All shared data is in memory files of this process, which the others open through /proc: however
this process ends, no data is left. Programs whose files are kept apart may not look there, and have
the data among these files. Programs that still run end themselves.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from tuner.core.errors import InputError, UnavailableError
from tuner.core.gpu import Gpu
from tuner.cost.library_memory import nccl_bytes
from tuner.emulator.build import START, TorchBuild, build, find_torch
from tuner.emulator.here import DEVICE_VARIABLE, LIBRARIES_VARIABLE
from tuner.emulator.rates import (
    BUS_BITS,
    clock_khz,
    gpu_to_dict,
    memory_clock_khz,
    multiprocessor_of,
    shared_kib_in_bytes,
)

ON_PATH = Path(__file__).parent / "inside" / "path"

EVENTS_VARIABLE = "TUNER_EMULATOR_EVENTS"
SETTINGS_VARIABLE = "TUNER_EMULATOR_SETTINGS"
PACKAGE_VARIABLE = "TUNER_EMULATOR_PACKAGE"
ASYNC_LOADING = "HF_DEACTIVATE_ASYNC_LOAD"
FILES_VARIABLE = "TUNER_FILES"

MOST_DEVICES = 64
_NCCL_RANKS = 8
_MAGIC = 0x3145554E52455554
_VERSION = 5


# The structures of device/device.h, field by field.
_CONFIG_NUMBERS = (
    "capability_major", "capability_minor", "multiprocessors", "shared_per_block_optin_bytes",
    "shared_per_multiprocessor_bytes", "threads_per_multiprocessor", "blocks_per_multiprocessor",
    "l2_bytes", "clock_khz", "memory_clock_khz", "memory_bus_bits", "power_limit_mw", "owner_pid",
    "seed", "one_rank",
)  # fmt: skip
_ACCOUNT_NUMBERS = (
    "used_bytes", "peak_bytes", "at_running_bytes", "at_peak_bytes", "managed_bytes",
    "managed_peak_bytes", "pinned_bytes", "refused_bytes", "refused_ns", "launches",
    "launches_unpriced",
)  # fmt: skip


class _Config(ctypes.Structure):
    _fields_ = (
        ("magic", ctypes.c_uint64),
        ("version", ctypes.c_uint32),
        ("device_count", ctypes.c_uint32),
        ("memory_bytes", ctypes.c_uint64),
        ("context_bytes", ctypes.c_uint64),
        ("nccl_bytes", ctypes.c_uint64 * (_NCCL_RANKS + 1)),
        *((name, ctypes.c_int32) for name in _CONFIG_NUMBERS),
        ("name", ctypes.c_char * 256),
    )


class _Account(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_int32),
        ("device", ctypes.c_int32),
        *((name, ctypes.c_uint64) for name in _ACCOUNT_NUMBERS),
        ("command", ctypes.c_char * 120),
    )


class _Device(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64) for name in ("peak_bytes", "running_bytes", "given_up_bytes")
    )


class _Unknown(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char * 120), ("calls", ctypes.c_uint64))


class _Shared(ctypes.Structure):
    _fields_ = (
        ("config", _Config),
        ("lock", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("devices", _Device * MOST_DEVICES),
        ("accounts", _Account * 512),
        ("unknown", _Unknown * 2048),
    )


@dataclass(frozen=True, slots=True)
class Account:
    """The memory use of one process on one device, in bytes, including its CUDA context."""

    pid: int
    device: int
    used_bytes: int
    peak_bytes: int
    managed_peak_bytes: int
    refused_bytes: int
    """The last request that the device had no room for and never met; 0 if it met all."""
    refused_ns: int
    """The time of the refusal, by `time.monotonic_ns`."""


@dataclass(frozen=True, slots=True)
class DevicePeak:
    """The most memory that all processes held together on one device, in bytes.

    `holders` are the processes that held it then, by their commands, the largest first.
    `given_up_bytes` is the most that was held in a step which ended with a request that PyTorch
    gave up; that is not in `bytes`: it tells how much memory there is, not how much is needed.
    """

    device: int
    bytes: int
    holders: tuple[tuple[str, int], ...]
    given_up_bytes: int = 0


def _shared_file(name: str, folder: Path | None) -> tuple[int, str]:
    """A file that is shared with emulated processes, and the path by which they open it."""
    if folder is None:
        file = os.memfd_create(f"tuner-emulator-{name}")
        return file, f"/proc/{os.getpid()}/fd/{file}"
    path = folder / name
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), str(path)


CACHES = ("HF_HOME", "XDG_CACHE_HOME", "TRITON_CACHE_DIR")
"""Variables that name folders of caches, which emulated programs share with others."""


@contextlib.contextmanager
def apart(base: Mapping[str, str], cwd: Path) -> Iterator[tuple[Path, dict[str, str]]]:
    """A folder for the files of a program in `cwd`, and `base` with what keeps them apart.

    Only the program and the processes that it starts see what they write, change and delete
    (device/files.c). Caches, which downloads fill, stay where they are.
    """
    home = Path(base.get("HOME") or Path.home())
    kept: list[str | Path] = [
        home / ".cache",
        home / ".triton",
        *(base[name] for name in CACHES if base.get(name)),
    ]
    with tempfile.TemporaryDirectory(prefix="tuner-scratch-", ignore_cleanup_errors=True) as made:
        scratch = Path(made).resolve()
        for name in ("new", "gone"):
            (scratch / name).mkdir()
        (scratch / "changed").write_bytes(bytes(8))
        here = cwd.resolve()
        folders = [Path(one).resolve() for one in kept]
        shared = [one for one in folders if one.is_dir() and not here.is_relative_to(one)]
        told = {**base, FILES_VARIABLE: str(scratch)}
        told["TUNER_FILES_KEPT"] = "\n".join(map(str, [*shared, "/dev", "/proc", "/sys"]))
        yield scratch, told


class Session:
    """`count` emulated devices of one type; a context manager.

    `seed` seeds the made-up values. With `one_rank`, one process stands for all ranks of a training
    (inside/one_rank.py). `settings` are read by the emulated processes (`tuner.emulator.inside`).
    `folder` is that of `apart`, if the program's files are kept apart.
    Raises `UnavailableError` if nothing can be emulated, and `InputError` for a GPU type that
    cannot be emulated.
    """

    def __init__(
        self,
        gpu: Gpu,
        *,
        count: int = 1,
        torch: TorchBuild | None = None,
        seed: int = 0,
        one_rank: bool = False,
        settings: Mapping[str, Any] | None = None,
        folder: Path | None = None,
    ) -> None:
        if not 1 <= count <= MOST_DEVICES:
            raise InputError(f"{count} GPUs cannot be emulated", hint=f"1 to {MOST_DEVICES} can be")
        self.gpu = gpu
        self.count = count
        self._settings = {
            "seed": seed,
            "one_rank": one_rank,
            "rates": gpu_to_dict(gpu),
            **(settings or {}),
        }
        self._libraries = build(torch or find_torch())
        config = _config(gpu, count, seed, one_rank)
        self._file, self._place = _shared_file("device", folder)
        os.ftruncate(self._file, ctypes.sizeof(_Shared))
        self._memory = mmap.mmap(self._file, ctypes.sizeof(_Shared))
        self._shared = _Shared.from_buffer(self._memory)
        self._shared.config = config
        self._events, self._events_place = _shared_file("events", folder)
        self._read = 0

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the machine; programs that still run on it end themselves."""
        if self._file < 0:
            return
        del self._shared
        self._memory.close()
        os.close(self._file)
        os.close(self._events)
        self._file = -1

    def environment(self, base: Mapping[str, str] | None = None) -> dict[str, str]:
        """`base` with the variables that a program on this machine needs.

        Raises `UnavailableError` if its files are to be kept apart (`apart`) and can't be.
        """
        before = dict(os.environ if base is None else base)
        paths = [str(ON_PATH), *filter(None, [before.get("PYTHONPATH")])]
        return {
            **before,
            "PYTHONPATH": os.pathsep.join(paths),
            **self._preloaded(before),
            DEVICE_VARIABLE: self._place,
            EVENTS_VARIABLE: self._events_place,
            "TUNER_EMULATOR_OWNER": str(os.getpid()),
            LIBRARIES_VARIABLE: str(self._libraries),
            SETTINGS_VARIABLE: json.dumps(self._settings),
            PACKAGE_VARIABLE: str(Path(__file__).parents[2]),
            # transformers loads weights with threads. On a real device their copies wait for the
            # bus. Here they would run ahead and put all weights on the device at once.
            ASYNC_LOADING: before.get(ASYNC_LOADING, "1"),
            # Triton looks for the driver's library here.
            "TRITON_LIBCUDA_PATH": str(self._libraries),
        }

    def _preloaded(self, base: Mapping[str, str]) -> dict[str, str]:
        """The variables of device/start.c and device/files.c, which LD_PRELOAD loads first."""
        library = str(self._libraries / START)
        if " " in library or ":" in library:  # LD_PRELOAD separates its paths by both
            if FILES_VARIABLE in base:
                raise UnavailableError(
                    f"your files can't be kept apart: {library!r} has a space or a colon",
                    hint="set TUNER_CACHE to a folder without",
                )
            return {}
        preloaded = ":".join(filter(None, [library, base.get("LD_PRELOAD")]))
        return {"TUNER_EMULATOR_PATH": str(ON_PATH), "LD_PRELOAD": preloaded}

    def accounts(self) -> list[Account]:
        """The account of every process that has used a device, ended ones included."""
        names = [field.name for field in fields(Account)]
        return [
            Account(*(getattr(one, name) for name in names))
            for one in self._shared.accounts
            if one.pid
        ]

    def peaks(self) -> list[DevicePeak]:
        """The peak of every device that was used."""
        found = []
        for number, one in enumerate(self._shared.devices):
            name = "at_running_bytes" if one.running_bytes > one.peak_bytes else "at_peak_bytes"
            held = [
                (account.command.decode(errors="replace").strip(), getattr(account, name))
                for account in self._shared.accounts
                if account.pid and account.device == number and getattr(account, name)
            ]
            held.sort(key=lambda holder: -holder[1])
            peak_bytes = max(one.peak_bytes, one.running_bytes)
            if peak_bytes or one.given_up_bytes:
                found.append(DevicePeak(number, peak_bytes, tuple(held), one.given_up_bytes))
        return found

    def unknown_calls(self) -> dict[str, int]:
        """Calls of functions that the emulator does not know, by name."""
        return {one.name.decode(): one.calls for one in self._shared.unknown if one.calls}

    def events(self) -> Iterator[dict[str, Any]]:
        """The events that processes have sent since the last call, in order of arrival."""
        size = os.fstat(self._events).st_size
        content = os.pread(self._events, size - self._read, self._read)
        whole, newline, _ = content.rpartition(b"\n")
        self._read += len(whole) + len(newline)
        for line in whole.splitlines():
            yield json.loads(line)


def _config(gpu: Gpu, count: int, seed: int, one_rank: bool) -> _Config:
    one = multiprocessor_of(gpu)
    shared, per_block = shared_kib_in_bytes(gpu)
    major, minor = gpu.compute_capability
    return _Config(
        magic=_MAGIC,
        version=_VERSION,
        device_count=count,
        memory_bytes=gpu.memory_bytes,
        context_bytes=gpu.context_bytes,
        nccl_bytes=(0, *(nccl_bytes(gpu, ranks) or 0 for ranks in range(1, _NCCL_RANKS + 1))),
        capability_major=major,
        capability_minor=minor,
        multiprocessors=gpu.sm_count,
        shared_per_block_optin_bytes=per_block,
        shared_per_multiprocessor_bytes=shared,
        threads_per_multiprocessor=one.threads,
        blocks_per_multiprocessor=one.blocks,
        l2_bytes=gpu.l2_bytes or 0,
        clock_khz=clock_khz(gpu),
        memory_clock_khz=memory_clock_khz(gpu),
        memory_bus_bits=BUS_BITS,
        power_limit_mw=round((gpu.power_w or 0) * 1000),
        owner_pid=os.getpid(),
        seed=seed,
        one_rank=one_rank,
        name=(gpu.device_names[0] if gpu.device_names else gpu.name).encode()[:255],
    )
