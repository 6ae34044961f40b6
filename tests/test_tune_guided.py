"""The guided sampler: its gain is exact, it learns what is wrong, and it seldom gambles."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tune_fakes import GPU, FakeFactory, FakeSpace, outcome_of, request_of

from tuner.core.errors import InputError
from tuner.searches.candidates import Candidates
from tuner.searches.facts import SpaceFacts
from tuner.searches.guided.goals import Front, Goal, GoalFront, LogNormal, goals_of, staircase
from tuner.searches.guided.pool import Pool
from tuner.searches.guided.regression import Prior, ResidualModel, Trials, features
from tuner.searches.guided.sampler import Guided
from tuner.searches.objectives import objectives_of

SPACE = FakeSpace()
ALL = list(SPACE.configurations())
CANDIDATES = Candidates(ALL, tuple(SPACE.knobs))
POOL = Pool.of(CANDIDATES, [outcome_of(c).prediction for c in ALL])


def play(world, trials, *, pool=POOL, configurations=ALL, sampler=None):
    """Ask and tell; `world` gives a configuration's throughput and memory."""
    sampler = sampler or Guided(pool)
    done = []
    while len(done) < trials and (place := sampler.choose()) is not None:
        speed, size = world(configurations[place])
        ran_out = size > pool.limit_bytes
        sampler.end(place, (0.0, 2 * pool.limit_bytes) if ran_out else (speed, size))
        done.append((place, ran_out))
    return sampler, done


def predicted(configuration):
    prediction = outcome_of(configuration).prediction
    return prediction.speed.samples_per_s, prediction.memory.device_bytes


def slow_without_checkpointing(configuration):
    speed, size = predicted(configuration)
    return speed * (1.0 if configuration["gradient_checkpointing"] else 0.5), size


def more_memory(configuration):
    speed, size = predicted(configuration)
    return speed, size * 1.15


# -- the whole sampler ----------------------------------------------------------------------


@pytest.mark.parametrize("world", [predicted, slow_without_checkpointing, more_memory])
def test_twelve_trials_find_the_fastest_that_fits(world):
    _, done = play(world, 12)
    fitting = [world(c)[0] for c in ALL if world(c)[1] <= POOL.usable_bytes]
    assert max(world(ALL[p])[0] for p, ran_out in done if not ran_out) >= 0.98 * max(fitting)
    assert sum(ran_out for _, ran_out in done) <= 1


def trials_to_99(world, places):
    """How many of the places, in their order, cover 99 % of the hypervolume."""
    speed, size = np.array([world(c) for c in ALL]).T

    def covered(some):
        limits = {"usable_bytes": POOL.usable_bytes, "reference_bytes": POOL.limit_bytes}
        return Front.of(speed[some], size[some], **limits).hypervolume

    whole = covered(np.arange(len(ALL)))
    return next(n for n in range(1, len(places)) if covered(places[:n]) >= 0.99 * whole)


def by_predicted_layers():
    speed, size = np.array([predicted(c) for c in ALL]).T
    left, order = np.flatnonzero(size <= POOL.usable_bytes), []
    while left.size:
        layer = staircase(speed[left], size[left])
        order += left[layer[::-1]].tolist()
        left = np.delete(left, layer)
    return order


@pytest.mark.parametrize("power", [1.0, 0.5, 0.3])
def test_where_the_predicted_order_holds_it_is_followed(power):
    def world(configuration):
        speed, size = predicted(configuration)
        return speed**power, size

    _, done = play(world, 12)
    found = trials_to_99(world, [place for place, _ in done])
    # One of the trials may repeat another, to learn how much they scatter.
    assert found <= trials_to_99(world, by_predicted_layers()) + 2


def test_no_candidate_is_proposed_twice_and_nothing_hopeless_at_all():
    sampler, done = play(predicted, len(ALL))
    places = [place for place, _ in done]
    assert len(set(places)) == len(places) < len(ALL)
    assert sampler.choose() is None
    left = set(range(len(ALL))) - set(places)
    assert sampler.oom_probability()[list(left)].min() > sampler.allowed_risk()


