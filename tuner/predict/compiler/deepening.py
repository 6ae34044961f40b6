"""Timelines of a structure at full depth and for all sizes, from traces of a few layers.

A model of many equal layers repeats itself: one more layer inserts the same run of events once into
each phase. So it is with layers of two kinds that take turns (attention to all tokens, or in a
window), where each kind has its run. A model of a layer of each kind, two at least, and models with
one more of each tell which runs these are, and which block each event of a run frees, so that the
events of all layers follow without tracing them; a model with two more must have just the events
that follow for it.

The order of events does not depend on micro-batch b >= 2, length s or rank r, and each size is a
polynomial in them (`tuner.cost.polynomial`), which the base model at two points tells. The model
with two more layers is traced at a third one, whose sizes must be those of the polynomials. The
optimizer acts on parameters alone, and is traced apart (`tuner.cost.sized.OptimizerSteps`).

Every other model is traced at full depth, at two points: models with more kinds of layers, or whose
blocks change their order with the depth, and those of which no model of few layers can be made.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import cycle, islice
from typing import Any, NamedTuple

import numpy as np
import torch

from tuner.core.records import MemoryCategory, Phase
from tuner.cost.memory import category_of
from tuner.cost.operators.timeline import Mark, Timeline
from tuner.cost.polynomial import NotPolynomialError, Polynomial, Probe, Terms, fit
from tuner.cost.sized import Blocks, OptimizerSteps, SizedTimeline
from tuner.cost.traced import Parameter, Trace
from tuner.cost.work_arrays import Operators, executions_of
from tuner.predict.compiler.repetition import Depth, Different, Group, TracedEvents
from tuner.predict.compiler.structure import Structure
from tuner.predict.tracing.trace import trace, trace_optimizer
from tuner.predict.training import Workload
from tuner.predict.training.parallel import decoder_layers
from tuner.space.models.trainable import trained_class

BASE = 2
"""Layers of the base model: the first, behind the embedding, and the last, before the head."""

KINDS = 2
"""Most kinds of layers: the base model has one of each."""

LEAST_LAYERS = 16, 24
"""With one kind of layers, and with two. Four models of few layers take as long as one of some
sixteen, five of them as one of twenty: beside its layers a trace has a part that takes as long as
one or two of them."""


_WORKSPACE = str(MemoryCategory.CONTEXT_AND_WORKSPACE)


def sized_timeline(
    workload: Workload, model_config: Any, structure: Structure
) -> SizedTimeline | None:
    """The timeline of a structure; None where its sizes are not polynomials.

    From models of few layers where that is as well, else from two traces of the whole model.
    """

    def traced(model: Any, probe: Probe) -> Trace:
        return trace(
            workload,
            model,
            structure.configuration(probe),
            compute_capability=structure.compute_capability,
        )

    for made in (_from_few_layers, _from_all_layers):
        try:
            found = made(model_config, structure, traced)
        except Different:
            continue
        except Exception as error:  # noqa: BLE001 - a trace of its own raises what is wrong
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            logging.getLogger("tuner").info("%s: %s", made.__name__.lstrip("_"), reason)
            continue
        if found is not None:
            return found
    return None


def optimizer_steps(
    name: str, parameters: Sequence[tuple[int, str]], *, clip: bool, scaled: bool
) -> OptimizerSteps:
    """Two steps of an optimizer over parameters of these sizes and kinds, in their order."""
    return OptimizerSteps.of(trace_optimizer(name, parameters, clip=clip, scaled=scaled))


_Traced = Callable[[Any, Probe], Trace]
"""The trace of a model's configuration at a probe."""


def layer_types(model_config: Any) -> list[str]:
    """The kind of each layer in order; one kind for models that do not tell.

    Raises `Different` for models that are no single stack of layers.
    """
    text = model_config.get_text_config()
    types = getattr(text, "layer_types", None)
    layers = getattr(text, "num_hidden_layers", None)
    if layers is None:
        raise Different("its layers are not counted in one number")
    return list(types) if types else ["layer"] * layers


