"""A trace at full depth from traces of a few layers, event for event.

A model of many equal layers repeats itself: one more layer inserts the same run of events once
into each phase. Models of two, three and four such layers tell which runs these are, and which
block each event of a run frees, so that the events of all layers follow without tracing them.
Whatever is not so (layers that differ, blocks whose order changes with the depth) is None, and is
traced at full depth.
"""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from tuner.errors import TunerError
from tuner.estimators.compiler.alignment import align
from tuner.estimators.compiler.compile import layer_types, with_layers
from tuner.estimators.compiler.layouts import CompileError
from tuner.estimators.replay.allocator import round_size
from tuner.estimators.replay.memory import category_of
from tuner.estimators.tracing.timeline import Block, Op, Timeline, Work
from tuner.estimators.tracing.trace import Trace, trace
from tuner.records import Configuration
from tuner.space.distributed_knobs import gpus_per_trial
from tuner.workloads.base import Workload
from tuner.workloads.offload import decoder_layers

Group = tuple[int, str, bool, bool]
"""Blocks that are alike: rounded size, category, whether logits, whether paged."""


class FreeRule(NamedTuple):
    """Which of the live blocks of its group a free is of, counted from the newest or the oldest.

    `first` without further layers, `by_layer` more for each of them, and in their runs `by_run`
    more from one run to the next.
    """

    newest: bool
    first: int
    by_layer: int
    by_run: int = 0

    def place(self, more: int, run: int) -> int:
        """That of a model with so many more layers, in its run of this number."""
        return self.first + self.by_layer * more + self.by_run * run


class _Different(Exception):  # noqa: N818 - no error: a reason to trace all layers
    """The traces are not repetitions of one another."""


class _Free(NamedTuple):
    from_newest: int
    from_oldest: int


class _Traced:
    """One trace as groups of blocks: a token for each event, and the place of each free."""

    def __init__(self, traced: Trace, numbers: dict[Group, int]) -> None:
        self.trace, timeline = traced, traced.timeline
        groups = [numbers.setdefault(_group(block), len(numbers)) for block in timeline.blocks]
        live: dict[int, list[int]] = defaultdict(list)
        self.tokens = np.empty(len(timeline.events), dtype=np.int64)
        self.frees: list[_Free | None] = []
        for event, (block, sign) in enumerate(timeline.events):
            group = groups[block]
            self.tokens[event] = 2 * group + (sign > 0)
            if sign > 0:
                live[group].append(block)
                self.frees.append(None)
                continue
            place = live[group].index(block)
            self.frees.append(_Free(len(live[group]) - 1 - place, place))
            del live[group][place]
        self.spans = [*pairwise([*(mark.event for mark in timeline.marks), len(self.tokens)])]


def _group(block: Block) -> Group:
    size = 0 if block.paged else round_size(block.size_bytes)
    return size, str(category_of(block)), block.is_logits, block.paged


class _Piece(NamedTuple):
    """Events of the model with one more layer: those that the base has too, or a layer's run."""

    start: int
    end: int
    repeated: bool

    @property
    def times(self) -> int:
        """How often the model with two more layers has it."""
        return 2 if self.repeated else 1


