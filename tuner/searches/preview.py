"""A preview of a search: the trials that it would run if all predictions were right."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from tuner.core.records import Configuration, Outcome, Prediction, Status
from tuner.searches.guided.pool import Pool
from tuner.searches.guided.sampler import Guided
from tuner.searches.progress import StoppedBy
from tuner.searches.ray.driver import proposer_of, quiet_optuna
from tuner.searches.request import SearchRequest, TrialDevice
from tuner.searches.state import SearchState
from tuner.trial.base import MeasureOptions


@dataclass(frozen=True, slots=True)
class PlannedTrial:
    """A trial that would run, with its expected result.

    `fit_probability` is the probability that it does not run out of memory, as known before it
    begins. `device_s` is its expected time on a GPU in seconds: loading, warm-up and timed steps,
    less if it may run out of memory.
    """

    configuration: Configuration
    prediction: Prediction
    fit_probability: float
    device_s: float


@dataclass(frozen=True, slots=True)
class Preview:
    """The trials of a search in their order, the reason why it ends, and the number reused."""

    trials: tuple[PlannedTrial, ...]
    stopped_by: StoppedBy
    reused: int

    @property
    def device_s(self) -> float:
        """Time on a GPU of all trials together, in seconds."""
        return sum(trial.device_s for trial in self.trials)


def preview(request: SearchRequest, options: MeasureOptions | None = None) -> Preview:
    """The trials that `search` would run for `request`; starts no Ray and writes nothing.

    The request needs a prediction of every configuration, unless no trial would run because enough
    are known already. `options` determine the time of real trials. Limits of GPU hours and cost
    apply as for real trials, although the trials are simulated. Later trials depend on the results
    of earlier ones, so they are less certain.
    """
    request = dataclasses.replace(request, study_path=None, run_id="preview")
    if request.trial_device is None and (request.gpu_hours or request.max_cost_usd):
        request = dataclasses.replace(request, trial_device=TrialDevice(request.gpu.name))
    with quiet_optuna():
        adapter = proposer_of(request)
        if adapter.guide is not None:
            adapter.guide.repeats = False  # the same prediction again tells nothing
        candidates = adapter.candidates
        state = SearchState(
            request, adapter, on_record=lambda record: None, on_progress=lambda progress: None
        )
        state.reuse()
        if state.finished and state.stopped_by is not None:
            return Preview((), state.stopped_by, state.reused)
        predictions = [request.predictions[c.key] for c in candidates.configurations]
        pool = Pool.of(candidates, predictions, options)
        judge = adapter.guide or Guided(pool)
        trials: list[PlannedTrial] = []
        while not state.finished:
            number = str(len(trials))
            configuration = state.propose(number)
            if configuration is None:
                continue
            place = candidates.place(configuration)
            risk = float(judge.oom_probability()[place])
            device_s = (1 - risk) * pool.trial_s[place] + risk * pool.oom_s[place]
            trial = PlannedTrial(configuration, predictions[place], 1 - risk, float(device_s))
            trials.append(trial)
            state.start(number)
            state.end(number, _outcome(trial))
    if state.failure is not None:
        raise state.failure
    assert state.stopped_by is not None
    return Preview(tuple(trials), state.stopped_by, state.reused)


def _outcome(trial: PlannedTrial) -> Outcome:
    """The outcome of the trial if its prediction is right."""
    prediction = trial.prediction
    ran_out = prediction.memory.device_bytes > prediction.budget.limit_bytes
    return Outcome(
        status=Status.OOM if ran_out else Status.OK,
        prediction=prediction,
        duration_s=trial.device_s,
    )
