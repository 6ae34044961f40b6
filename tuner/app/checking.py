"""Checks that a program fits on a GPU type, and finds a change that fits or is faster.

The program is run on an emulated GPU, or predicted from its settings: unchanged, and with changes
that keep the result of the training (its effective batch, adapters and lengths).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tuner.app.program_oracle import ProgramOracle, RunAnswer, Ways, ignored
from tuner.core.errors import TunerError, UnavailableError
from tuner.core.expressions import settings_text, show
from tuner.core.records import KnobValue, Verdict
from tuner.core.units import format_size
from tuner.emulator.emulation import FEW
from tuner.program.changes import Change, change
from tuner.program.edit.place import is_same
from tuner.program.settings import Setting
from tuner.searches.front import PAIR_ERROR

LEAST_GAIN = 0.02
"""Step times that differ by less than this share are about the same."""

CLEAR_GAIN = 1 - math.exp(-PAIR_ERROR)
"""A change of a program that fits is suggested if it saves more of the step time than this share:
less is within prediction error."""

NOT_TRIED = "a change was not tried: "
"""Begins a note on a change without an answer."""

SEGMENTS = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
"""A setting of PyTorch's allocator with which it keeps next to no free blocks."""

FAR = 4
"""Micro-batches up to this many times the program's own are tried for a straight line."""

Report = Callable[[str], None]
"""Called with a text about the next run."""

Answered = Callable[[RunAnswer, RunAnswer | None], None]
"""Called with `found` and `needed` of a `CheckedProgram`."""


@dataclass(frozen=True, slots=True)
class _CheckRun:
    """One run of the program, with `accumulation` micro-batches per step."""

    micro_batch: int
    checkpointing: bool | None
    accumulation: int
    found: RunAnswer

    def step_s(self, accumulation: int) -> float | None:
        """The step time with this many micro-batches per step; None when unknown."""
        time = self.found.time
        if time is None:
            return None
        again_s = (time.step_s - time.updating_s) * accumulation / self.accumulation
        return again_s + time.updating_s


@dataclass(frozen=True, slots=True)
class _BetterChange:
    """A change that fits. `step_s` is the time of an optimizer step with it."""

    change: Change
    found: RunAnswer = field(repr=False)
    step_s: float | None
    base_step_s: float | None

    @property
    def speedup(self) -> float | None:
        """The speed over that of the unchanged program; None when unknown."""
        if self.step_s is None or self.base_step_s is None:
            return None
        return self.base_step_s / self.step_s


@dataclass(frozen=True, slots=True)
class CheckedProgram:
    """The check of a program; every number is *emulated*, or every one is *predicted*.

    - `found` is the unchanged program; `needed` the same with more memory, if it ran out.
    - `settings` are those in its files and command; `ignored` says which have no effect.
    - `otherwise` are settings that train otherwise and fit, or a batch of the evaluation that does.
    - `suggestion` fits and trains the same model; it is faster, if the program fits.
    - `least_bytes` is the smallest device memory of all runs.
    - `notes` say why no better change was searched for.
    """

    found: RunAnswer
    needed: RunAnswer | None = None
    settings: Mapping[str, Setting] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    suggestion: _BetterChange | None = None
    least_bytes: int | None = None
    runs: int = 0
    notes: tuple[str, ...] = ()
    log_tail: str = ""
    otherwise: Ways = ()
    pinned: tuple[str, ...] = ()
    """Releases that the program's environment pins otherwise than the prediction has them."""
    with_pinned: tuple[str, ...] = ()
    """The words before `tuner` of a command that predicts with those."""

    @property
    def source(self) -> str:
        """The source of its numbers."""
        return self.found.source


def check_program(
    runs: ProgramOracle[Any],
    *,
    improve: bool = True,
    report: Report = lambda text: None,
    answered: Answered = lambda found, needed: None,
) -> CheckedProgram:
    """Ask for the unchanged program, then for a better change unless `improve` is false.

    `answered` is called as soon as the verdict is known. Raises `UnavailableError` when the program
    cannot be emulated.
    """
    report(f"{runs.doing} the program as it is")
    found: RunAnswer = runs.as_it_is()
    log_tail = runs.log_tail
    needed = None
    if found.ended == "oom":
        report("out of memory: running on a larger GPU to see what it needs")
        needed = runs.as_it_is(on_larger_gpu=True)
    answered(found, needed)
    base = needed or found
    notes: list[str] = []
    suggestion, least_bytes = None, None
    otherwise: Ways = ()
    with contextlib.suppress(UnavailableError):
        otherwise = runs.smaller_evaluation(base) if improve else ()
    # A change of device memory does not help a host that has too little.
    helps = _is_known(base) and not base.host_is_full and not otherwise
    helps = helps and not (found.fits and found.time is None)  # nothing says what is faster
    if improve and helps and (text := _in_segments(runs, base)):
        notes.append(text)
    if improve and helps:
        search = _Search(runs, base, notes, report)
        if search.is_possible:
            suggestion = search.best(fits=bool(found.fits))
            least_bytes = search.least_bytes
        if found.fits is False and suggestion is None:
            report("predicting other methods")
            otherwise = runs.other_methods(base)
    return CheckedProgram(
        found=found,
        needed=needed,
        settings=runs.settings,
        ignored=tuple(ignored(runs.settings, base, runs.given)),
        suggestion=suggestion,
        least_bytes=least_bytes,
        runs=runs.count,
        notes=tuple(notes),
        log_tail=log_tail,
        otherwise=otherwise,
    )


