"""Virtual environments with the versions that a row was measured with, and programs' sources."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

from tuner.space.models.hollow import write_hollow


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
        over = self.over.make(root) if self.over else None
        command = [str(over or sys.executable), "-m", "venv", "--clear", str(folder)]
        subprocess.run(command, check=True)
        if over is not None:
            site = next((folder / "lib").glob("python*")) / "site-packages"
            below = next((over.parent.parent / "lib").glob("python*")) / "site-packages"
            (site / "over.pth").write_text(f"{below}\n")
        python = str(self.python(root))
        uv = shutil.which("uv")
        install = [python, "-m", "pip", "install", "-q"]
        if uv is not None:
            install = [uv, "pip", "install", "-q", "--python", python]
        subprocess.run([*install, *(["--no-deps"] if over else []), *self.packages], check=True)
        complete.touch()
        return self.python(root)


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
    "fitscout", ("fitscout==0.1.1",), over=TORCH_2_10, note="the row's versions are not known"
)

ENVIRONMENTS = {one.name: one for one in (TORCH_2_10, TORCH_2_14, CANIFINETUNE, FITSCOUT)}


def source(root: Path, package: str, version: str) -> Path:
    """The unpacked source distribution of a package, which has the scripts that its wheel lacks."""
    folder = root / "sources"
    pattern = f"{package.replace('-', '_')}-{version}/"
    found = next(folder.glob(pattern), None)
    if found is None:
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps"]
        command += ["--no-binary", ":all:", "-d", str(folder), f"{package}=={version}"]
        subprocess.run(command, check=True)
        archive = next(folder.glob(f"{pattern[:-1]}.tar.gz"))
        with tarfile.open(archive) as opened:
            opened.extractall(folder, filter="data")
        found = next(folder.glob(pattern))
    return found


def offer(hub: Path, model: str) -> None:
    """Lay a hollow checkpoint of `model` into a hub cache, as a download of it would lie there."""
    revision = "0" * 40
    folder = hub / "hub" / f"models--{model.replace('/', '--')}"
    if not (folder / "refs" / "main").exists():
        write_hollow(model, folder / "snapshots" / revision)
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / "main").write_text(revision)
