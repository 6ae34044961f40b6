"""Predictions with Liger's kernels, beside what the emulator says of the kernels themselves.

The bytes are the allocated peaks of TRL 1.16's SFTTrainer on an emulated RTX 4090 with liger-kernel
0.8.5: models of four layers in bf16, 4 rows of 512 tokens; LoRA of rank 16 on all linear layers
without checkpointing, and all weights with it.
"""

import pytest

from tuner.app.estimate import asked
from tuner.core.errors import InputError
from tuner.predict.predict import predict
from tuner.predict.traces import Subject
from tuner.space.gpus import get_gpu
from tuner.space.models.catalogue import resolve_config

EMULATED = {
    "qwen3-0.6b": (1_081_717_248, 2_434_723_328),
    "llama-3.2-1b": (1_995_213_312, 4_841_874_944),
    "gemma-3-1b": (1_637_066_240, 4_472_307_200),
    "gemma-2-2b": (3_237_045_760, 9_193_627_136),
    "granite-3.1-2b": (1_670_134_272, 2_978_500_096),
    "smollm3-3b": (2_302_430_208, 5_292_615_168),
}
METHODS = (
    {"lora_rank": 16, "gradient_checkpointing": False},
    {"lora_rank": 0, "gradient_checkpointing": True},
)
CASES = [
    pytest.param(model, settings, peak, marks=[pytest.mark.proof] * (model not in [*EMULATED][::2]))
    for model, peaks in EMULATED.items()
    for settings, peak in zip(METHODS, peaks, strict=True)
]


def predicted(folder, model, **settings):
    config = resolve_config(model)
    config.num_hidden_layers = 4
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:4]
    config.save_pretrained(folder)
    gpu, given = get_gpu("rtx4090"), {"precision": "bf16", "micro_batch": 4, "max_length": 512}
    given |= {"mixed_precision": "bf16", "liger": True, **settings}
    configuration = asked(None, str(folder), given, loop="trl", gpu=gpu).configuration
    return predict(Subject("causal_lm", str(folder)), configuration, gpu)


@pytest.mark.parametrize(("model", "settings", "peak"), CASES)
def test_memory_with_ligers_kernels_is_that_of_the_emulated_training(
    tmp_path, model, settings, peak
):
    found = predicted(tmp_path, model, **settings).memory.peak_allocated_bytes
    assert found == pytest.approx(peak, rel=1e-3)


def test_models_whose_kernels_are_not_known_are_refused():
    gpu, given = get_gpu("rtx4090"), {"precision": "bf16", "lora_targets": "c_attn"}
    configuration = asked(None, "gpt2", given, loop="trl", gpu=gpu).configuration
    with pytest.raises(InputError, match="not predicted for models of type 'gpt2'"):
        predict(Subject("causal_lm", "gpt2"), configuration.replace(liger=True), gpu)
