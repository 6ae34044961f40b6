"""`tuner gpus`, `spaces` and `models`: all of them or one, and checkpoints without weights."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import click

from tuner.app.cli import examples, subcommand
from tuner.app.cli.options import json_option
from tuner.app.device import find_gpu
from tuner.app.listener import quiet_libraries
from tuner.core.expressions import all_of, settings_text, show
from tuner.core.units import format_gib
from tuner.report.terminal.render import count, echo, print_fields, print_json
from tuner.report.terminal.tables import print_rows
from tuner.space import SearchSpace, SpaceInfo, list_spaces, load_space
from tuner.space.gpus import Gpu, load_catalogue
from tuner.space.models import catalogue
from tuner.space.models.catalogue import ModelEntry, get_entry, unknown_model


@subcommand("gpus", "tuner gpus", "tuner gpus a6000")
@click.argument("gpu_name", metavar="[GPU]", required=False)
@json_option
def gpus(*, gpu_name: str | None, as_json: bool) -> None:
    """List the GPU types, or print one with its sources.

    "auto" is this machine's GPU, and "cpu" its processor.
    """
    if gpu_name is not None:
        gpu = find_gpu(gpu_name)
        print_json(_gpu_dict(gpu)) if as_json else _print_gpu(gpu)
        return
    found = list(load_catalogue().values())
    print_json([_gpu_dict(gpu) for gpu in found]) if as_json else _print_gpus(found)


def _gpu_dict(gpu: Gpu) -> dict[str, Any]:
    plain = {field.name: getattr(gpu, field.name) for field in dataclasses.fields(gpu)}
    plain |= {name: dict(plain[name]) for name in ("flops", "unsupported", "sources")}
    known = math.isfinite(gpu.bandwidth_bytes_per_s)
    bandwidth = gpu.bandwidth_bytes_per_s if known else None
    return {**plain, "bandwidth_bytes_per_s": bandwidth, "architecture": gpu.architecture}


def _print_gpus(found: list[Gpu]) -> None:
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


def _print_gpu(gpu: Gpu) -> None:
    rates = ", ".join(f"{name} {flops / 1e12:.4g}" for name, flops in gpu.flops.items())
    major, minor = gpu.compute_capability
    capability = f"{gpu.architecture}, compute capability {major}.{minor}" if major else ""
    bandwidth = gpu.bandwidth_bytes_per_s
    unknown = "unknown: `tuner calibrate` measures it" if major else "unknown"
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


@subcommand("spaces", "tuner spaces", "tuner spaces qlora27b")
@click.argument("space_name", metavar="[SPACE]", required=False)
@json_option
def spaces(*, space_name: str | None, as_json: bool) -> None:
    """List the search spaces, or print one: its knobs, rules, floors and data.

    Spaces are found in ./search_spaces and among those that ship with tuner; name other YAML files
    by path.
    """
    if space_name is not None:
        space = load_space(space_name)
        if as_json:
            print_json({**space.to_dict(), **_counts(space)})
        else:
            _print_space(space)
        return
    found = list_spaces()
    print_json(list(map(dataclasses.asdict, found))) if as_json else _print_spaces(found)


def _counts(space: SearchSpace) -> dict[str, int]:
    return {
        "configurations": space.count(use_floors=False),
        "configurations_within_floors": space.count(),
    }


def _print_spaces(found: list[SpaceInfo]) -> None:
    print_rows(
        ["name", "configurations", "model", "description"],
        [
            (
                info.name,
                "broken" if info.problem else count(info.configurations),
                info.model or "",
                info.problem.message if info.problem else info.description,
            )
            for info in found
        ],
        right=("configurations",),
        drop=("model",),
    )
    if not found:
        echo("no search space is found", err=True)


def _print_space(space: SearchSpace) -> None:
    counts = _counts(space)
    data = space.data
    print_fields(
        [
            ("name", space.name),
            ("about", space.description),
            ("file", str(space.path) if space.path else ""),
            ("workload", space.workload),
            ("model", space.model or ("given with --model" if space.predictable else "")),
            ("command", str(space.command or "")),
            ("written for", ", ".join(space.gpus)),
            ("examples", count(data.examples) if data.examples is not None else ""),
            ("epochs", f"{data.epochs:g}" if data.epochs is not None else ""),
            (
                "configurations",
                f"{count(counts['configurations'])}, of which "
                f"{count(counts['configurations_within_floors'])} within the floors",
            ),
            ("floors", all_of(space.floors)),
            ("constraints", all_of(space.constraints)),
            ("objectives", ", ".join(f"{o.direction} {o.metric}" for o in space.objectives)),
        ]
    )
    for title, pairs in (
        ("knobs", [(n, ", ".join(map(show, values))) for n, values in space.choices.items()]),
        ("held fixed", [(name, show(value)) for name, value in space.fixed.items()]),
        ("derived", list(space.derived.items())),
        ("baseline", [(n, show(v)) for n, v in (space.baseline or {}).items()]),
        ("stages", [(one.name, settings_text(one.values, between=", ")) for one in space.stages]),
    ):
        if pairs:
            echo(f"\n{title}")
            print_fields(pairs, indent=2)


_WRITTEN = (
    "id", "hub_id", "aliases", "task", "params", "layers", "hidden_size", "vocab_size", "source",
    "notes",
)  # fmt: skip
"""Facts of a model that --json has."""


class _ModelGroup(click.Group):
    """A group in which every word that is no subcommand is the name of a model, to print it."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command:
        """The subcommand, or one that prints the model `cmd_name`."""
        return super().get_command(ctx, cmd_name) or click.Command(
            cmd_name,
            callback=lambda as_json: _show(cmd_name, as_json or ctx.params["as_json"]),
            params=[click.Option(["--json", "as_json"], is_flag=True, help="Print JSON.")],
            hidden=True,
        )


