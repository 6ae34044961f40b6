"""An object counts because it arrives at the trainer, and what only a run knows is unknown."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tuner.app.cli.main import run
from tuner.core.errors import InputError, UndecidedError, UnsupportedError
from tuner.program.planned import ProgramPlan, plan_program
from tuner.program.program import read_program
from tuner.space.models.catalogue import get_entry

IMPORTS = """\
import torch, datasets
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer
rows = datasets.load_dataset("d")
"""
SFT = "SFTTrainer('tiny-llama-3m', args=SFTConfig({}), {}).train()\n"
FOUR_BITS = "BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)"
PREPARED = """\
model = AutoModelForCausalLM.from_pretrained("tiny-llama-3m", dtype=torch.bfloat16, {})
model = prepare_model_for_kbit_training(model)
args = SFTConfig(gradient_checkpointing=False)
SFTTrainer(model, args=args, peft_config=LoraConfig(r=4)).train()
"""


def planned(folder: Path, text: str, **given) -> ProgramPlan:
    (folder / "train.py").write_text(IMPORTS + text)
    return plan_program(read_program(("train.py",), folder, is_run=False), given)


def value(plan: ProgramPlan, name: str) -> object:
    return plan.configuration.get(name)


@pytest.mark.parametrize(
    ("text", "name", "wanted"),
    [
        ("BitsAndBytesConfig(load_in_4bit=True)\n" + SFT, "precision", "fp32"),
        ("lora = LoraConfig(r=8)\n" + SFT, "lora_rank", 0),
        (SFT.format("max_length=8, {}", ""), "max_length", 8),
        (
            "args = SFTConfig(max_length=8)\nargs.max_length = 16\n"
            "SFTTrainer('tiny-llama-3m', args=args).train()\n",
            "max_length",
            16,
        ),
        (
            "lora = LoraConfig(r=4)\nlora.r = 64\n" + SFT.format("", "peft_config=lora"),
            "lora_rank",
            64,
        ),
        (
            "model = AutoModelForCausalLM.from_pretrained('tiny-llama-3m').to(torch.bfloat16)\n"
            "SFTTrainer(model, args=SFTConfig()).train()\n",
            "precision",
            "bf16",
        ),
        (SFT.format("", "optimizers=(torch.optim.SGD([]), None)"), "optimizer", "sgd"),
        (
            "import bitsandbytes as bnb\n"
            + SFT.format("", "optimizers=(bnb.optim.PagedAdamW8bit([]), None)"),
            "optimizer",
            "paged_adamw_8bit",
        ),
        (PREPARED.format(""), "precision", "fp32"),  # all is widened that is in no k bits
        (PREPARED.format(f"quantization_config={FOUR_BITS}"), "gradient_checkpointing", True),
        (
            PREPARED.format("").replace("tiny-llama-3m", "unsloth/Llama-3.2-1B-bnb-4bit"),
            "precision",
            "nf4",
        ),
    ],
)
def test_what_reaches_the_trainer_counts(tmp_path, text, name, wanted):
    assert value(planned(tmp_path, text.replace("{}", "")), name) == wanted


@pytest.mark.parametrize(
    ("text", "said", "given"),
    [
        (SFT.format("optim=rows.x", ""), "train.py:6 optim: is known only", {"optimizer": "sgd"}),
        (
            SFT.format("per_device_train_batch_size=len(rows)", ""),
            "--set micro_batch=1 or another value decides",
            {"micro_batch": 2},
        ),
        (
            SFT.format("", "optimizers=rows.optimizers()"),
            "train.py:6 optimizers: is known only",
            {"optimizer": "sgd"},
        ),
        (
            "model = get_peft_model(AutoModelForCausalLM.from_pretrained('tiny-llama-3m', "
            "dtype='float32'), LoraConfig(r=4))\nmodel.add_adapter('b', LoraConfig(r=64))\n"
            "SFTTrainer(model, args=SFTConfig()).train()\n",
            "peft_config: is known only when it runs",
            {"lora_rank": 4},
        ),
        (
            "class Own(SFTTrainer):\n    def create_optimizer(self): ...\n"
            + SFT.replace("SFTTrainer", "Own"),
            "Own.create_optimizer: is the program's own",
            {"optimizer": "sgd"},
        ),
    ],
)
def test_what_matters_and_only_a_run_knows_is_unknown(tmp_path, text, said, given):
    with pytest.raises(UndecidedError) as raised:
        planned(tmp_path, text.replace("{}", ""))
    assert raised.value.exit_code == 4
    assert said in str(raised.value)
    assert "read as fp32 with bf16, " in str(raised.value)
    plan = planned(tmp_path, text.replace("{}", ""), **given)
    assert given.items() <= plan.configuration.items()


@pytest.mark.parametrize("name", ["gradient_checkpointing", "use_liger_kernel", "torch_compile"])
def test_what_can_only_save_memory_makes_an_upper_bound(tmp_path, name):
    plan = planned(tmp_path, SFT.format(f"{name}=len(rows) > 100", ""))
    assert f"train.py:6 {name}: is known only when it runs" in "".join(plan.at_most)
    assert not plan.at_least


@pytest.mark.parametrize(
    "text",
    [
        "class Own(SFTTrainer):\n    def compute_loss(self, *a): ...\n"
        + SFT.replace("SFTTrainer", "Own").format("", ""),
        SFT.format("chat_template_path='t'", "peft_config=LoraConfig()"),
        SFT.format("", "") + "DPOTrainer('tiny-llama-3m', args=DPOConfig(optim=rows.x)).train()\n",
    ],
    ids=["a loss of its own", "tokens", "another training"],
)
def test_what_can_only_add_memory_is_no_fit(tmp_path, monkeypatch, capsys, text):
    assert planned(tmp_path, text).at_least
    monkeypatch.chdir(tmp_path)
    assert run(["check", "train.py", "--gpu", "rtx4090", "--predict", "--no-changes"]) == 4
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("unknown: at least ")
    assert lines[1].startswith("read as ")


def test_of_several_trainings_the_largest_is_the_answer_and_each_is_told(
    tmp_path, monkeypatch, capsys
):
    text = "for seed in range(3):\n    " + SFT.format("seed=seed", "peft_config=LoraConfig(r=4)")
    text += "DPOTrainer('tiny-llama-3m', args=DPOConfig(max_length=2048)).train()\n"
    assert [one.trainer for one in planned(tmp_path, text).others] == ["TRL DPOTrainer"]
    monkeypatch.chdir(tmp_path)
    words = ["check", "train.py", "--gpu", "rtx4090", "--predict", "--no-changes", "--verbose"]
    assert run(words) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "length 2048, checkpointing, adamw_torch_fused, DPO" in out
    assert "train.py:8 is the largest of 2 trainings" in out
    assert "train.py:7: fp32 with bf16, LoRA 4, batch 8 x 1, length 1024" in out
    lora = "peft_config=LoraConfig(r=r)"
    text = "for r in (2, 64, 4):\n    " + SFT.format("max_length=r * 8", lora)
    planned(tmp_path, text)
    assert run(words) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "read as fp32 with bf16, LoRA 64, batch 8 x 1, length 512, " in out


LOADED = "model = AutoModelForCausalLM.from_pretrained('tiny-llama-3m', dtype=torch.bfloat16)\n"
REFERENCE = """\
other = AutoModelForCausalLM.from_pretrained({})
DPOTrainer(model, ref_model=other, args=DPOConfig()).train()
"""


def test_a_reference_is_priced_as_the_model_only_where_it_is_loaded_like_it(tmp_path):
    same, wider = "'tiny-llama-3m', dtype=torch.bfloat16", "'tiny-llama-3m', dtype='float32'"
    assert not planned(tmp_path, LOADED + REFERENCE.format(same)).at_least
    (note,) = planned(tmp_path, LOADED + REFERENCE.format(wider)).at_least
    assert "ref_model: a reference in fp32 isn't modelled, and takes more memory" in note
    for other in ("'qwen3-0.6b'", f"{same}, quantization_config={FOUR_BITS}"):
        with pytest.raises(InputError, match="ref_model: isn't the trained model as it is loaded"):
            planned(tmp_path, LOADED + REFERENCE.format(other))


@pytest.mark.parametrize(
    "text",
    [
        SFT.format("", "peft_config=LoraConfig(layer_replication=[[0, 2], [1, 2]])"),
        LOADED.replace(
            "bfloat16", "bfloat16, quantization_config=" + FOUR_BITS[:-1] + ", {})"
        ).format("llm_int8_skip_modules=['lm_head', 'q_proj']")
        + "SFTTrainer(model, args=SFTConfig(), peft_config=LoraConfig()).train()\n",
    ],
    ids=["layers used twice", "weights in 16 bits"],
)
def test_settings_that_add_memory_are_no_fit(tmp_path, text):
    assert planned(tmp_path, text).at_least


RAY = """\
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer
from ray.train.huggingface.transformers import prepare_trainer
def train(config):
    trainer = SFTTrainer('tiny-llama-3m', args=SFTConfig(max_length=config['length']))
    prepare_trainer(trainer).train()
