"""The layers, and what may be imported where: read from the source, and tried in a process."""

import ast
import functools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import click
import pytest

from tuner.app.cli import with_help_all
from tuner.app.cli.main import COMMANDS, cli, load, module_of

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "tuner").rglob("*.py"))

# What each room may import beside itself; nothing else of tuner.
ROOMS: dict[str, set[str]] = {
    "core": set(),
    "space": {"core"},
    "cost": {"core"},
    "predict": {"core", "space", "cost"},
    "emulator": {"core", "cost"},
    "program": {"core", "space"},
    "trial": {"core", "space", "cost", "predict", "program", "emulator"},
    "searches": {"core", "space", "cost", "predict", "trial"},
    "report": {"core", "space", "cost", "searches"},
}
ROOMS["app"] = set(ROOMS)

# What people import beside the rooms: callbacks for training code, tests for workloads, the API.
PUBLIC = {"__init__", "__main__", "integrations", "testing"}

# Libraries that cost tenths of seconds and more, and the only packages that may load them when
# they are imported themselves. Elsewhere they are imported in the function that needs them.
HEAVY = {
    "torch": {"cost", "predict", "emulator", "trial"},
    "transformers": set(),
    "peft": set(),
    "bitsandbytes": {"cost"},
    "numpy": {"cost", "predict", "searches"},
    "ray": {"searches"},
    "optuna": {"integrations", "searches"},
    "pandas": set(),
    "matplotlib": set(),
    "plotly": set(),
}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def package_of(module: str) -> str:
    """The part of tuner that a module belongs to: "space" for "tuner.space.load"."""
    return module.split(".")[1] if "." in module else "__init__"


@functools.cache
def imports(path: Path, *, at_import_only: bool = False) -> tuple[tuple[str, int], ...]:
    """Every module that a file names in an import, with the line.

    With `at_import_only` those that importing the file itself would load: none in functions,
    and none under `if TYPE_CHECKING`.
    """
    return tuple(_imports(path, at_import_only))


def _imports(path: Path, at_import_only: bool) -> Iterator[tuple[str, int]]:
    pending: list[ast.AST] = [ast.parse(path.read_text())]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            assert node.module is not None
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from ((name if is_module(name) else node.module, node.lineno) for name in names)
        if at_import_only and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if at_import_only and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            pending += node.orelse
            continue
        pending += ast.iter_child_nodes(node)


def is_module(name: str) -> bool:
    path = ROOT / name.replace(".", "/")
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_module_belongs_to_a_room():
    assert {package_of(module_name(path)) for path in FILES} == set(ROOMS) | PUBLIC


def test_rooms_import_only_what_stands_below_them():
    wrong = [
        f"{path}:{line}: {name}"
        for path in FILES
        for name, line in imports(path)
        if (room := package_of(module_name(path))) in ROOMS
        and name.split(".")[0] == "tuner"
        and package_of(name) not in ROOMS[room] | {room, "__init__"}
    ]
    assert not wrong


def test_the_picture_of_the_rooms_is_current():
    """An arrow for each import that no longer path implies."""
    page = (ROOT / "docs/reference/developing.md").read_text("utf-8")
    needed = {
        (room, below)
        for room, rooms in ROOMS.items()
        for below in rooms
        if not any(below in ROOMS[between] for between in rooms)
    }
    assert set(re.findall(r"^  (\w+) --> (\w+)$", page, re.MULTILINE)) == needed


def test_no_test_imports_the_benchmarks():
    """Cases that tests share are in `tests/shared_cases`."""
    tests = ROOT / "tests"
    paths = [*tests.glob("*.py"), *tests.glob("unit/*.py"), *tests.glob("shared_cases/*.py")]
    found = {p.name for p in paths for name, _ in imports(p) if name.startswith("benchmarks")}
    assert not found


def test_no_cycles_between_modules():
    """Not even hidden ones, as above."""
    modules = {module_name(path): path for path in FILES}
    graph = {
        module: {name for name, _ in imports(path) if name in modules} - {module}
        for module, path in modules.items()
        if module != "tuner"  # names what it gives away, and imports nothing
    }
    TopologicalSorter(graph).prepare()  # raises CycleError, with the modules of a circle


def test_ray_and_optuna_stay_in_search():
    wrong = [
        f"{path}:{line}: {name}"
        for path in FILES
        for name, line in imports(path)
        if name.split(".")[0] in {"ray", "optuna"}
        and package_of(module_name(path)) != "searches"
        and module_name(path) != "tuner.integrations.optuna"  # its sampler is one of Optuna's
    ]
    assert not wrong


def test_no_private_part_of_ray_is_used():
    private = re.compile(r"\bray\.(\w+\.)*_|from ray\.(\w+\.)*_|\b_internal_kv|[(,]\s*_\w+=")
    used = {path.name: private.findall(path.read_text()) for path in FILES if "ray" in path.parts}
    assert not {name: found for name, found in used.items() if found}


