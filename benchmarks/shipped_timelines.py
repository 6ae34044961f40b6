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

from tuner.app.estimate import one_configuration
from tuner.core.gpu import Gpu
from tuner.core.records import Configuration
from tuner.cost.compiled import CompiledPasses
from tuner.predict.cache import build_optimizer, entry_name
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
"""Settings of `tuner estimate`."""
TRAINER: Settings = {
    "training_loop": "trainer",
    "mixed_precision": "bf16",
    "kbit_preparation": "none",
    "optimizer": "adamw_torch_fused",
}
NF4: Settings = {"precision": "nf4", "compute_dtype": "bf16"}
TRL: tuple[Settings, ...] = (
    *({**NF4, "double_quant": double} for double in (True, False)),
    {"precision": "bf16"},
    {"precision": "bf16", "lora_rank": 0},
)
"""What scripts of `trl.SFTTrainer` load, whose adapters are in the precision of the model."""
TRL_PARTS: tuple[Settings, ...] = (
    {},
    {"lora_dropout": 0.05},
    {"attention": "flash_attention_2"},
    {"gradient_checkpointing": False},
    {"reference_pass": True},
)
"""One of these is set otherwise than TRL's defaults; the last as `DPOTrainer` does."""
IN_FP16: Settings = {"mixed_precision": "fp16", "compute_dtype": "fp16", "adapter_dtype": "fp32"}
"""What `tuner check` changes where a GPU has no bf16."""
TRAINER_PARTS: tuple[Settings, ...] = (
    {"gradient_checkpointing": True, "use_reentrant": False},
    {"gradient_checkpointing": True, "use_reentrant": True},
    {"gradient_checkpointing": False},
)
"""As `transformers.Trainer` has them, and LLaMA-Factory, which checkpoints in the older way."""
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
    for settings in _settings():
        is_half = settings.get("mixed_precision") == "fp16"
        if is_half != (gpu.id == "t4"):
            continue
        is_chunked = settings.get("loss") == "chunked"
        lengths = {SHORT, LONG if is_chunked else SHORT, window or SHORT}
        for batch, length in itertools.product(BATCHES, sorted(lengths)):
            sizes = {"micro_batch": batch, "max_length": length}
            _, configuration = one_configuration(None, model, {**settings, **sizes})
            if not check_supported(configuration, gpu):
                yield configuration


def _settings() -> Iterator[Settings]:
    """Settings of structures, without their sizes."""
    for method, checkpointing in itertools.product(OWN, (True, False)):
        yield {**method, "gradient_checkpointing": checkpointing}
    trl = {**TRAINER, "loss": "chunked"}
    for method, part in itertools.product(TRL, TRL_PARTS):
        is_full, is_quantized = method.get("lora_rank") == 0, "double_quant" in method
        if is_full and not part.keys() <= {"gradient_checkpointing", "attention"}:
            continue
        adapters = {"adapter_dtype": "bf16"} if is_quantized else {}
        settings = {"gradient_checkpointing": True, **trl, **method, **adapters, **part}
        yield settings
        if is_quantized and part in TRL_PARTS[:2]:
            yield {**settings, **IN_FP16}
    for method, part in itertools.product((*TRL[:1], *TRL[2:]), TRAINER_PARTS):
        yield {**TRAINER, **method, **part}


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
        made, steps = compiled(model, configurations, steps, anew=arguments.anew, **chosen)
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
    *,
    anew: bool,
    names: Collection[str] = SHIPPED_OPTIMIZERS,
    scaled: Collection[bool] | None = None,
) -> tuple[dict[str, CompiledPasses], dict[str, Steps]]:
    """The structures and the optimizer steps of one model, by key; `steps` are known.

    Gradients are `scaled` on a T4 alone, unless that is given.
    """
    job = PredictionJob("causal_lm", model)
    predictor = Predictor(job, workers=default_workers(), anew=anew)
    optimizers = dict(steps)
    for name in GPUS:
        gpu, known = get_gpu(name), set(predictor.compiled())
        if chosen := list(configurations(gpu)):
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
