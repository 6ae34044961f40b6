"""What `tuner submit --working-dir` sends: listed, without secrets, links and far too much."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from tuner.cli.main import run
from tuner.errors import InputError
from tuner.tune.working_dir import collect

OWN = "name: own\nworkload: command\ncommand: [python, t.py, '{b}']\nknobs:\n  b: [1, 2]\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "project"
    for name, text in {
        "own.yaml": OWN,
        "t.py": "print()",
        "data/train.jsonl": "{}\n" * 1000,
        ".env.example": "TOKEN=",
        ".gitignore": "runs/\n*.log\n",
        "runs/1.txt": "x",
        "debug.log": "x",
        ".git/config": "x",
        ".venv/bin/python": "x",
    }.items():
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).write_text(text)
    return made


SENT = {"own.yaml", "t.py", "data/train.jsonl", ".env.example", ".gitignore"}


def test_what_goes_is_what_is_listed(folder, tmp_path):
    package = collect(folder)
    assert {file.name for file in package.files} == SENT
    package.write(tmp_path / "sent.zip")
    with zipfile.ZipFile(tmp_path / "sent.zip") as sent:
        assert set(sent.namelist()) == SENT
        assert sent.read("own.yaml").decode() == OWN
    lines = list(package.lines())
    assert lines[0].startswith("sends 5 files of ")
    assert lines[1].endswith("data/train.jsonl")
    assert lines[-1] == "leaves out .git, .venv, debug.log, runs/1.txt"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (".env", "A=1"), (".env.local", "A=1"), ("deep/id_ed25519", "x"), ("a/cert.pem", "x"),
        (".aws/credentials", "x"), (".ssh/config", "x"), ("secrets.yaml", "x"),
        ("notes.txt", "-----BEGIN OPENSSH PRIVATE KEY-----\nabc\n"),
    ],
)  # fmt: skip
def test_what_looks_like_a_secret_is_refused_unless_asked_for(folder, name, text):
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    with pytest.raises(InputError, match="look like secrets") as caught:
        collect(folder)
    assert [problem.where or problem.message for problem in caught.value.problems] == [name]
    assert name in {file.name for file in collect(folder, secrets=True).files}
    (folder / ".rayignore").write_text(f"{name}\n")
    assert name not in {file.name for file in collect(folder).files}


def test_links_out_of_the_folder_are_refused_unless_asked_for(folder, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "x.txt").write_text("x")
    (folder / "away").symlink_to(tmp_path / "elsewhere")
    (folder / "inside").symlink_to("data")
    (folder / "around").symlink_to(folder)
    with pytest.raises(InputError, match="1 links lead out") as caught:
        collect(folder)
    assert [problem.where for problem in caught.value.problems] == ["away"]
    sent = {file.name for file in collect(folder, links=True).files}
    assert sent == SENT | {"away/x.txt", "inside/train.jsonl"}


def test_too_much_is_refused_with_the_largest(folder):
    with (folder / "big.bin").open("wb") as file:
        file.truncate(2 << 30)
    with pytest.raises(InputError, match=r"holds 2\.00 GiB, and at most 200\.0 MiB") as caught:
        collect(folder)
    assert caught.value.problems[0].where == "big.bin"
    assert collect(folder, max_bytes=3 << 30).size_bytes > 2 << 30


def test_secrets_stay_here_whatever_answers(folder, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    (folder / ".env").write_text("A=1")
    submit = ["submit", "--space", "own.yaml", "--gpu", "a6000", "--working-dir", "."]
    assert run([*submit, "--address", "http://127.0.0.1:1"]) == 2
    assert "--allow secrets" in capsys.readouterr().err
    assert run([*submit, "--allow", "secrets", "--address", "http://127.0.0.1:1"]) == 3
    assert ".env\n" in capsys.readouterr().err