def with_layers(model_config: Any, types: list[str]) -> Any:
    """A copy of the configuration with these layers.

    Raises `Different` where it has others: their kinds follow from a period in some models.
    """
    config = copy.deepcopy(model_config)
    text = config.get_text_config()
    text.num_hidden_layers = len(types)
    if getattr(text, "layer_types", None):
        with contextlib.suppress(AttributeError):  # a property: they follow from a period
            text.layer_types = list(types)
        if list(text.layer_types) != types:
            raise Different(f"no model of this kind has the layers {', '.join(types)}")
    return config


def _from_all_layers(model_config: Any, structure: Structure, traced: _Traced) -> SizedTimeline:
    known = _Known(model_config, structure, traced)
    whole = known.base.timeline
    return known.timeline(
        whole.events,
        whole.marks,
        Blocks.of(whole.blocks),
        known.base.executions,
        known.base.parameters,
    )


def _from_few_layers(
    model_config: Any, structure: Structure, traced: _Traced
) -> SizedTimeline | None:
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
    probe, check = structure.probes()[0][0], structure.probes()[1]
    known = _Known(with_layers(model_config, base), structure, traced)
    parts = [known.base]
    for each in kinds:
        parts.append(known.part(with_layers(model_config, [*base, each]), probe))
    parts.append(known.part(with_layers(model_config, [*base, kinds[0], kinds[-1]]), check))
    if any(each.remarks != known.base.remarks for each in parts):
        raise Different
    groups: dict[Group, int] = {}
    traces = [TracedEvents(each.timeline, groups) for each in parts]
    places = [kinds.index(kind) for kind in further]
    more = [places.count(kind) for kind in range(len(kinds))]
    deep = Depth(traces[0], tuple(traces[1:-1]), traces[-1]).with_layers(places)
    models = [Blocks.of(each.timeline.blocks) for each in parts[:-1]]
    return known.timeline(
        deep.events,
        deep.marks,
        Blocks.like(models, deep.sources),
        _line([each.executions for each in parts], more),
        _deep_parameters([each.parameters for each in parts], sum(more)),
    )


class _Known:
    """The sizes, operators and parameters of a structure, from a base model at two probes."""

    def __init__(self, model_config: Any, structure: Structure, traced: _Traced) -> None:
        self._probes, _ = structure.probes()
        self._traced = traced
        self._tables = tuple(_Table(self._probes) for _ in _KEYS)
        first, second = (traced(model_config, probe) for probe in self._probes)
        if first.timeline.events != second.timeline.events:
            raise Different("the sequence of allocations depends on batch, length or rank")
        for table, keys in zip(self._tables, _KEYS, strict=True):
            table.add(keys(first), keys(second))
        self.base = self._part(first, (first, second), self._probes[0])

    def part(self, model_config: Any, probe: Probe) -> _Part:
        """A model of more layers, whose things are all known. Raises `Different` otherwise."""
        found = self._traced(model_config, probe)
        try:
            numbers = [
                table.at(probe, keys(found))
                for table, keys in zip(self._tables, _KEYS, strict=True)
            ]
        except _AmbiguousError:
            pair = [
                found if each == probe else self._traced(model_config, each)
                for each in self._probes
            ]
            return self._part(found, (pair[0], pair[1]), probe)
        return _Part.of(found, numbers, len(self._tables[1]))

    def timeline(
        self,
        events: Sequence[tuple[int, int]],
        marks: Sequence[Mark],
        blocks: Blocks,
        executions: Any,
        parameters: Sequence[_Kept],
    ) -> SizedTimeline:
        sizes, works, numels = self._tables
        return SizedTimeline.of(
            events,
            marks,
            blocks=blocks,
            sizes=Terms.of([key[0] for key in sizes.keys]),
            workspace=next((n for n, key in enumerate(sizes.keys) if key[1] == _WORKSPACE), -1),
            operators=_operators(works),
            executions=executions,
            remarks=self.base.remarks,
            **_trained(parameters, numels),
        )

    def _part(self, found: Trace, pair: tuple[Trace, Trace], probe: Probe) -> _Part:
        numbers = [
            table.known(keys(pair[0]), keys(pair[1]), probe, keys(found))
            for table, keys in zip(self._tables, _KEYS, strict=True)
        ]
        return _Part.of(found, numbers, len(self._tables[1]))


