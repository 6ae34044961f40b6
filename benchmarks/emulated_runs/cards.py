"""`python -m benchmarks.emulated_runs.cards`: runs on two real cards, emulated.

cards.csv has a line for each run: measured values, which are given, and those of the emulator and
of the prediction, which are filled in. Sizes are in GB of 10^9 bytes, times in ms.

- h100_sxm: tuner's own trials on an H100 SXM (November 2026, torch 2.11.0, transformers 5.17.0,
  peft 0.21.0), those with effective_batch=128 by a search; `run` has the settings.
- a6000: peaks that another estimator published of its loop on an RTX A6000; `run` has the
  arguments of loop.py. Its releases are not known: transformers 5 keeps less for attention.

Memory depends on the releases: run it with an interpreter that has those of the card.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from tuner.emulator import Machine
from tuner.space.gpus import get_gpu
from tuner.space.models.hollow import write_hollow

TABLE, LOOP = (Path(__file__).with_name(name) for name in ("cards.csv", "loop.py"))
NAMES = {
    "allocated_gb": "peak allocated",
    "reserved_gb": "peak reserved",
    "device_gb": "device memory",
    "step_ms": "step time",
}
TIME_LIMIT_S = 1800.0
Line = dict[str, str]


def main() -> None:
    """Run the benchmark: fill in the lines that are wanted, and print the tables of the pages."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.emulated_runs.cards", description=__doc__
    )
    parser.add_argument("--only", default="", help="runs whose card or model contains this")
    wanted = parser.parse_args().only
    lines = read()
    for line in lines:
        if wanted in f"{line['gpu']} {line['model']}":
            line.update(_loop(line) if line["gpu"] == "a6000" else _trial(line))
            releases = (f"{name} {version(name)}" for name in ("torch", "transformers"))
            line["releases"] = ", ".join(releases)
            print(line, flush=True)
            with TABLE.open("w", encoding="utf-8", newline="") as file:
                writer = csv.DictWriter(file, lines[0], lineterminator="\n")
                writer.writeheader()
                writer.writerows(lines)
    print(*memory_table(lines), "", *step_table(lines), sep="\n")


def read() -> list[Line]:
    """The lines of cards.csv."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _trial(line: Line) -> Line:
    """The emulated trial of a line, with the prediction that is shown beside it."""
    command = [sys.executable, "-m", "tuner", "trial", "--mode", "emulate", "--json"]
    command += ["--model", line["model"], "--gpu", line["gpu"], "--timeout", f"{TIME_LIMIT_S:.0f}s"]
    command += [part for setting in line["run"].split() for part in ("--set", setting)]
    found = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=False).stdout)
    filled = {
        "emulated_ending": found["status"],
        "predicted_step_ms": f"{1e3 * found['predicted']['step_s']:.1f}",
    }
    if emulated := found.get("emulated"):
        names = ("peak_allocated_bytes", "peak_reserved_bytes", "device_bytes")
        for quantity, name in zip(NAMES, names, strict=False):
            filled[f"emulated_{quantity}"] = f"{emulated['memory'][name] / 1e9:.9f}"
        filled["emulated_step_ms"] = f"{1e3 * emulated['step_s']:.1f}"
    return filled


def _loop(line: Line) -> Line:
    """The peak that loop.py reads on the emulated card."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        write_hollow(line["model"], path)
        with (Path(folder) / "printed").open("w+", encoding="utf-8") as output:
            command = [sys.executable, str(LOOP), str(path), *line["run"].split()]
            machine = Machine(get_gpu(line["gpu"]))
            machine.run(command, steps=0, timeout_s=TIME_LIMIT_S, output=output)
            output.seek(0)
            name, _, peak = output.read().rstrip().rpartition("\n")[2].partition(" ")
    if name != "PEAK":
        return {"emulated_ending": "crashed"}
    return {"emulated_ending": "ok", "emulated_allocated_gb": f"{int(peak) / 1e9:.9f}"}


def difference(line: Line, quantity: str, source: str = "emulated") -> float | None:
    """Emulated or predicted over measured, minus 1, in the digits that were measured.

    None where either is unknown.
    """
    measured, found = line[f"measured_{quantity}"], line[f"{source}_{quantity}"]
    if not measured or not found:
        return None
    digits = len(measured.partition(".")[2])
    return round(float(found), digits) / float(measured) - 1


def memory_table(lines: Sequence[Line]) -> list[str]:
    """The table of docs/emulator.md: by card, how far emulated values are from measured ones."""
    table = ["| card | emulated | runs | equal | mean | worst |", "|---|---|---:|---:|---:|---:|"]
    for gpu in dict.fromkeys(line["gpu"] for line in lines):
        for quantity, name in NAMES.items():
            own = (difference(line, quantity) for line in lines if line["gpu"] == gpu)
            if found := [one for one in own if one is not None]:
                mean, worst = statistics.fmean(map(abs, found)), max(found, key=abs)
                counts = f"{len(found)} | {found.count(0.0)}"
                cells = f"{name} | {counts} | {100 * mean:.3f} % | {100 * worst:+.3f} %"
                table.append(f"| {get_gpu(gpu).name} | {cells} |")
    return table


def step_table(lines: Sequence[Line]) -> list[str]:
    """The table of docs/accuracy.md: step times of each run that has one, the worst first."""
    table = ["| run | measured | predicted | emulated |", "|---|---:|---:|---:|"]
    timed = [line for line in lines if line["measured_step_ms"]]
    for line in sorted(timed, key=lambda one: -abs(difference(one, "step_ms", "predicted") or 0.0)):
        of = dict(setting.split("=", 1) for setting in line["run"].split())
        method = "full" if of["lora_rank"] == "0" else "LoRA"
        dtype = "autocast" if of.get("mixed_precision") == "bf16" else of["precision"]
        rounds = int(of["effective_batch"]) // int(of["micro_batch"])
        sizes = f"{of['micro_batch']} x {int(of['max_length']):,}"
        words = [line["model"], method, dtype, f"{rounds} x {sizes}" if rounds > 1 else sizes]
        words += ["checkpointing"] * (of["gradient_checkpointing"] == "true")
        words += ["eager attention"] * (of.get("attention") == "eager")
        cells = [", ".join(words), f"{float(line['measured_step_ms']):,.0f} ms"]
        for source in ("predicted", "emulated"):
            off = difference(line, "step_ms", source)
            cells.append("" if off is None else f"{100 * off:+.1f} %")
        table.append(f"| {' | '.join(cells)} |")
    return table


if __name__ == "__main__":
    main()
