"""What a program is predicted as: its settings, and its trainer's defaults for the rest."""

from __future__ import annotations

import json
import random
import shlex
from pathlib import Path

import pytest

from tuner.core.errors import InputError, UnavailableError, UndecidedError, UnsupportedError
from tuner.program.planned import ProgramPlan, plan_program
from tuner.program.program import read_program
from tuner.space.gpus import get_gpu

PROGRAMS = Path(__file__).parents[1] / "programs"
MODEL = "tiny-llama-3m"

SCRIPT = """\
import sys, torch, datasets
from peft import IA3Config, LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from transformers import AutoProcessor, BitsAndBytesConfig, Trainer, TrainingArguments
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer
rows, tokenizer = datasets.load_dataset("d"), AutoTokenizer.from_pretrained("t")
"""
NF4 = "BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)"


def planned(folder: Path, text: str, *words: str, name: str = "train.py", **given) -> ProgramPlan:
    (folder / name).write_text((SCRIPT if name.endswith(".py") else "") + text)
    return plan_program(read_program((name, *words), folder, is_run=False), given)


def knobs(plan: ProgramPlan, *names: str) -> tuple[object, ...]:
    return tuple(plan.configuration[name] for name in names)


def refusals(folder: Path, text: str, **more) -> str:
    with pytest.raises(InputError) as caught:
        planned(folder, text, **more)
    return "; ".join(f"{p.where}: {p.message}" for p in caught.value.problems)


SFT = "SFTTrainer(model='tiny-llama-3m', args=SFTConfig({}), {}).train()"


@pytest.mark.parametrize(
    ("said", "steps"),
    [
        ("", (939, True)),  # 3 epochs, the trainer's default, of 313 steps
        ("num_train_epochs=0.5", (157, True)),
        ("max_steps=70", (70, True)),
        ("max_steps=len(rows)", (313, False)),  # they are not known: an epoch
    ],
)
def test_the_schedule_tells_the_steps_of_a_training(tmp_path, said, steps):
    schedule = planned(tmp_path, SFT.format(said, "")).schedule
    assert schedule.steps(10_001, 32) == steps
    assert schedule.steps(None, 32) == (steps if said == "max_steps=70" else None)


def test_a_given_method_has_what_the_trainer_makes_of_it(tmp_path):
    names = ("precision", "lora_rank", "adapter_dtype")
    of = {"model_init_kwargs": {"dtype": "bfloat16"}}
    full = planned(tmp_path, SFT.format(f"**{of}", ""), precision="nf4", lora_rank=8)
    assert knobs(full, *names) == ("nf4", 8, "bf16")  # TRL's adapters of a quantised model
    of["model_init_kwargs"]["quantization_config"] = "BNB"
    text = SFT.format(f"**{of}", "peft_config=LoraConfig(r=4)").replace("'BNB'", NF4)
    assert knobs(planned(tmp_path, text), *names) == ("nf4", 4, "bf16")
    assert planned(tmp_path, text, precision="bf16").configuration.get("adapter_dtype") in (
        None,
        "fp32",
    )
    assert knobs(planned(tmp_path, text, precision="bf16", lora_rank=0), *names[:2]) == ("bf16", 0)


def test_sft_without_settings_is_full_training_in_fp32_under_bf16(tmp_path):
    plan = planned(tmp_path, SFT.format("output_dir='out'", ""))
    assert plan.model == MODEL
    assert knobs(plan, "lora_rank", "precision", "mixed_precision") == (0, "fp32", "bf16")
    assert knobs(plan, "micro_batch", "max_length", "optimizer") == (8, 1024, "adamw_torch_fused")
    assert knobs(plan, "gradient_checkpointing", "use_reentrant", "loss") == (
        True,
        False,
        "chunked",
    )
    assert "per_device_train_batch_size=8" in plan.assumed
    assert not plan.left_out


def test_all_weights_are_trained_with_any_optimizer_of_the_trainer(tmp_path):
    plan = planned(tmp_path, SFT.format("optim='lion_8bit'", ""))
    assert knobs(plan, "lora_rank", "optimizer", "training_loop") == (0, "lion_8bit", "trainer")


@pytest.mark.parametrize(
    "call",
    [
        "for p in trainer.model.parameters(): p.register_post_accumulate_grad_hook(print)\n{}",
        "with torch.autograd.graph.save_on_cpu(): {}",
        "from torchao.optim import CPUOffloadOptimizer as C\nC((), torch.optim.AdamW)\n{}",
    ],
)
def test_a_script_that_moves_what_a_step_keeps_is_left_to_the_emulator(tmp_path, call):
    made = SFT.format("", "").replace(".train()", "")
    said = refusals(tmp_path, f"trainer = {made}\n{call.format('trainer.train()')}\n")
    assert "is not predicted: `tuner check` emulates it" in said


@pytest.mark.parametrize(
    ("given", "kind"),
    [("use_dora=True, use_rslora=True", "dora"), ("use_rslora=True", "rslora"), ("", None)],
)
def test_the_kind_of_adapter_is_read(tmp_path, given, kind):
    plan = planned(tmp_path, SFT.format("", f"peft_config=LoraConfig(r=4, {given})"))
    assert plan.configuration.get("adapter") == kind


def test_an_adapter_of_a_quantised_model_is_bf16_with_sft(tmp_path):
    text = (
        f"model = AutoModelForCausalLM.from_pretrained(sys.argv[1], quantization_config={NF4}, "
        "dtype=torch.bfloat16)\n"
        "SFTTrainer(model, "
        "args=SFTConfig(per_device_train_batch_size=2, torch_empty_cache_steps=1), "
        "peft_config=LoraConfig(r=4, modules_to_save=['lm_head'])).train()\n"
    )
    plan = planned(tmp_path, text, MODEL)
    assert knobs(plan, "precision", "compute_dtype", "adapter_dtype") == ("nf4", "bf16", "bf16")
    assert knobs(plan, "kbit_preparation", "double_quant") == ("none", False)
    # peft's default modules for llama models.
    assert knobs(plan, "lora_rank", "lora_targets") == (4, ("q_proj", "v_proj"))
    assert plan.configuration["modules_to_save"] == ("lm_head",)
    assert [text.partition(" ")[2] for text in plan.left_out] == ["torch_empty_cache_steps"]


@pytest.mark.parametrize(
    "given",
    [
        "{'load_in_4bit': True, 'bnb_4bit_compute_dtype': 'bfloat16'}",
        f"dict(quantization_config={NF4})",
    ],
)
def test_a_quantisation_in_a_dictionary_is_read(tmp_path, given):
    text = f"args, model = SFTConfig(max_length=64, bf16=True), 'tiny-llama-3m'\nsaid = {given}\n"
    text += "load = AutoModelForCausalLM.from_pretrained\n"
    if given.startswith("dict"):
        text += "args.model_init_kwargs = {**said, 'dtype': 'bfloat16'}\n"
    else:
        text += "model = load(model, dtype='bfloat16', quantization_config=said)\n"
    plan = planned(tmp_path, text + "SFTTrainer(model, args, peft_config=LoraConfig(r=4)).train()")
    assert knobs(plan, "precision", "compute_dtype") == ("nf4", "bf16")
    assert plan.left_out == ()


def test_a_default_that_is_said_is_not_named(tmp_path):
    text = "SFTTrainer('tiny-llama-3m', args=SFTConfig(**SFTConfig().to_dict())).train()"
    assert planned(tmp_path, text).left_out == ()


