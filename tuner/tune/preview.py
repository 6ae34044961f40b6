"""What a search would run, without running it: as if every trial came to what is predicted."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from tuner.records import Configuration, Outcome, Prediction, Status
from tuner.runner.base import MeasureOptions
from tuner.tune.budget import StoppedBy
from tuner.tune.driver import make_proposer, quiet_optuna
from tuner.tune.guided import GuidedSampler
from tuner.tune.guided_pool import Pool
from tuner.tune.ledger import Ledger
from tuner.tune.request import Bench, SearchRequest


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
    if request.bench is None and (request.gpu_hours or request.max_cost_usd):
        request = dataclasses.replace(request, bench=Bench(request.gpu.name))
    with quiet_optuna():
        proposer = make_proposer(request)
        candidates = proposer.candidates
        ledger = Ledger(
            request, proposer, on_record=lambda record: None, on_progress=lambda progress: None
        )
        ledger.reuse()
        if ledger.finished and ledger.stopped_by is not None:
            return Preview((), ledger.stopped_by, ledger.reused)
        predictions = [request.predictions[c.key] for c in candidates.configurations]
        pool = Pool.of(candidates, predictions, options)
        judge = proposer.guide or GuidedSampler(pool, seed=request.seed)
        trials: list[PlannedTrial] = []
        while not ledger.finished:
            number = str(len(trials))
            configuration = ledger.propose(number)
            if configuration is None:
                continue
            place = candidates.place(configuration)
            risk = float(judge.oom_probability()[place])
            device_s = (1 - risk) * pool.trial_s[place] + risk * pool.oom_s[place]
            trial = PlannedTrial(configuration, predictions[place], 1 - risk, float(device_s))
            trials.append(trial)
            ledger.start(number)
            ledger.end(number, _outcome(trial))
    if ledger.failure is not None:
        raise ledger.failure
    assert ledger.stopped_by is not None
    return Preview(tuple(trials), ledger.stopped_by, ledger.reused)


def _outcome(trial: PlannedTrial) -> Outcome:
    """What comes of it if the prediction is right."""
    prediction = trial.prediction
    ran_out = prediction.memory.device_bytes > prediction.limit_bytes
    return Outcome(
        status=Status.OOM if ran_out else Status.OK,
        prediction=prediction,
        duration_s=trial.device_s,
    )
