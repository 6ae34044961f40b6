"""Virtual environments with the versions that a row was measured with, and a local model hub."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment. `over` is one whose packages it sees: a CUDA build takes 7 GB."""

    name: str
    packages: tuple[str, ...]
    over: Environment | None = None
    note: str = ""
    """How its versions differ from the rows'; empty where they are the same."""

    def python(self, root: Path) -> Path:
        """Its interpreter."""
        return root / self.name / "bin" / "python"

    def make(self, root: Path) -> Path:
        """Its interpreter, after making it where it is not there yet."""
        folder, complete = root / self.name, root / self.name / "complete"
        if complete.exists():
            return self.python(root)
        print(f"making {folder}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        options = []
        if self.over is not None:
            self.over.make(root)
            (_packages_of(folder) / "over.pth").write_text(
                f"{_packages_of(root / self.over.name)}\n"
            )
            options = ["--no-deps"]
        python = str(self.python(root))
        subprocess.run([python, "-m", "pip", "install", "-q", *options, *self.packages], check=True)
        complete.touch()
        return self.python(root)


def _packages_of(folder: Path) -> Path:
    return next((folder / "lib").glob("python*")) / "site-packages"


# `===` asks for the wheel without a local version, which is the CUDA build.
TORCH_2_10 = Environment(
    "torch-2.10",
    (
        "torch===2.10.0",
        "transformers==5.0.0",
        "peft==0.19.1",
        "bitsandbytes==0.50.2",
        "accelerate",
        "numpy",
        "fitcheck-llm==0.3.1",
    ),
)
TORCH_2_14 = Environment(
    "torch-2.14",
    (
        "torch===2.14.0",
        "transformers==5.17.0",
        "peft==0.20.0",
        "bitsandbytes==0.50.2",
        "accelerate",
        "numpy",
        "fitcheck-llm==0.3.1",
    ),
)
CANIFINETUNE = Environment(
    "canifinetune",
    (
        "transformers==5.8.1",
        "bitsandbytes==0.49.2",
        "canifinetune==0.2.0",
        "pydantic==2.14.3",
        "pydantic-core==2.50.4",
        "annotated-types",
        "typing-inspection",
        "platformdirs",
    ),
    over=TORCH_2_10,
    note="torch 2.10, and the row 2.6",
)
FITSCOUT = Environment(
    "fitscout",
    ("fitscout==0.1.1",),
    over=TORCH_2_10,
    note="the row's versions are not known",
)


ENVIRONMENTS = {one.name: one for one in (TORCH_2_10, TORCH_2_14, CANIFINETUNE, FITSCOUT)}


def source(root: Path, package: str, version: str) -> Path:
    """The unpacked source distribution of a package, which has the scripts that its wheel lacks."""
    folder = root / "sources"
    found = next(folder.glob(f"{package.replace('-', '_')}-{version}/"), None)
    if found is None:
        folder.mkdir(parents=True, exist_ok=True)
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "--no-deps",
            "--no-binary",
            ":all:",
        ]
        subprocess.run([*command, "-d", str(folder), f"{package}=={version}"], check=True)
        archive = next(folder.glob(f"{package.replace('-', '_')}-{version}.tar.gz"))
        with tarfile.open(archive) as opened:
            opened.extractall(folder, filter="data")
        found = next(folder.glob(f"{package.replace('-', '_')}-{version}/"))
    return found


def offer(hub: Path, model: str, config: Path | None = None) -> None:
    """Lay a hollow checkpoint of `model` into a hub cache, as a download of it would lie there.

    `config` is the folder of its configuration, for a model that the catalogue doesn't have.
    """
    from tuner.space.models.hollow import write_hollow

    revision = "0" * 40
    folder = hub / "hub" / f"models--{model.replace('/', '--')}"
    if not (folder / "refs" / "main").exists():
        write_hollow(str(config or model), folder / "snapshots" / revision, overwrite=True)
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / "main").write_text(revision)
