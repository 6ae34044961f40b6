"""`tuner gpus`: the GPU types that are known, or what is known of one."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import click

from tuner.app.cli.options import examples, json_option
from tuner.app.device import find_gpu
from tuner.core.units import format_gib
from tuner.report.terminal.render import echo, print_fields, print_json
from tuner.report.terminal.tables import print_rows
from tuner.space.gpus import Gpu, load_catalogue


@click.command(
    "gpus",
    epilog=examples(
        "tuner gpus",
        "tuner gpus a6000",
    ),
)
@click.argument("gpu_name", metavar="[GPU]", required=False)
@json_option
def command(*, gpu_name: str | None, as_json: bool) -> None:
    """List the GPU types, or print one with its sources.

    "auto" is this machine's GPU, and "cpu" its processor.
    """
    if gpu_name is not None:
        gpu = find_gpu(gpu_name)
        print_json(_to_dict(gpu)) if as_json else _print_one(gpu)
        return
    found = list(load_catalogue().values())
    print_json([_to_dict(gpu) for gpu in found]) if as_json else _print_all(found)


def _to_dict(gpu: Gpu) -> dict[str, Any]:
    plain = {f.name: getattr(gpu, f.name) for f in dataclasses.fields(gpu)}
    for name in ("flops", "unsupported", "sources"):
        plain[name] = dict(plain[name])
    known = math.isfinite(gpu.bandwidth_bytes_per_s)
    bandwidth = gpu.bandwidth_bytes_per_s if known else None
    return {**plain, "bandwidth_bytes_per_s": bandwidth, "architecture": gpu.architecture}


def _print_all(found: list[Gpu]) -> None:
    numbers = ("memory", "fp16", "bf16", "TB/s", "USD/h")
    print_rows(
        ["id", "name", *numbers],
        [
            (
                gpu.id,
                gpu.name.removeprefix("NVIDIA "),
                format_gib(gpu.memory_bytes),
                _tflops(gpu, "fp16"),
                _tflops(gpu, "bf16"),
                f"{gpu.bandwidth_bytes_per_s / 1e12:.2f}",
                "?" if gpu.price_usd_per_hour is None else f"{gpu.price_usd_per_hour:.2f}",
            )
            for gpu in found
        ],
        right=numbers,
        drop=("name",),
    )
    echo(f"\nfp16, bf16: dense TFLOP/s. `tuner gpus {found[0].id}` shows the rest, with sources.")
    echo("Also: auto, this machine's GPU, and cpu, its processor.")


def _tflops(gpu: Gpu, precision: str) -> str:
    return f"{gpu.flops[precision] / 1e12:.0f}" if precision in gpu.flops else "-"


def _print_one(gpu: Gpu) -> None:
    rates = ", ".join(f"{name} {flops / 1e12:.4g}" for name, flops in gpu.flops.items())
    major, minor = gpu.compute_capability
    capability = f"{gpu.architecture}, compute capability {major}.{minor}" if major else ""
    bandwidth = gpu.bandwidth_bytes_per_s
    unknown = "unknown: `tuner calibrate` measures it"
    price = gpu.price_usd_per_hour
    dated = f" ({gpu.price_date})" if gpu.price_date else ""
    print_fields(
        [
            ("id", gpu.id),
            ("name", gpu.name),
            ("aliases", ", ".join(gpu.aliases)),
            ("device names", "; ".join(gpu.device_names)),
            ("architecture", capability),
            ("memory", f"{format_gib(gpu.memory_bytes)} ({gpu.memory_bytes:,} bytes)"),
            ("with ECC", format_gib(gpu.ecc_memory_bytes) if gpu.ecc_memory_bytes else ""),
            ("dense TFLOP/s", rates or unknown),
            ("unsupported", "; ".join(f"{k}: {v}" for k, v in gpu.unsupported.items())),
            ("bandwidth", f"{bandwidth / 1e9:,.0f} GB/s" if math.isfinite(bandwidth) else unknown),
            ("SMs", str(gpu.sm_count) if major else ""),
            ("CUDA context", format_gib(gpu.context_bytes) if major else ""),
            ("price", "unknown" if price is None else f"{price:.2f} USD per hour{dated}"),
        ]
    )
    echo("\nsources")
    print_fields(gpu.sources.items(), indent=2)
