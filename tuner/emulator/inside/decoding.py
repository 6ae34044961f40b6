"""Extrapolates the decode loops of transformers' `generate`, whose tokens repeat each other.

Each token runs the same operators, and its blocks of memory are those of the token before, larger
by a constant. Once some tokens have shown this pattern, the allocator itself gets the requests of
the tokens to come, in their order, without the operators; the last tokens run again. The program
goes on with tensors of the final length, whose token ids are made up.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tuner.emulator.inside.decoding_pattern import Block, Mark, Pattern, find_pattern
from tuner.emulator.inside.engines import Engines
from tuner.emulator.inside.failing import send
from tuner.emulator.inside.faults import guarded, note
from tuner.emulator.inside.memory import MemoryWatch
from tuner.emulator.inside.notes import NOTE, UNIFORM, alias, is_known, note_known, noted
from tuner.emulator.inside.process import when_imported

TRY_AFTER = (16, 33)
"""Tokens after which a pattern is looked for: of up to 4 tokens, and of up to 16 (masks are padded
to 8 or 16 positions, ATen/native/transformers/attention.cpp, pad_bias)."""

TRY_KNOWN_AFTER = 5
"""Tokens after which the pattern of an earlier loop of the process is looked for."""

LAST = 2
"""The last tokens of a loop run: they show its final sizes."""

LEAST = 8
"""Fewer tokens than this are run."""

GENERATES = {
    "transformers.generation.utils": ("GenerationMixin", "generate"),
    "transformers.generation.continuous_batching.continuous_api": (
        "ContinuousMixin",
        "generate_batch",
    ),
}
"""By module: a class, and its method that generates."""

_BACK = 4
"""Counters of a cache are compared with their values this many tokens before."""

_TAIL = 8
"""The last integers of a tensor, by which it goes on."""

_DEPTH = 8
"""Objects within objects that are searched for the tensors of a loop."""


class Decoding:
    """Follows all that generates in this process, each time in a context of `phase`."""

    def __init__(
        self, memory: MemoryWatch, pricer: Any, phase: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._memory, self._pricer, self._phase = memory, pricer, phase
        self._loops: list[_Loop] = []
        self._known: set[Any] = set()

    def install(self) -> None:
        """Follow calls that generate, decode loops, and engines."""
        for module in GENERATES:
            when_imported(module, self._follow_calls)
        when_imported("transformers.generation.utils", self._follow_loops)
        when_imported("trl.generation.vllm_generation", Engines(self._phase).follow)

    def _follow_calls(self, module: Any) -> None:
        owner_name, name = GENERATES[module.__name__]
        owner = getattr(module, owner_name, None)
        call = None if owner is None else vars(owner).get(name)
        if call is None:
            return

        @functools.wraps(call)
        def run_and_note(*args: Any, **kwargs: Any) -> Any:
            with self._phase(), self._loop():
                return call(*args, **kwargs)

        setattr(owner, name, run_and_note)

    def _follow_loops(self, module: Any) -> None:
        """Follow the loops of `transformers.generation.utils`, at the head of each round."""
        mixin = module.GenerationMixin
        check = getattr(mixin, "_has_unfinished_sequences", None)
        if check is None:  # releases before 4.39
            return

        def check_and_note(model: Any, *args: Any, **kwargs: Any) -> Any:
            goes_on = check(model, *args, **kwargs)
            frame = sys._getframe(1)
            if self._loops and frame.f_code.co_name == "_sample":
                self._loops[-1].at_head(frame, goes_on=bool(goes_on))
            return goes_on

        mixin._has_unfinished_sequences = check_and_note

    @contextmanager
    def _loop(self) -> Iterator[None]:
        """A context for one call of `generate`."""
        loop = _Loop(self._memory, self._pricer, self._known)
        self._loops.append(loop)
        try:
            yield
        finally:
            self._loops.pop()
            loop.finish()
            if loop.skipped:
                tokens = loop.rounds + loop.skipped
                told = {"tokens": tokens, "run": loop.shown, "is_steady": loop.is_steady}
                send({"event": "decoding", **told})


class _Loop:
    """One decode loop: watched until its pattern is known, and then shortened."""

    def __init__(self, memory: MemoryWatch, pricer: Any, known: set[Any]) -> None:
        self._memory, self._pricer = memory, pricer
        self._known = known
        self._is_watched = memory.can_skip
        self._seen = -1
        self._marks: list[Mark] = []
        self._counters: dict[tuple[int, str], int] = {}
        self._counts: list[dict[int, int]] = []
        self._steady: tuple[dict[int, int], int, int] | None = None
        self.rounds = 0
        """Tokens that ran."""
        self.shown = 0
        """Tokens that ran before others were left out."""
        self.skipped = 0
        self.is_steady = True
        """The tokens after those left out request what the pattern says."""
        self._expected: tuple[int, int] | None = None
        self._prompt = 0
        """Tokens of the prompt."""

    def at_head(self, frame: FrameType, *, goes_on: bool) -> None:
        """Note that a round begins, or with False that the last one is over."""
        self.rounds += goes_on
        if self._expected is not None:
            before, expected = self._expected
            self.is_steady &= _requested_bytes(self._device) - before == expected
            self._expected = None
        if self._pricer is not None and (self._is_watched or self._steady):
            self._counts.append(self._pricer.counted())
        if goes_on and self.rounds > 1 and not self._is_watched:
            return
        values = frame.f_locals
        try:
            if self.rounds == 1 and goes_on:
                self._prompt = values["input_ids"].shape[1]
            if not goes_on:
                _settle_longest(values, self._prompt)
            elif self._is_watched:
                self._watch(values)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - tuner's fault must not stop the program
            self._is_watched = False
            note(error, "a decode loop")
        finally:
            if isinstance(values, dict):  # until Python 3.13 a copy, which keeps tensors alive
                values.clear()

    def _watch(self, values: Mapping[str, Any]) -> None:
        self._seen += 1
        ids: Any = values.get("input_ids")
        criteria = values.get("stopping_criteria")
        left = (getattr(criteria, "max_length", None) or 0) - ids.shape[1]
        if self._seen == 0:
            if left < TRY_AFTER[0] + LAST + LEAST or not ids.is_cuda or values.get("streamer"):
                self._is_watched = False
                return
            self._entries: list[dict[str, Any]] = []
            self._device = ids.device.index
            self._memory.drain()
        self._marks.append(_mark(self._device))
        tries = (TRY_KNOWN_AFTER, *TRY_AFTER) if self._known else TRY_AFTER
        if self._seen + _BACK in tries:
            self._counters = {(id(o), name): n for o, name, n in Held(values).counters()}
        if self._seen not in tries:
            return
        traces = self._memory.drain()
        self._entries += traces[self._device]
        pattern = find_pattern(self._entries, self._marks)
        is_alone = not any(t for i, t in enumerate(traces) if i != self._device)
        is_early = self._seen == TRY_KNOWN_AFTER
        if pattern is None or not is_alone or (is_early and pattern.repeated not in self._known):
            self._is_watched = is_alone and self._seen < tries[-1]
            return
        self._known.add(pattern.repeated)
        self._is_watched = False
        held = Held(values)
        if held.has_all(pattern.live):
            self._jump(pattern, held, left)

    def _jump(self, pattern: Pattern, held: Held, left: int) -> None:
        least = max(LAST, pattern.period)
        most = min(left - least, held.most)
        number = most // pattern.period * pattern.period
        if number < LEAST:
            return
        if self._pricer is not None:
            steady = _difference(self._counts[-1], self._counts[-1 - pattern.period])
            self._settle_time()
            self._steady = steady, number // pattern.period, pattern.period
            self._counts = self._counts[-1:]
        with _disable_current_modes():
            blocks = held.let_go(pattern.live)
            self._memory.pause()
            try:
                pattern.replay(blocks, number, _new_block(self._device))
            finally:
                self._memory.resume(self._device, pattern.live, pattern.after(number), blocks)
            held.take_up(blocks, number, pattern)
            held.count_on(self._counters, number)
        self._expected = _requested_bytes(self._device), pattern.requested_bytes(number)
        self.shown = self.shown or self.rounds - 1
        self.skipped += number
        if left - number > least:  # a sliding window is full from there on
            self._seen, self._marks, self._is_watched = -1, [], True

    def finish(self) -> None:
        """The loop has ended: count the time of the tokens that were left out."""
        self._settle_time()

    @guarded("the time of a decode loop")
    def _settle_time(self) -> None:
        """Count the tokens left out: one half as the steady ones, the other as the last ones.

        The work of a token grows by a constant, so this is their sum.
        """
        if self._steady is None:
            return
        first, times, period = self._steady
        self._steady = None
        last = first
        if len(self._counts) > period:
            last = _difference(self._counts[-1], self._counts[-1 - period])
        self._pricer.repeat(first, times - times // 2)
        self._pricer.repeat(last, times // 2)


def _settle_longest(values: Mapping[str, Any], prompt: int) -> None:
    """Let completions of the longest length that was asked for have no end before it.

    What follows from their ids then has the largest size, and rests on nothing that is made up.
    """
    ids, criteria = values["input_ids"], values.get("stopping_criteria")
    if not ids.is_cuda or not is_known(ids) or ids.shape[1] != getattr(criteria, "max_length", 0):
        return
    config = values.get("generation_config")
    named = (getattr(config, name, None) for name in ("eos_token_id", "pad_token_id"))
    every = (i for one in named for i in (one if isinstance(one, list) else [one]))
    ends = {i for i in every if i is not None}
    other = next(i for i in itertools.count() if i not in ends)
    completions = alias(ids)[:, prompt:]
    for end in ends:
        completions.masked_fill_(completions == end, other)
    note_known(ids)


def _difference(later: Mapping[int, int], before: Mapping[int, int]) -> dict[int, int]:
    changes = {kind: count - before.get(kind, 0) for kind, count in later.items()}
    return {kind: count for kind, count in changes.items() if count}


def _mark(device: int) -> Mark:
    count = torch._C._cuda_memoryStats(device)["allocation"]["all"]
    return count["allocated"], count["freed"]


def _requested_bytes(device: int) -> int:
    return int(torch._C._cuda_memoryStats(device)["requested_bytes"]["all"]["allocated"])


def _new_block(device: int) -> Callable[[int], torch.Tensor]:
    def new(size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=where)

    where = torch.device("cuda", device)
    return new


class Held:
    """The tensors and counters that a loop holds in its variables."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.most = sys.maxsize
        """Tokens until a sliding window is full."""
        self._tensors: dict[int, list[torch.Tensor]] = {}
        self._objects: list[Any] = []
        self._seen: set[int] = set()
        for value in values.values():
            self._search(value, _DEPTH)

    def _search(self, value: Any, depth: int) -> None:
        if depth == 0 or id(value) in self._seen:
            return
        if isinstance(value, torch.Tensor):
            self._seen.add(id(value))
            if value.is_cuda and value.layout is torch.strided:
                address = value.untyped_storage().data_ptr()
                self._tensors.setdefault(address, []).append(value)
        elif isinstance(value, dict | UserDict):
            for one in value.values():
                self._search(one, depth - 1)
        elif isinstance(value, list | tuple):
            for one in value:
                self._search(one, depth - 1)
        elif _is_state(value):
            self._seen.add(id(value))
            self._objects.append(value)
            window, length = getattr(value, "sliding_window", None), _length(value)
            if window and length is not None and length < window:
                self.most = min(self.most, window - length - LAST)
            for one in vars(value).values():
                self._search(one, depth - 1)

    def has_all(self, live: Mapping[Block, dict[str, Any]]) -> bool:
        """True if each block is that of tensors which can be given another one."""
        return all(entry["addr"] in self._tensors for entry in live.values())

    def counters(self) -> Iterator[tuple[Any, str, int]]:
        """The whole numbers of a cache: of attributes, and of tensors with one element."""
        for one in self._objects:
            for name, value in vars(one).items():
                if isinstance(value, int) and not isinstance(value, bool):
                    yield one, name, value
                elif isinstance(value, torch.Tensor) and _is_counter(value):
                    yield one, name, int(alias(value))

    def count_on(self, before: Mapping[tuple[int, str], int], number: int) -> None:
        """Raise the counters that rose by one with each token."""
        for one, name, value in list(self.counters()):
            if value - before.get((id(one), name), value) != _BACK:
                continue
            counter = getattr(one, name)
            if isinstance(counter, torch.Tensor):
                alias(counter).add_(number)
            else:
                setattr(one, name, value + number)

    def let_go(self, live: Mapping[Block, dict[str, Any]]) -> dict[Block, Any]:
        """Take the blocks from their tensors, and return what alone keeps them."""
        found: dict[Block, Any] = {}
        self._before: dict[Block, list[tuple[torch.Tensor, _Layout]]] = {}
        for block, entry in live.items():
            tensors = self._tensors[entry["addr"]]
            found[block] = tensors[0].untyped_storage()
            self._before[block] = [(one, _Layout(one, entry["size"])) for one in tensors]
            bases = [one._base for one in tensors if one._base is not None]  # they keep the block
            for one in (*tensors, *bases):
                one.data = torch.empty(0, dtype=one.dtype, device=one.device)
        self._tensors.clear()
        return found

    def take_up(self, blocks: Mapping[Block, torch.Tensor], number: int, pattern: Pattern) -> None:
        """Give the tensors their blocks after `number` tokens."""
        for (step, index), tensors in self._before.items():
            storage = blocks[step + number, index].untyped_storage()
            grows = pattern.growth(step, index)
            for tensor, layout in tensors:
                tensor.data = layout.made_of(storage, tensor, grows, number, pattern.period)


