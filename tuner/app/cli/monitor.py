"""`tuner monitor`: this machine's GPUs and processors while something trains."""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence

import click
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from tuner.app.cli.options import DURATION, json_option, subcommand
from tuner.app.device import local_gpus, lost_gpus
from tuner.app.watch import DeviceReading, HostReading, MachineReading, Watcher, advice
from tuner.core.units import format_gib
from tuner.report.terminal.render import echo
from tuner.report.terminal.tables import Sheet, console

REMEMBERED = 30
"""Readings on which advice is based."""
FIRST_S = 0.2
"""The processors' share of the first reading is of this long."""
NO_GPU = "no NVIDIA GPU with a working driver: only the host is shown (see `tuner doctor`)"


@subcommand(
    "monitor",
    "tuner monitor",
    "tuner monitor --once --json",
    "tuner monitor --interval 10s",
)
@click.option(
    "--interval",
    type=DURATION,
    default=1.0,
    metavar="TIME",
    help="Time between two readings.  [default: 1s]",
)
@click.option("--once", is_flag=True, help="Read once and exit.")
@json_option
def command(*, interval: float, once: bool, as_json: bool) -> None:
    """Watch memory, utilisation, power, temperature, clocks and processes of this machine's GPUs.

    Shows the host's processors and memory too, with advice. Live in a terminal, lines in a pipe,
    one JSON object per line with --json; Ctrl-C ends it.
    """
    for text in lost_gpus():
        echo(f"warning: {text} (`tuner doctor` says what to do)", err=True)
    watcher = Watcher([device.index for device in local_gpus()])
    try:
        if as_json:
            _print_json(_readings(watcher, interval, once=once), indent=once)
        elif once or not sys.stdout.isatty():
            _print_lines(_readings(watcher, interval, once=once), once=once)
        else:
            _live(_readings(watcher, interval, once=False))
    except KeyboardInterrupt:
        pass  # how watching ends
    finally:
        watcher.close()


def _readings(
    watcher: Watcher, interval: float, *, once: bool
) -> Iterator[Sequence[MachineReading]]:
    """The last readings, with each new one."""
    known: deque[MachineReading] = deque(maxlen=REMEMBERED)
    time.sleep(min(FIRST_S, interval))
    while True:
        known.append(watcher.read())
        yield list(known)
        if once:
            return
        time.sleep(interval)


def _print_json(readings: Iterator[Sequence[MachineReading]], *, indent: bool) -> None:
    for known in readings:
        document = {**known[-1].to_dict(), "advice": advice(known)}
        echo(json.dumps(document, indent=2 if indent else None, allow_nan=False))


def _print_lines(readings: Iterator[Sequence[MachineReading]], *, once: bool) -> None:
    """A line for each device and the host, and advice when it is new."""
    said: list[str] = []
    for number, known in enumerate(readings):
        reading = known[-1]
        if number == 0 and not reading.devices:
            echo(NO_GPU, err=not once)
        stamp = "" if once else time.strftime("%H:%M:%S ")
        for device in reading.devices:
            echo(f"{stamp}GPU {device.index} {device.name}: {device_text(device)}")
            if once:
                _print_processes(device)
        echo(f"{stamp}host: {host_text(reading.host)}")
        texts = advice(known)
        for text in texts:
            if text.partition(":")[2][:30] not in {s.partition(":")[2][:30] for s in said}:
                echo(f"{stamp}advice: {text}")
        said = texts


def _print_processes(device: DeviceReading) -> None:
    for process in device.processes:
        size = "" if process.used_bytes is None else f" {format_gib(process.used_bytes)}"
        echo(f"  process {process.pid} {process.name}{size}")


def _live(readings: Iterator[Sequence[MachineReading]]) -> None:
    """Draw over and over on the terminal, until Ctrl-C."""
    with Live(console=console(), auto_refresh=False, transient=False) as live:
        for known in readings:
            live.update(drawn(known), refresh=True)


def drawn(known: Sequence[MachineReading]) -> RenderableType:
    """The last reading as a table, with the advice of all below it."""
    reading = known[-1]
    parts: list[RenderableType] = []
    for device in reading.devices:
        rows = Sheet([f"GPU {device.index}", device.name])
        for text in device_text(device).split(", "):
            name, _, value = text.partition(" ")
            rows.add_row(name, value)
        for process in device.processes:
            rows.add_row("process", f"{process.pid} {process.name}")
        parts += [rows, Text()]
    if not reading.devices:
        parts.append(Text(NO_GPU))
    parts.append(Text(f"host  {host_text(reading.host)}"))
    parts += [Text(f"- {text}") for text in advice(known)]
    return Group(*parts)


def device_text(device: DeviceReading) -> str:
    """A device's reading on one line."""
    if device.fault is not None:
        return f"does not answer: {device.fault}"
    parts = []
    if device.used_bytes is not None and device.total_bytes is not None:
        used = device.used_bytes / device.total_bytes
        sizes = f"{format_gib(device.used_bytes)} of {format_gib(device.total_bytes)}"
        parts.append(f"memory {sizes} ({used:.0%})")
    if device.utilization is not None:
        parts.append(f"utilisation {device.utilization:.0%}")
    if device.power_w is not None:
        limit = f" of {device.power_limit_w:.0f} W" if device.power_limit_w is not None else " W"
        parts.append(f"power {device.power_w:.0f}{limit}")
    if device.temperature_c is not None:
        parts.append(f"temperature {device.temperature_c} C")
    if device.clock_hz is not None and device.max_clock_hz is not None:
        parts.append(f"clock {device.clock_hz / 1e6:.0f} of {device.max_clock_hz / 1e6:.0f} MHz")
    if device.slowdowns:
        parts.append(f"slowed by {' and '.join(device.slowdowns)}")
    parts.append(f"processes {len(device.processes)}")
    return ", ".join(parts)


def host_text(host: HostReading) -> str:
    """The host's reading on one line."""
    share = "?" if host.cpu_share is None else f"{host.cpu_share:.0%}"
    used = "?" if host.used_bytes is None else format_gib(host.used_bytes)
    return f"{host.cpus} processors {share} busy, memory {used} of {format_gib(host.total_bytes)}"
