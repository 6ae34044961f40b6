"""Makes the timelines that come with the package.

`python -m benchmarks.shipped_timelines MODEL...` traces each model with the methods, kinds
of GPUs and checkpointing of `covered`, in minutes a model, and adds what is not in the file yet;
with `--anew` what is there is made again, as a change of what is traced needs. `--space` adds the
structures of a search space, and `--replays` the memory that its search asks for.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any
from unittest import mock

import tuner
from tuner.app.estimate import asked
from tuner.core.gpu import Gpu
from tuner.core.host import usable_cpus
from tuner.core.records import Configuration, Memory
from tuner.cost.sized import OptimizerSteps, SizedTimeline
from tuner.predict.compiler.deepening import optimizer_steps
from tuner.predict.compiling import in_forks, trace_timelines
from tuner.predict.predict import check_supported
from tuner.predict.shipped import (
    FILE,
    RANKS,
    SHIPPED_OPTIMIZERS,
    Shipped,
    Steps,
    installed_version,
    optimizer_key,
    write,
)
from tuner.predict.traces import Subject, Traces
from tuner.space import SearchSpace, load_space
from tuner.space.gpus import get_gpu
from tuner.space.models.catalogue import architecture, get_entry

Settings = Mapping[str, Any]

NF4: Settings = {"precision": "nf4"}
LORA: Settings = {"precision": "bf16"}
FULL: Settings = {"precision": "bf16", "lora_rank": 0}
LORA_FP32: Settings = {"precision": "fp32"}
FULL_FP32: Settings = {"precision": "fp32", "lora_rank": 0}
INT8: Settings = {"precision": "int8"}
USUAL: Settings = {}
DROPOUT: Settings = {"lora_dropout": 0.05}
KEPT: Settings = {"gradient_checkpointing": False}
CHECKPOINTED: Settings = {"gradient_checkpointing": True}
MIXED: Settings = {"mixed_precision": "bf16"}
SCALED: Settings = {"mixed_precision": "fp16"}
FLASH: Settings = {"attention": "flash_attention_2"}
EAGER: Settings = {"attention": "eager"}
REENTRANT: Settings = {"use_reentrant": True}
PREPARED: Settings = {"kbit_preparation": "peft"}
QUERIES: Settings = {"lora_targets": ["q_proj", "v_proj"]}
ATTENTION: Settings = {"lora_targets": ["k_proj", "o_proj", "q_proj", "v_proj"]}
EVALUATED: Settings = {"eval_batch": 2}
EVALUATED_AT_ONCE: Settings = {"eval_batch": 64}
"""Rows of an evaluation that fill several tiles where those of a step fill one."""
PACKED: Settings = {"padding": "packed", **FLASH}
PACKED_SDPA: Settings = {"padding": "packed"}
MLP: Settings = {"lora_targets": ["down_proj", "gate_proj", "up_proj"]}
DORA: Settings = {"adapter": "dora"}
LIGER: Settings = {"liger": True}
IN_FP16: Settings = {"precision": "fp16"}
UNMIXED: Settings = {"mixed_precision": "no"}
REFERENCE: Settings = {"reference_pass": True}
TRAINER: Settings = {"kbit_preparation": "none", **REENTRANT, **MIXED, **CHECKPOINTED}
"""LLaMA-Factory's settings, Axolotl's and Unsloth's: none widens weights before training."""


def with_dropout(*several: Settings) -> tuple[Settings, ...]:
    """Each with and without dropout on the adapters."""
    return tuple({**each, **dropout} for each in several for dropout in (USUAL, DROPOUT))


OF_4_BITS: tuple[Settings, ...] = (
    *with_dropout(USUAL, FLASH, KEPT, PREPARED, QUERIES, ATTENTION, EVALUATED, REFERENCE),
    *with_dropout(EVALUATED_AT_ONCE, PACKED_SDPA, MLP, EAGER, REENTRANT, LIGER),
    *with_dropout({**PREPARED, **FLASH}, PACKED, DORA),
    UNMIXED,
)

