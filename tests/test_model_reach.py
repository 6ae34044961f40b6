"""Kinds of models beyond the usual decoder: priced as they train, or refused with the reason."""

import json
from typing import Any

import peft
import pytest
import torch
import transformers
from click.testing import CliRunner
from estimate_samples import tiny_config, traced

from tuner.app.cli.main import cli
from tuner.app.estimate import one_configuration
from tuner.core.errors import InputError
from tuner.core.records import MemoryCategory
from tuner.predict.compiler.deepening import layer_types, with_layers
from tuner.predict.compiler.repetition import Different
from tuner.predict.predict import check_supported
from tuner.predict.training.quantized import adaptable_names
from tuner.space.gpus import get_gpu
from tuner.space.models.catalogue import architecture, load_catalogue, resolve_config
from tuner.space.models.config_fields import table_positions
from tuner.space.models.trainable import model_defaults, require_quantization, require_trained

ALL = ("all-linear",)
FEW = {"num_hidden_layers": 2, "vocab_size": 320}


def experts_config(**values: Any) -> Any:
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 128}
    return transformers.MixtralConfig(
        hidden_size=64, num_attention_heads=4, num_key_value_heads=2, **FEW, **sizes, **values
    )


def write_config(folder: Any, config: Any, **more: Any) -> str:
    config.save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **more}))
    return str(folder)


def estimate(*arguments: str) -> Any:
    return CliRunner().invoke(cli, ["estimate", *arguments])


def refusal(*arguments: str) -> str:
    """What `tuner estimate` says of what it refuses."""
    error = estimate(*arguments).exception
    assert isinstance(error, InputError), error
    return "; ".join([str(error), *(problem.message for problem in error.problems)])


def blocks(trace: Any, *, shape: tuple[int, ...], dtype: torch.dtype) -> list[Any]:
    return [b for b in trace.timeline.blocks if b.shape == shape and b.dtype is dtype]


# -- experts ---------------------------------------------------------------------------------


def test_adapters_on_experts_are_traced():
    trace = traced(experts_config(), lora_targets=ALL, mixed_precision="bf16")
    # peft adapts the experts' tensors too, gate and up with rank 8 each, for each of four experts.
    assert blocks(trace, shape=(2 * 8 * 4, 64), dtype=torch.float32)


