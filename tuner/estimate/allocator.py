"""PyTorch's CUDA caching allocator, replayed on the host.

Follows the rules of c10/cuda/CUDACachingAllocator.cpp (PyTorch 2.x): sizes round to 512
bytes; requests up to 1 MiB come from a pool of 2 MiB segments, larger ones from segments of
20 MiB or of their own size; the smallest free block that is large enough is taken (best
fit) and split; freed blocks merge with free neighbours. What a program reserves is larger
than what it allocates, and only a replay in order says by how much.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass

from tuner.units import MIB

MIN_BLOCK_BYTES = 512  # kMinBlockSize
SMALL_LIMIT_BYTES = 1 * MIB  # kSmallSize: largest request of the small pool
SMALL_SEGMENT_BYTES = 2 * MIB  # kSmallBuffer
LARGE_SEGMENT_BYTES = 20 * MIB  # kLargeBuffer
LARGE_OWN_SEGMENT_BYTES = 10 * MIB  # kMinLargeAlloc: from here on a segment of its own size
ROUND_LARGE_BYTES = 2 * MIB  # kRoundLarge


@dataclass(frozen=True, slots=True)
class AllocatorSettings:
    """The part of `PYTORCH_CUDA_ALLOC_CONF` that changes memory."""

    expandable_segments: bool = False
    max_split_size_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Replay:
    """What the allocator did: peaks in bytes, and how often it had to give memory back.

    `out_of_memory_at` is the index of the event that did not fit under the limit, with the
    size asked for in `requested_bytes`; None when all fitted. `retries` counts the times that
    cached segments were released to make room (`num_alloc_retries` in PyTorch's statistics).
    """

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    retries: int = 0
    out_of_memory_at: int | None = None
    requested_bytes: int | None = None


def round_size(size_bytes: int) -> int:
    """The size that a request takes in a block: the next multiple of 512 bytes."""
    return max(MIN_BLOCK_BYTES, -(-size_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES)


class _Block:
    """A range of a segment, linked to its neighbours in it. Ordered by (size, address)."""

    __slots__ = ("address", "following", "free", "previous", "size", "small")

    def __init__(self, address: int, size: int, small: bool) -> None:
        self.address = address
        self.size = size
        self.small = small
        self.free = False
        self.previous: _Block | None = None
        self.following: _Block | None = None


class CachingAllocator:
    """The allocator of one device and one stream.

    `malloc` returns a block to hand to `free`, or None when `limit_bytes` of reserved memory
    would be exceeded even after releasing every cached segment.
    """

    def __init__(
        self, settings: AllocatorSettings | None = None, *, limit_bytes: int | None = None
    ) -> None:
        self._settings = settings or AllocatorSettings()
        self._limit_bytes = limit_bytes
        self._next_address = 0
        # Free blocks of the small and the large pool, sorted by (size, address).
        self._free: dict[bool, list[tuple[int, int, _Block]]] = {True: [], False: []}
        self._tails: dict[bool, _Block | None] = {True: None, False: None}
        self.allocated_bytes = 0
        self.reserved_bytes = 0
        self.peak_allocated_bytes = 0
        self.peak_reserved_bytes = 0
        self.retries = 0

    def malloc(self, size_bytes: int) -> _Block | None:
        """Take a block of at least `size_bytes`."""
        size = round_size(size_bytes)
        small = size <= SMALL_LIMIT_BYTES
        block = self._best_fit(size, small) or self._grow(size, small)
        if block is None:
            return None
        if self._should_split(block, size):
            self._split(block, size)
        block.free = False
        self.allocated_bytes += block.size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block

    def free(self, block: _Block) -> None:
        """Give a block back; it merges with free neighbours."""
        self.allocated_bytes -= block.size
        block.free = True
        before, after = block.previous, block.following
        if before is not None and before.free:
            self._forget(before)
            before.size += block.size
            before.following = after
            if after is not None:
                after.previous = before
            if self._tails[block.small] is block:
                self._tails[block.small] = before
            block = before
        if after is not None and after.free:
            self._forget(after)
            block.size += after.size
            block.following = after.following
            if after.following is not None:
                after.following.previous = block
            if self._tails[block.small] is after:
                self._tails[block.small] = block
        self._remember(block)

    def _best_fit(self, size: int, small: bool) -> _Block | None:
        pool = self._free[small]
        index = bisect.bisect_left(pool, (size, -1))
        if index == len(pool):
            return None
        block = pool[index][2]
        limit = self._settings.max_split_size_bytes
        if limit is not None and not small and not self._settings.expandable_segments:
            # Blocks over the limit are never split: small requests leave them alone, and
            # large ones take one only if it is not much larger.
            if size < limit <= block.size:
                return None
            if size >= limit and block.size >= size + LARGE_SEGMENT_BYTES:
                return None
        del pool[index]
        block.free = False
        return block

    def _grow(self, size: int, small: bool) -> _Block | None:
        if self._settings.expandable_segments:
            return self._expand(size, small)
        segment_bytes = _segment_size(size)
        if not self._make_room(segment_bytes):
            return None
        block = _Block(self._next_address, segment_bytes, small)
        self._next_address += segment_bytes
        self._reserve(segment_bytes)
        return block

    def _expand(self, size: int, small: bool) -> _Block | None:
        """Map more pages behind the last block of the pool's one expandable segment."""
        tail = self._tails[small]
        reusable = tail.size if tail is not None and tail.free else 0
        page = SMALL_SEGMENT_BYTES if small else LARGE_SEGMENT_BYTES
        mapped = -(-(size - reusable) // page) * page
        if not self._make_room(mapped):
            return None
        self._reserve(mapped)
        if tail is not None and tail.free:
            self._forget(tail)
            tail.size += mapped
            tail.free = False
            return tail
        block = _Block(self._next_address, mapped, small)
        # Each pool's segment has an address range of its own, far larger than any GPU.
        block.address = tail.address + tail.size if tail is not None else (1 << 60) * (1 + small)
        block.previous = tail
        if tail is not None:
            tail.following = block
        self._tails[small] = block
        return block

    def _reserve(self, size: int) -> None:
        self.reserved_bytes += size
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def _make_room(self, size: int) -> bool:
        if self._limit_bytes is None or self.reserved_bytes + size <= self._limit_bytes:
            return True
        self.retries += 1
        self._release_cached()
        return self.reserved_bytes + size <= self._limit_bytes

    def _release_cached(self) -> None:
        """Return to the driver what no live block shares (release_cached_blocks)."""
        for small, pool in self._free.items():
            kept = []
            for entry in pool:
                block = entry[2]
                whole = block.previous is None and block.following is None
                tail = self._settings.expandable_segments and block is self._tails[small]
                if not (whole or tail):
                    kept.append(entry)
                    continue
                self.reserved_bytes -= block.size
                if tail:
                    self._tails[small] = block.previous
                    if block.previous is not None:
                        block.previous.following = None
            self._free[small] = kept

    def _should_split(self, block: _Block, size: int) -> bool:
        remaining = block.size - size
        if block.small or self._settings.expandable_segments:
            return remaining >= MIN_BLOCK_BYTES
        limit = self._settings.max_split_size_bytes
        return (limit is None or size < limit) and remaining > SMALL_LIMIT_BYTES

    def _split(self, block: _Block, size: int) -> None:
        rest = _Block(block.address + size, block.size - size, block.small)
        block.size = size
        rest.previous, rest.following = block, block.following
        if rest.following is not None:
            rest.following.previous = rest
        block.following = rest
        rest.free = True
        if self._tails[block.small] is block:
            self._tails[block.small] = rest
        self._remember(rest)

    def _remember(self, block: _Block) -> None:
        bisect.insort(self._free[block.small], (block.size, block.address, block))

    def _forget(self, block: _Block) -> None:
        pool = self._free[block.small]
        del pool[bisect.bisect_left(pool, (block.size, block.address))]


def replay(
    events: Iterable[tuple[int, int]],
    sizes_bytes: list[int],
    *,
    settings: AllocatorSettings | None = None,
    limit_bytes: int | None = None,
) -> Replay:
    """Run (block index, +1 or -1) events through the allocator.

    `sizes_bytes[i]` is the size of block i. Stops at the first request that does not fit.
    """
    allocator = CachingAllocator(settings, limit_bytes=limit_bytes)
    held: dict[int, _Block] = {}
    failed_at = requested = None
    for position, (index, sign) in enumerate(events):
        if sizes_bytes[index] == 0:  # the allocator returns a null pointer for these
            continue
        if sign < 0:
            allocator.free(held.pop(index))
            continue
        block = allocator.malloc(sizes_bytes[index])
        if block is None:
            failed_at, requested = position, sizes_bytes[index]
            break
        held[index] = block
    return Replay(
        peak_allocated_bytes=allocator.peak_allocated_bytes,
        peak_reserved_bytes=allocator.peak_reserved_bytes,
        retries=allocator.retries,
        out_of_memory_at=failed_at,
        requested_bytes=requested,
    )


def _segment_size(size: int) -> int:
    if size <= SMALL_LIMIT_BYTES:
        return SMALL_SEGMENT_BYTES
    if size < LARGE_OWN_SEGMENT_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-size // ROUND_LARGE_BYTES) * ROUND_LARGE_BYTES