@settings(max_examples=15)
@given(
    told=st.lists(st.integers(0, len(ALL) - 1), min_size=1, max_size=8, unique=True),
    speed_factor=st.floats(0.5, 2.0),
    memory_factor=st.floats(0.7, 1.4),
)
def test_what_probably_fits_is_never_pruned(told, speed_factor, memory_factor):
    """Every candidate with a risk that is allowed is still proposed, were it the last one."""
    sampler = Guided(POOL)
    for place in told:
        speed, size = predicted(ALL[place])
        sampler.end(place, (speed * speed_factor, size * memory_factor))
    risk, allowed = sampler.oom_probability(), sampler.allowed_risk()
    ran_out = [p for p in told if predicted(ALL[p])[1] * memory_factor > POOL.limit_bytes]
    for place in sorted(set(range(len(ALL))) - set(told)):
        sampler.hold_back(np.arange(len(ALL)) != place)
        proposed = sampler.best_candidate()
        if risk[place] <= allowed:
            assert proposed == place
        elif ran_out and len(ran_out) < len(told):  # what may run out once is spent
            assert proposed is None


def test_failed_trials_and_other_violations_teach_nothing():
    sampler = Guided(POOL)
    failed, timed_out = sampler.choose(), sampler.choose()
    sampler.end(failed, failure="failed")
    sampler.end(timed_out, (1.0, 2.0**30), failed=True)
    assert not sampler.experience.beliefs()[0].mean.any()
    assert sampler.choose() not in (failed, timed_out)


def test_running_out_of_memory_raises_the_risk_of_its_neighbours():
    sampler = Guided(POOL)
    before = sampler.oom_probability()
    place = int(np.argmax(np.where(before < 0.05, POOL.device_bytes, 0)))
    sampler.end(place, (0.0, 2 * POOL.limit_bytes))
    after = sampler.oom_probability()
    close = np.abs(POOL.device_bytes / POOL.device_bytes[place] - 1) < 0.1
    assert (after[close] > before[close]).all()


# -- the expected gain ----------------------------------------------------------------------

points = st.lists(st.tuples(st.floats(0.1, 10.0), st.floats(1.0, 100.0)), min_size=0, max_size=8)


def front_of(found, usable=80.0, reference=100.0):
    pairs = np.array(found, dtype=float).reshape(-1, 2)
    return Front.of(pairs[:, 0], pairs[:, 1], usable_bytes=usable, reference_bytes=reference)


@given(found=points, order=st.randoms())
def test_front_is_non_dominated_and_independent_of_order(found, order):
    front = front_of(found)
    shuffled = list(found)
    order.shuffle(shuffled)
    again = front_of(shuffled)
    assert np.array_equal(front.speed, again.speed)
    assert np.array_equal(front.size, again.size)
    assert (np.diff(front.speed) > 0).all()
    assert (np.diff(front.size) > 0).all()
    for speed, size in found:
        if size <= 80.0:
            assert ((front.speed >= speed) & (front.size <= size)).any()


@pytest.mark.proof
@settings(max_examples=30)
@given(
    found=points,
    speed=st.floats(0.2, 8.0),
    size=st.floats(5.0, 95.0),
    speed_sd=st.floats(0.02, 0.5),
    size_sd=st.floats(0.01, 0.3),
)
def test_expected_gain_is_the_mean_over_draws(found, speed, size, speed_sd, size_sd):
    front = front_of(found)
    speeds = LogNormal(np.array([np.log(speed)]), np.array([speed_sd]))
    sizes = LogNormal(np.array([np.log(size)]), np.array([size_sd]))
    rng = np.random.default_rng(0)
    draws = np.exp(rng.normal(size=(4000, 2)) * (speed_sd, size_sd) + np.log((speed, size)))
    gains = [front_of([*found, tuple(draw)]).hypervolume - front.hypervolume for draw in draws]
    error = np.std(gains) / np.sqrt(len(gains))
    gain = front.expected_gain(speeds, sizes)[0]
    assert gain == pytest.approx(np.mean(gains), abs=5 * error + 1e-3 * speed * 100)


