"""What the device memory of this process holds at its peak, and which line of code allocated it.

PyTorch's own history of its allocator is the source: every allocation with its Python stack.
"""

from __future__ import annotations

import bisect
import ctypes
import linecache
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tuner.emulator.inside.faults import guarded
from tuner.emulator.inside.lines import places

_ROUND = 512
"""PyTorch's allocator rounds sizes up to this (CUDACachingAllocator.cpp, kMinBlockSize)."""

_LOSS_WORDS = ("logits", "lm_head", "cross_entropy", "loss")
"""Words in the source line of an allocation that tell logits and loss from other activations."""

_MOST_ROWS = 40

_NOT_KNOWN: dict[str, Any] = {
    "phase_peak_bytes": {},
    "peak_phase": "",
    "loaded_bytes": 0,
    "breakdown": {},
    "allocations": [],
}
"""Of a device whose allocator keeps no history."""


class MemoryWatch:
    """Records the history of PyTorch's allocator from the first use of CUDA on."""

    def __init__(self) -> None:
        self._marks: list[tuple[int, str, int]] = [(0, "load", 0)]
        self._gradients: dict[int, list[int]] = {}  # address -> times at which it was one
        self._backward_line: list[tuple[int, str | None]] = []
        self._highest: Counter[tuple[int, str]] = Counter()
        self._has_history = False

    def install(self) -> None:
        """Record as soon as CUDA is there; keep peaks that the program sets back."""
        import torch

        torch.cuda._lazy_call(self._record)  # type: ignore[no-untyped-call]
        reset: Any = torch._C._cuda_resetPeakMemoryStats

        def keep_and_reset(device: int) -> None:
            self._keep_peaks(device)
            reset(device)

        torch._C._cuda_resetPeakMemoryStats = keep_and_reset

    @guarded("the history of the allocator")
    def _record(self) -> None:
        import torch

        # CUDA's own allocator (cudaMallocAsync) keeps no history: only its peaks are known.
        self._has_history = torch.cuda.memory.get_allocator_backend() == "native"
        if self._has_history:
            torch.cuda.memory._record_memory_history(
                enabled="all", context="alloc", stacks="python", max_entries=sys.maxsize
            )

    def mark(self, phase: str, step: int) -> None:
        """A phase begins now."""
        self._marks.append((_now_us(), phase, step))

    def note_backward(self, line: str | None) -> None:
        """The program's line that runs the backward pass which begins now."""
        self._backward_line.append((_now_us(), line))

    def note_gradients(self, optimizer: Any) -> None:
        """The gradients that an optimizer is about to use."""
        now = _now_us()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.grad.is_cuda:
                    self._gradients.setdefault(_address(parameter.grad), []).append(now)

    @guarded("the snapshot of the memory")
    def save(self, path: str) -> None:
        """PyTorch's own snapshot, for its viewer (pytorch.org/memory_viz)."""
        import torch

        torch.cuda.memory._dump_snapshot(path)  # type: ignore[no-untyped-call]

    @guarded("the peak of the memory")
    def _keep_peaks(self, device: int) -> None:
        import torch

        stats = torch.cuda.memory_stats(device)
        for name in ("allocated_bytes", "reserved_bytes"):
            key = (device, name)
            self._highest[key] = max(self._highest[key], stats.get(f"{name}.all.peak", 0))

    @guarded("what the memory holds at its peak")
    def result(self, optimizers: list[Any]) -> list[dict[str, Any]]:
        """One entry for each device that this process has used."""
        import torch

        kinds = _Kinds(optimizers, self._gradients)
        count = torch.cuda.device_count()
        history: list[list[dict[str, Any]]] = [[]] * count
        if self._has_history:
            history = torch.cuda.memory._snapshot()["device_traces"]
        return [
            self._device(number, history[number], kinds)
            for number in range(count)
            if history[number] or torch.cuda.max_memory_allocated(number)
        ]

    def _device(self, device: int, entries: list[dict[str, Any]], kinds: _Kinds) -> dict[str, Any]:
        import torch

        self._keep_peaks(device)
        stats = torch.cuda.memory_stats(device)
        return {
            "device": device,
            "physical": _physical(device),
            "peak_allocated_bytes": self._highest[device, "allocated_bytes"],
            "peak_reserved_bytes": self._highest[device, "reserved_bytes"],
            "alloc_retries": stats.get("num_alloc_retries", 0),
            "ooms": stats.get("num_ooms", 0),
            "trainable_params": kinds.trainable_params,
            **(self._peak(entries, kinds) if entries else _NOT_KNOWN),
        }

    # -- the peak -------------------------------------------------------------------------------

    def _peak(self, entries: list[dict[str, Any]], kinds: _Kinds) -> dict[str, Any]:
        blocks = _blocks(entries)
        at, peaks = self._highest_by_phase(entries)
        loaded = self._allocated_at(entries, self._first_mark("forward"))
        live = [one for one in blocks if one["born"] <= at < one["died"]]
        logits = {
            one["size"] for one in blocks if self._phase_at(one) == "forward" and _is_loss(one)
        }
        parts: Counter[str] = Counter()
        rows: dict[tuple[str, str, str], list[int]] = {}
        for one in live:
            kind = self._kind_of(one, kinds, logits, entries[at]["time_us"])
            parts[kind] += one["size"]
            row = rows.setdefault((kind, *self._place_of(one)), [0, 0])
            row[0] += one["size"]
            row[1] += 1
        ordered = sorted(rows.items(), key=lambda item: -item[1][0])
        return {
            "phase_peak_bytes": peaks,
            "peak_phase": max(peaks, key=lambda name: peaks[name], default=""),
            "loaded_bytes": loaded,
            "breakdown": dict(parts),
            "allocations": [
                {"kind": kind, "where": where, "line": line, "bytes": size, "count": count}
                for (kind, where, line), (size, count) in ordered[:_MOST_ROWS]
            ],
        }

    def _highest_by_phase(self, entries: list[dict[str, Any]]) -> tuple[int, dict[str, int]]:
        """The number of the entry at the highest peak, and the peak of each phase in bytes."""
        allocated = highest = at = 0
        peaks: dict[str, int] = {}
        for number, entry in enumerate(entries):
            allocated += _change(entry)
            phase = self._phase_of(entry["time_us"])
            peaks[phase] = max(peaks.get(phase, 0), allocated)
            if allocated > highest:
                highest, at = allocated, number
        return at, peaks

    def _allocated_at(self, entries: list[dict[str, Any]], time_us: int) -> int:
        return sum(_change(entry) for entry in entries if entry["time_us"] < time_us)

    def _first_mark(self, phase: str) -> int:
        return next((t for t, name, _ in self._marks if name == phase), sys.maxsize)

    def _phase_of(self, time_us: int) -> str:
        return self._marks[bisect.bisect_right(self._marks, (time_us, "~", 0)) - 1][1]

    def _phase_at(self, block: dict[str, Any]) -> str:
        if "phase" not in block:
            block["phase"] = self._phase_of(block["time_us"])
        return str(block["phase"])

    def _kind_of(self, block: dict[str, Any], kinds: _Kinds, logits: set[int], peak_us: int) -> str:
        phase = self._phase_at(block)
        known = kinds.of(block, phase)
        if known is not None:
            return known
        if _is_loss(block) or (phase == "backward" and block["size"] in logits):
            return "logits_and_loss"
        recomputed = any(f["filename"].endswith("utils/checkpoint.py") for f in block["frames"])
        kept = phase == "forward" and self._phase_of(peak_us) == "backward"
        outlives = phase == "forward" and block["died_us"] >= self._next(peak_us)
        return "activations" if kept or recomputed or outlives else "temporary"

    def _next(self, time_us: int) -> int:
        """When the phase that runs at `time_us` ends."""
        number = bisect.bisect_right(self._marks, (time_us, "~", 0))
        return self._marks[number][0] if number < len(self._marks) else sys.maxsize

    def _place_of(self, block: dict[str, Any]) -> tuple[str, str]:
        """The library's line and the program's line of an allocation."""
        own, library = places((f["filename"], f["line"], f["name"]) for f in block["frames"])
        if own is None and self._backward_line and self._phase_at(block) == "backward":
            number = bisect.bisect_right(self._backward_line, (block["time_us"], "~")) - 1
            own = self._backward_line[max(number, 0)][1]
            library = library or "the backward pass"
        return library or "PyTorch", own or ""


