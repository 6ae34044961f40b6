"""Stand-in libraries in the cache: what is damaged is built again, and never loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from tuner.core.errors import UnavailableError
from tuner.emulator import build as building
from tuner.emulator.build import CORE, TorchBuild, build

TORCH = TorchBuild(folder=Path("torch"), version="2.13.0+cu130", cuda=(13, 0))


@pytest.fixture
def compiled(tmp_path, monkeypatch):
    """How often libraries were built; a file of text stands for what a compiler makes."""
    found: list[Path] = []

    def compile_all(compiler: str, torch: TorchBuild, reals: object, folder: Path) -> None:
        folder.mkdir()
        found.append(folder)
        for name in (CORE, "libcuda.so.1", "order"):
            (folder / name).write_text(f"{name} as it was built")

    monkeypatch.setenv("TUNER_CACHE", str(tmp_path))
    monkeypatch.setattr(building, "_real_libraries", lambda torch: [])
    monkeypatch.setattr(building, "find_compiler", lambda: "cc")
    monkeypatch.setattr(building, "_compile_all", compile_all)
    return found


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / CORE).write_bytes(b"\x7fELF half of it"),
        lambda folder: (folder / "libcuda.so.1").unlink(),
        lambda folder: (folder / "order").write_text(""),
        lambda folder: (folder / "complete").write_text(""),  # as an older release wrote it
        lambda folder: (folder / "complete").unlink(),
    ],
)
def test_a_damaged_folder_is_built_again_once(compiled, tmp_path, damage):
    folder = build(TORCH)
    assert build(TORCH) == folder
    assert len(compiled) == 1
    damage(folder)
    assert build(TORCH) == folder == build(TORCH)
    assert len(compiled) == 2
    assert (folder / CORE).read_text() == f"{CORE} as it was built"
    assert list((tmp_path / "emulator").iterdir()) == [folder]


def test_what_cannot_be_built_again_is_unavailable(compiled, tmp_path, monkeypatch):
    folder = build(TORCH)
    (folder / CORE).write_bytes(b"damaged")

    def no_compiler() -> str:
        raise UnavailableError("there is no C compiler")

    monkeypatch.setattr(building, "find_compiler", no_compiler)
    with pytest.raises(UnavailableError, match="no C compiler"):
        build(TORCH)
    monkeypatch.setenv("TUNER_CACHE", str(tmp_path / "file"))
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setattr(building, "find_compiler", lambda: "cc")
    with pytest.raises(UnavailableError, match="cannot be written"):
        build(TORCH)
