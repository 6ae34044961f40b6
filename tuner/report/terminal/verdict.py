"""The short answer: the verdict on the first line, then a change, speed, time and cost."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import TYPE_CHECKING

import click

from tuner.core.gpu import Gpu
from tuner.core.records import MemoryBudget, Prediction, RunTime, Verdict
from tuner.core.units import GIB, format_duration, format_range, format_size, printable, significant
from tuner.report.terminal.render import is_coloured, prose, width

if TYPE_CHECKING:
    from tuner.searches.cost import RunCost  # numpy

LINES, NOTEBOOK_LINES = 14, 100
"""Lines of an answer without --verbose; and in a notebook, which scrolls, with all notes."""

COLOURS = {
    Verdict.FITS: "green",
    Verdict.TIGHT: "yellow",
    Verdict.DOES_NOT_FIT: "red",
    Verdict.UNKNOWN: "magenta",
}

SAMPLES = 1_000
"""The samples that time and cost are for where the size of the data is unknown."""

UNPRICED = "no offer of this GPU type was found at RunPod, Lambda or Akash"
"""The reason for a cost that is unknown (`tuner/space/gpus.yaml` says when they were read)."""

UNKNOWN_SPEED = "unknown under torch.compile: `tuner check` runs it on the emulator"
"""The speed of a compiled training, which isn't predicted."""

SETTINGS, NOTE, READ_AS = "with", "note", "read as"
"""Labels of fields with two lines."""
_WHOLE = ("speed", "time", "source")
"""Labels of fields that are never cut."""
ANSWER, CHANGE = "answer", "change"
"""Labels of the verdict and of what a change does, which a screen shows without them."""

Field = tuple[str, str]
"""The label of a part of an answer, and its text."""

Ends = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Answer:
    """The verdict and its numbers; `reason` stands in their place when it is unknown.

    `used_bytes` and `budget` are of one GPU, `ends` those of the 90 % interval of an estimate.
    `words` stand in the place of the verdict's own, if there are any.
    """

    verdict: Verdict
    used_bytes: int
    budget: MemoryBudget
    gpu: str
    ends: Ends | None = None
    reason: str = ""
    words: str = ""


@dataclass(frozen=True, slots=True)
class Pace:
    """The time of an optimizer step, and its samples and tokens on all GPUs (None: unknown)."""

    step_s: float
    samples: float | None
    tokens: float | None
    ends_s: Ends | None = None
    mfu: float | None = None

    @classmethod
    def of(cls, evidence: Prediction) -> Pace | None:
        """The pace of a prediction; None when unknown."""
        if evidence.is_compiled:
            return None
        speed = evidence.speed
        return cls(
            speed.step_s,
            speed.samples_per_s * speed.step_s,
            speed.tokens_per_s * speed.step_s,
            evidence.intervals.get("step_s"),
            speed.mfu,
        )


def verdict_texts(answer: Answer) -> tuple[str, str]:
    """The word of the verdict; and device memory, the limit and the interval, or the reason."""
    rest = answer.reason or f"{numbers_text(answer)}{interval_text(answer.ends)}"
    return verdict_words(answer), rest


def print_verdict(answer: Answer) -> None:
    """The first line: the word, device memory, the limit and the interval."""
    print_answer(*verdict_texts(answer), COLOURS[answer.verdict])


def print_answer(words: str, rest: str, colour: str) -> None:
    """The first line of an answer."""
    line = f"{words}: {printable(rest)}"
    shown = prose(line)
    print_lines([shown.replace(words, painted(words, fg=colour, bold=True), 1)])


def print_lines(lines: Iterable[str]) -> None:
    """Lines of this module: their text is spelled out for the screen before it is coloured."""
    if shown := "\n".join(lines):
        click.echo(shown)


def verdict_words(answer: Answer) -> str:
    """The verdict; of a tight one also the likelier outcome, which is that of its exit code."""
    if answer.verdict is not Verdict.TIGHT:
        return answer.words or str(answer.verdict)
    if answer.budget.fits(answer.used_bytes):
        return f"{answer.verdict} (likely fits)"
    if answer.used_bytes > answer.budget.limit_bytes:
        return f"{answer.verdict} (likely not)"
    return f"{answer.verdict} (within headroom)"


def numbers_text(answer: Answer) -> str:
    """Used and available memory, with as many digits as tell the two apart."""
    sizes = answer.used_bytes / GIB, answer.budget.limit_bytes / GIB
    for digits in (3, 4, 5):
        used, limit = (significant(size, digits) for size in sizes)
        if used != limit:
            return f"{used} of {limit} GiB on {answer.gpu}"
    return f"all {significant(sizes[1])} GiB on {answer.gpu}"


