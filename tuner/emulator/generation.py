"""The generation of a program, as far as it did not run on the emulated device."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class DecodeLoops:
    """`times` decode loops of `tokens` tokens, of which `run` ran; the others repeat them.

    The number of tokens is the longest that was asked for: ends by a special token are unknown.
    """

    tokens: int
    run: int
    is_steady: bool
    """The last tokens, which ran as well, requested what the pattern says."""
    times: int


@dataclass(frozen=True, slots=True)
class DeclaredEngine:
    """vLLM, which is not emulated: memory as declared, and no time.

    In the mode "colocate" it takes `bytes`, a `share` of the device's memory (TRL's
    `vllm_gpu_memory_utilization`), and none of it in the training if it `sleeps`. The mode "server"
    takes none on this device but the buffers of its weight updates, whose size is unknown.
    """

    mode: str
    share: float
    bytes: int
    sleeps: bool


def decode_loops(events: Iterable[Mapping[str, Any]]) -> tuple[DecodeLoops, ...]:
    """The decode loops of the first rank that were extrapolated, the longest first."""
    ended = [one for one in events if one["event"] == "decoding" and one["rank"] == "0"]
    times = Counter((one["tokens"], one["run"], one["is_steady"]) for one in ended)
    return tuple(DecodeLoops(*loop, number) for loop, number in sorted(times.items(), reverse=True))


def declared_engine(events: Iterable[Mapping[str, Any]]) -> DeclaredEngine | None:
    """The engine that generates for the first rank."""
    names = [field.name for field in dataclasses.fields(DeclaredEngine)]
    started = (one for one in events if one["event"] == "engine" and one["rank"] == "0")
    return next((DeclaredEngine(**{name: one[name] for name in names}) for one in started), None)
