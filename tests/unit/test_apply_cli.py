"""`tuner apply` and the part `apply` of a space, from the command line to the file."""

import json
import re
import shlex
from pathlib import Path

import pytest
from cli_samples import SPACE, contents, make_trial, write_samples
from shared_cases.tiny_model import CONFIG as MODEL_CONFIG

from tuner.app.applying import same_architecture
from tuner.app.cli.main import run
from tuner.core.errors import InputError
from tuner.searches.store import ResultsFolder
from tuner.space import load_space
from tuner.space.load import read_space

ROOT = Path(__file__).parents[2]
APPLY = ["apply", "--space", "tiny.yaml", "--gpu", "a6000"]
MAPPING = """\
apply:
  hydra:
    keys:
      data_loader.batch_size: micro_batch
      trainer.accumulate: grad_accum
      trainer.precision: "'16-mixed' if precision == 'fp16' else 'bf16-mixed'"
      trainer.dropout: lora_dropout
  script:
    file: "*.py"
    keys:
      .batch: micro_batch
      .lora_r: lora_rank
"""
CONFIG = """\
# Our configuration
data_loader:
  batch_size: 1   # fits, we think
  num_workers: ${workers}
trainer:
  accumulate: 4
  precision: '16-mixed'
lr: 2e-4"""
SCRIPT = 'CONFIG = {"batch": 1, "lora_r": 4}  # ours\n'


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A space with mappings, a search of it (best: micro_batch 2, bf16), and two user's files."""
    write_samples(tmp_path)
    (tmp_path / "tiny.yaml").write_text(SPACE + MAPPING)
    monkeypatch.chdir(tmp_path)
    with ResultsFolder(Path("results"), "tiny", "a6000").writer() as writer:
        writer.append(make_trial(tmp_path, 20, 100, micro_batch=1, precision="fp16"))
        writer.append(make_trial(tmp_path, 40, 300, micro_batch=2, precision="bf16"))
    (tmp_path / "config.yaml").write_bytes(CONFIG.encode())
    (tmp_path / "train.py").write_bytes(SCRIPT.encode())
    return tmp_path


CHANGED = (
    CONFIG.replace("batch_size: 1", "batch_size: 2")
    .replace("accumulate: 4", "accumulate: 2")
    .replace("'16-mixed'", "'bf16-mixed'")
)


def test_yes_writes_and_keeps_a_dated_copy(folder, capsys):
    assert run([*APPLY, "config.yaml", "train.py", "--yes"]) == 0
    assert Path("config.yaml").read_text() == CHANGED
    assert Path("train.py").read_text() == SCRIPT.replace('"batch": 1', '"batch": 2').replace(
        '"lora_r": 4', '"lora_r": 8'
    )
    copies = sorted(p.name for p in folder.glob("*.bak"))
    assert [re.sub(r"\d{8}-\d{6}", "DATE", name) for name in copies] == [
        "config.yaml.DATE.bak",
        "train.py.DATE.bak",
    ]
    assert Path(copies[0]).read_text() == CONFIG
    # A second time there is nothing to do, nothing to ask, and no further copy.
    capsys.readouterr()
    assert run([*APPLY, "config.yaml", "train.py"]) == 0
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "nothing changes" in printed.err
    assert len(list(folder.glob("*.bak"))) == 2


@pytest.mark.parametrize(("answer", "text"), [("y\n", CHANGED), ("n\n", CONFIG), ("\n", CONFIG)])
def test_it_asks_before_it_writes(folder, answer, text):
    from click.testing import CliRunner

    from tuner.app.cli.main import cli

    result = CliRunner().invoke(cli, [*APPLY, "config.yaml"], input=answer)
    assert result.exit_code == 0
    assert (
        "-  batch_size: 1   # fits, we think\n+  batch_size: 2   # fits, we think\n"
        in result.output
    )
    assert "lora_dropout = 0.0" in result.output  # no file has its key
    assert "lora_rank = 8" in result.output  # its mapping is for scripts
    assert "max_length = 32" in result.output  # no mapping speaks of it
    assert "micro_batch = " not in result.output
    assert Path("config.yaml").read_text() == text
    assert ("nothing was written" in result.output) == (text == CONFIG)


