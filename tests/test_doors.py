"""`tuner estimate` of the settings of a script answers as `tuner check --predict` of the script."""

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tuner.app.estimate import asked, estimate_asked
from tuner.app.program_oracle import ProgramPredictions
from tuner.core.errors import InputError
from tuner.program.planned import plan_program
from tuner.program.program import read_program
from tuner.space.gpus import get_gpu

MODEL = "tiny-llama-3m"

SCRIPT = """\
import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer

model = AutoModelForCausalLM.from_pretrained({model!r}, {loading})
trainer = SFTTrainer(
    model=model,
    args=SFTConfig(output_dir="out", {arguments}),
    train_dataset=load_dataset("a/b", split="train"),
    {adapter}
)
trainer.train()
"""

LENGTHS = (64, 200, 512)


def settings_of_a_script(seed: int) -> dict[str, dict[str, Any]]:
    """Arguments by the call that takes them: loading, quantisation, SFTConfig and LoraConfig."""
    rng = random.Random(seed)
    method = rng.choice(["full", "lora", "lora", "nf4", "nf4", "int8"])
    dtype = rng.choice(["float32", "float16", "bfloat16", "bfloat16"])
    loading: dict[str, Any] = {"dtype": f"torch.{dtype}"}
    if rng.random() < 0.5:
        loading["attn_implementation"] = rng.choice(["sdpa", "eager", "flash_attention_2"])
    quantisation: dict[str, Any] = {}
    if method == "nf4":
        quantisation = {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_compute_dtype": f"torch.{dtype}",
        }
        if rng.random() < 0.5:
            quantisation["bnb_4bit_use_double_quant"] = rng.random() < 0.7
    elif method == "int8":
        quantisation = {"load_in_8bit": True}
    arguments = {
        "per_device_train_batch_size": rng.randint(1, 5),
        "gradient_accumulation_steps": rng.choice([1, 2, 8]),
        "max_length": rng.choice(LENGTHS),
        "bf16": rng.random() < 0.7,
        "gradient_checkpointing": rng.random() < 0.5,
        "optim": rng.choice(["adamw_torch", "adamw_8bit", "paged_adamw_32bit", "sgd", "adafactor"]),
        "max_grad_norm": rng.choice([0.0, 1.0, 0.3]),
        "packing": rng.random() < 0.5,
    }
    kept = {name: value for name, value in arguments.items() if rng.random() < 0.6}
    lora: dict[str, Any] = {}
    if method != "full":
        targets = rng.choice(["all-linear", ["q_proj", "v_proj"], ["down_proj"]])
        lora = {"r": rng.choice([4, 16, 64]), "target_modules": targets}
        more = {"lora_dropout": 0.05, "use_dora": True, "use_rslora": True, "lora_alpha": 32}
        lora |= {name: value for name, value in more.items() if rng.random() < 0.3}
        if rng.random() < 0.2:
            lora["modules_to_save"] = ["lm_head"]
    return {"loading": loading, "quantisation": quantisation, "arguments": kept, "lora": lora}


def program_text(parts: Mapping[str, Mapping[str, Any]]) -> str:
    """The script with these arguments."""

    def call(part: str) -> str:
        return ", ".join(
            f"{name}={value if str(value).startswith('torch.') else repr(value)}"
            for name, value in parts[part].items()
        )

    loading, adapter = call("loading"), ""
    if parts["quantisation"]:
        loading += f", quantization_config=BitsAndBytesConfig({call('quantisation')})"
    if parts["lora"]:
        adapter = f"peft_config=LoraConfig({call('lora')}),"
    return SCRIPT.format(model=MODEL, loading=loading, arguments=call("arguments"), adapter=adapter)


def typed(parts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The same as `--set` takes it, under the trainer's names."""
    said = {name: value for part in parts.values() for name, value in part.items()}
    if not parts["lora"]:
        said["lora_rank"] = 0
    return {
        {"r": "lora_r"}.get(name, name): ",".join(value) if isinstance(value, list) else value
        for name, value in said.items()
    }


def written(parts: Mapping[str, Mapping[str, Any]], folder: Path) -> Any:
    """The program of a script, in a folder of its own."""
    (folder / "train.py").write_text(program_text(parts), "utf-8")
    return read_program(["train.py"], folder, is_run=False)


@pytest.mark.parametrize("gpu", ["a6000", "t4"])
@pytest.mark.parametrize("seed", range(8))
def test_both_doors_plan_the_same_training(seed, gpu, tmp_path):
    parts = settings_of_a_script(seed)
    plan = plan_program(written(parts, tmp_path), gpu=get_gpu(gpu))
    found = asked(None, MODEL, typed(parts), gpu=get_gpu(gpu))
    assert found.configuration.to_dict() == plan.configuration.to_dict()
    assert (found.doubts, found.read_as) == (plan.doubts, plan.read_as)


@pytest.mark.proof
@pytest.mark.parametrize("seed", range(200))
def test_both_doors_answer_the_same_numbers(seed, tmp_path):
    gpu, parts = get_gpu("a6000"), settings_of_a_script(seed)
    program = answer(lambda: ProgramPredictions(written(parts, tmp_path), gpu).as_it_is())
    assert answer(lambda: estimate_asked(asked(None, MODEL, typed(parts), gpu=gpu), gpu)) == program


def answer(door: Callable[[], Any]) -> Any:
    """The numbers of an answer, or the problems of one that the GPU cannot run."""
    try:
        return door().prediction.to_answer()
    except InputError as error:
        return [problem.message for problem in error.problems]
