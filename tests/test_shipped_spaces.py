"""Every space that ships: exact parameter counts, the right precision, and a result per GPU type.

The searches of them are under results/.
"""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch

from tuner.app.applying import applying
from tuner.app.cli.main import run
from tuner.predict.predict import check_supported
from tuner.predict.training import get_workload
from tuner.predict.training.causal_lm_settings import TrainingSetup
from tuner.space import configure, load_space
from tuner.space.gpus import get_gpu
from tuner.space.load import read_space
from tuner.space.models.catalogue import resolve_config

SHIPPED = {
    "qlora27b": ("a6000",),
    "qlora4b": ("titan_rtx", "a6000"),
    "gemma2_2b": ("titan_rtx", "a6000", "t4"),
    "naics_embedder": ("rtx6000", "a100_80gb"),
    "dynamo_t4": ("t4",),
    "qwen7b_lora": ("rtx6000", "rtx3090", "a6000"),
    "cot8b_h100": ("h100_sxm", "a100_80gb"),
}
PAIRS = [(space, gpu) for space, gpus in SHIPPED.items() for gpu in gpus]


def test_they_are_listed_with_their_gpus(capsys):
    assert run(["spaces"]) == 0
    listed = capsys.readouterr().out
    for name, gpus in SHIPPED.items():
        assert name in listed
        assert load_space(name).gpus == gpus


# -- parameters -----------------------------------------------------------------------------


def adapters(rank: int, layers: int, *shapes: tuple[int, int]) -> int:
    """Parameters of LoRA on linear layers of these shapes: rank * (in + out) each."""
    return layers * rank * sum(inner + outer for inner, outer in shapes)


def decoder(hidden: int, queries: int, keys: int, mlp: int) -> tuple[tuple[int, int], ...]:
    """Shapes of the seven linear layers of a decoder layer."""
    return (
        (hidden, queries),
        (hidden, keys),
        (hidden, keys),
        (queries, hidden),
        *[(hidden, mlp)] * 3,
    )


TOWER = ((1152, 1152),) * 3
"""q, k and v of a SigLIP layer, which LoRA finds by name."""

PARAMETERS = {
    "qlora27b": (27_009_002_240, adapters(128, 62, *decoder(5376, 4096, 2048, 21504))),
    "qlora4b": (
        4_300_079_472,
        adapters(64, 34, *decoder(2560, 2048, 1024, 10240)) + adapters(64, 27, *TOWER),
    ),
    "gemma2_2b": (2_614_341_888, adapters(64, 26, *decoder(2304, 2048, 1024, 9216))),
    "qwen7b_lora": (7_615_616_512, adapters(128, 28, *decoder(3584, 3584, 512, 18944))),
    "cot8b_h100": (8_030_261_248, adapters(64, 32, *decoder(4096, 4096, 1024, 14336))),
}


class Skeleton:
    """An environment in which a model is built on the meta device and nothing is run."""

    device = "meta"

    def materialize(self, model: Any) -> None:
        """There are shapes alone."""

    def enter(self, phase: Any, micro_step: int) -> None:
        """Nobody asks when."""

    def autocast(self, dtype: Any) -> Any:
        return contextlib.nullcontext()

    def checkpoint_contexts(self, autocast_dtype: Any) -> Any:
        return contextlib.nullcontext(), contextlib.nullcontext()


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_counted_exactly(name):
    space = load_space(name)
    assert space.model is not None
    session = get_workload(space.workload).open(
        resolve_config(space.model), configure(space, space.baseline), Skeleton()
    )
    base, trainable = PARAMETERS[name]
    assert session.trainable_params == trainable
    assert session.total_params == base + trainable


def test_rank_128_of_the_27b_is_what_its_project_reported():
    assert PARAMETERS["qlora27b"][1] == 908_132_352


# -- what a GPU can run ---------------------------------------------------------------------


@pytest.mark.parametrize(("name", "gpu_name"), PAIRS)
def test_a_gpu_without_bf16_is_left_with_fp16_and_the_others_with_both(name, gpu_name):
    space, gpu = load_space(name), get_gpu(gpu_name)
    runnable = [c for c in space.configurations() if not check_supported(c, gpu)]
    formats = {c[knob] for c in runnable for knob in ("precision", "mixed_precision")}
    assert runnable
    assert not check_supported(configure(space, space.baseline), gpu)
    if gpu.compute_capability < (8, 0):
        assert "bf16" not in formats
        assert "fp16" in formats
    else:
        assert "bf16" in formats
    half = {"fp16", "bf16"}
    for c in runnable:
        # Weights in half precision are multiplied in their own.
        assert c["precision"] not in half or c["mixed_precision"] == c["precision"]


