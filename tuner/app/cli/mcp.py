"""`tuner mcp`: commands of tuner as the tools of an MCP server (Model Context Protocol).

A tool is a command line that ends in `--json`: the options make its input schema, `docs/schemas`
has its output schema, and a paragraph is made of the answer. Nothing is predicted here.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click

import tuner
from tuner.app.cli import subcommand
from tuner.app.cli.main import load
from tuner.app.target import ALL
from tuner.core import errors
from tuner.core.environment import own_python
from tuner.core.expressions import show
from tuner.core.files import shipped_places
from tuner.core.supervised import ProgramTask, run_supervised
from tuner.program.program import ONLY_BELOW
from tuner.report.terminal.verdict import ANSWER, CHANGE

Schema = dict[str, Any]

INSTRUCTIONS = (
    "Answers whether a fine-tuning run fits a GPU, how fast it is and what to change, without that "
    "GPU. Report numbers with their source (predicted, emulated or measured) and interval. An "
    "unknown verdict or an error is no number: say so, and pass on the hint."
)

PLAIN = ["string", "number", "boolean"]
VALUES = {"type": [*PLAIN, "array"], "items": {"type": PLAIN}}
SET = {
    "type": "object",
    "additionalProperties": VALUES,
    "description": 'Parameters to set, e.g. {"max_length": 2048, "precision": "nf4"}.',
}
ONE_GPU = {
    "type": "string",
    "description": "One GPU type, e.g. rtx4090 or h100_sxm; `auto` is this machine's.",
}
MODEL = {
    "type": "string",
    "description": "A name of `tuner models`, an id of the Hugging Face hub, or a folder.",
}
PROGRAM = {
    "type": ["array", "string"],
    "items": {"type": "string"},
    "description": "A script with its arguments, a notebook, a settings file of Axolotl, "
    "LLaMA-Factory, TRL or torchtune, or a launcher's command: words, or one line as in a shell.",
}
RUN = {
    "type": "boolean",
    "default": False,
    "description": "Run the program on an emulated GPU, instead of predicting it. This executes "
    "its code on this machine, with the user's rights.",
}


@dataclass(frozen=True, slots=True)
class _CommandTool:
    """A command as a tool: the options that it takes, and those that a call must have."""

    command: str
    description: str
    options: tuple[str, ...]
    required: tuple[str, ...] = ()
    properties: Mapping[str, Schema] = field(default_factory=dict)
    """Schemas of arguments that no option of the command has."""

    def input_schema(self) -> Schema:
        """The options as JSON properties, with the help of the command line."""
        known = {one.opts[0]: one for one in load(self.command).params}
        found = {_name(option): _schema_of(known[option]) for option in self.options}
        return {
            "type": "object",
            "properties": {**found, **self.properties},
            "required": list(self.required),
            "additionalProperties": False,
        }

    def words(self, arguments: Mapping[str, Any]) -> list[str]:
        """The command line of a call, whose arguments are of the input schema."""
        words = [self.command]
        for option in self.options:
            value = arguments.get(_name(option))
            if isinstance(value, bool):
                words += [option] if value else []
            elif isinstance(value, Mapping):
                words += [f"{option}={name}={show(each)}" for name, each in value.items()]
            elif value is not None:
                # One word: no value is taken for an option.
                several = value if isinstance(value, list) else [value]
                words += [f"{option}={each}" for each in several]
        if self.command == "check" and not arguments.get("run"):
            words.append("--predict")
        words.append("--json")
        if "program" in arguments:
            program = arguments["program"]
            words += ["--", *(shlex.split(program) if isinstance(program, str) else program)]
        return words

    def output_schema(self) -> Schema:
        """The schema of `--json`; an emulated answer has fields of its own."""
        name = f"{self.command}.json"
        places = shipped_places(f"schemas/{name}", f"docs/schemas/{name}")
        path = next(path for path in places if path.exists())
        written: Schema = _opened(json.loads(path.read_text("utf-8")))
        if self.command != "check":
            return written
        predicted = {"properties": {"source": {"const": "predicted"}}}
        return {"type": "object", "required": ["source"], "if": predicted, "then": written}


def _opened(schema: Any) -> Any:
    """A schema without its closed objects: a client refuses no answer for a field more or less."""
    if isinstance(schema, list):
        return [_opened(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: _opened(value)
        for key, value in schema.items()
        if not (key == "additionalProperties" and value is False)
        and not (key == "required" and isinstance(value, list))
    }


def _name(option: str) -> str:
    return option.removeprefix("--").replace("-", "_")


def _schema_of(option: click.Parameter) -> Schema:
    assert isinstance(option, click.Option)
    if option.name == "settings":
        return SET
    if option.opts[0] == "--gpu":
        return ONE_GPU
    kind: Schema = {"type": "string"}
    if option.is_flag:
        kind = {"type": "boolean"}
    elif isinstance(option.type, click.types.IntParamType):
        kind = {"type": "integer", "minimum": 1}
    if option.multiple:
        kind = {"type": ["array", "string"], "items": kind}
    return {**kind, "description": option.help}


TOOLS = (
    _CommandTool(
        "check",
        "Whether a training program fits on a GPU, with the change that makes it fit or makes it "
        "faster. Its lines run with stand-ins for its libraries: nothing is trained or changed.",
        ("--gpu", "--gpu-memory", "--gpus", "--headroom", "--model", "--set", "--examples"),
        ("program", "gpu"),
        {"program": PROGRAM, "model": MODEL},
    ),
    _CommandTool(
        "estimate",
        "Memory, speed and whether it fits, of one model and GPU with settings that you name "
        "rather than a program.",
        ("--model", "--gpu", "--lora", "--qlora", "--full", "--set", "--gpu-memory", "--headroom"),
        ("model", "gpu"),
        {"model": MODEL},
    ),
    _CommandTool(
        "best",
        "The recommended configuration of a finished search: of the user's results folder, else of "
        "the results that come with tuner (`tuner spaces` lists them). Nothing is searched.",
        ("--space", "--gpu", "--results", "--where", "--max-memory", "--headroom", "--objective"),
        ("space", "gpu"),
    ),
)


def tools(*, may_run: bool) -> dict[str, _CommandTool]:
    """The tools by name; with `may_run`, `check` takes an argument that runs the program."""
    found = {tool.command: tool for tool in TOOLS}
    if may_run:
        asked = {**found["check"].properties, "run": RUN}
        found["check"] = replace(found["check"], properties=asked)
    return found


@subcommand("mcp", "tuner mcp")
@click.option(
    "--allow-run", "may_run", is_flag=True, help="Let `check` emulate programs, if asked to."
)
def command(*, may_run: bool) -> None:
    """Answer an agent's questions: an MCP server on stdin and stdout.

    Its tools are check, estimate and best. They write no file outside of tuner's cache. `check`
    takes programs below this folder; with --allow-run, it emulates one if asked to.
    """
    try:
        import mcp.server.stdio  # noqa: F401
    except ModuleNotFoundError as error:
        raise errors.UnavailableError(
            f"the MCP server needs {error.name}, which is not installed",
            hint=errors.install_command("mcp"),
        ) from error
    import anyio

    for number in (signal.SIGINT, signal.SIGTERM):
        # The thread that reads stdin can't be woken, and an orderly end would wait for it. The
        # command of a call ends with this process.
        signal.signal(number, lambda *_: os._exit(errors.EXIT_INTERRUPTED))
    anyio.run(_serve, tools(may_run=may_run))


async def _serve(offered: Mapping[str, _CommandTool]) -> None:
    """Serve `offered` on stdin and stdout until the client closes them."""
    import anyio.to_thread
    import mcp_types as types
    from mcp.server.lowlevel import Server
    from mcp.server.stdio import stdio_server

    one_at_a_time = anyio.Lock()  # each may take all memory that there is

    async def listed(context: Any, params: Any) -> Any:
        return types.ListToolsResult(
            tools=[
                types.Tool(
                    name=name,
                    description=f"{tool.description} Paths are absolute, or of {Path.cwd()}.",
                    input_schema=tool.input_schema(),
                    output_schema=tool.output_schema(),
                    annotations=types.ToolAnnotations(read_only_hint="run" not in tool.properties),
                )
                for name, tool in offered.items()
            ]
        )

    async def called(context: Any, params: Any) -> Any:
        stop = threading.Event()
        given = (offered, params.name, params.arguments or {}, stop.is_set)
        try:
            async with one_at_a_time:
                answer = await anyio.to_thread.run_sync(answered, *given, abandon_on_cancel=True)
        finally:
            stop.set()  # it was cancelled, or stdin has ended
        return types.CallToolResult(
            content=[types.TextContent(type="text", text=answer.text)],
            structured_content=answer.data,
            is_error=answer.data is None,
        )

    server = Server(
        "tuner",
        version=tuner.__version__,
        instructions=INSTRUCTIONS,
        on_list_tools=listed,
        on_call_tool=called,
    )
    async with stdio_server() as streams:
        await server.run(*streams, server.create_initialization_options())


CALL_S = 600.0
"""A call has no answer after this time."""
MOST_ARGUMENT_CHARS = 16_000
"""Length of a tool's name and its arguments as JSON."""
MOST_JSON_BYTES = 1 << 20
"""More structured content than this is refused."""
MOST_CHARS = 8_000
"""Length of an answer's text."""

