"""Reviews the programs that a branch changes: what they take now, and what they took at its base.

Settings are read and predicted; nothing of the programs is run.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tuner.app.changed_files import Changes
from tuner.app.changed_programs import ReadProgram, below, changed_programs, paths_of
from tuner.app.checking import check_program
from tuner.app.listener import quiet_libraries
from tuner.app.other_stack import stack_notes
from tuner.app.program_oracle import PredictedProgram, ProgramPredictions
from tuner.app.project import Project
from tuner.core.errors import (
    EXIT_NOTHING_FITS,
    EXIT_UNKNOWN,
    InputError,
    TunerError,
    UnsupportedError,
    missing_extra,
    verdict_code,
)
from tuner.core.expressions import show
from tuner.core.gpu import Gpu
from tuner.core.records import Configuration, KnobValue, Verdict, parse_margin
from tuner.core.setup.schemas import SCHEMAS
from tuner.core.units import GIB
from tuner.predict.predict import Traces
from tuner.predict.predictor import PredictionJob, Predictor
from tuner.predict.releases import predicted_stack
from tuner.program.planned import WORKLOAD, named_model
from tuner.program.program import Program, read_program
from tuner.program.setting import NAMES, Setting
from tuner.program.settings import find_settings
from tuner.program.vocabulary import said_in_own_words

_ADVICE = {
    "pass --model": "name it in [tool.tuner.models]",
    "pass it, e.g. --set ": "name it in [tool.tuner.set], e.g. ",
}
"""Advice for the command line, and that for a review, which has the settings of its project."""

_DERIVED = ("effective_batch",)
"""Values of a configuration that others decide."""


@dataclass(frozen=True, slots=True)
class ChangedSetting:
    """A setting with another value than at the base (None: not set), and the line it stands on.

    `more_bytes` is the device memory that it alone adds; None where that is not known.
    """

    name: str
    before: KnobValue | None
    after: KnobValue | None
    path: str
    line: int
    more_bytes: int | None = None

    def __str__(self) -> str:
        values = ("unset" if value is None else show(value) for value in (self.before, self.after))
        return f"{self.name} {' -> '.join(values)} at {self.path}:{self.line}"


@dataclass(frozen=True, slots=True)
class OnGpu:
    """A program on one GPU type, now and at the base; None where it is not known.

    `refused` says why there is no prediction now, and `advice` what would bring one. `difference`
    is the change of its settings with which it fits, where it does not.
    """

    gpu: Gpu
    found: PredictedProgram | None
    before: PredictedProgram | None = None
    refused: str = ""
    advice: str = ""
    difference: str = ""

    @property
    def fits(self) -> bool | None:
        """The verdict; None where it is unknown."""
        return self.found.fits if self.found is not None else None

    @property
    def more_bytes(self) -> int | None:
        """The device memory that it takes more than at the base; None where one is not known."""
        if self.found is None or self.before is None:
            return None
        return self.found.used_bytes - self.before.used_bytes

    @property
    def outcome(self) -> str:
        """The verdict beside that of the base: "no longer fits rtx4090"."""
        before = self.before.fits if self.before is not None else None
        if self.found is None or self.fits is None:
            return f"unknown on {self.gpu.id}"
        tight = self.found.verdict is Verdict.TIGHT
        in_margin = tight and self.found.used_bytes <= self.found.prediction.budget.limit_bytes
        if self.fits:
            words = "fits"
        elif before is None:
            words = "does not fit"
        else:
            words = "no longer fits" if before else "still does not fit"
        if not self.fits and in_margin:
            return f"{words} {self.gpu.id} with its margin"
        now = " now" if self.fits and before is False else ""
        return f"{'likely ' if tight else ''}{words} {self.gpu.id}{now}"

    def to_dict(self) -> dict[str, Any]:
        """JSON types."""
        return {
            "gpu": self.gpu.id,
            "fits": self.fits,
            "verdict": str(self.found.verdict) if self.found is not None else "unknown",
            "outcome": self.outcome,
            "device_bytes": self.found.used_bytes if self.found is not None else None,
            "before_bytes": self.before.used_bytes if self.before is not None else None,
            "more_bytes": self.more_bytes,
            "refused": self.refused or None,
            "advice": self.advice or None,
            "difference": self.difference or None,
        }


@dataclass(frozen=True, slots=True)
class ReviewedProgram:
    """One program on every GPU type; `settings` are those that changed, the largest first.

    `path` and `line` are its place without a setting. `notes` say what the numbers leave out.
    """

    command: str
    path: str
    line: int
    gpus: tuple[OnGpu, ...]
    settings: tuple[ChangedSetting, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def place(self) -> tuple[str, int]:
        """The path and the line of the finding."""
        first = self.settings[0] if self.settings else self
        return first.path, first.line

    def to_dict(self) -> dict[str, Any]:
        """JSON types."""
        path, line = self.place
        names = ChangedSetting.__dataclass_fields__
        return {
            "program": self.command,
            "path": path,
            "line": line,
            "settings": [{name: getattr(one, name) for name in names} for one in self.settings],
            "gpus": [one.to_dict() for one in self.gpus],
            "notes": list(self.notes),
        }


@dataclass(frozen=True, slots=True)
class Review:
    """The programs that changed since `base`, and why other changed files are `skipped`."""

    base: str
    programs: tuple[ReviewedProgram, ...]
    skipped: Mapping[str, str] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """1 if a program does not fit one of the GPU types, 4 if one is unknown, else 0."""
        codes = {verdict_code(on.fits) for program in self.programs for on in program.gpus}
        return next((code for code in (EXIT_NOTHING_FITS, EXIT_UNKNOWN) if code in codes), 0)

    def to_dict(self) -> dict[str, Any]:
        """JSON types."""
        return {
            "source": "predicted",
            "base": self.base,
            "programs": [program.to_dict() for program in self.programs],
            "skipped": dict(self.skipped),
            "versions": predicted_stack(),
        }


def review(
    changes: Changes,
    project: Project,
    gpus: Sequence[Gpu],
    *,
    report: Callable[[str], None] = lambda text: None,
) -> Review:
    """The programs that `changes` concern on each of `gpus`, compared with the base."""
    root = Path(os.path.relpath(changes.root))
    skipped: dict[str, str] = {}
    wanted = changed_programs(changes, project, root, skipped)
    reviewer = _Reviewer(changes, project, gpus, root)
    found = []
    if wanted:
        with quiet_libraries(), changes.base_folder() as base:
            for words, program in wanted.items():
                report(f"predicting {shlex.join(words)}")
                found.append(reviewer.reviewed(words, program, base))
    return Review(changes.base, tuple(found), skipped)


# -- one program --------------------------------------------------------------------------------


@dataclass(slots=True)
class _Reviewer:
    changes: Changes
    project: Project
    gpus: Sequence[Gpu]
    root: Path
    predictors: dict[str, Predictor] = field(default_factory=dict)

    def reviewed(self, words: tuple[str, ...], program: ReadProgram, base: Path) -> ReviewedProgram:
        """The program that `words` start, beside that of the folder `base`."""
        command = shlex.join(words)
        if isinstance(program, InputError):
            refused = tuple(OnGpu(gpu, None, refused=_reasons(program)) for gpu in self.gpus)
            return ReviewedProgram(command, words[0], 1, refused)
        path = next(paths_of(program, self.root), words[0])
        before: Program | None = None
        with contextlib.suppress(InputError):  # it is new, or could not be read
            old = [self.changes.before.get(word, word) for word in words]
            before = read_program(old, base, is_run=False)
        asked = [(gpu, self._asked(program, gpu, path)) for gpu in self.gpus]
        old_asked = [
            self._asked(before, gpu, path) if before is not None else None for gpu in self.gpus
        ]
        found = tuple(
            self._on(gpu, predictions, old)
            for (gpu, predictions), old in zip(asked, old_asked, strict=True)
        )
        places = _Places(program, before, self.root, base, self.changes.before)
        settings: tuple[ChangedSetting, ...] = ()
        both = next(((o, a) for o, (_, a) in zip(found, asked, strict=True) if o.before), None)
        if both is not None:
            settings = self._with_shares(tuple(places.settings(both[0], base)), *both)
        first = next((one.found for one in found if one.found), None)
        notes = _notes(program, first) if first is not None else ()
        return ReviewedProgram(command, *places.first(path), found, settings, notes)

    def _asked(self, program: Program, gpu: Gpu, path: str) -> ProgramPredictions:
        """The predictions of a program; the project's model and settings fill what it omits."""
        margin = parse_margin(self.project.margin, gpu)
        model, own = self.project.model_of(path), None
        given = said_in_own_words(self.project.settings_of(path), SCHEMAS[WORKLOAD].terms)
        if given:
            named = find_settings(program)
            given = {n: v for n, v in given.items() if n not in named or named[n].value is None}
        if model:
            with contextlib.suppress(InputError):  # which the prediction raises again
                own = named_model(program)
        return ProgramPredictions(program, gpu, None, margin, given, None if own else model)

    def _on(self, gpu: Gpu, asked: ProgramPredictions, before: ProgramPredictions | None) -> OnGpu:
        try:
            found = self._predicted(asked)
        except TunerError as error:
            # The way out of what can't be predicted is a run on this machine, with its paths.
            advice = "" if isinstance(error, UnsupportedError) else _of_project(error.hint or "")
            return OnGpu(gpu, None, refused=_reasons(error), advice=advice)
        old = None
        with contextlib.suppress(TunerError):  # then there is nothing to compare with
            if before is not None:
                old = self._predicted(before)
        difference = ""
        with contextlib.suppress(TunerError), _missing_named():  # then nothing is suggested
            if found.fits is False and (better := check_program(asked).suggestion):
                difference = better.change.difference
        return OnGpu(gpu, found, old, difference=difference)

    def _predicted(self, asked: ProgramPredictions) -> PredictedProgram:
        with _missing_named():
            plan = asked.plan(asked.program)
            if plan.model not in self.predictors:
                job = PredictionJob(WORKLOAD, plan.model)
                self.predictors[plan.model] = Predictor(job, traces=Traces())
            asked.predictor = self.predictors[plan.model]
            (found,) = asked.predicted([(asked.program, plan)])
            return found

    def _with_shares(
        self, settings: tuple[ChangedSetting, ...], on: OnGpu, asked: ProgramPredictions
    ) -> tuple[ChangedSetting, ...]:
        """Several settings with the memory that each alone adds to the base, the largest first."""
        assert on.found is not None
        assert on.before is not None
        knobs = on.before.plan.configuration
        if len(settings) < 2 or on.before.plan.model != on.found.plan.model:
            return settings
        shared = []
        for one in settings:
            values = {**knobs, one.name: on.found.plan.configuration.get(one.name)}
            alone = Configuration({n: v for n, v in values.items() if v is not None})
            more = None
            with contextlib.suppress(TunerError), _missing_named():  # it alone isn't predictable
                plan = replace(on.found.plan, configuration=alone)
                (found,) = asked.predicted([(asked.program, plan)])
                more = found.used_bytes - on.before.used_bytes
            shared.append(replace(one, more_bytes=more))
        return tuple(sorted(shared, key=lambda one: -(one.more_bytes or 0)))


