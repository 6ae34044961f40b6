"""What a trace takes a processor to do, against a processor that does it."""

from __future__ import annotations

import contextlib
import re
from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest
import torch
from device_fakes import profile_of
from estimate_samples import configuration, tiny_config, traced
from live_storages import LiveStorages
from torch.nn import functional as nn_functional

from tuner.core.units import MIB
from tuner.cost.library_memory import PROCESSOR, cublas_workspace_bytes
from tuner.cost.memory import peak_memory
from tuner.cost.speed.kernel_times import MeasuredKernelTimes, ProcessorKernelTimes
from tuner.cost.speed.processor import on_its_device, processor
from tuner.cost.speed.roofline import step_times
from tuner.predict.compiler.structure import Structure
from tuner.predict.predict import Subject, predict, step_work
from tuner.predict.predictor import PredictionJob, Predictor
from tuner.predict.tracing import device_path
from tuner.predict.tracing.device_path import CpuPath
from tuner.predict.training import get_workload
from tuner.space.models.catalogue import resolve_config

PROFILE = replace(profile_of("CPU Testium 9"), context_bytes=40 * MIB, live_factor=1.5)
CPU = processor(PROFILE)


class _Processor:
    """A real training's `tuner.predict.training.base.Environment`, on this processor."""

    device = "cpu"

    def materialize(self, model):
        model.to_empty(device="cpu")
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                if tensor.is_floating_point():
                    tensor.uniform_(-0.02, 0.02)

    def autocast(self, dtype):
        return torch.autocast("cpu", dtype=dtype)

    def checkpoint_contexts(self, autocast_dtype):
        return contextlib.nullcontext(), contextlib.nullcontext()

    def enter(self, phase, micro_step):
        """Phases are not recorded."""


def really_live(model, **values) -> LiveStorages:
    """Two optimizer steps on this machine's processor."""
    session = get_workload("causal_lm").open(model, configuration(**values), _Processor())
    live = LiveStorages()
    for tensor in (*session.model.parameters(), *session.model.buffers()):
        live.add(tensor)
    with live:
        session.optimizer_step(1)
        session.optimizer_step(2)
    return live


def traced_peak(model, **values) -> int:
    timeline = traced(model, compute_capability=PROCESSOR, **values).timeline
    sizes = [block.size_bytes for block in timeline.blocks]
    return max(accumulate(sign * sizes[index] for index, sign in timeline.events))


@pytest.mark.parametrize(
    "values",
    [
        {"precision": "fp32"},
        {"precision": "fp32", "gradient_checkpointing": True, "attention": "eager"},
        {"precision": "bf16", "mixed_precision": "bf16"},
        {"precision": "bf16", "mixed_precision": "bf16", "optimizer": "adamw_8bit"},
        {"precision": "fp32", "mixed_precision": "bf16", "lora_rank": 0, "lora_targets": ()},
    ],
    ids=lambda values: "-".join(map(str, values.values())),
)
def test_live_tensors_are_those_of_a_real_step(values):
    model = tiny_config("llama", vocab_size=2048)
    real = really_live(model, max_length=64, **values).peak
    # A real step also has a batch of its own, and scalars.
    assert traced_peak(model, max_length=64, **values) == pytest.approx(real, rel=0.03)


def test_attention_runs_the_fused_kernel_that_the_processor_runs():
    model = tiny_config("llama")
    real = really_live(model).names
    timeline = traced(model, compute_capability=PROCESSOR).timeline
    ours = [timeline.works[op.work].name for op in timeline.ops]
    fused = "_scaled_dot_product_flash_attention_for_cpu"
    assert ours.count(fused) == real.count(f"aten::{fused}") > 0
    assert ours.count(f"{fused}_backward") == real.count(f"aten::{fused}_backward") > 0
    works = {work.name: work for work in timeline.works}
    assert works[f"{fused}_backward"].flops == works[fused].flops * 5 // 2 > 0


