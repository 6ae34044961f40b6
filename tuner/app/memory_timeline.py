"""The memory of a search's recommendation over a step, traced once more for the report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tuner.app.plan import SearchPlan
from tuner.searches.best import BestTrial

if TYPE_CHECKING:
    from tuner.cost.memory_timeline import MemoryTimeline


def timeline_of(plan: SearchPlan, best: BestTrial) -> MemoryTimeline | None:
    """The timeline of `best`, in the stage that limits it; None where no model is known."""
    from tuner.predict.memory_timeline import trace_timeline
    from tuner.predict.predict import resolve_subject

    space = plan.part.space
    if not space.predictable:
        return None
    stages = space.stage_configurations(best.configuration)
    configuration = stages.get(best.evidence.limiting_stage or "", best.configuration)
    subject = resolve_subject(space.workload, space.predicted_model())
    return trace_timeline(subject, configuration, plan.target.gpu, profile=plan.profile)