def test_k_bit_preparation_widens_experts_which_bitsandbytes_leaves_alone():
    trace = traced(experts_config(), lora_targets=("q_proj",), precision="nf4")
    gate_and_up = blocks(trace, shape=(4, 2 * 128, 64), dtype=torch.float32)
    assert len([b for b in gate_and_up if b.died_event < 0]) == 2
    assert not blocks(trace, shape=(4 * 2 * 128 * 64 // 2, 1), dtype=torch.uint8)


def test_layers_that_stay_whole_are_named():
    falcon = transformers.FalconConfig(hidden_size=1024, num_attention_heads=8, **FEW)
    assert traced(falcon, lora_targets=ALL, precision="nf4").remarks == (
        "bitsandbytes leaves FalconLinear as they are, not quantised",
    )
    assert traced(falcon, lora_targets=ALL).remarks == ()


def test_without_kernels_for_experts_gradients_of_frozen_ones_are_made():
    trace = {
        capability: traced(
            experts_config(),
            lora_targets=("q_proj",),
            precision="fp16",
            compute_capability=capability,
        )
        for capability in ((7, 5), (8, 0))
    }
    made = {
        capability: blocks(t, shape=(4, 64, 2 * 128), dtype=torch.float16)
        for capability, t in trace.items()
    }
    assert len(made[7, 5]) > len(made[8, 0])


# -- paths of devices ------------------------------------------------------------------------


def test_latent_attention_is_traced():
    config = transformers.DeepseekV3Config(
        hidden_size=64, intermediate_size=128, moe_intermediate_size=32, num_attention_heads=4,
        num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=16,
        qk_nope_head_dim=16, v_head_dim=16, n_routed_experts=8, n_group=2, topk_group=1,
        num_experts_per_tok=2, first_k_dense_replace=1, **FEW,
    )  # fmt: skip
    trace = traced(config, lora_targets=ALL, precision="fp32")
    assert trace.trainable_params > 0


def test_kinds_of_layers_that_follow_from_a_period_are_left_to_the_full_trace():
    config = transformers.JambaConfig(num_hidden_layers=16)
    with pytest.raises(Different, match="no model of this kind has the layers"):
        with_layers(config, [layer_types(config)[0], "attention", "attention"])


# -- defaults that a class does not have -----------------------------------------------------


def test_what_the_catalogue_says_of_attention_is_what_its_classes_say():
    for entry in load_catalogue().values():
        model_class = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(
            type(resolve_config(entry.id)), None
        )
        if model_class is not None:
            eager = model_defaults(entry.id).get("attention") == "eager"
            assert eager is not model_class._supports_sdpa, entry.id
            assert model_class.supports_gradient_checkpointing


def test_eager_attention_is_chosen_where_there_is_nothing_else_and_said(tmp_path):
    config = transformers.BloomConfig(hidden_size=64, n_layer=2, n_head=4, vocab_size=320)
    model = write_config(tmp_path, config, architectures=["BloomForCausalLM"])
    _, chosen = one_configuration(None, model, {})
    assert chosen["attention"] == "eager"
    result = estimate("--model", model, "--gpu", "a6000")
    assert result.exit_code == 0, result.output
    assert "note    attention=eager" in result.output
    said = refusal("--model", model, "--gpu", "a6000", "--set", "attention=sdpa")
    assert "cannot build this model with attention sdpa" in said


def test_gradient_checkpointing_that_a_class_lacks(tmp_path):
    config = transformers.CTRLConfig(n_embd=64, dff=128, n_layer=2, n_head=4, vocab_size=320)
    model = write_config(tmp_path, config, architectures=["CTRLLMHeadModel"])
    assert model_defaults(model) == {"gradient_checkpointing": False}
    with pytest.raises(InputError, match="CTRLLMHeadModel of transformers has no gradient"):
        traced(config, lora_targets=ALL, gradient_checkpointing=True)


def test_adapters_that_peft_refuses():
    config = transformers.MambaConfig(hidden_size=64, **FEW)
    with pytest.raises(InputError, match="peft cannot put adapters"):
        traced(config, lora_targets=("in_proj", "out_proj"), attention="eager")


def test_an_export_names_what_peft_can_adapt(tmp_path):
    config = transformers.MambaConfig(hidden_size=64, **FEW)
    names = adaptable_names(config)
    assert names == ("dt_proj", "in_proj", "x_proj")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    peft.get_peft_model(model, peft.LoraConfig(target_modules=list(names), task_type="CAUSAL_LM"))
    assert adaptable_names(tiny_config("llama")) == ()


def test_all_linear_is_what_peft_can_adapt_and_the_rest_is_named():
    config = transformers.MambaConfig(hidden_size=64, **FEW)
    mamba = traced(config, lora_targets=ALL, attention="eager")
    assert mamba.remarks == ("all-linear without out_proj, which peft cannot adapt",)
    assert mamba.trainable_params > 0
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    phimoe = transformers.PhimoeConfig(num_local_experts=4, intermediate_size=128, **sizes, **FEW)
    named = ("all-linear without router, which peft cannot adapt",)
    assert traced(phimoe, lora_targets=ALL).remarks == named
    # A linear layer of its own class that computes a product gets an adapter.
    falcon = transformers.FalconConfig(hidden_size=64, num_attention_heads=4, **FEW)
    assert traced(falcon, lora_targets=ALL).remarks == ()


# -- what a prediction must not take for something else --------------------------------------


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (transformers.WhisperConfig(), "WhisperForConditionalGeneration"),
        (transformers.BartConfig(), "BartForConditionalGeneration"),
        (transformers.BertConfig(), "BertForSequenceClassification"),
        (transformers.LlamaConfig(), "LlamaForSequenceClassification"),
        (transformers.T5Config(), "T5ForConditionalGeneration"),
    ],
)
def test_what_is_no_causal_language_model_is_refused(config, name):
    config.architectures = [name]
    with pytest.raises(InputError, match="no causal language model"):
        require_trained(config)


@pytest.mark.parametrize("method", ["awq", "gptq", "fp8", "mxfp4"])
def test_a_quantised_checkpoint_is_not_priced_as_bf16(tmp_path, method):
    quantised = {"quantization_config": {"quant_method": method, "bits": 4}}
    architectures = ["LlamaForCausalLM"]
    model = write_config(tmp_path, tiny_config(), architectures=architectures, **quantised)
    said = refusal("--model", model, "--gpu", "a6000")
    assert f"quantised with {method}, which is not predicted" in said


@pytest.mark.parametrize(
    ("model", "gpu", "precision"),
    [
        ("Qwen/Qwen3-8B-AWQ", "a6000", "bf16"),
        ("Qwen/Qwen3-8B-GPTQ-Int4", "h100_sxm", "nf4"),
        ("Qwen/Qwen3-8B-FP8", "h100_sxm", "bf16"),
        ("Qwen/Qwen3-8B-FP8", "a100_80gb", "nf4"),  # which cannot quantise it once more
        ("deepseek-ai/DeepSeek-V3", "h100_sxm", "bf16"),
        ("openai/gpt-oss-20b", "h100_sxm", "nf4"),
        ("unsloth/Qwen3-8B-bnb-4bit", "a6000", "bf16"),
    ],
)
def test_a_copy_of_a_catalogue_model_is_not_priced_in_another_format(model, gpu, precision):
    said = refusal("--model", model, "--gpu", gpu, "--set", f"precision={precision}")
    assert f"of which {precision} is not predicted. Allowed: " in said


