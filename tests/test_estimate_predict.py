"""The prediction of one configuration: what it refuses, and when it says that it fits."""

import json
from dataclasses import replace

import pytest
from estimate_samples import configuration, tiny_config

from tuner.core.errors import InputError
from tuner.core.kinds import Verdict
from tuner.core.records import Configuration, Prediction, Source
from tuner.core.units import MIB
from tuner.predict.predict import check_supported, method_text, predict
from tuner.predict.traces import Subject
from tuner.predict.training import get_workload
from tuner.space.gpus import get_gpu

A6000, T4, V100 = get_gpu("a6000"), get_gpu("t4"), get_gpu("v100_16gb")


@pytest.fixture(scope="module")
def subject() -> Subject:
    return Subject(get_workload("causal_lm"), "tiny", tiny_config())


@pytest.mark.parametrize(
    ("gpu", "values", "where"),
    [
        (T4, {"precision": "bf16"}, ["precision"]),
        (T4, {"precision": "nf4", "mixed_precision": "bf16"}, ["mixed_precision"]),
        (T4, {"precision": "tf32"}, ["precision"]),
        (V100, {"precision": "fp16", "mixed_precision": "bf16"}, ["mixed_precision"]),
        (T4, {"precision": "nf4", "mixed_precision": "fp16"}, []),
        (A6000, {"precision": "bf16", "mixed_precision": "bf16"}, []),
    ],
)
def test_what_a_gpu_cannot_do_is_said(gpu, values, where):
    problems = check_supported(configuration(**values), gpu)
    assert [problem.where for problem in problems] == where
    for problem in problems:
        assert gpu.name in problem.message
        assert len(problem.message.split(": ", 1)[1]) > 10  # the reason


def test_fp16_weights_have_no_gradients_to_scale():
    trained = configuration(precision="fp16", mixed_precision="fp16", lora_rank=0)
    (problem,) = check_supported(trained, A6000)
    assert "load the weights in fp32" in problem.message
    assert not check_supported(trained.replace(lora_rank=4), A6000)


def test_full_fine_tuning_of_packed_weights_is_bad_input(subject):
    with pytest.raises(InputError, match=r"full fine-tuning .* nf4") as caught:
        predict(subject, configuration(precision="nf4", lora_rank=0), A6000)
    assert "lora_rank" in str(caught.value)


def test_targets_that_do_not_exist_are_bad_input(subject):
    with pytest.raises(InputError, match="c_attn") as caught:
        predict(subject, configuration(lora_targets=["c_attn"]), A6000)
    assert "q_proj" in str(caught.value)  # what does exist


@pytest.fixture(scope="module")
def prediction(subject) -> Prediction:
    return predict(subject, configuration(), A6000)


def test_verdict_is_on_device_memory_with_the_margin(subject, prediction):
    needed = prediction.memory.device_bytes
    assert prediction.fits
    assert prediction.memory.device_bytes > prediction.memory.peak_reserved_bytes

    def verdict(memory_bytes, margin_fraction):
        gpu = replace(A6000, memory_bytes=memory_bytes)
        return predict(subject, configuration(), gpu, margin_fraction=margin_fraction)

    assert verdict(needed, 0.0).fits
    assert not verdict(needed - 1, 0.0).fits
    assert not verdict(needed, 0.01).fits
    tight = verdict(needed + 10 * MIB, 10 * MIB / (needed + 10 * MIB))
    assert tight.budget.margin_bytes == 10 * MIB
    assert tight.fits


def test_context_is_that_of_the_gpu(subject, prediction):
    memory = prediction.memory
    assert memory.device_bytes - memory.peak_reserved_bytes == A6000.context_bytes
    more = replace(A6000, context_bytes=A6000.context_bytes + 100 * MIB)
    assert predict(subject, configuration(), more).memory.device_bytes == (
        memory.device_bytes + 100 * MIB
    )


def test_prediction_says_what_it_is(prediction):
    assert prediction.source is Source.PREDICTED
    assert prediction.gpu == "a6000"
    assert prediction.method
    plain = prediction.to_dict()
    assert json.loads(json.dumps(plain)) == plain
    keys = {"fits", "trainable_params", "total_params", "step_s", "it_per_s", "samples_per_s"}
    assert keys | {"tokens_per_s", "mfu", "source", "memory"} <= set(plain)
    assert {"peak_allocated_bytes", "peak_reserved_bytes", "device_bytes", "breakdown"} <= set(
        plain["memory"]
    )
    assert Prediction.from_dict(plain) == prediction


def test_a_prediction_names_the_knobs_whose_effect_it_leaves_out():
    plain = Configuration({"precision": "nf4", "num_workers": 0})
    assert method_text("traced", "causal_lm", plain, A6000) == "traced"
    ignored = plain.replace(cudnn_benchmark=True, num_workers=4)
    text = method_text("traced", "causal_lm", ignored, A6000)
    assert text.startswith("traced; without the effect of ")
    assert {"cudnn_benchmark", "num_workers"} <= set(text.replace(",", "").split())


def test_a_compiled_training_has_the_memory_without_as_a_bound_and_no_speed(subject):
    plain, compiled = (
        predict(subject, configuration(torch_compile=value), A6000) for value in (False, True)
    )
    assert compiled.memory == plain.memory
    assert compiled.intervals == plain.intervals
    assert "step_s" in compiled.to_answer()
    assert compiled.to_answer()["step_s"] is None
    assert plain.to_answer()["step_s"] == plain.speed.step_s
    budget = replace(plain.budget, limit_bytes=plain.memory.device_bytes // 2)
    verdicts = [replace(one, budget=budget).verdict for one in (plain, compiled)]
    assert verdicts == [Verdict.DOES_NOT_FIT, Verdict.UNKNOWN]
