"""`import tuner`: the engine of the command line for programs and notebooks."""

import base64
import dataclasses
import gc
import html
import json
import warnings
from pathlib import Path

import pytest
from base_install import without_torch
from cli_samples import make_trial, write_samples
from pages import Page
from search_fakes import InProcess, let_emulate, write_wide
from started import run_python

import tuner
from tuner.app.api.result import SearchResult
from tuner.app.api.searching import SearchArguments
from tuner.app.cli.main import run
from tuner.app.target import load_targets
from tuner.searches.options import SearchOptions
from tuner.searches.view import build_view

ROOT = Path(__file__).parents[1]
FP16 = {"precision": "fp16"}


@pytest.fixture
def searches(tmp_path, monkeypatch) -> InProcess:
    write_wide(tmp_path)
    monkeypatch.chdir(tmp_path)
    return let_emulate(monkeypatch)


class TestImport:
    def test_is_light_and_names_what_it_offers(self):
        code = (
            "import sys, tuner\n"
            "heavy = {'torch', 'ray', 'optuna', 'numpy', 'click', 'rich', 'yaml', 'pandas'}\n"
            "print(sorted(heavy & set(sys.modules)), sorted(tuner.__all__) == dir(tuner))\n"
            "for name in tuner.__all__: getattr(tuner, name)\n"
            "print(sorted({'torch', 'ray', 'optuna', 'pandas'} & set(sys.modules)))\n"
        )
        done = run_python("-c", code, cwd=ROOT, check=True)
        first, second = done.stdout.splitlines()
        assert first == "[] True"
        assert second == "[]"

    def test_what_is_not_there_is_an_attribute_error(self):
        with pytest.raises(AttributeError, match="'serach'"):
            _ = tuner.serach

    def test_has_an_argument_for_each_option_of_a_search(self):
        options = {field.name for field in dataclasses.fields(SearchOptions)}
        others = {"model", "gpu_memory", "price", "progress", "on_progress"}
        assert set(SearchArguments.__annotations__) == options | others
        for name in SearchArguments.__annotations__:
            assert f"`{name}" in tuner.search.__doc__, name

    def test_an_unknown_argument_is_a_type_error_that_names_it(self):
        with pytest.raises(TypeError, match=r"'trails'; did you mean 'trials'\?"):
            tuner.search("wide.yaml", gpu="a6000", trails=3)
        with pytest.raises(TypeError, match=r"'xyzzy'; help\(tuner.search\)"):
            tuner.search("wide.yaml", gpu="a6000", xyzzy=3)


