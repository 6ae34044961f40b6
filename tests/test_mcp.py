"""`tuner mcp`, asked by the client of the package `mcp` over stdio, without the extra `[all]`.

One session answers all questions: the modules of `[all]` can't be imported in its processes.
"""

import asyncio
import contextlib
import io
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from documents import blocks, commands
from mcp import Client, StdioServerParameters
from started import run_python
from waiting import wait_until_gone

from tuner.app.cli.main import run
from tuner.app.cli.mcp import answered, tools
from tuner.core.errors import MODULES, install_command

ROOT = Path(__file__).parents[1]
GPU = {"gpu": "rtx4090"}
QUESTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "check": ("check", {"program": ["sft.py", "qwen3-8b"], **GPU}),
    "estimate": (
        "estimate",
        {"model": "qwen3-8b", "qlora": True, "set": {"micro_batch": 4}, **GPU},
    ),
    "not shipped": ("estimate", {"model": "qwen3-8b", "set": {"optimizer": "adafactor"}, **GPU}),
    "no tool": ("search", {}),
}


SERVER = """
import json, sys
sys.modules.update(dict.fromkeys(json.loads(sys.argv.pop(1))))  # they can't be imported
from tuner.app.cli import mcp
from tuner.app.cli.main import main
mcp.own_python = lambda module, *words: [sys.executable, *sys.orig_argv[1:4], *words]
main()
"""
TUNER = ("-c", SERVER, json.dumps([*MODULES]))
"""Arguments of Python for `tuner`."""

SLOW_SERVER = """
import tuner.app.cli.mcp as module
from tuner.app.cli.main import main
module.own_python = lambda *words: ["sh", "-c", "echo $$ >> started; sleep 600 & wait"]
main()
"""
"""A server whose commands take long."""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with programs."""
    folder = tmp_path_factory.mktemp("project")
    for name in ("sft.py", "train.py"):
        shutil.copy(ROOT / "examples" / "programs" / "sft.py", folder / name)
    return folder


def environment(project: Path) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), *sys.path])
    return {**os.environ, "PYTHONPATH": path, "XDG_CACHE_HOME": str(project / "cache")}


@pytest.fixture(scope="module")
def session(project: Path) -> dict[str, Any]:
    """The tools, and the answer to each question."""
    server = StdioServerParameters(
        command=sys.executable, args=[*TUNER, "mcp"], cwd=project, env=environment(project)
    )

    async def asked() -> dict[str, Any]:
        async with Client(server) as client:
            found = {"tools": (await client.list_tools()).tools}
            # The client raises for an answer that is not as the tool's schema says.
            return found | {
                name: await client.call_tool(tool, arguments)
                for name, (tool, arguments) in QUESTIONS.items()
            }

    return asyncio.run(asked())


def text(result: Any) -> str:
    (content,) = result.content
    return content.text


def test_its_tools_are_commands_with_schemas(session, project):
    found = {tool.name: tool for tool in session["tools"]}
    assert [*found] == ["check", "estimate", "best"]
    for tool in found.values():
        assert tool.annotations.read_only_hint
        assert str(project) in tool.description, "where relative paths begin"
        assert "source" in json.dumps(tool.output_schema)
        for name, schema in tool.input_schema["properties"].items():
            assert schema["description"], f"{tool.name}: {name}"
    assert "run" not in found["check"].input_schema["properties"]


@pytest.fixture
def here(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands run in this process, among the programs."""

    def run_here(words: Sequence[str], stopped: Any) -> tuple[int, str, str]:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = run([*words])
        return code, out.getvalue(), err.getvalue()

    monkeypatch.chdir(project)
    monkeypatch.setattr("tuner.app.cli.mcp._run", run_here)


@pytest.mark.parametrize("name", ["check", "estimate"])
def test_a_question_has_a_paragraph_and_the_answer_of_the_command(session, name):
    result = session[name]
    assert not result.is_error, text(result)
    assert "predicted" in text(result)
    assert len(text(result)) < 2000
    assert result.structured_content["source"] == "predicted"


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ("check", {"program": '["sft.py", "qwen3-8b"]', "set": '{"micro_batch": 8}', **GPU}),
        ("check", {"program": "sft.py llama-3.2-1b", **GPU}),
        ("estimate", {"model": "qwen3-8b", "set": {"logging_steps": 1}, **GPU}),
        ("estimate", {"model": "qwen3-8b", "full": True, **GPU}),
        ("best", {"space": "qlora27b", "gpu": "a6000"}),
    ],
    ids=["as text", "in one line", "without effect", "too large", "best"],
)
def test_each_way_to_ask_has_an_answer(here, tool, arguments):
    answer = answered(tools(may_run=False), tool, arguments)
    assert answer.data is not None, answer.text
    assert answer.data["source"] == "predicted"
    assert "predicted" in answer.text
    assert len(answer.text) < 2000


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [("no tool", 2, "unknown tool 'search'"), ("not shipped", 3, install_command("all"))],
)
def test_an_error_of_the_server_has_its_hint_and_its_exit_code(session, name, code, said):
    result = session[name]
    assert result.is_error
    assert result.structured_content is None
    assert said in text(result)
    assert f"Exit code {code}: " in text(result)


