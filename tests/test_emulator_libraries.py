"""Stand-ins for cuBLAS, cuDNN, cuSOLVER, cuFFT and NCCL: programs that use them run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.emulating import needs_emulator
from tests.started import run_python
from tuner.emulator.session import Session
from tuner.space.gpus import get_gpu

pytestmark = needs_emulator

_TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone")


def _run(folder: Path, program: str, *, gpu: str = "a6000", ranks: int = 1) -> list[Any]:
    """The JSON lines that a program prints; it must end well and call nothing unknown."""
    path = folder / "program.py"
    path.write_text(program)
    launcher = _TORCHRUN if ranks > 1 else ()
    with Session(get_gpu(gpu), count=ranks) as session:
        ran = run_python(*launcher, str(path), env=session.environment(), cwd=folder)
        assert ran.returncode == 0, ran.stderr
        assert session.unknown_calls() == {}
    return [json.loads(line) for line in ran.stdout.splitlines() if line.startswith(("{", "["))]


ATTENTION = """
import json, torch, torch.nn.functional as F
def peaks(**options):
    q, k, v = (torch.randn(2, 8, 512, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
               for _ in range(3))
    out = F.scaled_dot_product_attention(q, k, v, **options)
    gradient = torch.empty_like(out)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out.backward(gradient)
    taken = torch.cuda.max_memory_allocated() - before
    print(json.dumps({"by": out.grad_fn.name(), "taken": taken}))
mask = torch.zeros(2, 1, 512, 512, device="cuda", dtype=torch.bfloat16)
peaks(); peaks(is_causal=True); peaks(attn_mask=mask); peaks(attn_mask=mask.bool())
"""


@pytest.mark.proof
@pytest.mark.parametrize("gpu", ["b200", "rtx5090"])
def test_attention_trains_by_cudnn_and_by_pytorchs_own_kernels(tmp_path: Path, gpu: str) -> None:
    found = _run(tmp_path, ATTENTION, gpu=gpu)

    assert len(found) == 4
    if gpu == "rtx5090":  # PyTorch prefers its own kernels there
        return
    size = 2 * 8 * 512
    for one in found:
        assert one["by"].startswith("ScaledDotProductCudnnAttention")
        # Three gradients; dQ is summed as floats, and a float for each row of the softmax.
        assert one["taken"] == 3 * size * 128 * 2 + size * 128 * 4 + size * 4


CONVOLUTIONS = """
import json, torch
from torch import nn
def taken(layer, x, dtype):
    layer = layer.to("cuda", dtype)
    x = x.to("cuda", dtype).requires_grad_()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y = layer(x)
    extra = torch.cuda.max_memory_allocated() - before - y.nbytes
    y.sum().backward()
    assert x.grad.shape == x.shape and layer.weight.grad.shape == layer.weight.shape
    return extra
image = torch.zeros(8, 64, 56, 56)
last = image.contiguous(memory_format=torch.channels_last)
for benchmark in (False, True):
    torch.backends.cudnn.benchmark = benchmark
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        taken(nn.Conv2d(3, 96, 14, 14), torch.zeros(2, 3, 112, 112), dtype)
        taken(nn.Conv3d(3, 96, (2, 14, 14), (2, 14, 14)), torch.zeros(64, 3, 2, 14, 14), dtype)
        taken(nn.Conv1d(80, 96, 3, padding=1), torch.zeros(2, 80, 300), dtype)
        taken(nn.ConvTranspose2d(64, 32, 2, 2), torch.zeros(2, 64, 16, 16), dtype)
        taken(nn.Conv1d(96, 96, 4, padding=3, groups=96), torch.zeros(2, 96, 128), dtype)
        taken(nn.BatchNorm2d(64), image, dtype)
        convolution = nn.Conv2d(64, 64, 3, padding=1)
        both = taken(convolution, image, dtype), taken(convolution, last, dtype)
        print(json.dumps([str(dtype), *both]))
torch.backends.cudnn.allow_tf32 = False
print(json.dumps(["plain", taken(convolution, image, torch.float32), 0]))
for cell in (nn.LSTM, nn.GRU, nn.RNN):
    for options in ({}, {"bidirectional": True, "num_layers": 2}, {"bias": False}):
        out, _ = cell(32, 64, **options).cuda()(torch.zeros(7, 5, 32, device="cuda"))
        out.sum().backward()
log = torch.zeros(50, 16, 20, device="cuda", requires_grad=True).log_softmax(2)
targets = torch.ones(16 * 30, dtype=torch.int, device="cuda")
lengths = [torch.full((16,), n, dtype=torch.int, device="cuda") for n in (50, 30)]
nn.functional.ctc_loss(log, targets, *lengths).backward()
"""


@pytest.mark.proof
def test_convolutions_norms_and_recurrent_layers_train(tmp_path: Path) -> None:
    found = _run(tmp_path, CONVOLUTIONS)

    assert [one[0] for one in found].count("torch.float16") == 2
    image = 8 * 64 * 56 * 56
    for dtype, strided, channels_last in found:
        # Tensor cores work on channels-last copies of input, filter and output (assumed).
        width = {"torch.float32": 4, "plain": 4}.get(dtype, 2)
        filters = 64 * 64 * 9 * width
        copies = 0 if dtype == "plain" else 2 * image * width + filters
        assert strided == pytest.approx(copies, abs=4096)
        # Then it is the filter that PyTorch itself makes channels last.
        assert channels_last <= filters + 4096


PRODUCTS = """
import ctypes, json, os, re, torch
from torch import nn
d = "cuda"
linear = nn.Linear(128, 256, device=d, dtype=torch.bfloat16)
x = torch.zeros(32, 128, device=d, dtype=torch.bfloat16, requires_grad=True)
nn.functional.gelu(linear(x)).sum().backward()
torch.ops.aten._addmm_activation(linear.bias, x, linear.weight.t(), use_gelu=True)
for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64):
    sizes = (32, 16), (16, 8), (32, 8)
    a, b, c = (torch.zeros(4, *size, device=d, dtype=dtype) for size in sizes)
    torch.baddbmm(c, a, b), a[0] @ b[0], a[0] @ b[0, :, 0]
