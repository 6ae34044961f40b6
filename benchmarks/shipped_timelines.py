"""Makes the compiled timelines that come with the package.

`python -m benchmarks.shipped_timelines MODEL...` compiles each model with the methods, kinds
of GPUs and checkpointing of `covered`, in minutes a model, and adds what is not in the file yet;
with `--anew` what is there is made again, as a change of what is traced needs. `--space` adds the
baseline of a search space.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any

from tuner.app.estimate import asked
from tuner.core.gpu import Gpu
from tuner.core.records import Configuration
from tuner.cost.compiled import CompiledPasses
from tuner.predict.cache import build_optimizer, entry_name
from tuner.predict.compiler.structure import Structure
from tuner.predict.compiling import default_workers
from tuner.predict.predict import check_supported
from tuner.predict.predictor import PredictionJob, Predictor, trained_sizes
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
from tuner.space import SearchSpace, configure, load_space
from tuner.space.gpus import get_gpu
from tuner.space.models.catalogue import architecture

Settings = Mapping[str, Any]

OWN: tuple[Settings, ...] = (
    {"precision": "bf16"},
    {"precision": "nf4"},
    {"precision": "int8"},
    {"precision": "bf16", "lora_rank": 0},
    {"precision": "nf4", "mixed_precision": "fp16"},
    {"precision": "fp32", "mixed_precision": "fp16", "lora_rank": 0},
)
"""Settings of tuner's own loop, which the search of a space runs."""
NF4: Settings = {"precision": "nf4"}
LORA: Settings = {"precision": "bf16"}
FULL: Settings = {"precision": "bf16", "lora_rank": 0}
INT8: Settings = {"precision": "int8"}
USUAL: Settings = {}
DROPOUT: Settings = {"lora_dropout": 0.05}
KEPT: Settings = {"gradient_checkpointing": False}
FLASH: Settings = {"attention": "flash_attention_2"}
REFERENCE: Settings = {"reference_pass": True}

PLANNED: tuple[tuple[str, Settings, tuple[Settings, ...]], ...] = (
    ("trl", {**NF4, "double_quant": True}, (USUAL, DROPOUT, FLASH, KEPT, REFERENCE)),
    ("trl", {**NF4, "double_quant": False}, (USUAL, DROPOUT, FLASH, KEPT, REFERENCE)),
    ("trl", LORA, (USUAL, KEPT)),
    ("trl", FULL, (USUAL,)),
    ("trl", INT8, (USUAL,)),
)
"""By loop: settings of scripts, and what one of them changes; the reference is DPO's."""
ON_OLDER = (USUAL, DROPOUT)
"""The changes that are covered on GPU types without bf16, too, but for full training."""
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
    for loop, settings in _settings(has_bf16=gpu.has_bf16):
        is_chunked = loop == "trl"
        lengths = {SHORT, LONG if is_chunked else SHORT, window or SHORT}
        for batch, length in itertools.product(BATCHES, sorted(lengths)):
            sizes = {"micro_batch": batch, "max_length": length}
            configuration = asked(
                None, model, {**settings, **sizes}, loop=loop, gpu=gpu
            ).configuration
            if not check_supported(configuration, gpu):
                yield configuration


def _settings(*, has_bf16: bool) -> Iterator[tuple[str, Settings]]:
    """Loops with settings of structures, without their sizes."""
    for method, checkpointing in itertools.product(OWN, (True, False)):
        if has_bf16 != (method.get("mixed_precision") == "fp16"):
            yield "own", {**method, "gradient_checkpointing": checkpointing}
    for loop, method, parts in PLANNED:
        for part in parts:
            if has_bf16 or (loop == "trl" and part in ON_OLDER and method is not FULL):
                yield loop, {**method, **part}


def of_space(space: SearchSpace, gpu: Gpu) -> Iterator[Configuration]:
    """The baseline of a search space, if the GPU type runs it."""
    baseline = configure(space, {}, strict=False)
    if not check_supported(baseline, gpu):
        yield baseline


