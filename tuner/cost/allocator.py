"""PyTorch's CUDA caching allocator, replayed on the host.

Follows the rules of c10/cuda/CUDACachingAllocator.cpp (PyTorch 2.x): sizes round to 512
bytes; requests up to 1 MiB come from a pool of 2 MiB segments, larger ones from segments of
20 MiB or of their own size; the smallest free block that is large enough is taken (best
fit) and split; freed blocks merge with free neighbours. What a program reserves is larger
than what it allocates, and only a replay in order says by how much.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tuner.core.units import MIB

MIN_BLOCK_BYTES = 512  # kMinBlockSize
SMALL_LIMIT_BYTES = 1 * MIB  # kSmallSize: largest request of the small pool
SMALL_SEGMENT_BYTES = 2 * MIB  # kSmallBuffer
LARGE_SEGMENT_BYTES = 20 * MIB  # kLargeBuffer
LARGE_OWN_SEGMENT_BYTES = 10 * MIB  # kMinLargeAlloc: from here on a segment of its own size
ROUND_LARGE_BYTES = 2 * MIB  # kRoundLarge

_ADDRESS_BITS = 48
_ADDRESS_SPACE_BYTES = LARGE_SEGMENT_BYTES << 16
"""Address space of an expandable segment; PyTorch takes 9/8 of the GPU's memory."""


@dataclass(frozen=True, slots=True)
class AllocatorSettings:
    """The part of `PYTORCH_ALLOC_CONF` that changes memory.

    Both together make PyTorch reserve without bound until the GPU is full and cached memory is
    given back (pytorch/pytorch issue 123548): replay them with a limit.
    """

    expandable_segments: bool = False
    max_split_size_bytes: int | None = None

    @classmethod
    def of(cls, text: str) -> tuple[AllocatorSettings, list[str]]:
        """The settings in a value of that variable, and its options that are in none of them.

        With both, the second is such an option: what is kept then is given back where it is needed.
        """
        options = dict(part.strip().split(":", 1) for part in text.split(",") if ":" in part)
        expandable = options.pop("expandable_segments", "").lower() == "true"
        size = "" if expandable else options.pop("max_split_size_mb", "")
        most = int(size) * MIB if size.isdigit() else None
        return cls(expandable, most), [*options]


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


class _Block:
    """A range of a segment, linked to its neighbours in it.

    A block that is not `mapped` is address space of an expandable segment with no memory
    behind it; it counts as free.
    """

    __slots__ = ("address", "following", "free", "mapped", "pool", "previous", "size")

    def __init__(
        self,
        address: int,
        size: int,
        pool: _Pool,
        previous: _Block | None = None,
        following: _Block | None = None,
    ) -> None:
        self.address = address
        self.size = size
        self.pool = pool
        self.free = False
        self.mapped = True
        self.previous = previous
        self.following = following


class _Pool:
    """Blocks that can take each other's place: small ones or large ones, of one stream.

    `order` sorts the free ones by size and address, in one number each: the key of `free`.
    `unmapped` is address space without memory, sorted by address. A rest is split off from
    `least_rest_bytes` on, for requests below `most_split_bytes`.
    """

    __slots__ = (
        "free", "least_rest_bytes", "most_split_bytes", "order", "page_bytes", "unmapped",
    )  # fmt: skip

    def __init__(self, *, small: bool, settings: AllocatorSettings) -> None:
        whole = small or settings.expandable_segments
        self.order: list[int] = []
        self.free: dict[int, _Block] = {}
        self.unmapped: list[tuple[int, _Block]] = []
        self.page_bytes = SMALL_SEGMENT_BYTES if small else LARGE_SEGMENT_BYTES
        self.least_rest_bytes = MIN_BLOCK_BYTES if whole else SMALL_LIMIT_BYTES + 1
        self.most_split_bytes = math.inf if whole else settings.max_split_size_bytes or math.inf