how = ScalingConfig(num_workers={}, use_gpu=True)
TorchTrainer(train, train_loop_config={{'length': 96}}, scaling_config=how).fit()
"""


def test_rays_trainer_runs_its_function_in_one_process_only(tmp_path):
    assert value(planned(tmp_path, RAY.format(1)), "max_length") == 96
    with pytest.raises(UnsupportedError, match="found: TorchTrainer"):
        planned(tmp_path, RAY.format(2))


@pytest.mark.parametrize("decorator", ["@finds", "@finds(starting_batch_size=16)"])
def test_a_batch_that_is_looked_for_is_unknown(tmp_path, decorator):
    text = "from accelerate.utils import find_executable_batch_size as finds\n"
    text += f"{decorator}\ndef train(size, length):\n    "
    text += SFT.format("per_device_train_batch_size=size, max_length=length", "") + "train(96)\n"
    with pytest.raises(UndecidedError, match="what find_executable_batch_size finds, 1"):
        planned(tmp_path, text)
    assert value(planned(tmp_path, text, micro_batch=2), "max_length") == 96


ROWS = """\
from transformers import AutoTokenizer, Trainer
from trl.trainer import ConstantLengthDataset
tokenizer = AutoTokenizer.from_pretrained('t')
cut = rows.map(lambda row: tokenizer(row['text']))
Trainer(AutoModelForCausalLM.from_pretrained('tiny-llama-3m'), train_dataset={}).train()
"""


def test_rows_of_a_data_set_of_constant_length_have_its_length(tmp_path):
    rows = "ConstantLengthDataset(tokenizer, cut, seq_length=96)"
    assert value(planned(tmp_path, ROWS.format(rows)), "max_length") == 96


def test_a_models_folder_beside_the_program_tells_its_sizes(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(dict(get_entry("qwen3-0.6b").config)))
    text = "from transformers import AutoConfig\n"
    text += "width = AutoConfig.from_pretrained('./model').hidden_size\n"
    text += SFT.format("max_length=width", "").replace("tiny-llama-3m", "./model")
    assert value(planned(tmp_path, text), "max_length") == 1024


def test_a_quantisation_that_is_undone_when_it_is_loaded_is_none(tmp_path):
    text = "from transformers import Mxfp4Config\n"
    text += LOADED.replace("bfloat16", "bfloat16, quantization_config=Mxfp4Config({})")
    text += "SFTTrainer(model, args=SFTConfig()).train()\n"
    assert value(planned(tmp_path, text.format("dequantize=True")), "precision") == "bf16"
    with pytest.raises(InputError, match="a quantisation other than bitsandbytes'"):
        planned(tmp_path, text.format(""))


MODAL = """\
import modal
app = modal.App('a', image=modal.Image.debian_slim().pip_install('trl'))
@app.function(gpu='A100')
def train(length: int = 96):
    SFTTrainer('tiny-llama-3m', args=SFTConfig(max_length=length)).train()