def test_preference_training_has_two_sequences_and_a_reference(tmp_path):
    text = (
        "B = 3\nDPOTrainer(model='tiny-llama-3m', args=DPOConfig(per_device_train_batch_size=B), "
        "peft_config=LoraConfig(lora_dropout=0.1)).train()"
    )
    plan = planned(tmp_path, text)
    assert knobs(plan, "micro_batch", "reference_pass", "lora_dropout") == (6, True, 0.0)
    assert plan.settings["micro_batch"] == 3
    full = planned(tmp_path, "DPOTrainer(model='tiny-llama-3m', args=DPOConfig()).train()")
    assert knobs(full, "lora_rank", "reference_pass", "reference_model") == (0, True, True)


TRAINER = """\
model = AutoModelForCausalLM.from_pretrained("tiny-llama-3m", {})
{}
rows = tokenizer(rows["text"], truncation=True, max_length=512)
Trainer(model=model, args=TrainingArguments({})).train()
"""


def test_a_classifier_has_the_labels_that_it_is_loaded_with(tmp_path):
    text = TRAINER.replace("AutoModelForCausalLM", "AutoModelForSequenceClassification")
    for given, labels in (("num_labels=5", 5), ("", 2)):
        plan = planned(tmp_path, text.format(given, "", ""))
        assert knobs(plan, "num_labels") == (labels,)


def test_plain_preparation_checkpoints_reentrantly_whatever_the_arguments_say(tmp_path):
    prepared = "model = prepare_model_for_kbit_training(model)\nget_peft_model(model, LoraConfig())"
    for arguments, reentrant in (
        ("bf16=True", True),
        ("bf16=True, gradient_checkpointing=False", True),
        ("bf16=True, gradient_checkpointing=True", False),
    ):
        text = TRAINER.format(f"quantization_config={NF4}", prepared, arguments)
        plan = planned(tmp_path, text)
        assert knobs(plan, "gradient_checkpointing", "use_reentrant") == (True, reentrant)
        assert knobs(plan, "kbit_preparation", "max_length", "loss") == (
            "peft",
            512,
            "transformers",
        )


def test_cells_and_statements_that_cannot_run_are_notes(tmp_path):
    cells = [SCRIPT, "curl -X = = 1", "x = 1\ny = 1 / 0", SFT.format("max_length=64 * x", "")]
    made = [{"cell_type": "code", "source": text, "metadata": {}} for text in cells]
    text = json.dumps({"cells": made, "nbformat": 4})
    plan = planned(tmp_path, text, name="train.ipynb")
    assert plan.configuration["max_length"] == 64
    assert any(n.startswith("cell 2, line 1 isn't run: SyntaxError: ") for n in plan.notes)
    assert "cell 3, line 2 isn't run: ZeroDivisionError: division by zero" in plan.notes


def test_a_file_that_a_shell_script_writes_is_read(tmp_path):
    text = "import yaml\ngiven = yaml.safe_load(open(sys.argv[1]))\n"
    (tmp_path / "train.py").write_text(SCRIPT + text + SFT.format("**given", ""))
    script = "cat > {} <<EOF\nmax_length: ${{N:-64}}\nEOF\npython train.py a.yaml"
    (tmp_path / "run.sh").write_text(script.format("a.yaml"))
    plan = plan_program(read_program(["run.sh"], tmp_path, is_run=False), {})
    assert plan.configuration["max_length"] == 64
    text = f"python - a.yaml <<'EOF'\n{SCRIPT}{text}{SFT.format('**given', '')}\nEOF\n"
    (tmp_path / "run.sh").write_text(script.format("a.yaml").partition("python")[0] + text)
    plan = plan_program(read_program(["run.sh"], tmp_path, is_run=False), {})
    assert plan.configuration["max_length"] == 64
    (tmp_path / "run.sh").write_text(script.format("b.yaml"))
    with pytest.raises(
        UnsupportedError, match=r"run\.sh may make it with a command that isn't run"
    ):
        plan_program(read_program(["run.sh"], tmp_path, is_run=False), {})


def test_a_word_of_a_skipped_command_is_unknown(tmp_path):
    text = "import argparse\np = argparse.ArgumentParser()\np.add_argument('--n', type=int)\n"
    text += SFT.format("max_length=p.parse_args().n", "")
    (tmp_path / "train.py").write_text(SCRIPT + text)
    (tmp_path / "run.sh").write_text("python train.py --n $(ask)")
    with pytest.raises(UndecidedError, match=r"length \?"):
        plan_program(read_program(["run.sh"], tmp_path, is_run=False), {})


def test_files_and_variables_of_a_notebook_are_read_and_no_parameters_of_papermill(tmp_path):
    train = "from most import most\nimport os\n" + SFT.format(
        "max_length=most, seed=int(os.environ['SEED'])", ""
    )
    cells = [SCRIPT, "%%writefile most.py\nmost = 64\n", "%env SEED=3", train]
    made = [{"cell_type": "code", "source": text, "metadata": {}} for text in cells]
    plan = planned(tmp_path, json.dumps({"cells": made, "nbformat": 4}), name="train.ipynb")
    assert knobs(plan, "max_length") == (64,)
    words = ["papermill", "train.ipynb", "out.ipynb", "-p", "n", "8"]
    with pytest.raises(UnsupportedError, match="parameters of papermill aren't read"):
        plan_program(read_program(words, tmp_path, is_run=False), {})


@pytest.mark.parametrize(
    ("model", "loaded", "said"),
    [
        (MODEL, "", ""),  # which is stored in fp32
        ("qwen3-0.6b", "", "bnb_4bit_compute_dtype: is fp32 beside weights in bf16, and is not"),
        (MODEL, "dtype='bfloat16'", "bnb_4bit_compute_dtype: is fp32 beside weights in bf16"),
    ],
)
def test_products_in_fp32_are_predicted_beside_weights_in_fp32(tmp_path, model, loaded, said):
    given = f"quantization_config=BitsAndBytesConfig(load_in_4bit=True), {loaded}"
    text = TRAINER.replace(MODEL, model)
    alone = text.format(given, "model = get_peft_model(model, LoraConfig())", "bf16=True")
    if said:
        assert said in refusals(tmp_path, alone)
    else:
        assert knobs(planned(tmp_path, alone), "compute_dtype") == ("fp32",)
    prepared = "model = get_peft_model(prepare_model_for_kbit_training(model), LoraConfig())"
    plan = planned(tmp_path, text.format(given, prepared, "bf16=True"))
    assert knobs(plan, "compute_dtype", "kbit_preparation") == ("fp32", "peft")


def test_the_dtype_of_the_checkpoint_is_taken_where_none_is_given(tmp_path):
    plan = planned(tmp_path, TRAINER.format("", "", "optim='adamw_torch'"))
    assert knobs(plan, "precision", "mixed_precision") == ("fp32", "no")
    assert knobs(plan, "gradient_checkpointing", "optimizer") == (False, "adamw_torch")
    halved = planned(tmp_path, TRAINER.format("torch_dtype='bfloat16'", "", "fp16=True"))
    assert knobs(halved, "precision", "mixed_precision") == ("bf16", "fp16")


def test_checkpointing_that_a_call_turns_on_is_seen(tmp_path):
    called = "model.gradient_checkpointing_enable()"
    plan = planned(tmp_path, TRAINER.format("", called, "bf16=True"))
    assert knobs(plan, "gradient_checkpointing", "use_reentrant") == (True, False)


def test_plain_training_arguments_keep_their_own_defaults_with_sft(tmp_path):
    plan = planned(tmp_path, SFT.format("", "").replace("SFTConfig", "TrainingArguments"))
    assert knobs(plan, "gradient_checkpointing", "mixed_precision") == (False, "no")


