"""PyTorch's CUDA caching allocator, replayed on the host.

Follows the rules of c10/cuda/CUDACachingAllocator.cpp (PyTorch 2.x): sizes round to 512
bytes; requests up to 1 MiB come from a pool of 2 MiB segments, larger ones from segments of
20 MiB or of their own size; the smallest free block that is large enough is taken (best
fit) and split; freed blocks merge with free neighbours. What a program reserves is larger
than what it allocates, and only a replay in order says by how much.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tuner.core.units import MIB

MIN_BLOCK_BYTES = 512  # kMinBlockSize
SMALL_LIMIT_BYTES = 1 * MIB  # kSmallSize: largest request of the small pool
SMALL_SEGMENT_BYTES = 2 * MIB  # kSmallBuffer
LARGE_SEGMENT_BYTES = 20 * MIB  # kLargeBuffer
LARGE_OWN_SEGMENT_BYTES = 10 * MIB  # kMinLargeAlloc: from here on a segment of its own size
ROUND_LARGE_BYTES = 2 * MIB  # kRoundLarge

_ADDRESS_SPACE_BYTES = LARGE_SEGMENT_BYTES << 40
"""Address space of an expandable segment; PyTorch takes 9/8 of the GPU's memory."""


@dataclass(frozen=True, slots=True)
class AllocatorSettings:
    """The part of `PYTORCH_CUDA_ALLOC_CONF` that changes memory.

    Both together make PyTorch reserve without bound until the GPU is full and cached memory is
    given back (pytorch/pytorch issue 123548): replay them with a limit.
    """

    expandable_segments: bool = False
    max_split_size_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Replay:
    """Result of a replay: peaks in bytes.

    `out_of_memory_at` is the index of the event that did not fit under the limit; None when all
    fitted.
    """

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    out_of_memory_at: int | None = None
    allocated_bytes: tuple[int, ...] = ()
    """`memory_allocated` after each event, where it was asked for."""
    reserved_bytes: tuple[int, ...] = ()
    """`memory_reserved` after each event, where it was asked for."""


