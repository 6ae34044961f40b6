"""`tuner review`: one command behind the Action, the pre-commit hook and SARIF.

Programs run in git repositories of their own, without PyTorch, as the Action and the hook install
tuner: the answers are those of the timelines that ship.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import jsonschema
import pytest
import yaml

from tuner.core.errors import MODULES

ROOT = Path(__file__).parents[1]

SARIF = ROOT / "tests" / "schemas" / "sarif-2.1.0.json"
"""OASIS's schema of SARIF 2.1.0 with errata 01, as published:
https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"""

LIGHT = f"""#!{sys.executable}
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        missing = name.partition(".")[0] in {set(MODULES)!r}
        return None if missing else self.finder.find_spec(name, path, target)

sys.meta_path[:] = map(Without, sys.meta_path)
sys.path.insert(0, {str(ROOT)!r})
from tuner.app.cli.main import main
main()
"""
"""`tuner` of a base install: PyTorch and what comes with it cannot be imported."""

TRAIN = '''"""A training: python train.py MODEL."""
import sys

import torch
from peft import LoraConfig
from settings import LENGTH
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer

codes = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)
model = AutoModelForCausalLM.from_pretrained(
    sys.argv[1], dtype="bfloat16", quantization_config=codes
)
args = SFTConfig(
    output_dir="out",
    per_device_train_batch_size=16,
    max_length=LENGTH,
    gradient_checkpointing=True,
    bf16=True,
)
lora = LoraConfig(r=16, target_modules="all-linear")
SFTTrainer(model=model, args=args, peft_config=lora, train_dataset=[]).train()
'''
UNSAID = "from transformers import Trainer\nTrainer(model, TrainingArguments('out')).train()\n"
NO_MODEL = TRAIN.replace("sys.argv[1]", '"mistrall-7b-v0.3"')
BASE = {
    "train.py": TRAIN,
    "settings.py": "# Tokens of an example.\nLENGTH = 512\n",
    "tool.py": "print(1)\n",
    "config.yaml": "a: 1\n",
    "test_train.py": "def test(loss):\n    loss.backward()\n",
    "loop.py": "for loss in losses:\n    loss.backward()\n",
    "pyproject.toml": """
[tool.tuner]
gpu = ["rtx3060", "a100_80gb"]
exclude = ["loop.py"]
[tool.tuner.models]
"*.py" = "qwen3-0.6b"
""",
}


@pytest.fixture(scope="module")
def light(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the command `tuner` of a base install."""
    folder = tmp_path_factory.mktemp("bin")
    (folder / "tuner").write_text(LIGHT)
    (folder / "tuner").chmod(0o755)
    return folder


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
    """A repository with the commit `main` and a branch that is checked out."""
    folder = tmp_path / "repository"
    written(folder, BASE)
    git(folder, "init", "-q", "-b", "main")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "base")
    git(folder, "checkout", "-q", "-b", "change")
    return folder


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def review(light: Path, repository: Path) -> Run:
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [light / "tuner", "review", *words],
            cwd=repository,
            capture_output=True,
            text=True,
            check=False,
            env={name: v for name, v in os.environ.items() if name != "PRE_COMMIT_FROM_REF"},
        )

    return run


LONGER = {"settings.py": "# Tokens of an example.\nLENGTH = 8192\n", "tool.py": "print(2)\n"}


