"""Changed programs really run: as if the change had been written into their files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from started import run_python

from tuner.program.edit.source import TextEdit
from tuner.program.edit.trying import edited
from tuner.program.launch import runnable
from tuner.program.program import Program, read_program
from tuner.program.settings import whole

SCRIPT = """\
from __future__ import annotations
import json, sys, inspect, pickle
import beside
BATCH_SIZE = 4
class Here: pass
def f(): return BATCH_SIZE
print(json.dumps([
    BATCH_SIZE, __file__, sys.argv, sys.path[0], __name__, beside.NAME, __doc__,
    type(pickle.loads(pickle.dumps(Here()))).__name__, inspect.getsourcefile(f),
]))
if sys.argv[1:] == ["fail"]:
    raise ValueError("wanted")
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "beside.py").write_text("NAME = 'beside'\n")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "project"


def changed(program: Program, old: str, new: str) -> Program:
    """The program with `new` for `old` in its files; those that it reads are among them."""
    edits = [
        (word, TextEdit(at, at + len(old), new))
        for word, source in program.files.items()
        if (at := source.data.decode().find(old)) >= 0
    ]
    return edited(program, edits)


def with_batch(words: list[str], size: int) -> Program:
    read = read_program(words)
    for name in ("BATCH_SIZE", "batch_size"):
        read = changed(read, f"{name} = 4", f"{name} = {size}")
    return read


def run(program: Program) -> subprocess.CompletedProcess[str]:
    with runnable(program) as command:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=False,
            env={**os.environ, "PYTHONIOENCODING": "utf-8"},
        )  # fmt: skip
    assert not list(Path(os.environ["TMPDIR"]).iterdir())
    return done


def test_a_changed_script_sees_what_it_would_see_in_its_own_place(folder):
    script = folder / "train.py"
    script.write_text(SCRIPT)
    after = with_batch(["project/train.py", "a", "--b=1"], 9)
    done = run(after)
    assert done.returncode == 0, done.stderr
    plain = run_python("project/train.py", "a", "--b=1", timeout=60, check=True)
    changed, unchanged = json.loads(done.stdout), json.loads(plain.stdout)
    assert changed[0] == 9
    assert changed[2] == ["project/train.py", "a", "--b=1"]
    assert changed[3:8] == [str(folder), "__main__", "beside", None, "Here"]
    assert changed[1:] == [str(script), *unchanged[2:8], str(script)]
    assert script.read_text() == SCRIPT


def test_an_unchanged_script_is_run_itself(folder):
    (folder / "train.py").write_text(SCRIPT)
    read = read_program(["project/train.py"])
    with runnable(read) as command:
        assert command == [sys.executable, "project/train.py"]


def test_an_error_names_the_line_of_the_original(folder):
    (folder / "train.py").write_text(SCRIPT)
    after = with_batch(["project/train.py", "fail"], 9)
    done = run(after)
    assert done.returncode == 1
    assert f'File "{folder / "train.py"}", line 12, in <module>' in done.stderr
    assert 'raise ValueError("wanted")' in done.stderr


def test_the_copies_go_when_the_run_breaks(folder):
    (folder / "train.py").write_text(SCRIPT)
    after = with_batch(["project/train.py"], 9)
    with pytest.raises(KeyError), runnable(after):
        raise KeyError
    assert not list(Path(os.environ["TMPDIR"]).iterdir())


def test_a_script_with_a_mark_before_it_and_windows_lines_runs(folder):
    data = b"\xef\xbb\xbf" + SCRIPT.replace("\n", "\r\n").encode()
    (folder / "train.py").write_bytes(data)
    after = with_batch(["project/train.py"], 9)
    done = run(after)
    assert json.loads(done.stdout)[0] == 9
    assert (folder / "train.py").read_bytes() == data


def cell(source: str) -> dict[str, object]:
    return {"cell_type": "code", "metadata": {}, "outputs": [], "source": source.splitlines(True)}


def test_a_notebook_runs_cell_by_cell(folder):
    cells = [
        cell("!pip install nothing\n%matplotlib inline"),
        cell("%%bash\nexit 1"),
        cell("from __future__ import annotations\nbatch_size = 4\nname = 'süß 🍰'"),
        {"cell_type": "markdown", "source": "batch_size = 5"},
        cell("if 'colab' in str(get_ipython()):\n    exit(1)\ndisplay('shown')"),
        cell("%%time\nimport beside, sys\nprint(batch_size, name, beside.NAME, sys.argv)"),
        cell("print('before')\nraise ValueError(batch_size)"),
        cell("print('never')"),
    ]
    data = json.dumps({"cells": cells, "nbformat": 4}).encode()
    (folder / "n.ipynb").write_bytes(data)
    original = read_program(["project/n.ipynb", "x"])
    after = changed(original, "batch_size = 4", "batch_size = 9")
    done = run(after)
    assert done.stdout.splitlines() == [
        "shown", "9 süß 🍰 beside ['project/n.ipynb', 'x']", "before",
    ]  # fmt: skip
    assert "ValueError: 9" in done.stderr
    assert f'File "{folder / "n.ipynb"}[7]", line 2' in done.stderr
    assert "4 süß" in run(original).stdout
    assert (folder / "n.ipynb").read_bytes() == data


