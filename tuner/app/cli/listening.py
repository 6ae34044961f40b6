"""A search's plan and progress, printed while it runs."""

from __future__ import annotations

from contextlib import AbstractContextManager

from tuner.app.listener import Compiling, Listener, Searching
from tuner.app.measuring import Predicting
from tuner.app.search.plan import SearchPlan, SkippedGpu
from tuner.app.search.supported import has_predictions
from tuner.core.expressions import all_of
from tuner.core.records import TrialRecord
from tuner.core.units import format_gib
from tuner.predict.shipped import can_trace
from tuner.report.terminal.progress import compiling, reporting
from tuner.report.terminal.render import count, echo, print_fields
from tuner.report.terminal.verdict import versions_text
from tuner.searches.options import DEFAULT_SEARCHER
from tuner.trial.base import OUTCOME_LIBRARIES


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
            text = f"not searched: {refused.reason}"
            print_fields([(refused.target.gpu.id, text)], err=self._err)

    def compiling(self) -> AbstractContextManager[Compiling]:
        """Lines, or one that is drawn over in a terminal."""
        return compiling(err=self._err, quiet=self._quiet)

    def searching(self) -> AbstractContextManager[Searching]:
        """A live display in a terminal, lines elsewhere."""
        return reporting(err=self._err, quiet=self._quiet)


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
    numbers, releases, alike = "", "", sum(map(plan.is_alike, known))
    if isinstance(plan.trials_on, Predicting):
        to_try = ("predict", f"all {count(there)} configurations; the front is traced in full")
        numbers = f"predicted, not measured: {plan.trials_on.why}"
        releases = versions_text({n: v for n, v in plan.versions.items() if n in OUTCOME_LIBRARIES})
        releases += "" if can_trace() else ", of the timelines that come with tuner"
    else:
        numbers = plan.trials_on.text(gpu)
    price = "price unknown (--price)"
    if gpu.price_usd_per_hour is not None:
        dated = f" ({gpu.price_date})" if gpu.price_date else ""
        price = f"{gpu.price_usd_per_hour:g} USD per hour{dated}"
    where = all_of(plan.all_conditions)
    if floors := [floor for floor in plan.conditions if floor not in options.where]:
        name = min(part.space.condition(floors[0]).names)
        where += f" (minimums of the space; change with --where '{name} >= ...')"
    limits = {"{:g} GPU hours": options.gpu_hours, "{:g} USD": options.max_cost_usd}
    at_most = [text.format(value) for text, value in limits.items() if value is not None]
    if at_most and plan.trial_device is not None and plan.trial_device.emulated:
        at_most.append("of which emulated trials take nothing")
    common = [
        ("space", f"{target.space.name}: {target.space.description}".rstrip(": ")),
        ("model" if target.space.model else "trains", target.space.subject),
        ("for", ", ".join(objective.label for objective in plan.objectives)),
        ("at most", ", ".join(at_most)),
        ("where", where),
    ]
    what = "traces" if isinstance(plan.trials_on, Predicting) else "trials"
    left_out = f"{count(part.left_out)} configurations that the GPU cannot run: "
    print_fields(
        [
            *([] if again else common),
            ("GPU", f"{gpu.name}, {format_gib(gpu.memory_bytes)}, {price}"),
            to_try,
            ("left out", left_out + "; ".join(part.reasons) if part.left_out else ""),
            ("headroom", f"{format_gib(plan.margin_bytes)} of memory to keep free (--headroom)"),
            ("known", f"{alike} {what} from {target.folder.journal}" if alike else ""),
            ("numbers", numbers),
            ("releases", releases),
        ],
        err=err,
    )
    echo(err=err)
