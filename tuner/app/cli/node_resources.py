"""`tuner node-resources`: what this machine offers a Ray cluster, a resource for each GPU type."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence

import click

from tuner.app.cli.options import examples, json_option
from tuner.app.device import LocalGpu, local_gpus, lost_gpus
from tuner.core.units import format_gib
from tuner.report.terminal.render import print_json


@click.command(
    "node-resources",
    epilog=examples(
        "tuner node-resources",
        'ray start --head --resources="$(tuner node-resources)"',
        'ray start --address=HEAD:6379 --resources="$(tuner node-resources)"',
    ),
)
@json_option
def command(*, as_json: bool) -> None:
    """Print this machine's resources for `ray start --resources`.

    A resource is named after its GPU type (`tuner gpus`), because Ray's own labels are coarser: to
    Ray, A100s with 40 and 80 GB are the same. Without a GPU it prints {}. Only GPUs that
    CUDA_VISIBLE_DEVICES shows are counted. Unusable GPUs, such as one that does not answer its
    driver, are named on stderr.

    --json prints everything found: {"resources": ..., "num_gpus": ..., "devices": [...]}.
    """
    devices = local_gpus()
    resources = dict(Counter(device.gpu.id for device in devices if device.gpu is not None))
    for line in (*lost_gpus(), *warnings(devices)):
        click.echo(f"warning: {line}", err=True)
    if not as_json:
        click.echo(json.dumps(resources))
        return

    print_json(
        {
            "resources": resources,
            "num_gpus": len(devices),
            "devices": [
                {
                    "index": device.index,
                    "name": device.name,
                    "memory_bytes": device.total_bytes,
                    "gpu": device.gpu.id if device.gpu else None,
                }
                for device in devices
            ],
        }
    )


def warnings(devices: Sequence[LocalGpu]) -> list[str]:
    """What is to be said of a machine whose GPUs Ray would not use as they are.

    Ray hands out GPUs by number and knows nothing of the types behind them: a worker that gets
    another device than it was promised refuses it, which costs the trial a new worker.
    """
    found = [
        f"{device.name} with {format_gib(device.total_bytes)} (GPU {device.index}) is of no known "
        "type, and no trial will run on it: `tuner calibrate` measures it, or describe it in "
        "~/.config/tuner/gpus.yaml"
        for device in devices
        if device.gpu is None
    ]
    kinds: dict[str, list[str]] = {}
    for device in devices:
        kinds.setdefault(device.gpu.id if device.gpu else "unknown", []).append(str(device.index))
    if len(kinds) > 1:
        of_each = ", ".join(f"{kind}: {','.join(indices)}" for kind, indices in kinds.items())
        found.append(
            f"GPUs of several types ({of_each}): Ray may hand a worker the wrong type, which it "
            "then refuses. Start Ray once for each type, with only its GPUs in "
            "CUDA_VISIBLE_DEVICES"
        )
    return found
