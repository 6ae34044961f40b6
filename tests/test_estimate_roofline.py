"""Kernel times against hand computations, and step times that behave as a GPU's would."""

import math
import re
from dataclasses import replace

import pytest
from estimate_samples import configuration, tiny_config

from tuner.cost.interval import in_quadrature
from tuner.cost.operators.timeline import MASK, Work
from tuner.cost.speed.rates import MASKED, MASKED_DIFFERS, as_chosen, matmul_peak, power_limit
from tuner.cost.speed.roofline import KEPT, Efficiency, Roofline
from tuner.cost.work_arrays import WorkArrays
from tuner.predict.predict import predict
from tuner.predict.traces import Subject
from tuner.predict.training import get_workload
from tuner.space.gpus import get_gpu

A100, T4 = get_gpu("a100_80gb"), get_gpu("t4")
PLAIN = Efficiency(
    matmul=dict.fromkeys(("fp16", "bf16", "tf32", "fp32", "int8"), 0.5),
    bandwidth={"elementwise": 0.5},
    kernel_s=1e-9,
    launch_s=0.0,
    fill=0.0,
)


def kernel_s(work: Work, gpu=A100, *, efficiency=PLAIN, allow_tf32=False) -> float:
    works = WorkArrays.of_works([work])
    return float(Roofline(efficiency).seconds(works, gpu, allow_tf32=allow_tf32)[0, 0])


def product(m: int, n: int, k: int, *, dtype: str = "bfloat16", batch: int = 1) -> Work:
    width = {"float32": 4, "int8": 1}.get(dtype, 2)
    moved = tuple(batch * size * width for size in (m * k, k * n, m * n))
    return Work("mm", "matmul", 2 * batch * m * n * k, moved, dtype, (batch, m, n, k), ())


def elementwise(size_bytes: int) -> Work:
    return Work("add", "elementwise", 0, (size_bytes, size_bytes), "float32", None, ())


# -- one kernel -----------------------------------------------------------------------------


def test_elementwise_kernel_moves_its_bytes():
    assert kernel_s(elementwise(10**9)) == pytest.approx(
        2 * 10**9 / (A100.bandwidth_bytes_per_s * 0.5)
    )


def test_the_l2_cache_keeps_half_of_what_small_kernels_pass_on():
    l40s = get_gpu("l40s")
    rate = l40s.bandwidth_bytes_per_s * 0.5
    small, large = elementwise(l40s.l2_bytes // 8), elementwise(l40s.l2_bytes)
    # A quarter of the cache: three quarters of what it could keep are kept.
    assert kernel_s(small, l40s) == pytest.approx(small.bytes_moved / rate * (1 - 0.75 * KEPT))
    assert kernel_s(large, l40s) == pytest.approx(large.bytes_moved / rate)
    assert kernel_s(small, replace(l40s, l2_bytes=None)) == small.bytes_moved / rate
    works = WorkArrays.of_works([small])
    streamed = Roofline(PLAIN).seconds(works, l40s, allow_tf32=False, streams=True)
    assert streamed == pytest.approx(small.bytes_moved / rate)  # of an update of parameters
    *_, (least, most) = Roofline(PLAIN).ends(works, l40s, allow_tf32=False)
    assert least < kernel_s(small, l40s) < most == streamed


def test_large_product_is_bound_by_arithmetic():
    # 32 x 32 tiles of 128 on 108 multiprocessors: 9.48 waves that take as long as 10.
    seconds = 2 * 4096**3 / (A100.flops["bf16"] * 0.5) * 10 / (1024 / 108)
    assert kernel_s(product(4096, 4096, 4096)) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("gpu", "dtype", "allow_tf32", "precision"),
    [
        (A100, "bfloat16", False, "bf16"),
        (A100, "float16", False, "fp16"),
        (A100, "float32", False, "fp32"),
        (A100, "float32", True, "tf32"),
        (A100, "int8", False, "int8"),
        (T4, "float32", True, "fp32"),  # Turing has no tf32
        (T4, "bfloat16", False, "fp32"),  # and no bf16: it runs as fp32 does
    ],
)
def test_peak_of_each_precision(gpu, dtype, allow_tf32, precision):
    assert matmul_peak(gpu, dtype, allow_tf32) == gpu.flops[precision]
    gpu = replace(gpu, power_w=None)
    full_waves = product(128 * gpu.sm_count, 4096, 4096, dtype=dtype)
    expected = full_waves.flops / (gpu.flops[precision] * 0.5)
    assert kernel_s(full_waves, gpu, allow_tf32=allow_tf32) == pytest.approx(expected)


