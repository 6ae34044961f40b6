"""Answers of commands in a paragraph, made of what they print with `--json`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from tuner.core.records import MemoryBudget, Verdict
from tuner.core.units import GIB, significant
from tuner.report.terminal.render import settings_text
from tuner.report.terminal.verdict import (
    SHOWN,
    UNKNOWN_SPEED,
    Answer,
    bound_text,
    memory_text,
    verdict_texts,
)

MOST = 5
"""Changes, causes and the like that a paragraph names; the data has all."""

Data = Mapping[str, Any]


def check_text(data: Data) -> str:
    """The verdict, the change with its difference, and notes."""
    program, change = data["program"], data["suggestion"]
    notes = [*program.get("notes", ()), *data["notes"]]
    if data["source"] == "predicted":
        text = f"{_verdict_text(data['verdict'], program, notes)} {_speed_text(program)}"
        text += f" Read as {program['read_as']}."
    else:
        text = _emulated_text(data["verdict"], data["needed"] or program, notes)
    if change is not None:
        fits = change["found"]["fits"]
        becomes = "is faster and fits" if data["fits"] else "fits" if fits else "may fit"
        text += f" With {settings_text(change['values'])} it {becomes}:\n{change['difference']}"
    elif not data["fits"] and data["least_bytes"] is not None:
        text += (
            " No change tried with the same effective batch, adapters and lengths fits; the "
            f"smallest takes {_gib(data['least_bytes'])}."
        )
    return " ".join((text, *_sentences("Notes", notes)))


def estimate_text(data: Data) -> str:
    """The verdict, the largest parts of the memory, and the speed."""
    parts = memory_text(data["memory"]["breakdown"])
    return f"{_verdict_text(data['verdict'], data, ())} {parts}. {_speed_text(data)}"


def best_text(data: Data) -> str:
    """The recommendation, and the commands to go on with."""
    memory, speed, gpu = data["memory"], data["speed"], data["gpu"]
    head = (
        f"{data['space']} on {gpu['id']} ({data['source']}): "
        f"{settings_text(data['configuration'], SHOWN)}; {memory['peak_device_memory']} of "
        f"{gpu['memory']}, {significant(speed['samples_per_s'])} samples/s. "
        f"Verified: {data['verification']}."
    )
    return " ".join((head, *_sentences("To use it", [f"`{each}`" for each in data["use"]])))


TEXTS: Mapping[str, Callable[[Data], str]] = {
    "check": check_text,
    "estimate": estimate_text,
    "best": best_text,
}
"""By command."""


def _verdict_text(verdict: str, prediction: Data, notes: Iterable[str]) -> str:
    """The verdict of a prediction with its numbers; the reason where it is unknown."""
    answer = Answer(
        Verdict(verdict),
        prediction["memory"]["device_bytes"],
        MemoryBudget(prediction["limit_bytes"], prediction["margin_bytes"]),
        prediction["gpu"],
        prediction["intervals"].get("device_bytes"),
    )
    if answer.verdict is Verdict.UNKNOWN:
        answer = replace(answer, reason="; ".join(notes) or bound_text(answer))
    return f"{': '.join(verdict_texts(answer))} (predicted)."


def _emulated_text(verdict: str, run: Data, notes: Iterable[str]) -> str:
    """The verdict of an emulated run, with the device that took most memory and its failure."""
    failed = (run["error"] or {}).get("message", "")
    if verdict == Verdict.UNKNOWN:
        why = "; ".join(filter(None, (failed, *notes))) or "too little ran"
        return f"{verdict}: {why} (emulated)."
    of = f"{_gib(run['used_bytes'])} of {_gib(run['gpu_memory_bytes'])} on {run['gpu']}"
    return " ".join(filter(None, (f"{verdict}: {of} (emulated).", failed)))


def _speed_text(prediction: Data) -> str:
    if prediction["samples_per_s"] is None:
        return f"Speed: {UNKNOWN_SPEED}."
    rates = (f"{significant(prediction[f'{of}_per_s'])} {of}/s" for of in ("samples", "tokens"))
    return f"{', '.join(rates)}."


def _sentences(label: str, texts: list[str]) -> list[str]:
    more = f"; {len(texts) - MOST} more" if len(texts) > MOST else ""
    return [f"{label}: {'; '.join(texts[:MOST])}{more}."] if texts else []


def _gib(size_bytes: float) -> str:
    return f"{significant(size_bytes / GIB)} GiB"