def test_nobody_to_ask_is_no_yes(folder, monkeypatch):
    import io
    import sys

    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert run([*APPLY, "config.yaml"]) == 130
    assert Path("config.yaml").read_text() == CONFIG


def test_what_is_in_the_way_is_said_and_the_rest_is_written(folder, capsys):
    Path("train.py").write_text('CONFIG = {"batch": 1, "lora_r": 4}\nCONFIG["lora_r"] = 5\n')
    Path("config.yaml").write_text(CONFIG.replace("accumulate: 4", "accumulate: ${steps}"))
    assert run([*APPLY, "config.yaml", "train.py", "--yes"]) == 0
    error = capsys.readouterr().err
    assert "not written: config.yaml:6 trainer.accumulate: is no plain value of its own" in error
    assert "not written: train.py:1 lora_r: is there 2 times" in error
    assert '"batch": 2' in Path("train.py").read_text()
    assert "batch_size: 2" in Path("config.yaml").read_text()


def test_a_value_of_the_command_line_is_shown_there(folder, capsys):
    Path("train.py").write_text(
        "import argparse\nfrom trl import SFTConfig, SFTTrainer\n"
        "parser = argparse.ArgumentParser()\n"
        'parser.add_argument("--batch_size", type=int, default=1)\n'
        "size = parser.parse_args().batch_size\n"
        "args = SFTConfig(per_device_train_batch_size=size, max_length=32,\n"
        "    gradient_accumulation_steps=2, optim='adamw_torch')\n"
        "SFTTrainer('m', args=args).train()\n"
    )
    before = contents(folder)
    assert run([*APPLY, "--", "train.py", "--batch_size", "4"]) == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines()[1].endswith("train.py --batch_size 2")
    assert "only the command changes" in printed.err
    assert contents(folder) == before


def test_committed_result_goes_into_a_script(capsys, monkeypatch, tmp_path):
    """The space that ships, into a script as its users have it."""
    script = tmp_path / "train_type1.py"
    script.write_text(
        'CONFIG = {\n    "lora_r": 256, "lora_alpha": 512,\n    "batch": 1, "grad_accum": 32,\n'
        '    "max_length": 768,\n    "grad_ckpt": True,\n}\n'
        'args = SFTConfig(per_device_train_batch_size=CONFIG["batch"], optim="adamw_torch")\n'
    )
    monkeypatch.chdir(ROOT)
    target = ["--space", "qlora27b", "--gpu", "a6000"]
    assert run(["apply", *target, str(script), "--yes"]) == 0
    values = {}
    exec(script.read_text().replace("SFTConfig", "dict"), values)
    config, best = values["CONFIG"], load_space("qlora27b")
    assert config["batch"] * config["grad_accum"] == best.fixed["effective_batch"]
    assert config["lora_alpha"] == 2 * config["lora_r"]
    assert values["args"] == {
        "per_device_train_batch_size": config["batch"],
        "optim": "paged_adamw_8bit",
    }