class _Kinds:
    """Addresses of what optimizers know: parameters, gradients and states."""

    def __init__(self, optimizers: list[Any], gradients: dict[int, list[int]]) -> None:
        self._gradients = gradients
        self.trainable: set[int] = set()
        self.states: set[int] = set()
        self.trainable_params = 0
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    self.trainable_params += parameter.numel()
                    self.trainable.add(_address(parameter))
            for state in optimizer.state.values():
                self._add_state(state)
        self.trainable_kind = "adapters" if self._has_frozen(optimizers) else "weights"

    def _add_state(self, state: Any) -> None:
        import torch

        if isinstance(state, torch.Tensor):
            if state.is_cuda:
                self.states.add(_address(state))
        elif isinstance(state, dict):
            for value in state.values():
                self._add_state(value)

    @staticmethod
    def _has_frozen(optimizers: list[Any]) -> bool:
        """Whether modules hold more parameters on the device than optimizers train."""
        import gc

        import torch

        known = {id(p) for o in optimizers for g in o.param_groups for p in g["params"]}
        return any(
            issubclass(type(one), torch.nn.Parameter) and one.is_cuda and id(one) not in known
            for one in gc.get_objects()
        )

    def of(self, block: dict[str, Any], phase: str) -> str | None:
        """What optimizers and loading say of a block that was allocated in `phase`."""
        address = block["addr"]
        if address in self.trainable:
            return self.trainable_kind
        if phase == "load":  # what does not stay is the first batch
            return "weights" if block["died_us"] == sys.maxsize else "activations"
        if self._is_gradient(address, block["time_us"], block["died_us"]):
            return "gradients"
        if address in self.states and phase == "optimizer":
            return "optimizer_state"
        return None

    def _is_gradient(self, address: int, born_us: int, died_us: int) -> bool:
        """Whether a block was a gradient when an optimizer used it."""
        times = self._gradients.get(address, ())
        return any(born_us <= time_us <= died_us for time_us in times)


