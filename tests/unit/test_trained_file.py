"""`compare --baseline FILE`: trainers' own files, what they say, and what the space cannot say."""

from __future__ import annotations

from pathlib import Path

import pytest

from tuner.app.baseline import read_baseline
from tuner.app.exporting import export_recommended
from tuner.app.recommendation import recommended
from tuner.app.target import load_target
from tuner.space import SearchSpace, load_space

SAME = ("micro_batch", "grad_accum", "max_length", "lora_rank", "gradient_checkpointing",
        "precision", "optimizer", "attention")  # fmt: skip

AXOLOTL = """\
base_model: NousResearch/Meta-Llama-3.1-8B
datasets: [{path: data.jsonl, type: alpaca}]
sequence_len: 1024
adapter: lora
lora_r: 16
lora_alpha: 32
lora_target_linear: true
micro_batch_size: 2
gradient_accumulation_steps: 4
gradient_checkpointing: true
optimizer: adamw_torch
bf16: true
attn_implementation: sdpa
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def space() -> SearchSpace:
    return load_space("cot8b_h100")


def read(space: SearchSpace, text: str):
    Path("now.yaml").write_text(text)
    return read_baseline(space, [Path("now.yaml")])


@pytest.mark.parametrize("tool", ["axolotl", "llamafactory", "trl"])
def test_what_is_exported_is_read_back(tool, folder):
    root = Path(__file__).parents[2] / "results"
    target = load_target("cot8b_h100", "h100_sxm", results=root)
    best = recommended(target)
    exported = export_recommended(target, best, tool).text
    found = read(target.space, exported).configuration
    wanted = best.configuration
    assert {n: found[n] for n in SAME} == {n: wanted[n] for n in SAME}


def test_a_file_without_a_mapping_is_read_by_its_trainer(folder, space):
    found = read(space, AXOLOTL)
    assert found.configuration["micro_batch"] == 2
    assert found.configuration["effective_batch"] == 8
    assert found.configuration["lora_rank"] == 16
    assert found.configuration["max_length"] == 1024


def test_a_four_bit_file_is_no_bf16_run(folder, space):
    text = AXOLOTL.replace("adapter: lora", "adapter: qlora\nload_in_4bit: true")
    found = read(space, text)
    assert space.fixed["precision"] == "bf16"
    assert found.configuration["precision"] == "nf4"
    assert any("precision is nf4 in now.yaml and bf16 in every" in t for t in found.outside)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("base_model: mistralai/Mistral-7B-v0.3", "the numbers are of llama-3.1-8b"),
        ("lora_modules_to_save: [lm_head, embed_tokens]", "modules_to_save"),
    ],
)
def test_what_the_space_cannot_say_is_named(line, said, folder, space):
    key = line.partition(":")[0]
    kept = [one for one in AXOLOTL.splitlines() if not one.startswith(f"{key}:")]
    found = read(space, "\n".join([*kept, line, ""]))
    assert any(said in text for text in found.outside)


def test_another_effective_batch_is_kept(folder, space):
    text = AXOLOTL.replace("gradient_accumulation_steps: 4", "gradient_accumulation_steps: 16")
    assert read(space, text).configuration["effective_batch"] == 32