def test_more_work_never_takes_less_time():
    for axis in range(3):
        shape = [1024, 1024, 1024]
        seconds = []
        for size in (128, 512, 1024, 4096, 16_384):
            shape[axis] = size
            seconds.append(kernel_s(product(*shape)))
        assert seconds == sorted(seconds)


@pytest.mark.parametrize(
    ("gpu_id", "dtype", "measured_tflops"),
    [
        # Rates of large torch.mm that the energies were not taken from (mean of 8192 and 10240):
        # github.com/zzc0721/torch-performance-test-data, issue 79.
        ("h100_sxm", "bfloat16", 759.0),
        ("h100_sxm", "float32", 50.7),
        # github.com/stas00/ml-engineering, maximum achievable matmul FLOPS
        ("a100_80gb_pcie", "bfloat16", 256.4),
        ("a100_80gb", "bfloat16", 267.9),
    ],
)
def test_power_leaves_what_other_boards_were_measured_to_reach(gpu_id, dtype, measured_tflops):
    assert power_limit(get_gpu(gpu_id), dtype, allow_tf32=False) > 0.95 * measured_tflops * 1e12


@pytest.mark.parametrize(
    ("gpu_id", "dtype", "share"),
    [
        ("t4", "float16", 0.37),
        ("l4", "bfloat16", 0.45),
        ("a10", "bfloat16", 0.49),
        ("h100_pcie", "bfloat16", 0.62),
    ],
)
def test_boards_with_little_power_do_not_sustain_their_peak(gpu_id, dtype, share):
    gpu = get_gpu(gpu_id)
    work = product(128 * gpu.sm_count, 8192, 8192, dtype=dtype)
    full_power = replace(gpu, power_w=10 * gpu.power_w)
    unlimited = replace(PLAIN, matmul=dict.fromkeys(PLAIN.matmul, 1.0))
    reached = work.flops / kernel_s(work, gpu, efficiency=unlimited)
    assert reached == pytest.approx(share * gpu.flops["fp16"], rel=0.02)
    assert work.flops / kernel_s(work, full_power, efficiency=unlimited) == pytest.approx(
        gpu.flops["fp16"]
    )


def test_batched_products_fill_each_others_last_waves():
    one, many = kernel_s(product(2048, 2048, 2048)), kernel_s(product(2048, 2048, 2048, batch=27))
    # Alone 256 tiles take 3 waves of 108; together 64 waves are full.
    assert many == pytest.approx(one * 64 / 3)


# -- a whole step ---------------------------------------------------------------------------

SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 64,
    "vocab_size": 8192,
    "max_position_embeddings": 4096,
}


@pytest.fixture(scope="module")
def speed():
    """The predicted speed of a model whose products are large enough to fill a GPU."""
    subject = Subject(get_workload("causal_lm"), "made up", tiny_config(**SIZES))

    known = {}

    def predicted(gpu=A100, **values):
        # Large enough that no GPU waits for the host.
        asked = configuration(**{"micro_batch": 128, "max_length": 512, **values})
        if gpu is not A100:
            return predict(subject, asked, gpu).speed
        if asked.key not in known:
            known[asked.key] = predict(subject, asked, gpu).speed
        return known[asked.key]

    return predicted