PLANNED: tuple[tuple[str, Settings, tuple[Settings, ...]], ...] = (
    *(("trl", {**NF4, "double_quant": twice}, OF_4_BITS) for twice in (True, False)),
    (
        "trl",
        LORA,
        (
            *with_dropout(USUAL, KEPT, QUERIES, FLASH, ATTENTION, EVALUATED, PACKED, EAGER, DORA),
            *with_dropout(PACKED_SDPA, MLP, REENTRANT, LIGER),
            *with_dropout(SCALED, UNMIXED, EVALUATED_AT_ONCE),
            REFERENCE,
        ),
    ),
    ("trl", IN_FP16, with_dropout(SCALED, QUERIES)),
    (
        "trl",
        FULL,
        (
            *(USUAL, KEPT, FLASH, EVALUATED, EVALUATED_AT_ONCE, PACKED, EAGER),
            *(PACKED_SDPA, REENTRANT, LIGER),
        ),
    ),
    ("trl", INT8, (USUAL, DROPOUT, {**PREPARED, **DROPOUT})),
    ("trl", LORA_FP32, (USUAL, QUERIES)),
    ("trl", FULL_FP32, (USUAL,)),
    ("trl", {**NF4, "double_quant": True}, ({**TRAINER, "adapter_dtype": "fp32"},)),
    ("trl", LORA, (TRAINER,)),
    (
        "transformers",
        {**NF4, "double_quant": True},
        (
            *with_dropout(USUAL, PREPARED, {**PREPARED, **MIXED}),
            {**QUERIES, **DROPOUT},
            {**PREPARED, **MIXED, **CHECKPOINTED, **DROPOUT},
            *with_dropout({**TRAINER, **FLASH}),
            TRAINER,
            {**PREPARED, **MIXED, **CHECKPOINTED, **FLASH, "adapter_dtype": "bf16"},
        ),
    ),
    (
        "transformers",
        LORA,
        (
            *with_dropout(USUAL, MIXED, {**MIXED, **CHECKPOINTED}),
            *({**QUERIES, **each, **DROPOUT} for each in (USUAL, MIXED)),
            *({**QUERIES, **each} for each in (MIXED, SCALED)),
            *with_dropout({**TRAINER, **FLASH}),
            TRAINER,
        ),
    ),
    ("transformers", FULL_FP32, (TRAINER,)),
    ("transformers", FULL, (USUAL, KEPT, MIXED, {**MIXED, **CHECKPOINTED})),
)
"""By loop: settings of scripts, and what one of them changes; the reference is DPO's."""
WIDELY_USED = (
    "gemma-2-2b",
    "gemma-3-1b",
    "llama-3-8b",
    "llama-3.1-8b",
    "llama-3.2-1b",
    "llama-3.2-3b",
    "mistral-7b-v0.3",
    "qwen2.5-0.5b",
    "qwen2.5-1.5b",
    "qwen2.5-3b",
    "qwen2.5-7b",
    "qwen3-0.6b",
    "qwen3-1.7b",
    "qwen3-4b",
    "qwen3-4b-2507",
    "qwen3-8b",
    "qwen3-14b",
    "smollm2-135m",
    "smollm3-3b",
    "tinyllama-1.1b",
)
"""Models of which all of `PLANNED` is covered. It takes 20 minutes of a processor for each."""
MOST_USUAL: tuple[Settings, ...] = (
    *with_dropout(USUAL),
    {**QUERIES, **DROPOUT},
    {**PREPARED, **DROPOUT},
)
"""What is covered of all other models, a fifth of `PLANNED`."""
ENCODERS: tuple[tuple[str, Settings, tuple[Settings, ...]], ...] = (
    (
        "transformers",
        {**FULL_FP32, "num_labels": 2},
        tuple(
            {**mixed, **evaluated}
            for mixed in (USUAL, MIXED, SCALED)
            for evaluated in (USUAL, EVALUATED)
        ),
    ),
)
"""As `PLANNED`, for models that classify."""
ON_OLDER = (USUAL,)
"""The changes that are covered on GPU types without bf16, too, but for full training."""
MORE_OPTIMIZERS = (
    "adafactor",
    "lion_8bit",
    "lion_32bit",
    "paged_lion_8bit",
    "paged_lion_32bit",
    "rmsprop",
)
"""Optimizers beside those of the calculator, of models that are `WIDELY_USED`."""
UNCLIPPED = ("adamw_torch_fused", "adamw_torch", "adamw_bnb_8bit", "paged_adamw_8bit")
"""Optimizers that ship without clipping, too, which `max_grad_norm=0` leaves out."""
BATCHES = (1, 2)
"""A micro-batch of one has a structure of its own."""
SHORT, LONG = 256, 8192
"""In one tile of a chunked loss, and in several."""
GPUS = ("rtx4090", "t4")
"""One GPU type for each set of kernels."""
LIBRARIES = ("torch", "transformers", "peft", "bitsandbytes")