@pytest.mark.parametrize(
    ("model", "gpu", "precision"),
    [
        ("qwen3-8b", get_gpu("h100_sxm"), "bf16"),
        ("Qwen/Qwen3-8B-FP8", get_gpu("a100_80gb"), "bf16"),  # without FP8: dequantised
        ("openai/gpt-oss-20b", get_gpu("h100_sxm"), "bf16"),
        ("unsloth/gpt-oss-20b-BF16", get_gpu("h100_sxm"), "nf4"),
        ("unsloth/Qwen3-8B-bnb-4bit", get_gpu("a6000"), "nf4"),
    ],
)
def test_a_copy_is_priced_in_the_format_that_it_trains_in(model, gpu, precision):
    space, configuration = one_configuration(None, model, {"precision": precision})
    assert check_supported(configuration, gpu, model=architecture(space.model)) == []


def test_a_checkpoint_of_bitsandbytes_is_what_it_is():
    config = tiny_config()
    own = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True}
    config.quantization_config = {**own, "llm_int8_skip_modules": ["lm_head", "v_proj"]}
    skipped = require_quantization(config, "nf4", double_quant=True)
    assert skipped == ("lm_head", "v_proj")
    with pytest.raises(InputError, match="nf4 already, and precision is bf16"):
        require_quantization(config, "bf16", double_quant=True)
    with pytest.raises(InputError, match="double_quant is false"):
        require_quantization(config, "nf4", double_quant=False)
    width = config.hidden_size * config.num_key_value_heads // config.num_attention_heads
    trace = traced(config, precision="nf4")
    assert blocks(trace, shape=(width, config.hidden_size), dtype=torch.bfloat16)


def test_a_head_of_another_name_is_not_quantised():
    config = transformers.GPTNeoXConfig(
        hidden_size=64, intermediate_size=128, num_attention_heads=4, tie_word_embeddings=False,
        **FEW,
    )  # fmt: skip
    trace = traced(config, lora_targets=("query_key_value",), precision="nf4")
    weights = [b for b in trace.timeline.blocks if b.category is MemoryCategory.WEIGHTS]
    assert sum(b.shape == (config.vocab_size, 64) for b in weights) == 2


# -- lengths and kernels ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "sizes"),
    [
        ("gpt2", {"n_positions": 16, "n_embd": 32, "n_layer": 1, "n_head": 2}),
        ("gptj", {"n_positions": 16, "n_embd": 32, "n_layer": 1, "n_head": 2, "rotary_dim": 8}),
        ("codegen", {"n_positions": 16, "n_embd": 64, "n_layer": 1, "n_head": 4, "rotary_dim": 8}),
        ("ctrl", {"n_positions": 16, "n_embd": 32, "dff": 64, "n_layer": 1, "n_head": 2}),
        ("openai-gpt", {"n_positions": 16, "n_embd": 32, "n_layer": 1, "n_head": 2}),
        ("opt", {"max_position_embeddings": 16, "hidden_size": 32, "ffn_dim": 64,
                 "num_hidden_layers": 1, "num_attention_heads": 2, "word_embed_proj_dim": 32}),
        ("biogpt", {"max_position_embeddings": 16, "hidden_size": 32, "intermediate_size": 64,
                    "num_hidden_layers": 1, "num_attention_heads": 2}),
        ("gpt_neo", {"max_position_embeddings": 16, "hidden_size": 32, "num_layers": 1,
                     "attention_types": [[["global"], 1]], "num_heads": 2}),
        ("xlm-roberta", {"max_position_embeddings": 18, "hidden_size": 32,
                         "intermediate_size": 64, "num_hidden_layers": 1,
                         "num_attention_heads": 2, "is_decoder": True}),
    ],
)  # fmt: skip
def test_a_table_of_positions_ends_where_the_model_ends(model_type, sizes):
    config = transformers.CONFIG_MAPPING[model_type](vocab_size=64, **sizes)
    assert table_positions(config.to_dict()) == 16
    model = transformers.AutoModelForCausalLM.from_config(config)
    tokens = torch.randint(5, 60, (1, 17))
    model(input_ids=tokens[:, :16])
    with pytest.raises((IndexError, RuntimeError)):
        model(input_ids=tokens)


def test_a_length_beyond_the_positions_is_refused():
    said = refusal("--model", "gpt2", "--gpu", "a6000", "--set", "max_length=4096")
    assert "max_length 4096 is longer than the 1024 positions of the model" in said
    assert architecture("gpt2").positions == 1024
    assert architecture("llama-3.1-8b").positions is None