class _AmbiguousError(Different):
    """Two things of a structure are equal at some sizes."""


_SEVERAL = -2
"""Stands for the number of something that may be one of several."""


def _require_alike(first: Sequence[Any], second: Sequence[Any]) -> None:
    if len(first) != len(second):
        raise Different("the sequence of events or operators depends on batch, length or rank")


class _Table:
    """The distinct things of a structure, each known by what it is at two probes.

    A key is a tuple of numbers, which are polynomials, and of other things, which are the same at
    all sizes.
    """

    def __init__(self, probes: tuple[Probe, Probe]) -> None:
        self._probes = probes
        self._numbers: dict[tuple[Any, Any], int] = {}
        self._at: dict[Probe, dict[Any, int]] = {}
        self.keys: list[tuple[Any, ...]] = []
        """Each thing's key, with a polynomial for each number."""

    def __len__(self) -> int:
        return len(self.keys)

    def add(self, first: Sequence[Any], second: Sequence[Any]) -> None:
        """Note the things of a model that is traced at both probes."""
        _require_alike(first, second)
        for pair in zip(first, second, strict=True):
            if pair not in self._numbers:
                self._numbers[pair] = len(self.keys)
                self.keys.append(self._polynomials(*pair))

    def known(
        self, first: Sequence[Any], second: Sequence[Any], probe: Probe, keys: Sequence[Any]
    ) -> list[int]:
        """The number of each thing of a model that is traced at both probes, and at `probe`.

        Raises `Different` for one that isn't there, or that isn't at `probe` what follows.
        """
        _require_alike(first, second)
        found = [self._numbers.get(pair, -1) for pair in zip(first, second, strict=True)]
        if -1 in found or [_evaluated(self.keys[number], probe) for number in found] != [*keys]:
            raise Different("a model of more layers has something new")
        return found

    def at(self, probe: Probe, keys: Sequence[Any]) -> list[int]:
        """The number of each thing of a model that is traced at one probe.

        Raises `Different` for one that isn't there, and `_AmbiguousError` for one that may be two.
        """
        if probe not in self._at:
            known: dict[Any, int] = {}
            for number, key in enumerate(self.keys):
                value = _evaluated(key, probe)
                known[value] = _SEVERAL if value in known else number
            self._at[probe] = known
        found = [self._at[probe].get(key, -1) for key in keys]
        if -1 in found:
            raise Different("a model of more layers has something new")
        if _SEVERAL in found:
            raise _AmbiguousError
        return found

    def _polynomials(self, first: Any, second: Any) -> Any:
        if isinstance(first, bool | str) or first is None:
            if first != second:
                raise Different(f"{first} at one size and {second} at another")
            return first
        if isinstance(first, int):
            try:
                return fit((first, second), self._probes)
            except NotPolynomialError as error:
                raise Different(f"not a polynomial: {error}") from error
        if second is None or len(first) != len(second):
            raise Different("the sequence of operators depends on sizes")
        return tuple(self._polynomials(a, b) for a, b in zip(first, second, strict=True))


def _evaluated(key: Any, probe: Probe) -> Any:
    if isinstance(key, Polynomial):
        value = key(probe)
        return int(value) if value.denominator == 1 else value
    return tuple(_evaluated(each, probe) for each in key) if isinstance(key, tuple) else key


def _size_keys(traced: Trace) -> list[tuple[int, str]]:
    """Sizes with categories: weights and activations may be as large at some length."""
    return [(block.size_bytes, str(category_of(block))) for block in traced.timeline.blocks]


def _work_keys(traced: Trace) -> list[tuple[Any, ...]]:
    """The operators of the passes; None stands for one that only an update runs."""
    marks = traced.timeline.marks
    used = {op.work for op in traced.timeline.ops if marks[op.mark].phase is not Phase.OPTIMIZER}
    return [
        (w.name, w.kind, w.flops, w.tensor_bytes, w.dtype, w.shape) if n in used else ("update",)
        for n, w in enumerate(traced.timeline.works)
    ]


def _numel_keys(traced: Trace) -> list[tuple[int]]:
    return [(parameter.numel,) for parameter in traced.parameters]


_KEYS: tuple[Callable[[Trace], Sequence[Any]], ...] = (_size_keys, _work_keys, _numel_keys)

