"""Programs as people write them, with tiny models, on an emulated GPU: all run three steps."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.zoo.entries import PROGRAMS, read
from benchmarks.zoo.models import make
from benchmarks.zoo.running import Places, Row, run
from tests.emulating import needs_emulator

pytestmark = pytest.mark.proof


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def ran(name: str, models: Path) -> Row:
    """Three steps of a program, with nothing that the emulator does not know."""
    row = run(read(name), Places(models, Path(sys.executable)), tiny=True)
    assert (row.ended, row.steps) == ("steps", 3), "\n".join(row.output)
    assert (row.unknown_calls, row.unknown_values) == ({}, {}), row.output
    assert row.peak_allocated_bytes > 0
    return row


def said(row: Row, pattern: str) -> list[str]:
    """What stands in the first group of each match in what the program printed."""
    return re.findall(pattern, "\n".join(row.output))


@needs_emulator
def test_trl_counts_the_tokens_of_its_chunked_loss(models: Path) -> None:
    row = ran("trl_sft", models)

    # 4 conversations of 128 tokens each, every one longer than that.
    assert said(row, r"'num_tokens': '(\d+)'") == ["512", "1024"]


@needs_emulator
@pytest.mark.parametrize("name", ["trl_dpo", "whisper"])
def test_trainers_run(name: str, models: Path) -> None:
    ran(name, models)


@needs_emulator
def test_an_image_takes_its_tokens_and_a_label_none(models: Path) -> None:
    row = ran("gemma", models)

    # Two images of 16 tokens; those of text are as many as on the CPU.
    found = said(row, r"step \d: (\d+ image tokens, \d+ of text)")
    assert [int(line.split()[0]) for line in found] == [32, 32]
    assert found == _on_the_cpu("gemma", models)[: len(found)]


@needs_emulator
@pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None, reason="its processor needs torchvision"
)
def test_images_of_two_sizes_have_as_many_tokens_as_on_the_cpu(models: Path) -> None:
    found = said(ran("qwen_vl", models), r"step \d: (\d+ image tokens, \d+ of text)")
    assert found == _on_the_cpu("qwen_vl", models)[: len(found)]


def _on_the_cpu(name: str, models: Path) -> list[str]:
    """What the same program counts where there is no device at all."""
    entry = read(name).shrunk()
    *_, script, _model, size = entry.command
    text = Path(script.replace("{here}", str(PROGRAMS))).read_text(encoding="utf-8")
    text = text.replace(".cuda()", "").replace('"cuda"', '"cpu"')
    assert entry.model is not None
    arguments = [str(make(entry.model, models / "models", tiny=True)), size]
    ran = subprocess.run(
        [sys.executable, "-c", text, *arguments],
        capture_output=True,
        text=True,
        check=True,
        cwd=models,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    return re.findall(r"step \d: (\d+ image tokens, \d+ of text)", ran.stdout)


@needs_emulator
def test_experts_get_a_balanced_load(models: Path) -> None:
    row = ran("gpt_oss", models)

    loads = re.findall(r"layer 0: (\d+) to (\d+), in all (\d+)", "\n".join(row.output))
    assert len(loads) == 2  # the third step is over before it is printed
    for fewest, most, total in (map(int, load) for load in loads):
        assert total == 2 * 128 * 2  # samples, tokens, experts of a token
        # 64 of 512 choices an expert, if they were even.
        assert 32 <= fewest <= 64 <= most <= 96


@needs_emulator
def test_ranks_add_up_what_they_count(models: Path) -> None:
    row = ran("ddp", models)

    # Two samples of 128 tokens on one rank, of 120 on the other.
    assert set(said(row, r"step \d: (\d+) tokens")) == {"496"}