"""


@pytest.mark.parametrize(
    ("text", "length"),
    [("", 96), ("@app.local_entrypoint()\ndef main(n: int = 80):\n    train.remote(n)\n", 80)],
)
def test_modal_starts_the_entrypoint_or_the_last_function(tmp_path, text, length):
    assert value(planned(tmp_path, MODAL + text), "max_length") == length


def test_each_of_several_questions_is_named_for_its_own_setting(tmp_path):
    names = ("max_length", "per_device_train_batch_size", "gradient_accumulation_steps", "optim")
    values = dict.fromkeys(names[:3], (2, 4)) | {"optim": ("sgd", "adafactor")}
    lines = [f"{n} = {values[n][0]!r} if rows.{n} else {values[n][1]!r}\n" for n in names]
    text = "".join(lines) + SFT.format(", ".join(f"{n}={n}" for n in names), "")
    with pytest.raises(UndecidedError) as raised:
        planned(tmp_path, text)
    for line, name in enumerate(names, 6):
        assert re.search(rf"{name} differs with the answers at \S+:{line}\)", str(raised.value))


def test_unsloths_collator_cuts_rows_to_the_length_of_the_model(tmp_path):
    text = """\
from unsloth import FastVisionModel, UnslothVisionDataCollator
model, tokenizer = FastVisionModel.from_pretrained("qwen3-0.6b", max_lora_rank=64, {})
args = SFTConfig(dataset_kwargs={{"skip_prepare_dataset": True}}, max_length=512)
tokenizer(rows[0]["image"], "a prompt", return_tensors="pt")
collator = UnslothVisionDataCollator(model, tokenizer, {})
SFTTrainer(model, args=args, train_dataset=[], data_collator=collator).train()
"""
    for given in (("max_seq_length=96", ""), ("", "max_seq_length=96")):
        assert value(planned(tmp_path, text.format(*given)), "max_length") == 96
    assert value(planned(tmp_path, text.format("", "")), "max_length") == 2048