_Kept = tuple[int, Parameter]


class _Part(NamedTuple):
    """One traced model in the numbers of its structure: its events, operators and parameters."""

    timeline: Timeline
    executions: Any
    parameters: list[_Kept]
    remarks: tuple[str, ...]

    @classmethod
    def of(cls, traced: Trace, numbers: Sequence[list[int]], distinct: int) -> _Part:
        """From a trace, the numbers of its things, and how many `distinct` operators there are."""
        sizes, works, numels = numbers
        blocks = [
            replace(block, number=number)
            for block, number in zip(traced.timeline.blocks, sizes, strict=True)
        ]
        # Executions of each operator in the passes of the second step: (S, 2, W).
        found = executions_of(traced.timeline)
        executions = np.zeros((*found.shape[:2], distinct), dtype=np.int64)
        np.add.at(executions.transpose(2, 0, 1), works, found.transpose(2, 0, 1))
        return cls(
            replace(traced.timeline, blocks=blocks),
            executions,
            [
                (number, parameter._replace(numel=0))
                for number, parameter in zip(numels, traced.parameters, strict=True)
            ],
            traced.remarks,
        )


def _line(counted: Sequence[Any], more: Sequence[int]) -> Any:
    """The counts with this number of further layers of each kind. Raises `Different`.

    `counted` are those of the base model, of one more layer of each kind, and of two more layers.
    """
    first, *ones, two = counted
    by_kind = [one - first for one in ones]
    if not np.array_equal(two - first, by_kind[0] + by_kind[-1]):
        raise Different
    return first + sum(each * number for each, number in zip(by_kind, more, strict=True))


def _operators(works: _Table) -> Operators:
    one = Polynomial.of(1)
    update = ("update", "update", Polynomial.of(0), (), "float32", None)
    keys = [key if len(key) > 1 else update for key in works.keys]
    names, kinds, flops, tensors, dtypes, shapes = zip(*keys, strict=True)
    return Operators(
        names=names,
        kinds=kinds,
        dtypes=dtypes,
        flops=Terms.of(flops),
        tensor_bytes=Terms.of([each for of_work in tensors for each in of_work]),
        tensor_of=np.repeat(np.arange(len(keys)), [len(each) for each in tensors]).astype(np.int32),
        shapes=Terms.of([each for shape in shapes for each in shape or (one,) * 4]),
        has_shape=np.array([shape is not None for shape in shapes]),
    )


def _deep_parameters(listed: Sequence[list[_Kept]], more: int) -> list[_Kept]:
    """The parameters with further layers, whose kinds have the same. Raises `Different`."""
    base, *ones, two = listed
    same = zip(base, ones[0], strict=False)
    place = next((n for n, (ours, theirs) in enumerate(same) if ours != theirs), len(base))
    run = ones[0][place : place + len(ones[0]) - len(base)]
    for theirs, times in (*((one, 1) for one in ones), (two, 2)):
        if theirs != [*base[:place], *run * times, *base[place:]]:
            raise Different
    return [*base[:place], *run * more, *base[place:]]


def _trained(parameters: Sequence[_Kept], numels: _Table) -> dict[str, Any]:
    """The fields of a timeline about the parameters."""
    order = [each for each in parameters if each[1].is_trained and each[1].is_reached]
    distinct = list(dict.fromkeys(order))
    totals = []
    for chosen in ([p for p in parameters if p[1].is_trained], parameters):
        totals.append(Polynomial.sum(numels.keys[number][0] for number, _ in chosen))
    return {
        "trained": Terms.of([numels.keys[number][0] for number, _ in distinct]),
        "kinds": tuple(parameter.kind for _, parameter in distinct),
        "order": np.array([distinct.index(each) for each in order], dtype=np.int32),
        "counts": Terms.of(totals),
    }


def _are_alike(model_config: Any, types: Sequence[str]) -> bool:
    """True if all layers have the same modules and parameters, and equal settings within a kind."""
    model_class = trained_class(model_config, images=False, num_labels=0)
    with torch.device("meta"):
        model = model_class.from_config(copy.deepcopy(model_config))
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
    """The parts of a layer, without its own number."""
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