@pytest.mark.parametrize("name", ["qlora4b", "gemma2_2b", "qwen7b_lora"])
def test_products_with_quantised_layers_are_in_fp16_where_there_is_no_bf16(name):
    space = load_space(name)
    configuration = configure(space, {**(space.baseline or {}), "precision": "nf4"})
    settings = TrainingSetup.of(configuration)
    assert (settings.precision.autocast, settings.load_dtype) == ("fp16", torch.float16)
    turing = get_gpu(space.gpus[0])
    assert not check_supported(configuration, turing)
    (problem,) = check_supported(configuration.replace(compute_dtype="bf16"), turing)
    assert "compute_dtype bf16" in problem.message


# -- into the projects' own files -----------------------------------------------------------

CONFIG_PY = """\
MAX_SEQ_LENGTH = 2048  # or 1024?
LORA_CONFIG = {
    "r": 64,
    "lora_alpha": 128,
    "lora_dropout": 0.1,
}
TRAINING_CONFIG = dict(
    per_device_train_batch_size=1,
    gradient_accumulation_steps=16,
    gradient_checkpointing=True,
    optim="adamw_torch",
    fp16=True,
    bf16=False,
)
"""
AXOLOTL = """\
base_model: meta-llama/Llama-3.1-8B  # gated
micro_batch_size: 4
gradient_accumulation_steps: 2
sequence_len: 2048
lora_r: 32
lora_alpha: 64
optimizer: adamw_torch
learning_rate: 3e-6
"""
FLAGS = """\
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--batch_size", type=int, default=4)
parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
parser.add_argument("--max_seq_length", type=int, default=2048)
parser.add_argument("--lora_rank", type=int, default=32)
"""


def written(tmp_path: Path, name: str, file: str, text: str, **settings: Any) -> str:
    """What `tuner apply` makes of a file for the baseline with these settings."""
    space = load_space(name)
    configuration = configure(space, {**(space.baseline or {}), **settings})
    path = tmp_path / file
    path.write_text(text)
    return applying(space, configuration, [str(path)]).change.after.sources[0].data.decode()


def test_the_module_of_the_semantic_parser(tmp_path):
    changed = written(
        tmp_path,
        "qwen7b_lora",
        "config.py",
        CONFIG_PY,
        micro_batch=2,
        max_length=512,
        precision="bf16",
        mixed_precision="bf16",
    )
    expected = CONFIG_PY
    for old, new in (
        ("= 2048", "= 512"),
        ('"r": 64', '"r": 128'),
        ('alpha": 128', 'alpha": 256'),
        ("0.1", "0.05"),
        ("batch_size=1", "batch_size=2"),
        ("steps=16", "steps=8"),
        ("fp16=True", "fp16=False"),
        ("bf16=False", "bf16=True"),
    ):
        expected = expected.replace(old, new)
    assert changed == expected


def test_the_axolotl_file_and_the_flags_of_the_8b(tmp_path):
    changed = written(tmp_path, "cot8b_h100", "llama.yml", AXOLOTL, micro_batch=8, max_length=1536)
    added = "micro_batch_size: 8\ngradient_checkpointing: true"
    expected = AXOLOTL.replace("micro_batch_size: 4", added)
    for old, new in (
        ("steps: 2", "steps: 1"),
        ("2048", "1536"),
        ("r: 32", "r: 64"),
        ("alpha: 64", "alpha: 128"),
    ):
        expected = expected.replace(old, new)
    assert changed == expected
    script = written(tmp_path, "cot8b_h100", "train.py", FLAGS, micro_batch=8, max_length=1536)
    assert [line.rpartition("=")[2] for line in script.splitlines()[2:]] == [
        "8)",
        "1)",
        "1536)",
        "64)",
    ]


def test_the_space_that_the_documentation_shows_can_be_read():
    text = (Path(__file__).parents[1] / "docs/reference/spaces.md").read_text()
    shown = text.partition("```yaml\n")[2].partition("```")[0]
    assert read_space(shown, "docs/reference/spaces.md").count() == 40
    for name in SHIPPED:
        assert f"(../../search_spaces/{name}.yaml)" in text
