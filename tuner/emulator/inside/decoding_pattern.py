"""The pattern of the requests for memory in a decode loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

PERIODS = (1, 2, 4, 8, 16)
"""Tokens after which requests may repeat."""

_COMPARED = 8
"""At least the last tokens that are compared with those before."""

Block = tuple[int, int]
"""A block of memory: the number of the token that asked for it, and that of the request."""

Mark = tuple[int, int]
"""The number of requests and of frees up to a moment."""

Entry = dict[str, Any]


class Request(NamedTuple):
    """A request for `size` bytes, or with 0 a free of request `number` made `age` tokens ago."""

    size: int
    age: int = 0
    number: int = 0
    grows: int = 0
    """Bytes by which the request is larger one period later."""


class Pattern:
    """The requests of `period` tokens, which repeat; `live` are the blocks alive after them."""

    def __init__(
        self,
        rounds: Sequence[Sequence[Request]],
        period: int,
        live: Mapping[Block, Entry],
    ) -> None:
        self.period, self.live = period, live
        self._seen = len(rounds)
        self._rounds = rounds[-period:]

    @property
    def repeated(self) -> tuple[Any, ...]:
        """The requests and their growth, whatever their sizes."""
        return tuple(
            tuple((bool(one.size), *one[1:]) for one in requests) for requests in self._rounds
        )

    def requested_bytes(self, number: int) -> int:
        """All that one token requests after `number` others, a multiple of the period."""
        times = 1 + number // self.period
        return sum(one.size + times * one.grows for one in self._rounds[0] if one.size)

    def growth(self, step: int, index: int) -> int:
        """The bytes by which a block is larger one period later."""
        return self._request(step, index).grows

    def after(self, number: int) -> dict[Block, Entry]:
        """The entries of the blocks that are alive `number` tokens later, but for addresses."""
        times = number // self.period
        return {
            (step + number, index): {
                **entry,
                "size": entry["size"] + times * self.growth(step, index),
            }
            for (step, index), entry in self.live.items()
        }

    def replay(self, blocks: dict[Block, Any], number: int, new: Callable[[int], Any]) -> None:
        """Make the requests of `number` tokens with `new`; `blocks` are those that are alive."""
        for step in range(self._seen, self._seen + number):
            times = 1 + (step - self._seen) // self.period
            asked = 0
            for size, age, index, grows in self._rounds[(step - self._seen) % self.period]:
                if size:
                    blocks[step, asked] = new(size + times * grows)
                    asked += 1
                else:
                    del blocks[step - age, index]

    def _request(self, step: int, index: int) -> Request:
        requests = self._rounds[(step - self._seen) % self.period]
        return [one for one in requests if one.size][index]


def find_pattern(entries: Sequence[Entry], marks: Sequence[Mark]) -> Pattern | None:
    """The pattern of the tokens between `marks`, from the allocator's history; None without one.

    The first token is not looked at: it follows the prompt.
    """
    found = _rounds(entries, marks)
    if found is None:
        return None
    rounds, live = found
    for period in PERIODS:
        if 2 * period < len(rounds) and (latest := _repeated(rounds, period)) is not None:
            pattern = [*rounds[:-period], *latest]
            depth = 1 + max((one.age for each in latest for one in each), default=0)
            first = len(rounds) - depth
            if any(1 + period < step < first for step, _ in live):
                return None  # it keeps something of each token
            kept = {block: entry for block, entry in live.items() if block[0] >= first}
            return Pattern(pattern, period, kept)
    return None


def _rounds(
    entries: Sequence[Entry], marks: Sequence[Mark]
) -> tuple[list[list[Request]], dict[Block, Entry]] | None:
    """The requests of each token, and the blocks that are alive at the end."""
    rounds: list[list[Request]] = [[] for _ in marks[1:]]
    at: dict[int, Block] = {}
    live: dict[Block, Entry] = {}
    asked, freed = marks[0]
    step = index = 0
    for entry in entries:
        action = entry["action"]
        if action not in ("alloc", "free_requested"):
            continue
        while step + 1 < len(marks) and (asked, freed) == marks[step + 1]:
            step, index = step + 1, 0
        if step == len(rounds):
            return None
        if action == "alloc":
            rounds[step].append(Request(entry["size"]))
            at[entry["addr"]] = (step, index)
            live[step, index] = entry
            asked, index = asked + 1, index + 1
            continue
        freed += 1
        block = at.pop(entry["addr"], None)
        if block is None:  # older than the loop
            rounds[step].append(Request(0, -1))
        else:
            rounds[step].append(Request(0, step - block[0], block[1]))
            del live[block]
    return (rounds, live) if (asked, freed) == marks[-1] else None


def _repeated(rounds: list[list[Request]], period: int) -> list[list[Request]] | None:
    """The last `period` tokens with their growth, if they repeat those before; else None."""
    grown: dict[int, list[Request]] = {}
    for step in range(len(rounds) - max(_COMPARED, period), len(rounds)):
        if step - period < 1:
            continue
        requests = _grown(rounds[step], rounds[step - period])
        if requests is None:
            return None
        before = grown.get(step - period)
        if before is not None and [one.grows for one in before] != [o.grows for o in requests]:
            return None
        grown[step] = requests
    latest = [grown.get(step) for step in range(len(rounds) - period, len(rounds))]
    return None if None in latest else [one for one in latest if one is not None]


def _grown(later: Sequence[Request], before: Sequence[Request]) -> list[Request] | None:
    """The requests of a token with their growth since another one; None if they differ."""
    if len(later) != len(before):
        return None
    found = []
    for one, other in zip(later, before, strict=True):
        grows = one.size - other.size
        is_same = (one.age, one.number) == (other.age, other.number) and one.age >= 0
        if not is_same or grows < 0 or bool(one.size) != bool(other.size):
            return None
        found.append(one._replace(grows=grows))
    return found
