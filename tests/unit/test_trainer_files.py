"""Settings files of trainers as people write them: small files, one for each kind of setting."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from tuner.app.program_oracle import PredictedProgram
from tuner.core.errors import InputError
from tuner.program.planned import ProgramPlan, plan_program
from tuner.program.program import read_program
from tuner.space.gpus import get_gpu

AXOLOTL = """\
base_model: tiny-llama-3m
datasets: [{path: data.jsonl, type: alpaca}]
sequence_len: 512
micro_batch_size: 2
attn_implementation: flash_attention_2
"""
LORA = "adapter: lora\nlora_r: 8\nlora_target_linear: true\n"
CUT = "plugins:\n  - axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin\n"
FSDP2 = "fsdp_version: 2\nfsdp_config:\n  auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"

FACTORY = """\
model_name_or_path: tiny-llama-3m
stage: {stage}
finetuning_type: {kind}
lora_target: all
cutoff_len: 512
per_device_train_batch_size: 2
bf16: true
"""

RECIPE = """\
model: {_component_: torchtune.models.llama3_2.llama3_2_1b}
tokenizer: {max_seq_len: null}
dataset: {_component_: torchtune.datasets.alpaca_cleaned_dataset, packed: False}
batch_size: 2
optimizer: {_component_: bitsandbytes.optim.PagedAdamW}
"""


def planned(folder: Path, text: str, *words: str, gpus: int | None = None) -> ProgramPlan:
    (folder / "file.yaml").write_text(text)
    command = (*words, "file.yaml")
    return plan_program(read_program(command, folder, is_run=False), gpus=gpus)


def chosen(plan: ProgramPlan, *names: str) -> tuple[object, ...]:
    return tuple(plan.configuration.get(name) for name in names)


def refusals(folder: Path, text: str, **more) -> str:
    with pytest.raises(InputError) as caught:
        planned(folder, text, **more)
    return "; ".join(map(str, caught.value.problems))


def test_plugins_are_read_by_what_they_do(tmp_path):
    plan = planned(tmp_path, AXOLOTL + LORA + CUT)
    assert chosen(plan, "loss") == ("chunked",)
    assert not plan.at_most
    assert any("cut_cross_entropy: as TRL's chunked loss" in text for text in plan.left_out)
    off = planned(tmp_path, AXOLOTL + LORA + CUT + "cut_cross_entropy: false\n")
    assert chosen(off, "loss") == ("transformers",)

    liger = "plugins: [axolotl.integrations.liger.LigerPlugin]\nliger_cross_entropy: true\n"
    plan = planned(tmp_path, AXOLOTL + LORA + liger + "liger_rms_norm: true\n")
    assert chosen(plan, "loss", "fused_loss") == ("transformers", True)
    [text] = plan.at_most
    assert "file.yaml:11 liger_rms_norm: Liger's kernel isn't modelled" in text

    other = "plugins: [axolotl.integrations.diffusion.DiffusionPlugin]\n"
    assert "plugins: has DiffusionPlugin" in refusals(tmp_path, AXOLOTL + LORA + other)


def test_an_upper_bound_that_does_not_fit_is_unknown(tmp_path):
    plan = planned(tmp_path, AXOLOTL + LORA + "activation_offloading: true\n")
    whole = planned(tmp_path, AXOLOTL + LORA)

    def verdict(plan: ProgramPlan, *, fits: bool) -> bool | None:
        prediction = SimpleNamespace(fits=fits)
        return PredictedProgram((), get_gpu("rtx4090"), plan, prediction).fits

    assert [verdict(plan, fits=fits) for fits in (True, False)] == [True, None]
    assert [verdict(whole, fits=fits) for fits in (True, False)] == [True, False]


def test_all_weights_are_trained_in_one_dtype_where_the_attention_wants_it(tmp_path):
    assert chosen(planned(tmp_path, AXOLOTL), "lora_rank", "precision") == (0, "bf16")
    sdpa = AXOLOTL.replace("flash_attention_2", "sdpa")
    [widened] = planned(tmp_path, sdpa).at_least
    assert "embeddings and norms" in widened
    assert chosen(planned(tmp_path, sdpa + CUT), "precision") == ("bf16",)


@pytest.mark.parametrize("kernel", ["flex_attention", "xformers", "flash_attention_3"])
def test_kernels_that_keep_as_much_as_flash_attention_are_that(tmp_path, kernel):
    plan = planned(tmp_path, AXOLOTL.replace("flash_attention_2", kernel) + LORA)
    assert chosen(plan, "attention") == ("flash_attention_2",)
    assert any(f"{kernel}, as flash_attention_2" in text for text in plan.left_out)


def test_a_pattern_chooses_the_modules_that_peft_finds_with_it(tmp_path):
    pattern = r"model.layers.[\d]+.(mlp|self_attn).(up|q)_proj"
    lora = f"adapter: lora\nlora_target_modules: '{pattern}'\n"
    assert chosen(planned(tmp_path, AXOLOTL + lora), "lora_targets") == ((pattern,),)
    several = "adapter: lora\nlora_target_modules: ['(up|q)_proj', k_proj]\n"
    assert "peft takes a pattern alone" in refusals(tmp_path, AXOLOTL + several)


def test_fsdp_of_a_tool_asks_for_the_number_of_gpus(tmp_path):
    assert "e.g. --gpus 8" in refusals(tmp_path, AXOLOTL + FSDP2)
    text = AXOLOTL + FSDP2 + "  offload_params: true\noptimizer: adamw_torch_8bit\n"
    plan = planned(tmp_path, text, gpus=4)
    assert chosen(plan, "distributed", "gpus_per_trial") == ("fsdp2", 4)
    assert chosen(plan, "optimizer") == ("adamw_torch_fused",)
    assert len(plan.at_most) == 2
    old = planned(tmp_path, AXOLOTL + "fsdp: [full_shard, auto_wrap]\n", gpus=4)
    assert any("FSDP1, as FSDP2" in text for text in old.left_out)


def test_deepspeeds_settings_that_save_memory_make_an_upper_bound(tmp_path):
    zero = {"stage": 3, "offload_param": {"device": "cpu"}, "sub_group_size": 0}
    zero |= {"stage3_prefetch_bucket_size": "auto"}
    told = {"zero_optimization": zero, "bf16": {"enabled": "auto"}}
    (tmp_path / "zero.json").write_text(json.dumps(told))
    plan = planned(tmp_path, AXOLOTL + "deepspeed: zero.json\n", gpus=2)
    assert chosen(plan, "distributed") == ("zero3",)
    assert [text.split(": ")[0].rpartition(".")[2] for text in plan.at_most] == [
        "offload_param",
        "sub_group_size",
    ]


def test_two_buckets_are_there_where_one_is_sent_as_the_other_fills(tmp_path):
    zero = {"zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 1e6}}
    (tmp_path / "zero.json").write_text(json.dumps({**zero, "bf16": {"enabled": True}}))
    plan = planned(tmp_path, AXOLOTL + "deepspeed: zero.json\n", gpus=2)
    assert chosen(plan, "distributed", "reduce_bucket_size") == ("zero2", 2_000_000)


def test_preference_and_reward_have_two_sequences(tmp_path):
    dpo = planned(tmp_path, AXOLOTL + LORA + "rl: dpo\n")
    assert chosen(dpo, "micro_batch", "reference_pass") == (4, True)
    assert (dpo.sequences, dpo.settings["micro_batch"]) == (2, 2)
    assert chosen(dpo, "reference_model") == (False,)
    assert chosen(planned(tmp_path, AXOLOTL + "rl: dpo\n"), "reference_model") == (True,)
    orpo = planned(tmp_path, AXOLOTL + "rl: orpo\n")
    assert chosen(orpo, "micro_batch", "reference_pass") == (4, None)
    kto = planned(tmp_path, AXOLOTL + LORA + "rl: kto\n")
    assert chosen(kto, "micro_batch", "reference_pass") == (2, True)
    assert "rl: grpo" in refusals(tmp_path, AXOLOTL + LORA + "rl: grpo\n")
    reward = planned(tmp_path, AXOLOTL + LORA + CUT + "reward_model: true\n")
    assert chosen(reward, "num_labels", "micro_batch", "loss") == (1, 4, "transformers")


@pytest.mark.parametrize(
    ("stage", "more", "micro_batch", "reference", "bounds"),
    [
        ("pt", "", 2, None, 0),
        ("dpo", "", 4, True, 0),
        ("dpo", "pref_loss: orpo\n", 4, None, 0),
        ("kto", "", 2, True, 0),
        ("rm", "", 4, None, 1),
    ],
)
def test_stages_of_llama_factory(tmp_path, stage, more, micro_batch, reference, bounds):
    plan = planned(tmp_path, FACTORY.format(stage=stage, kind="lora") + more)
    assert chosen(plan, "micro_batch", "reference_pass") == (micro_batch, reference)
    assert len(plan.at_most) == bounds


def test_kernels_and_frozen_layers_of_llama_factory_make_an_upper_bound(tmp_path):
    sft = FACTORY.format(stage="sft", kind="freeze") + "enable_liger_kernel: true\n"
    plan = planned(tmp_path, sft)
    assert (chosen(plan, "loss", "lora_rank"), len(plan.at_most)) == (("liger", 0), 1)
    dpo = FACTORY.format(stage="dpo", kind="lora") + "enable_liger_kernel: true\n"
    assert chosen(planned(tmp_path, dpo), "loss") == ("transformers",)
    assert "stage: ppo" in refusals(tmp_path, FACTORY.format(stage="ppo", kind="lora"))


def test_a_recipe_takes_the_longest_example_of_its_data_set(tmp_path):
    single = ("tune", "run", "full_finetune_single_device", "--config")
    plan = planned(tmp_path, RECIPE + "optimizer_in_bwd: True\n", *single)
    assert chosen(plan, "max_length", "optimizer") == (1304, "paged_adamw_32bit")
    assert chosen(plan, "optimizer_in_backward", "max_grad_norm") == (True, 0)
    assert "max_length=1304: the longest example of alpaca_cleaned_dataset" in plan.assumed
    more = "enable_activation_checkpointing: True\nenable_activation_offloading: True\n"
    assert chosen(planned(tmp_path, RECIPE + more, *single), "activation_offloading") == (True,)
    assert not plan.at_most
    # A packed row is as long as it is told to be.
    assert "--set max_length" in refusals(tmp_path, RECIPE.replace("packed: False", "packed: True"))


def test_a_distributed_recipe_shares_the_model(tmp_path):
    words = ("tune", "run", "--nproc_per_node", "4", "full_finetune_distributed", "--config")
    plan = planned(tmp_path, RECIPE + "fsdp_reshard_after_forward: False\n", *words)
    names = ("distributed", "gpus_per_trial", "reshard_after_forward", "sync_each_batch")
    assert chosen(plan, *names) == ("fsdp2", 4, False, True)