# -- the regression -------------------------------------------------------------------------

PRIOR = Prior(shared=0.1, spread=0.1, noise=0.02)


NO_TRIALS = Trials(np.array([], dtype=np.intp), np.array([]), np.array([]))


def model_of(scale=None):
    design = features(CANDIDATES.columns, CANDIDATES.coordinates, {}, PRIOR)
    return ResidualModel(design, PRIOR, scale)


@given(effect=st.floats(-0.4, 0.4), seed=st.integers(0, 1000))
@settings(max_examples=20)
def test_effect_of_a_level_is_learned_from_some_and_expected_of_the_others(effect, seed):
    rng = np.random.default_rng(seed)
    hit = np.array([c["precision"] == "bf16" for c in ALL])
    truth = 0.1 + effect * hit
    seen = rng.choice(len(ALL), size=20, replace=False)
    values = truth[seen] + 0.005 * rng.normal(size=20)
    belief = model_of().fit(Trials(seen, values, np.ones(20))).belief
    unseen = np.setdiff1d(np.arange(len(ALL)), seen)
    assert np.abs(belief.mean[unseen] - truth[unseen]).mean() < 0.05


def test_bound_that_was_expected_changes_little_and_a_surprising_one_much():
    model, place = model_of(), np.array([10])
    expected, surprising = (
        model.fit(NO_TRIALS, Trials(place, np.array([bound]), np.ones(1))).belief
        for bound in (-0.5, 0.3)
    )
    assert abs(expected.mean[10]) < 0.02
    assert surprising.mean[10] > 0.2
    assert surprising.sd[10] < model.fit(NO_TRIALS).belief.sd[10]


def test_a_cause_is_told_from_another_by_one_trial_that_has_only_one_of_them():
    """bf16 and a rank of 16 were slow together, twice; bf16 alone is not."""
    bf16 = np.array([c["precision"] == "bf16" for c in ALL], dtype=float)
    rank = np.array([c["lora_rank"] == 16 for c in ALL], dtype=float)
    both, others = np.flatnonzero(bf16 * rank)[:2], np.flatnonzero((1 - bf16) * rank)[:6]
    causes = np.stack([bf16, bf16 * rank], axis=1)
    alone = np.flatnonzero(bf16 * (1 - rank))
    for seen in (np.concatenate([both, others]), np.concatenate([both, others, alone[:1]])):
        slow = -0.5 * (bf16 * rank)[seen]
        fit = model_of().fit(Trials(seen, slow, np.ones(len(seen))))
        level, pair = fit.odds(causes[seen])
        if not np.isin(alone[0], seen):
            assert level == pytest.approx(pair)
            assert fit.under(causes[seen, 0], causes[:, 0]).mean[alone[-1]] < -0.3
    assert pair > level + 3
    assert fit.under(causes[seen, 1], causes[:, 1]).mean[alone[-1]] == pytest.approx(0, abs=0.05)


# -- trials of other versions, and other objectives -----------------------------------------


def test_what_ran_out_under_other_versions_is_riskier_and_may_be_tried():
    plain, hinted = (Guided(POOL) for _ in range(2))
    # Close enough to the limit to be in doubt, and well enough to be tried.
    doubted = int(np.argmin(np.abs(plain.oom_probability() - 0.1)))
    hinted.experience.remember(doubted, (0.0, 2 * POOL.limit_bytes))
    before, after = plain.oom_probability()[doubted], hinted.oom_probability()[doubted]
    assert before < after < 1.0
    hinted.hold_back(np.arange(len(ALL)) != doubted)
    assert hinted.best_candidate() == doubted
    told = Guided(POOL)
    told.experience.note(doubted, 0.0, 2 * POOL.limit_bytes)
    assert told.oom_probability()[doubted] > after