def main() -> int:
    """Compile the models and spaces named on the command line, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--space", dest="spaces", action="append", default=[])
    parser.add_argument("--anew", action="store_true")
    arguments = parser.parse_args()
    versions = {name: installed_version(name) or "" for name in LIBRARIES}
    known = Shipped(FILE)
    passes: dict[str, dict[str, CompiledPasses]] = {}
    of_spaces: dict[str, dict[str, CompiledPasses]] = {}
    optimizers: dict[str, dict[str, Steps]] = {}
    if known.versions == versions:
        for is_space, found in ((False, passes), (True, of_spaces)):
            for digest in known.models(of_spaces=is_space):
                keys = known.structures(digest, of_spaces=is_space)
                read = ((key, known.passes(digest, key)) for key in keys)
                found[digest] = {key: each for key, each in read if each is not None}
                optimizers[digest] = known.optimizers(digest)

    def add(
        model: str,
        found: dict[str, dict[str, CompiledPasses]],
        configurations: Callable[[Gpu], Iterator[Configuration]],
        **chosen: Any,
    ) -> None:
        began, digest = time.monotonic(), architecture(model).digest
        steps = {} if arguments.anew else optimizers.get(digest, {})
        there = set() if arguments.anew else set(found.get(digest, ()))
        made, steps = compiled(model, configurations, steps, there, anew=arguments.anew, **chosen)
        optimizers[digest] = {**optimizers.get(digest, {}), **steps}
        found[digest] = made if arguments.anew else {**found.get(digest, {}), **made}
        print(
            f"{model}: {len(made)} structures, {len(optimizers[digest])} optimizer "
            f"steps, {time.monotonic() - began:.0f} s",
            flush=True,
        )

    for model in arguments.models:
        add(model, passes, partial(covered, model))
    for space in map(load_space, arguments.spaces):
        names = [str(name) for name in space.choices["optimizer"]]
        chosen = {"names": names, "scaled": (False, True)}
        add(space.predicted_model(), of_spaces, partial(of_space, space), **chosen)
    write(FILE, versions, passes, optimizers, of_spaces)
    number = sum(map(len, (*passes.values(), *of_spaces.values())))
    print(f"{FILE.stat().st_size:,} bytes, {number:,} structures")
    return 0


def compiled(
    model: str,
    configurations: Callable[[Gpu], Iterator[Configuration]],
    steps: Mapping[str, Steps],
    there: Collection[str],
    *,
    anew: bool,
    names: Collection[str] = SHIPPED_OPTIMIZERS,
    scaled: Collection[bool] | None = None,
) -> tuple[dict[str, CompiledPasses], dict[str, Steps]]:
    """The structures and the optimizer steps of one model, by key.

    `steps` are known, and so are the structures that are `there`.

    Gradients are `scaled` on a T4 alone, unless that is given.
    """
    job = PredictionJob("causal_lm", model)
    predictor = Predictor(job, workers=default_workers(), anew=anew)
    optimizers = dict(steps)
    for name in GPUS:
        gpu, known = get_gpu(name), set(predictor.compiled())
        found = architecture(model)
        chosen = [
            one
            for one in configurations(gpu)
            if Structure.of(
                one,
                window=found.sliding_window,
                positions=found.positions,
                compute_capability=gpu.compute_capability,
            ).key
            not in there
        ]
        if chosen:
            predictor.predict(chosen, gpu)
        for key in predictor.compiled().keys() - known:
            trained = partial(trained_sizes, predictor.compiled()[key])
            for optimizer, is_scaled in itertools.product(names, scaled or (name == "t4",)):
                step = optimizer_key(optimizer, trained, clip=True, scaled=is_scaled)
                if step not in optimizers:
                    # All weights are trained at rank 0 alone.
                    ranks = RANKS if trained(RANKS[0]) != trained(RANKS[1]) else (0,)
                    optimizers[step] = tuple(
                        build_optimizer(
                            entry_name("shipped", step, str(rank)),
                            optimizer,
                            trained(rank),
                            clip=1.0,
                            scaled=is_scaled,
                        )
                        for rank in ranks
                    )
    return {key: passes for (_, key), passes in predictor.compiled().items()}, optimizers


if __name__ == "__main__":
    sys.exit(main())
