"""`tuner mcp`, asked by the client of the package `mcp` over stdio, without the extra `[all]`.

One session answers all questions: the modules of `[all]` can't be imported in its server.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from mcp import Client, StdioServerParameters

from tuner.app.cli.main import run
from tuner.app.cli.mcp import CommandTool, answered, skill_file, tools
from tuner.core.errors import DISTRIBUTION, MODULES

ROOT = Path(__file__).parents[1]
SERVER = """
import json, sys
sys.modules.update(dict.fromkeys(json.loads(sys.argv.pop(1))))  # they can't be imported
from tuner.app.cli.main import main
main()
"""
GPU = {"gpu": "rtx4090"}
UNSEEN = """
from trl import SFTTrainer
import settings_of_another_machine as other
SFTTrainer(model=other.MODEL, args=other.ARGS).train()
"""
QUESTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "check": ("check", {"program": ["sft.py", "qwen3-8b"], **GPU}),
    "in one line": ("check", {"program": "sft.py llama-3.2-1b", **GPU}),
    "estimate": (
        "estimate",
        {"model": "qwen3-8b", "qlora": True, "set": {"micro_batch": 4}, **GPU},
    ),
    "without effect": ("estimate", {"model": "qwen3-8b", "set": {"logging_steps": 1}, **GPU}),
    "too large": ("estimate", {"model": "qwen3-8b", "full": True, **GPU}),
    "grid": ("grid", {"model": ["qwen3-0.6b"], "gpu": ["t4", "rtx4090"], "method": "qlora"}),
    "best": ("best", {"space": "qlora27b", "gpu": "a6000"}),
    "nothing fits": ("best", {"space": "qlora27b", "gpu": "a6000", "max_memory": "1GiB"}),
    "explain": ("explain", {"space": "qlora27b", "gpu": "a6000"}),
    "no file": ("check", {"program": ["nosuch.py"], **GPU}),
    "an option": ("check", {"program": ["--help"], **GPU}),
    "no GPU": ("estimate", {"model": "qwen3-8b", "gpu": "rtx4091"}),
    "all GPUs": ("estimate", {"model": "qwen3-8b", "gpu": "all"}),
    "run": ("check", {"program": ["sft.py"], "run": True, **GPU}),
    "no tool": ("search", {}),
    "unseen": ("check", {"program": ["unseen.py"], **GPU}),
}


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The tools, and the answer to each question."""
    folder = tmp_path_factory.mktemp("project")
    shutil.copy(ROOT / "examples" / "programs" / "sft.py", folder)
    (folder / "unseen.py").write_text(UNSEEN)
    server = StdioServerParameters(
        command=sys.executable,
        args=["-c", SERVER, json.dumps([*MODULES]), "mcp"],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
            "XDG_CACHE_HOME": str(folder / "cache"),
        },
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


def test_its_tools_are_commands_with_schemas(session):
    found = {tool.name: tool for tool in session["tools"]}
    assert [*found] == ["check", "estimate", "grid", "best", "explain"]
    for tool in found.values():
        assert tool.annotations.read_only_hint
        assert "source" in json.dumps(tool.output_schema)
        for name, schema in tool.input_schema["properties"].items():
            assert schema["description"], f"{tool.name}: {name}"
    assert "run" not in found["check"].input_schema["properties"]


@pytest.mark.parametrize("name", ["check", "in one line", "estimate", "too large", "grid", "best"])
def test_a_question_has_a_paragraph_and_the_answer_of_the_command(session, name):
    result = session[name]
    assert not result.is_error, text(result)
    assert "predicted" in text(result)
    assert len(text(result)) < 1200
    assert result.structured_content["source"] == "predicted"


def test_the_readme_s_program_is_tight_and_has_a_change(session):
    result = session["check"]
    assert text(result).startswith("tight (likely not): ")
    assert "-BATCH_SIZE = 16\n+BATCH_SIZE = 8\n" in text(result)
    assert "Exit code 1: it does not fit" in text(result)
    assert result.structured_content["verdict"] == "tight"
    assert session["in one line"].structured_content["fits"] is True


