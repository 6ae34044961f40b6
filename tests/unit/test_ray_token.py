"""The token of Ray clusters of this machine: nobody but its owner may read it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from tuner.core.errors import UnavailableError
from tuner.searches.joining import TOKEN_BYTES, keep_private


@pytest.fixture
def token(tmp_path, monkeypatch) -> Path:
    """Where it is to be; everything that is made is for all to read."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    before = os.umask(0)
    yield tmp_path / ".ray" / "auth_token"
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat(follow_symlinks=False).st_mode)


def test_it_is_made_before_ray_makes_a_wider_one(token):
    assert keep_private() == ""
    assert (mode(token.parent), mode(token)) == (0o700, 0o600)
    text = token.read_text()
    assert len(bytes.fromhex(text)) == TOKEN_BYTES
    assert keep_private() == ""
    assert token.read_text() == text
    assert [path.name for path in token.parent.iterdir()] == ["auth_token"]


def test_a_wider_one_is_narrowed_and_that_is_said(token):
    token.parent.mkdir()
    token.write_text("a" * 64)
    assert "could be read by other users" in keep_private()
    assert (mode(token), token.read_text()) == (0o600, "a" * 64)
    assert keep_private() == ""


def test_a_link_in_its_place_is_refused_and_not_followed(token, tmp_path):
    token.parent.mkdir()
    victim = tmp_path / "victim"
    victim.write_text("theirs")
    token.symlink_to(victim)
    with pytest.raises(UnavailableError, match="no file of yours"):
        keep_private()
    assert (mode(victim), victim.read_text()) == (0o666, "theirs")


@pytest.mark.parametrize(
    ("name", "value"),
    [("RAY_AUTH_MODE", "disabled"), ("RAY_AUTH_TOKEN", "ab"), ("RAY_AUTH_TOKEN_PATH", "/a")],
)
def test_what_the_environment_says_stands(token, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    assert keep_private() == ""
    assert not token.parent.exists()