@pytest.mark.parametrize(
    ("tool", "arguments", "code", "said"),
    [
        ("check", {"program": ["nosuch.py"], **GPU}, 2, "hint: name a file that exists"),
        ("check", {"program": ["--help"], **GPU}, 2, "there is no program '--help'"),
        ("check", {"program": ["sft.py"], "run": True, **GPU}, 2, "'run' was unexpected"),
        ("estimate", {"model": "qwen3-8b", "gpu": "rtx4091"}, 2, "did you mean 'rtx4090'?"),
        ("estimate", {"model": "qwen3-8b", "gpu": "all"}, 2, "gpu is one GPU type"),
        ("best", {"space": "qlora27b", "gpu": "a6000", "max_memory": "1GiB"}, 1, "hint:"),
    ],
)
def test_an_error_has_its_hint_and_its_exit_code(here, tool, arguments, code, said):
    answer = answered(tools(may_run=False), tool, arguments)
    assert answer.data is None
    assert said in answer.text
    assert f"Exit code {code}: " in answer.text


def asked(monkeypatch: pytest.MonkeyPatch, code: int, printed: dict[str, Any], **more: Any) -> Any:
    """The answer to a check that ended so."""
    return asked_of(monkeypatch, (code, json.dumps(printed), ""), **more)


def asked_of(monkeypatch: pytest.MonkeyPatch, done: tuple[int, str, str], **more: Any) -> Any:
    """The answer to a check that printed so."""
    monkeypatch.setattr("tuner.app.cli.mcp._run", lambda words, stopped: done)
    question = {"program": ["train.py"], **GPU, **more}
    return answered(tools(may_run=True), "check", question)


def test_what_an_answer_says_is_what_the_command_shows_a_person(monkeypatch, session):
    """As of a program whose longest generation is not known; exit code 4."""
    known = session["check"].structured_content
    said = [{"label": "answer", "text": "unknown: all logits are kept"}]
    printed = {**known, "answer": said, "fits": None, "verdict": "unknown", "suggestion": None}
    answer = asked(monkeypatch, 4, printed)
    assert answer.data["fits"] is None
    first, last = answer.text.split("\n")
    assert first == "unknown: all logits are kept"
    assert last.startswith("Exit code 4: unknown")


def test_a_program_is_run_by_a_process_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("click.py").write_text("raise SystemExit('not the library')")
    question = {"program": ["nosuch.py"], "run": True, **GPU}
    answer = answered(tools(may_run=True), "check", question)
    assert "file not found: nosuch.py" in answer.text
    assert "Exit code 2: " in answer.text


@pytest.mark.parametrize(
    ("words", "run"),
    [("../out.py", True), ("link.py", False), ("{out}", True), ("-m out", False), ("-m out", True)],
)
def test_no_program_outside_of_the_servers_folder_is_read_or_run(tmp_path, monkeypatch, words, run):
    inside, out = tmp_path / "in", tmp_path / "out.py"
    inside.mkdir()
    out.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    (inside / "link.py").symlink_to(out)
    (inside / "out.py").symlink_to(out)
    monkeypatch.chdir(inside)
    program = words.format(out=out)
    program = f"python {program}" if program.startswith("-m") else program
    answer = answered(tools(may_run=True), "check", {"program": program, "run": run, **GPU})
    assert f"{out} isn't below {inside}, where the MCP server was started" in answer.text
    assert "Exit code 3: " in answer.text
    assert not (tmp_path / "ran").exists()