@dataclass(frozen=True, slots=True)
class Depth:
    """What traces of a base model and of one and two more layers say of any depth."""

    base: _Traced
    one: _Traced
    two: _Traced

    def with_layers(self, more: int) -> Trace:
        """The trace of the base model with so many more layers. Raises `_Different`."""
        traces = [part.trace for part in (self.base, self.one, self.two)]
        first, second, third = traces
        if not first.remarks == second.remarks == third.remarks:
            raise _Different
        timeline = self._events(more)
        timeline.works, timeline.ops = _operators([t.timeline for t in traces], more)
        return replace(
            first,
            timeline=timeline,
            trainable_params=_line([t.trainable_params for t in traces], more),
            total_params=_line([t.total_params for t in traces], more),
            gradient_bytes=(),
        )

    def _events(self, more: int) -> Timeline:
        source = self.one.trace.timeline
        result = Timeline(marks=[])
        live: dict[int, list[int]] = defaultdict(list)
        phases = self._phases()
        rules = self._rules(phases)
        for mark, pieces in zip(source.marks, phases, strict=True):
            result.marks.append(mark._replace(event=len(result.events)))
            for start, end, repeated in pieces:
                for run in range(more if repeated else 1):
                    for event in range(start, end):
                        group, rule = int(self.one.tokens[event]) >> 1, rules[event]
                        place = None if rule is None else rule.place(more, run)
                        newest = rule is not None and rule.newest
                        _add(result, source, event, live[group], place, newest=newest)
        return result

    def _phases(self) -> list[list[_Piece]]:
        """For each phase, the events of the model with one more layer in pieces.

        Those of the model with two more are the same ones, with each layer's run twice. Raises
        `_Different`.
        """
        if not _same_marks(self.base, self.one) or not _same_marks(self.one, self.two):
            raise _Different
        found = []
        spans = zip(self.base.spans, self.one.spans, self.two.spans, strict=True)
        for base, one, two in spans:
            alignment = align(self.base.tokens[slice(*base)], self.one.tokens[slice(*one)])
            if alignment is None:
                raise _Different
            theirs = self.two.tokens[slice(*two)]
            pieces: list[_Piece] = []
            at = 0
            for piece in _split(alignment.late + one[0], one):
                added = _repeated(piece, self.one.tokens, theirs[at:])
                at += sum(each.times * (each.end - each.start) for each in added)
                pieces += added
            if at != len(theirs):
                raise _Different
            found.append(pieces)
        return found

    def _rules(self, phases: list[list[_Piece]]) -> list[FreeRule | None]:
        """For each event of the model with one more layer, which block it frees."""
        rules: list[FreeRule | None] = [None] * len(self.one.tokens)
        for pieces, base, two in zip(phases, self.base.spans, self.two.spans, strict=True):
            at_base, at_two = base[0], two[0]
            for piece in pieces:
                length = piece.end - piece.start
                again = [at_two + number * length for number in range(piece.times)]
                for offset in range(length):
                    free = self.one.frees[piece.start + offset]
                    if free is not None:
                        before = None if piece.repeated else self.base.frees[at_base + offset]
                        others = [self.two.frees[place + offset] for place in again]
                        rules[piece.start + offset] = _rule(before, free, others)
                at_two += piece.times * length
                at_base += 0 if piece.repeated else length
        return rules


def _repeated(piece: _Piece, tokens: Any, theirs: Any) -> list[_Piece]:
    """`piece` as it begins `theirs`, where a layer's run is there twice; in parts where it must be.

    Where all layers allocate and then all free, what one more layer inserts is a run of both, and
    what two insert is none: each part is there twice. Raises `_Different`.
    """
    if not piece.repeated:
        length = piece.end - piece.start
        if not np.array_equal(tokens[piece.start : piece.end], theirs[:length]):
            raise _Different
        return [piece]
    found: list[_Piece] = []
    start, at = piece.start, 0
    while start < piece.end:
        end = next(
            (
                end
                for end in range(piece.end, start, -1)
                if np.array_equal(
                    np.tile(tokens[start:end], 2), theirs[at : at + 2 * (end - start)]
                )
            ),
            None,
        )
        if end is None:
            raise _Different
        found.append(_Piece(start, end, repeated=True))
        start, at = end, at + 2 * (end - start)
    return found


def _same_marks(one: _Traced, other: _Traced) -> bool:
    return [mark[1:] for mark in one.trace.timeline.marks] == [
        mark[1:] for mark in other.trace.timeline.marks
    ]


def _split(places: Any, span: tuple[int, int]) -> Iterator[_Piece]:
    """The events of `span` in pieces; `places` are those that the base model has."""
    at = start = span[0]
    for place in places.tolist():
        if place != at:
            if at > start:
                yield _Piece(start, at, repeated=False)
            yield _Piece(at, place, repeated=True)
            start = place
        at = place + 1
    if at > start:
        yield _Piece(start, at, repeated=False)
    if at < span[1]:
        yield _Piece(at, span[1], repeated=True)


def _rule(before: _Free | None, one: _Free, two: Sequence[_Free | None]) -> FreeRule:
    """The rule that holds for one more layer and for two.

    `before` is the free of the base model, None in a layer's run, of which `two` has both. Runs
    that are all the same are looked for first, then those that count from the first or the last.
    """
    rules = []
    for number, newest in enumerate((True, False)):
        here, there = one[number], [free[number] for free in two if free is not None]
        by_layer, by_run = there[0] - here, there[-1] - there[0]
        if before is None or here - before[number] == by_layer:
            rules.append(FreeRule(newest, here - by_layer, by_layer, by_run))
    found = [rule for rule in rules if not rule.by_run] + [
        rule for rule in rules if not rule.by_layer or rule.by_run == -rule.by_layer
    ]
    if not found:
        raise _Different
    return found[0]


def _add(
    result: Timeline,
    source: Timeline,
    event: int,
    live: list[int],
    place: int | None,
    *,
    newest: bool,
) -> None:
    """Add an event like that of `source`: a new block, or the end of one that is `live`."""
    now = len(result.events)
    if place is None:
        live.append(len(result.blocks))
        result.events.append((len(result.blocks), 1))
        block = source.blocks[source.events[event][0]]
        result.blocks.append(replace(block, born_event=now, died_event=-1))
        return
    if not 0 <= place < len(live):
        raise _Different
    freed = live.pop(-1 - place if newest else place)
    result.events.append((freed, -1))
    result.blocks[freed].died_event = now


