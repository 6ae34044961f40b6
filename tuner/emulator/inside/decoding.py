"""Extrapolates the decode loops of transformers' `generate`, whose tokens repeat each other.

Each token runs the same operators, and its blocks of memory are those of the token before, larger
by a constant. Once some tokens have shown this pattern, the allocator itself gets the requests of
the tokens to come, in their order, without the operators; the last tokens run again. The program
goes on with tensors of the final length, whose token ids are made up.

vLLM, which generates for TRL's trainers, is not emulated. A colocated engine takes its declared
share of the device's memory (`gpu_memory_utilization`), and gives it back while it sleeps. A
server's own memory is elsewhere. Completions are made up, and have the longest length that was
asked for.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import sys
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tuner.emulator.inside.failing import send
from tuner.emulator.inside.faults import guarded, note
from tuner.emulator.inside.memory import MemoryWatch
from tuner.emulator.inside.notes import NOTE, UNIFORM, alias, is_known, note_known, noted
from tuner.emulator.inside.process import replaces, when_imported

_FIRST = 32
"""Made-up tokens begin here: special ones are often the first of a vocabulary."""

_TOKENS = 64
"""Different made-up tokens."""


class _Engines:
    """The engines of this process, which generate in a context of `phase`."""

    def __init__(self, phase: Callable[[], AbstractContextManager[None]]) -> None:
        self._phase = phase

    def follow(self, module: Any) -> None:
        """Stand for the engines of `trl.generation.vllm_generation`."""
        generation, engines = module.VLLMGeneration, self

        def start(of: Any) -> None:
            engines._start(of)

        def generate(of: Any, prompts: Any, *args: Any, **kwargs: Any) -> Any:
            return engines._generate(of, prompts)

        generation._init_vllm, generation.generate = start, generate

    def _start(self, of: Any) -> None:
        of.llm = of.vllm_client = _Anything()
        of._llm_weights_sleeping = False  # nothing is lost while it sleeps
        of._tuner_engine = _Reserved(0)
        size = 0
        if of.mode == "colocate":
            size = int(of.gpu_memory_utilization * _device_bytes())
            with self._phase():
                of._tuner_engine = _Reserved(size)
                if of.enable_sleep_mode:
                    of._tuner_engine = _Reserved(0)
        send(
            {
                "event": "engine",
                "mode": of.mode,
                "share": of.gpu_memory_utilization,
                "bytes": size,
                "sleeps": bool(of.enable_sleep_mode),
            }
        )

    def _generate(self, of: Any, prompts: list[list[int]]) -> tuple[Any, ...]:
        with self._phase():
            if of.mode == "colocate" and of.enable_sleep_mode:
                of._tuner_engine = _Reserved(int(of.gpu_memory_utilization * _device_bytes()))
                of._tuner_engine = _Reserved(0)
        length = int((of.generation_kwargs or {}).get("max_tokens", of.max_completion_length))
        tokens = [
            [_FIRST + (row + n) % _TOKENS for n in range(length)] for row, _ in enumerate(prompts)
        ]
        chances = [[[-1.0]] * length for _ in prompts]
        return prompts, tokens, chances, [[[one] for one in row] for row in tokens]


class _Reserved:
    """Memory of an engine, in a pool of its own: no other tensor gets it."""

    def __init__(self, size: int) -> None:
        import torch

        self._block = None
        if size:
            self._pool = torch.cuda.MemPool()
            with torch.cuda.use_mem_pool(self._pool):
                self._block = torch.empty(size, dtype=torch.uint8, device="cuda")


class _Anything:
    """An object with every attribute, which does nothing when it is called."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __getitem__(self, name: str) -> Any:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self


def _device_bytes() -> int:
    """The memory of the GPU that is asked about: a run may have a larger one."""
    import torch

    settings = json.loads(os.environ.get("TUNER_EMULATOR_SETTINGS") or "{}")
    return int(torch.cuda.mem_get_info()[1]) // int(settings.get("room", 1))


PERIODS = (1, 2, 4, 8, 16)
"""Tokens after which requests may repeat."""

