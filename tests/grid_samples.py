"""Grids with made-up numbers."""

from __future__ import annotations

from results_samples import make_memory, make_speed

from tuner.core.records import MemoryBudget, Prediction
from tuner.core.units import GIB
from tuner.report.grid import Grid, GridCell, GridMethod, GridRun
from tuner.searches.cost import RunCost
from tuner.space.gpus import get_gpu

EVIL = "</script><b>x"
METHODS = (GridMethod("qlora", "QLoRA, NF4", {}), GridMethod("full", "Full, bf16", {}))
GPUS = ("t4", "rtx3060", "a100_80gb")  # the price of the second is not known


def make_run(
    gpu: str, *, gib: float, tokens: int = 2048, rate: float = 1.0, batch: int = 1
) -> GridRun:
    type_ = get_gpu(gpu)
    prediction = Prediction(
        budget=MemoryBudget(type_.memory_bytes, 0),
        memory=make_memory(int(gib * GIB)),
        speed=make_speed(rate * 600),
        trainable_params=1,
        total_params=2,
        gpu=gpu,
        method="compiled timeline; roofline; a remark of the trace",
    )
    price = type_.price_usd_per_hour
    usd = None if price is None else 10_000 / rate / 3600 * price
    cost = RunCost(10_000, 1, None, 10_000 / rate, None, usd, None, price, None)
    settings = {
        "precision": "nf4",
        "micro_batch": batch,
        "max_length": tokens,
        "gradient_checkpointing": batch > 1,
    }
    return GridRun(settings, prediction, cost, traced=False)


def make_grid() -> Grid:
    """Three models: one fits everywhere, one on the largest only, one cannot be predicted."""
    cells = []
    for number, gpu in enumerate(GPUS):
        for method in ("qlora", "full"):
            small = ("small", gpu, method)
            if method == "full" and gpu == "t4":
                cells.append(GridCell(*small, refused="T4 has no bf16"))
                continue
            cells.append(
                GridCell(
                    *small,
                    smallest=make_run(gpu, gib=3, tokens=256),
                    longest=make_run(gpu, gib=10, tokens=4096 << number),
                    fastest=make_run(gpu, gib=8, rate=[4.0, 2.0, 16.0][number], batch=4),
                )
            )
    for gpu in GPUS:
        for method in ("qlora", "full"):
            fits = gpu == "a100_80gb" and method == "qlora"
            cells.append(
                GridCell(
                    "large-70b",
                    gpu,
                    method,
                    smallest=make_run(gpu, gib=45, tokens=256),
                    longest=make_run(gpu, gib=46, tokens=1024) if fits else None,
                )
            )
    cells += [
        GridCell(EVIL, gpu, method, refused=f"no class for {EVIL}")
        for gpu in GPUS
        for method in ("qlora", "full")
    ]
    return Grid(
        models=("small", "large-70b", EVIL),
        params={"small": 1_000_000_000, "large-70b": 70_000_000_000, EVIL: None},
        gpus=tuple(map(get_gpu, GPUS)),
        methods=METHODS,
        length=2048,
        examples=10_000,
        cells=tuple(cells),
        versions={"torch": "2.13"},
    )
