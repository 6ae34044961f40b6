"""Writes the names that training libraries take: tuner/program/signatures.json.

    python -m benchmarks.signatures
    python -m benchmarks.signatures --folder UNPACKED_WHEELS --folder OLDER_WHEELS

Signatures are read from the source of installed or unpacked packages; nothing is imported or run.
A package is looked for in each --folder first. What is not found keeps the names that the file has.
LLaMA-Factory takes those of the newest transformers that it allows, which other programs do not
use: --older names the folder of that.
"""

from __future__ import annotations

import argparse
import ast
import json
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from tuner.program.signatures import FILE

FILES = {
    "transformers": (
        "training_args.py", "training_args_seq2seq.py", "trainer.py", "trainer_seq2seq.py",
        "utils/quantization_config.py", "modeling_utils.py", "configuration_utils.py",
        "models/auto/auto_factory.py", "models/auto/configuration_auto.py",
    ),
    "trl": ("trainer/*.py", "scripts/utils.py", "experimental/*/*.py"),
    "peft": ("config.py", "tuners/**/*.py", "mapping_func.py", "utils/other.py"),
    "accelerate": ("commands/launch.py",),
    "axolotl": ("utils/schemas/**/*.py",),
    "llamafactory": ("hparams/*.py",),
}  # fmt: skip
"""By package: the files that define what programs call, the most certain first."""

FUNCTIONS = ("prepare_model_for_kbit_training", "get_peft_model")
METHODS = ("gradient_checkpointing_enable", "activation_checkpointing_enable")

LOADERS = ("from_pretrained", "from_dict", "get_config_dict", "_get_config_dict", "_from_config")
"""Functions that look for names among their `**kwargs`."""

LLAMAFACTORY = (
    "ModelArguments", "DataArguments", "TrainingArguments", "FinetuningArguments",
    "GeneratingArguments",
)  # fmt: skip
"""The classes that `llamafactory-cli train` fills (hparams/parser.py `_TRAIN_ARGS`)."""

AXOLOTL = "AxolotlInputConfig"


@dataclass(slots=True)
class Package:
    """The classes and functions of one package by name, as they are parsed."""

    version: str
    classes: dict[str, ast.ClassDef] = field(default_factory=dict)
    functions: dict[str, ast.FunctionDef] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    trees: list[ast.Module] = field(default_factory=list)

    def parameters(self, name: str) -> dict[str, Any] | None:
        """What a class or a function takes: its own names and its bases, or None."""
        if name in self.functions:
            return _of_function(self.functions[name])
        node = self.classes.get(self.aliases.get(name, name))
        if node is None:
            return None
        made = next((n for n in node.body if getattr(n, "name", "") == "__init__"), None)
        if isinstance(made, ast.FunctionDef):
            found = _of_function(made)
            if not (found.get("open") and made.args.vararg):
                return found  # `*args, **kwargs` are handed on to the base
        bases = [b for base in node.bases if (b := _last(base)) and b != name]
        bases = [self.aliases.get(base, base) for base in bases]
        return {"names": sorted(_fields(node)), "bases": bases}

    def all_names(self, name: str, others: Sequence[Package] = ()) -> set[str]:
        """The names of a class and of its bases, here and in `others`."""
        for package in (self, *others):
            found = package.parameters(name)
            if found is not None:
                more = (package.all_names(base, others) for base in found.get("bases", ()))
                return set(found["names"]).union(*more)
        return set()


def read_package(name: str, folders: Sequence[Path]) -> Package | None:
    """The package in the first of the folders that has it."""
    for folder in folders:
        known = {d.metadata["Name"]: d.version for d in distributions(path=[str(folder)])}
        if name not in known or not (folder / name).is_dir():
            continue
        package = Package(known[name])
        for pattern in FILES[name]:
            for path in sorted((folder / name).glob(pattern)):
                _index(package, ast.parse(path.read_text(encoding="utf-8")))
        return package
    return None


def _index(package: Package, tree: ast.Module) -> None:
    package.trees.append(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            package.classes.setdefault(node.name, node)
        elif isinstance(node, ast.FunctionDef) and node.name in (*FUNCTIONS, *METHODS):
            if not any(_last(d) == "overload" for d in node.decorator_list):
                package.functions.setdefault(node.name, node)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Name):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    package.aliases[target.id] = node.value.id
        elif isinstance(node, ast.ImportFrom):
            package.aliases |= {a.asname: a.name for a in node.names if a.asname}


def _of_function(node: ast.FunctionDef) -> dict[str, Any]:
    arguments = node.args
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    found: dict[str, Any] = {"names": sorted(name for name in names if name != "self")}
    return {**found, "open": True} if arguments.kwarg else found