def test_arguments_that_an_older_trl_had_in_its_trainer_are_read_beside_plain_ones(tmp_path):
    older = "max_seq_length=256, packing=True, dataset_kwargs={'skip_prepare_dataset': False}"
    plan = planned(tmp_path, SFT.format("", older).replace("SFTConfig", "TrainingArguments"))
    assert knobs(plan, "max_length", "padding") == (256, "packed")
    assert any("train.py:7: SFTTrainer in TRL" in note for note in plan.notes)


def test_seq2seq_trainer_trains_a_causal_model_as_trainer_does(tmp_path):
    text = TRAINER.format("", "", "").replace("Trainer(", "transformers.Seq2SeqTrainer(")
    text = f"import transformers\n{text}".replace("TrainingA", "transformers.Seq2SeqTrainingA")
    plan = planned(tmp_path, text)
    assert (plan.trainer, plan.configuration["max_length"]) == ("transformers' Trainer", 512)
    other = text.replace("AutoModelForCausalLM", "transformers.AutoModelForSeq2SeqLM")
    assert "an encoder and a decoder isn't modelled" in refusals(tmp_path, other)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ("transformers.AutoModelForTokenClassification.from_pretrained", "of this class isn't"),
        ("transformers.AutoModel.from_pretrained", "a model of this class isn't modelled"),
        ("transformers.LlamaModel.from_pretrained", "a model of this class isn't modelled"),
        ("Own", "Own is a module of the program's own, and only a run tells its memory"),
    ],
)
def test_a_model_with_another_head_is_known_when_it_runs(tmp_path, made, said):
    own = "import transformers\nclass Own(torch.nn.Module):\n    pass\n"
    text = TRAINER.format("", "", "").replace("AutoModelForCausalLM.from_pretrained", made)
    with pytest.raises(UndecidedError) as caught:
        planned(tmp_path, own + text)
    assert said in str(caught.value.problems)
    assert "determine the model" not in str(caught.value.problems)


def test_a_star_gives_what_the_program_never_makes_itself(tmp_path):
    text = "from transformers import *\nfrom own import *\nset_seed(1)\nmore = LENGTH\n"
    (tmp_path / "own.py").write_text("LENGTH = 64\n")
    collated = "data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False)"
    plan = planned(tmp_path, text + SFT.format("max_length=more", collated))
    assert (plan.configuration["max_length"], plan.notes) == (64, ())


def test_a_collator_that_pads_says_the_length_of_rows(tmp_path):
    text = "from transformers import DataCollatorForSeq2Seq as Collator\n" + TRAINER
    padded = "({}), data_collator=Collator(tokenizer, padding='max_length', max_length=768))"
    text = text.replace("({}))", padded).format("", "", "")
    assert planned(tmp_path, text).configuration["max_length"] == 768


def test_a_model_made_of_a_configuration_has_the_shapes_that_are_set(tmp_path):
    text = "from transformers import AutoConfig\nconfig = AutoConfig.from_pretrained('gpt2')\n"
    made = TRAINER.replace('from_pretrained("tiny-llama-3m", {})', "from_config(config)")
    made = "config.num_hidden_layers = 4\n" + made.format("", "")
    assert "sets num_hidden_layers, and the model has other" in refusals(tmp_path, text + made)


def test_ligers_kernels_are_predicted_where_they_are_known(tmp_path):
    plan = planned(tmp_path, SFT.format("use_liger_kernel=True", ""))
    assert knobs(plan, "liger", "loss") == (True, "chunked")
    trained = planned(tmp_path, TRAINER.format("", "", "use_liger_kernel=True"))
    assert knobs(trained, "liger", "loss") == (True, "liger")
    other = TRAINER.format("", "", "use_liger_kernel=True").replace(MODEL, "gpt2")
    plan = planned(tmp_path, other)
    assert knobs(plan, "liger", "loss") == (False, "transformers")
    assert any("Liger's kernels of this model" in text for text in plan.at_most)
    own = TRAINER.format("", "", "").replace("AutoModelFor", "liger.AutoLigerKernelFor")
    own = planned(tmp_path, f"import liger_kernel.transformers as liger\n{own}")
    assert knobs(own, "liger", "loss") == (True, "liger")
    some = "use_liger_kernel=True, liger_kernel_config={'rope': False}"
    plan = planned(tmp_path, SFT.format(some, ""))
    assert "liger" not in plan.configuration
    assert any("as far as liger_kernel_config" in text for text in plan.at_most)


def test_settings_of_an_unknown_mapping_are_not_read_as_defaults(tmp_path):
    with pytest.raises(UndecidedError) as caught:
        planned(tmp_path, SFT.format("**rows.settings", ""))
    assert "batch ? x ?, length ?, ?, SFT" in str(caught.value)
    assert "TypeError" not in str(caught.value.problems)


ROWS = """
import functools
def cut(row, most=128): return tokenizer(row["text"], truncation=True, max_length=most)
def two(row): return {{"input_ids": cut(row)["input_ids"] + cut(row, 64)["input_ids"]}}
def masked(row):
    prompt, whole = cut(row, 64), cut(row)
    whole["labels"] = [-100] * len(prompt["input_ids"])
    return whole
class Cut:
    def __call__(self, rows): return tokenizer([r["text"] for r in rows], max_length=256)
class Rows(torch.utils.data.Dataset):
    def __getitem__(self, at): return cut(rows[at], 32)
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self): yield cut(rows[0], 16)
limited = AutoTokenizer.from_pretrained("t", model_max_length=2048)
print(tokenizer("a prompt", truncation=True, max_length=8))
more = {{}}
{}
model = AutoModelForCausalLM.from_pretrained("tiny-llama-3m")
Trainer(model, TrainingArguments("out"), **{{"train_dataset": rows, **more}}).train()
"""
ONE_CALL = "rows = rows.map(lambda row: tokenizer(row['text'], {}))"
SKIPS = "SFTTrainer(model, SFTConfig(dataset_kwargs={'skip_prepare_dataset': True}), "


@pytest.mark.parametrize(
    ("given", "length"),
    [
        ("rows = rows.map(cut)", 128),
        ("rows = rows.map(masked)", 128),
        ("rows = rows.map(functools.partial(cut, most=64))", 64),
        ("rows = rows.map(lambda r: limited(r['text'], truncation=True, max_length=512))", 512),
        ("rows = rows.map(lambda r: limited(r['text'], truncation=True))", 2048),
        (ONE_CALL.format("max_length=96"), 96),
        ("rows = rows.map(lambda r: {'input_ids': cut(r)['input_ids'][:24]})", 24),
        ("rows.map(two); more = {'data_collator': Cut()}", 256),
        ("more = {'train_dataset': Rows()}", 32),
        ("more = {'train_dataset': Stream()}", 16),
        ("rows = rows.map(lambda r: {'n': len(tokenizer(r['text']))}).map(cut)", 128),
        (
            "def join(row):\n    ids = tokenizer(row['a'])['x'] + tokenizer(row['b'])['x']\n"
            "    if len(ids) > 384: ids = ids[:384]\n    return {'input_ids': torch.tensor(ids)}\n"
            "rows = rows.map(join)",
            384,
        ),
    ],
)
def test_the_length_is_that_to_which_the_rows_are_cut(tmp_path, given, length):
    text = ROWS.format(given)
    assert planned(tmp_path, text).configuration["max_length"] == length
    skips = text.replace('Trainer(model, TrainingArguments("out"), ', SKIPS)
    assert planned(tmp_path, skips).configuration["max_length"] == length


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("", "couldn't determine the length"),
        ("rows = rows.map(two)", "rows of several tokenized texts"),
        (ONE_CALL.format("padding=True, max_length=64"), "this call doesn't cut any"),
        (ONE_CALL.format("truncation=True"), "model_max_length of the tokenizer"),
        (ONE_CALL.format("**rows.settings"), "arguments of the tokenizer"),
        ("rows = rows.map(lambda r: {'input_ids': cut(r)['input_ids'][-24:]})", "a part of a"),
    ],
)
def test_a_length_that_nothing_cuts_rows_to_is_unknown(tmp_path, given, why):
    text = ROWS.format(given).replace(", model_max_length=2048", "")
    assert why in refusals(tmp_path, text)
    assert planned(tmp_path, text, max_length=64).configuration["max_length"] == 64


