"""The guided search in small worlds that are not as predicted: what it is to find out, and when."""

import dataclasses

import numpy as np
import pytest
from tune_fakes import GPU, FakeSpace, outcome_of, record_of

from tuner.core.records import MemoryBudget, Status
from tuner.core.setup.schemas import MemoryOrder
from tuner.core.units import GIB
from tuner.searches.candidates import Candidates
from tuner.searches.guided.pool import Pool
from tuner.searches.guided.sampler import Guided
from tuner.searches.proposer import Proposer
from tuner.searches.strategies import Knowledge

SPACE = FakeSpace()
ALL = list(SPACE.configurations())
CANDIDATES = Candidates(ALL, tuple(SPACE.knobs))
OFF = np.array([not c["gradient_checkpointing"] for c in ALL])
NF4 = np.array([c["precision"] == "nf4" for c in ALL])


def pool(told_bytes=None) -> Pool:
    """The predictions, with other memory where it is given."""
    found = Pool.of(CANDIDATES, [outcome_of(c).prediction for c in ALL])
    size = found.device_bytes if told_bytes is None else told_bytes
    return dataclasses.replace(found, device_bytes=size, loaded_bytes=0.45 * found.device_bytes)


def play(told: Pool, true_bytes, trials: int, *, rates=None) -> tuple[Guided, list[int]]:
    """Ask and tell; throughput is as predicted unless `rates` say another."""
    rates = told.samples_per_s if rates is None else rates
    sampler = Guided(told)
    done = []
    while len(done) < trials and (place := sampler.choose()) is not None:
        size = float(true_bytes[place])
        fits = size <= told.limit_bytes
        sampler.end(place, (rates[place], size) if fits else (0.0, 2 * told.limit_bytes))
        done.append(place)
    return sampler, done


def fastest(told: Pool, true_bytes) -> float:
    return float(told.samples_per_s[true_bytes <= told.usable_bytes].max())


def test_predictions_that_point_the_wrong_way_lose_their_weight():
    told = pool()
    rates = told.samples_per_s**-0.5
    _, done = play(told, told.device_bytes, 10, rates=rates)
    fits = told.device_bytes <= told.usable_bytes
    assert rates[[place for place in done if fits[place]]].max() > 0.98 * rates[fits].max()


class TestPriorThatIsTooDark:
    """Without checkpointing everything is predicted not to fit, and most of it does."""

    true = pool().device_bytes
    told = pool(np.where(OFF, np.maximum(true * 1.7, 49 * GIB + true * 0.1), true))

    def test_is_found_out_within_ten_trials(self):
        assert (self.told.device_bytes[OFF] > self.told.limit_bytes).all()
        _, done = play(self.told, self.true, 10)
        ran_out = [place for place in done if self.true[place] > self.told.limit_bytes]
        assert OFF[done].any()
        assert len(ran_out) <= 1
        best = max(self.told.samples_per_s[p] for p in done if p not in ran_out)
        assert best >= 0.95 * fastest(self.told, self.true)

    def test_costs_one_trial_where_the_prior_is_right(self):
        _, done = play(self.told, self.told.device_bytes, 40)
        assert OFF[done].sum() == 1
        assert (self.told.device_bytes[done] > self.told.limit_bytes).sum() == 1

    def test_what_was_never_tried_is_said_with_the_trial_that_would_tell(self):
        sampler, done = play(self.told, self.told.device_bytes, len(ALL))
        number, would_tell = sampler.untried()
        left = np.setdiff1d(np.arange(len(ALL)), done)
        assert 0 < number <= len(left)
        assert would_tell in left
        assert self.told.samples_per_s[would_tell] > max(self.told.samples_per_s[done])

    def test_weights_alone_that_do_not_fit_are_not_probed(self):
        heavy = dataclasses.replace(
            self.told, loaded_bytes=np.where(OFF, 48 * GIB, self.told.loaded_bytes)
        )
        _, done = play(heavy, heavy.device_bytes, 30)
        assert not OFF[done].any()


def test_the_adapter_says_what_was_never_tried():
    predictions = [outcome_of(c).prediction for c in ALL]
    adapter = Proposer(
        Candidates(ALL, tuple(SPACE.knobs)), sampler="guided", seed=0, trials=9,
        knowledge=Knowledge(predictions),
    )  # fmt: skip
    (note,) = adapter.notes
    assert "never tried, as they are predicted not to fit" in note
    assert "micro_batch=" in note


