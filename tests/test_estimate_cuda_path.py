"""The kernel choices that `CudaPath` makes in CUDA's place, and its autocast."""

import re

import pytest
import torch
from torch.nn import functional as nn_functional
from torch.utils._python_dispatch import TorchDispatchMode

from tuner.cost.operators.timeline import MASK
from tuner.predict.tracing import cuda_path
from tuner.predict.tracing.cuda_path import CudaPath
from tuner.predict.tracing.recorder import Recorder

AMPERE, TURING = (8, 0), (7, 5)
FLASH = "_scaled_dot_product_flash_attention"
EFFICIENT = "_scaled_dot_product_efficient_attention"


def record(function, *tensors, capability=AMPERE, autocast=None, backward=False):
    """The operators that a call runs, and the blocks that it allocates."""
    recorder, path = Recorder(workspace_bytes=0), CudaPath(capability)
    with recorder, path:
        recorder.start()
        if autocast is None:
            out = function(*tensors)
        else:
            with path.autocast(autocast):
                out = function(*tensors)
        if backward:
            out.sum().backward()
    timeline = recorder.timeline
    return out, [timeline.works[op.work].name for op in timeline.ops], timeline.blocks


def meta(*shape, dtype=torch.bfloat16, grad=False):
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad)


# -- attention ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capability", "dtype", "head_dim", "masked", "kernel"),
    [
        (AMPERE, torch.bfloat16, 64, False, FLASH),
        (AMPERE, torch.float16, 128, False, FLASH),
        ((9, 0), torch.bfloat16, 256, False, FLASH),
        (AMPERE, torch.bfloat16, 264, False, EFFICIENT),  # flash goes up to 256
        (AMPERE, torch.float32, 64, False, EFFICIENT),  # flash is for 16 bits
        (AMPERE, torch.bfloat16, 64, True, EFFICIENT),  # flash takes no mask
        (TURING, torch.float16, 64, False, EFFICIENT),  # flash needs capability 8.0
        ((7, 0), torch.float32, 64, True, EFFICIENT),
    ],
)
def test_attention_kernel(capability, dtype, head_dim, masked, kernel):
    query, key, value = (meta(2, 4, 32, head_dim, dtype=dtype, grad=True) for _ in range(3))
    mask = meta(2, 1, 32, 32, dtype=torch.bool) if masked else None

    def attend(query, key, value):
        return nn_functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)

    out, names, _ = record(attend, query, key, value, capability=capability, backward=True)
    assert out.shape == query.shape
    assert out.dtype == dtype
    attention = [name for name in names if "attention" in name]
    mask = MASK if masked else ""
    assert attention == [f"{kernel}{mask}", f"{kernel}_backward{mask}"]


def test_grouped_queries_have_a_kernel_only_in_flash():
    query, key = meta(2, 8, 32, 64, dtype=torch.float16), meta(2, 2, 32, 64, dtype=torch.float16)

    def attend(query, key):
        return nn_functional.scaled_dot_product_attention(
            query, key, key, is_causal=True, enable_gqa=True
        )

    out, names, _ = record(attend, query, key)
    assert out.shape == query.shape
    assert FLASH in names
    # Elsewhere PyTorch falls back to its formula: all scores exist, in fp32.
    out, names, blocks = record(attend, query, key, capability=TURING)
    assert out.shape == query.shape
    assert out.dtype is torch.float16
    assert not any("attention" in name for name in names)
    assert 4 * 2 * 8 * 32 * 32 in {block.size_bytes for block in blocks}


def test_flash_keeps_its_output_and_one_fp32_value_a_row():
    query = meta(2, 4, 32, 64)
    (_, _, blocks) = record(lambda q: nn_functional.scaled_dot_product_attention(q, q, q), query)
    sizes = sorted(block.size_bytes for block in blocks)
    assert sizes[-2:] == [2 * 4 * 32 * 4, 2 * 4 * 32 * 64 * 2]
    assert sum(sizes[:-2]) <= 64  # the state of the random numbers


# -- dropout and softmax --------------------------------------------------------------------


def test_dropout_keeps_one_byte_an_element():
    x = meta(1000, grad=True)
    _, names, blocks = record(lambda x: nn_functional.dropout(x, 0.1), x, backward=False)
    assert names == ["native_dropout"]
    assert sorted(block.size_bytes for block in blocks) == [1000, 2000]