def room_text(answer: Answer) -> str:
    """The verdict with the arithmetic behind it."""
    used_bytes, budget = answer.used_bytes, answer.budget
    free_bytes, margin_bytes = budget.limit_bytes - used_bytes, budget.margin_bytes
    rest = f"{format_size(abs(free_bytes))} {'free' if free_bytes >= 0 else 'too much'}"
    headroom = f", headroom {format_size(margin_bytes)}" if margin_bytes else ""
    of = f"{format_size(used_bytes)} of {format_size(budget.limit_bytes)}"
    return f"{verdict_words(answer)}: {of}, {rest}{headroom}"


def bound_text(answer: Answer) -> str:
    """The reason for an unknown verdict: the memory is an upper bound, which does not fit."""
    return f"at most {numbers_text(answer)}, without what saves memory and isn't modelled"


def interval_text(ends: Ends | None) -> str:
    """The interval in GiB, " (90 %: 21.6 to 28.8)"; empty without an interval."""
    return f" (90 %: {_gib(ends[0])} to {_gib(ends[1])})" if ends else ""


def _gib(size_bytes: float) -> str:
    return significant(size_bytes / GIB)


def memory_text(breakdown: Mapping[str, float]) -> str:
    """The largest parts of the memory: "weights 15.2, activations 4.00 GiB"."""
    parts = sorted(breakdown.items(), key=lambda part: -part[1])[:3]
    shown = [f"{name.replace('_', ' ')} {_gib(size)}" for name, size in parts if size > 0]
    return f"{', '.join(shown)} GiB" if shown else ""


def pace_fields(
    pace: Pace | None,
    gpu: Gpu,
    *,
    gpus: int = 1,
    cost: RunCost | None = None,
    run: RunTime | None = None,
    rows: str = "",
) -> list[tuple[str, str]]:
    """One line each for speed, time and cost; `cost` is that of the data, where its size is known.

    `run` is the time of the training itself, whose `rows` are told. The price is that of all
    `gpus`.
    """
    if pace is None:
        return []
    step = f"{format_duration(pace.step_s)} per optimizer step"
    hourly = None if gpu.price_usd_per_hour is None else gpu.price_usd_per_hour * gpus
    of = ""
    if run is not None:
        spent, per = run.seconds, "training" if run.is_whole else "epoch"
        tests = f", {run.evaluations} x evaluation" if run.evaluations else ""
        ends = format_range(*run.interval_s, format_duration)
        of = f" (90 %: {ends}), {run.steps:,} steps{rows}{tests}"
    elif cost is not None:
        spent, per, of = cost.epoch_s, "epoch", f" of {cost.examples:,} examples"
    elif pace.samples:
        spent, per = pace.step_s * SAMPLES / pace.samples, f"{SAMPLES:,} samples"
    else:
        spent, per = pace.step_s * SAMPLES, f"{SAMPLES:,} optimizer steps"
    whole = f"{format_duration(spent)} per {per}{of}"
    time = f"{whole}, {step}" if run is not None else f"{step}, {whole}"
    money = f"unknown: {UNPRICED}"
    if hourly is not None:
        dated = f" (price of {gpu.price_date})" if gpu.price_date else ""
        money = (
            f"{usd_text(spent / 3600 * hourly)} USD per {per}, at {hourly:.3g} USD per hour{dated}"
        )
    return [("speed", _speed(pace)), ("time", time), ("cost", money)]


def _speed(pace: Pace) -> str:
    rates = []
    if pace.samples:
        rates.append(f"{significant(pace.samples / pace.step_s)} samples/s")
    if pace.tokens:
        text = f"{significant(pace.tokens / pace.step_s)} tokens/s"
        if pace.ends_s:
            low, high = (pace.tokens / end for end in reversed(pace.ends_s))
            text += f" (90 %: {format_range(low, high, significant)})"
        rates.append(text)
    elif pace.ends_s:
        low, high = pace.ends_s
        rates.append(f"90 %: {format_range(low, high, format_duration)} per step")
    rates += [f"MFU {pace.mfu:.0%}"] if pace.mfu is not None else []
    return ", ".join(rates)


def usd_text(amount: float) -> str:
    """An amount of money: cents, or two digits of what is less than a dollar."""
    return f"{amount:,.2f}" if amount >= 1 else significant(amount, 2)


def source_text(how: str, versions: Mapping[str, str]) -> str:
    """The sources of an answer. CUDA is named where a program ran, whose libraries aren't known."""
    names = ("torch", "transformers" if "transformers" in versions else "CUDA")
    first = {name: versions[name] for name in names if name in versions}
    return "; ".join(filter(None, (how, versions_text(first))))


def with_more(source: str, more: int = 0) -> str:
    """The sources, and the option that shows the `more` notes which are left out."""
    notes = f"{more} more note{'s' * (more != 1)}" if more else "more"
    return f"{source}; {notes}: --verbose"


def with_details(fields: Iterable[Field], details: list[Field]) -> list[Field]:
    """The details of an answer, then those of its fields that they do not tell."""
    told = {label for label, text in details if text}
    return [*details, *(field for field in fields if field[0] not in told)]