def test_a_setting_in_an_imported_file_is_named_with_its_line(review: Run, repository: Path):
    written(repository, LONGER)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = review("--base", "main", "--write", "r.sarif", "--write", "r.md")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 1, done.stderr
    first, second, *rest = done.stdout.splitlines()
    cause = r"settings.py:2: \+[\d.]+ GiB: max_length 512 -> 8192 at settings.py:2; "
    assert re.match(cause + r"(likely )?no longer fits rtx3060 \([\d.]+ of 11\.\d GiB", first)
    assert re.match(cause + "fits a100_80gb", second)
    assert "tool.py: skipped: not a training program" in rest
    assert rest[-1].startswith("does not fit: 1 of 1 changed training program (predicted; torch")
    spent_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert spent_s < 20  # processor time asked of a pull request that no longer fits

    text = (repository / "r.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| `train.py`")]
    assert len(rows) == 2
    assert "no longer fits rtx3060" in text
    assert "- `tool.py`: not a training program" in text

    log = json.loads((repository / "r.sarif").read_text())
    jsonschema.Draft4Validator(json.loads(SARIF.read_text())).validate(log)
    (found,) = log["runs"][0]["results"]
    assert (found["ruleId"], found["level"]) == ("does-not-fit", "error")
    (place,) = found["locations"]
    assert place["physicalLocation"]["artifactLocation"]["uri"] == "settings.py"
    assert place["physicalLocation"]["region"] == {"startLine": 2}
    assert git(repository, "status", "--porcelain").splitlines() == [
        "M settings.py", " M tool.py", "?? r.md", "?? r.sarif",
    ]  # fmt: skip


def test_of_several_settings_the_largest_is_named_first(review: Run, repository: Path):
    text = TRAIN.replace("gradient_checkpointing=True", "gradient_checkpointing=False")
    text = text.replace("train_batch_size=16", "train_batch_size=24").replace("train.py", "sft.py")
    git(repository, "mv", "train.py", "sft.py")
    written(repository, {"sft.py": text})
    done = review("--base", "main", "--gpu", "rtx4090", "--json")
    found = json.loads(done.stdout)
    (program,) = found["programs"]
    names = [(one["name"], one["path"], one["line"]) for one in program["settings"]]
    assert names == [("gradient_checkpointing", "sft.py", 18), ("micro_batch", "sft.py", 16)]
    first, second = (one["more_bytes"] for one in program["settings"])
    assert first > second > 0
    assert program["gpus"][0]["more_bytes"] > first
    assert done.returncode == 0


def test_a_new_program_has_no_base_and_an_unchanged_one_no_cause(review: Run, repository: Path):
    written(repository, {"new.py": TRAIN})
    git(repository, "add", ".")
    done = review("--base", "main", "new.py", "train.py", "--gpu", "rtx3060", "--quiet")
    assert (done.returncode, done.stdout) == (0, "")
    done = review("--base", "main", "new.py", "train.py", "--gpu", "rtx3060", "--margin", "11GiB")
    new, old, _ = done.stdout.splitlines()
    assert new.startswith("new.py:1: does not fit rtx3060 with its margin (")
    assert old.startswith("train.py:1: still does not fit rtx3060 with its margin (")
    assert done.returncode == 1


def test_the_project_says_what_a_program_does_not(review: Run, repository: Path):
    """Its GPU types, models and settings, by glob; commands have their arguments and launcher."""
    said = """
gpu = "rtx4090"
programs = ["torchrun --nproc-per-node 2 train.py qwen3-0.6b", "tool.py"]
set = {"t*.py" = {max_length = 64}}
"""
    written(repository, {**LONGER, "pyproject.toml": "", "tuner.toml": said})
    done = review("--base", "main", "--json")
    train, tool = json.loads(done.stdout)["programs"]
    assert train["program"] == "torchrun --nproc-per-node 2 train.py qwen3-0.6b"
    assert [one["name"] for one in train["settings"]] == ["max_length"]  # which it has itself
    assert tool["gpus"][0]["refused"].startswith("unsupported trainer")
    assert done.returncode in (1, 4)