class TestSearch:
    def test_finds_what_the_command_line_finds(self, searches, capsys):
        result = tuner.search("wide.yaml", gpu="a6000", trials=3, settings=FP16, results="mine")
        assert run(
            ["search", "--space", "wide.yaml", "--gpu", "a6000", "--trials", "3", "--json",
             "--set", "precision=fp16", "--results", "theirs"]
        ) == 0  # fmt: skip
        answer = json.loads(capsys.readouterr().out)
        assert answer["best"]["configuration"] == result.best().configuration.to_dict()
        front = [r.configuration.to_dict() for r in result.front]
        assert [r["configuration"] for r in answer["front"]] == front
        assert (result.space, result.gpu.id, result.source) == ("wide", "a6000", "predicted")
        assert (result.stopped_by, result.interrupted) == ("exhausted", False)
        assert len(result.records) == 4
        assert (answer["candidates"], answer["trials"]) == (4, 0)
        call = "tuner.search('wide.yaml', gpu='a6000', trials=3, settings={'precision': 'fp16'})"
        assert call in html.unescape(result.report.read_text())

    @pytest.mark.slow
    def test_by_default_leaves_nothing_behind(self, searches, tmp_path):
        result = tuner.search("wide.yaml", gpu="a6000", trials=1, settings=FP16)
        folder = result.folder
        assert result.report.exists()
        assert result.journal.exists()
        assert not (tmp_path / "results").exists()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            del result
            gc.collect()
        assert not folder.exists()

    def test_prints_nothing_where_nobody_looks_and_tells_who_asks(self, searches, capfd):
        told = []
        tuner.search("wide.yaml", gpu="a6000", trials=2, settings=FP16, on_progress=told.append)
        assert capfd.readouterr() == ("", "")
        assert [state["a6000"].done for state in told] == [1, 2][: len(told)]
        assert told
        tuner.search("wide.yaml", gpu="a6000", trials=2, settings=FP16, progress=True)
        assert f"{len(told)}/{len(told)} done" in capfd.readouterr().err

    def test_what_the_callback_raises_ends_the_search(self, searches):
        def enough(states):
            raise RuntimeError("enough")

        with pytest.raises(RuntimeError, match="enough"):
            tuner.search("wide.yaml", gpu="a6000", settings=FP16, on_progress=enough, results="r")
        assert len(tuner.load_results("wide.yaml", gpu="a6000", results="r").records) == 1

    @pytest.mark.parametrize(
        ("arguments", "error", "part"),
        [
            ({"gpu": []}, tuner.InputError, "names no GPU type"),
            ({"gpu": "a6000", "mode": "measure"}, tuner.UnavailableError, "measure"),
            ({"gpu": "a6000", "margin": 3}, tuner.InputError, "0.03"),
            ({"gpu": "a6000", "gpu_memory": -1}, tuner.InputError, "40GiB"),
            ({"gpu": "l4", "settings": FP16}, tuner.NothingFitsError, "smallest needs"),
        ],
    )
    def test_errors_are_those_of_the_command_line(
        self, searches, monkeypatch, arguments, error, part
    ):
        from device_fakes import pretend

        pretend(monkeypatch)
        with pytest.raises(error) as caught:
            tuner.search("wide.yaml", **arguments)
        assert part in str(caught.value)
        assert isinstance(caught.value, tuner.TunerError)
        assert searches.calls == []

    def test_several_types_are_a_mapping_with_a_comparison(self, searches):
        space = tuner.load_space("wide.yaml")
        found = tuner.search(
            space, gpu=["h100_sxm", "l4", "a6000"], trials=2, settings=FP16, results="r"
        )
        assert [*found] == ["h100_sxm", "a6000"]
        assert "predicted to fit" in found.refused["l4"]
        assert [a.gpu.id for a in found.comparison()] == ["a6000", "h100_sxm", "l4"]
        assert found.best().gpu.id == "a6000"
        only = found.comparison(max_memory="20GiB")
        assert [answer.best for answer in only] == [None] * 3
        with pytest.raises(tuner.NothingFitsError, match="a6000"):
            found.best(max_memory="20GiB")
        frame = found.to_pandas()
        assert list(frame["gpu"]) == ["h100_sxm"] * 4 + ["a6000"] * 4
        read = tuner.load_results("wide.yaml", gpu="all", results="r")
        assert sorted(read) == ["a6000", "h100_sxm"]
        assert tuner.load_results("wide.yaml", gpu="a6000,h100_sxm", results="r").best().gpu.id == (
            "a6000"
        )
        for text in (repr(found), found._repr_html_()):
            assert "a6000" in text
            assert "h100_sxm" in text
            assert "l4" in text


@pytest.fixture
def result(tmp_path, monkeypatch) -> SearchResult:
    """A journal of three trials, read: nothing is predicted."""
    write_samples(tmp_path)
    monkeypatch.chdir(tmp_path)
    target = load_targets("tiny.yaml", ["a6000"])[0]
    with target.folder.writer() as writer:
        writer.append(make_trial(tmp_path, 20, 100, micro_batch=1))
        writer.append(make_trial(tmp_path, 30, 150, micro_batch=2))
        writer.append(make_trial(tmp_path, 99, 200, micro_batch=4))
    return tuner.load_results("tiny.yaml", gpu="a6000")


