"""What others put into a results folder."""

import os

import pytest

from tuner.core.errors import UnavailableError
from tuner.searches.store import write_atomically


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