class _CachingAllocator:
    """The allocator of one device. What a stream has freed, only that stream gets again.

    `malloc` returns a block to hand to `free`, or None when `limit_bytes` of reserved memory
    would be exceeded even after releasing every cached segment.
    """

    def __init__(
        self, settings: AllocatorSettings | None = None, *, limit_bytes: int | None = None
    ) -> None:
        self._settings = settings or AllocatorSettings()
        self._takes_first = self._settings == AllocatorSettings()
        self._limit_bytes = limit_bytes
        self._next_address = 0
        self._pools: dict[tuple[bool, int], _Pool] = {}
        self.allocated_bytes = 0
        self.reserved_bytes = 0
        self.peak_allocated_bytes = 0
        self.peak_reserved_bytes = 0

    # A replay has hundreds of thousands of requests: what most of them do is written out in
    # `take` and `free`, for two thirds the time of calls.

    def malloc(self, size_bytes: int, stream: int = 0) -> _Block | None:
        """Take a block of at least `size_bytes` on `stream`."""
        size = round_size(size_bytes)
        return self.take(size, self.pool_of(size, stream))

    def take(self, size: int, pool: _Pool) -> _Block | None:
        """As `malloc`: a rounded size, and the pool that it comes from."""
        place = bisect_left(pool.order, size << _ADDRESS_BITS)
        if self._takes_first and place < len(pool.order):
            block = pool.free.pop(pool.order.pop(place))
        else:
            found = self._best_fit(size, pool, place) or self._new(size, pool)
            if found is None:
                return None
            block = found
        rest = block.size - size
        if rest >= pool.least_rest_bytes and size < pool.most_split_bytes:
            address, after = block.address + size, block.following
            left = _Block(address, rest, pool, block, after)
            left.free = True
            if after is not None:
                after.previous = left
            block.size, block.following = size, left
            key = rest << _ADDRESS_BITS | address
            pool.free[key] = left
            insort(pool.order, key)
        block.free = False
        allocated = self.allocated_bytes = self.allocated_bytes + block.size
        if allocated > self.peak_allocated_bytes:  # noqa: PLR1730 - a call takes longer
            self.peak_allocated_bytes = allocated
        return block

    def free(self, block: _Block) -> None:
        """Give a block back; it merges with free neighbours."""
        self.allocated_bytes -= block.size
        pool = block.pool
        before, after = block.previous, block.following
        if before is not None and before.free and before.mapped:
            key = before.size << _ADDRESS_BITS | before.address
            del pool.free[key], pool.order[bisect_left(pool.order, key)]
            block.address = before.address
            block.size += before.size
            beyond = block.previous = before.previous
            if beyond is not None:
                beyond.following = block
        if after is not None and after.free and after.mapped:
            key = after.size << _ADDRESS_BITS | after.address
            del pool.free[key], pool.order[bisect_left(pool.order, key)]
            block.size += after.size
            beyond = block.following = after.following
            if beyond is not None:
                beyond.previous = block
        block.free = True
        key = block.size << _ADDRESS_BITS | block.address
        pool.free[key] = block
        insort(pool.order, key)

    def pool_of(self, size: int, stream: int) -> _Pool:
        """The pool of a stream's small or large requests."""
        which = (size <= SMALL_LIMIT_BYTES, stream)
        if which not in self._pools:
            start = len(self._pools) * _ADDRESS_SPACE_BYTES
            self._pools[which] = _Pool(small=which[0], settings=self._settings)
            if self._settings.expandable_segments:
                _add_unmapped(_Block(start, _ADDRESS_SPACE_BYTES, self._pools[which]))
        return self._pools[which]

    def _best_fit(self, size: int, pool: _Pool, place: int) -> _Block | None:
        """A free block for a request, from `place` in the pool's order on."""
        blocks = [pool.free[key] for key in pool.order[place:]]
        if not blocks:
            return None
        number, most = 0, self._settings.max_split_size_bytes
        if self._settings.expandable_segments:
            # A block that can grow counts with the size it can grow to.
            while number + 1 < len(blocks) and _extent(blocks[number + 1]) < _extent(
                blocks[number]
            ):
                number += 1
        block = blocks[number]
        if most is not None:
            # Blocks of the limit and more are never split: small requests leave them alone, and
            # large ones take one only if it is not much larger.
            if size < most <= block.size:
                return None
            if size >= most and block.size >= size + LARGE_SEGMENT_BYTES:
                return None
        _forget(block)
        return block

    def _new(self, size: int, pool: _Pool) -> _Block | None:
        """A block with new memory, for which cached memory is given back if necessary."""
        block = self._grow(size, pool)
        if block is None and self._release_oversized(size, pool):
            block = self._grow(size, pool)
        if block is None:
            self.release_cached()
            block = self._grow(size, pool)
        return block

    def _grow(self, size: int, pool: _Pool) -> _Block | None:
        if self._settings.expandable_segments:
            return self._expand(size, pool)
        if size >= LARGE_OWN_SEGMENT_BYTES:
            segment_bytes = -(-size // ROUND_LARGE_BYTES) * ROUND_LARGE_BYTES
        else:
            is_small = size <= SMALL_LIMIT_BYTES
            segment_bytes = SMALL_SEGMENT_BYTES if is_small else LARGE_SEGMENT_BYTES
        if not self._has_room(segment_bytes):
            return None
        block = _Block(self._next_address, segment_bytes, pool)
        self._next_address += segment_bytes
        self._reserve(segment_bytes)
        return block

    def _expand(self, size: int, pool: _Pool) -> _Block | None:
        """Put memory behind the lowest addresses with room for `size`, free blocks included."""
        block = _lowest_room(size, pool)
        if not block.mapped and not self._map(block, min(size, block.size)):
            return None
        while block.size < size:
            unmapped = block.following
            assert unmapped is not None
            if not self._map(unmapped, min(size - block.size, unmapped.size)):
                return None
            block = unmapped
        _forget(block)
        return block

    def _map(self, block: _Block, size: int) -> bool:
        page = block.pool.page_bytes
        mapped = -(-size // page) * page
        if not self._has_room(mapped):
            return False
        _forget(block)
        if mapped < block.size:
            _add_unmapped(_cut(block, mapped))
        block.mapped = True
        self.allocated_bytes += block.size
        self.free(block)
        self._reserve(mapped)
        return True

    def _has_room(self, size: int) -> bool:
        return self._limit_bytes is None or self.reserved_bytes + size <= self._limit_bytes

    def _reserve(self, size: int) -> None:
        self.reserved_bytes += size
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def _release_oversized(self, size: int, pool: _Pool) -> bool:
        """Return just enough unsplit blocks over the limit (release_available_cached_blocks)."""
        most = self._settings.max_split_size_bytes
        if most is None or self._settings.expandable_segments:
            return False
        wanted, released = max(size, most), 0
        place = bisect_left(pool.order, wanted << _ADDRESS_BITS)
        if place < len(pool.order):
            released = pool.free.pop(pool.order.pop(place)).size
        while pool.order and released < wanted and pool.order[-1] >> _ADDRESS_BITS >= most:
            released += pool.free.pop(pool.order.pop()).size
        self.reserved_bytes -= released
        return released >= wanted

    def release_cached(self) -> None:
        """Return to the driver what no live block shares (release_cached_blocks)."""
        for pool in self._pools.values():
            for block in [pool.free[key] for key in pool.order]:
                if self._settings.expandable_segments:
                    self._unmap(block)
                elif block.previous is None and block.following is None:
                    _forget(block)
                    self.reserved_bytes -= block.size

    def _unmap(self, block: _Block) -> None:
        """Take the memory away from the whole pages inside a free block."""
        page = block.pool.page_bytes
        first = -(-block.address // page) * page
        last = (block.address + block.size) // page * page
        if first >= last:
            return
        _forget(block)
        if last < block.address + block.size:
            _remember(_cut(block, last - block.address))
        if first > block.address:
            head, block = block, _cut(block, first - block.address)
            _remember(head)
        before, after = block.previous, block.following
        if before is not None and not before.mapped:
            _forget(before)
            block.address, block.size = before.address, before.size + block.size
            _link(before.previous, block)
        if after is not None and not after.mapped:
            _forget(after)
            block.size += after.size
            _link(block, after.following)
        _add_unmapped(block)
        self.reserved_bytes -= last - first


def _lowest_room(size: int, pool: _Pool) -> _Block:
    for _, candidate in pool.unmapped:
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


def _add_unmapped(block: _Block) -> None:
    block.free, block.mapped = True, False
    insort(block.pool.unmapped, (block.address, block))


def _remember(block: _Block) -> None:
    block.free = True
    key = block.size << _ADDRESS_BITS | block.address
    block.pool.free[key] = block
    insort(block.pool.order, key)


def _forget(block: _Block) -> None:
    pool = block.pool
    if not block.mapped:
        pool.unmapped.remove((block.address, block))
        return
    key = block.size << _ADDRESS_BITS | block.address
    del pool.free[key]
    del pool.order[bisect_left(pool.order, key)]


def _cut(block: _Block, size: int) -> _Block:
    """Shorten a block to `size`; the rest of it is returned, and belongs to no pool yet."""
    rest = _Block(block.address + size, block.size - size, block.pool)
    rest.mapped = block.mapped
    _link(rest, block.following)
    _link(block, rest)
    block.size = size
    return rest


def _link(block: _Block | None, following: _Block | None) -> None:
    if block is not None:
        block.following = following
    if following is not None:
        following.previous = block


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
    allocator = _CachingAllocator(settings, limit_bytes=limit_bytes)
    take, free = allocator.take, allocator.free
    sizes = [round_size(size) if size else 0 for size in sizes_bytes]
    pools = [
        allocator.pool_of(size, streams[index] if streams else 0)
        for index, size in enumerate(sizes)
    ]
    held: dict[int, _Block] = {}
    failed_at = None
    allocated: list[int] = []
    reserved: list[int] = []
    for position, (index, sign) in enumerate(events):
        if position == release_at:
            allocator.release_cached()
        size = sizes[index]
        if not size:
            pass  # the allocator returns a null pointer for these
        elif sign < 0:
            free(held.pop(index))
        else:
            block = take(size, pools[index])
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