TOKENIZED = "tokenizer(rows, max_length=128)\n"
UNSLOTH = f"""\
from unsloth import FastModel
model, _ = FastModel.from_pretrained("tiny-llama-3m", load_in_4bit=False, {{}})
{TOKENIZED}Trainer(model, TrainingArguments("out", bf16=True)).train()
"""


def test_transformers_trainer_of_an_unsloth_model_has_its_own_defaults(tmp_path):
    plan = planned(tmp_path, UNSLOTH.format("max_seq_length=1024"))
    assert knobs(plan, "micro_batch", "optimizer", "max_length") == (8, "adamw_torch_fused", 128)
    assert knobs(plan, "gradient_checkpointing", "mixed_precision") == (True, "bf16")
    text = UNSLOTH.format("auto_model=AutoModelForSequenceClassification")
    assert "a model of another class isn't modelled" in refusals(tmp_path, text)


def test_what_unsloth_loads_beside_the_weights_takes_memory(tmp_path):
    assert planned(tmp_path, UNSLOTH.format("fast_inference=False")).at_least == ()
    plan = planned(tmp_path, UNSLOTH.format("fast_inference=True, load_in_fp8=True"))
    assert "fast_inference: the cache of vLLM" in plan.at_least[0]
    assert any("load_in_fp8" in text for text in plan.at_most)
    plan = planned(tmp_path, UNSLOTH.format("qat_scheme='int4'"))
    assert "qat_scheme: training with fake quantization" in plan.at_least[0]


LOAD = (
    f"import copy\nmodel = AutoModelForCausalLM.from_pretrained('{MODEL}', dtype='float32')\n{{}}\n"
)
BY_SFT = "trainer = SFTTrainer(model=model, args=SFTConfig(), {})\n{}\ntrainer.train()\n"
LINEAR = "m for m in {k.split('.')[-1] for k, v in model.named_modules() if 'proj' in k}"
OF_MODEL = {
    "model.set_attn_implementation('eager')": {"attention": "eager"},
    "model.config._attn_implementation = 'eager'": {"attention": "eager"},
    "from transformers import AutoConfig\nconfig = AutoConfig.from_pretrained('tiny-llama-3m')\n"
    "config._attn_implementation = 'eager'\n"
    "model = AutoModelForCausalLM.from_pretrained('tiny-llama-3m', config=config)": {
        "attention": "eager"
    },
    "get_peft_model(copy.deepcopy(model), LoraConfig())": {"lora_rank": 0},
    "copy.deepcopy(model).to(torch.float16)": {"precision": "fp32"},
    "for m in model.modules(): m.to(torch.float16)": {"precision": "fp32"},
    "model.generation_config = torch.load('g')": {"precision": "fp32"},
    "model = get_peft_model(model, LoraConfig(r=4)).get_base_model()": {"lora_rank": 4},
    f"model = get_peft_model(model, LoraConfig(target_modules=[{LINEAR}]))": {
        "lora_targets": ("all-linear",)
    },
}


def test_a_model_that_only_a_run_knows_may_be_of_any_precision_and_have_adapters(tmp_path):
    text = "import own_lib\nTrainer(own_lib.model(), TrainingArguments()).train()"
    said = refusals(tmp_path, text, max_length=64)
    assert all(f"--set {name}=" in said for name in ("precision", "lora_rank"))


@pytest.mark.parametrize(("cut", "where"), [("truncation=True", "assumed"), ("", "at_most")])
def test_rows_of_an_unknown_length_have_at_most_the_positions_of_the_model(tmp_path, cut, where):
    text = "name = 'distilbert-base-uncased'\nmodel = AutoModelForSequenceClassification."
    text += f"from_pretrained(name)\ndef cut(row): return tokenizer(row, {cut})\n"
    text += "Trainer(model, TrainingArguments(), train_dataset=rows.map(cut)).train()"
    plan = planned(tmp_path, text)
    assert knobs(plan, "max_length") == (512,)
    assert any("max_length=512, the positions of" in said for said in getattr(plan, where))


def test_a_configuration_that_only_transformers_reads_is_said_beside_the_reading(
    tmp_path, monkeypatch
):
    def absent(name):
        raise ModuleNotFoundError("No module named 'transformers'", name="transformers")

    monkeypatch.setattr("tuner.program.planned.resolve_config", absent)
    text = "Trainer(AutoModelForCausalLM.from_pretrained('own/of-7b'), TrainingArguments()).train()"
    with pytest.raises(UnavailableError, match=r"own/of-7b .*\n  read as stored, batch"):
        planned(tmp_path, text, max_length=64)


def test_an_error_that_an_answer_of_a_stand_in_may_have_caused_is_no_fault_of_the_program(tmp_path):
    for text in ("[r for r in rows][99]", "if len(tokenizer) != 55296:\n    raise ValueError('x')"):
        with pytest.raises(UndecidedError, match="needs a value that only a run knows"):
            planned(tmp_path, f"{text}\n")


@pytest.mark.parametrize("code", OF_MODEL)
def test_what_is_done_to_a_model_is_read(tmp_path, code):
    plan = planned(tmp_path, LOAD.format(code) + BY_SFT.format("", ""))
    assert OF_MODEL[code].items() <= dict(plan.configuration).items()


@pytest.mark.parametrize(
    "code",
    [
        "model.lm_head = torch.nn.Linear(8, 300000)",
        "del model.model.layers[2:]",
        "model = AutoModelForCausalLM.from_pretrained('tiny-llama-3m', num_hidden_layers=2)",
        "from peft import PeftModel\nmodel = PeftModel.from_pretrained(model, 'saved')",
    ],
)
def test_another_model_than_the_named_one_is_known_when_it_runs(tmp_path, code):
    with pytest.raises(UndecidedError, match=r"train\.py"):
        planned(tmp_path, LOAD.format(code) + BY_SFT.format("", ""))


FREEZES = """
from transformers import TrainerCallback
class Freezes(TrainerCallback):
    def on_train_begin(self, args, state, control, model=None, **more):
        for p in model.parameters(): p.requires_grad = False
trainer.add_callback(Freezes())
"""
ADAPTED = "trainer.model = get_peft_model(model, LoraConfig({}), {})"


@pytest.mark.parametrize(
    ("after", "said"),
    [
        ("trainer.compute_loss = lambda *args: 0", "compute_loss"),
        ("SFTTrainer.compute_loss = lambda *args: 0", "compute_loss"),
        (FREEZES, "which weights are trained"),
        (ADAPTED.format("", "autocast_adapter_dtype=False"), "in the dtype of the weights"),
        (ADAPTED.format("exclude_modules=['lm_head']", ""), "adapters on fewer modules"),
    ],
)
def test_what_a_program_gives_its_trainer_is_told(tmp_path, after, said):
    plan = planned(tmp_path, LOAD.format("") + BY_SFT.format("", after))
    assert said in str([*plan.at_least, *plan.left_out])


