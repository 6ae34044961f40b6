"""The page of the zoo: docs/notebook/zoo.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from benchmarks.zoo.entries import Entry, names, read
from benchmarks.zoo.running import Row, difference_of, judged
from tuner.core.units import GIB

PAGE = Path(__file__).parents[2] / "docs" / "notebook" / "zoo.md"
_NOTES = Path(__file__).with_name("notes.md")
INTRODUCTION = """\
# The zoo: programs on emulated GPUs

Written by `python -m benchmarks.zoo --page`. Each program is run unchanged on an emulated GPU until
its third optimizer step, with checkpoints without weights and made-up data; an
[entry](../../benchmarks/zoo/programs/) says how. Memory and step times are *emulated*. "Arithmetic"
is a sum made by hand, independently of the emulator (weights, gradients, optimizer states, logits,
activations); where the peak is more than 10 % away, the note explains it. "Took" is the whole run
on two cores without a GPU that others shared, with the processor's time in parentheses. "Answered"
means: the emulator knew every call, and every value that decided a size or a bound of it, and the
answer is the expected one. Timeouts are of a busy machine.
"""
_HEAD = (
    "| program | versions | GPU | ended | peak allocated | arithmetic | off | step | took | date |",
    "|---|---|---|---|---:|---:|---:|---:|---:|---|",
)
_KINDS = ("answered", "set-up", "not emulated", "unknown", "timeout", "wrong")


def page(rows: Mapping[str, Row]) -> str:
    """Markdown: counts, a table of each kind of program, and what is to say about them."""
    entries = [read(name) for name in names()]
    judgments = {one.name: judged(rows[one.name], one) for one in entries if one.name in rows}
    counts = Counter(row.kind for row in judgments.values())
    said = ", ".join(f"{kind} {counts[kind]}" for kind in _KINDS)
    lines = [INTRODUCTION, f"**{len(entries)} programs, {len(judgments)} run: {said}.**", ""]
    for kind in dict.fromkeys(sorted(one.kind for one in entries)):
        lines += [f"## {kind.capitalize().replace('gpus', 'GPUs')}", "", *_HEAD]
        lines += [_line(one, judgments.get(one.name)) for one in entries if one.kind == kind]
        lines.append("")
    lines += ["## Reasons and differences", ""]
    lines += [_note(one, judgments.get(one.name)) for one in entries]
    text = "\n".join(line for line in lines if line is not None).rstrip() + "\n"
    return text + "\n" + _NOTES.read_text(encoding="utf-8")


def _line(entry: Entry, row: Row | None) -> str:
    gpu = f"{entry.gpus} x {entry.gpu}" if entry.gpus > 1 else entry.gpu
    title = f"[{entry.title}](../../benchmarks/zoo/programs/{entry.name}.toml)"
    if row is None:
        return f"| {title} | | {gpu} | not run | | | | | | |"
    versions = ", ".join(f"{name} {version}" for name, version in row.versions.items())
    if entry.is_repository:
        versions += f", {entry.repository} {entry.commit_or_version[:9]}"
    reckoned, difference = row.arithmetic_gib, difference_of(row, entry)
    ended = row.ended if row.kind == "answered" else f"{row.ended}: **{row.kind}**"
    cells = (
        title,
        versions,
        gpu,
        ended,
        f"{row.peak_allocated_bytes / GIB:.3f} GiB" if row.peak_allocated_bytes else "",
        f"{reckoned:.2f} GiB" if reckoned is not None else "",
        f"{difference:+.1%}" if difference is not None else "",
        f"{row.step_s:.2f} s" if row.step_s is not None else "",
        f"{row.took_s:.0f} s" + (f" ({row.processor_s:.0f} s)" if row.processor_s else ""),
        row.date,
    )
    return f"| {' | '.join(cells)} |"


def _note(entry: Entry, row: Row | None) -> str | None:
    said = [entry.expected.arithmetic, entry.expected.why, entry.note]
    if row is not None and row.reason:
        said.append(f"ended with: {row.reason}".replace("<", "&lt;"))
    text = ". ".join(one.rstrip(".") for one in said if one)
    return f"- **{entry.name}**: {text}." if text else None
