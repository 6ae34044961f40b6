"""Checks, emulates and tunes a program of the user's: for the commands and the Python API."""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tuner.app.checking import Answered, CheckedProgram, check_program
from tuner.app.device import can_emulate, find_gpu, is_cpu
from tuner.app.listener import quiet_libraries
from tuner.app.pinned import pinned_notes, with_pinned
from tuner.app.program_front import ProgramFront, predict_front
from tuner.app.program_oracle import PredictedProgram, ProgramPredictions, ProgramRuns
from tuner.core.errors import InputError, UnavailableError, UnsupportedError
from tuner.core.expressions import show
from tuner.core.gpu import Gpu
from tuner.core.records import KnobValue, parse_margin
from tuner.core.setup.schemas import SCHEMAS
from tuner.emulator import Machine
from tuner.emulator.build import unavailable
from tuner.emulator.emulation import Emulation
from tuner.program.changes import Change, change
from tuner.program.edit.source import PYTHON
from tuner.program.launch import read_launch, runnable
from tuner.program.program import Program, read_program
from tuner.program.settings import settings_of
from tuner.program.space_text import knobs_of, space_text
from tuner.program.trainer import Launch
from tuner.program.vocabulary import translate
from tuner.searches.options import Mode
from tuner.space.load import DEFAULT_WORKLOAD
from tuner.space.models.catalogue import entry_like, family_of, get_entry, resolve_config
from tuner.space.models.config_fields import configured_positions

LARGEST_TRIED = {"micro_batch": 1 << 14, "max_length": 1 << 20, "lora_rank": 1 << 12}
"""Settings whose largest value is searched for, and the largest that is tried."""

_MULTIPLES = {"max_length": 64, "lora_rank": 8}
"""Only multiples of these are tried, as kernels want them; of other settings each value."""

MODEL = "model"


@dataclass(frozen=True, slots=True)
class Largest:
    """The largest `value` of the setting `name` that fits, with its answer.

    - `own` is the program's own value, `change` makes `value` the program's own (None for a model
      or the program's own value).
    - `next_value` does not fit; None where no larger one was tried. `limit` says why it cannot be
      had, where memory is not the reason.
    - `value`, `found` and `change` are None where not even the smallest fits.
    """

    name: str
    own: KnobValue
    value: KnobValue | None
    found: PredictedProgram | None
    next_value: KnobValue | None
    next_found: PredictedProgram | None
    change: Change | None
    limit: str
    runs: int