class TestResult:
    def test_ranks_again_under_other_limits(self, result):
        assert result.best().configuration["micro_batch"] == 2
        assert result.best(max_memory="25GiB").configuration["micro_batch"] == 1
        assert result.best(headroom=0.5).configuration["micro_batch"] == 1
        assert result.best(headroom="20GiB").configuration["micro_batch"] == 1
        assert result.best(where="micro_batch < 2").configuration["micro_batch"] == 1
        assert result.best(objective="device_bytes").configuration["micro_batch"] == 1
        with pytest.raises(tuner.NothingFitsError, match="smallest needs"):
            result.best(max_memory="5GiB")
        with pytest.raises(tuner.InputError):
            result.best(where="micro_batches > 1")

    def test_is_not_changed_by_a_later_search(self, result, tmp_path):
        with load_targets("tiny.yaml", ["a6000"])[0].folder.writer() as writer:
            writer.append(make_trial(tmp_path, 35, 300, micro_batch=4, max_length=16))
        assert result.best(headroom="1%").configuration["micro_batch"] == 2
        again = tuner.load_results("tiny.yaml", gpu="a6000")
        assert again.best(headroom="1%").configuration["micro_batch"] == 4

    def test_as_a_table_of_pandas(self, result):
        frame = result.to_pandas()
        assert list(frame["micro_batch"]) == [1, 2, 4]
        assert list(frame["on_front"]) == [True, True, False]
        assert list(frame["recommended"]) == [False, True, False]
        assert list(frame["fits"]) == [True, True, False]
        assert frame["device_bytes"].tolist()[0] == 20 * 2**30

    def test_exports_as_the_command_does(self, result, capsys):
        assert run(["export", "--space", "tiny.yaml", "--gpu", "a6000", "--format", "trl"]) == 0
        assert result.export("trl") == capsys.readouterr().out
        with pytest.raises(tuner.InputError, match="'trll'"):
            result.export("trll")

    def test_writes_into_files_as_the_command_does(self, result, tmp_path, capsys):
        train, best = tmp_path / "train.py", result.best()
        before = (
            "from transformers import Trainer, TrainingArguments\n"
            "config = {'batch': 1}  # ours\n"
            "args = TrainingArguments(per_device_train_batch_size=config['batch'])\n"
            "Trainer('./tiny-model', args).train()\n"
        )
        train.write_text(before)
        shown = best.apply("train.py", dry_run=True)
        assert train.read_text() == before
        assert shown.backups == {}
        command = ["apply", "--space", "tiny.yaml", "--gpu", "a6000", "train.py", "--yes"]
        assert run(command) == 0
        assert str(shown) == shown.difference == capsys.readouterr().out
        by_command = train.read_text()
        train.write_text(before)
        written = best.apply("train.py")
        added = 'gradient_accumulation_steps=2, gradient_checkpointing=True, optim="adamw_torch"'
        after = before.replace("1}", "2}").replace("['batch'])", f"['batch'], {added})")
        assert train.read_text() == by_command == after
        assert written.backups[Path("train.py")].read_text() == before
        assert any(text.startswith("max_length = ") for text in written.left)
        assert best.apply(train).backups == {}  # nothing is left to change


class TestNotebook:
    def test_shows_the_front_as_table_and_picture_and_asks_for_nothing(self, result):
        page = Page(result._repr_html_())
        assert set(page.tags) <= {"p", "b", "table", "thead", "tbody", "tr", "th", "td", "img"}
        assert page.tags.count("tr") == 3
        (source,) = page.sources
        head, _, data = source.partition(",")
        assert head == "data:image/png;base64"
        assert base64.b64decode(data).startswith(b"\x89PNG")
        assert "30.00 GiB" in page.texts

    def test_names_are_text(self, result):
        bad = "<img src=http://evil onerror=alert(1)>\"'&"
        facts = dataclasses.replace(result._target.facts, name=bad)
        records = [dataclasses.replace(r, space=bad) for r in result.records]
        view = build_view(records, facts, result.gpu, notes=[f"note {bad}"])
        page = Page(SearchResult(result._target, view)._repr_html_())
        assert page.tags.count("img") == 1
        assert page.handlers == []
        assert all(source.startswith("data:") for source in page.sources)
        assert any(bad in text for text in page.texts)