def _line(values: Sequence[int], more: int) -> int:
    """What follows the three values at so many layers more than the first. Raises `_Different`."""
    first, second, third = values
    if third - second != second - first:
        raise _Different
    return first + more * (second - first)


def _operators(timelines: Sequence[Timeline], more: int) -> tuple[list[Work], list[Op]]:
    """The operators at full depth, and each of their executions; in a phase without an order."""
    counts = [_executions(timeline) for timeline in timelines]
    numbers: dict[Work, int] = {}
    ops: list[Op] = []
    left: list[dict[Any, list[Work]]] = [defaultdict(list) for _ in counts]
    for key in dict.fromkeys(key for each in counts for key in each):
        mark, recompute, work = key
        first, second, third = (each[key] for each in counts)
        if third - second == second - first >= 0:
            times = first + more * (second - first)
            ops += [Op(numbers.setdefault(work, len(numbers)), mark, recompute)] * times
            continue
        kind = mark, recompute, work.name, work.kind, work.dtype, work.shape, work.workspace_bytes
        for works, times in zip(left, (first, second, third), strict=True):
            works[kind] += [work] * times
    for kind in dict.fromkeys(kind for works in left for kind in works):
        for work in _grown([works[kind] for works in left], more):
            ops.append(Op(numbers.setdefault(work, len(numbers)), kind[0], kind[1]))
    return [*numbers], ops


def _executions(timeline: Timeline) -> Counter[tuple[int, bool, Work]]:
    return Counter((op.mark, op.recompute, timeline.works[op.work]) for op in timeline.ops)


def _grown(works: Sequence[list[Work]], more: int) -> Iterator[Work]:
    """Operators that take in all layers, as an optimizer's: they grow with the depth."""
    if len({len(each) for each in works}) != 1:
        raise _Different
    for alike in zip(*works, strict=True):
        moved = _line([work.bytes_moved for work in alike], more)
        flops = _line([work.flops for work in alike], more)
        yield alike[0]._replace(flops=flops, tensor_bytes=(moved,))


def trace_deep(
    workload: Workload,
    model_config: Any,
    configuration: Configuration,
    *,
    compute_capability: tuple[int, int],
    name_modules: bool = False,
) -> Trace:
    """What `trace` returns, from traces of a few layers where the others repeat them."""

    def traced(model: Any) -> Trace:
        return trace(
            workload,
            model,
            configuration,
            compute_capability=compute_capability,
            name_modules=name_modules,
        )

    found = None
    alone = gpus_per_trial(configuration) == 1
    if alone and workload.name == "causal_lm" and not configuration.get("images", 0):
        found = _deepened(model_config, traced)
    return found if found is not None else traced(model_config)


BASE = 2
"""Layers of the base model: the first, behind the embedding, and the last, before the head."""

LEAST_LAYERS = 16
"""Three models of few layers take as long as one of some twelve to fifteen: beside its layers a
trace has a part that takes as long as one or two of them."""


def _deepened(model_config: Any, traced: Callable[[Any], Trace]) -> Trace | None:
    """The trace of the whole model from models of few layers; None where it cannot be had so."""
    try:
        types = layer_types(model_config)
        if len(types) < LEAST_LAYERS or len(set(types)) > 1:
            return None
        if not _are_alike(model_config, len(types)):
            return None
        numbers: dict[Group, int] = {}
        models = [with_layers(model_config, types[: BASE + more]) for more in range(3)]
        parts = [_Traced(_shallow(traced, model), numbers) for model in models]
        return Depth(*parts).with_layers(len(types) - BASE)
    except (CompileError, _Different):
        return None


def _shallow(traced: Callable[[Any], Trace], model: Any) -> Trace:
    """The trace of a model of few layers, which cannot be made of some kinds: `_Different`."""
    try:
        return traced(model)
    except TunerError:
        raise
    except Exception as error:
        raise _Different from error


def _are_alike(model_config: Any, layers: int) -> bool:
    """Whether all layers have the same modules, parameters and settings."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(model_config))
    found = decoder_layers(model)
    first = _look(found[0])
    return len(found) == layers and all(_look(layer) == first for layer in found[1:])


_NUMBER = ("layer_idx", "layer_id", "layer_number", "idx")


def _look(layer: torch.nn.Module) -> list[Any]:
    """What a layer consists of, without its own number."""
    return [
        (
            name,
            type(module),
            [
                (key, value)
                for key, value in vars(module).items()
                if isinstance(value, bool | int | float | str | tuple) and key not in _NUMBER
            ],
            [(key, p.shape, p.dtype) for key, p in module.named_parameters(recurse=False)],
        )
        for name, module in layer.named_modules()
    ]
