"""Other estimates of the same rows: formulas here, other tools in environments of their own."""

from __future__ import annotations

import functools
import json
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.accuracy.harnesses import GIB, Case
from benchmarks.accuracy.predictions import GPUS, Predicted
from tuner.space.gpus import get_gpu

_FOLDER = Path(__file__).parent
_WEIGHT_BYTES = {"nf4": 0.5, "int8": 1.0, "fp16": 2.0, "bf16": 2.0, "fp32": 4.0, "tf32": 4.0}
_FITCHECK_GPUS = {"t4": "t4", "rtx4080": "5080", "a100_80gb": "a100-80"}


RESERVED = "canifinetune 0.4.1 (reserved memory)"
"""The peer that estimates reserved memory, and is compared with that."""


def estimate_all(
    cases: Sequence[Case], pythons: Mapping[str, str], *, processes: int = 2
) -> dict[str, list[float | None]]:
    """Bytes by peer and case.

    `pythons` names the interpreter of each peer that is installed, by "fitcheck" and
    "canifinetune".
    """
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        naive = list(pool.map(naive_sum, cases, chunksize=1))
    estimates: dict[str, list[float | None]] = {
        "naive sum of fake tensors": list(naive),
        "rule of thumb": [rule_of_thumb(case) for case in cases],
        "accelerate estimate-memory": [accelerate_estimate(case) for case in cases],
    }
    if "fitcheck" in pythons:
        name = "fitcheck-llm 0.3.1 (fitted on these T4 rows)"
        estimates[name] = tool("peer_fitcheck.py", pythons["fitcheck"], cases)
    if "canifinetune" in pythons:
        estimates[RESERVED] = tool("peer_canifinetune.py", pythons["canifinetune"], cases)
    return estimates


def table(
    cases: Sequence[Case],
    ours: Sequence[Predicted],
    estimates: Mapping[str, Sequence[float | None]],
    members: Sequence[int],
) -> str:
    """A Markdown table of all estimates on some of the cases (indices `members`)."""
    allocated = [cases[i].measured.allocated for i in members]
    reserved = [cases[i].measured.reserved or cases[i].measured.device for i in members]
    lines = [
        "| estimate of | rows | median | mean | worst |",
        "|---|---:|---:|---:|---:|",
        _line("tuner", [ours[i].allocated for i in members], allocated),
        _line("tuner (reserved memory)", [_held(cases[i], ours[i]) for i in members], reserved),
    ]
    for name, values in estimates.items():
        measured = reserved if name == RESERVED else allocated
        lines.append(_line(name, [values[i] for i in members], measured))
    return "\n".join(lines)


def _held(case: Case, predicted: Predicted) -> float:
    # Like with like: device memory where that is what was measured.
    return predicted.device if case.measured.reserved is None else predicted.reserved


def _line(name: str, estimates: Sequence[float | None], measured: Sequence[float | None]) -> str:
    errors = [e / m - 1 for e, m in zip(estimates, measured, strict=True) if e and m]
    if not errors:
        return f"| {name} | 0 | | | |"
    sizes = [abs(error) for error in errors]
    return (
        f"| {name} | {len(errors)} | {statistics.median(sizes):.1%} | "
        f"{statistics.fmean(sizes):.1%} | {max(errors, key=abs):+.1%} |"
    )


def tool(script: str, python: str, cases: Sequence[Case]) -> list[float | None]:
    """Bytes by case from a peer's script run with the interpreter of its environment."""
    described = [describe(case) for case in cases]
    done = subprocess.run(
        [python, str(_FOLDER / script)],
        input=json.dumps(described),
        capture_output=True,
        text=True,
        check=True,
    )
    return [None if gib is None else gib * GIB for gib in json.loads(done.stdout)]