class _Layout:
    """The place of a tensor in its block, and its values if they are integers that are known."""

    def __init__(self, tensor: torch.Tensor, size: int) -> None:
        self.shape, self.stride = list(tensor.shape), tensor.stride()
        self.offset, self.size = tensor.storage_offset(), size
        self.note = noted(tensor)
        is_uniform = self.note is not None and self.note.state == UNIFORM
        self.values = None
        if not tensor.is_floating_point() and is_known(tensor) and not is_uniform:
            self.values = alias(tensor).clone()
        self.is_whole = tensor.is_contiguous() and tensor.nbytes == size

    def made_of(
        self,
        storage: torch.UntypedStorage,
        tensor: torch.Tensor,
        grows: int,
        number: int,
        period: int,
    ) -> torch.Tensor:
        """The tensor after `number` tokens, with `grows` more bytes in each period."""
        new = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        dim = self._growing(grows, period) if grows and self.is_whole else None
        shape, stride = list(self.shape), self.stride
        if dim is not None:
            shape[dim] += number
            stride = torch.empty(shape, device="meta").stride()
        new.set_(storage, self.offset, shape, stride)
        if self.note is not None:
            setattr(storage, NOTE, self.note)
        if self.values is not None:
            alias(new).copy_(self.values if dim is None else _longer(self.values, dim, number))
        return new

    def _growing(self, grows: int, period: int) -> int | None:
        """The dimension that is longer by one with each token."""
        dims = list(range(len(self.shape)))
        likely = [len(dims) - 2] if len(dims) > 2 else [len(dims) - 1]
        for dim in [*likely, *reversed(dims)]:
            if self.shape[dim] * grows == self.size * period:
                return dim
        raise ValueError(f"a tensor of {self.shape} grows by {grows} bytes")


