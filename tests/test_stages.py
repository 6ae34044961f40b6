"""Stages of a training: one configuration for all of them, as hard as the hardest."""

from pathlib import Path

import pytest
from encoder_samples import shallow_encoder

from tuner.core.errors import InputError
from tuner.core.records import Memory, MemoryBudget, Prediction, Speed
from tuner.predict.predictor import Predictor
from tuner.predict.stages import StageWork, combine, predict_stages, stage_work
from tuner.space import configure, load_space
from tuner.space.gpus import get_gpu
from tuner.space.load import read_space

SPACES = Path(__file__).parents[1] / "search_spaces"
GIB = 2**30


def prediction(device_gib: float, step_s: float, *, limit_gib: float = 16) -> Prediction:
    """A stage of 32 samples a step, in 2 micro-steps, at 10 tokens a sample."""
    size = round(device_gib * GIB)
    return Prediction(
        budget=MemoryBudget(round(limit_gib * GIB), 0),
        memory=Memory(size, size, size, 0, {}, "backward", {}),
        speed=Speed(step_s, 2 / step_s, 32 / step_s, 320 / step_s, 0.5, {"matmul": step_s}),
        trainable_params=1,
        total_params=2,
        gpu="t4",
        method="test",
        intervals={"step_s": (step_s * 0.9, step_s * 1.2), "device_bytes": (size, size)},
    )


def test_memory_is_that_of_the_hardest_stage():
    stages = {"easy": prediction(4, 1), "hard": prediction(12, 2), "last": prediction(5, 1)}
    found = combine(stages, dict.fromkeys(stages))
    assert found.limiting == "hard"
    assert found.overall.memory.device_bytes == 12 * GIB
    assert found.overall.fits
    assert found.misfits == ()
    assert "stage hard" in found.overall.method


def test_time_is_the_sum_over_stages():
    stages = {"slow": prediction(4, 2), "fast": prediction(4, 1)}
    found = combine(stages, {"slow": StageWork(320, 1), "fast": StageWork(640, 3)})
    # 10 steps of 2 s, and 20 steps of 1 s in an epoch, 60 in all three.
    assert found.epoch_s == pytest.approx(20 + 20)
    assert found.run_s == pytest.approx(20 + 60)
    speed = found.overall.speed
    assert speed.samples_per_s == pytest.approx((320 + 1920) / 80)
    assert speed.step_s == pytest.approx(80 / 70)
    assert speed.breakdown_s == pytest.approx({"matmul": 80 / 70})
    assert speed.it_per_s == pytest.approx(140 / 80)
    assert speed.tokens_per_s == pytest.approx(10 * speed.samples_per_s)
    assert speed.mfu == pytest.approx(0.5)
    low, high = found.overall.intervals["step_s"]
    assert (low, high) == (pytest.approx(0.9 * speed.step_s), pytest.approx(1.2 * speed.step_s))


def test_each_distinct_stage_is_predicted_once():
    space, asked = load_space(str(SPACES / "naics_embedder.yaml")), []

    def record(configurations):
        asked.extend(configurations)
        return [prediction(int(c["n_negatives"]), 1, limit_gib=30) for c in configurations]

    found = predict_stages(space, [configure(space)], record)
    assert sorted(int(c["n_negatives"]) for c in asked) == [8, 24]
    assert found[0].limiting == "stage1"
    assert list(found[0].stages) == [f"stage{n}" for n in range(1, 6)]
    assert stage_work(space)["stage1"] == StageWork(2125 * 64, 1)


def test_stages_say_how_much_they_train():
    text = (SPACES / "dynamo_t4.yaml").read_text()
    space = load_space(str(SPACES / "dynamo_t4.yaml"))
    work = stage_work(space)
    assert work["phase1_qa"] == StageWork(15_000, 1)
    assert work["phase2"] == StageWork(47_000, 1)
    with pytest.raises(InputError) as caught:
        read_space(text.replace("examples: 8000", "examples: 0"), "dynamo_t4.yaml")
    assert "examples cannot be '0'" in str(caught.value.problems)


def test_the_phases_of_dynamo_are_limited_by_those_that_run_all_heads(tmp_path):
    space = load_space(str(SPACES / "dynamo_t4.yaml"))
    model = shallow_encoder(tmp_path, "roberta-base", layers=2)
    gpu, predictor = get_gpu("t4"), Predictor("multitask", model)
    chosen = [configure(space, {"micro_batch": size}) for size in (8, 64)]
    small, large = predict_stages(space, chosen, lambda c: predictor.predict(c, gpu))
    assert small.overall.fits
    assert large.limiting == "phase3"
    assert set(large.misfits) >= {"phase2", "phase3"}
    assert all(large.stages[f"phase1_{t}"].fits for t in ("sentiment", "qa", "summarization"))
    assert small.run_s == small.epoch_s
