"""`tuner submit` as far as it goes without a cluster: what is checked, and what goes along."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import click
import pytest
from cli_samples import write_samples

from tuner.cli import submit
from tuner.cli.job_options import last_lines, plain
from tuner.cli.main import run
from tuner.cli.search import command as search
from tuner.engine.job_files import check_id
from tuner.engine.plan import SearchOptions
from tuner.engine.submission import asked_for, check_asked, new_id, put_together, space_in
from tuner.errors import InputError, UnavailableError
from tuner.space import load_space
from tuner.tune.job_connection import auth_token, url_of
from tuner.tune.jobs import FETCH, KIND, SEARCH, JobServer, connect

NOBODY = "http://127.0.0.1:1"
OWN = "name: own\nworkload: command\ncommand: [python, train.py, '{batch}']\nknobs:\n  batch: [1]\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    write_samples(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def arguments_of(*typed: str) -> list[str]:
    context = submit.command.make_context("submit", ["--space", "tiny.yaml", *typed])
    return submit.search_arguments(context.meta[submit._RAW])


def test_every_option_arrives_as_it_was_typed():
    typed = ["--gpu", "a6000", "--trials", "7", "--time-limit", "1h30m", "--margin", "5%"]
    typed += ["--min-gain", "1%", "--memory-limit", "auto", "--gpu-memory", "40GiB"]
    typed += ["--set", "precision=bf16", "--set", "a=b c", "--where", "lora_rank >= 8"]
    typed += ["--whole-steps", "--mode", "predict", "--objective", "epoch_usd"]
    sent = arguments_of(*typed, "--address", NOBODY, "--id", "mine", "--json")
    again = search.make_context("search", ["--space", "tiny.yaml", *sent]).params
    once = search.make_context("search", ["--space", "tiny.yaml", *typed]).params
    assert again == once
    assert not {"--address", "--id", "--json", NOBODY, "mine"} & set(sent)


def test_a_value_that_looks_like_an_option_stays_a_value():
    assert arguments_of("--gpu=--results") == ["--gpu=--results"]


def test_submit_has_the_options_of_search_but_for_those_of_this_machine():
    own = {p.name for p in submit.command.params} - {p.name for p in search.params}
    own -= {"help_all"}  # added to a command where it is loaded first
    assert own == {"working_dir", "job_id", "allow", "max_size"}
    missing = {p.name for p in search.params} - {p.name for p in submit.command.params}
    assert missing == submit.NOT_SENT - {"address", "as_json"}


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["--gpu", "auto"], "--gpu auto means this machine"),
        (["--gpu", "cpu"], "--gpu cpu means this machine"),
        (["--gpu", "a60000"], "unknown GPU 'a60000'"),
        (["--gpu", "a6000,t5"], "unknown GPU 't5'"),
        (["--gpu", "a6000,"], "lacks a name"),
        (["--gpu", "a6000", "--where", "lora_rnk > 3"], "lora_rnk"),
        (["--gpu", "a6000", "--set", "micro_batch=3000000"], "micro_batch"),
        (["--gpu", "a6000", "--margin", "3"], "margin '3'"),
        (["--gpu", "a6000", "--min-gain", "1%", "--searcher", "grid"], "searcher 'grid'"),
        (["--gpu", "a6000", "--id", "../x"], "not the id of a job"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_sent(folder, capsys, typed, message):
    """There is nobody at the address: whoever asked there would say that."""
    assert run(["submit", "--space", "tiny.yaml", "--address", NOBODY, *typed]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert NOBODY not in error


@pytest.mark.parametrize("names", ["h100", "a6000,t4,h100"])
def test_a_name_of_several_types_is_for_the_cluster_to_settle(folder, capsys, names):
    """Nobody is there to send it to; but until then nothing is wrong."""
    typed = ["--space", "tiny.yaml", "--gpu", names, "--price", "2"]
    typed = typed if names == "h100" else typed[:-2]
    assert run(["submit", *typed, "--address", NOBODY]) == 3
    assert f"no Ray job server answers at {NOBODY}" in capsys.readouterr().err


def test_what_a_name_may_mean_is_checked_for_each_type(folder):
    (asked,) = asked_for("tiny.yaml", ["v100_sxm"], folder / "results")
    assert (asked.label, asked.settled) == ("v100_sxm", False)
    assert [target.gpu.id for target in asked.targets] == ["v100_16gb", "v100_32gb"]
    (settled,) = asked_for("tiny.yaml", ["A100 80GB"], folder / "results")
    assert (settled.label, settled.settled) == ("a100_80gb", True)
    too_much_of_one = SearchOptions(margin="20GiB")
    check_asked([asked], too_much_of_one)  # one of the two types has that
    with pytest.raises(InputError, match="margin"):
        check_asked([asked], SearchOptions(margin="40GiB"))
    with pytest.raises(InputError, match="unknown GPU 't5'") as caught:
        asked_for("tiny.yaml", ["t5", "h100", "a6001"], folder / "results")
    assert "a6001" in str(caught.value)


def test_a_broken_space_is_said_before_anything_is_sent(folder, capsys):
    (folder / "tiny.yaml").write_text("knobs: 3\n")
    assert run(["submit", "--space", "tiny.yaml", "--gpu", "t4", "--address", NOBODY]) == 2
    assert "knobs" in capsys.readouterr().err


def test_results_here_are_in_nobodys_way(folder, capsys):
    journal = folder / "results" / "tiny" / "a6000" / "trials.jsonl"
    journal.parent.mkdir(parents=True)
    journal.write_text("nonsense\nmore\n")
    assert run(["submit", "--space", "tiny.yaml", "--gpu", "a6000", "--address", NOBODY]) == 3
    assert f"no Ray job server answers at {NOBODY}" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["jobs"], ["logs", "x"], ["stop", "x"], ["fetch", "x"]])
def test_nobody_at_the_address_is_said(capsys, command):
    assert run([*command, "--address", NOBODY]) == 3
    assert "no Ray job server answers" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["logs", "stop", "fetch"])
def test_what_is_no_id_is_said_without_asking(capsys, command):
    assert run([command, "../../etc", "--address", NOBODY]) == 2
    assert "not the id of a job" in capsys.readouterr().err


# -- what goes along --------------------------------------------------------------------------


def test_space_and_model_go_along_and_nothing_else(folder, tmp_path_factory):
    (folder / "secret.txt").write_text("x")
    (folder / "tiny-model" / "model.safetensors").write_text("x")
    there = tmp_path_factory.mktemp("there")
    assert put_together(load_space("tiny.yaml"), None, there) == "./tiny.yaml"
    found = {str(p.relative_to(there)) for p in there.rglob("*") if p.is_file()}
    assert found == {"tiny.yaml", "tiny-model/config.json"}
    assert json.loads((there / "tiny-model/config.json").read_text())["model_type"] == "llama"


def test_a_shipped_space_goes_along_as_it_is_here(tmp_path):
    assert put_together(load_space("qlora27b"), None, tmp_path) == "./qlora27b.yaml"
    assert load_space(str(tmp_path / "qlora27b.yaml")).knobs == load_space("qlora27b").knobs


@pytest.mark.parametrize("model", ["/", ".."])
def test_a_model_elsewhere_is_refused(folder, tmp_path_factory, model):
    there = tmp_path_factory.mktemp("there")
    with pytest.raises(InputError, match="outside the current one"):
        put_together(load_space("tiny.yaml"), model, there)
    assert not list(there.iterdir())


def test_own_code_goes_only_with_the_folder_that_is_named(folder, tmp_path_factory):
    (folder / "own.yaml").write_text(OWN)
    (folder / "train.py").write_text("")
    space = load_space("own.yaml")
    with pytest.raises(InputError, match="your own code"):
        put_together(space, None, tmp_path_factory.mktemp("there"))
    assert space_in(folder, "own.yaml", space) == "./own.yaml"
    (folder / "below").mkdir()
    with pytest.raises(InputError, match="is not in --working-dir"):
        space_in(folder / "below", "own.yaml", space)
    with pytest.raises(InputError, match="is not a folder"):
        space_in(folder / "nowhere", "own.yaml", space)


def test_ids_are_told_apart_and_can_be_names_of_folders():
    found = {new_id("tiny", ["a6000"]) for _ in range(100)}
    assert len(found) == 100
    for each in (*found, new_id("ünï/../x", ["t4", "l4"]), new_id("_" * 90, ["t" * 90])):
        assert check_id(each) == each


# -- where to, and who is asking --------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "url"),
    [
        ("auto", "http://127.0.0.1:8265"),
        ("head:8265", "http://head:8265"),
        ("http://head:8265/", "http://head:8265"),
        ("https://ray.example.com", "https://ray.example.com"),
        ("http://[::1]:8265", "http://[::1]:8265"),
    ],
)
def test_addresses_become_urls(typed, url):
    assert url_of(typed) == url


@pytest.mark.parametrize(
    "typed",
    ["ray://head:10001", "http://", "head:port", "os://x", "http://u:p@head:1", "http://h/?x=1"],
)
def test_what_is_no_address_is_refused(typed):
    with pytest.raises(InputError, match="not the address of a Ray job server"):
        connect(typed)


@pytest.fixture
def nothing_set(tmp_path, monkeypatch):
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_token_is_looked_for_where_ray_looks(nothing_set, monkeypatch):
    assert auth_token("127.0.0.1") is None
    (nothing_set / ".ray").mkdir()
    (nothing_set / ".ray" / "auth_token").write_text("usual\n")
    assert auth_token("127.0.0.1") == "usual"
    (nothing_set / "named").write_text(" named ")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(nothing_set / "named"))
    assert auth_token("head") == "named"
    monkeypatch.setenv("RAY_AUTH_TOKEN", "given")
    assert auth_token("head") == "given"
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert auth_token("127.0.0.1") is None


def test_the_token_of_this_machines_clusters_goes_nowhere_else_unasked(nothing_set, monkeypatch):
    (nothing_set / ".ray").mkdir()
    (nothing_set / ".ray" / "auth_token").write_text("usual")
    for host in ("localhost", "127.0.0.2", "::1"):
        assert auth_token(host) == "usual"
    for host in ("head", "10.0.0.1", "localhost.example.com", "127.0.0.1.example.com", None):
        assert auth_token(host) is None
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    assert auth_token("head") == "usual"


def test_a_token_that_is_missing_or_cannot_be_read_is_said(nothing_set, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    with pytest.raises(UnavailableError, match="there is no token"):
        auth_token("head")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(nothing_set / "nowhere"))
    with pytest.raises(UnavailableError, match="cannot read the token"):
        auth_token("head")
    (nothing_set / "nowhere").write_text("\n")
    with pytest.raises(UnavailableError, match="is empty"):
        auth_token("head")


# -- what a cluster says ----------------------------------------------------------------------


def test_output_of_a_cluster_does_not_steer_the_terminal():
    assert plain("a\x1b]0;x\x07b\x9bc\r\nd\re\tf") == "a]0;xbc\nd\ne\tf"
    assert last_lines("1\n\n2\n3\n", 2) == "  2\n  3"


def test_submit_leaves_the_environment_as_it_was(folder):
    before = dict(os.environ), Path.cwd()
    with pytest.raises(UnavailableError):
        connect(NOBODY)
    assert (dict(os.environ), Path.cwd()) == before


@dataclass(frozen=True)
class Details:
    """What Ray says of a job, as far as it is asked here."""

    submission_id: str
    metadata: dict[str, str] | None
    end_time: int | None


class FakeClient:
    """A cluster's list of jobs; `gone` are struck off between the list and the striking."""

    def __init__(self, jobs: list[Details], gone: str) -> None:
        self.jobs, self.gone, self.deleted = jobs, gone, []

    def list_jobs(self) -> list[Details]:
        return self.jobs

    def delete_job(self, job_id: str) -> bool:
        if job_id == self.gone:
            raise RuntimeError(f"status code 404: Job {job_id} does not exist")
        self.deleted.append(job_id)
        return True


def test_only_jobs_that_read_files_are_struck_off_and_not_at_once():
    client = FakeClient(
        [
            Details("search", {KIND: SEARCH}, 1_000),
            Details("others", None, 1_000),
            Details("gone", {KIND: FETCH}, 1_000),
            Details("old", {KIND: FETCH}, 1_000),
            Details("fresh", {KIND: FETCH}, 99_000),
            Details("runs", {KIND: FETCH}, None),
        ],
        gone="gone",
    )
    JobServer(client, NOBODY).tidy(before_s=60.0)
    assert client.deleted == ["old"]


def test_the_commands_of_the_cluster_are_not_shown_to_people():
    from tuner.cli.main import cli

    context = click.Context(cli)
    assert cli.get_command(context, "cluster-job").hidden
