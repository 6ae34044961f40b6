"""Rules for kernels that a trace may meet, and an emulated program does: what work they are."""

import pytest
import torch

from tuner.cost.operators.kernels import ATEN_DECOMPOSITIONS, ATEN_LEAVES, Kernels
from tuner.cost.operators.operators import launches_nothing, work_of

aten = torch.ops.aten
KERNELS = Kernels(ATEN_DECOMPOSITIONS, ATEN_LEAVES)
B, H, S, D = 2, 4, 64, 32

LIBRARY = torch.library.Library("tuner_test_flash_attn", "DEF")
LIBRARY.define(
    "varlen_fwd(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
    "float p, bool causal, int window_size_left) -> Tensor"
)
LIBRARY.define("varlen_bwd(Tensor dout, Tensor q, Tensor k, Tensor v, bool causal) -> Tensor")
LIBRARY.define("rotary(Tensor q, Tensor k) -> Tensor")


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def described(func, *args, out=None, **kwargs):
    return work_of(KERNELS, func, args, kwargs, meta(1) if out is None else out)


def test_products_into_a_buffer_are_products():
    out = meta(8, 32)
    work = described(aten.mm.out, meta(8, 16), meta(16, 32), out=out)
    assert (work.kind, work.shape, work.flops) == ("matmul", (1, 8, 32, 16), 2 * 8 * 32 * 16)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_products_of_eight_bits_have_their_own_type(dtype):
    left, right = meta(16, 32, dtype=dtype), meta(32, 64, dtype=dtype)
    if dtype is torch.int8:
        work = described(aten._int_mm.default, left, right, out=meta(16, 64))
    else:
        scale = meta(1, dtype=torch.float32)
        work = described(aten._scaled_mm.default, left, right, scale, scale, out=meta(16, 64))
    assert (work.shape, work.dtype) == ((1, 16, 64, 32), str(dtype).removeprefix("torch."))


def test_each_row_of_a_grouped_product_meets_one_expert():
    rows, experts, k, n = 100, 8, 16, 32
    offsets = meta(experts, dtype=torch.int32)
    forward = described(aten._grouped_mm.default, meta(rows, k), meta(experts, k, n), offsets)
    weights = described(aten._grouped_mm.default, meta(k, rows), meta(rows, n), offsets)
    assert forward.flops == weights.flops == 2 * rows * k * n


@pytest.mark.parametrize(
    ("left", "right", "shape"),
    [((5, 3, 16), (16, 8), (1, 15, 8, 16)), ((5, 3, 16), (5, 16, 8), (5, 3, 8, 16))],
)
def test_products_that_reach_the_device_whole(left, right, shape):
    out = meta(*left[:-1], right[-1])
    assert described(aten.matmul.default, meta(*left), meta(*right), out=out).shape == shape


def test_each_weight_of_recurrent_layers_meets_the_rows_of_all_steps():
    rows, state = meta(S, B, D), meta(1, B, D)
    weights = [meta(4 * D, D), meta(4 * D, D), meta(4 * D), meta(4 * D)]
    flops = 2 * S * B * 2 * 4 * D * D
    given = (rows, weights, 4, None, state, state)
    rest = (2, D, 0, 1, False, 0.0, True, False, [], None)
    work = described(aten._cudnn_rnn.default, *given, *rest)
    assert (work.kind, work.flops, work.shape) == ("matmul", flops, (S, B, 4 * D, D))
    back = (rows, weights, 4, meta(1), state, state, rows, rows, None, None, *rest, meta(1), [True])
    assert described(aten._cudnn_rnn_backward.default, *back).flops == 2 * flops


def test_attention_of_cudnn_is_that_of_flash():
    q = meta(B, H, S, D)
    flash = described(aten._scaled_dot_product_flash_attention.default, q, q, q, 0.0, True)
    cudnn = described(
        aten._scaled_dot_product_cudnn_attention.default, q, q, q, None, True, 0.0, True
    )
    assert (cudnn.kind, cudnn.flops) == ("attention", flash.flops)
    backward = described(
        aten._scaled_dot_product_cudnn_attention_backward.default,
        *(q, q, q, q, q, q, meta(1), meta(1), None, meta(1), meta(1), S, S, 0.0, True),
    )
    assert backward.flops == flash.flops * 5 // 2


def test_sequences_end_to_end_attend_to_themselves_only():
    lengths = [10, 30, 24]
    starts = torch.tensor([0, 10, 40, 64], dtype=torch.int32)
    q = meta(64, H, D)
    func = torch.ops.tuner_test_flash_attn.varlen_fwd.default
    work = described(func, q, q, q, starts, starts, 0.0, False, -1)
    assert work.flops == 4 * H * D * sum(n * n for n in lengths)
    causal = described(func, q, q, q, starts, starts, 0.0, True, -1)
    assert causal.flops == work.flops // 2


def test_a_window_hides_what_is_farther_away():
    starts = torch.tensor([0, 64], dtype=torch.int32)
    q = meta(64, H, D)
    func = torch.ops.tuner_test_flash_attn.varlen_fwd.default
    pairs = 64 * 8 - 8 * 8 // 2
    assert described(func, q, q, q, starts, starts, 0.0, True, 8).flops == 4 * H * D * pairs


def test_backward_of_other_packages_takes_five_products():
    q = meta(B, S, H, D)
    work = described(torch.ops.tuner_test_flash_attn.varlen_bwd.default, q, q, q, q, False)
    assert work.flops == 4 * B * H * S * S * D * 5 // 2


def test_what_only_makes_or_describes_memory_launches_nothing():
    quiet = [
        aten.view.default,
        aten.new_empty.default,
        aten.detach.default,
        aten.set_.source_Tensor,
    ]
    assert all(map(launches_nothing, quiet))
    assert not any(map(launches_nothing, [aten.clone.default, aten.zero_.default, aten.mm.default]))