def covered(model: str, gpu: Gpu) -> Iterator[Configuration]:
    """A configuration of each structure of a model that the file covers."""
    window = architecture(model).sliding_window
    entry = get_entry(model)
    planned = ENCODERS if entry is not None and entry.task == "encoder" else PLANNED
    if planned is PLANNED and model not in WIDELY_USED:
        planned = tuple(
            (loop, method, tuple(part for part in parts if part in MOST_USUAL))
            for loop, method, parts in PLANNED
        )
    for loop, settings in _settings(planned, has_bf16=gpu.has_bf16):
        is_chunked = loop == "trl"
        lengths = {SHORT, LONG if is_chunked else SHORT, window or SHORT}
        for batch, length in itertools.product(BATCHES, sorted(lengths)):
            sizes = {"micro_batch": batch, "max_length": length}
            configuration = asked(
                None, model, {**settings, **sizes}, loop=loop, gpu=gpu
            ).configuration
            if not check_supported(configuration, gpu):
                yield configuration


def _settings(
    planned: Iterable[tuple[str, Settings, tuple[Settings, ...]]], *, has_bf16: bool
) -> Iterator[tuple[str, Settings]]:
    """Loops with settings of structures, without their sizes."""
    for loop, method, parts in planned:
        for part in parts:
            is_usual = loop == "trl" and part in ON_OLDER and "lora_rank" not in method
            if has_bf16 or is_usual or planned is ENCODERS:
                yield loop, {**method, **part}


def of_space(space: SearchSpace, gpu: Gpu) -> Iterator[Configuration]:
    """The configurations of a search space that the GPU type runs."""
    for configuration in space.configurations(use_floors=False):
        if not check_supported(configuration, gpu):
            yield configuration