@pytest.mark.parametrize("word", ["project/c.yaml", "--config=project/c.yaml"])
def test_a_file_of_settings_is_copied_for_the_command(word, folder):
    (folder / "train.py").write_text("import sys\nprint(open(sys.argv[1].split('=')[-1]).read())\n")
    (folder / "c.yaml").write_text("batch_size: 4\n")
    original = read_program(["project/train.py", word])
    after = changed(original, "batch_size: 4", "batch_size: 9")
    assert run(after).stdout.strip() == "batch_size: 9"
    assert run(original).stdout.strip() == "batch_size: 4"
    assert (folder / "c.yaml").read_text() == "batch_size: 4\n"


def test_another_launcher_gets_the_changed_script(folder):
    (folder / "train.py").write_text(SCRIPT)
    after = with_batch([sys.executable, "-u", "project/train.py", "a"], 9)
    done = run(after)
    assert json.loads(done.stdout)[:3] == [9, str(folder / "train.py"), ["project/train.py", "a"]]


def test_changed_modules_and_settings_reach_what_imports_and_opens_them(folder):
    (folder / "inner").mkdir()
    (folder / "inner" / "__init__.py").write_text("")
    module = "import pathlib\nBATCH_SIZE = 4\nFILE = __file__\n"
    (folder / "inner" / "settings.py").write_text(module)
    (folder / "conf").mkdir()
    yaml_text = "accumulate_grad_batches: 2\n"
    (folder / "conf" / "base.yaml").write_text(yaml_text)
    (folder / "train.py").write_text(
        "import sys, json\nfrom pathlib import Path\nfrom inner import settings\n"
        "import inner.settings\n"
        "place = Path(__file__).parent / 'conf' / 'base.yaml'\n"
        "print(json.dumps([settings.BATCH_SIZE, settings.FILE, place.read_text(),"
        " open(place).read(), open(str(place), 'rb').read().decode(), sys.argv]))\n"
        "place.with_name('new.txt').write_text('new')\n"
    )
    read = whole(read_program(["project/train.py", "a"]))
    assert read.mentioned == {
        "project/conf/base.yaml", "project/inner/__init__.py", "project/inner/settings.py",
    }  # fmt: skip
    after = changed(changed(read, "BATCH_SIZE = 4", "BATCH_SIZE = 9"), "batches: 2", "batches: 7")
    done = run(after)
    assert done.returncode == 0, done.stderr
    new = "accumulate_grad_batches: 7\n"
    own = str(folder / "inner" / "settings.py")
    assert json.loads(done.stdout) == [9, own, new, new, new, ["project/train.py", "a"]]
    assert json.loads(run(read).stdout)[0] == 4
    assert (folder / "inner" / "settings.py").read_text() == module
    assert (folder / "conf" / "base.yaml").read_text() == yaml_text
    assert (folder / "conf" / "new.txt").read_text() == "new"


@pytest.mark.parametrize("name", ["BATCH_SIZE", "accumulation_steps"])
def test_a_module_that_is_run_by_its_name_is_run_with_the_change(name, tmp_path, monkeypatch):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "other.py").write_text("accumulation_steps = 4\n")
    (tmp_path / "package" / "train.py").write_text(
        "import sys\nfrom . import other\nBATCH_SIZE = 4\n"
        "print(__name__, __package__, BATCH_SIZE, other.accumulation_steps, sys.argv, sys.path[0])"
    )
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    words = [sys.executable, "-m", "package.train", "-x"]
    plain = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout
    after = changed(whole(read_program(words)), f"{name} = 4", f"{name} = 9")
    with runnable(after) as command:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    wanted = {"BATCH_SIZE": "package 9 4", "accumulation_steps": "package 4 9"}[name]
    assert done.stdout == plain.replace("package 4 4", wanted)


def test_a_notebook_may_wait_outside_of_functions(folder):
    cells = [
        cell("import asyncio\nbatch_size = 4\nawait asyncio.sleep(0)\nqueue = asyncio.Queue()"),
        cell("await queue.put(batch_size)\nprint(await queue.get())"),
    ]
    (folder / "n.ipynb").write_text(json.dumps({"cells": cells, "nbformat": 4}))
    after = with_batch(["project/n.ipynb"], 9)
    assert run(after).stdout == "9\n"
