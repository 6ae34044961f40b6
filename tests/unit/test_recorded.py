"""A program that is run with stand-ins: joined answers, its end, and what it may take."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tuner.core.errors import InputError, UndecidedError, UnsupportedError
from tuner.program import recorded
from tuner.program.program import Program, read_program
from tuner.program.recorded import Recorded, join, record
from tuner.program.standins import PLACEHOLDER
from tuner.space.gpus import get_gpu

HEAD = "import os\nfrom datasets import load_dataset\nfrom trl import SFTConfig, SFTTrainer\n"
TRAIN = "SFTTrainer('Qwen/Qwen3-8B', args=SFTConfig({})).train()\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def program(code: str, *words: str) -> Program:
    Path("train.py").write_text(HEAD + code)
    return read_program(["train.py", *words])


def given(found: Recorded) -> list[dict[str, Any]]:
    return [training["arguments"]["given"] for training in found.trainings]


def test_what_does_not_depend_on_an_answer_is_known_from_one_run():
    found = record(program(TRAIN.format("max_length=int(os.sys.argv[1])"), "512"))
    assert given(found) == [{"max_length": 512}]
    assert found.asked == []
    assert found.files == [str(Path("train.py").resolve())]


def test_an_argument_that_the_command_lacks_is_asked_for_with_the_command():
    with pytest.raises(InputError) as caught:
        record(program(TRAIN.format("max_length=int(os.sys.argv[1])")), gpu=get_gpu("rtx4090"))
    assert "train.py:4: the program needs an argument" in caught.value.message
    assert caught.value.hint == "pass it: tuner check --gpu rtx4090 -- train.py ARGUMENT"


def test_a_value_that_only_one_answer_reaches_is_unknown():
    code = "n = len(load_dataset('x'))\nassert n > 1_000_000\n"
    (values,) = given(record(program(code + TRAIN.format("max_length=n // 500_000"))))
    assert "$unknown" in values["max_length"]


def test_an_answer_that_only_failing_runs_had_is_asked_where_the_program_trains():
    code = "d = load_dataset('x')\nn = 8 if d.e else 16\nassert d.a and d.b and d.c and d.d\n"
    code += TRAIN.format("max_length=n")
    (values,) = given(record(program(code)))
    assert "$unknown" in values["max_length"]


def test_a_value_that_differs_with_the_answers_is_unknown_with_its_lines():
    code = "n = len(load_dataset('x'))\n" + TRAIN.format(
        "max_length=64 if n > 1000 else 8, packing=True"
    )
    found = record(program(code))
    (values,) = given(found)
    assert values["packing"] is True
    assert [place["line"] for place in values["max_length"]["where"]] == [4]
    assert [each["where"]["line"] for each in found.asked] == [4]


def test_of_several_lines_that_ask_only_the_one_that_decides_is_told():
    code = "d = load_dataset('x')\nprint(d.a > 3)\nn = 8 if d.b > 3 else 16\n"
    (values,) = given(record(program(code + TRAIN.format("max_length=n"))))
    assert [place["line"] for place in values["max_length"]["where"]] == [6]


@pytest.mark.parametrize(
    ("size", "wanted"),
    [
        ("8 if hasattr(model, 'visual') else 16", None),
        ("8 if getattr(model.config, 'num_experts', None) is None else 16", None),
        ("8 if model.config.to_dict().get('x') is None else 16", None),
        ("8 if 'Llama' in type(other).__name__ else 16", None),
        ("8 if hasattr(SFTConfig, 'overwrite_output_dir') else 16", 16),
        # What the catalogue knows.
        ("8 if 'Qwen3' in type(model).__name__ else 16", 8),
        ("8 if hasattr(config, 'vision_config') else 16", 16),
        ("model.config.num_hidden_layers", 36),
        ("8 if 'Qwen3ForCausalLM' in config.architectures else 16", 8),
    ],
)
def test_what_a_stand_in_makes_up_may_not_be_there(size: str, wanted: int | None):
    code = "from transformers import AutoConfig, AutoModelForCausalLM as Auto\n"
    code += "model, other = map(Auto.from_pretrained, ('Qwen/Qwen3-8B', 'a/b'))\n"
    code += "config = AutoConfig.from_pretrained('Qwen/Qwen3-8B')\n"
    (values,) = given(record(program(code + TRAIN.format(f"max_length={size}"))))
    assert values["max_length"] == wanted or (wanted is None and "$unknown" in values["max_length"])


@pytest.mark.parametrize("number", range(4))
def test_what_stands_behind_several_conditions_is_reached(number: int):
    code = "import unknown_library as other\nn = len(load_dataset('x'))\nsize = 8\n"
    code += f"if n > {10 ** (number + 2)} and other.flag_{number}:\n"
    code += f"    if not other.asked_{number}():\n        size = 64\n"
    found = record(program(code + TRAIN.format("max_length=size, packing=True")))
    (values,) = given(found)
    assert "$unknown" in values["max_length"]
    assert values["packing"] is True


def test_a_training_that_an_answer_decides_is_unsure():
    code = TRAIN.format("") + "if len(load_dataset('x')) > 1000:\n    " + TRAIN.format("")
    first, second = record(program(code)).trainings
    assert "unsure" not in first
    assert [place["line"] for place in second["unsure"]] == [5]


@pytest.mark.parametrize(
    ("runs", "joined"),
    [
        ([{"a": 1}, {"a": 1}], {"a": 1}),
        ([1, True], {"$unknown": "given differs with the answers", "where": ["L"]}),
        ([[1, 2], [1, 3]], [1, {"$unknown": "value differs with the answers", "where": ["L"]}]),
        ([[1], [1, 3]], {"$unknown": "given differs with the answers", "where": ["L"]}),
        ([{}, {"a": 1}], {"a": {"$unknown": "a differs with the answers", "where": ["L"]}}),
        (
            [{"assigned": {}}, {"assigned": {"a": [1, "M"]}}],
            {
                "assigned": {
                    "a": [{"$unknown": "value differs with the answers", "where": ["L"]}, "M"]
                }
            },
        ),
        ([1, {"$unknown": "len(x)", "where": ["M"]}], {"$unknown": "len(x)", "where": ["M", "L"]}),
        (
            [{"$object": {"class": "a"}}, {"$object": {"class": "b"}}],
            {"$unknown": "given differs with the answers", "where": ["L"]},
        ),
    ],
)
def test_runs_are_joined_where_they_agree(runs, joined):
    def run(value: Any) -> dict[str, Any]:
        trainer = {"class": "T", "where": "T", "given": value}
        lists = dict.fromkeys(("loops", "files", "standins", "absent", "dropped", "allocators"), ())
        asked = [{"what": "len(x)", "where": "L"}]
        return {"trainings": [{"trainer": trainer}], "asked": asked, "ended": None, **lists}

    (training,) = join([run(value) for value in runs]).trainings
    assert training["trainer"]["given"] == joined


def test_sets_have_one_order_in_all_runs():
    code = "len(load_dataset('x')) > 3\n" + TRAIN.format("report_to=list({*'abcdefgh'})")
    assert sorted(given(record(program(code)))[0]["report_to"]) == [*"abcdefgh"]


def test_an_answer_with_which_the_program_fails_is_none():
    code = "n = len(load_dataset('x'))\nassert n > 1000\n" + TRAIN.format("max_length=64")
    found = record(program(code))
    assert given(found) == [{"max_length": 64}]
    assert "unsure" not in found.trainings[0]


@pytest.mark.parametrize(
    ("code", "error", "said"),
    [
        ("x = 1\nNAME\n", InputError, r"train\.py:5: NameError: name 'NAME' is not defined"),
        ("raise SystemExit('no data')", InputError, r"train\.py:4: it exits with no data"),
        (
            "import argparse as a\np = a.ArgumentParser()\np.add_argument('--lr', required=True)\n"
            "p.parse_args()",
            InputError,
            r"train\.py:7: train\.py: error: .* required: --lr",
        ),
        ("import ctypes; ctypes.CDLL(None)", UnsupportedError, r"train\.py:4: .*ctypes.* refused"),
        ("while True:\n    pass", UnsupportedError, r"train\.py:[45]: no training .* within 0.5 s"),
        ("len(str(7 ** 10 ** 8))", UnsupportedError, r"no training is seen within 0.5 s"),
        ("import faulthandler as f; f._sigsegv()", UnsupportedError, r"its process died"),
        (
            "import time\nx = []\nwhile True: x.append(bytes(1000))",
            UnsupportedError,
            r"train\.py:6: it needs more than",
        ),
        ("raise SystemExit(os.environ['HF_TOKEN'])", InputError, PLACEHOLDER),
        ("input()", InputError, "EOFError"),
        (
            "str.replace('a', load_dataset('x').a, '')",
            UndecidedError,
            r"train\.py:4: .* only a run",
        ),
    ],
)
def test_an_end_before_training_is_an_error_with_its_line(monkeypatch, code, error, said):
    monkeypatch.setattr(recorded, "MEMORY_BYTES", 2**28)
    monkeypatch.setenv("HF_TOKEN", "mine-and-nobody-elses")
    began = time.monotonic()
    seconds = 8 if "bytes" in code else 0.5
    with pytest.raises(error, match=said) as found:
        record(program(code), seconds=seconds)
    assert found.value.hint
    assert time.monotonic() - began < 30


def test_variables_are_what_they_are_but_for_secrets(monkeypatch):
    monkeypatch.setenv("MAX_TOKENS", "512")
    monkeypatch.setenv("API_KEY", "mine-and-nobody-elses")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    code = TRAIN.format(
        "max_length=int(os.environ['MAX_TOKENS']), run_name=os.environ['API_KEY'],"
        "output_dir=os.environ['HF_HUB_OFFLINE'], logging_dir=os.environ['NO_SUCH_TOKEN']"
    )
    assert given(record(program(code))) == [
        {"max_length": 512, "run_name": PLACEHOLDER, "output_dir": "0", "logging_dir": PLACEHOLDER}
    ]


def test_a_launcher_sets_the_variables_of_its_first_process():
    code = TRAIN.format("run_name=os.environ['WORLD_SIZE'], seed=int(os.environ['LOCAL_RANK'])")
    read = program(code)
    words = ("torchrun", "--nnodes", "2", "--nproc-per-node", "4", read.main)
    found = record(replace(read, command=words))
    assert given(found) == [{"run_name": "8", "seed": 0}]
    code = "from accelerate import Accelerator, PartialState\nn = Accelerator().num_processes\n"
    read = program(code + TRAIN.format("max_length=n * PartialState().num_processes"))
    assert given(record(replace(read, command=words))) == [{"max_length": 64}]


def test_a_program_that_ends_well_without_training_is_no_error():
    found = record(program("raise SystemExit(0)"))
    assert (found.trainings, found.loops) == ([], [])


def test_it_is_run_once_until_a_file_of_it_changes():
    Path("own.txt").write_text("2")
    one = program("name = 'own'\n" + TRAIN.format("max_length=int(open(name + '.txt').read())"))
    first = record(one)
    assert record(one) is first
    Path("own.txt").write_text("16")
    assert given(record(one)) == [{"max_length": 16}]


def test_the_memory_of_the_process_that_reads_a_program_is_not_that_of_the_program(monkeypatch):
    held = b"x" * 2**28
    monkeypatch.setattr(recorded, "MEMORY_BYTES", len(held))
    code = f"import time as t\nend = t.monotonic() + 0.3\nwhile t.monotonic() < end: pass\n{TRAIN}"
    assert record(program(code.format("max_length=64"))).trainings


def test_texts_of_the_program_count_in_place_of_its_files():
    Path("own.yaml").write_text("a: 2")
    one = program(TRAIN.format("max_length=int(open('own.yaml').read()[3:])"), "own.yaml")
    files = {
        word: replace(source, data=source.data.replace(b"a: 2", b"a: 512"))
        for word, source in one.files.items()
    }
    assert given(record(replace(one, files=files))) == [{"max_length": 512}]
    assert Path("own.yaml").read_text() == "a: 2"


def test_cells_of_a_notebook_run_in_their_order():
    cells = [HEAD, "!pip install trl\nn = 7", "%%bash\necho no", TRAIN.format("max_length=n")]
    made = [{"cell_type": "code", "source": text, "metadata": {}} for text in cells]
    Path("train.ipynb").write_text(json.dumps({"cells": made, "nbformat": 4}))
    (training,) = record(read_program(["train.ipynb"])).trainings
    assert training["arguments"]["given"] == {"max_length": 7}
    assert training["trainer"]["where"]["file"] == "train.ipynb: cell 4"


def test_a_program_that_starts_the_training_names_its_command():
    Path("own.py").write_text("")
    code = "import subprocess\nsubprocess.run(['ls'])\n" + (
        "subprocess.run(['accelerate', 'launch', 'own.py', '--lr', '1'], check=True)"
    )
    with pytest.raises(InputError, match=r"train\.py:6: .* accelerate launch own\.py --lr 1"):
        record(program(code))
    code = "import subprocess\nsubprocess.run([os.sys.executable, 'missing.py'])\n"
    with pytest.raises(InputError, match=r"train\.py:5: .* and there is no missing\.py"):
        record(program(code))


def test_its_folder_stays_as_it_is(folder: Path):
    one = program("os.remove('train.py')\nopen('log', 'w').write('x')\n" + TRAIN.format(""))
    before = {path: path.stat() for path in folder.rglob("*")}
    assert record(one).trainings
    assert {path: path.stat() for path in folder.rglob("*")} == before


def test_a_copy_of_an_unknown_mapping_has_the_keys_that_the_program_asks_it_for(tmp_path):
    text = """\
from transformers import AutoTokenizer, Trainer, TrainingArguments
row = AutoTokenizer.from_pretrained("gpt2")("text")
row = {name: tensor[0] for name, tensor in row.items()}
row["labels"] = row["input_ids"].clone() * row["attention_mask"]
Trainer("gpt2", TrainingArguments("o", per_device_train_batch_size=3), train_dataset=[row]).train()
"""
    (tmp_path / "train.py").write_text(text)
    (training,) = record(read_program(["train.py"], tmp_path)).trainings
    assert training["arguments"]["values"]["per_device_train_batch_size"] == 3
