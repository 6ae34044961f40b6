"""Which settings are found in people's programs, and where each of them is set."""

from __future__ import annotations

from pathlib import Path

import pytest
from program_samples import EXPECTED, FOLDER, described, make_tools, program, sections

from tuner.program.setting import Setting
from tuner.program.settings import find_settings

SECTIONS = sections()


@pytest.fixture
def tools(tmp_path, monkeypatch):
    make_tools(tmp_path / "bin")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")


def found(folder: Path, monkeypatch, text: str, *words: str) -> dict[str, Setting]:
    (folder / "train.py").write_text(text)
    monkeypatch.chdir(folder)
    return find_settings(program(" ".join(("train.py", *words))))


def test_every_program_is_expected_to_be_something():
    named = {word for command in SECTIONS for word in command.split()}
    programs = {p.name for p in FOLDER.iterdir() if p.is_file()} - {EXPECTED.name}
    assert len(programs) >= 20
    assert programs <= named


@pytest.mark.parametrize("command", SECTIONS)
def test_the_settings_and_two_changes_of_a_program(command, monkeypatch, tools):
    monkeypatch.chdir(FOLDER)
    assert described(command).strip() == SECTIONS[command]


ARGUMENTS = "from transformers import TrainingArguments\nTrainingArguments({})\n"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("B = 4\n" + ARGUMENTS.format("per_device_train_batch_size=B"), 4),
        ("B = 4_096\n" + ARGUMENTS.format("per_device_train_batch_size=B"), 4096),
        ("A = B = 4\n" + ARGUMENTS.format("per_device_train_batch_size=B"), None),
        ("B, C = 4, 5\n" + ARGUMENTS.format("per_device_train_batch_size=C"), 5),
        ("B = 4\nB *= 2\n" + ARGUMENTS.format("per_device_train_batch_size=B"), None),
        ("for B in (1, 2):\n    " + ARGUMENTS.format("per_device_train_batch_size=B")[43:], None),
        ("from c import B\n" + ARGUMENTS.format("per_device_train_batch_size=B"), None),
        ("from c import cfg\nO = {'batch': 4}\n"
         + ARGUMENTS.format("per_device_train_batch_size=cfg.batch"), None),
        ("O = {'batch': 4}\ndef f(batch):\n    "
         + ARGUMENTS.format("per_device_train_batch_size=batch")[43:], None),
        ("B = 4\ndef f():\n    B = 5\n" + ARGUMENTS.format("per_device_train_batch_size=B"), 4),
        ("B = 4\ndef f():\n    global B\n    B = 5\n"
         + ARGUMENTS.format("per_device_train_batch_size=B"), None),
        ("C = {}\nC['b'] = 4\n" + ARGUMENTS.format("per_device_train_batch_size=C['b']"), 4),
        ("C = {'b': 4}\nC['b'] = 8\n" + ARGUMENTS.format("per_device_train_batch_size=C['b']"),
         None),
        ("K = 'big'\nC = {'big': {'b': 4}, 'small': {'b': 2}}\n"
         + ARGUMENTS.format("per_device_train_batch_size=C[K]['b']"), 4),
        ("D = {'b': 4}\nC = {**D, 'c': 1}\n"
         + ARGUMENTS.format("per_device_train_batch_size=C['b']"), 4),
        ("class C:\n    b = 4\nclass D(C):\n    pass\n"
         + ARGUMENTS.format("per_device_train_batch_size=D().b"), 4),
        ("class C:\n    b: int = 4\nc = C(b=6)\n"
         + ARGUMENTS.format("per_device_train_batch_size=c.b"), 6),
        ("class C:\n    b: int = 4\nc = C(6)\n"
         + ARGUMENTS.format("per_device_train_batch_size=c.b"), None),
        ("class C:\n    def __init__(self, b=4):\n        self.b = b\n"
         "    def run(self):\n        "
         + ARGUMENTS.format("per_device_train_batch_size=self.b")[43:] + "C(b=9).run()\n", 9),
        ("from types import SimpleNamespace\nc = SimpleNamespace(b=4)\n"
         + ARGUMENTS.format("per_device_train_batch_size=c.b"), 4),
        ("import os\nB = os.environ['B']\nC = {'B': 3}\n"
         + ARGUMENTS.format("per_device_train_batch_size=B"), None),
        ("def train(b=4):\n    " + ARGUMENTS.format("per_device_train_batch_size=b")[43:]
         + "    trainer.train()\ntrain(b=2)\n", 2),
        ("def train(b=4):\n    " + ARGUMENTS.format("per_device_train_batch_size=b")[43:]
         + "partial(train, b=2)()\n", None),
        ("def train(b):\n    " + ARGUMENTS.format("per_device_train_batch_size=b")[43:]
         + "train(*numbers)\n", None),
        ("class C:\n    @staticmethod\n    def train(a, b=4):\n        "
         + ARGUMENTS.format("per_device_train_batch_size=b")[43:] + "C.train(1, 2)\n", 2),
        ("@click.command()\n@click.option('--micro', default=4)\ndef main(micro):\n    "
         + ARGUMENTS.format("per_device_train_batch_size=micro")[43:] + "main()\n", 4),
        ("def main(micro: int = typer.Option(4, help='x')):\n    "
         + ARGUMENTS.format("per_device_train_batch_size=micro")[43:] + "typer.run(main)\n", 4),
        ("p.add_argument('--b', default=4)\np.set_defaults(b=8)\na = p.parse_args()\n"
         + ARGUMENTS.format("per_device_train_batch_size=a.b"), 8),
        ("p.add_argument('--b', default=4)\na = p.parse_args()\na.b //= 2\n"
         + ARGUMENTS.format("per_device_train_batch_size=a.b"), None),
        ("p.add_argument('--b', default=4)\na = vars(p.parse_args())\n"
         + ARGUMENTS.format("per_device_train_batch_size=a['b']"), 4),
        ("p.add_argument('--b', default=4)\na, _ = p.parse_known_args()\n"
         + ARGUMENTS.format("per_device_train_batch_size=a.b"), 4),
        ("@dataclass\nclass C:\n    b: int = 4\nc = tyro.cli(C)\n"
         + ARGUMENTS.format("per_device_train_batch_size=c.b"), 4),
        ("class C(BaseModel):\n    b: int = Field(4, gt=0)\nc = C()\nc.b = 5\n"
         + ARGUMENTS.format("per_device_train_batch_size=c.b"), None),
        ("c = C()\nc = replace(c, b=8)\n" + ARGUMENTS.format("per_device_train_batch_size=c.b"),
         None),
        ("C = {'b': 4}\nC.update(b=8)\n"
         + ARGUMENTS.format("per_device_train_batch_size=C['b']"), None),
        ("C = {'b': 4}\nC.update(other)\n"
         + ARGUMENTS.format("per_device_train_batch_size=C['b']"), None),
        ("C = {'b': 4}\nfor k, v in words:\n    C[k] = v\n"
         + ARGUMENTS.format("per_device_train_batch_size=C['b']"), None),
        ("class C:\n    b = 4\nc = C()\nsetattr(c, 'b', 8)\n"
         + ARGUMENTS.format("per_device_train_batch_size=c.b"), None),
        ("B = B2\nB2 = B\n" + ARGUMENTS.format("per_device_train_batch_size=B"), None),
        (ARGUMENTS.format("per_device_train_batch_size=4 if BIG else 2"), None),
        (ARGUMENTS.format("per_device_train_batch_size=(4)"), 4),
    ],
)  # fmt: skip
def test_a_value_is_followed_to_where_it_is_set_or_not_at_all(text, value, tmp_path, monkeypatch):
    setting = found(tmp_path, monkeypatch, text)["micro_batch"]
    assert setting.value == value
    assert (setting.problem is None) == (value is not None)


