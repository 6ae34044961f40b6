"""Device profiles: written whole, read back equal, damaged ones refused with every problem."""

import dataclasses
import math

import numpy as np
import pytest
import yaml

from tuner.core.errors import InputError
from tuner.core.records.reading import written
from tuner.cost.operators.timeline import Work
from tuner.cost.speed import profile
from tuner.cost.speed import profile as profiles
from tuner.cost.speed.kernel_times import _MeasuredKernelTimes
from tuner.cost.speed.roofline import KernelTimes, Roofline
from tuner.cost.work_arrays import WorkArrays
from tuner.space.gpus import get_gpu

A6000 = get_gpu("a6000")
PROFILE = profile.DeviceProfile(
    device="NVIDIA RTX A6000",
    gpu="a6000",
    memory_bytes=A6000.memory_bytes,
    compute_capability="8.6",
    measured_at="2026-11-21T10:00:00+00:00",
    versions={"torch": "2.13.0", "driver": "580.1"},
    launch_s=5e-6,
    kernel_s=2e-6,
    context_bytes=400_000_000,
    matmul=(
        profile.MatmulRate("bf16", 4096, 4096, 4096, 120e12, 0.01),
        profile.MatmulRate("bf16", 4096, 16, 4096, 8e12, 0.02),
        profile.MatmulRate("bf16", 512, 512, 512, 20e12, 0.02),
        profile.MatmulRate("fp32", 4096, 4096, 4096, 25e12, 0.01),
        profile.MatmulRate("tf32", 4096, 4096, 4096, 60e12, 0.01),
    ),
    traffic=(
        profile.TrafficRate("elementwise", 2**20, 900e9, 0.01),
        profile.TrafficRate("elementwise", 2**30, 650e9, 0.01),
        profile.TrafficRate("dequantise", 2**24, 300e9, 0.01),
    ),
    attention=(profile.AttentionRate("flash", "bf16", 2, 16, 2048, 128, 80e12, 60e12, 0.03),),
    skipped=("matmul int8: no kernel",),
    duration_s=61.5,
)


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv(profiles.FOLDER_VARIABLE, str(tmp_path / "profiles"))


def product(m, n, k, dtype="bfloat16", batch=1):
    moved = 2 * batch * (m * k + k * n + m * n)
    return work("mm", "matmul", dtype, moved, 2 * batch * m * n * k, (batch, m, n, k))


def work(name, kind, dtype, moved, flops=0, shape=None):
    values = {
        "name": name,
        "kind": kind,
        "flops": flops,
        "tensor_bytes": (moved,),
        "dtype": dtype,
        "shape": shape,
        "workspace_bytes": (),
    }
    return Work(**{name: values[name] for name in Work._fields})


def seconds(one, *, allow_tf32=False):
    times = _MeasuredKernelTimes(PROFILE)
    ((found,),) = times.seconds(WorkArrays.of_works([one]), A6000, allow_tf32=allow_tf32)
    return found


def test_a_profile_is_read_back_as_it_was_written(tmp_path):
    path = tmp_path / "new" / "a6000.yaml"
    PROFILE.save(path)
    assert profile.load_profile(path) == PROFILE
    assert [p.name for p in path.parent.iterdir()] == ["a6000.yaml"]


def test_a_profile_is_found_by_the_gpu_it_was_measured_on():
    assert profile.find_profile(A6000) is None
    PROFILE.save(profile.profile_path("a6000"))
    assert profile.find_profile(A6000) == PROFILE
    assert profile.find_profile(get_gpu("t4")) is None


def damaged(**changes):
    return {"schema": 1, **written(PROFILE), **changes}