def test_a_fit_now_outweighs_what_ran_out_then():
    sampler, fresh = (Guided(POOL) for _ in range(2))
    place = int(np.argmax(POOL.device_bytes <= POOL.usable_bytes))
    sampler.experience.remember(place, (0.0, 2 * POOL.limit_bytes))
    for each in (sampler, fresh):
        each.experience.note(place, *predicted(ALL[place]))
    hinted, plain = (each.experience.beliefs()[1] for each in (sampler, fresh))
    assert np.array_equal(hinted.mean, plain.mean)


def goals(*names):
    facts = SpaceFacts(name="fake", model=None)
    objectives = objectives_of(names, facts, GPU)
    return goals_of(objectives, ALL, [outcome_of(c).prediction for c in ALL])


def test_other_objectives_get_the_front_that_was_asked_for():
    """Fast with a high rank: a search for throughput and memory has no reason to look there."""
    asked = goals("samples_per_s", "lora_rank")
    _, done = play(slow_without_checkpointing, 24, sampler=Guided(POOL, goals=asked))
    assert sum(ran_out for _, ran_out in done) <= 1

    def front(places):
        points = {
            (slow_without_checkpointing(ALL[p])[0], ALL[p]["lora_rank"])
            for p in places
            if predicted(ALL[p])[1] <= POOL.usable_bytes
        }
        better = lambda a, b: a != b and a[0] >= b[0] and a[1] >= b[1]  # noqa: E731
        return {b for b in points if not any(better(a, b) for a in points)}

    assert front(place for place, _ in done) == front(range(len(ALL)))


def test_goals_are_the_objectives_turned_to_be_large():
    speed, memory, step, reserved = goals(
        "tokens_per_s", "device_bytes", "step_s", "peak_reserved_bytes"
    )
    for place in (0, 7, len(ALL) - 1):
        prediction = outcome_of(ALL[place]).prediction
        rate, size = prediction.speed.samples_per_s, prediction.memory.device_bytes
        for goal, value in (
            (speed, prediction.speed.tokens_per_s),
            (memory, 1 / size),
            (step, 1 / prediction.speed.step_s),
            (reserved, 1 / prediction.memory.peak_reserved_bytes),
        ):
            worth = goal.factor[place] * rate**goal.speed_power * float(size) ** goal.size_power
            assert worth == pytest.approx(value)


@settings(max_examples=30)
@given(
    known=st.lists(st.tuples(st.floats(0.1, 1.0), st.floats(0.1, 1.0)), min_size=1, max_size=5),
    new=st.tuples(st.floats(0.1, 1.2), st.floats(0.1, 1.2)),
)
def test_gain_is_nothing_for_what_is_covered_and_near_the_true_one_else(known, new):
    """Against the exact area of two objectives, of which the second is a factor."""
    factor = np.array([*(b for _, b in known), new[1]])
    one = Goal("a", np.ones(len(factor)), 1.0, 0.0)
    other = Goal("b", factor, 0.0, 0.0)
    speed = np.array([a for a, _ in known])
    front = GoalFront([one, other], np.arange(len(known)), speed, np.ones(len(known)))
    sure = LogNormal(np.log([new[0]]), np.array([1e-9]))
    gain, _ = front.expected_gain(np.array([len(known)]), sure, LogNormal(np.zeros(1), sure.sd))

    def area(points):
        found, height = 0.0, 0.0
        for a, b in sorted(points, reverse=True):
            found += a * max(0.0, b - height)
            height = max(height, b)
        return found

    truth = area([*known, new]) / area(known) - 1
    if any(a >= new[0] and b >= new[1] for a, b in known):
        assert gain[0] == pytest.approx(0.0, abs=1e-6)
    assert gain[0] == pytest.approx(truth, abs=0.1 + 0.25 * truth)


def test_only_guided_searches_for_other_objectives():
    objectives = objectives_of(["lora_rank"], SpaceFacts(name="fake", model=None), GPU)
    with pytest.raises(InputError, match="throughput and memory only"):
        request_of(space=SPACE, gpu=GPU, runner_factory=FakeFactory(), searcher="tpe",
                      objectives=objectives)  # fmt: skip