def test_one_module_starts_python():
    """It leaves out the current folder; only what people run themselves gets a plain Python."""

    def naming(pattern: str) -> set[str]:
        return {module_name(path) for path in FILES if re.search(pattern, path.read_text("utf-8"))}

    home = "tuner.core.environment"
    assert naming(r"\bsys\.executable\b|from sys import|\b_base_executable\b") == {home}
    assert naming(r"\bthis_python\b") == {
        home,
        "tuner.app.cli.diff",
        "tuner.core.host",
        "tuner.emulator.machine",
        "tuner.emulator.build",
        "tuner.integrations.pytest_plugin",
        "tuner.program.program",
    }


def test_heavy_libraries_are_imported_where_they_are_used():
    wrong = [
        f"{path}:{line}: {name}"
        for path in FILES
        for name, line in imports(path, at_import_only=True)
        if name.split(".")[0] in HEAVY
        and package_of(module_name(path)) not in HEAVY[name.split(".")[0]]
    ]
    assert not wrong


def test_light_modules_load_no_heavy_library():
    light = {"core", "program", "report", "space"}
    modules = [m for m in map(module_name, FILES) if package_of(m) in light]
    modules += [
        "tuner.trial.base",
        "tuner.trial.warm",
        "tuner.predict.training",
        "tuner.predict.training",
        "tuner.app.cli.main",
    ]
    modules += [module_of(name) for name in COMMANDS]
    loaded = run_python(
        "import importlib, json, sys\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        f"print(json.dumps([n for n in {sorted(HEAVY)!r} if n in sys.modules]))"
    )
    assert json.loads(loaded) == []


def test_what_runs_inside_an_emulated_program_needs_no_package_of_tuner():
    """Its environment has PyTorch and NumPy; `sitecustomize` would begin a session."""
    inside = [m for m in map(module_name, FILES) if m.startswith("tuner.emulator.inside.")]
    modules = [name for name in inside if not name.endswith(".sitecustomize")]
    missing = [*(HEAVY.keys() - {"torch", "numpy"}), "msgspec", "yaml", "click", "rich", "psutil"]
    run_python(
        "import importlib, sys\n"
        f"sys.modules.update(dict.fromkeys({missing!r}))\n"
        f"for name in {modules!r}: importlib.import_module(name)"
    )


def test_what_reads_a_program_runs_in_any_python():
    """Stand-ins are imported by the user's own interpreter: they need the standard library only."""
    inside = [path for path in FILES if path.parent == ROOT / "tuner/program/standins"]
    wrong = [
        f"{path}:{line}: {name}"
        for path in inside
        for name, line in imports(path, at_import_only=True)
        if name.partition(".")[0] not in sys.stdlib_module_names
        and not name.startswith("tuner.program.standins")
    ]
    assert inside
    assert not wrong


def test_the_command_line_has_no_more_commands_and_options():
    """One of each: a new command, option, page or carrier of an answer takes the place of one.

    Whoever adds one names in the commit the one that goes; what is asked for here only falls.
    """
    assert [*COMMANDS] == [
        "check", "diff", "estimate", "calculator", "tune", "search", "best", "show", "report",
        "data", "apply", "export", "trial", "emulate", "calibrate", "gpus",
        "models", "spaces", "doctor", "mcp",
    ]  # fmt: skip
    every: list[click.Command] = [cli, *(with_help_all(load(name)) for name in COMMANDS)]
    every += [
        each for one in every if isinstance(one, click.Group) for each in one.commands.values()
    ]
    names = {p.opts[0] for one in every for p in one.params if isinstance(p, click.Option)}
    assert len(names) <= 63


SIDE_EFFECTS = """
import importlib, logging, os, signal, sys, threading, warnings
import bitsandbytes, matplotlib, optuna, peft, plotly, torch, transformers
import ray.tune

def state():
    return {
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "signal handlers": [signal.getsignal(s) for s in sorted(signal.valid_signals())],
        "threads": threading.active_count(),
        "log handlers": (list(logging.getLogger().handlers), logging.getLogger().level),
        "warning filters": list(warnings.filters),
        "hooks": (sys.excepthook, sys.displayhook, sys.stdout, sys.stderr),
        "torch": (torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "ray": ray.is_initialized(),
        "optuna": optuna.logging.get_verbosity(),
    }

before = state()
for name in MODULES:
    importlib.import_module(name)
after = state()
print([key for key in before if before[key] != after[key]])
"""


@pytest.mark.slow
def test_importing_has_no_side_effects():
    modules = [m for m in map(module_name, FILES) if m != "tuner.__main__"]
    output = run_python(f"MODULES = {modules!r}\n" + SIDE_EFFECTS)
    # The last line: libraries may print when they are imported, tuner must not.
    assert output.splitlines()[-1] == "[]"


def test_the_glossary_has_few_words_and_their_homes():
    text = (ROOT / "docs/reference/glossary.md").read_text()
    rows = [line.split("|")[1:4] for line in text.splitlines()]
    rows = [row for row in rows if len(row) == 3][2:]
    defined = {
        node.name
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    }
    homes = [home.strip().strip("`") for _, _, home in rows]
    assert [row[0].strip() for row in rows] == sorted(row[0].strip() for row in rows)
    assert len(rows) <= 40
    assert not [
        home
        for home in homes
        if home.split(".")[0] not in defined and not (ROOT / "tuner" / home).exists()
    ]