def _longer(values: torch.Tensor, dim: int, number: int) -> torch.Tensor:
    """Values that go on: in their steps if these are equal (positions, masks), else in turns."""
    values = values.movedim(dim, -1)
    tail = values[..., -_TAIL:]
    if values.dtype is torch.bool:
        more = tail[..., -1:].expand(*tail.shape[:-1], number)
    else:
        steps = tail.diff(dim=-1)
        if steps.numel() and bool((steps == steps[..., :1]).all()):
            more = tail[..., -1:] + steps[..., -1:] * torch.arange(1, number + 1)
        else:
            more = tail.repeat(*[1] * (tail.dim() - 1), math.ceil(number / tail.shape[-1]))
            more = more[..., :number]
    return torch.cat([values, more.to(values.dtype)], dim=-1).movedim(-1, dim)


def _is_state(value: Any) -> bool:
    """True for caches and other objects of transformers without parameters of their own."""
    module = type(value).__module__
    known = module.startswith(("transformers", "unsloth", "trl"))
    return known and not isinstance(value, torch.nn.Module) and hasattr(value, "__dict__")


def _is_counter(value: torch.Tensor) -> bool:
    return value.is_cuda and value.numel() == 1 and not value.is_floating_point()


def _length(layer: Any) -> int | None:
    length = getattr(layer, "cumulative_length", None)
    if isinstance(length, torch.Tensor):
        return int(alias(length)) if length.is_cuda else int(length)
    return length if isinstance(length, int) else None