def test_a_callback_may_turn_checkpointing_off_before_the_first_step(tmp_path):
    after = FREEZES.replace(
        "for p in model.parameters(): p.requires_grad = False",
        "model.gradient_checkpointing_disable()",
    )
    sft = BY_SFT.format("", after).replace("SFTConfig(", "SFTConfig(gradient_checkpointing=True, ")
    assert "gradient_checkpointing=True" in sft
    assert knobs(planned(tmp_path, LOAD.format("") + sft), "gradient_checkpointing") == (False,)


def test_weights_that_stay_off_the_gpu_are_told_and_the_driver_is_there(tmp_path):
    load = LOAD.format("").replace("'tiny-llama-3m'", "'tiny-llama-3m', max_memory={0: '1GiB'}")
    batch = "per_device_train_batch_size=2 if __import__('shutil').which('nvidia-smi') else 1, "
    sft = BY_SFT.format("", "").replace("SFTConfig(", f"SFTConfig({batch}")
    plan = planned(tmp_path, load + sft)
    assert "stay off the GPU" in str(plan.left_out)
    assert knobs(plan, "micro_batch") == (2,)


def test_mixed_precision_around_the_training_is_read(tmp_path):
    trains = "Trainer(model, TrainingArguments('out')).train()"
    inside = f"with torch.autocast('cuda', dtype=torch.bfloat16): {trains}"
    by_name = f"import os\nos.environ['ACCELERATE_MIXED_PRECISION'] = 'bf16'\n{trains}"
    for text in (inside, by_name):
        plan = planned(tmp_path, LOAD.format(text), max_length=64)
        assert knobs(plan, "mixed_precision") == ("bf16",)


@pytest.mark.parametrize("model", ["google/gemma-3-4b-it", "tiny-llama-3m"])
def test_images_of_an_unknown_number_take_memory_if_the_model_takes_some(tmp_path, model):
    unsloth = UNSLOTH.replace("FastModel", "FastVisionModel").replace("tiny-llama-3m", model)
    adapted = f"model = FastModel.get_peft_model(model, finetune_vision_layers=True)\n{TOKENIZED}"
    whole = UNSLOTH.replace("tiny-llama-3m", model).replace(TOKENIZED, adapted)
    by_name = SFT.replace("tiny-llama-3m", model)
    processor = "processing_class=AutoProcessor.from_pretrained('x')"
    texts = [by_name.format("max_length=64", with_what) for with_what in ("", processor)]
    for text in (unsloth, whole, *texts):
        found = planned(tmp_path, text.format("max_seq_length=1024")).at_least
        assert [("images" in each) for each in found] == [True] * (model != "tiny-llama-3m")
    tokenizer = "processing_class=AutoTokenizer.from_pretrained('x')"
    assert not planned(tmp_path, by_name.format("max_length=64", tokenizer)).at_least


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (
            SFT.format("label_smoothing_factor=0.1", ""),
            "train.py:7 label_smoothing_factor: a loss with label smoothing",
        ),
        (SFT.format("torch_compile_backend='eager'", ""), "only inductor has a bound"),
        (SFT.format("optim='galore_adamw'", ""), "optim: is galore_adamw"),
        (
            SFT.format("max_length=len(rows) // 2", ""),
            "train.py:7 max_length: is known only when it runs",
        ),
        (SFT.format("deepspeed='z3.json'", ""), "z3.json: cannot be read"),
        (SFT.format("", "peft_config=LoraConfig(rank_pattern={'q': 4})"), "ranks that differ"),
        (
            SFT.format("", "peft_config=IA3Config()"),
            "`tuner estimate` with `--set adapter=ia3` predicts its kind",
        ),
        (
            "SFTTrainer('tiny-llama-3m', args=rows.parse()[0]).train()",
            "train.py:7 args: is known only when it runs",
        ),
        (SFT.format("", "peft_config=rows.lora"), "train.py:7 peft_config: is known only when"),
        (TRAINER.format("", "", "").replace("max_length=512", ""), "--set max_length=1024"),
    ],
)
def test_what_is_not_predicted_is_refused_by_its_line(tmp_path, text, named):
    assert named in refusals(tmp_path, text)


LOOP = """\
loader = torch.utils.data.DataLoader(rows, batch_size=4)
for batch in loader:
    rows.model(**batch).loss.backward()
"""


LOADED = "model = AutoModelForCausalLM.from_pretrained('tiny-llama-3m')\n{}\n" + SFT.format(
    "max_length=64", ""
).replace("'tiny-llama-3m'", "model")


@pytest.mark.parametrize(
    ("text", "left_out"),
    [
        (SFT.format("torch_compile=True", ""), ""),
        (SFT.format("torch_compile_mode='reduce-overhead'", ""), "torch_compile_mode: CUDA graphs"),
        (LOADED.format("model = torch.compile(model)"), ""),
        (LOADED.format("model.compile(mode='max-autotune')"), "torch_compile_mode: CUDA graphs"),
    ],
)
def test_a_program_says_in_four_ways_that_it_compiles(tmp_path, text, left_out):
    plan = planned(tmp_path, text)
    assert plan.configuration["torch_compile"] is True
    assert left_out in "".join(plan.left_out)
    assert len(plan.left_out) == len(plan.at_most) + bool(left_out) == 1 + bool(left_out)


def test_a_pattern_is_compiled_and_no_model(tmp_path):
    plan = planned(tmp_path, "import re\nre.compile('x')\n" + SFT.format("", ""))
    assert "torch_compile" not in plan.configuration


def test_what_cannot_be_read_can_be_said(tmp_path):
    plan = planned(tmp_path, SFT.format("max_length=len(rows) // 2", ""), max_length="64")
    assert plan.configuration["max_length"] == 64


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("axolotl.yml", "base_model: [a]\nadapter: {}\ndatasets: 5\nmicro_batch_size: .inf\n"),
        ("axolotl.yml", "base_model: q\nadapter: lora\nlora_target_modules: 5\ndatasets: [{}]\n"),
    ],
)
def test_malformed_values_are_an_error_with_the_file(tmp_path, name, text):
    with pytest.raises(InputError) as caught:
        planned(tmp_path, text, name=name)
    assert name in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        LOOP,
        "from trl import GRPOConfig, GRPOTrainer\n"
        "GRPOTrainer(model='tiny-llama-3m', args=GRPOConfig()).train()\n",
        SFT.format("label_smoothing_factor=0.1", ""),
    ],
    ids=["a loop", "another trainer", "a setting"],
)
def test_the_command_for_the_emulator_is_shown_where_nothing_is_predicted(tmp_path, text):
    (tmp_path / "train.py").write_text(SCRIPT + text)
    program = read_program(("train.py", "--x", "a b"), tmp_path, is_run=False)
    with pytest.raises(UnsupportedError) as caught:
        plan_program(program, gpu=get_gpu("rtx4090"))
    command = f"tuner {str(caught.value).rpartition(': tuner ')[2]}"
    assert shlex.split(command)[:5] == ["tuner", "check", "--gpu", "rtx4090", "--"]
    assert shlex.split(command)[5:] == list(program.typed)


def test_an_unsupported_trainer_is_named(tmp_path):
    with pytest.raises(
        UndecidedError, match=r"train.py:9: a training loop of its own, whose"
    ) as own:
        planned(tmp_path, LOOP)
    assert own.value.exit_code == 4
    text = "from trl import GRPOTrainer\nGRPOTrainer(model='m').train()\n"
    with pytest.raises(UndecidedError, match=r"unsupported trainer \(found: GRPOTrainer\)"):
        planned(tmp_path, text)
    text = "import lightning as L\nL.Trainer(accumulate_grad_batches=8).fit(rows.module)\n"
    with pytest.raises(UndecidedError, match=r"unsupported trainer \(found: lightning"):
        planned(tmp_path, text)


