"""A trace at full depth from traces of a few layers, event for event.

A model of many equal layers repeats itself: one more layer inserts the same run of events once
into each phase. So it is with layers of two kinds that take turns (attention to all tokens, or in
a window), where each kind has its run. A model of a layer of each kind, two at least, and models
with one more of each tell which runs these are, and which block each event of a run frees, so that
the events of all layers follow without tracing them; a model with two more must have just the
events that follow for it.
Whatever is not so (more kinds, blocks whose order changes with the depth) is None, and is traced
at full depth.
"""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice, pairwise
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

    `first` in the base model, `by_kind` more for each further layer of a kind, and in the runs of
    layers `by_run` more from one run to the next.
    """

    newest: bool
    first: int
    by_kind: tuple[int, ...]
    by_run: int = 0

    def place(self, more: Sequence[int], run: int) -> int:
        """That of a model with so many more layers of each kind, in its run of this number."""
        by_layer = sum(each * number for each, number in zip(self.by_kind, more, strict=True))
        return self.first + by_layer + self.by_run * run


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


class _Shared(NamedTuple):
    """Events of the base model that all have."""

    start: int
    end: int


class _Repeated(NamedTuple):
    """A run of events for each further layer.

    By kind of layer: where the model with one more of it has the run, and of how many events.
    `backward` if the run of the last layer comes first, `alike` if those of all kinds are.
    """

    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    backward: bool
    alike: bool

    def order(self, kinds: Sequence[int]) -> Sequence[int]:
        """The kinds of further layers in the order of their runs."""
        return kinds[::-1] if self.backward else kinds


class _Insertion(NamedTuple):
    """A run of a model that the base model lacks, and before which of its events."""

    before: int
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Depth:
    """What traces of a few layers say of any depth.

    Those of a base model, of one more layer of each kind, and of two more: one of each kind, or
    both of the only one.
    """

    base: _Traced
    ones: tuple[_Traced, ...]
    two: _Traced

    def with_layers(self, kinds: Sequence[int]) -> Trace:
        """The trace of the base model with further layers of these kinds. Raises `_Different`."""
        traces = [part.trace for part in (self.base, *self.ones, self.two)]
        base = traces[0]
        if any(other.remarks != base.remarks for other in traces):
            raise _Different
        more = [kinds.count(kind) for kind in range(len(self.ones))]
        timeline = self._events(kinds, more)
        timeline.works, timeline.ops = _operators([t.timeline for t in traces], more)
        return replace(
            base,
            timeline=timeline,
            trainable_params=_line([t.trainable_params for t in traces], more),
            total_params=_line([t.total_params for t in traces], more),
            gradient_bytes=(),
        )

    @property
    def _pair(self) -> tuple[int, int]:
        """The kinds of the further layers of the model that has two."""
        return 0, len(self.ones) - 1

    def _events(self, kinds: Sequence[int], more: Sequence[int]) -> Timeline:
        result = Timeline(marks=[])
        live: dict[int, list[int]] = defaultdict(list)

        def add(source: _Traced, rules: Sequence[FreeRule | None], event: int, run: int) -> None:
            rule = rules[event]
            place = None if rule is None else rule.place(more, run)
            newest = rule is not None and rule.newest
            blocks = live[int(source.tokens[event]) >> 1]
            _add(result, source.trace.timeline, event, blocks, place, newest=newest)

        phases = self._phases()
        shared, repeated = self._rules(phases)
        for mark, pieces in zip(self.base.trace.timeline.marks, phases, strict=True):
            result.marks.append(mark._replace(event=len(result.events)))
            for piece in pieces:
                if isinstance(piece, _Shared):
                    for event in range(piece.start, piece.end):
                        add(self.base, shared, event, 0)
                    continue
                for run, kind in enumerate(piece.order(kinds)):
                    start = piece.starts[kind]
                    for event in range(start, start + piece.lengths[kind]):
                        add(self.ones[kind], repeated[kind], event, run)
        return result

    def _phases(self) -> list[list[_Shared | _Repeated]]:
        """For each phase, its events in pieces. Raises `_Different`."""
        if any(_marks(other) != _marks(self.base) for other in (*self.ones, self.two)):
            raise _Different
        found = []
        for phase, (start, end) in enumerate(self.base.spans):
            theirs = self.two.tokens[slice(*self.two.spans[phase])]
            inserted = [[*_insertions(self.base, one, phase)] for one in self.ones]
            if len({len(each) for each in inserted}) > 1:
                raise _Different
            pieces: list[_Shared | _Repeated] = []
            tokens: list[Any] = []
            at_base, at_two = start, 0
            for scattered in zip(*inserted, strict=True):
                together = self._at_one_place(scattered)
                before = together[0].before
                pieces.append(_Shared(at_base, before))
                tokens.append(self.base.tokens[at_base:before])
                at_two += before - at_base
                for part in self._repeated(together, theirs[at_two:]):
                    pieces.append(part)
                    for kind in part.order(self._pair):
                        tokens.append(self._tokens(part, kind))
                        at_two += part.lengths[kind]
                at_base = before
            pieces.append(_Shared(at_base, end))
            tokens.append(self.base.tokens[at_base:end])
            if not np.array_equal(np.concatenate(tokens), theirs):
                raise _Different
            found.append(pieces)
        return found

    def _tokens(self, piece: _Repeated, kind: int) -> Any:
        start = piece.starts[kind]
        return self.ones[kind].tokens[start : start + piece.lengths[kind]]

    def _at_one_place(self, scattered: Sequence[_Insertion]) -> list[_Insertion]:
        """Runs of all kinds before the same event of the base model. Raises `_Different`.

        A run that repeats what stands before it may as well be the earlier of the two.
        """
        place = min(each.before for each in scattered)
        found = []
        for one, each in zip(self.ones, scattered, strict=True):
            shift = each.before - place
            start, end = each.start, each.start + each.length
            if not np.array_equal(one.tokens[start - shift : start], one.tokens[end - shift : end]):
                raise _Different
            found.append(_Insertion(place, start - shift, each.length))
        return found

    def _repeated(self, together: Sequence[_Insertion], theirs: Any) -> Iterator[_Repeated]:
        """Runs as they begin `theirs`, where two layers have them; in parts where it must be.

        Where all layers allocate and then all free, what one more layer inserts is a run of both,
        and what two insert is none: each part is there twice. Raises `_Different`.
        """
        starts = tuple(each.start for each in together)
        lengths = tuple(each.length for each in together)
        runs = [
            one.tokens[start : start + length]
            for one, start, length in zip(self.ones, starts, lengths, strict=True)
        ]
        alike = all(np.array_equal(run, runs[0]) for run in runs)
        for backward in (False, True):
            whole = _Repeated(starts, lengths, backward, alike)
            twice = np.concatenate([runs[kind] for kind in whole.order(self._pair)])
            if np.array_equal(twice, theirs[: len(twice)]):
                yield whole
                return
        if not alike:
            raise _Different
        at, end = 0, len(runs[0])
        while at < end:
            ends = (
                stop
                for stop in range(end, at, -1)
                if np.array_equal(np.tile(runs[0][at:stop], 2), theirs[2 * at : 2 * stop])
            )
            stop = next(ends, None)
            if stop is None:
                raise _Different
            moved = tuple(start + at for start in starts)
            yield _Repeated(moved, (stop - at,) * len(starts), backward=False, alike=True)
            at = stop

    def _rules(
        self, phases: Sequence[Sequence[_Shared | _Repeated]]
    ) -> tuple[list[FreeRule | None], list[list[FreeRule | None]]]:
        """Which block each event frees: events of the base model, and those of runs by kind."""
        shared: list[FreeRule | None] = [None] * len(self.base.tokens)
        repeated: list[list[FreeRule | None]] = [[None] * len(one.tokens) for one in self.ones]
        for phase, pieces in enumerate(phases):
            at_ones = [one.spans[phase][0] for one in self.ones]
            at_two = self.two.spans[phase][0]
            for piece in pieces:
                if isinstance(piece, _Shared):
                    for number, event in enumerate(range(piece.start, piece.end)):
                        if (free := self.base.frees[event]) is not None:
                            ones = [
                                one.frees[at + number]
                                for one, at in zip(self.ones, at_ones, strict=True)
                            ]
                            shared[event] = _shared_rule(
                                free, ones, self.two.frees[at_two + number]
                            )
                    length = piece.end - piece.start
                    at_ones = [at + length for at in at_ones]
                    at_two += length
                    continue
                runs = []
                for kind in piece.order(self._pair):
                    runs.append((kind, at_two))
                    at_two += piece.lengths[kind]
                for kind, rules in enumerate(repeated):
                    self._note_rules(piece, kind, runs, rules)
                at_ones = [at + n for at, n in zip(at_ones, piece.lengths, strict=True)]
        return shared, repeated

    def _note_rules(
        self,
        piece: _Repeated,
        kind: int,
        runs: Sequence[tuple[int, int]],
        rules: list[FreeRule | None],
    ) -> None:
        """Note which block each event of a run of this kind frees.

        `runs` are those of the model with two more layers: the kind of each, and where it begins.
        """
        for number in range(piece.lengths[kind]):
            event = piece.starts[kind] + number
            free = self.ones[kind].frees[event]
            if free is None:
                continue
            found = None
            if piece.alike:
                starts = zip(self.ones, piece.starts, strict=True)
                ones = [one.frees[start + number] for one, start in starts]
                found = _run_rule(ones, [self.two.frees[at + number] for _, at in runs])
            if found is None:
                own = [self.two.frees[at + number] for each, at in runs if each == kind]
                found = _constant_rule(free, own, kinds=len(self.ones))
            rules[event] = found


def _insertions(base: _Traced, one: _Traced, phase: int) -> Iterator[_Insertion]:
    """The runs that the model of `one` has more in a phase. Raises `_Different`."""
    start, end = base.spans[phase]
    start_one, end_one = one.spans[phase]
    alignment = align(base.tokens[start:end], one.tokens[start_one:end_one])
    if alignment is None:
        raise _Different
    at = 0
    for number, place in enumerate([*alignment.late.tolist(), end_one - start_one]):
        if place > at:
            yield _Insertion(start + number, start_one + at, place - at)
        at = place + 1


def _marks(traced: _Traced) -> list[Any]:
    return [mark[1:] for mark in traced.trace.timeline.marks]


def _shared_rule(base: _Free, ones: Sequence[_Free | None], two: _Free | None) -> FreeRule:
    """The rule of an event that the base model has too. Raises `_Different`."""
    for number, newest in enumerate((True, False)):
        by_kind = tuple(one[number] - base[number] for one in ones if one is not None)
        if two is not None and two[number] - base[number] == by_kind[0] + by_kind[-1]:
            return FreeRule(newest, base[number], by_kind)
    raise _Different


def _run_rule(ones: Sequence[_Free | None], two: Sequence[_Free | None]) -> FreeRule | None:
    """The rule of an event in runs that are alike, by its frees in them; None if there is none.

    `ones` are those of the models with one more layer, `two` those of both runs of the model with
    two more. Runs that are all the same are looked for first, then those that count from the first
    or the last.
    """
    rules = []
    for number, newest in enumerate((True, False)):
        here = {free[number] for free in ones if free is not None}
        there = [free[number] for free in two if free is not None]
        if len(here) == 1:
            (place,) = here
            by_layer, by_run = there[0] - place, there[-1] - there[0]
            by_kind = (by_layer,) * len(ones)
            rules.append((by_layer, FreeRule(newest, place - by_layer, by_kind, by_run)))
    found = [rule for _, rule in rules if not rule.by_run] + [
        rule for by_layer, rule in rules if not by_layer or rule.by_run == -by_layer
    ]
    return found[0] if found else None


def _constant_rule(one: _Free, two: Sequence[_Free | None], *, kinds: int) -> FreeRule:
    """The rule of an event that frees the same place however many layers. Raises `_Different`."""
    for number, newest in enumerate((True, False)):
        if all(free is not None and free[number] == one[number] for free in two):
            return FreeRule(newest, one[number], (0,) * kinds)
    raise _Different


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


def _line(values: Sequence[int], more: Sequence[int]) -> int:
    """What follows for so many further layers of each kind. Raises `_Different`.

    `values` are those of the base model, of one more layer of each kind, and of two more layers.
    """
    first, *ones, two = values
    by_kind = [one - first for one in ones]
    if two - first != by_kind[0] + by_kind[-1]:
        raise _Different
    return first + sum(each * number for each, number in zip(by_kind, more, strict=True))


def _operators(timelines: Sequence[Timeline], more: Sequence[int]) -> tuple[list[Work], list[Op]]:
    """The operators at full depth, and each of their executions; in a phase without an order."""
    counts = [_executions(timeline) for timeline in timelines]
    numbers: dict[Work, int] = {}
    ops: list[Op] = []
    left: list[dict[Any, list[Work]]] = [defaultdict(list) for _ in counts]
    for key in dict.fromkeys(key for each in counts for key in each):
        mark, recompute, work = key
        times = [each[key] for each in counts]
        by_kind = [one - times[0] for one in times[1:-1]]
        if times[-1] - times[0] == by_kind[0] + by_kind[-1] and min(by_kind) >= 0:
            ops += [Op(numbers.setdefault(work, len(numbers)), mark, recompute)] * _line(
                times, more
            )
            continue
        kind = mark, recompute, work.name, work.kind, work.dtype, work.shape, work.workspace_bytes
        for works, number in zip(left, times, strict=True):
            works[kind] += [work] * number
    for kind in dict.fromkeys(kind for works in left for kind in works):
        for work in _grown([works[kind] for works in left], more):
            ops.append(Op(numbers.setdefault(work, len(numbers)), kind[0], kind[1]))
    return [*numbers], ops


def _executions(timeline: Timeline) -> Counter[tuple[int, bool, Work]]:
    return Counter((op.mark, op.recompute, timeline.works[op.work]) for op in timeline.ops)


def _grown(works: Sequence[list[Work]], more: Sequence[int]) -> Iterator[Work]:
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
) -> Trace:
    """What `trace` returns, from traces of a few layers where the others repeat them."""

    def traced(model: Any) -> Trace:
        return trace(
            workload,
            model,
            configuration,
            compute_capability=compute_capability,
        )

    found = None
    alone = gpus_per_trial(configuration) == 1
    if alone and workload.name == "causal_lm" and not configuration.get("images", 0):
        found = _deepened(model_config, traced)
    return found if found is not None else traced(model_config)


BASE = 2
"""Layers of the base model: the first, behind the embedding, and the last, before the head."""

KINDS = 2
"""Most kinds of layers: the base model has one of each."""

LEAST_LAYERS = 16, 24
"""With one kind of layers, and with two. Three models of few layers take as long as one of some
twelve to fifteen, four of them as one of eighteen: beside its layers a trace has a part that takes
as long as one or two of them."""


def _deepened(model_config: Any, traced: Callable[[Any], Trace]) -> Trace | None:
    """The trace of the whole model from models of few layers; None where it cannot be had so."""
    try:
        types = layer_types(model_config)
        kinds = list(dict.fromkeys(types))
        if len(kinds) > KINDS or len(types) < LEAST_LAYERS[len(kinds) - 1]:
            return None
        if not _are_alike(model_config, types):
            return None
        base = [*islice(cycle(kinds), BASE)]
        further = list(types)
        for kind in base:
            further.remove(kind)
        numbers: dict[Group, int] = {}
        parts = [
            _Traced(_shallow(traced, with_layers(model_config, [*base, *more])), numbers)
            for more in ([], *([kind] for kind in kinds), [kinds[0], kinds[-1]])
        ]
        depth = Depth(parts[0], tuple(parts[1:-1]), parts[-1])
        return depth.with_layers([kinds.index(kind) for kind in further])
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


def _are_alike(model_config: Any, types: Sequence[str]) -> bool:
    """Whether all layers have the same modules and parameters, and those of a kind its settings."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(model_config))
    found = decoder_layers(model)
    if len(found) != len(types):
        return False
    looks = [_look(layer) for layer in found]
    first_of = {kind: looks[types.index(kind)] for kind in types}
    parts = [(name, module, parameters) for name, module, _, parameters in looks[0]]
    return all(
        look == first_of[kind]
        and [(name, module, parameters) for name, module, _, parameters in look] == parts
        for look, kind in zip(looks, types, strict=True)
    )


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
