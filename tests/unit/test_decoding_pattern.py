"""The pattern of a decode loop's requests for memory, on an allocator of a few lines."""

from __future__ import annotations

from itertools import count

import pytest

from tuner.emulator.inside.decoding import find_pattern


class Allocator:
    """Keeps the history of requests and frees, and the live blocks by their address."""

    def __init__(self) -> None:
        self.history, self.marks = [], [(0, 0)]
        self.live: dict[int, int] = {}
        self._addresses = count(1)

    def alloc(self, size: int) -> int:
        address = next(self._addresses)
        self.history.append({"action": "alloc", "addr": address, "size": size})
        self.live[address] = size
        return address

    def free(self, address: int) -> None:
        self.history.append({"action": "free_requested", "addr": address})
        self.history.append({"action": "free_completed", "addr": address})
        del self.live[address]


def decode(
    tokens: int, *, padded_to: int = 1, keeps: bool = False, first: int = 10
) -> tuple[Allocator, dict[int, int]]:
    """A cache that grows by concatenation, with a mask that is padded; `keeps` some of each."""
    allocator = Allocator()
    cache = allocator.alloc(100 * first)
    allocator.marks[0] = (1, 0)
    del allocator.history[:]
    for length in range(first + 1, first + 1 + tokens):
        mask = allocator.alloc(-(-length // padded_to) * padded_to * 8)
        if length % padded_to:  # a copy that is padded
            allocator.free(allocator.alloc(8 * length))
        new = allocator.alloc(100 * length)
        if length > first + 1:
            allocator.free(cache)
        cache = new
        allocator.free(mask)
        if keeps:
            allocator.alloc(64)
        actions = [entry["action"] for entry in allocator.history]
        allocator.marks.append((1 + actions.count("alloc"), actions.count("free_requested")))
    return allocator, allocator.live


@pytest.mark.parametrize(("padded_to", "tokens", "period"), [(1, 16, 1), (4, 16, 4), (8, 33, 8)])
def test_a_replay_makes_the_requests_of_the_tokens_to_come(
    padded_to: int, tokens: int, period: int
) -> None:
    short, _ = decode(tokens, padded_to=padded_to)
    pattern = find_pattern(short.history, short.marks)
    assert pattern is not None
    assert pattern.period == period
    more = 8 * period
    requests: list[int] = []
    blocks = dict.fromkeys(pattern.live)
    pattern.replay(blocks, more, lambda size: requests.append(size) or size)

    whole, live = decode(tokens + more, padded_to=padded_to)
    asked = [entry["size"] for entry in whole.history if entry["action"] == "alloc"]
    assert requests == asked[-len(requests) :]
    after, _ = decode(tokens + more + 1, padded_to=padded_to)
    last = [entry["size"] for entry in after.history if entry["action"] == "alloc"][len(asked) :]
    assert pattern.requested_bytes(more) == sum(last)
    assert [blocks[block] for block in pattern.after(more)] == [[*live.values()][-1]]


@pytest.mark.parametrize(("padded_to", "keeps"), [(1, True), (8, False)])
def test_a_loop_that_is_not_steady_has_no_pattern(padded_to: int, keeps: bool) -> None:
    found, _ = decode(16, padded_to=padded_to, keeps=keeps)
    assert find_pattern(found.history, found.marks) is None
