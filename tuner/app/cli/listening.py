"""A search's plan and progress, printed while it runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tuner.app.listener import Compiling, Listener, Searching
from tuner.app.measuring import Predicting
from tuner.app.search.plan import SearchPlan, SkippedGpu
from tuner.app.search.supported import has_predictions
from tuner.core.expressions import all_of
from tuner.core.records import TrialRecord
from tuner.core.units import format_gib
from tuner.report.terminal.progress import compiling, reporting
from tuner.report.terminal.render import count, echo, print_fields
from tuner.report.terminal.verdict import versions_text
from tuner.searches.names import DEFAULT_SEARCHER
from tuner.trial.base import OUTCOME_LIBRARIES

if TYPE_CHECKING:
    from tuner.app.search.supported import SupportedSpace


class Printer(Listener):
    """Prints everything, on stderr where stdout is for JSON; warnings only where `quiet`."""

    def __init__(self, *, err: bool = False, quiet: bool = False) -> None:
        self._err = err
        self._quiet = quiet
        self._planned = 0

    def say(self, text: str) -> None:
        """A line."""
        if not self._quiet:
            echo(text, err=self._err)

    def warn(self, text: str) -> None:
        """A line on stderr."""
        echo(text, err=True)

    def note(self, text: str) -> None:
        """A field."""
        if not self._quiet:
            print_fields([("note", text)], err=self._err)

    def planned(self, plan: SearchPlan, known: tuple[TrialRecord, ...]) -> None:
        """The plan as fields; of a second GPU type those that are about it."""
        if not self._quiet:
            print_plan(plan, known, err=self._err, again=self._planned > 0)
            self._planned += 1

    def refused(self, refused: SkippedGpu) -> None:
        """A field named after the GPU type."""
        if not self._quiet:
            print_fields([refused.field], err=self._err)

    @contextlib.contextmanager
    def compiling(self) -> Iterator[Compiling]:
        """Lines, or one that is drawn over in a terminal."""
        with compiling(err=self._err, quiet=self._quiet) as report:
            yield report

    @contextlib.contextmanager
    def searching(self) -> Iterator[Searching]:
        """A live display in a terminal, lines elsewhere."""
        with reporting(err=self._err, quiet=self._quiet) as report:
            yield report


def print_plan(
    plan: SearchPlan, known: tuple[TrialRecord, ...], *, err: bool, again: bool = False
) -> None:
    """The space, the GPU, the limits of a search, and the source of its numbers.

    With `again`, only the fields of this GPU type.
    """
    target, options, part = plan.target, plan.options, plan.part
    gpu = target.gpu
    there = len(part.supported)
    # Near-ties are measured again with what is left of a budget that is larger.
    number = "all" if options.trials >= there else f"{options.trials} of"
    wanted = f"{number} {count(there)} configurations"
    searcher = f"{options.searcher}, seed {options.seed}"
    if options.searcher == DEFAULT_SEARCHER and not has_predictions(target.space, gpu):
        searcher += "; without predictions"
    to_try = ("to try", f"{wanted} ({searcher})")
    if isinstance(plan.trials_on, Predicting):
        to_try = ("predict", f"all {count(there)} configurations; the front is traced in full")
    common = [
        ("space", f"{target.space.name}: {target.space.description}".rstrip(": ")),
        ("model" if target.space.model else "trains", target.space.subject),
        ("for", ", ".join(objective.label for objective in plan.objectives)),
        ("at most", _limits_text(plan)),
        ("where", _where_text(plan)),
    ]
    print_fields(
        [
            *([] if again else common),
            ("GPU", f"{gpu.name}, {format_gib(gpu.memory_bytes)}, {_price_text(plan)}"),
            to_try,
            ("left out", _left_out_text(part)),
            ("headroom", f"{format_gib(plan.margin_bytes)} of memory to keep free (--headroom)"),
            ("known", _known_text(plan, known)),
            ("numbers", _numbers_text(plan)),
            ("releases", _releases_text(plan)),
        ],
        err=err,
    )
    echo(err=err)


def _limits_text(plan: SearchPlan) -> str:
    options = plan.options
    limits = {
        "{:g} GPU hours": options.gpu_hours,
        "{:g} USD": options.max_cost_usd,
    }
    texts = [text.format(value) for text, value in limits.items() if value is not None]
    if texts and plan.trial_device is not None and plan.trial_device.emulated:
        texts.append("of which emulated trials take nothing")
    return ", ".join(texts)


def _price_text(plan: SearchPlan) -> str:
    gpu = plan.target.gpu
    if gpu.price_usd_per_hour is None:
        return "price unknown (--price)"
    dated = f" ({gpu.price_date})" if gpu.price_date else ""
    return f"{gpu.price_usd_per_hour:g} USD per hour{dated}"


def _known_text(plan: SearchPlan, known: tuple[TrialRecord, ...]) -> str:
    alike = sum(map(plan.is_alike, known))
    what = "traces" if isinstance(plan.trials_on, Predicting) else "trials"
    return f"{alike} {what} from {plan.target.folder.journal}" if alike else ""


def _numbers_text(plan: SearchPlan) -> str:
    if isinstance(plan.trials_on, Predicting):
        return f"predicted, not measured: {plan.trials_on.why}"
    return plan.trials_on.text(plan.target.gpu)


def _releases_text(plan: SearchPlan) -> str:
    """The releases that predictions speak of."""
    if not isinstance(plan.trials_on, Predicting):
        return ""
    from tuner.predict.shipped import can_trace  # numpy

    text = versions_text({n: v for n, v in plan.versions.items() if n in OUTCOME_LIBRARIES})
    return text if can_trace() else f"{text}, of the timelines that come with tuner"


def _where_text(plan: SearchPlan) -> str:
    text = all_of(plan.all_conditions)
    floors = [floor for floor in plan.conditions if floor not in plan.options.where]
    if floors:
        name = plan.part.space.condition(floors[0]).names
        text += f" (floors of the space; --where '{min(name)} >= ...' sets others)"
    return text


def _left_out_text(part: SupportedSpace) -> str:
    if not part.left_out:
        return ""
    reasons = "; ".join(part.reasons)
    return f"{count(part.left_out)} configurations that the GPU cannot run: {reasons}"