byte = torch.zeros(64, 64, device=d, dtype=torch.int8)
assert torch._int_mm(byte, byte).dtype == torch.int32
small, one = torch.zeros(64, 64, device=d).to(torch.float8_e4m3fn), torch.ones((), device=d)
assert torch._scaled_mm(small, small.t(), one, one, out_dtype=torch.bfloat16).shape == (64, 64)
square = torch.zeros(128, 64, device=d)
u, s, _ = torch.linalg.svd(square, full_matrices=False)
assert u.shape == (128, 64) and s.shape == (64,)
gram = square.T @ square
torch.linalg.eigh(gram), torch.linalg.cholesky(gram), torch.linalg.inv(gram)
torch.linalg.qr(square)
torch.fft.irfft(torch.fft.rfft(torch.zeros(8, 100, device=d, requires_grad=True))).sum().backward()

names = os.listdir(os.environ["TUNER_EMULATOR_LIBRARIES"])
library = next(name for name in names if re.fullmatch("libcublasLt.so.[0-9]+", name))
lt, made = ctypes.CDLL(library), ctypes.c_void_p()
lt.cublasLtMatmulDescCreate(ctypes.byref(made), 68, 0)
told, heard, size = ctypes.c_int(1), ctypes.c_int(), ctypes.c_size_t()
refused = lt.cublasLtMatmulDescSetAttribute(made, 3, ctypes.byref(told), ctypes.c_size_t(8))
set_ = lt.cublasLtMatmulDescSetAttribute(made, 3, ctypes.byref(told), ctypes.c_size_t(4))
got = lt.cublasLtMatmulDescGetAttribute(
    made, 3, ctypes.byref(heard), ctypes.c_size_t(4), ctypes.byref(size))
print(json.dumps([refused, set_, got, heard.value, size.value]))
"""


@pytest.mark.proof
def test_products_and_factorizations_run_and_descriptors_tell_what_they_were_told(
    tmp_path: Path,
) -> None:
    invalid_value = 7
    assert _run(tmp_path, PRODUCTS, gpu="h100-sxm") == [[invalid_value, 0, 0, 1, 4]]


RANKS = """
import json, os, torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
said = {"rank": rank}
def on(*values, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype, device="cuda")
def kept(name, tensor):
    said[name] = tensor.tolist()