def fields_dict(fields: Iterable[Field]) -> list[dict[str, str]]:
    """An answer's fields as JSON: what `tuner mcp` says of them."""
    return [{"label": label, "text": text} for label, text in fields if text]


def versions_text(versions: Mapping[str, str]) -> str:
    """The releases in one line, without the suffixes of builds."""
    return ", ".join(f"{name} {text.partition('+')[0]}" for name, text in versions.items())


def field_lines(fields: Iterable[tuple[str, str]], *, most: int = 2) -> list[str]:
    """Fields of one line each, settings and notes of up to `most`; --verbose has the rest.

    Numbers, and a command in a note, are whole.
    """
    shown: list[str] = []
    for label, value in fields if most > 0 else ():
        longest = most if label in (SETTINGS, NOTE, READ_AS) else 1
        lines = textwrap.wrap(
            printable(value),
            max(20, width() - 8),
            max_lines=None if label in _WHOLE or "pip install" in value else longest,
            placeholder=" ...",
            break_long_words=False,
            break_on_hyphens=False,
        )
        for number, line in enumerate(lines):
            shown.append(painted(f"{'' if number else label:<8}", dim=True) + line)
    return shown


# -- differences --------------------------------------------------------------------------------

_HUNK = re.compile(r"@@ -(\d+)")
_CELL = re.compile(r"cell \d+")
_WORD = re.compile(r"[^\s,]*[\s,]*")


def difference_lines(difference: str, room: int) -> list[str]:
    """The changed lines of a unified diff in the width of the screen, all that change.

    In more than `room` lines their places are left out.
    """
    hunks = _hunks(difference)
    lines = [line for place, changed in hunks for line in (f" {place}", *changed)]
    if len(lines) > room:
        lines = [line for line in lines if not line.startswith(" ")]
    colours = {"-": "red", "+": "green"}
    return [painted(printable(line), fg=colours.get(line[0])) for line in lines]


def least_lines(difference: str) -> int:
    """The lines that a difference takes: those that change, and where they stand in a notebook."""
    hunks = _hunks(difference)
    return sum(len(changed) + place.startswith("cell ") for place, changed in hunks)


def _hunks(difference: str) -> list[tuple[str, list[str]]]:
    """The place of each hunk ("train.py:20", "cell 4, line 7"), and its changed lines, dedented."""
    hunks: list[tuple[str, list[str]]] = []
    path, number, is_open = "", 0, False
    for line in difference.splitlines():
        if line.startswith("--- "):
            path = line[4:]
        elif found := _HUNK.match(line):
            number, is_open = int(found[1]), False
        elif line.startswith(("+++ ", "\\")):
            continue
        elif line.startswith(("-", "+")):
            at = f"{path}, line {number}" if _CELL.fullmatch(path) else f"{path}:{number}"
            place = "command" if line[1:3] == "$ " else at
            if not is_open or (place == "command" != hunks[-1][0]):
                hunks.append((place, []))
                is_open = True
            hunks[-1][1].append(line)
            number += line[0] == "-"
        else:
            number, is_open = number + 1, False
    return [(place, _fitted(lines)) for place, lines in hunks]


def _fitted(lines: Sequence[str]) -> list[str]:
    """Changed lines without their common indent; of long ones the words that change."""
    bare = textwrap.dedent("\n".join(line[1:] for line in lines)).split("\n")
    if max(map(len, bare)) < width():
        return [line[0] + text for line, text in zip(lines, bare, strict=True)]
    old, new = (
        [text for line, text in zip(lines, bare, strict=True) if line[0] == sign] for sign in "-+"
    )
    if len(old) == len(new):
        pairs = list(map(_differing, old, new))
        old, new = [one for one, _ in pairs], [one for _, one in pairs]
    signed = [*(("-", text) for text in old), *(("+", text) for text in new)]
    return [
        sign + part
        for sign, text in signed
        for part in textwrap.wrap(text, width() - 1, break_on_hyphens=False)
    ]


def _differing(one: str, other: str) -> tuple[str, str]:
    """Two texts with dots in place of what they share; the option of a changed word stays."""
    old, new = (_WORD.findall(text)[:-1] for text in (one, other))
    shown = "", ""
    for tag, start, end, begin, stop in SequenceMatcher(None, old, new, False).get_opcodes():
        parts = "".join(old[start:end]), "".join(new[begin:stop])
        if tag == "equal":
            last, after = old[end - 1], "".join(new[stop : stop + 1])
            same = f"... {last}" if after and "=" not in after else "... "
            parts = (same, same) if len(same) < len(parts[0]) else parts
        shown = shown[0] + parts[0], shown[1] + parts[1]
    return shown


def painted(text: str, **style: object) -> str:
    """`text` in colour on a terminal; as it is in a pipe and under NO_COLOR."""
    return click.style(text, **style) if is_coloured(sys.stdout) else text  # type: ignore[arg-type]