def _reasons(error: TunerError) -> str:
    """All problems with their places, or the message where none is listed."""
    return _of_project("; ".join(map(str, error.problems)) or error.message)


def _of_project(text: str) -> str:
    """A text in which advice for the command line is that for a project."""
    for option, advice in _ADVICE.items():
        text = text.replace(option, advice)
    return text


@contextlib.contextmanager
def _missing_named() -> Iterator[None]:
    """Raise `UnavailableError` for a library of the extra that is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise missing_extra(error) or error from error


def _notes(program: Program, found: PredictedProgram) -> tuple[str, ...]:
    plan = found.plan
    left_out = (f"not modelled: {', '.join(plan.left_out)}",) if plan.left_out else ()
    priced = (found.not_priced,) if found.not_priced else ()
    return (*stack_notes(program, plan), *plan.findings, *left_out, *priced)


# -- places of changes --------------------------------------------------------------------------


@dataclass(slots=True)
class _Places:
    """The lines of a program on which it differs from `before`, its base."""

    program: Program
    before: Program | None
    root: Path
    base: Path
    renamed: Mapping[str, str]
    """The path at the base of each renamed file."""
    _hunks: list[tuple[str, int, str]] = field(init=False)
    """Path, first line now, and the text before and now of each change."""

    def __post_init__(self) -> None:
        before = self.before.sources if self.before is not None else ()
        old = {below(source.path, self.base): _lines(source.data) for source in before}
        self._hunks = []
        for source in self.program.sources:
            path = below(source.path, self.root)
            lines, was = _lines(source.data), old.get(self.renamed.get(path, path))
            if was is None:
                continue
            for kind, i1, i2, j1, j2 in difflib.SequenceMatcher(
                None, was, lines, autojunk=False
            ).get_opcodes():
                if kind == "equal":
                    continue
                now = list(enumerate(lines[j1:j2], j1 + 1))
                gone = [(min(j1 + 1, len(lines)), line) for line in was[i1:i2]]
                self._hunks += [(path, number, line) for number, line in (*now, *gone)]

    def first(self, path: str) -> tuple[str, int]:
        """The first place that changed, in `path` if it did; else its beginning."""
        places = [hunk[:2] for hunk in self._hunks]
        return next((place for place in places if place[0] == path), (*places, (path, 1))[0])

    def settings(self, on: OnGpu, base: Path) -> Iterator[ChangedSetting]:
        """The settings that differ, with their places."""
        assert on.found is not None
        assert on.before is not None
        old, new = (
            _values(one, folder) for one, folder in ((on.before, base), (on.found, self.root))
        )
        written = find_settings(self.program)
        for name in (*new, *(old.keys() - new.keys())):
            if old.get(name) != new.get(name):
                place = self._of(name, written.get(name), new.get(name))
                yield ChangedSetting(name, old.get(name), new.get(name), *place)

    def _of(self, name: str, setting: Setting | None, value: KnobValue | None) -> tuple[str, int]:
        """The place of a setting: where it is written, else the changed line that looks like it."""
        if setting is not None and setting.source is not None and setting.location is not None:
            line = setting.source.file_line(setting.location)
            return below(setting.source.path, self.root), line
        words = [name, *NAMES.get(name, ()), *([] if isinstance(value, bool) else [show(value)])]
        pattern = re.compile("|".join(map(re.escape, words)))
        matching = (hunk for hunk in self._hunks if pattern.search(hunk[2]))
        chosen = next(matching, None)
        return chosen[:2] if chosen else self.first(next(paths_of(self.program, self.root), ""))


def _lines(data: bytes) -> list[str]:
    return data.decode("utf-8", "replace").splitlines()


def _values(found: PredictedProgram, folder: Path) -> dict[str, KnobValue]:
    """The trainer, model and configuration, which decide a prediction."""
    model = found.plan.model
    if Path(model).is_dir():
        model = below(Path(model), folder)
    values = {name: v for name, v in found.plan.configuration.items() if name not in _DERIVED}
    return {"model": model, "trainer": found.plan.trainer, **values}


def delta_text(size_bytes: int) -> str:
    """A difference of memory: "+2.1 GiB"."""
    return f"{size_bytes / GIB:+.1f} GiB"