@pytest.mark.parametrize(
    "text",
    [
        "data = data.map(f, batched=True, batch_size=1000)\n",
        "DataLoader(val_set, batch_size=4)\n",
        "def val_dataloader():\n    return DataLoader(x, batch_size=4)\n",
        "eval_config = TrainingArguments(per_device_train_batch_size=4)\n",
        "rank = 0\n",
        "rank = int(os.environ['RANK'])\n",
        "optimizer = torch.optim.AdamW(p)\n",
        "for batch in loader:\n    batch = batch.to('cuda')\n",
        "torch.rand(3, r=2)\n",
        "EVAL = {'batch_size': 4}\n",
    ],
)
def test_what_is_no_setting_of_the_training_is_not_taken(text, tmp_path, monkeypatch):
    assert found(tmp_path, monkeypatch, text) == {}


@pytest.mark.parametrize(
    "name", ["latest_loader", "contest", "value_loader", "device_loader", "train_and_eval_loader"]
)
def test_a_name_that_only_looks_like_other_data_is_taken(name, tmp_path, monkeypatch):
    settings = found(tmp_path, monkeypatch, f"{name} = DataLoader(rows, batch_size=4)\n")
    assert settings["micro_batch"].value == 4


OPTIONS = """\
import argparse
p = argparse.ArgumentParser()
p.add_argument("-b", "--batch-size", type=int, default=8)
p.add_argument("--eval-batch-size", type=int, default=9)
p.add_argument("--packing", action="store_true")
p.add_argument("data", nargs="*")
args = p.parse_args()
DataLoader(rows, batch_size=args.batch_size)
"""


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ("", 8),
        ("--batch-size 4", 4),
        ("--batch-size=4", 4),
        ("--batch 4", 4),
        ("-b 4", 4),
        ("-b4", None),
        ("--batch-size 4 --batch-size 5", 5),
        ("--eval-batch-size 4", 8),
        ("--packing rows", 8),
    ],
)
def test_an_option_is_what_the_command_says(words, value, tmp_path, monkeypatch):
    settings = found(tmp_path, monkeypatch, OPTIONS, *words.split())
    assert settings["micro_batch"].value == value
    assert settings["packing"].value == ("--packing" in words)


