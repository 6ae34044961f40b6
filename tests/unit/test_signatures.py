"""Arguments and keys that a library does not take: the program cannot start."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner.core.errors import InputError
from tuner.program.arguments import Found
from tuner.program.edit.source import SourceFile, read_places
from tuner.program.names import Script
from tuner.program.planned import ProgramPlan, plan_program
from tuner.program.program import read_program
from tuner.program.signatures import hold_calls, signature

HEAD = """\
import os
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainingArguments
from trl import DPOConfig, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer, TrlParser
"""
MODEL = "tiny-llama-3m"
LIBRARIES = {
    "TrainingArguments": "transformers",
    "Trainer": "transformers",
    "SFTConfig": "trl",
    "SFTTrainer": "trl",
    "DPOConfig": "trl",
    "GRPOConfig": "trl",
    "GRPOTrainer": "trl",
    "KTOTrainer": "trl",
    "LoraConfig": "peft",
    "VeraConfig": "peft",
    "prepare_model_for_kbit_training": "peft",
}


def planned(folder: Path, text: str, *words: str, name: str = "train.py") -> ProgramPlan:
    (folder / name).write_text((HEAD if name.endswith(".py") else "") + text)
    return plan_program(read_program((name, *words), folder, is_run=False), {"max_length": 64})


def refused(folder: Path, text: str, *words: str, name: str = "train.py") -> str:
    """The problems of a program, below the first line that says that it cannot start."""
    with pytest.raises(InputError) as caught:
        planned(folder, text, *words, name=name)
    message, *problems = str(caught.value).splitlines()
    assert message.startswith("the program cannot start")
    assert caught.value.exit_code == 2
    return "\n".join(problems).replace(f"{folder}/", "")


CALLS = [
    (
        "SFTConfig(evaluation_strategy='no')",
        "evaluation_strategy='no' is not an argument of SFTConfig in TRL 1.16 (TypeError): "
        "use eval_strategy",
    ),
    ("SFTConfig(per_device_train_batchsize=4)", "did you mean per_device_train_batch_size?"),
    ("SFTConfig(warmup_ratio=0.1)", "use warmup_steps"),
    ("SFTTrainer(tokenizer=tokenizer)", "tokenizer=tokenizer is not an argument of SFTTrainer"),
    ("SFTTrainer(max_seq_length=512)", "(TypeError): use SFTConfig(max_length=512)"),
    ("SFTTrainer(packing=True)", "use SFTConfig(packing=True)"),
    ("SFTConfig(peft_config=lora)", "use SFTTrainer(peft_config=lora)"),
    ("Trainer(tokenizer=t, args=TrainingArguments())", "Trainer in transformers 5.23 (TypeError)"),
    ("TrainingArguments(no_cuda=True)", "use use_cpu"),
    ("GRPOTrainer(tokenizer=t, args=GRPOConfig())", "use processing_class"),
    ("get_peft_model(model, LoraConfig(rank=8))", "rank=8 is not an argument of LoraConfig"),
    ("model.gradient_checkpointing_enable(reentrant=True)", "reentrant=True is not an argument"),
    ("SFTConfig(**dict(bf16=True, max_seq_len=8))", "max_seq_len=8 is not an argument of SFTC"),
]


@pytest.mark.parametrize(("call", "said"), CALLS, ids=[call for call, _ in CALLS])
def test_an_argument_that_nothing_takes_is_named_with_its_line(tmp_path, call, said):
    line = len(HEAD.splitlines()) + 3
    problems = refused(tmp_path, f"\n\n{call}\n")
    assert f"train.py:{line}: " in problems
    assert said in problems


def test_all_problems_are_named_at_once(tmp_path):
    text = (
        "args = TrainingArguments(per_gpu_train_batch_size=8)\n"
        "SFTTrainer('tiny-llama-3m', args, tokenizer=t, dataset_text_field='text', foo=bar)\n"
    )
    problems = refused(tmp_path, text).splitlines()
    assert len(problems) == 4
    assert problems[0].endswith("use per_device_train_batch_size")


def test_loading_takes_what_transformers_and_the_model_have(tmp_path):
    load = "model = AutoModelForCausalLM.from_pretrained('tiny-llama-3m', {})\n"
    train = "Trainer(model, TrainingArguments('out'))\n"
    taken = "use_cache=False, low_cpu_mem_usage=True, torch_dtype='bfloat16', pad_token_id=0"
    assert planned(tmp_path, load.format(taken) + train).model == MODEL
    problems = refused(tmp_path, load.format("load_in_4bit=True, use_auth_token=True") + train)
    assert "train.py:5: load_in_4bit=true is not an argument of AutoModel" in problems
    assert "use quantization_config=BitsAndBytesConfig(load_in_4bit=True)" in problems
    assert "use_auth_token=true" in problems
    inner = "SFTConfig(model_init_kwargs={'load_in_8bit': True})"
    assert "load_in_8bit" in refused(tmp_path, f"SFTTrainer('tiny-llama-3m', {inner})")


def test_what_is_ignored_is_said_and_no_failure(tmp_path):
    text = (
        "q = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_doublequant=True, "
        "bnb_4bit_compute_dtype='float32')\n"
        "model = AutoModelForCausalLM.from_pretrained('tiny-llama-3m', quantization_config=q)\n"
        "Trainer(get_peft_model(model, LoraConfig()), TrainingArguments('out'))\n"
    )
    [said] = [one for one in planned(tmp_path, text).left_out if "doublequant" in one]
    assert "train.py:5" in said
    assert said.endswith("which ignores it: did you mean bnb_4bit_use_double_quant?")


@pytest.mark.parametrize(
    "text",
    [
        "class LoraConfig:\n    pass\n\nLoraConfig(rank=8)\n",
        "from ours import SFTConfig\nSFTConfig(evaluation_strategy='no')\n",
        "from lightning.pytorch import *\nTrainer(max_epochs=8)\n",
        "import unsloth\nfrom trl import SFTConfig\nSFTConfig(max_seq_length=8)\n",
    ],
    ids=["defined here", "another library's", "all of another", "replaced by another library"],
)
def test_only_what_the_library_itself_makes_is_held(text):
    assert not problems_of(text)


def problems_of(text: str) -> list[str]:
    data, path = text.encode(), Path("t.py")
    found = Found()
    hold_calls([Script(SourceFile(path, data, read_places(data, path)))], "", found)
    return [str(problem) for problem in found.problems]


@settings(max_examples=50)
@given(st.data())
def test_every_name_of_a_signature_is_taken_and_no_other(data):
    called = data.draw(st.sampled_from(sorted(LIBRARIES)))
    known = sorted(signature(called).names)
    names = data.draw(st.lists(st.sampled_from(known), unique=True, max_size=20))
    lines = [f"from {LIBRARIES[called]} import {called}", f"{called}("]
    lines += [f"    {name}=1," for name in names]
    assert problems_of("\n".join([*lines, ")"])) == []
    other = data.draw(st.from_regex(r"[a-z][a-z_]{2,20}", fullmatch=True))
    at = data.draw(st.integers(2, len(lines)))
    lines.insert(at, f"    x_{other}=1,")
    [problem] = problems_of("\n".join([*lines, ")"]))
    assert problem.startswith(f"t.py:{at + 1}: x_{other}=1 is not an argument of {called} in ")


FILES = {
    "trl.yaml": "model_name_or_path: tiny-llama-3m\ndataset_name: d\nnum_processes: 1\n",
    "lf.yaml": "model_name_or_path: tiny-llama-3m\nstage: sft\ntemplate: llama3\noutput_dir: o\n",
}


@pytest.mark.parametrize(
    ("name", "key", "said"),
    [
        (
            "trl.yaml",
            "max_seq_length: 8",
            "trl.yaml:4: max_seq_length is not a key of `trl sft`",
        ),
        ("trl.yaml", "max_seq_length: 8", "use max_length"),
        ("lf.yaml", "evaluation_strategy: no", "lf.yaml:5: evaluation_strategy is not a key of LL"),
        ("lf.yaml", "max_seq_length: 8", "Factory 0.9.5, which ends with an error: use cutoff_len"),
    ],
)
def test_keys_of_files_are_held_as_well(tmp_path, name, key, said):
    assert planned(tmp_path, FILES[name], name=name).model == MODEL
    assert said in refused(tmp_path, f"{FILES[name]}{key}\n", name=name)


def test_words_before_the_tool_are_not_its_own(tmp_path):
    (tmp_path / "trl.yaml").write_text(FILES["trl.yaml"])
    words = ["uv", "run", "--with", "trl", "trl", "sft", "--config", "trl.yaml"]
    assert plan_program(read_program(words, tmp_path, is_run=False)).model == MODEL


def test_axolotl_ignores_keys_that_it_does_not_know(tmp_path):
    text = (
        "base_model: tiny-llama-3m\ndatasets: []\nadapter: lora\nlora_r: 8\n"
        "lora_target_linear: true\nmicro_batch_size: 2\nmax_seq_length: 64\n"
    )
    [said] = [o for o in planned(tmp_path, text, name="a.yml").left_out if "max_seq_length" in o]
    assert "a.yml:7: max_seq_length is not a key of Axolotl 0.19, which ignores it: use " in said


PARSED = (
    "(args,) = TrlParser(SFTConfig).parse_args_and_config({})\n"
    "SFTTrainer('tiny-llama-3m', args=args)\n"
)


def test_words_that_a_parser_does_not_know_end_the_program(tmp_path):
    words = ("--output_dir", "o", "--per_device_train", "2", "--max_seq_length=8", "--no_bf16")
    problems = refused(tmp_path, PARSED.format(""), *words)
    assert problems.count("\n") == 0  # the beginning of a name is one too
    assert (
        "the command line: --max_seq_length is not an option of SFTConfig (ValueError)" in problems
    )
    lenient = PARSED.format("return_remaining_strings=True")
    assert planned(tmp_path, lenient, *words).model == MODEL


SPREAD = """\
BATCH = int(os.environ.get("BATCH_OF_TEST", 4))
base = dict(output_dir="o", bf16=True)
cfg = {**base, "per_device_train_batch_size": BATCH, "gradient_checkpointing_kwargs": GC}
cfg["max_length"] = 128
%s
SFTTrainer(model=os.getenv("MODEL_OF_TEST", "tiny-llama-3m"), args=SFTConfig(**cfg))
"""


def test_a_dictionary_and_the_environment_are_read(tmp_path, monkeypatch):
    text = SPREAD.replace("GC}", '{"use_reentrant": True}}') % ""
    plan = planned(tmp_path, text)
    names = ("micro_batch", "use_reentrant", "mixed_precision")
    assert plan.model == MODEL
    assert [plan.configuration[name] for name in names] == [4, True, "bf16"]
    assert "BATCH_OF_TEST=4, as this variable is not set" in plan.assumed
    monkeypatch.setenv("BATCH_OF_TEST", "2")
    assert planned(tmp_path, text).configuration["micro_batch"] == 2


@pytest.mark.parametrize(
    "line",
    ["cfg.update(more)", "if many:\n    cfg['bf16'] = False", "cfg[name] = 1", "cfg = {**cfg}"],
)
def test_a_dictionary_that_is_not_all_known_is_refused(tmp_path, line):
    with pytest.raises(InputError) as caught:
        planned(tmp_path, SPREAD.replace(', "gradient_checkpointing_kwargs": GC', "") % line)
    assert "has **cfg, whose keys are not known" in str(caught.value)
