"""The largest value of one setting of a program, or the largest model, that fits a GPU type.

Memory grows with each of these.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tuner.app.program_oracle import PredictedProgram, ProgramPredictions
from tuner.core.errors import InputError
from tuner.core.expressions import show
from tuner.core.records import KnobValue
from tuner.program.changes import Change, change
from tuner.space.models.catalogue import family_of, get_entry, resolve_config
from tuner.space.models.config_fields import configured_positions

MOST = {"micro_batch": 1 << 14, "max_length": 1 << 20, "lora_rank": 1 << 12}
"""Settings whose largest value is searched for, and the largest that is tried."""

DISTANCE = {"max_length": 64, "lora_rank": 8}
"""Only multiples of these are tried, as kernels want them; of other settings each value."""

MODEL = "model"
NAMES = (*MOST, MODEL)

Report = Callable[[str], None]


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
            except InputError as error:
                refused[number] = "; ".join(map(str, error.problems)) or error.message
        return number in found and found[number].prediction.fits

    start = highest(fits, start, len(values))
    value = values[start] if start >= 0 else None
    following = start + 1
    changed = None
    if value is not None and value != own and name != MODEL:
        changed = change(predictions.settings, {name: value})
    return Largest(
        name,
        own,
        value,
        found.get(start),
        values[following] if following < len(values) else None,
        found.get(following),
        changed,
        refused.get(following, ""),
        predictions.count,
    )


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
    most, distance = MOST[name], DISTANCE.get(name, 1)
    if name == "max_length":
        config = resolve_config(model).get_text_config().to_dict()
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