def test_attention_with_a_mask_or_dropout_can_be_traced():
    with CpuPath():
        query = torch.empty(2, 4, 8, 16, device="meta")
        mask = torch.ones(2, 1, 8, 8, dtype=torch.bool, device="meta")
        for options in ({"attn_mask": mask}, {"dropout_p": 0.1}):
            out = nn_functional.scaled_dot_product_attention(query, query, query, **options)
            assert out.shape == query.shape


def autocasts_on_cpu() -> set[str]:
    return {
        name.removeprefix("aten::").split(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::")
        and re.search(r"^AutocastCPU: ", torch._C._dispatch_dump(name), re.MULTILINE)
    }


def test_every_listed_operator_is_one_that_the_processors_autocast_handles():
    handled = autocasts_on_cpu()
    assert {"mm", "linear"} <= handled
    composite = {"einsum"}  # made of those that are
    for function in device_path.PRODUCTS | CpuPath.to_fp32:
        name = function.__name__.strip("_")
        assert name in handled | composite, name


def test_norms_and_softmax_stay_in_16_bits_under_the_processors_autocast():
    path = CpuPath()
    x = torch.empty(4, 8, dtype=torch.bfloat16, device="meta")
    with path, path.autocast(torch.bfloat16):
        assert nn_functional.softmax(x, -1).dtype is torch.bfloat16
        assert nn_functional.layer_norm(x, (8,)).dtype is torch.bfloat16
        assert nn_functional.linear(x, torch.empty(8, 8, device="meta")).dtype is torch.bfloat16


def test_int8_layers_widen_their_weights():
    timeline = traced(compute_capability=PROCESSOR, precision="int8").timeline
    names = {work.name for work in timeline.works}
    assert "int8_linear_matmul" not in names
    assert "mm" in names


def test_a_processor_has_no_cublas_and_a_structure_of_its_own():
    assert cublas_workspace_bytes(PROCESSOR) == 0
    structures = {
        Structure.of(configuration(), window=None, compute_capability=capability)
        for capability in (PROCESSOR, (7, 5), (8, 0), (9, 0))
    }
    assert len(structures) == 3


def test_all_memory_of_a_processor_is_what_is_resident():
    timeline = traced(compute_capability=PROCESSOR).timeline
    live = peak_memory(timeline, context_bytes=40 * MIB, caching=False)
    found = on_its_device(live, CPU, PROFILE)
    expected = round(1.5 * live.peak_allocated_bytes) + 40 * MIB
    assert found.device_bytes == found.peak_reserved_bytes == found.peak_allocated_bytes == expected
    assert sum(found.breakdown.values()) == expected
    assert max(found.phase_peak_bytes.values()) == expected


def test_compiled_and_full_predictions_of_a_processor_agree():
    asked = configuration(
        max_length=64, precision="bf16", mixed_precision="bf16", max_grad_norm=1.0
    )
    model = "tiny-llama-3m"
    subject = Subject(get_workload("causal_lm"), model, resolve_config(model))
    full = predict(subject, asked, CPU, profile=PROFILE)
    (compiled,) = Predictor(PredictionJob("causal_lm", model)).predict(
        [asked], CPU, profile=PROFILE
    )
    assert "compiled timeline" in compiled.method
    # Resident bytes all three: none is as certain as an allocator's own count on a GPU.
    assert full.intervals["peak_allocated_bytes"] == full.intervals["device_bytes"]
    assert compiled.memory.device_bytes == pytest.approx(full.memory.device_bytes, rel=0.005)
    assert compiled.speed.step_s == pytest.approx(full.speed.step_s, rel=0.01)


def test_operators_and_kernels_follow_each_other_on_a_processor():
    work = step_work(traced(compute_capability=PROCESSOR))

    def step_s(times) -> float:
        return float(step_times(work, CPU, grad_accum=np.array([1]), kernel_times=times).step_s[0])

    plain = ProcessorKernelTimes(PROFILE)
    assert step_s(plain) > step_s(MeasuredKernelTimes(PROFILE))
    slower = ProcessorKernelTimes(replace(PROFILE, step_factor=2.0))
    no_launch = ProcessorKernelTimes(replace(PROFILE, launch_s=0.0))
    kernels = step_s(no_launch)
    assert step_s(slower) == pytest.approx(step_s(plain) + kernels)
