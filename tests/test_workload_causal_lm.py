"""The workload builds what the libraries themselves would: layers, loss, optimizer, adapters."""

import math

import pytest
import torch
from estimate_samples import configuration, tiny_config

from tuner.core.errors import InputError
from tuner.core.records import MemoryCategory, Phase
from tuner.core.setup.common import OPTIMIZERS
from tuner.predict.tracing.trace import trace
from tuner.predict.training import get_workload, tokens_per_sample
from tuner.predict.training.causal_lm_settings import TrainingSetup
from tuner.predict.training.losses import use_loss
from tuner.predict.training.quantized import logical_numel, quantize_linears, quantized_tensors
from tuner.predict.training.session import build_optimizer


def build(model: str = "llama", **sizes):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(tiny_config(model, **sizes))


# -- settings -------------------------------------------------------------------------------


def test_what_a_configuration_leaves_out_has_the_default_of_the_vocabulary():
    setup = TrainingSetup.of({"lora_rank": 8, "effective_batch": 8, "micro_batch": 2})
    assert (setup.adapter.alpha, setup.batch.accumulation) == (16, 4)
    assert setup.adapter.targets == ("all-linear",)
    assert setup.update.max_grad_norm == 1.0  # TrainingArguments
    assert (setup.precision.weights, setup.autocast_dtype) == ("bf16", torch.bfloat16)
    assert TrainingSetup.of({"precision": "fp32"}).autocast_dtype is None


@pytest.mark.parametrize("value", ["four", True, None])
def test_what_is_not_a_number_is_refused(value):
    with pytest.raises(InputError, match="must be a whole number"):
        TrainingSetup.of(configuration(micro_batch=value))


@pytest.mark.parametrize(
    ("precision", "mixed_precision", "dtype"),
    [
        ("fp32", "no", torch.float32),
        ("fp32", "bf16", torch.float32),  # weights stay in fp32, products do not
        ("fp16", "no", torch.float16),
        ("bf16", "bf16", torch.bfloat16),
        ("nf4", "bf16", torch.bfloat16),
        ("nf4", "fp16", torch.float16),
        ("nf4", "no", torch.bfloat16),
    ],
)
def test_dtype_of_the_weights_that_stay_unquantised(precision, mixed_precision, dtype):
    values = configuration(precision=precision, mixed_precision=mixed_precision)
    assert TrainingSetup.of(values).load_dtype is dtype


def test_samples_are_as_long_as_the_configuration_says():
    values = configuration(max_length=1536)
    assert tokens_per_sample("causal_lm", values) == 1536
    with pytest.raises(InputError, match="causal_lm"):
        tokens_per_sample("causal_ml", values)
    with pytest.raises(InputError, match="causal_lm"):
        get_workload("causal_ml")


# -- quantised layers -----------------------------------------------------------------------


def layouts(tensors) -> list:
    return [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]


@pytest.mark.parametrize("double_quant", [True, False])
def test_nf4_layers_hold_the_tensors_that_bitsandbytes_makes(double_quant):
    from bitsandbytes.functional import quantize_4bit

    weight = build().model.layers[0].mlp.gate_proj.weight.detach()
    codes, state = quantize_4bit(
        weight, blocksize=64, compress_statistics=double_quant, quant_type="nf4"
    )
    model = build()
    quantize_linears(model, precision="nf4", dtype=torch.bfloat16, double_quant=double_quant)
    made = model.model.layers[0].mlp.gate_proj.weight
    assert layouts([made]) == layouts([codes])
    assert layouts(quantized_tensors_of(made)) == layouts(quantized_tensors_of(state))
    assert made.quant_state.shape == weight.shape
    assert made.quant_state.dtype is torch.bfloat16


def quantized_tensors_of(holder) -> list[torch.Tensor]:
    state = getattr(holder, "quant_state", holder)
    tensors = [state.absmax, state.code]
    if state.nested:
        tensors += [state.offset, state.state2.absmax, state.state2.code]
    return tensors


def test_int8_layers_hold_the_tensors_that_bitsandbytes_makes():
    from bitsandbytes.functional import int8_vectorwise_quant

    weight = build().model.layers[0].mlp.gate_proj.weight.detach()
    codes, scales, _ = int8_vectorwise_quant(weight.half())
    model = build()
    quantize_linears(model, precision="int8", dtype=torch.float16)
    made = model.model.layers[0].mlp.gate_proj.weight
    assert layouts([made, made.SCB]) == layouts([codes, scales])


@pytest.mark.parametrize("precision", ["nf4", "int8"])
def test_embedding_and_head_are_not_quantised(precision):
    model = build()
    expected = sum(parameter.numel() for parameter in model.parameters())
    quantize_linears(model, precision=precision, dtype=torch.float16)
    assert model.lm_head.weight.dtype is torch.float32
    assert model.model.embed_tokens.weight.dtype is torch.float32
    assert sum(map(logical_numel, model.parameters())) == expected
    scales = 5 if precision == "nf4" else 1
    assert len(quantized_tensors(model)) == 2 * 7 * scales


