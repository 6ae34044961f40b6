"""Hollow files as an emulated program reads them: the right tensors, in untouched memory."""

from __future__ import annotations

import gc
import re
from pathlib import Path

import pytest
import safetensors
import torch
from safetensors.torch import save_file
from started import run_python
from torch.utils._python_dispatch import TorchDispatchMode

from tuner.core.sparse import TensorEntry, write_shards
from tuner.emulator.inside.hollow import _HollowFile, _reader, hole, is_hole, moving

safe_open = _reader(safetensors.safe_open)

ENTRIES = [
    TensorEntry("norm", "F32", (8,)),
    TensorEntry("up", "BF16", (1024, 2048)),
    TensorEntry("down", "BF16", (2048, 1024)),
    TensorEntry("steps", "I64", ()),
    TensorEntry("none", "BF16", (0, 4)),
]


@pytest.fixture
def hollow_file(tmp_path):
    return write_shards(tmp_path, ENTRIES)[0]


class Moving(TorchDispatchMode):
    """The emulator's mode, of which only the part for hollow tensors acts."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        handler = moving(func, None)
        return (
            func(*args, **(kwargs or {})) if handler is None else handler(func, args, kwargs or {})
        )


def resident_bytes() -> int:
    """Anonymous memory that this process really has."""
    gc.collect()
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"RssAnon:\s+(\d+)", status)[1])


# --- the file ----------------------------------------------------------------------------


def test_a_hollow_file_answers_as_safetensors_does(hollow_file):
    with (
        safe_open(hollow_file, framework="pt") as ours,
        safetensors.safe_open(hollow_file, framework="pt") as theirs,
    ):
        assert isinstance(ours, _HollowFile)
        assert ours.keys() == theirs.keys()
        assert ours.offset_keys() == theirs.offset_keys()
        assert ours.metadata() == theirs.metadata()
        for name in theirs.keys():  # noqa: SIM118 - it is no mapping
            one, other = ours.get_tensor(name), theirs.get_tensor(name)
            assert one.dtype is other.dtype
            assert one.stride() == other.stride()
            assert torch.equal(one, other)
            mine, real = ours.get_slice(name), theirs.get_slice(name)
            assert mine.get_shape() == real.get_shape()
            assert mine.get_dtype() == real.get_dtype()
            assert torch.equal(mine[...], real[...])
        assert torch.equal(ours.get_slice("up")[3:5, 7], theirs.get_slice("up")[3:5, 7])
        assert set(ours.get_tensors()) == set(theirs.keys())


def test_tensors_stay_when_the_file_is_closed(hollow_file):
    with safe_open(hollow_file, "pt", "cpu", backend="mmap") as file:
        up = file.get_tensor("up")
    with pytest.raises(safetensors.SafetensorError, match="closed"):
        file.get_tensor("up")
    assert not up.any()


def test_an_unknown_tensor_is_the_error_of_safetensors(hollow_file):
    with safe_open(hollow_file, framework="pt") as file:
        for read in (file.get_tensor, file.get_slice):
            with pytest.raises(safetensors.SafetensorError, match="does not contain tensor gate"):
                read("gate")


def test_tensors_are_put_where_they_are_asked_for(hollow_file):
    with safe_open(hollow_file, framework="pt", device="meta") as file:
        assert file.get_tensor("up").is_meta
        assert file.get_slice("up")[:1].is_meta


def test_all_other_files_are_safetensors_own(hollow_file, tmp_path):
    real = tmp_path / "real.safetensors"
    save_file({"a": torch.ones(3)}, real)
    with safe_open(real, framework="pt") as file:
        assert not isinstance(file, _HollowFile)
        assert file.get_tensor("a").sum() == 3
    with safe_open(hollow_file, framework="numpy") as file:
        assert not isinstance(file, _HollowFile)
    with pytest.raises(FileNotFoundError):
        safe_open(tmp_path / "nowhere", framework="pt")
    (tmp_path / "broken").write_bytes(b"\xff" * 40)
    with pytest.raises(safetensors.SafetensorError):
        safe_open(tmp_path / "broken", framework="pt")


# --- memory ------------------------------------------------------------------------------


def test_what_is_moved_and_converted_takes_no_memory():
    before = resident_bytes()
    source = hole((1 << 15, 1 << 15), torch.bfloat16)  # 2 GiB
    with Moving():
        kept = [
            source.to(torch.float32),
            source.clone(),
            torch.stack([source, source]),
            torch.cat([source[:5], source[7:]]),
            source[:, : 1 << 14].contiguous(),
        ]
    assert [tuple(one.shape) for one in kept] == [
        (1 << 15, 1 << 15),
        (1 << 15, 1 << 15),
        (2, 1 << 15, 1 << 15),
        ((1 << 15) - 2, 1 << 15),
        (1 << 15, 1 << 14),
    ]
    assert kept[0].dtype is torch.float32
    assert all(is_hole(one) for one in kept)
    # Of 15 GiB; what PyTorch imports for the first of these operators counts as well.
    assert resident_bytes() - before < 512 << 20


def test_holes_are_tensors_of_their_own():
    source = hole((1024, 1024), torch.bfloat16)
    with Moving():
        other = source.clone()
    other.fill_(1)
    assert not source.any()
    assert other.all()
    assert is_hole(source[3:].t())


@pytest.mark.parametrize(
    "move",
    [
        lambda source, real: torch.cat([source, real]),
        lambda source, real: real.to(torch.float32),
        lambda source, real: source[:2, :2].to(torch.float32),
        lambda source, real: source.t().to(torch.float32),
        lambda source, real: source.to("meta"),
    ],
)
def test_anything_else_is_computed_as_ever(move):
    source, real = hole((1024, 1024), torch.bfloat16), torch.ones(1024, 1024, dtype=torch.bfloat16)
    expected = move(source, real)
    with Moving():
        found = move(source, real)
    assert found.dtype is expected.dtype
    assert found.stride() == expected.stride()
    assert found.device == expected.device
    if not found.is_meta:
        assert torch.equal(found, expected)
        assert not is_hole(found)


INSTALL = """
from types import SimpleNamespace
from tuner.emulator.inside.hollow import install, is_hole
install(SimpleNamespace(handler=lambda func: None))
"""
LOAD_FILE = """
import sys
from safetensors.torch import load_file
{install}
tensors = load_file(sys.argv[1] + "/model.safetensors").values()
print(len(tensors), sum(map(is_hole, tensors)))
"""
FROM_PRETRAINED = """
{install}
import sys
from transformers import AutoModelForCausalLM
model, info = AutoModelForCausalLM.from_pretrained(sys.argv[1], output_loading_info=True)
assert not any(info.values()), info
weights = list(model.parameters())
print(len(weights), sum(map(is_hole, weights)))
"""


def output_of(program: str, folder: Path) -> list[str]:
    done = run_python("-c", program.format(install=INSTALL), str(folder))
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_programs_that_imported_safetensors_before_read_holes_too(tmp_path):
    write_shards(tmp_path, ENTRIES[:3])
    assert output_of(LOAD_FILE, tmp_path) == ["3", "3"]


@pytest.mark.slow
def test_from_pretrained_gives_a_model_of_holes(tmp_path):
    from tuner.space.models.hollow import write_hollow

    found = write_hollow("llama-3.2-1b", tmp_path / "llama")
    assert output_of(FROM_PRETRAINED, found.folder) == ["146", "146"]
