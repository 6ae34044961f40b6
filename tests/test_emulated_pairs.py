"""Trace and emulator count the same memory of the same training step, with images too."""

from __future__ import annotations

import contextlib

import pytest
from emulating import needs_emulator
from shared_cases.shallow import shallow

from tuner.app.estimate import one_configuration
from tuner.app.measuring import emulating
from tuner.app.search.supported import trial_job
from tuner.core.units import MIB
from tuner.predict.predict import predict
from tuner.predict.traces import Subject
from tuner.space.gpus import get_gpu
from tuner.trial.factories import EmulatedFactory

TINY = "tiny-llama-3m"
LOADER = {"num_workers": 0, "persistent_workers": False}
LARGE = {"micro_batch": 8, "max_length": 512, "lora_rank": 16, "grad_accum": 3}
SMALL = {"micro_batch": 2, "max_length": 256, "lora_rank": 16, "grad_accum": 2}
WHOLE = {**SMALL, "lora_rank": 0}
"""Full fine-tuning, with the optimizers that transformers' Trainer has."""
BF16 = {"precision": "bf16", "mixed_precision": "no"}
FP32 = {"precision": "fp32", "mixed_precision": "bf16"}
"""Master weights in fp32 under autocast, as Trainer(bf16=True) trains them."""

CASES = {
    "quantised": (
        TINY,
        {
            **LARGE,
            "precision": "nf4",
            "optimizer": "paged_adamw_8bit",
            "gradient_checkpointing": True,
        },
    ),
    "eager": (
        TINY,
        {**LARGE, "precision": "bf16", "attention": "eager", "gradient_checkpointing": False},
    ),
    "chunked": (
        "olmo-2-7b",
        {**SMALL, "precision": "fp16", "mixed_precision": "fp16", "loss": "chunked"},
    ),
    "reentrant": (
        "granite-3.1-2b",
        {**SMALL, "precision": "nf4", "use_reentrant": True, "optimizer": "lion_8bit"},
    ),
    "rslora": (
        "lfm2-1.2b",
        {**SMALL, "precision": "int8", "adapter": "rslora", "gradient_checkpointing": False},
    ),
    "dora": ("qwen2.5-0.5b", {**SMALL, "precision": "nf4", "adapter": "dora"}),
    "loop": ("qwen2.5-vl-3b", {**SMALL, "images": 1, "image_size": 224, "training_loop": "loop"}),
    "images": ("medgemma-4b", {**SMALL, "images": 1, "max_length": 512, "precision": "nf4"}),
    "labels": ("qwen2.5-0.5b", {**WHOLE, "num_labels": 3}),
    "adamw": ("gemma-3-1b", {**WHOLE, **FP32, "optimizer": "adamw_torch"}),
    "paged lion": ("qwen2.5-0.5b", {**WHOLE, **BF16, "optimizer": "paged_lion_8bit"}),
    "adafactor": ("gemma-3-1b", {**WHOLE, **BF16, "optimizer": "adafactor"}),
}


@pytest.mark.proof
@needs_emulator
@pytest.mark.parametrize("name", CASES)
def test_trace_and_emulator_agree(name, tmp_path):
    model, settings = CASES[name]
    model = model if model == TINY else shallow(model, tmp_path)
    space, configuration = one_configuration(None, model, {**settings, **LOADER})
    gpu = get_gpu("a100_80gb")
    traced = predict(Subject(space.workload, model), configuration, gpu).memory
    make = EmulatedFactory(trial_job(space, gpu, None, None), emulating(gpu).options())
    with contextlib.closing(make()) as runner:
        outcome = runner.run(configuration)
    assert outcome.emulation is not None, outcome.message
    emulated = outcome.emulation.memory
    assert emulated.peak_allocated_bytes > 80 * MIB
    pairs = {
        "allocated": (traced.peak_allocated_bytes, emulated.peak_allocated_bytes),
        "loaded": (traced.loaded_bytes, emulated.loaded_bytes),
    }
    for phase in ("forward", "backward", "optimizer"):
        pairs[phase] = (traced.phase_peak_bytes[phase], emulated.phase_peak_bytes[phase])
    for number, (predicted, found) in pairs.items():
        assert predicted == pytest.approx(found, rel=0.005, abs=4 * MIB), number