def _fields(node: ast.ClassDef) -> Iterator[str]:
    """The fields of a dataclass or a model of pydantic, by the names that are written."""
    for line in node.body:
        if not isinstance(line, ast.AnnAssign) or not isinstance(line.target, ast.Name):
            continue
        kind = ast.unparse(line.annotation)
        given = {k.arg: k.value for k in getattr(line.value, "keywords", ())}
        if "ClassVar" in kind or getattr(given.get("init"), "value", True) is False:
            continue
        yield line.target.id
        if isinstance(alias := given.get("alias"), ast.Constant):
            yield str(alias.value)


def _last(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _loading(package: Package) -> set[str]:
    """Every name that loading a model may look for; more than that does not harm."""
    found: set[str] = set()
    for tree in package.trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name in LOADERS:
                found |= set(_of_function(node)["names"])
                body = [n for n in ast.walk(node) if isinstance(n, ast.Constant)]
                found |= {n.value for n in body if str(n.value).isidentifier()}
    return {str(name) for name in found - {None, True, False, "cls"}}


def _options(package: Package) -> set[str]:
    """The options of `add_argument`, with underscores."""
    return {
        str(argument.value).lstrip("-").replace("-", "_")
        for tree in package.trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and _last(node.func) == "add_argument"
        for argument in node.args
        if isinstance(argument, ast.Constant) and str(argument.value).startswith("--")
    }


def libraries(packages: Mapping[str, Package]) -> Iterator[tuple[str, dict[str, Any]]]:
    """What calls take, by library."""
    for name in ("transformers", "trl", "peft"):
        package = packages.get(name)
        if package is None:
            continue
        ends = ("Config", "Arguments") if name != "transformers" else ("TrainingArguments",)
        wanted = [c for c in package.classes if c.endswith((*ends, "Trainer")) and c[0] != "_"]
        wanted += ["BitsAndBytesConfig", *FUNCTIONS, *METHODS]
        takes: dict[str, Any] = {}
        while wanted:
            one = wanted.pop()
            if one not in takes and (found := package.parameters(one)) is not None:
                takes[one] = found
                wanted += found.get("bases", ())
        if name == "transformers":
            takes[METHODS[0]] = {**takes[METHODS[0]], "bases": [METHODS[1]], "open": False}
            takes["from_pretrained"] = {"names": sorted(_loading(package)), "open": True}
        yield name, {"version": package.version, "takes": takes}
    if (launcher := packages.get("accelerate")) is not None:
        takes = {"accelerate launch": {"names": sorted(_options(launcher))}}
        yield "accelerate", {"version": launcher.version, "takes": takes}


def tools(
    packages: Mapping[str, Package], older: Package | None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """What the files of tools have as keys, by library; `older` is LLaMA-Factory's transformers."""
    if (axolotl := packages.get("axolotl")) is not None:
        names = {"names": sorted(axolotl.all_names(AXOLOTL))}
        yield "axolotl", {"version": axolotl.version, "takes": {"Axolotl": names}}
    if (factory := packages.get("llamafactory")) is not None:
        own = set().union(*(factory.all_names(name) for name in LLAMAFACTORY))
        takes = {"LLaMA-Factory": {"names": sorted(own), "bases": ["its transformers"]}}
        yield "llamafactory", {"version": factory.version, "takes": takes}
    if older is not None:
        names = {"names": sorted(older.all_names("Seq2SeqTrainingArguments"))}
        takes = {"its transformers": names}
        yield "llamafactory's transformers", {"version": older.version, "takes": takes}


def read_all(folders: Sequence[Path], older: Path | None = None) -> dict[str, Any]:
    """All that is found in the folders, as it stands in the file."""
    packages = {n: p for n in FILES if (p := read_package(n, folders)) is not None}
    old = read_package("transformers", [older]) if older is not None else None
    found = {**dict(libraries(packages)), **dict(tools(packages, old))}
    for part in found.values():
        part["takes"] = {name: _row(row) for name, row in sorted(part["takes"].items())}
    return found


def _row(row: Mapping[str, Any]) -> dict[str, Any]:
    """One row of the file, without what says nothing."""
    return {"names": " ".join(row["names"])} | {
        key: row[key] for key in ("bases", "open") if row.get(key)
    }


def written(table: Mapping[str, Any]) -> str:
    """The text of the file: a line for each class, function and tool."""
    parts = []
    for library, part in table.items():
        rows = [f"   {json.dumps(n)}: {json.dumps(row)}" for n, row in part["takes"].items()]
        head = f' {json.dumps(library)}: {{"version": {json.dumps(part["version"])}, "takes": {{'
        parts.append("\n".join((head, ",\n".join(rows), " }}")))
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main() -> None:
    """Write the file anew."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, action="append", default=[])
    parser.add_argument("--older", type=Path)
    options = parser.parse_args()
    installed = Path(sysconfig.get_path("purelib"))
    known = json.loads(FILE.read_text()) if FILE.exists() else {}
    FILE.write_text(written(known | read_all([*options.folder, installed], options.older)))


if __name__ == "__main__":
    main()