def test_odd_numbers_of_weights_fill_their_last_byte():
    model = build(hidden_size=35, intermediate_size=7, num_attention_heads=5, num_key_value_heads=5)
    quantize_linears(model, precision="nf4", dtype=torch.float16)
    weight = model.model.layers[0].mlp.gate_proj.weight
    assert weight.numel() == math.ceil(35 * 7 / 2)
    assert logical_numel(weight) == 35 * 7


# -- loss -----------------------------------------------------------------------------------


def test_the_older_loss_comes_to_the_same_loss():
    torch.manual_seed(0)
    model = build().train()
    tokens = torch.randint(0, 320, (2, 24))
    labels = tokens.clone()
    labels[:, :5] = -100
    expected = model(input_ids=tokens, labels=labels).loss
    use_loss(model, "transformers_4_46", fused=False)
    loss = model(input_ids=tokens, labels=labels).loss
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


# -- optimizer ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name, row in OPTIMIZERS.items() if row.rest is None])
def test_optimizers_are_those_of_the_trainer(name, tmp_path):
    """The class and the options that decide memory, as transformers' Trainer chooses them."""
    from transformers import Trainer, TrainingArguments

    parameters = [torch.nn.Parameter(torch.ones(8, 8))]
    arguments = TrainingArguments(output_dir=str(tmp_path), optim=name, use_cpu=True)
    optimizer_class, options = Trainer.get_optimizer_cls_and_kwargs(arguments)
    options.pop("lr")
    theirs, own = optimizer_class(parameters, lr=1e-4, **options), build_optimizer(name, parameters)
    assert type(own).__module__.split(".")[0] == type(theirs).__module__.split(".")[0]
    assert ("AdamW" in type(own).__name__) == ("AdamW" in type(theirs).__name__)
    assert getattr(own, "is_paged", None) == getattr(theirs, "is_paged", None)
    bits = [getattr(getattr(o, "args", None), "optim_bits", None) for o in (own, theirs)]
    assert bits[0] == bits[1]
    for option in ("fused", "momentum", "amsgrad"):
        assert bool(own.defaults.get(option)) == bool(theirs.defaults.get(option)), option


def test_muon_updates_matrices_and_adamw_the_rest():
    shapes = [(8, 8), (8,), (2, 8, 8), (16, 8)]
    weights = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
    optimizer = build_optimizer("muon", weights, embeddings=weights[3:])
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    states = [sorted(optimizer.state[weight]) for weight in weights]
    adamw = ["exp_avg", "exp_avg_sq", "step"]
    assert states == [["momentum_buffer"], adamw, adamw, adamw]
    assert len(optimizer.param_groups) == 2
    optimizer.zero_grad()
    assert all(weight.grad is None for weight in weights)


@pytest.mark.parametrize("rank", [8, 0])
def test_muon_trains_adapters_and_whole_models(rank):
    values = configuration(optimizer="muon", lora_rank=rank)
    traced = trace(
        get_workload("causal_lm"), tiny_config("llama"), values, compute_capability=(8, 0)
    )
    assert traced.trainable_params


IN_BACKWARD = {"optimizer_in_backward": True, "lora_rank": 0, "grad_accum": 1, "max_grad_norm": 0}


def test_an_update_in_the_backward_pass_has_one_gradient_at_a_time():
    values = configuration(**IN_BACKWARD)
    workload, config = get_workload("causal_lm"), tiny_config("llama")
    traced = trace(workload, config, values, compute_capability=(8, 0))
    blocks = traced.timeline.blocks
    gradients = [b for b in blocks if b.category is MemoryCategory.GRADIENTS]
    gradients.sort(key=lambda block: block.born_event)
    assert len(gradients) >= 2 * len(traced.gradient_bytes)
    assert all(one.died_event >= 0 for one in gradients)
    # The next one is there before a fused kernel's is gone: two at most.
    for one, later in zip(gradients, gradients[2:], strict=False):
        assert one.died_event < later.born_event
    states = [b for b in blocks if b.category is MemoryCategory.OPTIMIZER_STATE]
    assert len(states) == 2 * len(traced.gradient_bytes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"grad_accum": 2}, "grad_accum has to be 1"), ({"max_grad_norm": 1.0}, "max_grad_norm to 0")],
)
def test_an_update_in_the_backward_pass_sums_and_clips_nothing(changes, said):
    values = configuration(**{**IN_BACKWARD, **changes})
    with pytest.raises(InputError) as caught:
        trace(get_workload("causal_lm"), tiny_config("llama"), values, compute_capability=(8, 0))
    assert said in f"{caught.value} {caught.value.hint}"


def test_checkpoints_on_the_host_leave_the_last_ones_on_the_gpu():
    kept = {}
    for on_host in (False, True):
        values = configuration(
            lora_rank=8, gradient_checkpointing=True, activation_offloading=on_host, max_length=64
        )
        config = tiny_config("llama", num_hidden_layers=12)
        traced = trace(get_workload("causal_lm"), config, values, compute_capability=(8, 0))
        end = next(m.event for m in traced.timeline.marks if m.phase is Phase.BACKWARD)
        shape = (values["micro_batch"], 64, config.hidden_size)
        alive = [b for b in traced.timeline.blocks if b.born_event < end < b.died_event]
        kept[on_host] = sum(b.shape == shape for b in alive)
    assert kept[False] >= 12
    assert 0 < kept[True] <= 7  # five whose copies may be under way, and the head's