@pytest.mark.parametrize(
    ("knob", "values"),
    [
        ("micro_batch", (64, 128, 256, 512)),
        ("max_length", (256, 512, 1024)),
        ("lora_rank", (8, 64, 512)),
    ],
)
def test_more_work_takes_more_time(speed, knob, values):
    seconds = [speed(**{knob: value}).step_s for value in values]
    assert seconds == sorted(set(seconds))


def test_checkpointing_costs_the_time_of_the_recomputation(speed):
    plain, checkpointed = speed(lora_rank=0), speed(lora_rank=0, gradient_checkpointing=True)
    assert plain.step_s < checkpointed.step_s < 1.5 * plain.step_s
    assert plain.breakdown_s["recompute"] == 0
    assert checkpointed.breakdown_s["recompute"] > 0
    # Work that is repeated is not work for the model.
    assert checkpointed.mfu * checkpointed.step_s == pytest.approx(plain.mfu * plain.step_s)


def test_each_further_micro_step_costs_the_same(speed):
    speeds = {n: speed(grad_accum=n) for n in (1, 2, 8, 16)}
    seconds = {n: one.step_s for n, one in speeds.items()}
    assert seconds[16] - seconds[8] == pytest.approx(8 * (seconds[2] - seconds[1]), rel=0.01)
    once, more = (speeds[n].breakdown_s["optimizer"] for n in (1, 8))
    assert once > 0
    assert more == pytest.approx(once)


def test_faster_gpus_are_faster(speed):
    twice = replace(
        A100,
        flops={name: 2 * rate for name, rate in A100.flops.items()},
        bandwidth_bytes_per_s=2 * A100.bandwidth_bytes_per_s,
    )
    wider = replace(A100, bandwidth_bytes_per_s=2 * A100.bandwidth_bytes_per_s)
    base = speed().step_s
    assert base / 2 <= speed(twice).step_s < speed(wider).step_s < base


def test_full_fine_tuning_does_six_flops_a_weight_and_token(speed):
    """2 forward and 4 backward for each weight of a product, and attention's own products."""
    micro_batch, length, layers, hidden, grad_accum = 4, 512, 2, 1024, 3
    predicted = speed(
        lora_rank=0, micro_batch=micro_batch, max_length=length, grad_accum=grad_accum
    )
    weights = layers * (4 * hidden**2 + 3 * hidden * 2816) + hidden * 8192
    tokens = micro_batch * length
    # Causal: half of 2 products forward, 5 backward.
    attention = layers * micro_batch * 2 * length**2 * hidden / 2 * (2 + 5)
    expected = grad_accum * (6 * weights * tokens + attention)
    model_flops = predicted.mfu * predicted.step_s * A100.flops["bf16"]
    assert model_flops == pytest.approx(expected, rel=1e-3)


def test_lora_saves_the_gradients_of_the_weights(speed):
    full, lora = speed(lora_rank=0), speed(lora_rank=8)
    ratio = (lora.mfu * lora.step_s) / (full.mfu * full.step_s)
    # 4 FLOPs instead of 6, adapters on top, and nothing backward through the first layer's inputs.
    assert 0.6 < ratio < 0.75


# -- fused attention ------------------------------------------------------------------------

H100 = get_gpu("h100_sxm")
FORWARD, BACKWARD = "_scaled_dot_product_{}_attention", "_scaled_dot_product_{}_attention_backward"


def attention(name: str, *, head: int = 128, dtype: str = "bfloat16") -> Work:
    return Work(name, "attention", 10**13, (10**6,), dtype, (64, 8192, 8192, head), ())


def attention_tflops(name: str, gpu=A100, **shape) -> float:
    return 10 / kernel_s(attention(name, **shape), gpu)


