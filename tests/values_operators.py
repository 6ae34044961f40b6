"""A program of integer operators, run on the CPU and on an emulated GPU: prints what each returns.

Usage: values_operators.py DEVICE. Device memory is first filled with nonsense, so that what no
operator wrote is seen.
"""

# ruff: noqa: PLR0915, PLW0108

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._prims.rng_prims import run_and_save_rng_state
from torch.nn import functional

NONSENSE = -0x123456789ABCDEF


def cases(device: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Names and operators; the same random data on both devices."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, hi: int = 10) -> torch.Tensor:
        return torch.randint(0, hi, shape, generator=generator).to(device)

    a, b = draw(6, 7), draw(6, 7)
    mask = draw(6, 7) > 4
    ids = draw(300, hi=50)
    c = draw(4, 5, 6)
    rows = draw(4, 5) > 3
    floats = torch.rand(6, 7, generator=generator).to(device)
    yield "mask index", lambda: a[mask]
    yield "mask index float", lambda: floats[mask]
    yield "partial mask", lambda: c[rows]
    yield "mask+int", lambda: c[rows[:, 0], :, 2]
    yield "ints index", lambda: a[draw(3, hi=6), draw(3, hi=7)]

    def set_mask() -> torch.Tensor:
        x = a.clone()
        x[mask] = -1
        return x

    yield "set mask scalar", set_mask

    def set_mask_from() -> torch.Tensor:
        x = a.clone()
        x[mask] = torch.arange(int(mask.sum()), device=device)
        return x

    yield "set mask tensor", set_mask_from

    def accumulated() -> torch.Tensor:
        x = torch.zeros(10, dtype=torch.long, device=device)
        x.index_put_((ids % 10,), torch.ones_like(ids), accumulate=True)
        return x

    yield "index_put accumulate", accumulated

    def accumulated_by_mask() -> torch.Tensor:
        x = torch.zeros(6, 7, dtype=torch.long, device=device)
        x.index_put_(
            (mask,), torch.ones(int(mask.sum()), dtype=torch.long, device=device), accumulate=True
        )
        return x

    yield "index_put mask accumulate", accumulated_by_mask

    def set_slices() -> torch.Tensor:
        x = a.clone()
        x[1:3, 2:] = 7
        x[:, 0] += 5
        x[4] = b[3]
        return x

    yield "slices", set_slices
    yield "nonzero", lambda: a.nonzero()
    yield "nonzero tuple", lambda: a.nonzero(as_tuple=True)
    yield "where1", lambda: torch.where(mask)
    yield "where3", lambda: torch.where(mask, a, b)

    def inferred() -> Any:
        with torch.inference_mode():
            return torch.where(mask), torch.repeat_interleave(ids[:4], ids[4:8]), torch.unique(ids)

    yield "inference mode", inferred
    yield (
        "operator that takes a function",
        lambda: run_and_save_rng_state(torch.ops.aten.nonzero.default, mask)[1],
    )
    yield (
        "draws within bounds",
        lambda: tuple(torch.nn.init.trunc_normal_(torch.empty(300, 300, device=device)).shape),
    )
    yield "argwhere", lambda: torch.argwhere(mask)
    yield "masked_select", lambda: torch.masked_select(a, mask)
    yield "masked_fill", lambda: a.masked_fill(mask, -5)
    yield "masked_scatter", lambda: a.masked_scatter(mask, torch.arange(42, device=device))
    yield "unique", lambda: torch.unique(ids)
    yield "unique all", lambda: torch.unique(ids, return_inverse=True, return_counts=True)
    yield (
        "unique dim all",
        lambda: torch.unique(draw(20, 2, hi=3), dim=0, return_inverse=True, return_counts=True),
    )
    yield "unique consec dim", lambda: torch.unique_consecutive(draw(9, 2, hi=2), dim=0)
    yield "unique float", lambda: torch.unique(ids.float())
    yield "repeat_interleave", lambda: torch.repeat_interleave(ids[:10], ids[10:20])
    yield "repeat_interleave i32", lambda: torch.repeat_interleave(ids[:10].int())
    yield "bincount", lambda: torch.bincount(ids)
    yield "bincount w", lambda: torch.bincount(ids, weights=ids.float())
    yield "histc float", lambda: torch.histc(ids.float(), bins=50, min=0, max=49)
    yield "bucketize", lambda: torch.bucketize(ids, torch.tensor([5, 20, 40], device=device))
    yield "searchsorted", lambda: torch.searchsorted(ids.sort()[0], draw(5, hi=50))
    yield "sort", lambda: ids.sort(stable=True)
    yield "argsort", lambda: torch.argsort(torch.randperm(50, generator=generator).to(device))
    yield "topk int", lambda: torch.topk(torch.randperm(50, generator=generator).to(device), 5)
    yield "topk float", lambda: torch.topk(floats, 3)
    yield "argmax float", lambda: floats.argmax(-1)
    yield "max dim", lambda: floats.max(-1)
    yield "min", lambda: a.min()
    yield "cumsum", lambda: mask.cumsum(-1)
    yield "one_hot", lambda: functional.one_hot(ids, 50)
    yield "one_hot auto", lambda: functional.one_hot(ids)
    yield "scatter", lambda: torch.zeros(6, 10, dtype=torch.long, device=device).scatter_(1, a, 1)
    yield (
        "scatter_add",
        lambda: torch.zeros(50, dtype=torch.long, device=device).scatter_add_(
            0, ids, torch.ones_like(ids)
        ),
    )
    yield (
        "scatter_reduce",
        lambda: torch.zeros(50, dtype=torch.long, device=device).scatter_reduce(
            0, ids, ids, "amax"
        ),
    )
    yield (
        "index_add",
        lambda: torch.zeros(50, dtype=torch.long, device=device).index_add_(0, ids, ids),
    )
    yield "index_select", lambda: a.index_select(1, torch.tensor([3, 3, 0], device=device))
    yield "gather", lambda: a.gather(1, b % 7)
    yield "take_along", lambda: torch.take_along_dim(a, b % 7, 1)
    yield "cumsum pad", lambda: functional.pad(mask.sum(-1).cumsum(0), (1, 0))
    yield "tensor ctor", lambda: torch.tensor([[1, 2], [3, 4]], device=device)
    yield "from list", lambda: torch.as_tensor([1.5, 2.5], device=device) * 2
    yield "bool logic", lambda: (mask & ~mask | (a > 3) ^ (b < 2)).any(-1)
    yield "all", lambda: (a >= 0).all()
    yield "item", lambda: (int(a.sum()), bool(mask.any()), float(floats.sum()))
    yield "tolist", lambda: a.tolist()
    yield "cpu", lambda: a.cpu()
    yield "numpy", lambda: int(a.cpu().numpy().sum())
    yield (
        "equal",
        lambda: (torch.equal(a, a.clone()), torch.equal(a, b), torch.equal(floats, floats.clone())),
    )
    yield "isin", lambda: torch.isin(ids, torch.tensor([1, 2, 3], device=device))
    yield (
        "to dtypes",
        lambda: [
            a.to(t)
            for t in (
                torch.int32,
                torch.int16,
                torch.uint8,
                torch.bool,
                torch.float16,
                torch.bfloat16,
            )
        ],
    )
    yield "kthvalue", lambda: torch.kthvalue(torch.randperm(20, generator=generator).to(device), 3)
    yield (
        "remainder",
        lambda: (
            a % 3,
            a // 3,
            torch.fmod(a, 3),
            a << 1,
            a >> 1,
            a.neg().abs(),
            a.clamp(2, 5),
            torch.bitwise_and(a, 3),
        ),
    )
    yield (
        "arange",
        lambda: (
            torch.arange(5, device=device),
            torch.arange(1, 9, 2, device=device),
            torch.arange(0, 1, 0.25, device=device),
        ),
    )
    yield (
        "full",
        lambda: (
            torch.full((3,), 7, device=device),
            torch.zeros(3, device=device, dtype=torch.int32),
            torch.eye(3, device=device, dtype=torch.long),
            a.new_full((2,), 9),
            torch.ones_like(a),
            torch.full_like(a, 3),
        ),
    )
    yield "inf mask", lambda: torch.full((4, 4), float("-inf"), device=device).triu(1).isinf().sum()
    yield "softmax small", lambda: floats.softmax(-1)
    yield "rows small", lambda: floats @ floats.t()
    yield "empty mask", lambda: a[a > 100]
    yield "nonzero scalar", lambda: torch.tensor(3, device=device).nonzero()
    yield "resize", lambda: torch.zeros(4, device=device, dtype=torch.long).resize_(2)
    yield (
        "foreach",
        lambda: torch._foreach_add(
            [torch.ones((), device=device), torch.ones((), device=device)], 2
        ),
    )
    yield "out=", lambda: torch.add(a, b, out=torch.empty_like(a))
    yield (
        "pinned",
        lambda: (
            torch.arange(9).pin_memory().to(device, non_blocking=True)
            if device == "cuda"
            else torch.arange(9)
        ),
    )
    yield "copy_", lambda: torch.empty(9, dtype=torch.long, device=device).copy_(torch.arange(9))
    yield (
        "copy_ cvt",
        lambda: torch.empty(9, dtype=torch.float16, device=device).copy_(torch.arange(9)),
    )
    yield "big h2d", lambda: torch.arange(300000).to(device).sum()
    yield (
        "expand copy",
        lambda: torch.empty(3, 9, dtype=torch.long, device=device).copy_(torch.arange(9)),
    )
    yield "D2H copy_", lambda: torch.zeros(6, 7, dtype=torch.long).copy_(a)
    yield "vmap", lambda: torch.vmap(lambda x, y: x & y)(mask, ~mask)
    yield "searchsorted f", lambda: torch.searchsorted(floats.sort(-1)[0].contiguous(), floats)
    yield "embedding small", lambda: functional.embedding(a, floats.new_ones(10, 4).cumsum(0))
    yield (
        "nll",
        lambda: functional.cross_entropy(floats.log_softmax(-1), a[:, 0] % 7, ignore_index=2),
    )


def plain(value: Any) -> Any:
    """The value as JSON has it; floats to three digits."""
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), list(value.shape), plain(value.detach().cpu().tolist())]
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return round(value, 3) if isinstance(value, float) else value


def fill_with_nonsense() -> None:
    """Blocks of all sizes that the allocator hands out again as they are."""
    large = torch.full((1 << 21,), NONSENSE, dtype=torch.int64, device="cuda")
    small = [torch.full((64,), NONSENSE, dtype=torch.int64, device="cuda") for _ in range(4000)]
    del large, small


if __name__ == "__main__":
    device = sys.argv[1]
    if device == "cuda":
        fill_with_nonsense()
    answers = {}
    for name, run in cases(device):
        try:
            answers[name] = plain(run())
        except (RuntimeError, IndexError, TypeError) as error:
            answers[name] = f"{type(error).__name__}: {error}"
    print(json.dumps(answers))
