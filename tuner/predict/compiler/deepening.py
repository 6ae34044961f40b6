"""A trace at full depth from traces of a few layers, event for event.

A model of many equal layers repeats itself: one more layer inserts the same run of events once
into each phase. So it is with layers of two kinds that take turns (attention to all tokens, or in
a window), where each kind has its run. A model of a layer of each kind, two at least, and models
with one more of each tell which runs these are, and which block each event of a run frees, so that
the events of all layers follow without tracing them; a model with two more must have just the
events that follow for it.
Every other model is traced at full depth: models with more kinds of layers, or whose blocks change
their order with the depth, and those of which no model of few layers can be made.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from typing import Any

import torch

from tuner.core.records import Configuration
from tuner.core.setup.causal_lm import OFFLOAD_ACTIVATIONS
from tuner.core.setup.distributed_knobs import gpus_per_trial
from tuner.predict.compiler.alignment import Different
from tuner.predict.compiler.compile import layer_types, with_layers
from tuner.predict.compiler.layouts import CompileError
from tuner.predict.compiler.repetition import Depth, Group, TracedEvents
from tuner.predict.tracing.trace import Trace, trace
from tuner.predict.training.base import Workload
from tuner.predict.training.sharding import decoder_layers
from tuner.space.models.trainable import trained_class


def trace_deep(
    workload: Workload,
    model_config: Any,
    configuration: Configuration,
    *,
    compute_capability: tuple[int, int],
) -> Trace:
    """The result of `trace`, from traces of a few layers where the others repeat them.

    Raises what `trace` raises at full depth. What fails only in a model of few layers is logged.
    """

    def traced(model: Any) -> Trace:
        return trace(
            workload,
            model,
            configuration,
            compute_capability=compute_capability,
        )

    found = None
    alone = gpus_per_trial(configuration) == 1
    is_text = not (configuration.get("images", 0) or configuration.get("num_labels", 0))
    # The last checkpoints of a forward pass stay on the GPU: all those of a few layers.
    alone = alone and not configuration.get(OFFLOAD_ACTIVATIONS)
    if alone and workload.name == "causal_lm" and is_text:
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
    """The trace of the whole model from models of few layers; None where there is none."""
    try:
        return _from_few_layers(model_config, traced)
    except (CompileError, Different):
        return None
    except Exception as error:  # noqa: BLE001 - the full trace raises what is wrong with the model
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        logging.getLogger("tuner").info("traced at full depth, not from few layers: %s", reason)
        return None


def _from_few_layers(model_config: Any, traced: Callable[[Any], Trace]) -> Trace | None:
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
        TracedEvents(traced(with_layers(model_config, [*base, *more])), numbers)
        for more in ([], *([kind] for kind in kinds), [kinds[0], kinds[-1]])
    ]
    depth = Depth(parts[0], tuple(parts[1:-1]), parts[-1])
    return depth.with_layers([kinds.index(kind) for kind in further])


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