def test_one_level_that_takes_more_is_not_held_against_the_others():
    """Some of bf16 ran out of memory: what is told of nf4 stands, and its best is soon tried."""
    told = pool()
    true = told.device_bytes * np.where(NF4, 1.0, 1.25)
    sampler = Guided(told)
    before = sampler.oom_probability().copy()
    ran_out = np.flatnonzero(~NF4 & (true > told.limit_bytes))[:2]
    for place in ran_out:
        sampler.experience.note(int(place), 0.0, 2 * told.limit_bytes)
    rise = sampler.oom_probability() - before
    doubtful = (before > 0.001) & (before < 0.9)
    assert rise[~NF4 & doubtful].mean() > 3 * max(rise[NF4 & doubtful].mean(), 0.0)
    _, done = play(told, true, 12)
    best = max(told.samples_per_s[p] for p in done if true[p] <= told.usable_bytes)
    assert best >= 0.98 * fastest(told, true)


class TestWithoutPredictions:
    """As of a program that nothing is known of: the limit, and which knobs only add memory."""

    order = MemoryOrder({"micro_batch": None, "gradient_checkpointing": (True, False)})
    wide = FakeSpace(
        name="wide",
        values={**SPACE.values, "micro_batch": (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)},
    )

    def search(self, trials: int, known=()) -> list:
        configurations = list(self.wide.configurations())
        budget = MemoryBudget(GPU.memory_bytes, GPU.memory_bytes // 50)
        adapter = Proposer(
            Candidates(configurations, tuple(self.wide.knobs)), sampler="guided", seed=0,
            trials=trials, initial=configurations[:1],
            knowledge=Knowledge(order=self.order, budget=budget),
        )  # fmt: skip
        done = list(known)
        for record in known:
            adapter.tell(record)
        while len(done) < trials and (configuration := adapter.propose()) is not None:
            done.append(record_of(configuration))
            adapter.tell(done[-1])
        return done

    def test_few_run_out_of_memory_and_the_best_is_close(self):
        done = self.search(30)
        assert len(done) == 30
        assert sum(r.outcome.status is Status.OOM for r in done[5:]) <= 1
        fitting = [outcome_of(c).prediction for c in self.wide.configurations()]
        best = max(p.speed.samples_per_s for p in fitting if p.fits)
        assert max(r.outcome.evidence.speed.samples_per_s for r in done if r.fits) >= 0.95 * best


def search_in(log_speed, noise: float, seed: int, trials: int = 30) -> tuple[Guided, dict]:
    """A search with repeats; throughput is off by `log_speed` and scatters by `noise`."""
    told, chance = pool(), np.random.default_rng(seed)
    true = told.samples_per_s * np.exp(log_speed)
    sampler, times = Guided(told, repeats=True), {}
    for _ in range(trials):
        if (place := sampler.choose()) is None:
            break
        fits = told.device_bytes[place] <= told.limit_bytes
        rate = true[place] * np.exp(noise * chance.normal())
        sampler.end(place, (rate, told.device_bytes[place]) if fits else (0, 2 * told.limit_bytes))
        times.setdefault(place, []).append(rate)
    return sampler, {place: true[place] for place in times}


class TestBelievesWhatItMeasured:
    @pytest.mark.parametrize("seed", range(3))
    def test_errors_of_single_configurations_are_no_noise(self, seed):
        errors = 0.17 * np.random.default_rng(seed).normal(size=len(ALL))
        sampler, tried = search_in(errors, 0.01, seed)
        usable = {p: v for p, v in tried.items() if sampler.experience.known.get(p)}
        seen, speed, _ = sampler.experience.estimates()
        assert tried[int(seen[np.argmax(speed)])] >= 0.99 * max(usable.values())
        assert sampler.experience.trial_noise() < 0.08

    @pytest.mark.parametrize("seed", range(3))
    def test_noise_is_told_apart_by_repeats(self, seed):
        told, chance = pool(), np.random.default_rng(seed)
        sampler = Guided(told, repeats=True)
        places = np.flatnonzero(told.device_bytes <= told.usable_bytes)[:12]
        for place in [*places, *places[:4]]:
            rate = told.samples_per_s[place] * np.exp(0.15 * chance.normal())
            sampler.end(int(place), (rate, told.device_bytes[place]))
        experience = sampler.experience
        assert experience.repeats == 4
        assert experience.trial_noise() > experience.lack_of_fit()

    def test_where_trials_repeat_and_the_model_holds_hardly_any_is_repeated(self):
        sampler, _ = search_in(np.zeros(len(ALL)), 0.005, 0)
        assert sampler.experience.repeats <= 2
