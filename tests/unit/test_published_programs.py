"""Programs as they are published: each test has one thing that many of them do."""

from __future__ import annotations

from pathlib import Path

import pytest

from tuner.core.errors import InputError
from tuner.program.planned import ProgramPlan, plan_program
from tuner.program.program import read_program
from tuner.space.gpus import get_gpu

MODEL = "tiny-llama-3m"
PARSED = """\
import torch
from transformers import AutoModelForCausalLM
from trl import KTOConfig, KTOTrainer, ModelConfig, ScriptArguments, SFTConfig, SFTTrainer
from trl import TrlParser, get_peft_config, get_quantization_config

"""
FILLED = """\
def main(script_args, training_args, model_args):
    training_args.model_init_kwargs = dict(dtype=model_args.dtype)
    SFTTrainer(
        model=model_args.model_name_or_path,
        args=training_args,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    ).train()

if __name__ == "__main__":
    kinds = (ScriptArguments, SFTConfig, ModelConfig)
    parser = TrlParser(kinds)
    script_args, training_args, model_args = parser.parse_args_and_config()
    main(script_args, training_args, model_args)
"""
UNSLOTH = f"""\
from unsloth import FastLanguageModel
from trl import SFTConfig, SFTTrainer
max_seq_length = 2048
model, tokenizer = FastLanguageModel.from_pretrained(
    model_name="unsloth/{MODEL}-bnb-4bit", max_seq_length=max_seq_length, dtype=None)
model = FastLanguageModel.get_peft_model(
    model, r=8, use_gradient_checkpointing="unsloth", random_state=1)
trainer = SFTTrainer(
    model=model, tokenizer=tokenizer, max_seq_length=max_seq_length // 2,
    args=SFTConfig(per_device_train_batch_size=2, output_dir="out"))
trainer.train()
if False:
    model, tokenizer = FastLanguageModel.from_pretrained(model_name="saved")
"""


def planned(folder: Path, text: str, *words: str, gpu: str = "", **given) -> ProgramPlan:
    (folder / "train.py").write_text(text)
    program = read_program(("train.py", *words), folder, is_run=False)
    return plan_program(program, given, gpu=get_gpu(gpu) if gpu else None)


def knobs(plan: ProgramPlan, *names: str) -> tuple[object, ...]:
    return tuple(plan.configuration.get(name) for name in names)


def test_a_model_config_makes_adapters_and_quantization_where_the_words_ask_for_them(tmp_path):
    words = ("--model_name_or_path", MODEL, "--per_device_train_batch_size", "3")
    plan = planned(tmp_path, PARSED + FILLED, *words, "--dtype", "bfloat16")
    assert plan.model == MODEL
    assert knobs(plan, "micro_batch", "precision", "lora_rank") == (3, "bf16", 0)
    words = (*words, "--use_peft", "--load_in_4bit", "--dtype", "bfloat16")
    plan = planned(tmp_path, PARSED + FILLED, *words)
    assert knobs(plan, "precision", "lora_rank", "lora_dropout") == ("nf4", 16, 0.05)


def test_examples_that_are_not_cut_have_no_length(tmp_path):
    text = (
        PARSED
        + f"""\
args = SFTConfig(output_dir="o", max_length=None)
SFTTrainer(model="{MODEL}", args=args).train()
"""
    )
    with pytest.raises(InputError, match="max_length: is None: the longest example decides"):
        planned(tmp_path, text)
    assert knobs(planned(tmp_path, text, max_length=64), "max_length") == (64,)


def test_kto_has_a_reference_which_full_training_keeps_as_a_second_model(tmp_path):
    text = (
        PARSED
        + f"""\
model = AutoModelForCausalLM.from_pretrained("{MODEL}")
{{}}
KTOTrainer(model, {{}}args=KTOConfig(output_dir="o", {{}})).train()
"""
    )
    second = f'ref_model = AutoModelForCausalLM.from_pretrained("{MODEL}")'
    for own, given, more, wanted in (
        ("", "", "", (True, True)),
        (second, "ref_model, ", "", (True, True)),
        ("", "", "precompute_ref_log_probs=True", (None, None)),
    ):
        plan = planned(tmp_path, text.format(own, given, more))
        assert knobs(plan, "reference_pass", "reference_model") == wanted
        assert plan.sequences == 1


@pytest.mark.parametrize("name", ["ORPO", "Reward"])
def test_answers_of_one_example_are_one_batch(tmp_path, name):
    text = f"""\
from trl.experimental.all import {name}Config, {name}Trainer
args = {name}Config(per_device_train_batch_size=3, output_dir="o")
{name}Trainer(model="{MODEL}", args=args).train()
"""
    plan = planned(tmp_path, text)
    assert (plan.sequences, plan.settings["micro_batch"]) == (2, 3)
    labels = 1 if name == "Reward" else None
    assert knobs(plan, "micro_batch", "loss", "num_labels") == (6, "transformers", labels)


def test_a_name_with_a_comma_is_no_module(tmp_path):
    words = ("--use_peft", "--lora_target_modules", "q_proj,", "v_proj")
    plan = planned(tmp_path, PARSED + FILLED, "--model_name_or_path", MODEL, *words)
    assert knobs(plan, "lora_targets") == (("v_proj",),)
    assert any("'q_proj,' is no module" in text for text in plan.left_out)


