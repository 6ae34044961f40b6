"""Files of other GPU types of a space: what is broken there is named, and ends nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from results_samples import GPU, SPACE, make_search
from shared_cases.hostile import bomb

from tuner.core.errors import UnavailableError
from tuner.report.other_gpus import MAX_BYTES, read_other_gpus
from tuner.report.writing import write_tables, write_view
from tuner.searches.store import ResultsFolder, write_atomically
from tuner.searches.view import build_view


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def changed(old: str, new: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new, 1))

    return change


def large(path: Path) -> None:
    with path.open("ab") as file:
        file.truncate(MAX_BYTES + 1)


BROKEN = {
    "empty": ("best.yaml", lambda path: path.write_text("")),
    "a list": ("best.yaml", lambda path: path.write_text("[1, 2]")),
    "a text for the GPU": ("best.yaml", lambda path: path.write_text("gpu: a6000")),
    "an alias bomb for a condition": (
        "best.yaml",
        lambda path: path.write_text(bomb(9) + "chosen_from: {conditions: *a8}\ngpu: {}\n"),
    ),
    "deep": ("best.yaml", lambda path: path.write_text("[" * 100_000)),
    "nan memory": ("best.yaml", changed("memory_bytes: ", "memory_bytes: .nan #")),
    "a pipe": ("best.yaml", fifo),
    "a pipe for a table": ("pareto.csv", fifo),
    "nan": ("pareto.csv", lambda p: p.write_text("device_bytes,samples_per_s,source\n9,nan,x\n")),
    "inf": ("pareto.csv", lambda p: p.write_text("device_bytes,samples_per_s,source\n9,inf,x\n")),
    "NUL": ("pareto.csv", lambda path: path.write_bytes(b"device_bytes\n\0\n")),
    "large": ("pareto.csv", large),
    "bytes": ("pareto.csv", lambda path: path.write_bytes(b"\xff\xfe")),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_neighbour_is_named_and_left_out(tmp_path, how):
    view = build_view(make_search(12, seed=1), SPACE, GPU)
    own, other, third = (ResultsFolder(tmp_path, "s", name) for name in ("one", "two", "three"))
    for folder in (other, third):
        write_tables(folder, view)
    name, damage = BROKEN[how]
    damage(other.path / name)
    found = read_other_gpus(own, view.knobs)
    assert found.unreadable == ("two",)
    assert len(found.fronts) == 1


def test_a_report_is_drawn_beside_a_broken_neighbour(tmp_path):
    view = build_view(make_search(12, seed=1), SPACE, GPU)
    own, other = (ResultsFolder(tmp_path, "s", name) for name in ("one", "two"))
    other.path.mkdir(parents=True)
    other.best_yaml.touch()
    write_view(own, view)
    assert "as their files cannot be read: two" in own.report_html.read_text()


def test_a_link_that_is_planted_for_a_draft_is_not_followed(tmp_path, monkeypatch):
    """Whoever may write into the folder cannot have other files overwritten."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    folder = tmp_path / "results"
    folder.mkdir()
    for number in (os.getpid(), 0):
        (folder / f".report.html.{number}.tmp").symlink_to(victim)
    monkeypatch.setattr("secrets.token_hex", lambda size: "0")
    (folder / "other.html").symlink_to(victim)
    with pytest.raises(UnavailableError, match="cannot write"):
        write_atomically(folder / "report.html", b"new")
    monkeypatch.undo()
    write_atomically(folder / "report.html", b"new")
    write_atomically(folder / "other.html", b"new")
    assert victim.read_text() == "precious"
    assert (folder / "report.html").read_bytes() == (folder / "other.html").read_bytes() == b"new"