_COMPARED = 8
"""At least the last tokens that are compared with those before."""

_Block = tuple[int, int]
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


class _Pattern:
    """The requests of `period` tokens, which repeat; `live` are the blocks alive after them."""

    def __init__(
        self, rounds: Sequence[Sequence[Request]], period: int, live: Mapping[_Block, Entry]
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

    def after(self, number: int) -> dict[_Block, Entry]:
        """The entries of the blocks that are alive `number` tokens later, but for addresses."""
        times = number // self.period
        return {
            (step + number, index): {
                **entry,
                "size": entry["size"] + times * self.growth(step, index),
            }
            for (step, index), entry in self.live.items()
        }

    def replay(self, blocks: dict[_Block, Any], number: int, new: Callable[[int], Any]) -> None:
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


def find_pattern(entries: Sequence[Entry], marks: Sequence[Mark]) -> _Pattern | None:
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
            return _Pattern(pattern, period, kept)
    return None


def _rounds(
    entries: Sequence[Entry], marks: Sequence[Mark]
) -> tuple[list[list[Request]], dict[_Block, Entry]] | None:
    """The requests of each token, and the blocks that are alive at the end."""
    rounds: list[list[Request]] = [[] for _ in marks[1:]]
    at: dict[int, _Block] = {}
    live: dict[_Block, Entry] = {}
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
        when_imported("trl.generation.vllm_generation", _Engines(self._phase).follow)

    def _follow_calls(self, module: Any) -> None:
        owner_name, name = GENERATES[module.__name__]
        owner = getattr(module, owner_name, None)
        if owner is None or name not in vars(owner):
            return

        @replaces(owner, name)
        def run_and_note(call: Any, *args: Any, **kwargs: Any) -> Any:
            with self._phase(), self._loop():
                return call(*args, **kwargs)

    def _follow_loops(self, module: Any) -> None:
        """Follow the loops of `transformers.generation.utils`, at the head of each round."""
        mixin = module.GenerationMixin
        if not hasattr(mixin, "_has_unfinished_sequences"):  # releases before 4.39
            return

        @replaces(mixin, "_has_unfinished_sequences")
        def check_and_note(check: Any, *args: Any, **kwargs: Any) -> Any:
            goes_on = check(*args, **kwargs)
            frame = sys._getframe(2)
            if self._loops and frame.f_code.co_name == "_sample":
                self._loops[-1].at_head(frame, goes_on=bool(goes_on))
            return goes_on

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
            self._counters = {(id(o), name): n for o, name, n in _Held(values).counters()}
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
        held = _Held(values)
        if all(entry["addr"] in held.tensors for entry in pattern.live.values()):
            self._jump(pattern, held, left)

    def _jump(self, pattern: _Pattern, held: _Held, left: int) -> None:
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
                new = functools.partial(
                    torch.empty, dtype=torch.uint8, device=torch.device("cuda", self._device)
                )
                pattern.replay(blocks, number, new)
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


class _Held:
    """The tensors and counters that a loop holds in its variables."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.most = sys.maxsize
        """Tokens until a sliding window is full."""
        self.tensors: dict[int, list[torch.Tensor]] = {}
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
                self.tensors.setdefault(address, []).append(value)
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

    def let_go(self, live: Mapping[_Block, dict[str, Any]]) -> dict[_Block, Any]:
        """Take the blocks from their tensors, and return what alone keeps them."""
        found: dict[_Block, Any] = {}
        self._before: dict[_Block, list[tuple[torch.Tensor, _Layout]]] = {}
        for block, entry in live.items():
            tensors = self.tensors[entry["addr"]]
            found[block] = tensors[0].untyped_storage()
            self._before[block] = [(one, _Layout(one, entry["size"])) for one in tensors]
            bases = [one._base for one in tensors if one._base is not None]  # they keep the block
            for one in (*tensors, *bases):
                one.data = torch.empty(0, dtype=one.dtype, device=one.device)
        self.tensors.clear()
        return found

    def take_up(
        self, blocks: Mapping[_Block, torch.Tensor], number: int, pattern: _Pattern
    ) -> None:
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
