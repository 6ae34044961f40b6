"""Verifies the recommendation of a predicted search by one training on an emulated GPU.

A verification changes none of the predicted numbers. If it does not fit, the configuration is
excluded, and the next best is verified.
"""

from __future__ import annotations

import dataclasses
import math
import os
import time
import uuid
from collections.abc import Sequence

from tuner.app.listener import Listener
from tuner.app.measuring import Predicting, emulating
from tuner.app.search.plan import SearchPlan
from tuner.app.target import comparable, with_margin
from tuner.core.errors import TunerError
from tuner.core.records import Source, Status
from tuner.core.setup.distributed_knobs import most_gpus_per_trial
from tuner.emulator.toolchain import unavailable
from tuner.searches.best import BestTrial
from tuner.searches.journal import JournalWriter
from tuner.searches.request import SearchOutcome
from tuner.searches.view import build_view
from tuner.trial.base import Instructions

MOST_TRIES = 3
"""At most this many of the best are verified: more failures have another reason."""

BEGIN_WITHIN_S = 300.0
"""In a search of many GPU types, later verifications are skipped after this time."""

SWITCH = "TUNER_VERIFY"
"""Environment variable that turns verification off with the value "no"."""


def verify_all(
    done: Sequence[tuple[SearchPlan, JournalWriter, SearchOutcome | None]],
    listener: Listener,
    began_s: float,
) -> None:
    """Verify the recommendation of each predicted search, and write that into its journal.

    Does nothing where GPUs cannot be emulated. Ctrl-C ends the verification only. The time limit of
    the search, which began at `began_s`, holds here too.
    """
    wanted = [
        (plan, writer) for plan, writer, result in done if result and _is_wanted(plan, result)
    ]
    if not wanted or unavailable() is not None:
        return
    started_s = time.monotonic()
    try:
        for plan, writer in wanted:
            if time.monotonic() - started_s > BEGIN_WITHIN_S:
                listener.warn("the other GPU types are not verified: that would take long")
                return
            limit_s = plan.options.time_limit_s
            until_s = math.inf if limit_s is None else began_s + limit_s
            _verify(plan, writer, listener, until_s)
    except KeyboardInterrupt:
        listener.warn("the verification was interrupted; the same command begins it again")


def _is_wanted(plan: SearchPlan, result: SearchOutcome) -> bool:
    return (
        plan.options.verify
        and os.environ.get(SWITCH, "").lower() != "no"
        and isinstance(plan.trials_on, Predicting)
        and plan.part.space.predictable
        and result.failure is None
        and not result.interrupted
    )


def _verify(plan: SearchPlan, writer: JournalWriter, listener: Listener, until_s: float) -> None:
    """Verify the best, and the next best if it does not fit, at most `MOST_TRIES` times."""
    gpu, space, run_id = plan.target.gpu, plan.part.space, uuid.uuid4().hex[:8]
    for number in range(MOST_TRIES):
        best = _best(plan)
        if best is None or best.source is not Source.PREDICTED or best.record.verified_by:
            return
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            listener.warn("not verified: --time-limit is over")
            return
        listener.say(
            f"verifying the recommendation on an emulated {gpu.name}, seconds to two minutes "
            "(--no-verify leaves it out)"
        )
        try:
            where = emulating(gpu, gpus=most_gpus_per_trial(space.choices, space.fixed))
            how = where.options(timeout_s=None if math.isinf(left_s) else left_s)
            trial = (space, best.configuration, best.record.outcome.prediction)
            outcome = where.run(plan.job, how, trial, Instructions(verify=True))
        except TunerError as error:
            listener.warn(f"not verified: {error}")
            return
        writer.append(
            plan.record(
                best.configuration,
                dataclasses.replace(outcome, prediction=best.record.outcome.prediction),
                trial_id=f"{run_id}-{number:03d}",
                searcher=plan.options.searcher,
                emulated_device=where.names[0],
                margin_bytes=plan.margin_bytes,
                verification=True,
            )
        )
        if outcome.status is Status.INTERRUPTED:
            return


def _best(plan: SearchPlan) -> BestTrial | None:
    """The current recommendation under the conditions of the search."""
    records = comparable(plan.target.folder.read_all(), plan.target)
    return build_view(
        [with_margin(record, plan.margin_bytes) for record in records],
        plan.facts,
        plan.target.gpu,
        where=plan.meets,
        conditions=plan.all_conditions,
    ).best