@pytest.mark.parametrize(
    ("more", "code"),
    [
        ("label_smoothing_factor=0.1, max_length=8", 3),
        ("max_length=len(rows)", 4),
        ("max_length=len(nothing)", 2),
    ],
    ids=["not predicted", "not known", "an error"],
)
def test_what_is_not_predicted_is_no_fault_of_the_program(tmp_path, more, code):
    with pytest.raises(InputError) as caught:
        planned(tmp_path, SFT.format(more, ""))
    assert caught.value.exit_code == code


AXOLOTL = """\
base_model: tiny-llama-3m
datasets: [{path: data.jsonl, type: alpaca}]
adapter: qlora
load_in_4bit: true
lora_r: 8
lora_target_linear: true
micro_batch_size: 2
gradient_checkpointing: true
"""


def test_files_of_tools_have_their_tools_defaults(tmp_path, monkeypatch):
    monkeypatch.chdir(PROGRAMS)
    read = read_program(("llamafactory.yaml",), is_run=False)
    plan = plan_program(read, model=MODEL)
    assert knobs(plan, "micro_batch", "grad_accum", "max_length") == (1, 8, 2048)
    # It loads in the dtype of the checkpoint, which is fp32 here.
    assert knobs(plan, "precision", "mixed_precision", "lora_rank") == ("fp32", "bf16", 8)
    assert knobs(plan, "gradient_checkpointing", "use_reentrant") == (True, True)
    assert knobs(plan, "lora_targets", "kbit_preparation") == (("all-linear",), "none")

    sft = plan_program(read_program(("trl_sft.yaml",), is_run=False), model=MODEL)
    assert knobs(sft, "micro_batch", "lora_rank", "lora_dropout") == (8, 16, 0.05)
    assert knobs(sft, "precision", "attention", "loss") == ("fp32", "flash_attention_2", "chunked")

    for given, reentrant in (("", True), ("gradient_checkpointing_kwargs: {}\n", False)):
        Path(tmp_path, "now.yml").write_text(AXOLOTL + given)
        qlora = plan_program(read_program((str(tmp_path / "now.yml"),), is_run=False), model=MODEL)
        assert knobs(qlora, "gradient_checkpointing", "use_reentrant") == (True, reentrant)
        assert knobs(qlora, "precision", "kbit_preparation") == ("nf4", "none")

    # `sdpa_varlen`: no mask, as FlashAttention.
    packed = plan_program(read_program(("axolotl_full.yml",), is_run=False), model=MODEL)
    assert knobs(packed, "micro_batch", "attention") == (2, "flash_attention_2")


def test_axolotl_without_packing(tmp_path):
    text = (
        "base_model: tiny-llama-3m\ndatasets:\n  - path: d.jsonl\nadapter: qlora\n"
        "load_in_4bit: true\nlora_r: 32\nlora_target_modules:\n  - q_proj\n  - v_proj\n"
        "sequence_len: 256\nmicro_batch_size: 2\ngradient_checkpointing: true\n"
    )
    plan = planned(tmp_path, text, name="axolotl.yml")
    assert knobs(plan, "precision", "compute_dtype", "double_quant") == ("nf4", "bf16", True)
    assert knobs(plan, "lora_rank", "lora_targets") == (32, ("q_proj", "v_proj"))
    assert knobs(plan, "micro_batch", "grad_accum", "max_length") == (2, 1, 256)
    assert plan.left_out == ("Axolotl's LoRA kernels (lora_mlp_kernel and others)",)
    full = text.replace("adapter: qlora\nload_in_4bit: true\n", "")
    [widened] = planned(tmp_path, full, name="axolotl.yml").at_least
    assert "embeddings and norms" in widened


def test_packed_rows_have_a_mask_where_no_flash_attention_is(tmp_path):
    packed = AXOLOTL + "sample_packing: true\n"
    plan = planned(tmp_path, packed, name="axolotl.yml")
    assert knobs(plan, "micro_batch", "padding") == (2, "packed")
    plan = planned(tmp_path, packed + "flash_attention: true\n", name="axolotl.yml")
    assert knobs(plan, "micro_batch", "attention") == (2, "flash_attention_2")
    assert any(note.startswith("packed: each batch is one full row") for note in plan.notes)
    assert not any("sample_packing" in text for text in plan.left_out)
    # All layers are adapted: that nobody named them says nothing.
    assert not any("lora_target_modules" in text for text in plan.assumed)

    flash = "packing=True, model_init_kwargs={'attn_implementation': 'flash_attention_2'}"
    plan = planned(tmp_path, SFT.format(flash, ""))
    assert any(note.startswith("packed:") for note in plan.notes)


def test_the_folder_of_outputs_takes_no_memory_by_whatever_name(tmp_path):
    text = "args = TrainingArguments('out', bf16=True)\nTrainer(model, args).train()"
    model = "model = AutoModelForCausalLM.from_pretrained('tiny-llama-3m')\n"
    plan = planned(tmp_path, model + text, max_length=64)
    assert not plan.left_out


def test_the_first_argument_of_a_call_has_the_name_of_the_call(tmp_path):
    text = (
        "model = AutoModelForCausalLM.from_pretrained(rows.name)\n"
        "SFTTrainer(model, args=SFTConfig()).train()\n"
    )
    assert "train.py:7 AutoModelForCausalLM.from_pretrained(...)" in refusals(tmp_path, text)


PARSED = """\
from dataclasses import dataclass, field
from transformers import AutoTokenizer, HfArgumentParser
from trl import TrlParser

@dataclass
class ModelArguments:
    model_name_or_path: str = field(default="tiny-llama-3m")
    rank: int = 8

@dataclass
class MyArguments(TrainingArguments):
    model_max_length: int = field(default=128)
    optim: str = field(default="adamw_torch")

model_args, training_args = {parser}.{parse}()
model = AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path)
AutoTokenizer.from_pretrained("t", model_max_length=training_args.model_max_length)
lora = LoraConfig(r=model_args.rank)
Trainer(model=get_peft_model(model, lora), args=training_args, train_dataset=None).train()
"""
BY_WORDS = PARSED.format(
    parser="HfArgumentParser((ModelArguments, MyArguments))", parse="parse_args_into_dataclasses"
)


def test_arguments_of_a_parser_are_read_from_the_command_line(tmp_path):
    words = ("--per_device_train_batch_size", "4", "--bf16", "--rank=32", "--output_dir", "out")
    words += ("--gradient_checkpointing", "True")
    words += ("--gradient_checkpointing_kwargs", '{"use_reentrant": true}')
    plan = planned(tmp_path, BY_WORDS, *words)
    assert plan.model == MODEL
    assert knobs(plan, "micro_batch", "mixed_precision", "lora_rank") == (4, "bf16", 32)
    assert knobs(plan, "gradient_checkpointing", "use_reentrant") == (True, True)
    assert knobs(plan, "optimizer", "max_length") == ("adamw_torch", 128)
    assert "rank" not in " ".join(plan.left_out)


def test_arguments_of_a_parser_are_read_from_its_file(tmp_path):
    (tmp_path / "run.yaml").write_text("per_device_train_batch_size: 2\nrank: 4\nbf16: true\n")
    text = PARSED.format(
        parser="TrlParser((ModelArguments, MyArguments))", parse="parse_args_and_config"
    )
    plan = planned(tmp_path, text, "--config", "run.yaml", "--rank", "16")
    assert knobs(plan, "micro_batch", "lora_rank", "mixed_precision") == (2, 16, "bf16")