NOTED = ("ignored: ", "warning: ")
"""Lines of a command that has an answer begin so where it warns; the others tell its progress."""


@dataclass(frozen=True, slots=True)
class _ToolAnswer:
    """The text that a person sees, and the data of `--json`: None for an error."""

    text: str
    data: dict[str, Any] | None = None


def answered(
    offered: Mapping[str, _CommandTool],
    name: str,
    given: Mapping[str, Any],
    stopped: Callable[[], bool] = lambda: False,
) -> _ToolAnswer:
    """The answer to a call, whatever is wrong with it; none is needed once it is `stopped`."""
    from jsonschema import Draft202012Validator

    try:
        tool, words = _asked(offered, name, given)
        code, printed, said = _run(words, stopped)
    except errors.TunerError as error:
        return _failed(error.exit_code, f"error: {error}")
    if not printed:
        return _failed(code, said)
    try:
        data = json.loads(printed)
    except ValueError:  # it was killed, or printed more than is read
        return _failed(
            errors.EXIT_UNAVAILABLE, f"{said}\nerror: the answer is too long, or not whole"
        )
    notes = [f"{line}." for line in said.splitlines() if line.startswith(NOTED)]
    text = "\n".join((*_answer(data), *notes))
    if not Draft202012Validator(tool.output_schema()).is_valid(data):  # clients would refuse it
        return _failed(code, f"{text}\nIts JSON is left out: a fault of tuner's own.")
    text = text[:MOST_CHARS]
    return _ToolAnswer(text if code == errors.EXIT_FOUND else f"{text}\n{_code_text(code)}", data)