def test_softmax_widens_half_while_it_reads_and_bfloat16_before():
    def softmax(x):
        return nn_functional.softmax(x, dim=-1, dtype=torch.float32)

    out, _, blocks = record(softmax, meta(10, 100, dtype=torch.float16))
    assert out.dtype is torch.float32
    assert [block.size_bytes for block in blocks] == [4000]
    out, _, blocks = record(softmax, meta(10, 100, dtype=torch.bfloat16))
    assert out.dtype is torch.float32
    assert [block.size_bytes for block in blocks] == [4000, 4000]


# -- autocast -------------------------------------------------------------------------------

MATRIX, VECTOR = (4, 4), (4,)
LOWER = {
    "linear": lambda x: nn_functional.linear(x, x),
    "matmul": lambda x: x @ x,
    "torch.matmul": lambda x: torch.matmul(x, x),
    "mm": lambda x: torch.mm(x, x),
    "method mm": lambda x: x.mm(x),
    "addmm": lambda x: torch.addmm(x, x, x),
    "bmm": lambda x: torch.bmm(x[None], x[None]),
    "baddbmm": lambda x: torch.baddbmm(x[None], x[None], x[None]),
    "einsum": lambda x: torch.einsum("ij,jk->ik", x, x),
    "conv1d": lambda x: nn_functional.conv1d(x[None], x[..., None]),
    "attention": lambda x: nn_functional.scaled_dot_product_attention(*(x[None, None],) * 3),
}
UNTOUCHED = {
    "add": lambda x: x + x,
    "silu": nn_functional.silu,
    "mean": lambda x: x.mean(-1),
    "gelu": nn_functional.gelu,
    "embedding": lambda x: nn_functional.embedding(
        torch.zeros(3, dtype=torch.long).to(x.device), x
    ),
}


def output_dtype(function, dtype):
    x = meta(*MATRIX, dtype=dtype)
    return record(function, x, autocast=torch.bfloat16)[0].dtype


@pytest.mark.parametrize("name", [*LOWER, *UNTOUCHED])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_gives_the_dtypes_of_pytorchs_own(name, dtype):
    """CPU autocast has the same list of operators for the lower precision."""
    function = {**LOWER, **UNTOUCHED}[name]
    with torch.autocast("cpu", torch.bfloat16):
        expected = function(torch.ones(MATRIX, dtype=dtype)).dtype
    assert output_dtype(function, dtype) == expected
    assert name in UNTOUCHED or expected is torch.bfloat16


def test_every_listed_operator_is_one_that_cuda_autocast_handles():
    """PyTorch's dispatcher lists them, on machines without CUDA too."""
    handled = {
        name.removeprefix("aten::").split(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::")
        and re.search(r"^AutocastCUDA: ", torch._C._dispatch_dump(name), re.MULTILINE)
    }
    assert {"mm", "softmax", "layer_norm"} <= handled
    # Cross entropy is made of two that are.
    parts = {"cross_entropy": ("log_softmax", "nll_loss")}
    for function in cuda_path.PRODUCTS | cuda_path._TO_FP32:
        name = function.__name__.strip("_")
        assert handled.issuperset(parts.get(name, (name,))), name


class Casts(TorchDispatchMode):
    """Counts conversions of real tensors."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._to_copy.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("trainable", [True, False])
def test_weights_are_cast_once_as_pytorch_does(trainable):
    """Autocast remembers casts of trainable fp32 weights until its outermost context ends."""

    def use_three_times(x, weight):
        for _ in range(3):
            x = nn_functional.linear(x, weight)
        return x

    real_weight = torch.nn.Parameter(torch.ones(MATRIX), requires_grad=trainable)
    with Casts() as casts, torch.autocast("cpu", torch.bfloat16):
        use_three_times(torch.ones(MATRIX), real_weight)
    weight = meta(*MATRIX, dtype=torch.float32, grad=trainable)
    x = meta(*MATRIX, dtype=torch.float32)
    _, names, _ = record(use_three_times, x, weight, autocast=torch.bfloat16)
    assert names.count("_to_copy") == casts.count == (2 if trainable else 4)


def test_cast_weights_are_forgotten_when_autocast_ends():
    path = CudaPath(AMPERE)
    weight, x = meta(*MATRIX, dtype=torch.float32, grad=True), meta(*MATRIX)
    with path:
        with path.autocast(torch.bfloat16):
            with path.autocast(torch.bfloat16):
                nn_functional.linear(x, weight)
            assert len(path._weight_casts) == 1
        assert not path._weight_casts
        with path.autocast(torch.bfloat16), path.no_autocast():
            assert (x.float() @ x.float()).dtype is torch.float32