def test_committed_result_goes_into_the_program_of_the_readme(capsys, monkeypatch, tmp_path):
    script = tmp_path / "sft.py"
    text = (ROOT / "examples/programs/sft.py").read_text()
    script.write_text(text)
    monkeypatch.chdir(ROOT)
    assert (
        run(["apply", "--space", "qlora27b", "--gpu", "a6000", "--yes", "--", str(script), "m"])
        == 0
    )
    for old, new in (
        ("BATCH_SIZE = 16", "BATCH_SIZE = 2"),
        ("MAX_LENGTH = 2048", "MAX_LENGTH = 1024"),
        ("accumulation_steps=2", "accumulation_steps=16"),
        ("r=16, lora_alpha=32", "r=128, lora_alpha=256"),
        ('save_strategy="no",\n', 'save_strategy="no",\n        optim="paged_adamw_8bit",\n'),
    ):
        text = text.replace(old, new)
    assert script.read_text() == text
    said = capsys.readouterr().err
    assert 'target_modules: says "all-linear", kept: a list' in said
    assert "lora_dropout = 0.05 (now 0.0)" in said


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("apply: 3", "tiny.yaml:{} apply: expected a mapping"),
        ("apply: {a: {}}", "tiny.yaml:{} apply.a: keys is missing"),
        ("apply: {a: {kees: {b: micro_batch}}}", "unknown key 'kees' (did you mean 'keys'?)"),
        ("apply:\n  a:\n    keys: {b: micro_bach}", "unknown name 'micro_bach'"),
        ("apply:\n  a:\n    keys: {b..c: micro_batch}", "'b..c' is not a key"),
        ("apply: {a: {stage: x, keys: {b: micro_batch}}}", "unknown stage 'x'"),
        ("apply: {a: {keys: {b: precision == 'nf5'}}}", "precision is never 'nf5'"),
        ("apply: {a: {keys: {b: [1]}}}", "expected a value, found a list"),
        ("apply: {a: {keys: {b: max_length, b: micro_batch}}}", "'b' is set twice"),
    ],
)
def test_mistakes_in_a_mapping_are_named_with_their_line(text, message):
    with pytest.raises(InputError) as refused:
        read_space(SPACE + text + "\n", "tiny.yaml")
    first = SPACE.count("\n") + 1
    assert message.format(first) in str(refused.value)
    assert f"tiny.yaml:{first + text.count(chr(10))} apply" in str(refused.value)


def test_a_mapping_is_part_of_a_space_as_json(folder, capsys):
    assert run(["spaces", "tiny.yaml", "--json"]) == 0
    assert '"data_loader.batch_size": "micro_batch"' in capsys.readouterr().out


def test_another_effective_batch_is_said(folder, capsys):
    (folder / "config.yaml").write_text(CONFIG.replace("accumulate: 4", "accumulate: 12"))
    assert run([*APPLY, "config.yaml", "--yes"]) == 0
    assert "the effective batch of a GPU changes from 12 to 4" in capsys.readouterr().err


MODEL_SCRIPT = """\
from transformers import AutoModelForCausalLM; from trl import SFTTrainer
NAME = "{}"
CONFIG = {{"batch": 1, "lora_r": 4}}
model = AutoModelForCausalLM.from_pretrained(NAME)
SFTTrainer(model).train()
"""


def write_model(folder: Path, **changed: object) -> str:
    """A folder whose config.json is that of the space's model but for `changed`."""
    (folder / "own").mkdir()
    (folder / "own/config.json").write_text(json.dumps({**MODEL_CONFIG, **changed}))
    return "own"


def test_the_model_may_be_another_of_the_same_architecture(folder, capsys):
    name = write_model(folder, eos_token_id=1, max_position_embeddings=256)
    (folder / "train.py").write_text(MODEL_SCRIPT.format(name))
    assert run([*APPLY, "train.py", "--yes"]) == 0
    assert "the recommendation is for" not in capsys.readouterr().err
    assert '"batch": 2' in (folder / "train.py").read_text()


@pytest.mark.parametrize(
    ("name", "same"),
    [
        ("meta-llama/Llama-3.2-1B", True),
        ("unsloth/Llama-3.2-1B", True),
        ("llama-3.2-3b", False),
        ("qwen2.5-0.5b", False),
        ("./nowhere", None),
    ],
)
def test_models_are_compared_by_what_they_are(name, same):
    assert same_architecture(name, "llama-3.2-1b") is same


def test_another_model_is_refused(folder, capsys):
    script = MODEL_SCRIPT.format("Qwen/Qwen2.5-0.5B")
    (folder / "train.py").write_text(script)
    named = f"model: {{name: {write_model(folder, num_hidden_layers=3)}}}\n"
    (folder / "config.yaml").write_text(named + CONFIG)
    assert run([*APPLY, "train.py", "config.yaml", "--yes"]) == 2
    said = capsys.readouterr().err
    assert "the recommendation is for ./tiny-m" in said
    assert "train.py:4: trains Qwen/Qwen2.5-0.5B" in said
    search = shlex.join(["tuner", "search", *APPLY[1:], "--model", "Qwen/Qwen2.5-0.5B"])
    assert f"hint: {search}, then" in said
    assert "config.yaml:1 model.name: trains own" in said
    assert (folder / "train.py").read_text() == script