def _in_segments(runs: ProgramOracle[Any], base: RunAnswer) -> str:
    """A sentence on expandable segments where free blocks decide that the program does not fit."""
    lacking = base.used_bytes - base.budget.usable_bytes
    if base.memory is None or not 0 < lacking <= base.memory.free_bytes:
        return ""
    try:
        found = runs.with_environment(SEGMENTS)
    except TunerError:
        return ""
    [(name, value)], saved = SEGMENTS.items(), base.used_bytes - found.used_bytes
    fits = ", and it fits" if found.fits else ""
    return f"{name}={value} saves {format_size(saved)} of free blocks{fits}" if saved > 0 else ""


def _is_known(found: RunAnswer) -> bool:
    """True if another change can be told by the memory of this one: a bound that fits is a fit."""
    return found.fits is not None or found.is_upper_bound


@dataclass(slots=True)
class _Search:
    """Searches for the fastest change that fits, with a few runs for each way of checkpointing.

    Device memory and the time of a micro-step are straight lines over the micro-batch: two runs
    on a GPU with more memory give each. The best changes by these lines are then verified.
    """

    runs: ProgramOracle[Any]
    base: RunAnswer
    notes: list[str]
    report: Report
    micro_batch: int = 0
    accumulation: int = 0
    checkpointing: bool | None = None
    least_bytes: int | None = None
    _lines: dict[bool | None, list[_CheckRun]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.micro_batch = self._number("micro_batch") or 0
        self.accumulation = self._number("grad_accum") or 1
        found = self.base.settings.get("gradient_checkpointing")
        self.checkpointing = found if isinstance(found, bool) else None

    def _number(self, knob: str) -> int | None:
        setting = self.runs.settings.get(knob)
        for value in (self.base.settings.get(knob), setting.value if setting else None):
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
        return None

    @property
    def is_possible(self) -> bool:
        """True if the program has settings to change; notes say which are missing."""
        for knob in ("micro_batch", "grad_accum"):
            if self._can_change(knob):
                continue
            setting = self.runs.settings.get(knob)
            why = f"{setting.name} {setting.problem}" if setting else "the program does not set it"
            why = "--set says it" if knob in self.runs.given else why
            self.notes.append(f"no other {knob} was tried: {why}")
        if self.base.compares:
            self.notes.append(
                f"no other micro_batch was tried: {self.base.compares} takes all samples of a "
                "micro-batch together, so that another one trains another model"
            )
        if self.micro_batch == 0:
            self.notes.append("no change was tried: the micro-batch is not known")
            return False
        return bool(self._sizes) or len(self._ways) > 1

    @property
    def _sizes(self) -> list[int]:
        """The micro-batches that keep the effective batch, from small to large."""
        knobs = ("micro_batch", "grad_accum")
        if self.base.compares or not all(map(self._can_change, knobs)):
            return [self.micro_batch] if self.micro_batch else []
        batch = self.micro_batch * self.accumulation
        return [size for size in range(1, batch + 1) if batch % size == 0]

    @property
    def _ways(self) -> list[bool | None]:
        """The ways of checkpointing to try, the program's own first."""
        own = self.checkpointing
        can = own is not None and self._can_change("gradient_checkpointing")
        return [own, not own] if can else [own]

    def _can_change(self, knob: str) -> bool:
        """True if a value in the files counts: one that is given counts more."""
        return knob not in self.runs.given and self.runs.settings.can_change(knob)

    # -- runs -----------------------------------------------------------------------------------

    def best(self, *, fits: bool) -> _BetterChange | None:
        """The fastest change that fits; None without one that is clearly faster.

        A change of a program that fits must not be tight.
        """
        base = _CheckRun(self.micro_batch, self.checkpointing, self.accumulation, self.base)
        self._lines = {way: [] for way in self._ways}
        self._lines[self.checkpointing].append(base)
        self._look(fits=fits)
        base_step_s = base.step_s(self.accumulation)
        for size, way, promised_s in self._promising():
            if fits and base_step_s and promised_s and promised_s > base_step_s * (1 - CLEAR_GAIN):
                return None
            if (size, way) == (self.micro_batch, self.checkpointing):
                return None
            # A run on the larger GPU that stays below the memory of the real one is valid for both.
            known = [run for run in self._lines[way] if run.micro_batch == size]
            tried = known[:1] or self._run_all([(size, way)], on_larger_gpu=False)
            run = next((run for run in tried if run.found.fits), None)
            if run is None or (fits and run.found.verdict is not Verdict.FITS):
                continue
            step_s = run.step_s(self._rounds(size))
            if fits and base_step_s and step_s and step_s > base_step_s * (1 - CLEAR_GAIN):
                continue
            made = change(self.runs.settings, self._values(size, way))
            if "micro_batch" in made.values and self.base.settings.get("micro_batch") is None:
                self.notes.append(
                    "micro_batch: a loss that compares the samples of a batch (contrastive, "
                    "in-batch negatives) needs the old one"
                )
            return _BetterChange(made, run.found, step_s, base_step_s)
        return None

    def _look(self, *, fits: bool) -> None:
        """Two runs for each way of checkpointing; the program itself is one of them."""
        wanted = []
        for way, runs in self._lines.items():
            picked = {self._other_size(larger=fits)}
            if not runs:
                if not fits and not way:
                    continue  # without checkpointing it takes more still
                # Itself, and one that needs less where that may be too much.
                picked = {self.micro_batch, self._other_size(larger=fits and bool(way))}
            wanted += [(size, way) for size in sorted(picked - {r.micro_batch for r in runs})]
        for run in self._run_all(wanted, on_larger_gpu=True):
            self._lines[run.checkpointing].append(run)
        used = [run.found.used_bytes for runs in self._lines.values() for run in runs]
        self.least_bytes = min(used, default=None)

    def _other_size(self, *, larger: bool) -> int:
        """Another micro-batch not far from the program's own; its own if there is none."""
        near = [s for s in self._sizes if self.micro_batch < s <= FAR * self.micro_batch]
        below = [s for s in self._sizes if s <= self.micro_batch / 2]
        if larger and near:
            return near[-1]
        return below[-1] if below else near[0] if near else self.micro_batch

    def _run_all(
        self, wanted: Sequence[tuple[int, bool | None]], *, on_larger_gpu: bool
    ) -> list[_CheckRun]:
        """The runs that came far enough; notes name the others."""
        values = [self._values(size, way, few=True) for size, way in wanted]
        if not wanted:
            return []
        shown = "; ".join(map(settings_text, values))
        self.report(f"{self.runs.doing} it with {shown}")
        runs = []
        for (size, way), changed, answer in zip(
            wanted, values, self.runs.with_values(values, on_larger_gpu=on_larger_gpu), strict=True
        ):
            if isinstance(answer, TunerError):
                reasons = "; ".join(map(str, answer.problems)) or answer.message.partition("\n")[0]
                note: str | None = NOT_TRIED + reasons
            elif (note := self._inert(changed, answer)) is None and _is_known(answer):
                runs.append(_CheckRun(size, way, min(self._rounds(size), FEW), answer))
            if note is not None and note not in self.notes:
                self.notes.append(note)
        return runs

    def _inert(self, values: Mapping[str, KnobValue], found: RunAnswer) -> str | None:
        """A value that the run ignored: reading doesn't see how much of a batch a loop takes."""
        is_same_batch = bool(found.inputs) and set(found.inputs) == set(self.base.inputs)
        for knob, value in values.items():
            is_read = is_same(value, found.settings.get(knob, value))
            if not is_read or (knob == "micro_batch" and is_same_batch):
                return f"{knob}={show(value)} has no effect in this program"
        return None

    def _promising(self) -> list[tuple[int, bool | None, float | None]]:
        """Changes that fit by the lines, fastest first: (micro-batch, checkpointing, step time)."""
        found = []
        for way, runs in self._lines.items():
            for size in self._sizes:
                used = _on_line([(r.micro_batch, float(r.found.used_bytes)) for r in runs], size)
                if used is None or not self.base.budget.fits(used):
                    continue
                times = [(r.micro_batch, s) for r in runs if (s := r.step_s(1)) is not None]
                micro_s = _on_line(times, size)
                found.append((size, way, None if micro_s is None else micro_s * self._rounds(size)))
        fastest = min((s for _, _, s in found if s is not None), default=0.0)

        def order(one: tuple[int, bool | None, float | None]) -> tuple[Any, ...]:
            size, way, step_s = one
            # Of those that are about as fast, the smallest change.
            rank = math.inf if step_s is None else max(step_s, fastest * (1 + LEAST_GAIN))
            return rank, len(self._values(size, way)), -size

        return sorted(found, key=order)

    def _rounds(self, size: int) -> int:
        return self.micro_batch * self.accumulation // size

    def _values(self, size: int, way: bool | None, *, few: bool = False) -> dict[str, KnobValue]:
        """The settings to change; `few` limits accumulation to what peak memory depends on."""
        values: dict[str, KnobValue] = {}
        rounds = self._rounds(size)
        if few and not self.base.generates and self._can_change("grad_accum"):
            rounds = min(rounds, FEW)
        if size != self.micro_batch:
            values["micro_batch"] = size
        if rounds != self.accumulation:
            values["grad_accum"] = rounds
        if way is not None and way != self.checkpointing:
            values["gradient_checkpointing"] = way
        return values


def _on_line(points: Sequence[tuple[int, float]], at: int) -> float | None:
    """The value at `at` of the line through the outermost points; None without such a line."""
    if not points:
        return None
    (x0, y0), (x1, y1) = min(points), max(points)
    if x0 == x1:
        return y0 if at == x0 else None
    return y0 + (y1 - y0) * (at - x0) / (x1 - x0)