def steps_tflops(kernel: str, gpu, mask: str = "", **shape) -> float:
    """Two forward passes, one of them repeated, and one backward of 2.5 times the work."""
    forward = attention_tflops(FORWARD.format(kernel) + mask, gpu, **shape)
    backward = attention_tflops(BACKWARD.format(kernel) + mask, gpu, **shape)
    return 4.5 / (2 / forward + 2.5 / backward)


@pytest.mark.parametrize(
    ("gpu", "head", "least", "most"),
    [
        (A100, 96, 45, 56),
        (A100, 128, 60, 70),
        (A100, 256, 30, 40),
        # Of the H100 only how much faster it is than the A100 was used.
        (H100, 96, 67, 83),
        (H100, 128, 85, 105),
        (H100, 256, 40, 56),
    ],
)
def test_the_kernel_that_a_dense_mask_asks_for_is_as_slow_as_measured(gpu, head, least, most):
    assert least < steps_tflops("efficient", gpu, MASK, head=head) < most


def test_each_kernel_direction_and_generation_has_its_own_rate():
    flash = attention_tflops(FORWARD.format("flash"))
    assert flash > attention_tflops(FORWARD.format("efficient")) > 100
    assert flash > attention_tflops(BACKWARD.format("flash"))
    assert attention_tflops(FORWARD.format("cudnn")) < flash
    on_h100 = attention_tflops(FORWARD.format("flash"), H100)
    assert flash < on_h100 < 0.4 * H100.flops["bf16"] / 1e12
    assert attention_tflops("flash_attn_3::fwd", H100) > 1.5 * on_h100


@pytest.mark.parametrize(
    ("head", "length", "heads", "forward", "backward"),
    [
        (64, 1024, 72, 261, 180),
        (64, 2048, 56, 337, 261),
        (64, 2048, 128, 364, 271),
        (64, 2048, 256, 401, 299),
        (128, 2048, 64, 483, 339),
        (128, 4096, 64, 582, 448),
    ],
)
def test_cudnn_on_hopper_is_as_fast_as_measured(head, length, heads, forward, backward):
    """TFLOP/s of steps on an H100 SXM on which no constant was fitted."""

    def tflops(name: str) -> float:
        shape = (heads, length, length, head)
        work = Work(name, "attention", 10**13, (10**6,), "bfloat16", shape, ())
        return 10 / kernel_s(work, H100)

    assert tflops(FORWARD.format("cudnn")) == pytest.approx(forward, rel=0.15)
    assert tflops(BACKWARD.format("cudnn")) == pytest.approx(backward, rel=0.15)


@pytest.mark.parametrize(
    ("gpu", "name", "head", "dtype", "own", "chosen"),
    [
        (H100, FORWARD.format("flash"), 256, "bfloat16", "sdpa", "cudnn"),
        (H100, BACKWARD.format("efficient") + MASK, 64, "float16", "sdpa", "cudnn"),
        (H100, FORWARD.format("efficient"), 64, "float32", "sdpa", "efficient"),
        (H100, FORWARD.format("flash"), 64, "bfloat16", "flash_attention_2", "flash"),
        (get_gpu("b200"), FORWARD.format("flash"), 256, "bfloat16", "sdpa", "flash"),
        (A100, FORWARD.format("flash"), 64, "bfloat16", "sdpa", "flash"),
    ],
)
def test_hopper_gets_the_attention_of_cudnn(gpu, name, head, dtype, own, chosen):
    works = WorkArrays.of_works([attention(name, head=head, dtype=dtype)])
    found = as_chosen(works, gpu, own).names.tolist()
    assert found == [re.sub("_(flash|efficient)_", f"_{chosen}_", name)]


def test_attention_in_fp32_uses_the_tensor_cores_where_there_are_some():
    name = FORWARD.format("efficient")
    assert A100.flops["fp32"] < attention_tflops(name, dtype="float32") * 1e12
    assert attention_tflops(name, T4, dtype="float32") * 1e12 < T4.flops["fp32"]


# -- what is unknown of kernels, boards and hosts -------------------------------------------


