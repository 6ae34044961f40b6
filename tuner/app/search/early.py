"""Begins a search while its space is being predicted: Ray starts, and the baseline is tried."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from tuner.app.device import CPU
from tuner.app.listener import Compiling, Listener
from tuner.app.measuring import Measuring
from tuner.app.search.plan import SearchPlan
from tuner.app.search.prepare import Predictors, baseline_of, may_fit, request_of
from tuner.core.records import Configuration, Prediction, TrialRecord
from tuner.searches.names import DEFAULT_SEARCHER
from tuner.searches.progress import Progress
from tuner.searches.request import SearchOutcome
from tuner.space import SearchSpace
from tuner.space.models.catalogue import get_entry

if TYPE_CHECKING:
    from tuner.app.predicting import Predicted, SpacePredictor
    from tuner.predict.compiling import Fork

LOOK_AGAIN_S = 0.2

SMALL_SHARE = 0.1
"""A baseline that is roughly estimated to need this share of the memory at most surely fits."""

DENSE = "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"
"""Fields of a dense text model's configuration that the rough estimate needs."""


def may_begin(plan: SearchPlan, known: Sequence[TrialRecord]) -> bool:
    """True if the first trial is the baseline whatever is predicted of the others.

    That is so in a new guided search with trials on this machine. A process that has imported
    PyTorch may have run a backward pass, after which its forks cannot trace.
    """
    trials_on, options = plan.trials_on, plan.options
    return (
        isinstance(trials_on, Measuring)
        and not trials_on.trial_device.emulated
        and options.address is None
        and options.searcher == DEFAULT_SEARCHER
        and plan.part.space.predictable
        and not plan.part.space.stages
        and any(first in plan.part.supported for first in baseline_of(plan.part.space))
        and options.trials > 1
        and not any(map(plan.is_alike, known))
        and "torch" not in sys.modules
    )


class Beside:
    """The predictions of a plan's space by a fork of this process, the baseline's first."""

    def __init__(self, plan: SearchPlan, fork: Fork, done: Any, end: Callable[[], None]) -> None:
        self.started_s = time.monotonic()
        self._fork, self._done, self._end = fork, done, end
        self._baseline = fork.submit(_predict, baseline_of(plan.part.space))
        self._all: Future[list[Predicted]] = fork.submit(_predict, plan.part.supported)
        self._paused = False
        self._is_small = rough_bytes(plan.part.space) <= SMALL_SHARE * plan.target.gpu.memory_bytes

    @property
    def are_there(self) -> bool:
        """True once all is predicted."""
        return self._all.done()

    def baseline(self) -> Prediction:
        """The prediction of the baseline; waits for it."""
        return self._baseline.result()[0].prediction

    def surely_fits(self) -> bool:
        """True if the baseline needs little, by the sizes of its model, or is predicted to fit.

        Waits for the prediction of the baseline unless the model is small.
        """
        return self._is_small or may_fit(self.baseline(), measured=True)

    def wait(self, report: Compiling) -> list[Predicted]:
        """The predictions of the supported configurations; reports until they are there."""
        said = before = list(self._done)
        while not self.are_there:
            time.sleep(LOOK_AGAIN_S)
            before, said = said, list(self._done)
            if said != before:
                report(*said)
        found = self._all.result()
        self._end()
        return found

    def pause(self, paused: bool) -> None:
        """Predict no more for now, or again."""
        if paused is not self._paused:
            self._fork.pause(paused)
            self._paused = paused


def rough_bytes(space: SearchSpace) -> float:
    """Roughly the memory of the baseline in fp32 without checkpointing; infinite if unknown.

    Weights, gradients and two states take 16 bytes a parameter. Each layer keeps 68 bytes of each
    token for a number of its hidden size, and 10 for each score (Korthikanti et al., 2022, twice
    as they count half precision).
    """
    (baseline,) = baseline_of(space)
    entry = get_entry(space.predicted_model())
    if entry is None or space.workload != "causal_lm" or baseline.get("images"):
        return math.inf
    text = entry.text_config
    sizes = [n for n in (entry.params, *map(text.get, DENSE)) if isinstance(n, int)]
    if any("expert" in name for name in text) or len(sizes) <= len(DENSE):
        return math.inf
    parameters, hidden, layers, heads, words = sizes
    batch, length = int(str(baseline["micro_batch"])), int(str(baseline["max_length"]))
    kept = layers * (68 * hidden + 10 * heads * length) + 16 * words
    return 16.0 * parameters + batch * length * kept


def _predict(
    predictor: SpacePredictor, configurations: Sequence[Configuration], _: None
) -> list[Predicted]:
    return predictor.predict(configurations)


def _predicted_beside(
    plan: SearchPlan, predictors: Predictors, stack: contextlib.ExitStack
) -> Beside:
    """Predict the space of `plan` in a fork, which ends with `stack` or when it is done."""
    from tuner.predict.compiling import fork_beside

    done = multiprocessing.get_context("fork").RawArray("i", 2)

    def note(*numbers: int) -> None:
        done[:] = numbers

    fork = stack.enter_context(fork_beside(predictors.of(plan, note)))
    beside = Beside(plan, fork, done, stack.close)
    predictors.begun, predictors.started_s = beside.wait, beside.started_s
    return beside


@contextlib.contextmanager
def begun(
    plan: SearchPlan,
    known: tuple[TrialRecord, ...],
    predictors: Predictors,
    on_record: Callable[[TrialRecord], None],
    listener: Listener,
) -> Iterator[SearchOutcome | None]:
    """Ray for the search in the block, and the outcome of its baseline; None if none was tried.

    It is not tried if all is predicted by the time Ray has started, or if it may not fit. In the
    block, `predictors` wait for the predictions that have begun.
    """
    (baseline,) = baseline_of(plan.part.space)
    with contextlib.ExitStack() as stack:
        beside = _predicted_beside(plan, predictors, stack.enter_context(contextlib.ExitStack()))
        from tuner.searches.ray.driver import ready, search  # Ray and Optuna: seconds to import

        request = request_of(plan, known, [baseline], listener)
        stack.enter_context(ready(request))
        if beside.are_there or not beside.surely_fits():
            yield None
            return
        # A worker starts sooner, and a trial on a processor is measured without other work.
        beside.pause(True)
        on_processor = isinstance(plan.trials_on, Measuring) and plan.trials_on.device == CPU
        total = min(request.trials, len(plan.part.supported))
        first = dataclasses.replace(request, trials=1, verify=False, study_path=None)
        records = []
        with listener.searching() as report:

            def progress(state: Progress) -> None:
                if state.running and not on_processor:
                    beside.pause(False)
                report({plan.target.gpu.id: dataclasses.replace(state, total=total, eta_s=None)})

            def record(new: TrialRecord) -> None:
                beside.pause(False)
                outcome = dataclasses.replace(new.outcome, prediction=beside.baseline())
                records.append(dataclasses.replace(new, outcome=outcome))
                on_record(records[-1])

            try:
                outcome = search(first, on_progress=progress, on_record=record)
            finally:
                beside.pause(False)
        yield dataclasses.replace(outcome, records=tuple(records))