RECIPE = """\
model:
  _component_: torchtune.models.qwen2_5.{builder}
  lora_attn_modules: [q_proj, output_proj]
  apply_lora_to_mlp: True
  lora_rank: 16
  lora_alpha: 32
tokenizer: {{_component_: torchtune.models.qwen2_5.qwen2_5_tokenizer, max_seq_len: {length}}}
batch_size: 2
gradient_accumulation_steps: 4
optimizer: {{_component_: bitsandbytes.optim.PagedAdamW8bit, lr: 2e-4}}
loss: {{_component_: torchtune.modules.loss.LinearCrossEntropyLoss}}
enable_activation_checkpointing: True
dtype: bf16
{more}
"""


def recipe(
    tmp_path: Path, *words: str, builder: str = "qlora_qwen2_5_7b_base", length: str = "512",
    more: str = "clip_grad_norm: null", given: dict[str, object] | None = None,
) -> ProgramPlan:  # fmt: skip
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE.format(builder=builder, length=length, more=more))
    program = read_program([str(file), *words], is_run=False)
    return plan_program(program, given)


def test_a_recipe_of_torchtune_is_read(tmp_path: Path):
    plan = recipe(tmp_path)
    assert (plan.trainer, plan.model, plan.left_out) == ("torchtune", "qwen2.5-7b", ())
    wanted = {
        "micro_batch": 2, "grad_accum": 4, "max_length": 512, "lora_rank": 16, "lora_alpha": 32,
        "lora_targets": ("q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        "precision": "nf4", "compute_dtype": "bf16", "adapter_dtype": "bf16", "double_quant": True,
        "mixed_precision": "no", "optimizer": "paged_adamw_8bit", "loss": "chunked",
        "gradient_checkpointing": True, "use_reentrant": False, "max_grad_norm": 0,
    }  # fmt: skip
    assert {name: plan.configuration[name] for name in wanted} == wanted


def test_words_of_tune_run_override_the_recipe(tmp_path: Path):
    plan = recipe(tmp_path, "batch_size=3", "model.lora_rank=4", builder="lora_qwen2_5_0_5b")
    chosen = [plan.configuration[name] for name in ("micro_batch", "lora_rank", "precision")]
    assert chosen == [3, 4, "bf16"]


def test_adapters_of_a_full_recipe_are_not_read(tmp_path: Path):
    plan = recipe(tmp_path, builder="qwen2_5_3b")
    assert plan.configuration["lora_rank"] == 0
    assert "recipe.yaml:5 model.lora_rank" in " ".join(plan.left_out)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"builder": "lora_qwen9_1b"}, "pass --model"),
        ({"length": "null"}, "--set max_length=1024"),
        ({"more": "tensor_parallel_dim: 2"}, "tensor parallelism"),
    ],
)
def test_a_recipe_that_cannot_be_predicted_says_why(tmp_path: Path, changes, named: str):
    with pytest.raises(InputError) as raised:
        recipe(tmp_path, **changes)
    assert any(named in str(problem) for problem in raised.value.problems)


EVALUATED = "Trainer(model=AutoModelForCausalLM.from_pretrained('tiny-llama-3m'), {}{})\n"


def evaluated(folder: Path, arguments: str, trainer: str = "", after: str = "", **given):
    text = EVALUATED.format(f"args=TrainingArguments({arguments}), ", trainer)
    whole = f"f = g = print\ntrainer = {text}trainer.train()\n{after}"
    plan = planned(folder, whole, max_length=64, **given)
    return tuple(plan.configuration.get(name, 0) for name in ("eval_batch", "eval_kept"))


@pytest.mark.parametrize(
    ("arguments", "trainer", "after", "found"),
    [
        ("", "eval_dataset=rows", "", (0, 0)),
        ("eval_strategy='no', do_eval=True", "", "", (0, 0)),
        ("eval_strategy='steps', per_device_train_batch_size=1", "", "", (8, 0)),
        ("eval_strategy='epoch', per_device_eval_batch_size=3", "", "", (3, 0)),
        ("eval_on_start=True", "", "", (8, 0)),
        ("", "", "trainer.evaluate()", (8, 0)),
        ("", "", "if False:\n    trainer.evaluate()", (0, 0)),
        ("", "", "rows.metric.evaluate()", (0, 0)),
        ("eval_strategy='steps', eval_accumulation_steps=2", "compute_metrics=f", "", (8, 2)),
        ("eval_strategy='steps', prediction_loss_only=True", "compute_metrics=f", "", (8, 0)),
        ("eval_strategy='steps'", "compute_metrics=f, preprocess_logits_for_metrics=g", "", (8, 1)),
    ],
)
def test_the_evaluation_is_that_of_the_settings(tmp_path, arguments, trainer, after, found):
    assert evaluated(tmp_path, arguments, trainer, after) == found


def test_the_evaluation_that_you_set_is_taken(tmp_path):
    assert evaluated(tmp_path, "eval_strategy='steps'", eval_batch=2) == (2, 0)
    assert evaluated(tmp_path, "eval_strategy='steps'", eval_batch=0) == (0, 0)
    metrics = evaluated(tmp_path, "eval_strategy='steps'", "compute_metrics=f", eval_batch=2)
    assert metrics == (2, 1)  # what is kept of each stays unknown


TRAINED = EVALUATED.format("args={}", "").replace(")\n", ").train()\n")


@pytest.mark.parametrize(
    ("text", "said", "keeps_all"),
    [
        (
            TRAINED.format("TrainingArguments(eval_strategy='steps'), compute_metrics=print"),
            "set eval_accumulation_steps",
            True,
        ),
        (
            TRAINED.format(
                "TrainingArguments(eval_strategy='steps', per_device_eval_batch_size=len(rows))"
            ),
            "evaluation isn't priced: per_device_eval_batch_size",
            False,
        ),
        (SFT.format("eval_strategy='steps'", "compute_metrics=print"), "eval_accumulation", True),
        (
            "DPOTrainer(model='tiny-llama-3m', args=DPOConfig(eval_strategy='steps')).train()",
            "evaluation isn't priced: DPOTrainer",
            False,
        ),
        (SFT.format("eval_strategy='steps'", ""), "", False),
    ],
)
def test_what_is_unknown_of_an_evaluation_is_said(tmp_path, text, said, keeps_all):
    plan = planned(tmp_path, text, max_length=64)
    assert said in plan.evaluation
    assert bool(plan.evaluation) == bool(said)
    assert plan.keeps_all is keeps_all


def test_weights_that_are_merged_after_the_training_are_named(tmp_path):
    made = SFT.format("", "").replace(".train()", "")
    text = f"trainer = {made}\ntrainer.train()\ntrainer.model.merge_and_unload()\n"
    (left_out,) = planned(tmp_path, text).left_out
    assert left_out.endswith("train.py:9 merge_and_unload")


RESIZED = """\
tokenizer.add_special_tokens({{"additional_special_tokens": {}}})
model = AutoModelForCausalLM.from_pretrained("tiny-llama-3m")
model.resize_token_embeddings({})
SFTTrainer(model=model, args=SFTConfig("out", max_length=64)).train()
"""


@pytest.mark.parametrize(
    ("tokens", "size", "said"),
    [
        ("['<a>', '<b>']", "len(tokenizer)", ""),
        ("rows['tokens']", "len(tokenizer)", "rows that it may add to the embeddings aren't"),
        ("['<a>']", "10_000_000", "more rows of embeddings aren't predicted: up to "),
    ],
)
def test_rows_that_embeddings_get_are_told_where_they_may_take_much(
    tmp_path, monkeypatch, tokens, size, said
):
    monkeypatch.setattr("tuner.program.planned.resolve_config", None)  # it needs transformers
    plan = planned(tmp_path, RESIZED.format(tokens, size))
    assert [said in text for text in plan.at_least] == [True] * bool(said)


