"""`tuner check --predict`: a program is read with stand-ins, and writes nothing."""

import contextlib
import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from click.testing import CliRunner

from tests.started import run_python
from tuner.app.checking import check_program
from tuner.app.cli.main import cli, run
from tuner.app.program_oracle import ProgramPredictions
from tuner.core.errors import EXIT_UNAVAILABLE, UnavailableError
from tuner.core.units import format_size
from tuner.predict import cache, predictor
from tuner.predict.compiler import deepening
from tuner.program.program import read_program
from tuner.space.gpus import get_gpu

PROGRAM = """\
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

open("was run", "w").write("it was")
BATCH_SIZE = 64
SFTTrainer(
    model="tiny-llama-3m",
    args=SFTConfig(
        per_device_train_batch_size=BATCH_SIZE, max_length=512, torch_empty_cache_steps=3
    ),
    peft_config=LoraConfig(r=4, target_modules="all-linear"),
).train()
"""


def ran(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return run_python("-m", "tuner", "check", "--gpu", "rtx4090", *words, cwd=folder)


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("predicted")
    (folder / "train.py").write_text(PROGRAM)
    found = ran(folder, "--gpu-memory", "1GiB", "--predict", "--json", "train.py")
    assert found.stdout, found.stderr
    assert [path.name for path in folder.iterdir()] == ["train.py"]
    assert (folder / "train.py").read_text() == PROGRAM
    return {**json.loads(found.stdout), "exit": found.returncode}


def test_what_does_not_fit_is_predicted_with_the_trainers_defaults(answer):
    assert (answer["exit"], answer["source"], answer["fits"]) == (1, "predicted", False)
    assert answer["verdict"] == "tight"  # 1.01 GiB, and the interval begins below the limit
    program = answer["program"]
    assert program["source"] == "predicted"
    assert program["configuration"]["loss"] == "chunked"
    assert "mixed_precision=bf16" in program["assumed"]
    assert program["left_out"] == ["train.py:9 torch_empty_cache_steps"]


@pytest.mark.parametrize(
    ("model", "saved"),
    [
        pytest.param("qwen2.5-0.5b", ["lm_head", "embed_tokens"], marks=pytest.mark.proof),
        ("tiny-gpt2", ["lm_head"]),
    ],
)
def test_libraries_say_nothing_beside_the_answer(tmp_path, model, saved):
    # peft warns of tied embeddings that are saved and of gpt2's layers, bitsandbytes of casts.
    lora = f'target_modules="all-linear", modules_to_save={saved}'
    text = PROGRAM.replace('target_modules="all-linear"', lora).replace(
        '    model="tiny-llama-3m",\n', "    model,\n"
    )
    loaded = (
        "from transformers import AutoModelForCausalLM, BitsAndBytesConfig\n"
        f'model = AutoModelForCausalLM.from_pretrained("{model}", dtype="bfloat16",'
        " quantization_config=BitsAndBytesConfig(load_in_8bit=True))\n"
    )
    (tmp_path / "train.py").write_text(
        text.replace("BATCH_SIZE = 64\n", f"BATCH_SIZE = 2\n{loaded}")
    )
    found = ran(tmp_path, "--predict", "--no-changes", "train.py")
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stderr == ""


@pytest.mark.parametrize("saving", ["activation_offloading", "torch_compile"])
def test_an_upper_bound_that_does_not_fit_is_unknown_and_a_change_below_it_fits(
    tmp_path, monkeypatch, capsys, saving
):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(
        PROGRAM.replace("max_length=512,", f"max_length=512, {saving}=True,")
    )
    told = ["check", "--gpu", "rtx4090", "--gpu-memory", "1GiB", "--predict", "train.py"]
    assert run(told) == 4
    lines = capsys.readouterr().out.splitlines()
    assert re.match(r"unknown: at most 1.\d+ of 1.00 GiB on rtx4090", lines[0])
    assert any(line.startswith("With this change it fits, tightly: 0.") for line in lines)
    assert "-BATCH_SIZE = 64" in lines
    is_known = saving != "torch_compile"
    assert is_known != any(line.startswith("speed   unknown under") for line in lines)


def test_a_compiled_program_that_fits_gets_no_change_and_no_front(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(PROGRAM.replace("max_length=512,", "torch_compile=True,"))
    assert run(["check", "--gpu", "rtx4090", "--predict", "--json", "train.py"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["suggestion"] is None
    assert answer["program"]["samples_per_s"] is None
    assert run(["tune", "--gpu", "rtx4090", "--predict", "train.py"]) == 3
    assert "isn't predicted" in capsys.readouterr().err


def test_a_change_that_fits_is_predicted_and_shown_as_a_diff(answer):
    found = answer["suggestion"]
    values = found["values"]
    assert values["micro_batch"] * values["grad_accum"] == 64
    assert found["found"]["fits"] is True
    assert found["found"]["configuration"]["micro_batch"] == values["micro_batch"]
    assert f"+BATCH_SIZE = {values['micro_batch']}" in found["difference"].splitlines()


def test_the_verdict_is_the_first_of_at_most_fourteen_lines(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(PROGRAM)
    small = ["--gpu", "rtx4090", "--gpu-memory", "1GiB", "--predict"]
    assert run(["check", *small, "train.py"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert re.match(
        r"tight \(likely not\): 1.01 of 1.00 GiB on rtx4090 \(90 %: 0.\d+ to 1.\d+\)", lines[0]
    )
    assert lines[1] == "read as fp32 with bf16, LoRA 4, batch 64 x 1, length 512, checkpointing,"
    assert len(lines) <= 14
    assert max(map(len, lines)) <= 80
    title = next(n for n, line in enumerate(lines) if line.startswith("With this change it fits"))
    assert lines[title + 1] == "-BATCH_SIZE = 64"
    labels = [line[:8].strip() for line in lines]
    assert labels[-5:] == ["speed", "time", "cost", "source", "note"]
    assert lines[-1].endswith("train.py:9 torch_empty_cache_steps")
    assert run(["check", *small, "--no-changes", "--set", "micro_batch=1", "train.py"]) == 0
    assert "has no effect" not in capsys.readouterr().out

    assert run(["check", *small, "--no-changes", "--verbose", "train.py"]) == 1
    out = capsys.readouterr().out
    text = " ".join(out.split())
    assert out.splitlines()[0] == lines[0]
    assert "change" not in text  # none was tried
    assert "trainer TRL SFTTrainer" in text
    assert "every sequence is of full length" in text
    assert text.endswith("predicted, in 1 prediction")


def test_a_change_is_written_after_a_question(tmp_path):
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    words = ["--predict", "--gpu", "rtx4090", "--gpu-memory", "1GiB", "--apply"]

    def asked(answer: str, command: str, *more: str) -> Any:
        with contextlib.chdir(tmp_path):
            return CliRunner().invoke(cli, [command, *words, *more, "train.py"], input=answer)

    assert "nothing was written" in asked("n\n", "check").stderr
    assert program.read_text() == PROGRAM
    told = asked("y\n", "check")
    assert told.exit_code == 1  # of the program as it was
    (backup,) = tmp_path.glob("train.py.*.bak")
    assert backup.read_text() == PROGRAM
    assert "BATCH_SIZE = 64" not in program.read_text()
    assert asked("y\n", "check", "--no-changes").stderr.endswith("nothing changes\n")

    program.write_text(PROGRAM)
    assert asked("y\n", "tune").exit_code == 0
    assert "BATCH_SIZE = 64" not in program.read_text()


def test_without_a_gpu_all_types_are_compared_from_one_trace(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(cache.FOLDER_VARIABLE, str(tmp_path / "timelines"))
    Path("train.py").write_text(PROGRAM)
    with mock.patch.object(deepening, "sized_timeline", wraps=deepening.sized_timeline) as traced:
        assert run(["check", "train.py", "--json"]) == 0
    assert traced.call_count == 2  # in bf16, and in fp16 for GPUs without it
    found = json.loads(capsys.readouterr().out)
    of = {answer["gpu"]: answer for answer in found["gpus"]}
    sizes = [get_gpu(name).memory_bytes for name in of]
    assert sizes == sorted(sizes)
    assert (of["t4"]["remark"], of["a6000"]["remark"]) == ("in fp16", "")
    assert found["smallest"] == next(name for name, answer in of.items() if answer["fits"])

    # What was made from the trace of an Ampere is what a trace of its own would say.
    program = read_program(["train.py"], tmp_path, is_run=False)
    monkeypatch.setenv(cache.FOLDER_VARIABLE, str(tmp_path / "others"))
    alone = ProgramPredictions(program, get_gpu("h100_sxm")).as_it_is().prediction
    assert alone.memory.device_bytes == of["h100_sxm"]["memory"]["device_bytes"]
    assert alone.memory.breakdown == of["h100_sxm"]["memory"]["breakdown"]
    assert alone.speed.step_s == of["h100_sxm"]["step_s"]

    monkeypatch.setenv(cache.FOLDER_VARIABLE, str(tmp_path / "timelines"))
    assert run(["check", "train.py", "--examples", "6400"]) == 0
    assert "time and USD per training of 300 steps at full length" in capsys.readouterr().out
    assert run(["check", "train.py", "--gpu", "a6000", "--examples", "6400", "--json"]) == 0
    program = json.loads(capsys.readouterr().out)["program"]
    assert program["run_time"]["steps"] == 300
    assert program["run_time"]["seconds"] == pytest.approx(300 * of["a6000"]["step_s"])
    assert run(["check", "train.py"]) == 0
    lines = capsys.readouterr().out.splitlines()
    said = lines[0].partition("; ")[2].split(", ")
    best = {word: said_of.split()[-1] for said_of in said for word in said_of.split()[:-1]}
    fitting = [answer for answer in found["gpus"] if answer["fits"]]
    assert best["smallest"] == found["smallest"]
    assert best["fastest"] == max(fitting, key=lambda answer: answer["samples_per_s"])["gpu"]
    assert "cheapest" in best
    assert len(lines) <= 25


def test_what_was_predicted_before_is_read_from_the_disk(tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)
    program = read_program(["train.py"], tmp_path, is_run=False)
    found = ProgramPredictions(program, get_gpu("rtx4090")).as_it_is().prediction
    again = ProgramPredictions(program, get_gpu("rtx4090"))
    with mock.patch.object(predictor, "trace_all", side_effect=AssertionError):
        assert again.as_it_is().prediction == found


def test_set_means_that_it_is_predicted_where_it_could_be_emulated(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tuner.app.programs.ProgramRuns", mock.Mock(side_effect=AssertionError))
    Path("train.py").write_text(PROGRAM)
    words = ["--set", "micro_batch=2", "--no-changes", "--json", "train.py"]
    assert run(["check", "--gpu", "rtx4090", *words]) == 0
    assert json.loads(capsys.readouterr().out)["source"] == "predicted"


def test_where_no_change_keeps_the_training_another_method_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(
        "from trl import SFTConfig, SFTTrainer\n"
        "SFTTrainer('Qwen/Qwen3-0.6B', SFTConfig(max_length=512, gradient_accumulation_steps=1,\n"
        "           per_device_train_batch_size=1)).train()\n"
    )
    words = ["check", "train.py", "--gpu", "rtx4090", "--predict", "--gpu-memory"]
    assert run([*words, "4GiB", "--json"]) == 1
    (way,) = json.loads(capsys.readouterr().out)["otherwise"]  # shorter examples do not help
    assert way["values"] == {"lora_rank": 16}
    assert run([*words, "4GiB"]) == 1
    (line,) = [one for one in capsys.readouterr().out.splitlines() if "otherwise" in one]
    assert line.startswith("With --set lora_rank=16 it fits, trained otherwise: ")
    assert run([*words, "4GiB", "--set", "lora_rank=16"]) == 0
    assert f"fits: {line.split()[-7]}" in capsys.readouterr().out


EVALUATED = """\
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

Trainer(
    model=AutoModelForCausalLM.from_pretrained("tiny-llama-3m"),
    args=TrainingArguments(per_device_train_batch_size=1, eval_strategy="steps"),
).train()
"""


def test_an_evaluation_that_ends_the_program_is_named_with_the_batch_that_fits(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(EVALUATED)
    told = ["check", "--gpu", "rtx4090", "--gpu-memory", "600MiB", "--predict"]
    told += ["--set", "max_length=512"]
    assert run([*told, "train.py"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(("does not fit: ", "tight (likely not): "))
    assert "ends    in the evaluation, of 8 x 512 tokens" in lines
    assert any(line.startswith("phases  evaluation ") for line in lines)
    hint = next(line for line in lines if line.startswith("With --set "))
    size = re.findall(r"per_device_eval_batch_size=(\d)", hint)[0]
    assert run([*told, "--set", f"per_device_eval_batch_size={size}", "train.py"]) == 0
    capsys.readouterr()
    assert run([*told, "--json", "train.py"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["program"]["ends_in"] == "evaluation"
    (way,) = found["otherwise"]
    assert way["values"] == {"per_device_eval_batch_size": int(size)}
    assert way["device_bytes"] < found["program"]["memory"]["device_bytes"]
    assert found["suggestion"] is None


def test_an_evaluation_that_keeps_an_unknown_number_of_logits_is_no_fit(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(
        EVALUATED.replace("Trainer(\n", "Trainer(\n    compute_metrics=print,\n")
    )
    told = ["check", "--gpu", "rtx4090", "--predict", "--set", "max_length=64", "train.py"]
    assert run(told) == 4
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("unknown: at least ")
    assert any(line.startswith("note    set eval_accumulation_steps: ") for line in lines)


def test_without_an_emulator_what_cannot_be_predicted_names_what_is_missing(
    tmp_path, monkeypatch, capsys
):
    (tmp_path / "train.py").write_text("import torch\nmodel = torch.nn.Linear(2, 2).cuda()\n")
    monkeypatch.chdir(tmp_path)
    refused = UnavailableError("there is no C compiler", hint="install one")
    monkeypatch.setattr("tuner.emulator.machine.find_torch", mock.Mock(side_effect=refused))
    assert run(["check", "--gpu", "rtx4090", "train.py"]) == EXIT_UNAVAILABLE
    said = capsys.readouterr().err
    assert "there is no C compiler; without it: no training is seen in train.py" in said
    assert "hint: install one\n" in said
    monkeypatch.setattr("tuner.app.programs.unavailable", lambda: "no compiler: install one")
    assert run(["check", "--predict", "--gpu", "rtx4090", "train.py"]) == 4
    said = " ".join(capsys.readouterr().err.split())
    assert "hint: no compiler: install one; then run it on an emulated GPU: tuner check" in said
    monkeypatch.setenv("PATH", "")  # a launcher that isn't installed is read all the same
    assert run(["check", "--gpu", "rtx4090", "--", "srun", "train.py"]) == EXIT_UNAVAILABLE
    said = "'srun' is not installed; without it: no training is seen in train.py"
    assert said in capsys.readouterr().err


def test_settings_of_the_allocator_are_replayed_and_proposed_where_free_blocks_decide(tmp_path):
    gpu = get_gpu("rtx4090")

    def of(text: str, *command: str) -> ProgramPredictions:
        (tmp_path / "train.py").write_text(text)
        words = [*command, "python", "train.py"]
        return ProgramPredictions(read_program(words, tmp_path, is_run=False), gpu)

    variable, value = "PYTORCH_ALLOC_CONF", "expandable_segments:True"
    usual = of(PROGRAM).as_it_is()
    own = f"import os\nos.environ['PYTORCH_CUDA_ALLOC_CONF'] = 'max_split_size_mb:64'\n{PROGRAM}"
    split = of(own).as_it_is()
    assert split.plan.configuration["allocator"] == "max_split_size_mb:64"
    command = of(PROGRAM, "env", f"{variable}={value}").as_it_is()
    said = of(PROGRAM)
    said.given = {"allocator": value}
    assert command.plan.configuration["allocator"] == value
    assert command.memory.free_bytes < usual.memory.free_bytes < split.memory.free_bytes
    assert said.as_it_is().used_bytes == command.used_bytes

    runs = of(own)
    runs.gpu = replace(gpu, memory_bytes=split.used_bytes - split.memory.free_bytes // 3)
    runs.margin_fraction = 0.0
    notes = check_program(runs).notes
    saved = format_size(split.used_bytes - command.used_bytes)
    assert notes == (f"{variable}={value} saves {saved} of free blocks, and it fits",)
