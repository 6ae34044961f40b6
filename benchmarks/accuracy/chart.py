"""Draws docs/_static/accuracy.svg: the error of every run of benchmarks/accuracy/predictions.csv.

python -m benchmarks.accuracy.chart
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

TABLE = Path(__file__).with_name("predictions.csv")
CHART = Path(__file__).resolve().parents[2] / "docs/_static/accuracy.svg"
QUANTITIES = {
    "allocated memory": "allocated",
    "reserved or device memory": "reserved",
    "step time": "step",
}
"""The rows of the chart, and the column of each."""

_OTHER = "others"
_GPUS = {"T4": "#d1495b", "RTX 4080": "#edae49", "A100": "#3d7ea6", _OTHER: "#8d8d8d"}
_LIMIT = 30.0
"""Errors beyond this many percent are drawn at the edge."""
_WIDTH, _ROW, _LEFT, _RIGHT = 720, 84, 10, 10
_TEXT = 'fill="#808080" font-family="sans-serif" font-size="13"'


def runs() -> Iterator[tuple[str, dict[str, float]]]:
    """The GPU of each run and its errors in percent, by quantity."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file):
            gpu = next((name for name in _GPUS if name in line["run"]), _OTHER)
            found = {name: line[column] for name, column in QUANTITIES.items()}
            yield gpu, {n: float(e.rstrip("%")) for n, e in found.items() if e}


def chart() -> str:
    """The chart as SVG: a row for each quantity, a dot for each run."""
    found = list(runs())
    height = _ROW * len(QUANTITIES) + 60
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img">',
        "<title>Predicted against measured: the error of each published run</title>",
    ]
    bottom = _ROW * len(QUANTITIES)
    for percent in range(-30, 31, 10):
        x = _place(percent)
        strength = 1.5 if percent == 0 else 0.5
        parts.append(f'<path d="M{x:.0f} 20V{bottom}" stroke="#808080" stroke-width="{strength}"/>')
        label = f"{percent:+d} %" if percent else "measured"
        parts.append(
            f'<text x="{x:.0f}" y="{bottom + 18}" text-anchor="middle" {_TEXT}>{label}</text>'
        )
    for row, name in enumerate(QUANTITIES):
        middle = _ROW * row + 58
        errors = [(gpu, each[name]) for gpu, each in found if name in each]
        label = f"{name}, {len(errors)} runs"
        parts.append(f'<text x="{_LEFT}" y="{middle - 38}" {_TEXT}>{label}</text>')
        for place, (gpu, error) in enumerate(errors):
            # Dots of neighbours lie side by side: a run's place is its turn in the table.
            y = middle - 24 + place * 41 % 48
            at = f'cx="{_place(error):.1f}" cy="{y}" r="3.5"'
            parts.append(f'<circle {at} fill="{_GPUS[gpu]}" fill-opacity="0.7"/>')
    x = _LEFT
    for gpu, colour in _GPUS.items():
        parts.append(f'<circle cx="{x + 6}" cy="{height - 14}" r="5" fill="{colour}"/>')
        parts.append(f'<text x="{x + 16}" y="{height - 9}" {_TEXT}>{gpu}</text>')
        x += 100
    beyond = f"beyond {_LIMIT:.0f} %: at the edge"
    parts.append(
        f'<text x="{_WIDTH - _RIGHT}" y="{height - 9}" text-anchor="end" {_TEXT}>{beyond}</text>'
    )
    return "\n".join([*parts, "</svg>", ""])


def _place(percent: float) -> float:
    within = min(_LIMIT, max(-_LIMIT, percent))
    return 40 + (within + _LIMIT) / (2 * _LIMIT) * (_WIDTH - 80)


if __name__ == "__main__":
    CHART.write_text(chart(), "utf-8")