def test_an_attribute_that_no_trainer_reads_has_no_effect(tmp_path):
    text = "args = SFTConfig('out')\nargs.max_seq_length = 256\nargs.foo = 1\n"
    plan = planned(tmp_path, text + "SFTTrainer(model='tiny-llama-3m', args=args).train()")
    assert knobs(plan, "max_length") == (1024,)
    notes = [note for note in plan.notes if "has no effect" in note]
    assert "train.py:8: max_seq_length=256 has no effect: SFTConfig in TRL " in notes[0]
    assert "train.py:9: foo=1 has no effect: SFTConfig in TRL " in notes[1]


def test_an_option_that_the_training_does_not_follow_is_told(tmp_path):
    text = "import argparse\np = argparse.ArgumentParser()\n"
    text += "p.add_argument('--batch_size', type=int)\np.add_argument('--max_length', type=int)\n"
    text += "p.add_argument('task', nargs='?')\n"
    text += "a = p.parse_args()\nargs = SFTConfig('out', max_length=a.max_length)\n"
    text += "SFTTrainer(model='tiny-llama-3m', args=args).train()"
    words = ("--batch_size", "2", "--max_length", "64")
    plan = planned(tmp_path, text, *words)
    told = [note for note in plan.notes if "--" in note]
    assert told == ["--batch_size is 2, and the training has micro_batch=8"]
    behind = planned(tmp_path, text, "--max_length", "64", "lora", micro_batch=2)
    assert not [note for note in behind.notes if "--" in note]
    assert not [n for n in planned(tmp_path, text, *words, micro_batch=2).notes if "--batch" in n]


def test_an_absent_library_is_named_where_the_answer_is_unknown(tmp_path):
    text = "import nosuchlibrary, wandb_nosuch, hydra\n"
    with pytest.raises(UndecidedError) as own:
        planned(tmp_path, f"{text}print(nosuchlibrary.x)")
    assert "unknown for want of nosuchlibrary, wandb_nosuch" in str(own.value)
    text += "SFTTrainer('m', args=SFTConfig(max_length=nosuchlibrary.x)).train()"
    with pytest.raises(UndecidedError, match="only when it runs; unknown for want of nosuchlib"):
        planned(tmp_path, text)


ABSENT = """
import nosuchlibrary
class Base(nosuchlibrary.Settings):
    batch: int = 1
    length: int = 64
@nosuchlibrary.config
class Decorated:
    batch: int = 1
    length: int = 64
@nosuchlibrary.configurable()
def train(length=64, *, batch=1):
    args = SFTConfig(max_length=length, per_device_train_batch_size=batch)
    SFTTrainer('tiny-llama-3m', args).train()
{}
"""


@pytest.mark.parametrize("made", ["Base({})", "Decorated({})"])
def test_only_what_it_is_given_is_known_of_an_object_of_an_absent_library(tmp_path, made):
    use = "s = {}\nwith_length = train(batch=s.batch, length=s.length)"
    text = ABSENT.format(use.format(made.format("batch=4")))
    found = refusals(tmp_path, text)
    assert "length" in found
    assert "batch" not in found
    assert planned(tmp_path, text, max_length=32).configuration["micro_batch"] == 4


def test_an_absent_decorator_may_set_arguments_that_have_defaults(tmp_path):
    assert "(batch)" in refusals(tmp_path, ABSENT.format("train(length=64)"))
    plan = planned(tmp_path, ABSENT.format("train(length=64, batch=2)"))
    told = f"isn't known: nosuchlibrary ({tmp_path / 'train.py'}:12)"
    assert any(told in note for note in plan.notes)


def test_variables_of_a_file_are_set_where_dotenv_is_not_installed(tmp_path, monkeypatch):
    lines = ["# not this", "export A_LENGTH='64' # but this", 'A_BATCH="${A_LENGTH}"', "A_SET=1"]
    (tmp_path / ".env").write_text("\n".join(lines))
    monkeypatch.setenv("A_SET", "3")
    text = "import os\nfrom dotenv import load_dotenv\nload_dotenv()\n"
    given = "A_LENGTH", "A_BATCH", "A_SET"
    names = "max_length", "per_device_train_batch_size", "gradient_accumulation_steps"
    said = ", ".join(f"{n}=int(os.environ['{g}'])" for n, g in zip(names, given, strict=True))
    plan = planned(tmp_path, text + SFT.format(said, ""))
    assert knobs(plan, "max_length", "micro_batch", "grad_accum") == (64, 64, 3)


@pytest.mark.parametrize(
    "lines",
    ["n = random.choice([32, 64, 128])", "n = int(np.random.choice([32, 64, 128]))",
     "n = int(np.random.default_rng().choice([32, 64, 128]))",
     "random.seed(rows.seed); n = random.choice([32, 64, 128])"],
)  # fmt: skip
def test_a_number_that_is_drawn_without_a_seed_is_unknown(tmp_path, lines):
    text = f"import random, numpy as np\n{lines}\n"
    assert "train.py:8)" in refusals(tmp_path, text + SFT.format("max_length=n", ""))


@pytest.mark.parametrize(
    "seed", ["random.seed(5)", "import transformers; transformers.set_seed(5)"]
)
def test_a_number_that_is_drawn_with_a_seed_is_known(tmp_path, seed):
    text = f"import random\n{seed}; n = random.randint(32, 2**20)\n"
    plan = planned(tmp_path, text + SFT.format("max_length=n", ""))
    assert plan.configuration["max_length"] == random.Random(5).randint(32, 2**20)


WANDB = "import wandb\nrun = wandb.init(config={})\n"


@pytest.mark.parametrize(
    "value",
    ["wandb.config.n", "run.config['n']", "dict(wandb.config)['n']", "wandb.config.get('n', 1)"],
)
def test_the_configuration_of_wandb_is_what_it_was_given(tmp_path, value):
    text = WANDB.format("dict(n=64)") + SFT.format(f"max_length={value}", "")
    assert planned(tmp_path, text).configuration["max_length"] == 64


@pytest.mark.parametrize(
    "text",
    [
        f"{WANDB.format('rows.config')}n = wandb.config.get('n', 1)\n{{}}",
        f"{WANDB.format('dict(n=1)')}wandb.config.update(rows)\nn = wandb.config.n\n{{}}",
        "import wandb\ndef f():\n    n = wandb.init(config={{'n': 1}}).config.n\n    {}\n"
        "wandb.agent('id', f)",
    ],
)
def test_a_configuration_of_wandb_that_may_be_another_is_unknown(tmp_path, text):
    assert "(wandb.config.n)" in refusals(tmp_path, text.format(SFT.format("max_length=n", "")))


OWN_SHAPE = """
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
model = LlamaForCausalLM(LlamaConfig(hidden_size=64))
Trainer(model, TrainingArguments("o")).train()
"""


def test_a_model_of_ones_own_numbers_is_told_to_be_saved(tmp_path):
    with pytest.raises(UndecidedError) as caught:
        planned(tmp_path, OWN_SHAPE, max_length=64)
    (problem,) = caught.value.problems
    assert "the model is made of LlamaConfig(...): save that with" in problem.message
    read = read_program(("train.py",), tmp_path, is_run=False)
    plan = plan_program(read, {"max_length": 64}, "tiny-llama-3m")
    assert knobs(plan, "precision") == ("fp32",)