def highest(fits: Callable[[int], bool], start: int, end: int) -> int:
    """The highest of 0 to `end` - 1 that fits, -1 if none does; what is below it fits too.

    Steps from `start` double until they are past it, and the rest is halved.
    """
    good, bad, step = -1, end, 1
    at = min(max(start, 0), end - 1)
    while bad - good > 1:
        if fits(at):
            good = at
        else:
            bad = at
        step *= 2
        if bad == end:
            at = min(good + step // 2, end - 1)
        elif good == -1:
            at = max(bad - step // 2, 0)
        else:
            at = (good + bad) // 2
    return good


def find_largest(
    predictions: ProgramPredictions, name: str, *, report: Report = lambda text: None
) -> Largest:
    """The largest value of the setting `name` that fits, predicted.

    Raises `InputError` for a program that cannot be predicted, or whose files do not let the
    setting be changed.
    """
    report(f"predicting the largest {name}")
    plan = predictions.plan(predictions.program)
    values = list(_values(name, plan.model))
    if name == MODEL:
        own: KnobValue = entry.id if (entry := get_entry(plan.model)) else plan.model
        start = values.index(own)
    elif name not in plan.settings:
        raise InputError(f"the program has no {name}: its largest value is not known")
    else:
        own = plan.settings[name]
        change(predictions.settings, {name: values[0]})  # it can be written
        start = bisect.bisect(values, own) - 1
    found: dict[int, PredictedProgram] = {}
    refused: dict[int, str] = {}

    def fits(number: int) -> bool:
        """True if the value of this number fits; a value that cannot be had does not."""
        if number not in found and number not in refused:
            ask = _of_model if name == MODEL else _predicted
            try:
                found[number] = ask(predictions, name, values[number])
            except (InputError, UnavailableError) as error:
                if not found and isinstance(error, UnavailableError):
                    raise
                refused[number] = "; ".join(map(str, error.problems)) or error.message
        return number in found and found[number].prediction.fits

    start = highest(fits, start, len(values))
    value = values[start] if start >= 0 else None
    following, changed = start + 1, None
    next_value = values[following] if following < len(values) else None
    if value is not None and value != own and name != MODEL:
        changed = change(predictions.settings, {name: value})
    known = (value, found.get(start), next_value, found.get(following), changed)
    return Largest(name, own, *known, refused.get(following, ""), predictions.count)


def _values(name: str, model: str) -> Iterator[KnobValue]:
    """The values to try, from small to large."""
    if name == MODEL:
        entries = family_of(model)
        if len(entries) < 2:
            raise InputError(
                f"no other model of the family of {model} is in the catalogue",
                hint="`tuner models` lists them; name one with --model",
            )
        yield from (entry.id for entry in entries)
        return
    most, distance = LARGEST_TRIED[name], _MULTIPLES.get(name, 1)
    if name == "max_length":
        entry = entry_like(model)  # needs no transformers
        config = entry.text_config if entry else resolve_config(model).get_text_config().to_dict()
        most = min(most, configured_positions(config) or most)
        distance = min(distance, most)
    yield from range(distance, most + 1, distance)


def _predicted(predictions: ProgramPredictions, name: str, value: KnobValue) -> PredictedProgram:
    after = change(predictions.settings, {name: value}).after
    plan = predictions.plan(after)
    if plan.settings.get(name) != value:
        raise InputError(f"{name}={show(value)} has no effect in this program")
    return predictions.predicted([(after, plan)])[0]


def _of_model(predictions: ProgramPredictions, _: str, model: KnobValue) -> PredictedProgram:
    other = dataclasses.replace(predictions, model=str(model), predictor=None)
    predictions.count += 1
    return other.as_it_is()


Report = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramOptions:
    """Options of `tuner check`, of which `--largest` and `tuner tune --predict` take the first.

    An emulated run comes, shortened, to its evaluation, its saving and its end; it does not fit if
    it takes more than `host_memory_bytes` of the host. Without `improve` no change is tried.
    A prediction tells the time of the training with `examples` in its data.
    """

    gpus: int | None = None
    margin: str | None = None
    model: str | None = None
    examples: int | None = None
    settings: Mapping[str, KnobValue] | None = None
    predict: bool = False
    timeout_s: float | None = None
    improve: bool = True
    host_memory_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.gpus is not None and self.gpus < 1:
            raise InputError("--gpus is 1 or more")
        if self.examples is not None and self.examples < 1:
            raise InputError("--examples is 1 or more")
        if self.host_memory_bytes is not None and self.predict:
            raise InputError("--host-memory is of an emulated run", hint="leave --predict out")

    @property
    def given(self) -> dict[str, KnobValue]:
        """The settings by tuner's names."""
        return translate(self.settings or {}, SCHEMAS[DEFAULT_WORKLOAD].terms)

    def predictions(self, program: Program, gpu: Gpu) -> ProgramPredictions:
        """The predictions of `program` with these options."""
        return ProgramPredictions(
            program,
            gpu,
            self.gpus,
            parse_margin(self.margin, gpu),
            model=self.model,
            given=self.given,
            examples=self.examples,
        )


def check(
    program: Sequence[str],
    gpu: Gpu,
    options: ProgramOptions,
    report: Report = lambda text: None,
    answered: Answered = lambda found, needed: None,
) -> CheckedProgram:
    """Run `program` on an emulated `gpu`; predict it if asked to, or where emulation fails.

    `answered` is called as soon as the verdict is known, before changes are tried.
    """
    margin = parse_margin(options.margin, gpu)
    told: Any = {"improve": options.improve, "report": report, "answered": answered}
    missing: UnavailableError | None = None
    of_predictions = (options.model, options.examples)
    if not (options.predict or options.given or any(one is not None for one in of_predictions)):
        try:
            read = read_program(program)
            how = (options.gpus, margin, options.timeout_s, True, options.host_memory_bytes)
            with ProgramRuns(read, gpu, *how) as runs:
                return check_program(runs, **told)
        except UnavailableError as error:
            missing = error
    read = read_program(program, is_run=False)
    try:
        with quiet_libraries():
            predictions = options.predictions(read, gpu)
            found = check_program(predictions, **told)
    except UnsupportedError as error:
        if missing is not None:
            text = f"{missing.message}; without it: {error.message}"
            kind = type(error) if error.problems else UnsupportedError  # a loop needs the emulator
            raise kind(text, hint=missing.hint, problems=error.problems) from error
        lacking = unavailable() if error.hint and not error.problems else None
        if lacking is not None:
            hint = f"{lacking}; then {error.hint}"  # which would be refused as it is
            raise type(error)(error.message, hint=hint) from error
        raise
    notes = (f"not emulated: {missing.message} ({missing.hint})",) if missing else ()
    return replace(
        found,
        notes=(*found.notes, *notes),
        pinned=pinned_notes(predictions.wanted, predictions.plan(read)),
        with_pinned=with_pinned(predictions.wanted),
    )


def largest(
    program: Sequence[str],
    gpu: Gpu,
    name: str,
    options: ProgramOptions,
    report: Report = lambda text: None,
) -> Largest:
    """The largest value of `name` (of `LARGEST_TRIED`, or "model") with which `program` fits.

    It is predicted. Raises `InputError` as `find_largest` does.
    """
    if name in options.given:
        raise InputError(f"--set {name} and --largest {name} contradict each other")
    read = read_program(program, is_run=False)
    with quiet_libraries():
        return find_largest(options.predictions(read, gpu), name, report=report)


def tune_predicted(
    program: Sequence[str], gpu: Gpu, options: ProgramOptions, knobs: Sequence[str] = ()
) -> ProgramFront:
    """Predict the front of the settings of `program`; see `predict_front`."""
    read = read_program(program, is_run=False)
    with quiet_libraries():
        return predict_front(options.predictions(read, gpu), knobs)


def emulate(
    program: Sequence[str],
    gpu: Gpu,
    *,
    gpus: int | None = None,
    steps: int = 3,
    margin: str | None = None,
    all_ranks: bool = False,
    **how: Any,
) -> Emulation:
    """Run a script, a notebook or any command on an emulated `gpu`; `how` as in `Machine.run`."""
    if steps < 0 or (gpus is not None and gpus < 1):
        raise InputError("--steps is 0 or more, and --gpus 1 or more")
    launch = Launch()
    with contextlib.suppress(InputError):  # whatever it is, it is started as it stands
        launch = read_launch(read_program(program, is_run=False))
    machine = Machine(
        gpu,
        gpus or launch.processes or 1,
        machines=launch.machines,
        all_ranks=all_ranks,
        margin_fraction=parse_margin(margin, gpu),
    )
    if Path(program[0]).suffix not in PYTHON:
        return machine.run(program, steps=steps, **how)
    with runnable(read_program(program)) as command:
        return machine.run(command, steps=steps, **how)


def write_space(  # noqa: PLR0913 - one argument for each option
    program: Sequence[str],
    gpu_name: str,
    *,
    gpu_memory: int | None,
    mode: Mode,
    margin: str | None = None,
    knobs: Sequence[str] = (),
    path: Path | None = None,
    report: Report = lambda text: None,
) -> Path:
    """Write the search space of a program's settings. Returns its path.

    Raises `InputError` for a program that reaches no step.
    """
    gpu = find_gpu(gpu_name, memory_bytes=gpu_memory)
    if mode is Mode.EMULATE and is_cpu(gpu):
        raise InputError(
            "a processor is not emulated", hint="--mode measure runs the trials on this one"
        )
    read = read_program(program)
    path = path or Path(f"tune-{Path(read.main or program[0]).stem}.yaml")
    if path.suffix not in (".yaml", ".yml"):
        raise InputError(f"--space {str(path)!r} is not a .yaml file")
    settings = settings_of(read)
    arrived: Mapping[str, KnobValue] = {}
    fits = True
    if mode is Mode.EMULATE or can_emulate(gpu):
        report("running the unchanged program ...")
        with ProgramRuns(read, gpu, margin_fraction=parse_margin(margin, gpu)) as runs:
            base = runs.as_it_is(on_larger_gpu=True)
        if base.steps == 0:
            why = f": {base.error.message}" if base.error else ""
            raise InputError(
                f"the program reached no optimizer step{why}",
                hint=f"`tuner check` shows why; its last lines: {runs.log_tail[-600:].strip()}",
            )
        arrived, fits = base.settings, bool(base.fits)
    else:
        report("settings are read from its files: nothing was run to see which take effect")
    found = knobs_of(settings, arrived, knobs)
    text = space_text(path.stem, program, settings, arrived, found, fits=fits)
    if path.exists() and path.read_text(encoding="utf-8") != text:
        search = ("tuner", "search", "--space", str(path), "--gpu", gpu_name)
        raise InputError(
            f"{path} exists with other content",
            hint=f"search it with `{shlex.join(search)}`, or name another with --space",
        )
    path.write_text(text, encoding="utf-8")
    return path
