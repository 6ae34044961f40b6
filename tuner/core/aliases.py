"""Names that trainers and people use for settings and their values: the only such table."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping


def _table(text: str) -> Mapping[str, tuple[str, ...]]:
    """By the words before a colon: the names behind it, on that line and indented ones below."""
    rows = (row.partition(": ") for row in re.split(r"\n(?=\S)", text.strip()))
    return {key: tuple(names.split()) for key, _, names in rows}


PROGRAM_NAMES = _table("""
micro_batch: per_device_train_batch_size micro_batch_size per_gpu_train_batch_size
    train_micro_batch_size_per_gpu micro_batch train_batch_size batch_size batch bs
grad_accum: gradient_accumulation_steps accumulate_grad_batches grad_accumulation_steps
    accumulation_steps grad_accum_steps grad_accum accum_steps accumulation accum
max_length: max_length max_seq_length sequence_len cutoff_len max_seq_len seq_length seq_len
    block_size
lora_rank: r lora_r lora_rank rank
gradient_checkpointing: gradient_checkpointing activation_checkpointing use_gradient_checkpointing
    enable_activation_checkpointing grad_ckpt disable_gradient_checkpointing
use_reentrant: use_reentrant
optimizer: optim optimizer
attention: attn_implementation
packing: packing sample_packing
fused_kernels: use_liger_kernel
""")
"""By knob: what a program's files and options call it, the most certain name first."""

_NAMES = _table("""
effective_batch: train_batch_size effective_batch_size global_batch_size total_batch_size
    total_train_batch_size gbs
micro_batch: device_train_microbatch_size local_batch_size per_device_batch_size batchsize mbs
grad_accum: gradient_accumulation grad_acc_steps grad_acc ga_steps
max_length: sequence_length model_max_length max_model_len max_tokens context_length context_size
    ctx_len n_ctx
lora_rank: lora_dim lora_attn_dim adapter_rank
eval_batch: per_device_eval_batch_size eval_batch_size
lora_alpha: alpha
lora_dropout: dropout adapter_dropout
lora_rank=0: full full_finetuning full_parameter
not lora_rank=0: lora use_lora use_peft
lora_targets=all-linear: lora_target_linear
lora_targets: target_modules lora_target_modules lora_target lora_attn_modules apply_lora_to_mlp
    targets
modules_to_save: lora_modules_to_save additional_target
adapter=dora: use_dora peft_use_dora
adapter=rslora: use_rslora peft_use_rslora
adapter: peft_type finetuning_type
gradient_checkpointing: checkpointing recompute recompute_activations
use_reentrant: use_reentrant_gc
optimizer: optimizer_name optim_type optimizer_type
attention=flash_attention_2: flash_attention use_flash_attention_2 use_flash_attn
attention=sdpa: sdp_attention sdpa_attention
attention=eager: eager_attention
attention: flash_attn attn_impl attention_implementation
padding=max_length: pad_to_max_length pad_to_sequence_len
precision=nf4: load_in_4bit quantize_base qlora use_qlora int4 4bit nf4
precision=bf16: pure_bf16 load_in_16bit
precision=int8: load_in_8bit int8 8bit
precision=tf32: tf32
precision: dtype torch_dtype model_dtype quantization quantization_bit bits bnb_4bit_quant_type
    quantization_type
mixed_precision=bf16: bf16 bf16.enabled bfloat16
mixed_precision=fp16: fp16 fp16.enabled float16
mixed_precision: amp autocast amp_dtype
compute_dtype: bnb_4bit_compute_dtype
double_quant: bnb_4bit_use_double_quant use_bnb_nested_quant double_quantization use_nested_quant
max_grad_norm: gradient_clip_val gradient_clipping clip_grad_norm grad_clip clip_grad max_norm
loss: loss_type
liger: use_liger_kernel enable_liger_kernel use_liger liger_kernel
torch_compile: compile compile_model
num_workers: dataloader_num_workers n_workers workers
pin_memory: dataloader_pin_memory
prefetch_factor: dataloader_prefetch_factor
persistent_workers: dataloader_persistent_workers
gpus_per_trial: num_gpus n_gpus n_gpu gpus devices nproc_per_node num_processes world_size
machines: nnodes num_nodes num_machines nodes
distributed=fsdp2: fsdp
distributed=ddp: ddp
distributed: distributed_type strategy deepspeed zero_stage zero_optimization.stage
reshard_after_forward: fsdp_reshard_after_forward
dp_shard_size: parallelism_config_dp_shard_size data_parallel_shard_degree dp_shard
offload: cpu_offload
images: num_images
image_size: image_resolution resolution img_size
num_labels: num_classes n_labels
""")
"""More names of a knob, or of knob=value, the likelier knob of a name first (`train_batch_size` is
DeepSpeed's, of all GPUs and micro-steps): those of TrainingArguments, TRL, peft, Axolotl,
LLaMA-Factory, DeepSpeed, torchtune, Unsloth, Lightning and launchers."""