def round_size(size_bytes: int) -> int:
    """The size that a request takes in a block: the next multiple of 512 bytes."""
    return -(-size_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES or MIN_BLOCK_BYTES


_Pool = tuple[bool, int]
"""Blocks that can take each other's place: small ones or large ones, of one stream."""


class _Block:
    """A range of a segment, linked to its neighbours in it.

    A block that is not `mapped` is address space of an expandable segment with no memory
    behind it; it counts as free.
    """

    __slots__ = ("address", "following", "free", "mapped", "pool", "previous", "size", "small")

    def __init__(self, address: int, size: int, pool: _Pool) -> None:
        self.address = address
        self.size = size
        self.pool = pool
        self.small = pool[0]
        self.free = False
        self.mapped = True
        self.previous: _Block | None = None
        self.following: _Block | None = None


class CachingAllocator:
    """The allocator of one device. What a stream has freed, only that stream gets again.

    `malloc` returns a block to hand to `free`, or None when `limit_bytes` of reserved memory
    would be exceeded even after releasing every cached segment.
    """

    def __init__(
        self, settings: AllocatorSettings | None = None, *, limit_bytes: int | None = None
    ) -> None:
        settings = settings or AllocatorSettings()
        self._expandable = settings.expandable_segments
        self._max_split = settings.max_split_size_bytes
        self._limit_bytes = limit_bytes
        self._next_address = 0
        # Free blocks of each pool, sorted by (size, address).
        self._free: dict[_Pool, list[tuple[int, int, _Block]]] = {}
        # Address space without memory, sorted by address. Each pool's expandable segment has a
        # range of its own, far larger than any GPU.
        self._unmapped: dict[_Pool, list[tuple[int, _Block]]] = {}
        self.allocated_bytes = 0
        self.reserved_bytes = 0
        self.peak_allocated_bytes = 0
        self.peak_reserved_bytes = 0

    def malloc(self, size_bytes: int, stream: int = 0) -> _Block | None:
        """Take a block of at least `size_bytes` on `stream`."""
        size = round_size(size_bytes)
        pool = (size <= SMALL_LIMIT_BYTES, stream)
        if pool not in self._free:
            self._open(pool)
        block = self._best_fit(size, pool) or self._grow(size, pool)
        if block is None and self._release_oversized(size, pool):
            block = self._grow(size, pool)
        if block is None:
            self.release_cached()
            block = self._grow(size, pool)
        if block is None:
            return None
        if block.size > size and self._should_split(block, size):
            self._remember(_cut(block, size))
        block.free = False
        self.allocated_bytes += block.size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block

    def _open(self, pool: _Pool) -> None:
        """The first request of a pool."""
        self._free[pool], self._unmapped[pool] = [], []
        if self._expandable:
            start = (len(self._unmapped) - 1) * _ADDRESS_SPACE_BYTES
            self._add_unmapped(_Block(start, _ADDRESS_SPACE_BYTES, pool))

    def free(self, block: _Block) -> None:
        """Give a block back; it merges with free neighbours."""
        self.allocated_bytes -= block.size
        block.free = True
        self._merge_neighbours(block)
        self._remember(block)

    def _best_fit(self, size: int, of: _Pool) -> _Block | None:
        pool = self._free[of]
        index = bisect.bisect_left(pool, (size, -1))
        if index == len(pool):
            return None
        if self._expandable:
            # A block that can grow counts with the size it can grow to.
            while index + 1 < len(pool) and _extent(pool[index + 1][2]) < _extent(pool[index][2]):
                index += 1
        block = pool[index][2]
        if self._max_split is not None:
            # Blocks of the limit and more are never split: small requests leave them alone, and
            # large ones take one only if it is not much larger.
            if size < self._max_split <= block.size:
                return None
            if size >= self._max_split and block.size >= size + LARGE_SEGMENT_BYTES:
                return None
        del pool[index]
        return block

    def _grow(self, size: int, pool: _Pool) -> _Block | None:
        if self._expandable:
            return self._expand(size, pool)
        segment_bytes = _segment_size(size)
        if not self._has_room(segment_bytes):
            return None
        block = _Block(self._next_address, segment_bytes, pool)
        self._next_address += segment_bytes
        self._reserve(segment_bytes)
        return block

    def _expand(self, size: int, pool: _Pool) -> _Block | None:
        """Put memory behind the lowest addresses with room for `size`, free blocks included."""
        block = self._lowest_room(size, pool)
        if not block.mapped and not self._map(block, min(size, block.size)):
            return None
        while block.size < size:
            unmapped = block.following
            assert unmapped is not None
            if not self._map(unmapped, min(size - block.size, unmapped.size)):
                return None
            block = unmapped
        self._forget(block)
        return block

    def _lowest_room(self, size: int, pool: _Pool) -> _Block:
        for _, candidate in self._unmapped[pool]:
            before = candidate.previous
            first = before if before is not None and before.free else candidate
            block: _Block | None = first
            room = 0
            while room < size and block is not None and block.free:
                room += block.size
                block = block.following
            if room >= size:
                return first
        raise AssertionError("the last range of addresses has room for any request")

    def _map(self, block: _Block, size: int) -> bool:
        page = SMALL_SEGMENT_BYTES if block.small else LARGE_SEGMENT_BYTES
        mapped = -(-size // page) * page
        if not self._has_room(mapped):
            return False
        self._forget(block)
        if mapped < block.size:
            self._add_unmapped(_cut(block, mapped))
        block.mapped = True
        self._merge_neighbours(block)
        self._remember(block)
        self._reserve(mapped)
        return True

    def _has_room(self, size: int) -> bool:
        return self._limit_bytes is None or self.reserved_bytes + size <= self._limit_bytes

    def _reserve(self, size: int) -> None:
        self.reserved_bytes += size
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def _release_oversized(self, size: int, of: _Pool) -> bool:
        """Return just enough unsplit blocks over the limit (release_available_cached_blocks)."""
        if self._max_split is None or self._expandable:
            return False
        pool, wanted = self._free[of], max(size, self._max_split)
        index = bisect.bisect_left(pool, (wanted, -1))
        if index < len(pool):
            self.reserved_bytes -= pool.pop(index)[0]
            return True
        released = 0
        while pool and released < wanted and pool[-1][0] >= self._max_split:
            released += pool.pop()[0]
        self.reserved_bytes -= released
        return released >= wanted

    def release_cached(self) -> None:
        """Return to the driver what no live block shares (release_cached_blocks)."""
        for key, pool in self._free.items():
            if self._expandable:
                for _, _, block in tuple(pool):
                    self._unmap(block)
                continue
            split = [entry for entry in pool if entry[2].previous or entry[2].following]
            self.reserved_bytes -= sum(size for size, *_ in pool) - sum(size for size, *_ in split)
            self._free[key] = split

    def _unmap(self, block: _Block) -> None:
        """Take the memory away from the whole pages inside a free block."""
        page = SMALL_SEGMENT_BYTES if block.small else LARGE_SEGMENT_BYTES
        first = -(-block.address // page) * page
        last = (block.address + block.size) // page * page
        if first >= last:
            return
        self._forget(block)
        if last < block.address + block.size:
            self._remember(_cut(block, last - block.address))
        if first > block.address:
            head, block = block, _cut(block, first - block.address)
            self._remember(head)
        block.mapped = False
        self._merge_neighbours(block)
        self._add_unmapped(block)
        self.reserved_bytes -= last - first

    def _should_split(self, block: _Block, size: int) -> bool:
        remaining = block.size - size
        if block.small or self._expandable:
            return remaining >= MIN_BLOCK_BYTES
        splits = self._max_split is None or size < self._max_split
        return splits and remaining > SMALL_LIMIT_BYTES

    def _merge_neighbours(self, block: _Block) -> None:
        before, after = block.previous, block.following
        if before is not None and before.free and before.mapped == block.mapped:
            self._forget(before)
            block.address, block.previous = before.address, before.previous
            block.size += before.size
            if before.previous is not None:
                before.previous.following = block
        if after is not None and after.free and after.mapped == block.mapped:
            self._forget(after)
            block.following = after.following
            block.size += after.size
            if after.following is not None:
                after.following.previous = block

    def _add_unmapped(self, block: _Block) -> None:
        block.free, block.mapped = True, False
        bisect.insort(self._unmapped[block.pool], (block.address, block))

    def _remember(self, block: _Block) -> None:
        block.free = True
        bisect.insort(self._free[block.pool], (block.size, block.address, block))

    def _forget(self, block: _Block) -> None:
        if not block.mapped:
            self._unmapped[block.pool].remove((block.address, block))
            return
        pool = self._free[block.pool]
        del pool[bisect.bisect_left(pool, (block.size, block.address))]


def _cut(block: _Block, size: int) -> _Block:
    """Shorten a block to `size`; the rest of it is returned, and belongs to no pool yet."""
    rest = _Block(block.address + size, block.size - size, block.pool)
    rest.mapped = block.mapped
    rest.previous, rest.following = block, block.following
    if rest.following is not None:
        rest.following.previous = rest
    block.size, block.following = size, rest
    return rest


def _extent(block: _Block) -> int:
    """The size to which a block can grow in place."""
    after = block.following
    return block.size + (after.size if after is not None and not after.mapped else 0)


def replay(
    events: Iterable[tuple[int, int]],
    sizes_bytes: list[int],
    *,
    streams: Sequence[int] | None = None,
    settings: AllocatorSettings | None = None,
    limit_bytes: int | None = None,
    release_at: int | None = None,
    keep_history: bool = False,
) -> Replay:
    """Run (block index, +1 or -1) events through the allocator.

    `sizes_bytes[i]` is the size of block i, `streams[i]` the stream that asks for it. Stops at the
    first request that does not fit. Before event `release_at` cached segments are released.
    `keep_history` keeps the allocated and reserved bytes after each event.
    """
    allocator = CachingAllocator(settings, limit_bytes=limit_bytes)
    held: dict[int, _Block] = {}
    failed_at = None
    allocated: list[int] = []
    reserved: list[int] = []
    for position, (index, sign) in enumerate(events):
        if position == release_at:
            allocator.release_cached()
        if sizes_bytes[index] == 0:
            pass  # the allocator returns a null pointer for these
        elif sign < 0:
            allocator.free(held.pop(index))
        else:
            block = allocator.malloc(sizes_bytes[index], streams[index] if streams else 0)
            if block is None:
                failed_at = position
                break
            held[index] = block
        if keep_history:
            allocated.append(allocator.allocated_bytes)
            reserved.append(allocator.reserved_bytes)
    return Replay(
        peak_allocated_bytes=allocator.peak_allocated_bytes,
        peak_reserved_bytes=allocator.peak_reserved_bytes,
        out_of_memory_at=failed_at,
        allocated_bytes=tuple(allocated),
        reserved_bytes=tuple(reserved),
    )


def _segment_size(size: int) -> int:
    if size < LARGE_OWN_SEGMENT_BYTES:
        return SMALL_SEGMENT_BYTES if size <= SMALL_LIMIT_BYTES else LARGE_SEGMENT_BYTES
    return -(-size // ROUND_LARGE_BYTES) * ROUND_LARGE_BYTES