def _blocks(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every block: entry of its birth with "born", "died" (entry numbers), "died_us", "size"."""
    live: dict[int, dict[str, Any]] = {}
    found = []
    for number, entry in enumerate(entries):
        if entry["action"] == "alloc":
            block = {**entry, "born": number, "died": sys.maxsize, "died_us": sys.maxsize}
            block["size"] = _rounded(entry["size"])
            live[entry["addr"]] = block
            found.append(block)
        elif entry["action"] == "free_requested" and entry["addr"] in live:
            block = live.pop(entry["addr"])
            block["died"], block["died_us"] = number, entry["time_us"]
    return found


def _change(entry: dict[str, Any]) -> int:
    if entry["action"] == "alloc":
        return _rounded(entry["size"])
    return -_rounded(entry["size"]) if entry["action"] == "free_requested" else 0


def _rounded(size: int) -> int:
    return -(-size // _ROUND) * _ROUND


def _is_loss(block: dict[str, Any]) -> bool:
    if "is_loss" not in block:
        block["is_loss"] = any(
            _speaks_of_loss(f["filename"], f["line"]) for f in block["frames"][:6]
        )
    return bool(block["is_loss"])


def _speaks_of_loss(filename: str, line: int) -> bool:
    if os.sep + "torch" + os.sep in filename and "nn" not in filename:
        return False
    text = linecache.getline(filename, line)
    return any(word in text for word in _LOSS_WORDS)


def _address(tensor: Any) -> int:
    local = getattr(tensor, "_local_tensor", tensor)  # of a sharded tensor, its shard
    return int(local.untyped_storage().data_ptr())


def _now_us() -> int:
    return time.time_ns() // 1000


def _physical(ordinal: int) -> int:
    """The session's number of a device that CUDA_VISIBLE_DEVICES shows as `ordinal`."""
    library = Path(os.environ["TUNER_EMULATOR_LIBRARIES"]) / "libtuner_device.so"
    return int(ctypes.CDLL(str(library)).emu_physical(ordinal))