def ends(work: Work, gpu=A100) -> list[tuple[float, float]]:
    """What each unknown of kernels may make of one, over what it takes."""
    works = WorkArrays.of_works([work])
    (known,) = Roofline().seconds(works, gpu, allow_tf32=False)[0]
    found = Roofline().ends(works, gpu, allow_tf32=False)
    return [(float(low[0, 0] / known), float(high[0, 0] / known)) for low, high in found]


def test_a_product_in_fp32_may_be_slower_than_large_ones_were_measured():
    kernel, board, _ = ends(product(4096, 4096, 4096, dtype="float32"))
    assert kernel == (1.0, pytest.approx(0.95 / 0.75))
    assert board == (1.0, 1.0)  # no energy is known of them on this board
    assert ends(product(4096, 4096, 4096)) == [(1.0, 1.0)] * 3
    assert ends(elementwise(10**9)) == [(1.0, 1.0)] * 3


def test_fp32_products_have_the_share_of_their_generation():
    def reached(gpu_id: str) -> float:
        gpu = replace(get_gpu(gpu_id), power_w=None)
        return Efficiency().reached(gpu, "fp32")

    # An H100 SXM was measured at 50.7 TFLOP/s, an A100 at its peak nearly.
    assert reached("h100_sxm") * 66.9 == pytest.approx(50.7, rel=0.01)
    assert reached("h100_sxm") < reached("rtx6000") < reached("a100_80gb")


@pytest.mark.parametrize(
    ("gpu_id", "head", "slower"),
    [("l40s", 128, 1.0), ("b200", 128, 1.0), ("rtx_pro_6000", 128, 1.8), ("rtx5090", 256, 1.0)],
)
def test_a_dense_mask_costs_the_middle_where_no_run_had_one(gpu_id, head, slower):
    work = Work(
        "flash_efficient" + MASK, "attention", 10**13, (1,), "bfloat16", (64, 9, 9, head), ()
    )
    gpu = replace(get_gpu(gpu_id), power_w=None)
    alone_s = kernel_s(work._replace(name="flash_efficient"), gpu)
    assert kernel_s(work, gpu) == pytest.approx(alone_s / MASKED * MASKED_DIFFERS * slower)
    carried = replace(Efficiency(), masked_attention=MASKED * MASKED_DIFFERS)
    alone, middle = (kernel_s(work, gpu, efficiency=e) for e in (carried, Efficiency()))
    assert middle == pytest.approx(alone * MASKED_DIFFERS)
    assert ends(work, gpu)[0] == pytest.approx((1 / MASKED_DIFFERS, MASKED_DIFFERS))
    assert ends(work)[0] == (1.0, 1.0)  # on an A100


def test_unknowns_add_as_independent_errors():
    one, other = (0.8, 1.3), (0.9, 1.1)
    low, high = in_quadrature(one, other)
    assert math.log(high) ** 2 == pytest.approx(math.log(1.3) ** 2 + math.log(1.1) ** 2)
    assert math.log(low) ** 2 == pytest.approx(math.log(0.8) ** 2 + math.log(0.9) ** 2)
    assert in_quadrature(one, (1.0, 1.0)) == (pytest.approx(0.8), pytest.approx(1.3))


def test_a_step_that_waits_for_launches_depends_on_the_host_and_others_do_not():
    def ends(**knobs: object) -> tuple[float, float]:
        model = tiny_config(hidden_size=1024, intermediate_size=4096, max_position_embeddings=4096)
        subject = Subject(get_workload("causal_lm"), "tiny", model)
        found = predict(subject, configuration(**knobs), A100)
        low, high = found.intervals["step_s"]
        return low / found.speed.step_s, high / found.speed.step_s

    waiting, computing = ends(micro_batch=1, max_length=16), ends(micro_batch=64, max_length=4096)
    assert waiting[0] < 0.6 < computing[0]
    assert waiting[1] > 1.8 > computing[1]
