"""The Action and the pre-commit hook check the programs of [tool.tuner] on two commits."""

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from html import unescape
from pathlib import Path

import pytest
import yaml
from started import run_python

from tuner.integrations.pull_request import _check

ROOT = Path(__file__).parents[1]

TRAIN = """\
from peft import LoraConfig
from settings import LENGTH
from trl import SFTConfig, SFTTrainer

args = SFTConfig(per_device_train_batch_size=16, max_length=LENGTH, bf16=True)
lora = LoraConfig(r=16, target_modules="all-linear")
SFTTrainer(
    model="HuggingFaceTB/SmolLM2-135M", args=args, peft_config=lora, train_dataset=[]
).train()
"""
BAD = "a|b <b>@me<b> %0A::warning::,x:`.py"
"""A file's name."""

BASE = {
    "train.py": TRAIN,
    "settings.py": "LENGTH = 256\n",
    BAD: TRAIN,
    "link.py": "",
    "pyproject.toml": f"""
[tool.tuner]
gpu = "rtx3060"
headroom = "3%"
programs = ["train.py", "'{BAD}'", "link.py"]
""",
}
LONGER = {
    "settings.py": "LENGTH = 8192\n",
    BAD: "print('\\n::error::planted')\n",
    "pyproject.toml": '[tool.tuner]\ngpu = "b200"\nprograms = ["nosuch.py"]\n',
    "click.py": "raise SystemExit('planted')\n",
    "tuner/__init__.py": "raise SystemExit('planted')\n",
    "sitecustomize.py": "raise SystemExit('planted')\n",
}