def test_a_program_runs_only_where_server_and_question_say_so():
    quiet, able = tools(may_run=False)["check"], tools(may_run=True)["check"]
    question = {"program": ["train.py", "--run"], **GPU}
    tail = ["--json", "--", "train.py", "--run"]
    assert quiet.words(question) == ["check", "--gpu=rtx4090", "--predict", *tail]
    assert able.words(question) == quiet.words(question)
    assert able.words({**question, "run": True}) == ["check", "--gpu=rtx4090", *tail]
    assert "executes its code" in able.input_schema()["properties"]["run"]["description"]


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("check", {"program": ["train.py"], "set": {f"k{n}": n for n in range(100_000)}}, "longer"),
        ("estimate", {"model": ",".join(["qwen3-8b"] * 2000)}, "longer than 16,000"),
        ("x" * 10_000_000, {}, "longer"),
        ("check", {"program": "train.py 'a"}, "No closing quotation"),
        ("check", {"program": ["train.py\0"]}, "null byte"),
        ("check", {"program": "[" * 10_000}, "Exit code 2: "),
        ("check", {"program": ["train.py"], "set": {f"k{n}": {} for n in range(900)}}, "..."),
    ],
)
def test_arguments_are_bounded_and_no_error_repeats_them(name, given, said):
    answer = answered(tools(may_run=False), name, {**GPU, **given})
    assert answer.data is None
    assert said in answer.text
    assert len(answer.text) < 10_000


def test_an_answer_is_bounded(monkeypatch, session):
    failed = asked_of(monkeypatch, (2, "", "error: " + "x" * 10_000_000))
    assert failed.text.startswith("error: ")
    assert len(failed.text) < 10_000
    cut = asked_of(monkeypatch, (0, '{"source": "pred', ""))
    assert cut.data is None
    assert "the answer is too long, or not whole" in cut.text
    assert "Exit code 3: " in cut.text


@pytest.fixture
def slow_call(tmp_path) -> Iterator[tuple[subprocess.Popen[bytes], list[int]]]:
    """A server that answers a call, and the processes of that call."""
    server = subprocess.Popen(
        [sys.executable, "-c", SLOW_SERVER, "mcp", "--allow-run"],
        cwd=tmp_path,
        env=environment(tmp_path),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with server:
        versions = {"protocolVersion": "2025-06-18", "capabilities": {}}
        client = {"clientInfo": {"name": "test", "version": "1"}}
        send(server, id=1, method="initialize", params={**versions, **client})
        assert json.loads(server.stdout.readline())["id"] == 1
        send(server, method="notifications/initialized")
        call(server, 2)
        yield server, running(tmp_path, 1)
        server.kill()


def send(server: subprocess.Popen[bytes], **message: Any) -> None:
    server.stdin.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")
    server.stdin.flush()


def call(server: subprocess.Popen[bytes], number: int) -> None:
    arguments = {"program": ["train.py"], "run": True, **GPU}
    params = {"name": "check", "arguments": arguments}
    send(server, id=number, method="tools/call", params=params)


def running(folder: Path, number: int) -> list[int]:
    """The processes of the command that began as the one of this number."""
    until_s = time.monotonic() + 60
    while time.monotonic() < until_s:
        with contextlib.suppress(FileNotFoundError, IndexError):
            shell = int((folder / "started").read_text().splitlines()[number - 1])
            if children := psutil.Process(shell).children():
                return [shell, *(child.pid for child in children)]
        time.sleep(0.02)
    raise AssertionError("it did not begin")


@pytest.mark.parametrize("how", ["SIGTERM", "SIGINT", "SIGHUP", "SIGKILL", "end of stdin"])
def test_a_call_ends_with_its_server(slow_call, how):
    server, pids = slow_call
    if how == "end of stdin":
        server.stdin.close()
    else:
        server.send_signal(signal.Signals[how])
    server.wait(20)
    wait_until_gone(pids)


def test_a_call_ends_when_it_is_cancelled_and_the_next_begins(slow_call, tmp_path):
    server, pids = slow_call
    call(server, 3)
    send(server, method="notifications/cancelled", params={"requestId": 2})
    assert running(tmp_path, 2)
    wait_until_gone(pids)


def test_without_the_extra_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "mcp.server.stdio", None)
    assert run(["mcp"]) == 3
    assert install_command("mcp") in capsys.readouterr().err


def test_an_interrupt_ends_a_server_that_waits(project):
    server = subprocess.Popen(
        [sys.executable, *TUNER, "mcp"],
        cwd=project,
        env=environment(project),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with server:
        server.stdin.write(b'{"jsonrpc": "2.0", "id": 1, "method": "ping"}\n')
        server.stdin.flush()
        assert json.loads(server.stdout.readline())["id"] == 1  # it serves
        server.send_signal(signal.SIGINT)
        assert server.wait(60) == 130


SKILL = "skills/tuner/SKILL.md"


@pytest.mark.parametrize("line", [c.line for b in blocks(SKILL) for c in commands(b)])
def test_a_command_of_the_skill_answers(project, line):
    name, *words = shlex.split(line)
    assert name == "tuner"
    done = run_python(*TUNER, *words, cwd=project, env=environment(project))
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer.get("prediction", answer)["source"] == "predicted"