def test_numbers_are_those_of_the_command(session, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert run(["best", "--space", "qlora27b", "--gpu", "a6000", "--json"]) == 0
    assert session["best"].structured_content == json.loads(capsys.readouterr().out)
    assert "38.48 GiB of 47.40 GiB" in text(session["best"])
    assert session["too large"].structured_content["fits"] is False
    assert text(session["too large"]).startswith("does not fit: ")
    assert "rtx4090 (to " in text(session["grid"])


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("no file", 2, "hint: name a file that exists"),
        ("an option", 2, "there is no program '--help'"),
        ("no GPU", 2, "did you mean 'rtx4090'?"),
        ("all GPUs", 2, "gpu is one GPU type"),
        ("run", 2, "'run' was unexpected"),
        ("no tool", 2, "unknown tool 'search'"),
        ("explain", 3, f"pip install '{DISTRIBUTION}[all]'"),
        ("nothing fits", 1, "hint:"),
    ],
)
def test_an_error_has_its_hint_and_its_exit_code(session, name, code, said):
    result = session[name]
    assert result.is_error
    assert result.structured_content is None
    assert said in text(result)
    assert f"Exit code {code}: " in text(result)


def test_a_setting_without_effect_is_named(session):
    assert "ignored: logging_steps (no effect" in text(session["without effect"])


def test_what_cannot_be_read_gets_no_number(session):
    result = session["unseen"]
    assert result.is_error
    assert "GiB" not in text(result)


def test_an_unknown_verdict_is_an_answer_without_a_number(monkeypatch):
    """As of a program whose longest generation is not known; exit code 4."""
    printed = {
        "source": "predicted", "fits": None, "verdict": "unknown", "suggestion": None,
        "least_bytes": None, "notes": [],
        "program": {
            "memory": {"device_bytes": 5 << 30}, "limit_bytes": 8 << 30, "margin_bytes": 0,
            "gpu": "t4", "intervals": {}, "notes": ["all logits are kept"],
            "samples_per_s": 1.0, "tokens_per_s": 2.0,
        },
    }  # fmt: skip
    done = (4, json.dumps(printed), "")
    monkeypatch.setattr("tuner.app.cli.mcp._run_here", lambda words: done)
    answer = answered(tools(may_run=False), "check", {"program": ["train.py"], **GPU})
    assert answer.data == printed
    assert answer.text.startswith("unknown: all logits are kept (predicted).")
    assert "Exit code 4: unknown" in answer.text
    assert "GiB" not in answer.text


def test_a_program_runs_only_where_server_and_question_say_so():
    quiet, able = tools(may_run=False)["check"], tools(may_run=True)["check"]
    question = {"program": ["train.py", "--run"], **GPU}
    tail = ["--json", "--", "train.py", "--run"]
    assert quiet.words(question) == ["check", "--gpu=rtx4090", "--predict", *tail]
    assert able.words(question) == quiet.words(question)
    assert able.words({**question, "run": True}) == ["check", "--gpu=rtx4090", *tail]
    assert "executes its code" in able.input_schema()["properties"]["run"]["description"]


def test_settings_are_typed_as_on_the_command_line():
    tool: CommandTool = tools(may_run=False)["estimate"]
    words = tool.words(
        {"model": "m", "qlora": True, "set": {"a": True, "b": [1, 2]}, "lora": False}
    )
    assert words == ["estimate", "--model=m", "--qlora", "--set=a=true", "--set=b=[1,2]", "--json"]


def test_without_the_extra_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "mcp.server.stdio", None)
    assert run(["mcp"]) == 3
    assert f"pip install '{DISTRIBUTION}[mcp]'" in capsys.readouterr().err


def test_the_configuration_and_the_skill_are_printed(capsys):
    assert run(["mcp", "--config", "--allow-run"]) == 0
    server = json.loads(capsys.readouterr().out)["mcpServers"]["tuner"]
    assert Path(server["command"]).is_absolute()
    assert server["args"] == ["mcp", "--allow-run"]
    assert run(["mcp", "--skill"]) == 0
    assert capsys.readouterr().out == skill_file().read_text()
    assert skill_file().read_text().startswith("---\nname: tuner\ndescription: ")