_VALUES = _table("""
nf4: int4 4bit 4 load_in_4bit bnb_4bit qlora q4 w4
int8: 8bit 8 load_in_8bit bnb_8bit llm_int8 q8 w8
bf16: bfloat16 torch.bfloat16 bf16-mixed bf16-true bf
fp16: float16 torch.float16 half f16 16 16-mixed 16-true
fp32: float32 torch.float32 float f32 32 32-true
tf32: tfloat32
no: none false off fp32 float32 32
flash_attention_2: flash flash2 fa2 flash_attn flash_attn_2 flash_attention
    kernels-community/flash-attn2
sdpa: auto sdp scaled_dot_product scaled_dot_product_attention torch_sdpa
eager: disabled vanilla math
adamw_torch: adamw adam adamw_hf torch.optim.AdamW
adamw_torch_fused: fused adamw_fused fused_adamw
adamw_8bit: adam8bit adam_8bit adamw8bit 8bit 8bit_adam adamw_bnb
paged_adamw_8bit: pagedadamw8bit paged_adam_8bit paged_8bit
paged_adamw_32bit: pagedadamw32bit paged_adam_32bit paged_adamw paged_adam
lion_32bit: lion
paged_lion_32bit: paged_lion
lora: peft qlora
fsdp2: fsdp fully_shard full_shard
ddp: multi_gpu data_parallel distributed_data_parallel
hsdp: hybrid_shard
zero3: zero deepspeed deepspeed_stage_3 stage3 3
zero2: deepspeed_stage_2 stage2 2
zero1: deepspeed_stage_1 stage1 1
""")
"""By value of a knob: what else it is called."""

COMBINED: Mapping[str, str] = {
    "adapter=qlora": "precision=nf4",
    "adapter=none": "lora_rank=0",
    "adapter=full": "lora_rank=0",
}
"""Values of a knob that stand for a value of another."""

NO_EFFECT = (
    "random_state", "steps_per_print", "wall_clock_breakdown", "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer", "scheduler", "flops_profiler", "tensorboard", "comms_logger",
)  # fmt: skip
"""Names of Unsloth and DeepSpeed that change neither memory nor speed; the readers of other
trainers know theirs."""


def meant(word: str, allowed: Iterable[str]) -> str | None:
    """Tuner's own name for `word`, if it is among `allowed`; None for an unknown word.

    A name that stands for a value too is answered with both: "precision=nf4" for "load_in_4bit".
    """
    known = set(allowed)
    for name in meanings(word):
        if name.partition("=")[0] in known:
            return name
    return None


def meanings(word: str) -> tuple[str, ...]:
    """All that `word` may mean: "knob", "knob=value", "not knob=value", or a value."""
    return _meanings().get(_key(word), ())


@functools.cache
def _meanings() -> Mapping[str, tuple[str, ...]]:
    """By what people write: names and values of tuner, the likeliest first."""
    found: dict[str, list[str]] = {}
    for table in (_NAMES, PROGRAM_NAMES, _VALUES):
        for name, others in table.items():
            for other in others:
                found.setdefault(_key(other), []).append(name)
    return {key: tuple(names) for key, names in found.items()}


def _key(word: str) -> str:
    """Case, dashes, dots and underscores do not matter."""
    return re.sub(r"[^a-z0-9]+", "", word.lower())