def git(folder: Path, *words: str) -> str:
    author = ("-c", "user.name=a", "-c", "user.email=a@example.com", "-c", "commit.gpgsign=false")
    done = subprocess.run(
        ["git", *author, *words], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def written(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with one commit, and changes that are staged."""
    folder = tmp_path / "repository"
    written(folder, BASE)
    git(folder, "init", "-q", "-b", "main")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "base")
    written(folder, LONGER)
    (folder / "link.py").unlink()
    (folder / "link.py").symlink_to("/etc/hostname")
    git(folder, "add", ".")
    return folder


class Runner:
    """Runs the shell steps of the Action as GitHub's runner does; the first one is GitHub's."""

    def __init__(self, folder: Path, workspace: Path):
        self.folder, self.workspace = folder, workspace
        gh = 'echo "$@" >>"$GH_LOG"\nif [ "$2" = --paginate ]; then echo "$GH_COMMENT"; fi\n'
        commands = {"bin/gh": gh, "temp/tuner-venv/bin/python": f'exec {sys.executable} "$@"\n'}
        written(folder, {name: f"#!/bin/sh\n{text}" for name, text in commands.items()})
        for name in commands:
            (folder / name).chmod(0o755)

    def run(self, step_id: str, **environment: str) -> subprocess.CompletedProcess[str]:
        steps = yaml.safe_load((ROOT / "action.yml").read_text())["runs"]["steps"]
        (step,) = (one for one in steps if one["id"] == step_id)
        assert step["working-directory"] == "${{ runner.temp }}"
        assert "${{" not in step["run"]
        assert step["env"].keys() - {"GH_TOKEN"} <= environment.keys()
        return subprocess.run(
            ("bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]),
            cwd=self.folder / "temp",
            env={
                **os.environ,
                "PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
                "GITHUB_ACTIONS": "true",
                "GITHUB_EVENT_NAME": "pull_request",
                "GITHUB_WORKSPACE": str(self.workspace),
                "GITHUB_STEP_SUMMARY": str(self.folder / "summary"),
                "GH_LOG": str(self.folder / "gh.log"),
                **environment,
            },
            capture_output=True,
            text=True,
            check=False,
        )


def test_the_action_is_one_that_github_takes_with_others_pinned():
    schema = (sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-actions")
    subprocess.run([*schema, ROOT / "action.yml"], check=True, stdout=subprocess.DEVNULL)
    used = re.findall(r"uses: \S+?@(\S+)", (ROOT / "action.yml").read_text())
    assert all(re.fullmatch("[0-9a-f]{40}", version) for version in used)


@pytest.mark.slow
def test_the_action_checks_the_programs_of_the_base_on_both_commits(tmp_path, repository):
    base = git(repository, "rev-parse", "HEAD")
    git(repository, "commit", "-q", "-m", "change")
    git(tmp_path, "clone", "-q", str(repository), "workspace")
    runner = Runner(tmp_path / "runner", tmp_path / "workspace")
    done = runner.run("check", BASE=base)
    assert done.returncode == 1, done.stderr
    assert "planted" not in done.stdout + done.stderr
    first, second, third = done.stdout.splitlines()
    assert re.match(
        r"::error file=train.py,title=tuner::train.py on rtx3060: does not fit: [\d.]+ GiB "
        r"\(before: fits: [\d.]+ GiB\)",
        first,
    )
    escaped = BAD.replace("%", "%25")
    place = escaped.replace(":", "%3A").replace(",", "%2C")
    said = f"'{escaped}' on rtx3060: unknown: no training is seen in {escaped}"
    assert second.startswith(f"::error file={place},title=tuner::{said}")
    assert "link.py on rtx3060: error: file not found: link.py " in third  # it led out
    table = (runner.folder / "summary").read_text()
    assert table == (runner.folder / "temp" / "tuner.md").read_text()
    rows = table.splitlines()[4:]
    for row in rows:
        assert re.fullmatch(r"\|( <code>([A-Za-z0-9 ]|&#\d+;)*</code> \|){4}", row)
    assert unescape(rows[1]).startswith(f"| <code>'{BAD}'</code> | <code>rtx3060</code> | ")
    runner.run("comment", COMMENTS="repos/o/n/issues/7/comments", GH_COMMENT="")
    runner.run("comment", COMMENTS="repos/o/n/issues/7/comments", GH_COMMENT="https://one")
    asked = (runner.folder / "gh.log").read_text().splitlines()
    assert asked[1] == "api -X POST repos/o/n/issues/7/comments -F body=@tuner.md"
    assert asked[3] == "api -X PATCH https://one -F body=@tuner.md"


def test_an_error_is_told_to_its_end(tmp_path):
    misspelt = TRAIN.replace("batch_size", "batch_sise").replace("LENGTH,", "64,")
    written(tmp_path, {"train.py": misspelt.replace("from settings import LENGTH\n", "")})
    code, text = _check(tmp_path, ["--gpu=rtx3060"], ["train.py"])
    assert code == 2
    assert text.endswith("did you mean per_device_train_batch_size? (TypeError)")


@pytest.mark.parametrize("event", ["pull_request_target", "workflow_run"])
def test_the_action_refuses_an_event_with_secrets(tmp_path, repository, event):
    runner = Runner(tmp_path / "runner", repository)
    done = runner.run("check", BASE="HEAD", GITHUB_EVENT_NAME=event)
    assert (done.returncode, done.stdout) == (1, "")
    assert "use pull_request" in done.stderr


@pytest.mark.slow
def test_the_hook_stops_a_commit_with_which_a_program_no_longer_fits(tmp_path, repository):
    """The manifest's hook in a repository's own configuration, without its installation."""
    manifest = ROOT / ".pre-commit-hooks.yaml"
    subprocess.run([sys.executable, "-m", "pre_commit", "validate-manifest", manifest], check=True)
    (hook,) = yaml.safe_load(manifest.read_text())
    python, _, words = hook["entry"].partition(" ")
    assert python == "python"
    local = {**hook, "language": "system", "entry": f"{sys.executable} {words}"}
    repos = {"repos": [{"repo": "local", "hooks": [local]}]}
    git(repository, "reset", "-q", "--hard")
    written(repository, {"settings.py": LONGER["settings.py"],
                         ".pre-commit-config.yaml": yaml.safe_dump(repos)})  # fmt: skip
    git(repository, "add", ".")
    written(repository, {"settings.py": "LENGTH = 1\n"})  # not staged: it isn't committed either
    done = run_python(
        "-m",
        "pre_commit",
        "run",
        cwd=repository,
        env={
            **{name: value for name, value in os.environ.items() if "GITHUB" not in name},
            "PRE_COMMIT_HOME": str(tmp_path / "pre-commit"),
        },
    )
    assert done.returncode == 1
    assert re.search(r"^train.py on rtx3060: does not fit: .*\(before: fits: ", done.stdout, re.M)
