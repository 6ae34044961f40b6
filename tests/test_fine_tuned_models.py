"""The 32 models that people fine-tune most are known; each class answers by default in NF4."""

import pytest
from shared_cases.shallow import shallow

from tuner.app.estimate import one_configuration
from tuner.predict.predict import predict
from tuner.predict.predictor import Predictor
from tuner.predict.traces import Subject
from tuner.space.gpus import get_gpu
from tuner.space.models.catalogue import get_entry

KNOWN = (
    "meta-llama/Llama-3.2-1B-Instruct",
    "meta-llama/Llama-3.2-3B-Instruct",
    "meta-llama/Llama-3.1-8B-Instruct",
    "meta-llama/Llama-3.3-70B-Instruct",
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
    "Qwen/Qwen2.5-0.5B-Instruct",
    "Qwen/Qwen2.5-7B-Instruct",
    "Qwen/Qwen3-0.6B",
    "Qwen/Qwen3-4B",
    "Qwen/Qwen3-8B",
    "Qwen/Qwen3-14B",
    "Qwen/Qwen3-30B-A3B",
    "google/gemma-2-9b-it",
    "google/gemma-3-1b-it",
    "google/gemma-3-4b-it",
    "google/gemma-3-12b-it",
    "mistralai/Mistral-7B-Instruct-v0.3",
    "mistralai/Mistral-Nemo-Instruct-2407",
    "mistralai/Mistral-Small-24B-Instruct-2501",
    "mistralai/Mixtral-8x7B-v0.1",
    "microsoft/Phi-3.5-mini-instruct",
    "microsoft/Phi-4-mini-instruct",
    "microsoft/phi-4",
    "unsloth/gpt-oss-20b-BF16",
    "HuggingFaceTB/SmolLM3-3B",
    "THUDM/glm-4-9b-chat-hf",
    "ibm-granite/granite-3.1-8b-instruct",
    "allenai/OLMo-2-1124-7B-Instruct",
    "LiquidAI/LFM2-1.2B",
)
"""Hub ids whose architecture is known without the network."""

GPU = get_gpu("h100_sxm")


def one_of_each_class() -> list[str]:
    found = {}
    for model in KNOWN:
        entry = get_entry(model)
        if entry is not None:
            found.setdefault(entry.config["model_type"], model)
    return list(found.values())


def test_every_one_is_known():
    assert [model for model in KNOWN if get_entry(model) is None] == []


def answered(model, precision):
    space, configuration = one_configuration(None, model, {"precision": precision})
    found = predict(Subject(space.workload, model), configuration, GPU)
    assert found.memory.peak_allocated_bytes > found.memory.loaded_bytes > 0
    assert 0 < found.trainable_params < found.total_params
    return found


@pytest.mark.parametrize(
    ("model", "precision"),
    [
        *[(model, "bf16") for model in KNOWN[::12]],
        # With few layers, models of one class differ in their sizes alone.
        *[pytest.param(model, "nf4", marks=pytest.mark.proof) for model in one_of_each_class()],
    ],
)
def test_known_models_answer_by_default(model, precision, tmp_path):
    entry = get_entry(model)
    answered(shallow(entry.id, tmp_path), precision)


@pytest.mark.proof
@pytest.mark.parametrize("model", KNOWN[1::15])
def test_known_models_answer_at_full_depth(model):
    space, configuration = one_configuration(None, model, {"precision": "nf4"})
    predictor = Predictor(space.workload, space.predicted_model())
    found = predictor.predict([configuration], GPU)[0]
    assert found.total_params >= (get_entry(model).params or 0)
