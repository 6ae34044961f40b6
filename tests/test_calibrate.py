"""`tuner calibrate`, with this machine's processor for a GPU: every figure is measured for real."""

import json
import time

import pytest
import torch
from click.testing import CliRunner

from tuner.app.cli.machine import calibrate as command
from tuner.core.errors import InputError, UnavailableError
from tuner.core.units import GIB, MIB
from tuner.cost.speed import microbench
from tuner.cost.speed.microbench import Stopwatch
from tuner.cost.speed.profile import load_profile
from tuner.predict import measure_device as measuring
from tuner.predict.measure_device import (
    AttentionCase,
    _MeasurePlan,
    cuda_plan,
    fitting,
    measure_device,
    product_shapes,
)
from tuner.predict.measure_device import _torch_device as torch_device

CPU = torch.device("cpu")


class _HostStopwatch(Stopwatch):
    """Times by the host's clock, as no GPU is here."""

    def synchronize(self):
        """The host has finished when a call returns."""

    def _sample(self, call, calls):
        started = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - started) / calls


@pytest.fixture(autouse=True)
def _gpu(request):
    """A GPU whose figures are those of this processor, with one thread, for a few tiny shapes.

    Threads of a busy machine wait for each other: milliseconds for an operator of nothing.
    """
    if "gpu" in request.keywords:
        yield
        return
    plan = _MeasurePlan(
        dtypes=("fp32", "bf16", "fp16", "int8"),
        shapes=tuple(product_shapes(tokens=(64,), widths=((64, 64), (16, 64)))),
        largest_traffic_bytes=MIB,
        weights=((64, 64),),
        attention=(AttentionCase("flash", "fp32", 2, 4, 32, 32),),
        memory_bytes=256 * MIB,
    )
    identity = {"device": "NVIDIA Testium 9", "gpu": None, "memory_bytes": GIB,
                "compute_capability": "9.9"}  # fmt: skip
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(microbench, "_FIGURE_S", 0.005)
        patch.setattr(microbench, "_LARGEST_ROTATION", 1)
        patch.setattr(measuring, "Stopwatch", _HostStopwatch)
        patch.setattr(measuring, "_torch_device", lambda text: CPU)
        patch.setattr(measuring, "_plan", lambda device: plan)
        patch.setattr(measuring, "_identity", lambda device: identity)
        patch.setattr(measuring, "_context_bytes", lambda device, used_before_bytes: None)
        yield
    torch.set_num_threads(before)


def test_every_figure_is_measured():
    profile = measure_device("cuda:0", budget_s=900.0)
    assert profile.device == "NVIDIA Testium 9"
    assert profile.gpu is None
    assert profile.skipped == ()
    assert {r.dtype for r in profile.matmul} == {"fp32", "bf16", "fp16", "int8"}
    assert {r.kind for r in profile.traffic} == {
        "elementwise", "copy", "read", "dequantise", "dequantise_int8",
    }  # fmt: skip
    assert [r.kernel for r in profile.attention] == ["flash"]
    assert profile.kernel_s > 0
    assert profile.launch_s > 0
    figures = [*profile.matmul, *profile.traffic]
    assert all(figure.spread >= 0 for figure in figures)


def test_rates_are_work_over_time(monkeypatch):
    timing = microbench._Timing(0.25, 0.5)
    monkeypatch.setattr(Stopwatch, "time", lambda self, call, **known: timing)
    profile = measure_device("cuda:0", budget_s=900.0)
    for rate in profile.matmul:
        assert rate.flops_per_s == pytest.approx(2 * rate.m * rate.n * rate.k / 0.25)
        assert rate.spread == 0.5
    for rate in profile.traffic:
        assert rate.bytes_per_s == pytest.approx(rate.size_bytes / 0.25)
    for rate in profile.attention:
        # The backward pass computes two and a half times what the forward pass does.
        assert rate.backward_flops_per_s == pytest.approx(2.5 * rate.forward_flops_per_s)


def test_the_stopwatch_times_what_is_called(monkeypatch):
    now_s = 0.0

    def sleep() -> None:
        nonlocal now_s
        now_s += 0.002

    monkeypatch.setattr(time, "perf_counter", lambda: now_s)
    timing = _HostStopwatch(CPU).time(sleep)
    assert timing.typical_s == pytest.approx(0.002)
    assert timing.spread == pytest.approx(0)


def test_views_are_no_launches():
    x = torch.ones(4, 4)
    with microbench._OperatorCount() as counter:
        (x.t().view(16) if x.t().is_contiguous() else x.t()).add(1).mul(2)
    assert counter.operators == 2


def test_what_does_not_fit_is_not_tried():
    assert list(fitting([(8, 8, 8), (10**6, 10**6, 8)], 2, 10**6)) == [(8, 8, 8)]


@pytest.mark.parametrize(
    ("capability", "dtypes"),
    [
        ((7, 0), {"fp16", "fp32"}),
        ((7, 5), {"fp16", "fp32", "int8"}),
        ((9, 0), {"bf16", "fp16", "tf32", "fp32", "int8"}),
    ],
)
def test_a_gpu_is_asked_only_for_what_it_can_do(capability, dtypes):
    plan = cuda_plan(capability, 16 * 2**30)
    assert set(plan.dtypes) == dtypes
    assert (8192, 16, 4096) in plan.shapes  # LoRA forward
    assert (16, 4096, 8192) in plan.shapes  # its weight gradient


def test_time_that_runs_out_leaves_a_profile_without_the_rest():
    with pytest.raises(UnavailableError, match="no matrix product"):
        measure_device("cuda:0", budget_s=0.0)


@pytest.mark.parametrize("device", ["quantum", "meta", "cpu"])
def test_what_is_no_gpu_is_refused(device):
    with pytest.raises(InputError, match=r"cannot be measured|does not exist"):
        torch_device(device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_gpu_that_is_not_there_is_said():
    with pytest.raises(UnavailableError, match="no CUDA device 0"):
        torch_device("cuda:0")


def test_the_command_writes_the_profile_and_prints_json(tmp_path):
    path = tmp_path / "gpu.yaml"
    arguments = ["--json", "--output", str(path)]
    result = CliRunner().invoke(command, arguments, catch_exceptions=False)
    summary = json.loads(result.stdout)
    assert summary["path"] == str(path)
    assert load_profile(path).peak_flops_per_s("fp32") == summary["peak_flops_per_s"]["fp32"]


def test_the_command_uses_the_profile_folder_by_default(tmp_path, monkeypatch):
    monkeypatch.setenv("TUNER_PROFILES", str(tmp_path))
    result = CliRunner().invoke(command, [], catch_exceptions=False)
    (written,) = tmp_path.iterdir()
    assert written.name == "nvidia_testium_9.yaml"
    assert "best TFLOP/s" in result.stdout
    assert "matmul" in result.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_is_measured():
    profile = measure_device("cuda:0", budget_s=120)
    assert profile.context_bytes is None or profile.context_bytes > 50 * 2**20
    assert {"fp32", "fp16"} <= {r.dtype for r in profile.matmul}
    assert {r.kind for r in profile.traffic} >= {"elementwise", "dequantise"}
