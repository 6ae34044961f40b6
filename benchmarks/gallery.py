"""Writes docs/notebook/gallery.md: the best of every space and GPU type, from results/.

    python -m benchmarks.gallery

Nothing is computed: each row shows the `best.yaml` of a committed search, beside its picture.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tuner.space import load_space

ROOT = Path(__file__).resolve().parents[1]
PAGE, RESULTS = ROOT / "docs/notebook/gallery.md", ROOT / "results"
INTRODUCTION = """\
# Gallery: the best of every search

Written by `python -m benchmarks.gallery` from the searches under [`results/`](../../results/).
*Predicted* rows used no GPU; *measured* ones trained on the device named. "Gain" is the throughput
over that of the space's baseline, at the same effective batch; times and costs are of training
only, every example at full length. `tuner report --space qlora4b --gpu all` draws the reports of a
space: one file each that loads nothing from the network, with the front and each trial, memory over
a step, each parameter and the table. `tuner best --space qlora27b --gpu a6000` prints a row in
full, and `tuner best --space qlora27b --gpu all` compares the GPU types of a space.
"""
REPORTED = "qlora27b/a6000"
"""The search whose report is committed, as an example; `tuner report` draws the others."""
COLUMNS = ("GPU", "", "memory", "samples/s", "gain", "epoch", "cost of an epoch", "files")


@dataclass(frozen=True, slots=True)
class Found:
    """The folder of a search and what its `best.yaml` says."""

    folder: Path
    best: Mapping[str, Any]

    @property
    def row(self) -> tuple[str, ...]:
        """The cells of its row, in the order of `COLUMNS`."""
        best, memory, speed = self.best, self.best["memory"], self.best["speed"]
        run = best.get("run") or {}
        gain = (best.get("baseline") or {}).get("speedup")
        cost = _epoch_usd(run)
        source = f"{best['source']}, verified" if best["verified"] else best["source"]
        name = f"{self.folder.parent.name}/{self.folder.name}"
        where = f"../../results/{name}"
        report = f"[report]({where}/report.html), " if name == REPORTED else ""
        return (
            best["gpu"]["name"],
            source,
            f"{memory['peak_device_memory']} of {best['gpu']['memory']}",
            f"{speed['samples_per_s']:.3g}",
            "" if gain is None else f"{gain:.2f} x",
            run.get("time_per_epoch", ""),
            "" if cost is None else f"{cost:.2f} USD",
            f"{report}[best.yaml]({where}/best.yaml)",
        )


def found(results: Path) -> list[Found]:
    """The searches under `results`, by space and GPU type."""
    return [
        Found(path.parent, yaml.safe_load(path.read_text("utf-8")))
        for path in sorted(results.glob("*/*/best.yaml"))
    ]


def page(results: Path) -> str:
    """The whole page."""
    searches = found(results)
    names = sorted({each.best["space"] for each in searches})
    by_space = {n: [each for each in searches if each.best["space"] == n] for n in names}
    parts = ["\n".join(_section(name, those)) for name, those in by_space.items()]
    return "\n".join([INTRODUCTION, *parts])


def _section(name: str, searches: Sequence[Found]) -> Iterator[str]:
    space = load_space(name)
    yield f"## {name}\n\n{space.description}.\n"
    yield f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}"
    for each in searches:
        yield f"| {' | '.join(each.row)} |"
    yield ""
    for each in searches:
        chosen = each.best["configuration"]
        settings = " ".join(f"{knob}={_text(chosen[knob])}" for knob in space.knobs)
        yield f"- **{each.best['gpu']['name']}**: `{settings}`"
    yield ""
    for each in searches:
        picture = f"../../results/{each.folder.parent.name}/{each.folder.name}/pareto.png"
        yield f"![front of {name} on {each.best['gpu']['name']}]({picture})\n"


def _text(value: Any) -> str:
    """A setting as `--set` takes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _epoch_usd(run: Mapping[str, Any]) -> float | None:
    """From time and price: the cost beside them is rounded, and would be rounded once more."""
    if run.get("cost_per_epoch_usd") is None:
        return None
    return float(run["time_per_epoch_s"] * run["price_usd_per_hour"] * run["gpus"] / 3600)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--to", type=Path, default=PAGE)
    options = parser.parse_args(arguments)
    options.to.write_text(page(RESULTS), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
