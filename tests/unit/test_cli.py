"""The commands that need no search: answers, JSON, and one clear message for bad input."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cli_samples import contents, make_trial, write_samples
from hypothesis import given
from hypothesis import strategies as st
from test_architecture import HEAVY

from tuner.app.cli.main import COMMANDS, run
from tuner.core.units import significant
from tuner.report.terminal.progress import _PlainLines, progress_line
from tuner.searches.progress import Progress
from tuner.searches.store import ResultsFolder

ROOT = Path(__file__).parents[2]
TARGET = ["--space", "tiny.yaml", "--gpu", "a6000"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    write_samples(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    return tmp_path


@pytest.fixture
def journal(folder):
    """Three trials that fit, one too large; the fastest is outside the floors."""
    trials = [
        make_trial(folder, 20, 100, micro_batch=1, precision="fp16"),
        make_trial(folder, 40, 300, micro_batch=2, precision="bf16"),
        make_trial(folder, 60, 500, micro_batch=4, precision="bf16"),
        make_trial(folder, 30, 900, micro_batch=4, precision="bf16", lora_rank=4),
    ]
    with ResultsFolder(Path("results"), "tiny", "a6000").writer() as writer:
        for trial in trials:
            writer.append(trial)
    return trials


def as_json(capsys, *arguments: str):
    assert run([*arguments, "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return json.loads(captured.out)


class TestQuickCommands:
    def test_answer_without_the_heavy_libraries(self, journal):
        """All in one process: what loads one of them fails there, and is named."""
        asked = [
            ["--help"],
            *([name, "--help"] for name in COMMANDS),
            ["gpus"],
            ["gpus", "a6000"],
            ["models"],
            ["spaces"],
            ["spaces", "qlora27b"],
            ["best", *TARGET],
            ["show", *TARGET],
            ["show", *TARGET, "run1"],
        ]
        code = (
            "import contextlib, io, json, sys\n"
            "from tuner.app.cli.main import main\n"
            "for arguments in json.loads(sys.argv[1]):\n"
            "    sys.argv = ['tuner', *arguments]\n"
            "    with contextlib.redirect_stdout(io.StringIO()) as printed:\n"
            "        try:\n"
            "            main()\n"
            "        except SystemExit as end:\n"
            "            code = end.code or 0\n"
            f"    heavy = {set(HEAVY)!r} & set(sys.modules)\n"
            "    assert not heavy, (arguments, heavy)\n"
            "    assert code in (0, 2), (arguments, code)\n"
            "    assert printed.getvalue() or arguments[-1] == 'run1', arguments  # is ambiguous\n"
            "print('all asked')"
        )
        done = python("-c", code, json.dumps(asked))
        assert (done.returncode, done.stdout) == (0, "all asked\n"), done.stderr

    def test_reader_that_goes_away_is_no_error(self, folder):
        # The pipe is closed before anything is written to it.
        read_end, write_end = os.pipe()
        os.close(read_end)
        done = python("-m", "tuner", "gpus", "--json", stdout=write_end)
        os.close(write_end)
        assert done.stderr == ""
        assert done.returncode == 141


def python(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    options.setdefault("stdout", subprocess.PIPE)
    options |= {"text": True, "stderr": subprocess.PIPE, "env": environment}
    return subprocess.run([sys.executable, *arguments], check=False, **options)


class TestLists:
    def test_every_gpu_is_listed_with_its_whole_id(self, capsys, monkeypatch):
        monkeypatch.setenv("COLUMNS", "80")
        assert run(["gpus"]) == 0
        text = capsys.readouterr().out
        listed = as_json(capsys, "gpus")
        assert len(listed) >= 23
        for gpu in listed:
            assert any(line.startswith(gpu["id"] + " ") for line in text.splitlines()), gpu["id"]

    def test_spaces_count_their_configurations(self, capsys):
        by_name = {space["name"]: space for space in as_json(capsys, "spaces")}
        assert by_name["qlora27b"]["configurations"] >= 5000
        space = as_json(capsys, "spaces", "qlora27b")
        assert space["configurations_within_floors"] < space["configurations"]
        assert run(["spaces", "qlora27b"]) == 0
        assert "lora_rank >= 128" in capsys.readouterr().out


class TestBestAndShow:
    def test_text_says_predicted_memory_margin_speed_time_and_cost(self, journal, capsys):
        assert run(["best", *TARGET, "--price", "2"]) == 0
        text = capsys.readouterr().out
        for part in ("predicted", "40.00 GiB of 47.40 GiB", "1.00 GiB headroom", "USD"):
            assert part in text
        assert "0.500 samples/s, 300 tokens/s" in " ".join(text.split())
        assert "vs. baseline 3 times as fast" in " ".join(text.split())
        assert "at 2 USD per hour" in " ".join(text.split())

    def test_text_shows_what_the_space_sets_or_derives_and_no_defaults(self, journal, capsys):
        assert run(["best", *TARGET]) == 0
        text = capsys.readouterr().out
        rest = text.partition("  rest ")[2].partition("  memory ")[0].split()
        # `tiny.yaml` fixes one and derives the other; two more follow from its knobs.
        assert sorted(word.partition("=")[0] for word in rest) == [
            "effective_batch", "grad_accum", "lora_alpha", "mixed_precision",
        ]  # fmt: skip
        best = as_json(capsys, "best", *TARGET)
        assert "lora_dropout" in best["configuration"]  # which is complete all the same

    def test_show_prints_the_front_and_its_json_has_whole_records(self, journal, capsys):
        assert run(["show", *TARGET]) == 0
        text = capsys.readouterr().out
        assert "Pareto front (predicted)" in text
        assert "40.00 GiB" in text
        titles = next(line for line in text.splitlines() if "samples/s" in line).split()
        assert titles[:3] == ["memory", "samples/s", "epoch"]
        assert "0.500" in text
        front = as_json(capsys, "show", *TARGET)["front"]
        assert [r["configuration"]["micro_batch"] for r in front] == [1, 2]
        assert {r["predicted"]["source"] for r in front} == {"predicted"}

    def test_show_finds_a_trial_by_the_beginning_of_its_id(self, journal, capsys):
        trial = journal[1]
        shown = as_json(capsys, "show", *TARGET, trial.trial_id[:-1])
        assert shown["trial_id"] == trial.trial_id
        assert shown["fits"] is True
        assert run(["show", *TARGET, journal[2].trial_id]) == 0
        text = capsys.readouterr().out
        assert "does not fit: 60.00 GiB of 47.40 GiB, 12.60 GiB too much" in text
        assert "weights" in text

    def test_results_for_other_memory_are_not_taken_for_these(self, journal, capsys):
        assert run(["best", *TARGET, "--gpu-memory", "24GiB"]) == 3
        assert "47.40 GiB" in capsys.readouterr().err


class TestEstimate:
    SETTINGS = ("--set", "micro_batch=2", "--set", "max_length=32", "--set", "precision=bf16")

    def test_json_has_what_scripts_read(self, folder, capfd):
        assert run(["estimate", *TARGET, *self.SETTINGS, "--json"]) == 0
        captured = capfd.readouterr()
        assert captured.err == ""
        found = json.loads(captured.out)
        memory = found["memory"]
        assert found["fits"] is True
        assert found["source"] == "predicted"
        assert found["gpu"] == "a6000"
        assert memory["peak_allocated_bytes"] <= memory["peak_reserved_bytes"]
        assert memory["peak_reserved_bytes"] < memory["device_bytes"]
        assert sum(memory["breakdown"].values()) == memory["device_bytes"]
        # Two layers, rank 8, seven linear layers: r * (in + out) each, in and out of CONFIG.
        linears = 2 * 2 * 64 + 2 * (64 + 32) + 3 * (64 + 128)
        assert found["trainable_params"] == 2 * 8 * linears
        assert found["total_params"] > found["trainable_params"]
        assert found["it_per_s"] == pytest.approx(2 / found["step_s"])
        assert found["samples_per_s"] == pytest.approx(4 / found["step_s"])
        assert found["tokens_per_s"] > 0
        assert 0 < found["mfu"] < 1
        assert found["configuration"]["micro_batch"] == 2
        assert found["versions"]["torch"]

    def test_text_has_the_answer_and_the_breakdown(self, folder, capfd):
        assert run(["estimate", *TARGET, *self.SETTINGS]) == 0
        captured = capfd.readouterr()
        assert captured.err == ""
        lines = captured.out.splitlines()
        assert lines[0].startswith("fits: 0.")
        assert len(lines) <= 12
        assert run(["estimate", *TARGET, *self.SETTINGS, "--verbose"]) == 0
        everything = capfd.readouterr().out
        assert everything.splitlines()[0] == lines[0]
        for part in ("predicted", "weights", "tokens/s", "limited by", "% "):
            assert part in everything


BAD_INPUT = {
    "unknown command": (["serach"], ["'serach'", "'search'"]),
    "unknown option": (["search", "--spcae", "x"], ["'--spcae'", "'--space'"]),
    "option of the program": (
        ["check", "train.py", "--bs", "1", "--gpu", "t4"],
        ["tuner check --gpu t4 -- train.py --bs 1"],
    ),
    "space without its suffix": (["search", "--space", "tiny", "--gpu", "t4"], ["tiny.yaml"]),
    "missing option": (["search", "--space", "tiny.yaml"], ["--gpu"]),
    "neither space nor model": (["estimate", "--gpu", "a6000"], ["--space", "--model"]),
    "unknown knob": (
        ["estimate", *TARGET, "--set", "micro_bach=4"],
        ["'micro_bach'", "'micro_batch'"],
    ),
    "bf16 on a t4, set": (
        ["search", "--space", "tiny.yaml", "--gpu", "t4", "--set", "precision=bf16"],
        ["bf16", "Turing", "fp16"],
    ),
    "unwritable results": (
        ["search", *TARGET, "--results", "tiny.yaml/results"],
        ["tiny.yaml/results", "--results"],
    ),
    "memory without unit": (["search", *TARGET, "--gpu-memory", "80"], ["'80'", "80GiB"]),
}


class TestBadInput:
    @pytest.mark.parametrize("case", BAD_INPUT)
    def test_one_message_with_the_value_and_what_is_meant(self, folder, capfd, case):
        arguments, expected = BAD_INPUT[case]
        before = contents(folder)
        assert run(arguments) == 2
        captured = capfd.readouterr()
        assert captured.out == ""
        message = " ".join(captured.err.split())
        assert message.lower().count("error: ") == 1
        assert "Traceback" not in message
        for text in expected:
            assert text in message
        assert contents(folder) == before
        assert not (folder / "results").exists()

    def test_bugs_keep_their_traceback(self, folder, monkeypatch):
        def bug(*arguments, **options):
            raise ZeroDivisionError

        monkeypatch.setattr("tuner.app.cli.catalogues.load_catalogue", bug)
        with pytest.raises(ZeroDivisionError):
            run(["gpus"])


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.18612, "0.186"), (0.19, "0.190"), (0.99996, "1.00"), (285.7, "286"), (0, "0"),
     (12345.6, "12,300"), (0.000123456, "0.000123"), (-1.2345, "-1.23"), (1000, "1,000")],
)  # fmt: skip
def test_three_digits_count(value, text):
    assert significant(value) == text


def progress(**changes) -> Progress:
    values = {"done": 3, "running": 2, "oom": 1, "failed": 0, "reused": 0, "total": 48,
              "best": None, "elapsed_s": 1.0, "eta_s": 90.0}  # fmt: skip
    return Progress(**{**values, **changes})


class TestProgress:
    def test_line_says_done_running_out_of_memory_best_and_time_left(self, folder):
        best = make_trial(folder, 20, 312.4, micro_batch=1)
        assert progress_line(progress(best=best)) == (
            "3/48 done, 2 running, 1 out of memory, best 0.521 samples/s, 1 min 30 s left"
        )

    @given(
        st.builds(
            Progress,
            done=st.integers(0, 9999), running=st.integers(0, 999), oom=st.integers(0, 9999),
            failed=st.integers(0, 9999), reused=st.just(0), total=st.integers(1, 9999),
            best=st.none(), elapsed_s=st.floats(0, 1e6), eta_s=st.none() | st.floats(0, 1e7),
            verified=st.integers(0, 99),
        )
    )  # fmt: skip
    def test_line_fits_80_columns(self, state):
        assert len(progress_line(state)) <= 80

    def test_plain_lines_come_with_news_and_not_too_often(self, folder, capsys):
        now = [0.0]
        lines = _PlainLines(clock=lambda: now[0])
        lines(progress(done=0, oom=0))
        lines(progress(done=0, oom=0, running=1))  # nothing new
        now[0] = 1.0
        lines(progress(done=1))  # too soon
        best = make_trial(folder, 20, 312.4, micro_batch=1)
        lines(progress(done=2, best=best))  # better
        now[0] = 7.0
        lines(progress(done=3, best=best))
        lines(progress(done=48, best=best))  # the last one
        printed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
        assert printed == ["0/48", "2/48", "3/48", "48/48"]
