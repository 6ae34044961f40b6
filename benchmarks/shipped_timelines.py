"""Makes the compiled timelines that come with the package.

`python -m benchmarks.shipped_timelines MODEL...` compiles each model with the methods, kinds
of GPUs and checkpointing of `covered`, in minutes a model, and adds what is new to the file.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterator

from tuner.app.estimate import one_configuration
from tuner.core.gpu import Gpu
from tuner.core.records import Configuration
from tuner.cost.compiled import CompiledPasses
from tuner.predict.cache import build_optimizer, entry_name, read_optimizer
from tuner.predict.compiler.optimizer_step import CompiledOptimizer
from tuner.predict.compiling import default_workers
from tuner.predict.predict import check_supported
from tuner.predict.predictor import PredictionJob, Predictor, trained_sizes
from tuner.predict.shipped import FILE, Shipped, installed_version, optimizer_key, write
from tuner.space.gpus import get_gpu
from tuner.space.models.catalogue import architecture

METHODS = (
    {"precision": "bf16"},
    {"precision": "nf4"},
    {"precision": "int8"},
    {"precision": "bf16", "lora_rank": 0},
    {"precision": "nf4", "mixed_precision": "fp16"},
    {"precision": "fp32", "mixed_precision": "fp16", "lora_rank": 0},
)
BATCHES = (1, 2)
"""A micro-batch of one has a structure of its own."""
RANKS = (4, 8, 16, 32, 64, 128, 256)
OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "adamw_bnb_8bit", "paged_adamw_8bit", "sgd")
GPUS = ("rtx4090", "t4")
"""One GPU type for each set of kernels."""
LIBRARIES = ("torch", "transformers", "peft", "bitsandbytes")


def covered(model: str, gpu: Gpu) -> Iterator[Configuration]:
    """A configuration of each structure of a model that the file covers."""
    found = architecture(model)
    lengths = {256, found.sliding_window or 256}
    choices = itertools.product(METHODS, (True, False), BATCHES, sorted(lengths))
    for method, checkpointing, batch, length in choices:
        settings = {**method, "gradient_checkpointing": checkpointing, "micro_batch": batch}
        _, configuration = one_configuration(None, model, {**settings, "max_length": length})
        is_half = method.get("mixed_precision") == "fp16"
        if is_half == (gpu.id == "t4") and not check_supported(configuration, gpu):
            yield configuration


def main() -> int:
    """Compile the models named on the command line, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+")
    arguments = parser.parse_args()
    known = Shipped(FILE)
    passes, optimizers = known.everything()
    for model in arguments.models:
        began = time.monotonic()
        found = compiled(model)
        passes.update(found[0])
        for digest, steps in found[1].items():
            optimizers.setdefault(digest, {}).update(steps)
        print(f"{model}: {len(found[0])} structures, {time.monotonic() - began:.0f} s", flush=True)
        versions = {name: installed_version(name) or "" for name in LIBRARIES}
        write(FILE, versions, passes, optimizers)
    print(f"{FILE.stat().st_size:,} bytes, {len(passes):,} structures")
    return 0


def compiled(
    model: str,
) -> tuple[dict[tuple[str, str], CompiledPasses], dict[str, dict[str, CompiledOptimizer]]]:
    """The structures and the optimizer steps of one model."""
    predictor = Predictor(PredictionJob("causal_lm", model), workers=default_workers())
    for name in GPUS:
        gpu = get_gpu(name)
        predictor.predict(list(covered(model, gpu)), gpu)
    passes = predictor.compiled()
    optimizers: dict[str, dict[str, CompiledOptimizer]] = {}
    for (digest, _), found in passes.items():
        steps = optimizers.setdefault(digest, {})
        for rank in RANKS:
            for name, scaled in itertools.product(OPTIMIZERS, (False, True)):
                sizes = trained_sizes(found, rank)
                key = optimizer_key(name, sizes, clip=True, scaled=scaled)
                if key not in steps:
                    entry = entry_name("shipped", key)
                    steps[key] = read_optimizer(entry) or build_optimizer(
                        entry, name, sizes, clip=1.0, scaled=scaled
                    )
    return passes, optimizers


if __name__ == "__main__":
    sys.exit(main())
