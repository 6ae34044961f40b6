"""The guided search as a sampler of Optuna's, in a study and under Ray Tune's OptunaSearch."""

import math

import optuna
import pytest
from ray.tune.search.optuna import OptunaSearch

from tuner.core.errors import InputError
from tuner.integrations.optuna import DEVICE_BYTES, GuidedSampler

optuna.logging.set_verbosity(optuna.logging.ERROR)
BEST = 8.0


@pytest.fixture
def sampler():
    return GuidedSampler("tiny_cpu", "t4", seed=1)


def truth(configuration) -> tuple[float, float]:
    """Each sequence of 128 tokens takes a third of the GPU: with more it runs out of memory."""
    batch, length = configuration["micro_batch"], configuration["max_length"]
    size = 5e9 * batch * length / 128 / (2 if configuration["gradient_checkpointing"] else 1)
    speed = batch * (1 if configuration["gradient_checkpointing"] else 1.3)
    return (speed, size) if size < 15e9 else (0.0, math.inf)


def test_it_proposes_each_configuration_once_and_stops_after_the_last(sampler):
    study = optuna.create_study(directions=["maximize", "minimize"], sampler=sampler)
    study.optimize(lambda trial: truth(sampler.suggest(trial)), n_trials=200)
    ended = [t.params for t in study.trials if t.state == optuna.trial.TrialState.COMPLETE]
    assert len({tuple(params.values()) for params in ended}) == len(ended)
    assert len(study.trials) < 200
    assert study.trials[-1].state == optuna.trial.TrialState.PRUNED
    assert max(trial.values[0] for trial in study.best_trials) == BEST


def test_what_ran_out_of_memory_is_learned(sampler):
    study = optuna.create_study(directions=["maximize", "minimize"], sampler=sampler)
    study.optimize(lambda trial: truth(sampler.suggest(trial)), n_trials=30)
    ran_out = [math.isinf(trial.values[1]) for trial in study.trials]
    assert sum(ran_out[:15]) > 0
    assert sum(ran_out[15:]) <= 1


def test_one_value_is_throughput_and_memory_an_attribute(sampler):
    def objective(trial):
        speed, size = truth(sampler.suggest(trial))
        trial.set_user_attr(DEVICE_BYTES, size)
        return speed

    study = optuna.create_study(direction="maximize", sampler=sampler)
    study.optimize(objective, n_trials=20)
    assert study.best_value == BEST
    assert sampler.constraints_func(study.best_trial)[0] < 0
    worst = min(study.trials, key=lambda trial: trial.value)
    assert sampler.constraints_func(worst) == (math.inf,)
    with pytest.raises(InputError, match="maximize it"):
        optuna.create_study(direction="minimize", sampler=sampler).ask(sampler.distributions)


def test_a_trial_that_failed_and_one_from_elsewhere_are_taken(sampler):
    study = optuna.create_study(directions=["maximize", "minimize"], sampler=sampler)
    study.enqueue_trial({"micro_batch": 3, "unknown": 1})
    with pytest.raises(InputError, match="no configuration of tiny_cpu has"):
        study.optimize(lambda trial: truth(sampler.suggest(trial)), n_trials=1)
    study.optimize(lambda trial: sampler.suggest(trial)["no such"], n_trials=3, catch=KeyError)
    study.optimize(lambda trial: truth(sampler.suggest(trial)), n_trials=2)
    assert len(study.best_trials) > 0


def test_ray_tune_asks_it(sampler):
    search = OptunaSearch(
        space=sampler.distributions, sampler=sampler, metric=["rate", "bytes"], mode=["max", "min"]
    )
    rates = []
    for number in range(8):
        rate, size = truth(sampler.configuration(search.suggest(str(number))))
        search.on_trial_complete(str(number), {"rate": rate, "bytes": size})
        rates.append(rate)
    assert max(rates[4:]) > 0


def test_a_space_without_predictions_is_refused(tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "name: mine\ncommand: python train.py {micro_batch}\nsamples_per_step: micro_batch\n"
        "knobs: {micro_batch: [1, 2]}\n"
    )
    with pytest.raises(InputError, match="has no predictions"):
        GuidedSampler(tmp_path / "mine.yaml", "t4")
