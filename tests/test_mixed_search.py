"""`tuner search --gpu a6000,h100_sxm`: a search for each type, and all of them side by side."""

import csv

import pytest
from search_fakes import InProcess, let_emulate, write_wide

from tuner.app.cli.main import run
from tuner.app.search.run import batches
from tuner.app.target import load_targets
from tuner.core.errors import UnavailableError
from tuner.searches.journal import read_journal
from tuner.searches.options import SearchOptions
from tuner.searches.progress import StoppedBy
from tuner.searches.ray import cluster
from tuner.searches.request import SearchRequest, TrialDevice
from tuner.searches.store import ResultsFolder
from tuner.space.gpus import get_gpu

FP16 = ["--space", "wide.yaml", "--set", "precision=fp16"]
EMULATED = [*FP16, "--mode", "emulate"]


@pytest.fixture
def searches(tmp_path, monkeypatch) -> InProcess:
    write_wide(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    return let_emulate(monkeypatch)


def words(text: str) -> str:
    return " ".join(text.split())


class TestSearch:
    def test_every_type_has_a_front_and_one_that_cannot_is_named_without_a_trial(
        self, searches, tmp_path, capsys
    ):
        command = ["search", *FP16, "--gpu", "h100_sxm,rtx3090,a6000", "--trials", "3"]
        assert run(command) == 0
        out = capsys.readouterr().out
        assert "rtx3090 not searched: none of the 4 configurations is predicted to fit" in words(
            out
        )
        # Said before the first trial.
        assert out.index("not searched") < out.index("done")
        assert searches.calls == []

        folder = tmp_path / "results" / "wide"
        assert sorted(path.name for path in folder.iterdir()) == ["a6000", "h100_sxm"]
        for gpu in ("a6000", "h100_sxm"):
            records = read_journal(folder / gpu / "trials.jsonl").records
            assert {record.gpu for record in records} == {gpu}
            assert len(ResultsFolder(tmp_path / "results", "wide", gpu).read_all()) >= 4
            with (folder / gpu / "pareto.csv").open(newline="") as file:
                assert list(csv.DictReader(file))

        compared = out[out.index("wide, the cheapest epoch first") :]
        assert compared.index("\na6000") < compared.index("\nh100_sxm") < compared.index("rtx3090")
        assert "smallest needs" in words(compared)
        assert "tuner best --space wide.yaml --gpu a6000" in words(compared)

        # The same comparison without a search, and a type that was not searched beside them.
        assert run(["best", "--space", "wide.yaml", "--gpu", "h100_sxm,a6000,a100_40gb"]) == 0
        again = capsys.readouterr().out
        assert again.index("\na6000") < again.index("\nh100_sxm") < again.index("a100_40gb")
        assert "no results of 'wide' on 'a100_40gb'" in words(again)

    def test_same_command_goes_on_from_every_journal(self, searches, capsys):
        for _ in range(2):
            assert run(["search", *EMULATED, "--gpu", "a6000,h100_sxm", "--trials", "2"]) == 0
        first, second = searches.calls
        assert [len(request.resume) for request in first] == [0, 0]
        assert [len(request.resume) for request in second] == [2, 2]
        assert words(capsys.readouterr().out).count("0 new trials") == 2

    def test_types_without_bf16_are_named_before_anything_is_predicted(
        self, searches, capsys, monkeypatch
    ):
        from tuner.predict import predictor

        monkeypatch.setattr(predictor.Predictor, "__init__", None)  # would raise a TypeError
        command = ["search", "--space", "wide.yaml", "--set", "precision=bf16"]
        assert run([*command, "--gpu", "t4,v100_16gb"]) == 1
        error = words(capsys.readouterr().err)
        assert "t4: NVIDIA T4 can run no configuration of search space 'wide'" in error
        assert "v100_16gb:" in error
        assert "Turing has no bf16 arithmetic" in error
        assert searches.calls == []

    def test_interruption_keeps_what_was_done_of_each(self, searches, tmp_path, capsys):
        searches.stops = {"a6000": StoppedBy.INTERRUPTED, "h100_sxm": StoppedBy.INTERRUPTED}
        assert run(["search", *EMULATED, "--gpu", "a6000,h100_sxm", "--trials", "3"]) == 130
        assert words(capsys.readouterr().out).count("the same command continues from here") == 2
        for gpu in ("a6000", "h100_sxm"):
            journal = tmp_path / "results" / "wide" / gpu / "trials.jsonl"
            assert len(read_journal(journal).records) == 1
            assert journal.with_name("report.html").exists()

    def test_failure_of_one_type_does_not_take_the_others_with_it(self, searches, capsys):
        searches.stops = {"h100_sxm": UnavailableError("its nodes are gone", hint="start some")}
        assert run(["search", *EMULATED, "--gpu", "a6000,h100_sxm", "--trials", "2"]) == 0
        out = words(capsys.readouterr().out)
        assert "h100_sxm its nodes are gone" in out
        assert run(["search", *EMULATED, "--gpu", "h100_sxm", "--trials", "2"]) == 3
        assert "its nodes are gone" in capsys.readouterr().err


class TestNames:
    @pytest.mark.parametrize(
        ("gpus", "more", "parts"),
        [
            ("a6000,", (), ("lacks a name",)),
            ("a6000,all", (), ("all types and some",)),
            ("a6000,h100,a6001", (), ("'h100' is ambiguous", "'a6001'")),
            ("a6000,t4", ("--price", "1"), ("about one GPU type",)),
        ],
    )
    def test_what_is_wrong_is_bad_input(self, searches, capsys, gpus, more, parts):
        assert run(["search", *FP16, "--gpu", gpus, *more]) == 2
        error = words(capsys.readouterr().err)
        for part in parts:
            assert part in error

    @pytest.mark.parametrize("there", ["h100_sxm", "h100_pcie"])
    def test_a_name_of_several_types_means_the_one_that_the_cluster_has(
        self, searches, monkeypatch, there
    ):
        def survey(address, needs):
            met = tuple(need for need in needs if need.gpu.id == there)
            return cluster._Survey(met, grows=False, emulated=False, missing=None)

        monkeypatch.setattr(cluster, "survey", survey)
        monkeypatch.setattr("tuner.app.target.checked_address", lambda address: address)
        (target,) = load_targets("wide.yaml", ["h100"], address="10.0.0.1:6379")
        assert target.gpu.id == there
        assert target.arguments[:4] == ("--space", "wide.yaml", "--gpu", there)


class TestBatches:
    def request(self, gpu: str, *, trial_device: bool = False, address: str | None = None):
        return SearchRequest(
            space=None,
            gpu=get_gpu(gpu),
            runner_factory=None,
            trial_device=TrialDevice(get_gpu(gpu).name) if trial_device else None,
            options=SearchOptions(address=address),
        )

    def test_simulated_ones_and_those_of_a_cluster_run_together(self):
        simulated = [self.request("a6000"), self.request("t4")]
        assert list(batches(simulated)) == [simulated]
        measured = [self.request(gpu, trial_device=True, address="auto") for gpu in ("a6000", "t4")]
        assert list(batches(measured)) == [measured]