def _answer(data: Mapping[str, Any]) -> Iterator[str]:
    """The fields that the command shows a person, with the difference of its change."""
    for label, text in ((row["label"], row["text"]) for row in data["answer"]):
        yield text if label in (ANSWER, CHANGE) else f"{label}: {text}"
        if label == CHANGE and data["suggestion"]:
            yield data["suggestion"]["difference"]
    yield from (f"use: `{command}`" for command in data.get("use", ()))


def _asked(
    offered: Mapping[str, _CommandTool], name: str, given: Mapping[str, Any]
) -> tuple[_CommandTool, list[str]]:
    """The tool of a call and its command line. Raises `InputError`."""
    from jsonschema import Draft202012Validator

    if len(json.dumps((name, given))) > MOST_ARGUMENT_CHARS:
        raise errors.InputError(
            f"the arguments are longer than {MOST_ARGUMENT_CHARS:,} characters of JSON",
            hint="ask about one program or model",
        )
    tool = offered.get(name)
    if tool is None:
        raise errors.unknown("tool", name, offered)
    given = {name: _unquoted(value) for name, value in given.items()}
    if wrong := [
        f"{error.json_path}: {error.message}"
        for error in Draft202012Validator(tool.input_schema()).iter_errors(given)
    ]:
        raise errors.InputError("; ".join(wrong))
    gpu = given.get("gpu", "")
    if gpu == ALL or "," in gpu:
        raise errors.InputError("gpu is one GPU type", hint="call once for each type")
    try:
        return tool, tool.words(given)
    except ValueError as error:  # no line of a shell
        raise errors.InputError(f"program: {error}") from error


def _unquoted(value: Any) -> Any:
    """A list or an object that a client sent as text."""
    if isinstance(value, str) and value.startswith(("[", "{")):
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(value)
    return value


def _failed(code: int, said: str) -> _ToolAnswer:
    said = said.strip()
    if len(said) > MOST_CHARS:
        half = MOST_CHARS // 2
        said = f"{said[:half]}\n...\n{said[-half:]}"
    return _ToolAnswer(f"{said}\n{_code_text(code)}")


def _code_text(code: int) -> str:
    return f"Exit code {code}: {errors.EXIT_CODES.get(code, 'a fault of its own')}."


def _run(words: Sequence[str], stopped: Callable[[], bool]) -> tuple[int, str, str]:
    """The exit code, stdout and stderr of a command, which ends when it is `stopped`.

    It has a process of its own: a program that runs there prints, takes signals and memory.
    """
    task = ProgramTask(
        command=tuple(own_python("tuner", *words)),
        environment={**os.environ, ONLY_BELOW: str(Path.cwd().resolve())},
        mark=f"TUNER_CALL={uuid.uuid4().hex}",
        timeout_s=CALL_S,
    )
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        end = run_supervised(task, output=out, errors=err, stopped=stopped)
        if end.stopped_by == "timeout":
            return errors.EXIT_UNAVAILABLE, "", f"error: no answer after {CALL_S / 60:.0f} minutes"
        out.seek(0)
        err.seek(0)
        both = (file.read(MOST_JSON_BYTES).decode(errors="replace") for file in (out, err))
        printed, said = both
    return end.exit_status, printed, said