EVIL = "<script>alert(1)</script><img src=x onerror=y>"
SCRIPT = f"""\
import torch
from peft import LoraConfig
from transformers import BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer
trainer = SFTTrainer(
    model="Qwen/Qwen3-4B",
    args=SFTConfig(
        per_device_train_batch_size=32,  # {EVIL}
        max_length=2048,
        bf16=True,
        model_init_kwargs={{
            "dtype": torch.bfloat16,
            "quantization_config": BitsAndBytesConfig(
                load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
            ),
        }},
    ),
    train_dataset=[],
    peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
)
trainer.train()
"""


def test_a_check_is_shown_without_scripts_with_its_text_escaped_and_is_applied(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    without_torch(monkeypatch)
    Path("train.py").write_text(SCRIPT)
    found = tuner.check("train.py", gpu="rtx3060", predict=True)
    page = Page(found._repr_html_())
    assert set(page.tags) <= {"p", "b", "pre", "span", "table", "tbody", "tr", "td", "details",
                              "summary", "ul", "li"}  # fmt: skip
    assert (page.sources, page.handlers) == ([], [])
    assert "".join(page.texts).count(EVIL) == 2
    assert repr(found).startswith("does not fit: ")
    assert "note    assumed: " in repr(found)
    [path] = found.apply()
    again = tuner.check(path, gpu="rtx3060", predict=True, changes=False)
    assert again.found.fits
    with pytest.raises(tuner.InputError, match="nothing was written"):
        found.apply()
    with pytest.raises(tuner.NothingFitsError, match="there is no change to write"):
        again.apply()


def test_says_what_the_command_says(searches, capsys):
    found = tuner.estimate("wide.yaml", gpu="a6000", micro_batch=10, precision="fp16")
    assert run(
        ["estimate", "--space", "wide.yaml", "--gpu", "a6000", "--json",
         "--set", "micro_batch=10", "--set", "precision=fp16"]
    ) == 0  # fmt: skip
    printed = json.loads(capsys.readouterr().out)
    assert printed.pop("answer")[0]["text"].startswith("fits: ")
    assert printed == json.loads(json.dumps(found.to_dict()))
    assert found.configuration["micro_batch"] == 10
    assert found.fits == found.prediction.fits
    assert repr(found).startswith("<Estimate of wide on a6000: fits, ")
    same = tuner.estimate(
        tuner.load_space("wide.yaml"), gpu="a6000", settings={**FP16, "micro_batch": 10}
    )
    assert same.prediction == found.prediction
    tight = tuner.estimate("wide.yaml", gpu="a6000", margin=0.5, precision="fp16")
    assert not tight.fits


class TestProgram:
    def test_check_predicts_what_the_command_predicts(self, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        Path("sft.py").write_text(
            "from trl import SFTConfig, SFTTrainer\n"
            "SFTTrainer('Qwen/Qwen2.5-0.5B', SFTConfig(max_length=512, bf16=True)).train()\n"
        )
        found = tuner.check("sft.py", gpu="rtx4090", predict=True, changes=False)
        words = ["check", "sft.py", "--gpu", "rtx4090", "--predict", "--no-changes", "--json"]
        assert run(words) == found.found.exit_code == 0
        answer = json.loads(capsys.readouterr().out)
        assert answer["program"] == json.loads(json.dumps(found.found.to_dict()))

    def test_wrong_arguments_are_named(self):
        with pytest.raises(tuner.InputError, match="1 or more"):
            tuner.emulate(["python", "train.py"], gpu="rtx4090", gpus=0)
        with pytest.raises(tuner.InputError, match="a processor is not emulated"):
            tuner.tune("train.py", gpu="cpu")