x = on(rank + 1, 10 * rank); dist.all_reduce(x); kept("sum", x)
x = on(rank, dtype=torch.int32); dist.all_reduce(x, op=dist.ReduceOp.MAX); kept("maximum", x)
x = on(rank == 0, dtype=torch.bool); dist.all_reduce(x, op=dist.ReduceOp.MAX); kept("any", x)
x = on(1.5 + rank, dtype=torch.bfloat16); dist.all_reduce(x, op=dist.ReduceOp.AVG); kept("mean", x)
x = on(7 * rank); dist.broadcast(x, 1); kept("broadcast", x)
x = on(0, 0); dist.all_gather_into_tensor(x, on(rank + 5)); kept("gathered", x)
x = on(0, 0); dist.reduce_scatter_tensor(x, on(0, 1, 2, 3)); kept("scattered", x)
x = on(*[0] * (2 * rank + 2))
sent = [n for n in range(world) for _ in range(n + 1)]
dist.all_to_all_single(x, on(*[10 * rank + n for n in sent]), [rank + 1] * 2, [1, 2])
kept("exchanged", x)
x = on(rank + 1); dist.reduce(x, 0); kept("reduced", x)
if rank == 0:
    dist.send(on(42, 43), 1)
else:
    x = on(0, 0); dist.recv(x, 0); kept("received", x)
objects = [None] * world
dist.all_gather_object(objects, {"of": [rank] * (10 ** (3 + rank))})
said["objects"] = [len(one["of"]) for one in objects]
one = [bytes(range(256)) * 2000 if rank == 0 else None]
dist.broadcast_object_list(one)
said["bytes"] = one[0] == bytes(range(256)) * 2000
alone = dist.new_group([0])
if rank == 0:
    x = on(3); dist.all_reduce(x, group=alone); kept("alone", x)
large = torch.empty(10_000_000, device="cuda")  # moves nothing, and nobody waits
dist.all_reduce(large)

def train(model):
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.zeros(4, 256, device="cuda")).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
def layers():
    return nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)]).cuda()
train(nn.parallel.DistributedDataParallel(layers(), device_ids=[rank]))
sharded = layers()
for layer in sharded:
    fully_shard(layer)
train(fully_shard(sharded))
said["shard"] = sum(p.to_local().numel() for p in sharded.parameters())
with open(f"said-{rank}.json", "w") as file:
    json.dump(said, file)
dist.destroy_process_group()
"""


@pytest.mark.proof
def test_ranks_get_the_integers_and_objects_of_others_and_train_sharded(tmp_path: Path) -> None:
    _run(tmp_path, RANKS, ranks=2)

    said = [json.loads((tmp_path / f"said-{rank}.json").read_text()) for rank in range(2)]
    for one in said:
        assert one["sum"] == [3, 10]
        assert one["maximum"] == [1]
        assert one["any"] == [True]
        assert one["mean"] == [2.0]
        assert one["broadcast"] == [7]
        assert one["gathered"] == [5, 6]
        assert one["objects"] == [1000, 10_000]
        assert one["bytes"] is True
        assert one["shard"] == 4 * (256 * 256 + 256) // 2
    assert [one["scattered"] for one in said] == [[0, 2], [4, 6]]
    assert [one["exchanged"] for one in said] == [[0, 10], [1, 1, 11, 11]]
    # Only the root of a reduction has the sum; the other keeps what it had.
    assert [one["reduced"] for one in said] == [[3], [2]]
    assert said[0]["alone"] == [3]
    assert said[1]["received"] == [42, 43]


DEAD = """
import json, os, torch, torch.distributed as dist
rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl", init_method=f"file://{os.getcwd()}/meet", rank=rank, world_size=2)
x = torch.ones(1, dtype=torch.int64, device="cuda")
dist.all_reduce(x)
if rank == 1:
    os._exit(7)
try:
    dist.all_reduce(x)
except dist.DistBackendError as error:
    print(json.dumps([str(error)]), flush=True)
os._exit(0)
"""


@pytest.mark.proof
def test_a_rank_that_waits_for_one_that_has_ended_is_told(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(DEAD)
    with Session(get_gpu("a6000"), count=2) as session:
        ranks = [
            subprocess.Popen(
                [sys.executable, str(path)],
                env={**session.environment(), "RANK": str(rank)},
                stdout=subprocess.PIPE,
                text=True,
                cwd=tmp_path,
            )
            for rank in range(2)
        ]
        said = [rank.communicate()[0] for rank in ranks]
    assert ranks[1].returncode == 7
    assert "rank 1 has ended" in json.loads(said[0])[0]