def describe(case: Case) -> dict[str, Any]:
    """A case as plain JSON: architecture, settings and GPU."""
    from tuner.space.models.catalogue import resolve_config

    config = resolve_config(case.model)
    settings = case.configuration.to_dict()
    heads = config.num_attention_heads
    compute = settings.get("compute_dtype", "auto")
    if compute == "auto":
        precision = settings["precision"]
        compute = precision if precision in ("fp16", "bf16", "fp32") else "bf16"
    eager = settings["attention"] == "eager"
    gpu = get_gpu(case.gpu, extra=GPUS)
    return {
        "row": case.row.number,
        "settings": settings,
        "compute": compute,
        "attention": "eager" if eager else "sdpa",
        "gpu_gib": gpu.memory_bytes / GIB,
        "fitcheck_gpu": _FITCHECK_GPUS.get(case.gpu, "a100-80"),
        "model": {
            "name": case.row.model,
            "family": config.model_type,
            "params": parameter_count(case.model),
            "hidden_size": config.hidden_size,
            "layers": config.num_hidden_layers,
            "heads": heads,
            "kv_heads": getattr(config, "num_key_value_heads", None) or heads,
            "intermediate_size": getattr(config, "intermediate_size", None)
            or getattr(config, "n_inner", None)
            or 4 * config.hidden_size,
            "vocab_size": config.vocab_size,
            "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
            "tied": bool(config.tie_word_embeddings),
        },
    }


@functools.cache
def parameter_count(model: str) -> int:
    """Parameters of the model, tied ones once."""
    import torch
    from transformers import AutoModelForCausalLM

    from tuner.space.models.catalogue import resolve_config

    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(resolve_config(model))
    return sum(parameter.numel() for parameter in skeleton.parameters())


def rule_of_thumb(case: Case) -> float:
    """Weights, 16 bytes a trained weight, and activations by Korthikanti et al. 2022.

    Their table 2: 34 bytes times b s h a layer and 5 a b s^2 for the scores, or 2 b s h with
    full recomputation.
    """
    facts = describe(case)
    model, settings = facts["model"], facts["settings"]
    h, layers = model["hidden_size"], model["layers"]
    tokens = settings["micro_batch"] * settings["max_length"]
    weights = model["params"] * _WEIGHT_BYTES[settings["precision"]]
    rank = settings["lora_rank"]
    trained = 2 * rank * h * layers * len(settings["lora_targets"]) if rank else model["params"]
    if settings["gradient_checkpointing"]:
        activations = 2.0 * tokens * h * layers
    else:
        scores = 5 * model["heads"] * tokens * settings["max_length"]
        activations = layers * (34.0 * tokens * h + scores)
    return float(weights + 16 * trained + activations)


def accelerate_estimate(case: Case) -> float:
    """What `accelerate estimate-memory` calls "training using Adam": four times the weights."""
    facts = describe(case)
    return 4.0 * facts["model"]["params"] * _WEIGHT_BYTES[facts["settings"]["precision"]]


def naive_sum(case: Case) -> float:
    """The sum of all tensors of a step on meta tensors, with nothing that CUDA does otherwise.

    The same model code, but PyTorch's choices for tensors without a device, no kernel
    workspace, no autocast and the loss of the installed transformers.
    """
    from itertools import accumulate
    from unittest import mock

    from tuner.cost.operators.kernels import Kernels
    from tuner.predict.traces import Subject
    from tuner.predict.tracing import trace as tracing
    from tuner.predict.tracing.cuda_path import CudaPath

    def as_on_meta(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))

    subject = Subject("causal_lm", case.model)
    plain = case.configuration.replace(
        mixed_precision="no", loss="transformers", fused_loss=False, training_loop="trainer"
    )
    with (
        mock.patch.object(CudaPath, "__torch_function__", as_on_meta),
        mock.patch.object(tracing, "CUDA_KERNELS", Kernels({}, {})),
    ):
        traced = tracing.trace(
            subject.workload, subject.model_config, plain, compute_capability=(8, 0)
        )
    timeline = traced.timeline
    sizes = [0 if block.paged else block.size_bytes for block in timeline.blocks]
    return float(max(accumulate(sizes[index] * sign for index, sign in timeline.events)))
