"""What a search would run, without running it: as if every trial came to what is predicted."""

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
    """A trial that would run, with what is expected of it.

    `fit_probability` is that it does not run out of memory, as known when it would begin.
    `device_s` is how long it would take on a GPU: loading, warm-up and timed steps, and less
    where it may run out of memory.
    """

    configuration: Configuration
    prediction: Prediction
    fit_probability: float
    device_s: float


@dataclass(frozen=True, slots=True)
class Preview:
    """The trials of a search in their order, why it would end, and how many it takes over."""

    trials: tuple[PlannedTrial, ...]
    stopped_by: StoppedBy
    reused: int

    @property
    def device_s(self) -> float:
        """Time on a GPU of all trials together, in seconds."""
        return sum(trial.device_s for trial in self.trials)


def preview(request: SearchRequest, options: MeasureOptions | None = None) -> Preview:
    """What `search` would run for `request` one after another; starts no Ray, writes nothing.

    The request needs a prediction of every configuration, unless nothing would run because what is
    known already is all that was asked for. `options` say how long real trials
    take. Limits of GPU hours and cost count as they would where trials really run, although they
    are simulated here. Later trials depend on how earlier ones come out: the further, the less
    certain.
    """
    request = dataclasses.replace(request, study_path=None, run_id="preview")
    if request.trial_device is None and (request.gpu_hours or request.max_cost_usd):
        request = dataclasses.replace(request, trial_device=TrialDevice(request.gpu.name))
    with quiet_optuna():
        adapter = proposer_of(request)
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
    """What comes of it if the prediction is right."""
    prediction = trial.prediction
    ran_out = prediction.memory.device_bytes > prediction.budget.limit_bytes
    return Outcome(
        status=Status.OOM if ran_out else Status.OK,
        prediction=prediction,
        duration_s=trial.device_s,
    )