def test_a_profile_with_fields_of_another_version_is_read(tmp_path):
    path = tmp_path / "older.yaml"
    path.write_text(yaml.safe_dump(damaged(step_factor=None, live_factor=1.1, pages_bytes={})))
    assert profile.load_profile(path) == PROFILE


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("- a list", ["is not a mapping"]),
        ("a: [", ["not valid YAML"]),
        (damaged(schema=7), ["schema: 7 is not 1"]),
        (damaged(launch_s=0), ["launch_s: expected float >= 1e-15"]),
        (
            damaged(launch_s=True, device=""),
            ["launch_s: expected float, got bool", "device: expected str of length >= 1"],
        ),
        (damaged(kernel_s=math.inf), ["kernel_s: expected float <= 1e+21"]),
        (damaged(launch_s="\ud800"), ["launch_s: holds half of a surrogate pair"]),
        (damaged(matmul=[]), ["matmul: holds no measurement"]),
        (
            damaged(traffic=[t for t in written(PROFILE)["traffic"] if t["kind"] != "elementwise"]),
            ["traffic: holds no measurement of elementwise kernels"],
        ),
        (damaged(matmul=[{"m": 1}]), ["matmul[0]: object missing required field dtype"]),
        (damaged(traffic="fast"), ["traffic: expected array, got str"]),
    ],
)
def test_a_damaged_profile_is_refused_with_all_that_is_wrong(tmp_path, content, says):
    path = tmp_path / "bad.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    with pytest.raises(InputError) as raised:
        profile.load_profile(path)
    for text in says:
        assert text in str(raised.value)


@pytest.mark.parametrize("rate", [r for r in PROFILE.matmul if r.dtype in ("bf16", "fp32")])
def test_a_measured_product_takes_its_measured_time(rate):
    dtype = {"bf16": "bfloat16", "fp32": "float32"}[rate.dtype]
    flops = 2 * rate.m * rate.n * rate.k
    for m, n in ((rate.m, rate.n), (rate.n, rate.m)):
        found = seconds(product(m, n, rate.k, dtype))
        assert found == pytest.approx(flops / rate.flops_per_s, rel=1e-4)


def test_a_thin_product_reaches_the_share_of_the_thin_one_that_was_measured():
    thin = product(4096, 17, 4096)
    rate = thin.flops / seconds(thin)
    assert 8e12 < rate < 12e12


def test_traffic_takes_its_rate_from_measured_sizes():
    small, large, between = (
        size / seconds(work("add", "elementwise", "bfloat16", size))
        for size in (2**22, 2**30, 2**25)
    )
    assert large == pytest.approx(650e9)
    assert 650e9 < between < small < 900e9
    dequantised = work("dequantize_4bit", "dequantise", "uint8", 2**24)
    assert seconds(dequantised) == pytest.approx(2**24 / 300e9)


def test_attention_runs_at_its_measured_rate_forward_and_backward_together():
    elements = 2 * 16 * 2048 * 128
    flops, moved = 2 * elements * 2048, 4 * elements * 2
    forward = work("_scaled_dot_product_flash_attention", "attention", "bfloat16", moved, flops)
    rate = 3.5 / (1 / 80e12 + 2.5 / 60e12)
    assert seconds(forward) == pytest.approx(flops / rate)


def test_what_was_not_measured_falls_back_to_the_catalogue():
    one = product(4096, 4096, 4096, "float16")
    arrays = WorkArrays.of_works([one])
    ((guessed,),) = Roofline().seconds(arrays, A6000, allow_tf32=False)
    assert seconds(one) == guessed


def test_many_operators_at_many_points_are_timed_as_each_one_alone():
    listed = [product(256, 64, 512), work("add", "elementwise", "float32", 2**20)]
    one = WorkArrays.of_works(listed)
    many = dataclasses.replace(
        one,
        flops=np.repeat(one.flops, 3, axis=1),
        bytes_moved=np.repeat(one.bytes_moved, 3, axis=1),
        shapes=np.repeat(one.shapes, 3, axis=2),
    )
    times: KernelTimes = _MeasuredKernelTimes(PROFILE)
    together = times.seconds(many, A6000, allow_tf32=False)
    assert together == pytest.approx(np.array([[seconds(w)] * 3 for w in listed]))
    assert set(times.host(A6000)) == {PROFILE.launch_s}