@click.group(
    "models",
    cls=_ModelGroup,
    invoke_without_command=True,
    subcommand_metavar="[MODEL | hollow MODEL FOLDER]",
    epilog=examples(
        "tuner models",
        "tuner models mistral-7b-v0.3",
        "tuner models hollow llama-3.1-8b ./llama-3.1-8b",
    ),
)
@json_option
@click.pass_context
def models(ctx: click.Context, *, as_json: bool) -> None:
    """List the models that work offline, or print the architecture of one.

    --model also takes any other model of the hub and any folder with a config.json.
    """
    if ctx.invoked_subcommand is None:
        found = list(catalogue.load_catalogue().values())
        print_json([_to_dict(entry) for entry in found]) if as_json else _print_all(found)


def _show(model: str, as_json: bool) -> None:
    entry = get_entry(model)
    if entry is None:
        raise unknown_model(model)
    print_json({**_to_dict(entry), "config": entry.config}) if as_json else _print_one(entry)


@models.command(
    "hollow",
    short_help="Write a checkpoint with holes in place of its weights.",
    epilog=examples("tuner models hollow llama-3.1-8b ./llama-3.1-8b"),
)
@click.argument("model")
@click.argument("folder", type=click.Path(path_type=Path))
@json_option
def hollow(*, model: str, folder: Path, as_json: bool) -> None:
    """Write a checkpoint of a model that takes no disk: holes in place of its weights.

    It has the names, shapes and types of the published one, and from_pretrained loads it; all
    weights are zero. For programs that run on an emulated device.
    """
    from tuner.space.models.hollow import write_hollow

    with quiet_libraries():
        found = write_hollow(model, folder)
    if as_json:
        print_json({**dataclasses.asdict(found), "folder": str(found.folder)})
    else:
        print_fields(
            [
                ("folder", str(found.folder)),
                ("model", found.model),
                ("parameters", f"{count(found.parameters)}, {found.dtype}, all zero"),
                ("weights", format_gib(found.logical_bytes)),
                ("on disk", f"{found.disk_bytes / 1e6:.1f} MB, tokenizer included"),
                ("tokenizer", found.tokenizer),
                ("processor", found.processor or ""),
            ]
        )


def _to_dict(entry: ModelEntry) -> dict[str, Any]:
    return {name: getattr(entry, name) for name in _WRITTEN}


def _print_all(found: list[ModelEntry]) -> None:
    numbers = ("parameters", "layers", "width", "vocabulary")
    print_rows(
        ["id", "task", *numbers],
        [
            (
                entry.id,
                entry.task,
                count(entry.params),
                count(entry.layers),
                count(entry.hidden_size),
                count(entry.vocab_size),
            )
            for entry in found
        ],
        right=numbers,
        drop=("layers", "width"),
    )


def _print_one(entry: ModelEntry) -> None:
    print_fields(
        [
            ("id", entry.id),
            ("hub", entry.hub_id or "only as a part of another model"),
            ("aliases", ", ".join(entry.aliases)),
            ("task", entry.task),
            ("parameters", count(entry.params)),
            ("layers", count(entry.layers)),
            ("width", count(entry.hidden_size)),
            ("vocabulary", count(entry.vocab_size)),
            ("source", entry.source),
            ("notes", entry.notes),
        ]
    )
