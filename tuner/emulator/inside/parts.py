"""What a block of device memory is for: by what owns it, else by who allocated it, and when."""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import Any

from tuner.emulator.inside.lines import is_generated, package_of
from tuner.emulator.inside.owners import FROZEN, GRADIENT, STATE, TRAINED

WEIGHTS, ADAPTERS, BUCKETS = "weights", "adapters", "gradient_buckets"
LOGITS, ACTIVATIONS, TEMPORARY, OTHER = "logits_and_loss", "activations", "temporary", "other"

_CERTAIN = (TRAINED, FROZEN, GRADIENT, STATE)
"""What an owner says of a block. Of a block that was several of these, the first."""

_INNERMOST = 6
"""Frames of an allocation in which a library's function is looked for that allocates a part."""

_ALLOCATED_BY = (
    ("torch/nn/parallel/distributed.py", ("_ddp_init_helper", "_pre_forward"), BUCKETS),
    ("fsdp/_fully_shard/_fsdp_collectives.py", ("foreach_reduce",), GRADIENT),
    ("fsdp/_fully_shard/_fsdp_collectives.py", ("foreach_all_gather",), WEIGHTS),
    ("fsdp/_fully_shard/_fsdp_param.py", ("init_all_gather_outputs", "alloc_storage"), WEIGHTS),
    ("fsdp/_flat_param.py", ("_alloc_padded_unsharded_flat_param",), WEIGHTS),
    ("fsdp/_runtime_utils.py", ("_reduce_grad", "_get_reduce_scatter_tensors"), GRADIENT),
)
"""Ends of files, functions and what these allocate. PyTorch 2.8 to 2.13 have these names."""


class Sightings:
    """When which address was seen to be what; blocks are told apart by their time."""

    def __init__(self) -> None:
        self._seen: dict[int, dict[str, list[int]]] = {}

    def add(self, time_us: int, address: int, kind: str) -> None:
        """At this time the block at this address was of this kind. Times do not decrease."""
        times = self._seen.setdefault(address, {}).setdefault(kind, [])
        if not times or times[-1] != time_us:
            times.append(time_us)

    def of(self, block: dict[str, Any]) -> set[str]:
        """All that a block was seen to be in its life."""
        kinds = self._seen.get(block["addr"], {})
        return {
            kind
            for kind, times in kinds.items()
            if (at := bisect_left(times, block["time_us"])) < len(times)
            and times[at] <= block["died_us"]
        }


class Parts:
    """Names the parts of the peak.

    `phase_of` is the phase at a time, and `ends` the time at which the phase that runs at a time
    is over.
    """

    def __init__(
        self,
        sightings: Sightings,
        phase_of: Callable[[int], str],
        ends: Callable[[int], int],
        *,
        trains_adapters: bool,
    ) -> None:
        self._sightings = sightings
        self._phase_of, self._ends = phase_of, ends
        trained = ADAPTERS if trains_adapters else WEIGHTS
        self._names = {TRAINED: trained, FROZEN: WEIGHTS, GRADIENT: GRADIENT, STATE: STATE}
        self._logits: set[int] = set()

    def learn(self, blocks: Iterable[dict[str, Any]]) -> None:
        """Note the sizes of logits: compiled code allocates them where no operator is seen."""
        self._logits = {one["size"] for one in blocks if LOGITS in self._sightings.of(one)}

    def of(self, block: dict[str, Any], peak_us: int) -> str:
        """What a block is that lives at the time of the peak."""
        seen = self._sightings.of(block)
        for kind in _CERTAIN:
            if kind in seen:
                return self._names[kind]
        frames = [one for one in block["frames"] if package_of(one["filename"]) != ""]
        allocated = _by_library(frames[:_INNERMOST])
        if allocated is not None:
            return allocated
        generated = bool(frames) and is_generated(frames[0]["filename"])
        if LOGITS in seen or (generated and block["size"] in self._logits):
            return LOGITS
        return self._by_phase(block, peak_us)

    def _by_phase(self, block: dict[str, Any], peak_us: int) -> str:
        phase, at_peak = self._phase_of(block["time_us"]), self._phase_of(peak_us)
        if phase == "load":
            if block["died_us"] == sys.maxsize:
                return OTHER
            return TEMPORARY if at_peak == "load" else ACTIVATIONS  # the first batch
        recomputed = any(f["filename"].endswith("utils/checkpoint.py") for f in block["frames"])
        kept = phase == "forward" and at_peak != "forward"
        outlives = phase == "forward" and block["died_us"] >= self._ends(peak_us)
        return ACTIVATIONS if kept or recomputed or outlives else TEMPORARY


def _by_library(frames: list[dict[str, Any]]) -> str | None:
    for frame in frames:
        for file, functions, kind in _ALLOCATED_BY:
            if frame["filename"].endswith(file) and frame["name"] in functions:
                return kind
    return None
