"""Exit codes, the same in every command: the table of `tuner.core.errors`."""

from pathlib import Path
from types import SimpleNamespace

import click
import pytest
from cli_samples import command_of, make_trial, write_samples

from tuner.app.cli import main
from tuner.app.cli import tune as searching
from tuner.app.cli.main import COMMANDS, run
from tuner.app.search.run import SearchedGpu
from tuner.core.errors import EXIT_CODES, InputError, NothingFitsError, UnavailableError
from tuner.searches.options import SearchOptions
from tuner.searches.store import ResultsFolder

TARGET = ["--space", "tiny.yaml", "--gpu", "a6000"]
NEEDS = {"export": ["--format", "trl"], "apply": ["train.py", "--yes"], "estimate": []}
READERS = ("best", "show", "report", "export", "apply")
"""Commands that read what a search left."""
ENDINGS = {
    "answer": (None, 0),
    "nothing fits": (NothingFitsError("none of 3 fits"), 1),
    "bad input": (InputError("no such knob"), 2),
    "missing": (UnavailableError("no GPU"), 3),
    "interrupted": (KeyboardInterrupt(), 130),
    "aborted": (click.Abort(), 130),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_command_ends_with_the_code_of_what_happened(capsys, monkeypatch, ending):
    raised, code = ENDINGS[ending]

    def callback(*_: object, **__: object) -> None:
        if raised is not None:
            raise raised

    command = command_of("search")
    monkeypatch.setattr(command, "callback", callback)
    monkeypatch.setattr(command, "params", [])
    assert run(["search"]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    if isinstance(raised, KeyboardInterrupt | click.Abort):
        assert captured.err.strip() == "interrupted"  # on a line below the ^C
    elif raised is not None:
        assert captured.err == f"error: {raised}\n"


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_an_unknown_option_is_bad_input(capsys, name):
    assert run([*name.split(), "--no-such-option"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "--no-such-option" in captured.err


@pytest.fixture
def folder(tmp_path, monkeypatch):
    write_samples(tmp_path)
    (tmp_path / "train.py").write_text("micro_batch = 1\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def journal(folder: Path, *sizes_gib: float) -> None:
    with ResultsFolder(Path("results"), "tiny", "a6000").writer() as writer:
        for number, size in enumerate(sizes_gib):
            writer.append(make_trial(folder, size, 100 + number, micro_batch=2**number))


@pytest.mark.parametrize("name", READERS)
def test_nothing_fits_is_one(folder, capsys, name):
    journal(folder, 60, 70)
    assert run([name, *TARGET, *NEEDS.get(name, [])]) == 1
    if name != "report":  # which is written all the same, and says so itself
        captured = capsys.readouterr()
        assert "none of the 2 configurations fits" in " ".join(captured.err.split())


@pytest.mark.parametrize("name", READERS)
def test_no_search_yet_is_three(folder, capsys, name):
    assert run([name, *TARGET, *NEEDS.get(name, [])]) == 3
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "tuner search" in captured.err  # what to do


@pytest.mark.parametrize(("failure", "code"), [(None, 1), (UnavailableError("GPU lost"), 3)])
def test_a_search_that_broke_off_does_not_say_that_nothing_fits(monkeypatch, failure, code):
    result = SimpleNamespace(interrupted=False, failure=failure)
    found = SearchedGpu(plan=None, result=result, view=SimpleNamespace(best=None))
    monkeypatch.setattr("tuner.app.search.plan.make_plans", lambda *_: [])
    monkeypatch.setattr("tuner.app.search.run.run_plans", lambda *_, **__: [found, found])
    monkeypatch.setattr(searching, "print_all_searched", lambda *_, **__: None)
    monkeypatch.setattr("tuner.app.cli.options.typed", list)
    done = searching.run_search([], SearchOptions(), as_json=False, quiet=True)
    assert done == code


def test_a_fault_of_our_own_is_not_the_code_of_what_does_not_fit(capsys, monkeypatch):
    def fail(*_: object) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(main, "run", fail)
    monkeypatch.setattr(main.signal, "signal", lambda *_: None)  # what tests start inherits it
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 3
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_the_documentation_has_the_table_of_codes():
    page = (Path(__file__).parents[1] / "docs/reference/index.md").read_text()
    for code, text in EXIT_CODES.items():
        assert f"| {code} | {text} |" in page