def test_unsloth_trains_a_quantised_model_with_its_own_defaults(tmp_path):
    plan = planned(tmp_path, UNSLOTH)
    assert plan.trainer == "Unsloth SFTTrainer"
    assert knobs(plan, "precision", "lora_rank", "micro_batch", "grad_accum", "optimizer") == (
        "nf4", 8, 2, 2, "adamw_8bit",
    )  # fmt: skip
    assert knobs(plan, "max_length", "gradient_checkpointing", "use_reentrant") == (
        1024,
        True,
        True,
    )
    assert knobs(plan, "mixed_precision", "compute_dtype", "adapter_dtype") == (
        "bf16", "bf16", "fp32",
    )  # fmt: skip
    assert any("offloading of checkpoints" in text for text in plan.at_most)


def test_unsloth_chooses_fp16_itself_where_the_gpu_has_no_bf16(tmp_path):
    plan = planned(tmp_path, UNSLOTH, gpu="t4")
    assert knobs(plan, "mixed_precision", "compute_dtype") == ("fp16", "fp16")
    assert plan.findings == ()


@pytest.mark.parametrize(
    ("arguments", "finding"),
    [("bf16=True", "train.py:6: bf16=True -> fp16=True"), ("", "SFTConfig: add fp16=True")],
)
def test_bf16_on_turing_is_a_finding_with_its_change(tmp_path, arguments, finding):
    text = (
        PARSED + f"SFTTrainer(model='{MODEL}', args=SFTConfig(output_dir='o', {arguments})).train()"
    )
    plan = planned(tmp_path, text, gpu="t4")
    assert knobs(plan, "mixed_precision", "precision") == ("fp16", "fp32")
    assert len(plan.findings) == 1
    assert finding in plan.findings[0]
    assert planned(tmp_path, text, gpu="rtx4090").findings == ()


def test_a_program_that_asks_for_bf16_gets_the_answer_of_the_gpu(tmp_path):
    text = (
        PARSED
        + f"""\
from unsloth import is_bf16_supported
args = SFTConfig(output_dir="o", fp16=not is_bf16_supported(), bf16=is_bf16_supported())
SFTTrainer(model="{MODEL}", args=args).train()
"""
    )
    for gpu, wanted in (("t4", "fp16"), ("rtx4090", "bf16")):
        plan = planned(tmp_path, text, gpu=gpu)
        assert knobs(plan, "mixed_precision") == (wanted,)
        assert plan.findings == ()


LENGTHS = f"""\
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments
tokenizer = AutoTokenizer.from_pretrained("{MODEL}")
model = AutoModelForCausalLM.from_pretrained("{MODEL}")
rows = load_dataset("x", split="train")
lengths = [len(each["input_ids"]) for each in rows.map(lambda row: tokenizer(row["text"]))]
def cut(row): return tokenizer(row["text"], truncation=True, max_length=96)
"""


def test_the_rows_of_a_trainer_have_the_length_of_their_own_call(tmp_path):
    text = LENGTHS + "some = rows.map(cut).shuffle()\nTrainer(model, train_dataset=some{}).train()"
    assert planned(tmp_path, text.format("")).configuration["max_length"] == 96
    other = ", eval_dataset=rows.map(lambda row: tokenizer(row['text']))"
    with pytest.raises(InputError, match="max_length"):
        planned(tmp_path, text.format(other))


@pytest.mark.parametrize(
    ("library", "starts", "words"),
    [
        ("fire", "fire.Fire({'train': main})", "train 3 --model={} --packing"),
        ("typer", "typer.run(main)", "--batch=3 --model {} --packing"),
        ("tyro", "tyro.cli(main)", "--batch 3 --model {} --packing"),
        ("jsonargparse", "jsonargparse.CLI(main)", "--batch 3 --model {} --packing true"),
        (
            "omegaconf",
            "c = omegaconf.OmegaConf\nmain(**c.merge(c.create({'batch': 2}), c.from_cli()))",
            "batch=3 model={} packing=true",
        ),
    ],
)
def test_a_command_line_is_read_with_or_without_its_library(tmp_path, library, starts, words):
    text = f"""\
import {library}
from trl import SFTConfig, SFTTrainer
def main(batch: int = 2, model: str = "none", length: int = 64, packing: bool = False):
    args = SFTConfig(per_device_train_batch_size=batch, max_length=length, packing=packing)
    SFTTrainer(model, args=args).train()
{starts}
"""
    plan = planned(tmp_path, text, *words.format(MODEL).split())
    assert knobs(plan, "micro_batch", "max_length", "padding") == (3, 64, "packed")


def test_an_unknown_mapping_of_a_trainer_leaves_its_arguments_known(tmp_path):
    text = f"""\
from absent_library import data
from trl import SFTConfig, SFTTrainer
args = SFTConfig(per_device_train_batch_size=3)
SFTTrainer("{MODEL}", args=args, **data()).train()
"""
    with pytest.raises(InputError, match=r"LoRA \?, batch 3 x 1, length 1024") as caught:
        planned(tmp_path, text)
    assert {one.where.rpartition(" ")[2] for one in caught.value.problems} == {
        "lora_rank",
        "optimizer",
    }
    plan = planned(tmp_path, text, lora_rank=0, optimizer="adamw_8bit")
    assert knobs(plan, "lora_rank", "optimizer", "micro_batch") == (0, "adamw_8bit", 3)


def test_a_setting_of_an_unknown_name_may_be_any(tmp_path):
    text = f"""\
from transformers import load
from trl import SFTConfig, SFTTrainer
trainer = SFTTrainer("{MODEL}", args=SFTConfig(max_length=64))
for name, value in load().items():
    setattr(trainer.args, name, value)
trainer.train()
"""
    with pytest.raises(InputError, match=r"batch \? x \?"):
        planned(tmp_path, text)