def test_a_word_in_a_folder_of_its_own_overrides_only_that(tmp_path, monkeypatch):
    (tmp_path / "c.yaml").write_text("train:\n  batch_size: 4\neval:\n  batch_size: 5\n")
    text = "cfg = OmegaConf.load('c.yaml')\nDataLoader(rows, batch_size=cfg.train.batch_size)\n"
    monkeypatch.chdir(tmp_path)
    for words, value in (
        ("--config=c.yaml", 4),
        ("c.yaml eval.batch_size=9", 4),
        ("c.yaml train.batch_size=9", 9),
        ("c.yaml --train.batch_size 9", 9),
    ):
        assert found(tmp_path, monkeypatch, text, *words.split())["micro_batch"].value == value


def test_a_written_argument_counts_more_than_a_word_of_its_name(tmp_path, monkeypatch):
    text = ARGUMENTS.format("per_device_train_batch_size=4")
    settings = found(tmp_path, monkeypatch, text, "--batch-size", "100")
    assert settings["micro_batch"].value == 4
    assert settings["micro_batch"].where == "train.py:2"


def test_names_that_come_from_many_others_end_soon(tmp_path, monkeypatch):
    steps = [f"a{n} = a{n + 1}\na{n} = a{n + 1} if x else a{n + 1}\na{n} = (a{n + 1})\n"
             for n in range(30)]  # fmt: skip
    text = "".join(steps) + ARGUMENTS.format("per_device_train_batch_size=a0")
    setting = found(tmp_path, monkeypatch, text)["micro_batch"]
    assert setting.problem is not None
    classes = "class A(B):\n    pass\nclass B(A):\n    pass\n"
    text = classes + ARGUMENTS.format("per_device_train_batch_size=A().b")
    assert found(tmp_path, monkeypatch, text)["micro_batch"].problem is not None