def test_a_changed_module_is_part_of_its_program(review: Run, repository: Path):
    """Over several steps, where the program itself didn't change; else it is one by itself."""
    files = {
        "run.py": "from package import start\nstart.main()\n",
        "package/__init__.py": "",
        "package/start.py": TRAIN.replace("from settings", "from .sizes"),
        "package/sizes.py": "LENGTH = 512\n",
        "far/train.py": "from parts import start\n",
        "far/parts/__init__.py": "",
        "far/parts/start.py": TRAIN.replace("from settings", "from .sizes"),
        "far/parts/sizes.py": "LENGTH = 512\n",
    }
    written(repository, files)
    git(repository, "add", ".")
    git(repository, "commit", "-q", "-m", "package")
    written(repository, {"package/sizes.py": "LENGTH = 513\n", "far/parts/start.py": TRAIN})
    done = review("--json")
    found = json.loads(done.stdout)
    assert [one["program"] for one in found["programs"]] == ["far/train.py", "run.py"]
    assert found["programs"][1]["path"] == "package/sizes.py"
    assert found["skipped"] == {}


def test_the_first_commit_has_no_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    from tuner.app.cli.main import run

    written(tmp_path, BASE)
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "tool.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PRE_COMMIT_FROM_REF", raising=False)
    assert run(["review"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert "tool.py: skipped: not a training program" in said
    assert "train.py: skipped: not tracked by git; to review it, git add it" in said
    assert not any(line.startswith("loop.py") for line in said)  # the project excludes it
    assert said[-1] == "no training program changed"  # and nothing was predicted


def test_outside_of_a_repository_it_says_what_to_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    from tuner.app.cli.main import run

    monkeypatch.chdir(tmp_path)
    assert run(["review"]) == 2
    said = capsys.readouterr().err
    assert f"{tmp_path} is not in a git repository" in said
    assert "tuner check --predict" in said


@pytest.mark.parametrize(
    ("files", "options", "code", "said"),
    [
        ({"tool.py": "print(2)\n"}, (), 0, "tool.py: skipped: not a training program"),
        ({"test_train.py": "loss.backward()"}, (), 0, "test_train.py: skipped: a test"),
        ({"loop.py": "loss.backward()"}, (), 0, "loop.py: skipped: excluded"),
        ({"config.yaml": "a: 2"}, (), 0, "config.yaml: skipped: not a training program"),
        ({"other.py": "loss.backward()"}, (), 4, "unknown on rtx3060, a100_80gb: unsupported"),
        ({"other.py": "loss.backward("}, (), 4, "other.py:1: unknown on rtx3060, a100_80gb: "),
        ({"other.py": NO_MODEL}, (), 4, "hint: did you mean 'mistral-7b-v0.3'"),
        ({"tuner.toml": "gpu = 't44'", "pyproject.toml": ""}, (), 2, "tuner.toml: gpu: unknown"),
        (
            {"pyproject.toml": "[tool.tuner]\nset = {'*' = {max_lengthh = 3}}"}, (), 2,
            "pyproject.toml [tool.tuner]: set: unknown parameter 'max_lengthh'; did you mean",
        ),
        ({}, ("--base", "nosuch"), 2, "there is no commit 'nosuch' in this repository"),
        ({}, ("--gpu", "rtx3061"), 2, "did you mean 'rtx3060'"),
        ({}, ("--write", "x.txt"), 2, "the suffix is one of .md, .sarif"),
        ({"pyproject.toml": ""}, ("train.py",), 2, "no GPU type is named"),
        (
            {"pyproject.toml": "[tool.tuner]\ngpu = [1]\nmargin = 3\nset = {a = 1}"}, (), 2,
            "margin = 3 is not a text such as",
        ),
        ({"other.py": UNSAID}, (), 4, "name it in [tool.tuner.set], e.g. max_length"),
        ({"tuner.toml": 'gpu = "t4"'}, (), 2, "keep one of them"),
        ({"pyproject.toml": "[tool.tuner]\ngpus = 't4'"}, (), 2, "did you mean 'gpu'?"),
    ],
)  # fmt: skip
def test_what_a_change_ends_with(
    files: Mapping[str, str], options: tuple[str, ...], code: int, said: str,
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
):  # fmt: skip
    from tuner.app.cli.main import run

    written(repository, files)
    git(repository, "add", ".")
    monkeypatch.chdir(repository)
    monkeypatch.delenv("PRE_COMMIT_FROM_REF", raising=False)
    assert run(["review", "--base", "main", *options]) == code, capsys.readouterr()
    printed = capsys.readouterr()
    assert said in printed.out + printed.err


# -- the pre-commit hook ------------------------------------------------------------------------


def test_the_hook_stops_a_commit_and_names_the_line(light: Path, repository: Path):
    """The manifest's hook in a repository's own configuration, without its installation."""
    manifest = ROOT / ".pre-commit-hooks.yaml"
    subprocess.run([sys.executable, "-m", "pre_commit", "validate-manifest", manifest], check=True)
    (hook,) = yaml.safe_load(manifest.read_text())
    assert hook["language"] == "python"
    local = {**hook, "language": "system", "entry": f"{light}/{hook['entry']}"}
    written(
        repository,
        {
            **LONGER,
            ".pre-commit-config.yaml": yaml.safe_dump(
                {"repos": [{"repo": "local", "hooks": [local]}]}
            ),
        },
    )
    git(repository, "add", ".")
    written(repository, {"settings.py": "LENGTH = 1\n"})  # not staged: it isn't committed either
    done = subprocess.run(
        [sys.executable, "-m", "pre_commit", "run"],
        cwd=repository,
        env={**os.environ, "PRE_COMMIT_HOME": str(light / "pre-commit")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "- exit code: 1" in done.stdout, done.stdout
    (found,) = (line for line in done.stdout.splitlines() if ".py" in line)
    assert re.match(r"settings.py:2: .*max_length 512 -> 8192 .*no longer fits rtx3060", found)


# -- the Action ---------------------------------------------------------------------------------

ACTION = ROOT / "action.yml"

GH = f"""#!{sys.executable}
import os, pathlib, sys
with open(os.environ["GH_LOG"], "a") as log:
    print(*sys.argv[1:], file=log)
if "--paginate" in sys.argv:
    print(os.environ.get("GH_COMMENT", ""))
"""
"""Stands for GitHub's `gh`: it notes what it is asked, and knows one comment."""


class Runner:
    """Runs the shell steps of the Action as GitHub's runner does; its other steps are GitHub's."""

    def __init__(self, folder: Path, tuner: Path, workspace: Path, github: Mapping[str, str]):
        self.folder, self.workspace, self.github = folder, workspace, github
        self.action = yaml.safe_load(ACTION.read_text())
        venv = folder / "temp" / "tuner-venv" / "bin"
        venv.mkdir(parents=True)
        shutil.copy(tuner, venv / "tuner")
        written(folder, {"bin/gh": GH, "output": "", "summary": "", "gh.log": ""})
        (folder / "bin" / "gh").chmod(0o755)

    def run(self, step_id: str, **inputs: str) -> subprocess.CompletedProcess[str]:
        (step,) = (one for one in self.action["runs"]["steps"] if one["id"] == step_id)
        values = {name: str(one["default"]) for name, one in self.action["inputs"].items()}
        assert inputs.keys() <= values.keys()
        known = {f"inputs.{name}": text for name, text in {**values, **inputs}.items()}

        def filled(text: str) -> str:
            names = re.compile(r"\$\{\{(.+?)\}\}")
            while names.search(text):
                text = names.sub(lambda found: value(found[1]), text)
            return text

        def value(expression: str) -> str:
            parts = map(str.strip, expression.split("||"))
            return next(filter(None, ({**known, **self.github}[part] for part in parts)), "")

        environment = {
            **{name: v for name, v in os.environ.items() if name != "PRE_COMMIT_FROM_REF"},
            **{name: filled(text) for name, text in step.get("env", {}).items()},
            "PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "RUNNER_TEMP": str(self.folder / "temp"),
            "GITHUB_ACTION_PATH": str(ROOT),
            "GITHUB_OUTPUT": str(self.folder / "output"),
            "GITHUB_STEP_SUMMARY": str(self.folder / "summary"),
            "GITHUB_REPOSITORY": "owner/name",
            "GH_LOG": str(self.folder / "gh.log"),
        }
        bash = ("bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"])
        where = self.workspace / filled(step.get("working-directory", "."))
        return subprocess.run(
            bash, cwd=where, env=environment, capture_output=True, text=True, check=False
        )

    def read(self, name: str) -> str:
        return (self.folder / name).read_text()


@pytest.fixture
def runner(tmp_path: Path, light: Path, repository: Path) -> Runner:
    """A runner with the checkout of a pull request, which has one commit as `actions/checkout`."""
    written(repository, LONGER)
    git(repository, "commit", "-q", "-a", "-m", "change")
    base = git(repository, "rev-parse", "main")
    git(repository, "config", "uploadpack.allowAnySHA1InWant", "true")  # as GitHub has it
    workspace = tmp_path / "workspace"
    clone = ("clone", "-q", "--depth=1", "--branch=change", f"file://{repository}", str(workspace))
    git(tmp_path, *clone)
    github = {
        "github.event.pull_request.base.sha": base,
        "github.event.pull_request.number": "7",
        "github.event.before": "",
        "github.event.repository.default_branch": "main",
        "github.token": "none",
    }
    return Runner(tmp_path / "runner", light / "tuner", workspace, github)


def test_the_action_is_one_that_github_takes():
    schema = (sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-actions")
    subprocess.run([*schema, ACTION], check=True, stdout=subprocess.DEVNULL)


def test_the_action_reviews_a_pull_request(runner: Runner):
    done = runner.run("review", comment="true")
    assert done.returncode == 1, done.stderr
    (annotation,) = (line for line in done.stdout.splitlines() if line.startswith("::"))
    assert annotation.startswith("::error file=settings.py,line=2,title=tuner::+20.7 GiB: max_len")
    summary = runner.folder / "temp" / "tuner-review.md"
    outputs = dict(line.split("=", 1) for line in runner.read("output").splitlines())
    assert outputs["exit-code"] == "1"
    assert Path(outputs["markdown"]) == summary
    assert json.loads(Path(outputs["sarif"]).read_text())["runs"][0]["results"]
    assert runner.read("summary") == summary.read_text()
    comments = "repos/owner/name/issues/7/comments"
    listed, posted = runner.read("gh.log").splitlines()
    assert listed.startswith(f"api --paginate {comments} ")
    assert posted == f"api {comments} -F body=@{summary}"


def test_the_action_writes_its_comment_again(runner: Runner, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GH_COMMENT", "42")
    assert runner.run("review", comment="true", gpu="a100_80gb").returncode == 0
    posted = runner.read("gh.log").splitlines()[1]
    assert posted.startswith("api -X PATCH repos/owner/name/issues/comments/42 -F body=@")


def test_the_action_of_a_new_branch_compares_with_the_default_one(runner: Runner):
    runner.github = {**runner.github, "github.event.pull_request.base.sha": "0" * 40}
    done = runner.run("review", gpu="a100_80gb", margin="70GiB")
    assert done.returncode == 1, done.stderr
    assert "no longer fits a100_80gb" in runner.read("summary")
    assert runner.read("gh.log") == ""


def test_the_action_ends_with_bad_input(runner: Runner):
    assert runner.run("review", gpu="nosuch").returncode == 2
    assert runner.read("output") == "exit-code=2\n"


def test_the_action_keeps_its_installation_until_tuner_changes(runner: Runner):
    assert runner.run("source").returncode == 0
    assert re.fullmatch(r"hash=[0-9a-f]{16}\n", runner.read("output"))
