"""`tuner doctor`: whether this machine can train, and what would make it train faster."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import click

from tuner.app import versions
from tuner.app.cli.options import examples, json_option
from tuner.app.device import LocalGpu, local_gpus, lost_gpus
from tuner.app.doctor import DeviceFacts, MachineFacts, Severity, examine
from tuner.app.own_settings import own_settings
from tuner.app.probe import probe
from tuner.core import host, nvml
from tuner.core.errors import EXIT_FOUND, EXIT_UNAVAILABLE
from tuner.report.terminal.render import echo, print_fields, print_json

_DEVICE_FILES = Path("/proc/driver/nvidia/gpus")


@click.command(
    "doctor",
    epilog=examples("tuner doctor", "tuner doctor --config conf/config.yaml --json"),
)
@click.option(
    "--config",
    "files",
    type=click.Path(path_type=Path),
    multiple=True,
    metavar="FILE",
    help="Your configuration file (YAML, JSON, TOML, Python), checked for slow settings; "
    "repeatable.",
)
@json_option
def command(*, files: tuple[Path, ...], as_json: bool) -> int:
    """Check driver, libraries, free memory and settings that cost speed.

    Each line is ok, a warning or a problem, with what to do about it. Exit code 3 if there is a
    problem.
    """
    own = [finding for path in files for finding in own_settings(path, host.usable_cpus())]
    findings = [*examine(gather()), *own]
    worst = EXIT_UNAVAILABLE if any(f.level is Severity.PROBLEM for f in findings) else EXIT_FOUND
    if as_json:
        print_json({"ok": worst == EXIT_FOUND, "findings": [f.to_dict() for f in findings]})
        return worst
    lines = []
    for finding in findings:
        lines.append((f"{finding.level!s:9}{finding.check}", finding.text))
        lines.append(("", f"-> {finding.fix}" if finding.fix else ""))
    print_fields(lines)
    counts = [
        sum(f.level is level for f in findings) for level in (Severity.PROBLEM, Severity.WARNING)
    ]
    echo(f"\n{_number(counts[0], 'problem')}, {_number(counts[1], 'warning')}")
    return worst


def _number(count: int, noun: str) -> str:
    return f"{count or 'no'} {noun}{'' if count == 1 else 's'}"


def gather() -> MachineFacts:
    """What is so on this machine. PyTorch is looked at in a process of its own."""
    found = local_gpus()
    identity = nvml.device_identity(found[0].index) if found else None
    return MachineFacts(
        devices=tuple(map(_facts_of, found)),
        lost=tuple(lost_gpus()),
        driver=identity.driver if identity else None,
        driver_cuda=nvml.driver_cuda_version() if found else None,
        has_device_files=_DEVICE_FILES.is_dir() and any(_DEVICE_FILES.iterdir()),
        probe=probe(),
        versions=versions.installed(),
        tested=versions.tested(),
        least=versions.least(),
        environment=dict(os.environ),
        flash_attn=find_spec("flash_attn") is not None,
        cpus=host.usable_cpus(),
        host_total_bytes=host.usable_memory_bytes(),
        host_available_bytes=host.available_memory_bytes(),
        shared_bytes=host.shared_memory_bytes(),
    )


def _facts_of(device: LocalGpu) -> DeviceFacts:
    identity = nvml.device_identity(device.index)
    use = nvml.device_use(device.index)
    return DeviceFacts(
        index=device.index,
        name=device.name,
        total_bytes=device.total_bytes,
        compute_capability=identity.compute_capability if identity else (0, 0),
        gpu=device.gpu,
        used_bytes=use.used_bytes if use else None,
        processes=nvml.device_processes(device.index) or (),
    )