def main() -> int:
    """Trace the models and spaces named on the command line, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--space", dest="spaces", action="append", default=[])
    parser.add_argument("--replays", nargs=2, action="append", default=[], metavar=("SPACE", "GPU"))
    parser.add_argument("--anew", action="store_true")
    arguments = parser.parse_args()
    versions = {name: installed_version(name) or "" for name in LIBRARIES}
    known = Shipped(FILE)
    keep = known.versions == versions
    found: dict[bool, dict[str, dict[str, SizedTimeline]]] = {False: {}, True: {}}
    said: dict[str, Mapping[str, Any]] = {}
    optimizers: dict[str, dict[str, Steps]] = {}
    jobs: list[tuple[str, bool, Sequence[str], Callable[[Gpu], Iterator[Configuration]]]] = [
        (
            model,
            False,
            (*SHIPPED_OPTIMIZERS, *(MORE_OPTIMIZERS if model in WIDELY_USED else ())),
            partial(covered, model),
        )
        for model in arguments.models
    ]
    for space in map(load_space, arguments.spaces):
        of_space_names = [str(name) for name in space.choices["optimizer"]]
        jobs.append((space.predicted_model(), True, of_space_names, partial(of_space, space)))
    for model, is_space, names, configurations in jobs:
        began, digest = time.monotonic(), architecture(model).digest
        of_model = found[is_space].setdefault(digest, {})
        steps_of_model = optimizers.setdefault(digest, {})
        there, known_steps = set[str](), set[str]()
        if keep and not arguments.anew:
            there = {*known.structures(digest, of_spaces=is_space)}
            known_steps = {*known.optimizers(digest)}
        for gpu in GPUS[: 1 if is_space else None]:
            made = traced(model, configurations(get_gpu(gpu)), gpu, {*there, *of_model}, said)
            of_model |= made
            for key, sized in made.items():
                scaled = said[key].get("mixed_precision") == "fp16"
                have = {*known_steps, *steps_of_model}
                steps_of_model |= steps_of(sized, names, have, scaled=scaled)
        print(
            f"{model}: {len(of_model)} more structures, {len(steps_of_model)} more optimizers, "
            f"{time.monotonic() - began:.0f} s",
            flush=True,
        )
    replays: dict[str, Any] = {}
    for name, gpu in arguments.replays:
        replays |= replays_of(name, gpu)
    write(FILE, versions, found[False], optimizers, found[True], said, replays, keep=keep)
    print(f"{FILE.stat().st_size:,} bytes")
    return 0


def replays_of(space: str, gpu: str) -> dict[str, Any]:
    """The memory that a search of a space replays, as `Shipped.memory` has it."""
    found: dict[str, Any] = {}

    class Kept(Traces):
        def memory(self, *args: Any, **kwargs: Any) -> Memory:
            memory = super().memory(*args, **kwargs)
            found.update({key: asdict(one) for key, one in self.replayed.items()})
            return memory

    os.sched_setaffinity(0, {0})  # one process: what forks find is theirs
    off = mock.patch.dict(os.environ, TUNER_CACHE="off")
    with off, mock.patch("tuner.predict.predictor.Traces", Kept):
        tuner.search(space, gpu=gpu, mode="predict")
    print(f"{space} on {gpu}: {len(found)} replays", flush=True)
    return found


def traced(
    model: str,
    configurations: Iterable[Configuration],
    gpu: str,
    there: Collection[str],
    said: dict[str, Mapping[str, Any]],
) -> dict[str, SizedTimeline]:
    """The timelines of a model's configurations by key, less those that are `there`.

    `said` gets what tells each of them from others.
    """
    traces = Traces(Subject("causal_lm", model), anew=True)
    found = (traces.structure(one, get_gpu(gpu)) for one in configurations)
    every = dict.fromkeys(one for one in found if one is not None)
    said |= {one.key: one.said for one in every}
    wanted = [one for one in every if one.key not in there]
    for _ in trace_timelines(wanted, traces, workers=usable_cpus()):
        pass
    return {one.key: sized for one, sized in traces.timelines.items()}


def steps_of(
    sized: SizedTimeline, names: Collection[str], there: Collection[str], *, scaled: bool
) -> Mapping[str, Steps]:
    """The steps of optimizers over the parameters of a timeline, less those that are `there`.

    Gradients are `scaled` where the passes are in fp16.
    """
    trained = {rank: sized.parameters((1, 1, rank, 1)) for rank in RANKS}
    # All weights are trained at rank 0 alone.
    ranks = RANKS if trained[RANKS[0]] != trained[RANKS[1]] else (0,)
    wanted = [(name, True) for name in names] + [(name, False) for name in UNCLIPPED]
    keys = {
        (name, clip): optimizer_key(name, sized, clip=clip, scaled=scaled)
        for name, clip in wanted
        if name in names
    }
    missing = [(*one, rank) for one, key in keys.items() for rank in ranks if key not in there]
    made = in_forks(_steps, missing, (trained, scaled), workers=usable_cpus())
    found: dict[str, dict[int, OptimizerSteps]] = {}
    for (name, clip, rank), steps in sorted(made, key=lambda one: one[0]):
        found.setdefault(keys[name, clip], {})[rank] = steps
    return found


def _steps(
    known: tuple[Mapping[int, tuple[tuple[int, str], ...]], bool], wanted: tuple[str, bool, int]
) -> OptimizerSteps:
    (trained, scaled), (name, clip, rank) = known, wanted
    parameters = trained.get(rank, trained[RANKS[0]])
    return optimizer_steps(name, parameters, clip=clip, scaled=scaled)


if __name__ == "__main__":
    sys.exit(main())
