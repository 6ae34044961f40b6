"""Virtual environments with a program's packages over those of another, and programs' sources."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment. `over` is one whose packages it sees: a CUDA build takes 7 GB.

    `over` may be the interpreter of an environment that is there.
    """

    name: str
    packages: tuple[str, ...]
    over: Environment | Path | None = None
    note: str = ""
    """How its versions differ from the rows'; empty where they are the same."""
    with_dependencies: bool = False
    """Whether the packages' own requirements are installed over those of `over` too."""

    def python(self, root: Path) -> Path:
        """Its interpreter."""
        return root / self.name / "bin" / "python"

    def make(self, root: Path) -> Path:
        """Its interpreter, after making it where it is not there yet."""
        folder, complete = root / self.name, root / self.name / "complete"
        if complete.exists():
            return self.python(root)
        print(f"making {folder}", flush=True)
        over = self.over.make(root) if isinstance(self.over, Environment) else self.over
        options = ["--clear"] if shutil.which("uv") is None else ["--clear", "--without-pip"]
        command = [str(over or sys.executable), "-m", "venv", *options, str(folder)]
        subprocess.run(command, check=True)
        if over is not None:
            site = next((folder / "lib").glob("python*")) / "site-packages"
            below = next((over.parent.parent / "lib").glob("python*")) / "site-packages"
            (site / "over.pth").write_text(f"{below}\n")
        self._install(folder, root)
        complete.touch()
        return self.python(root)

    def _install(self, folder: Path, root: Path) -> None:
        options = [] if self.over is None or self.with_dependencies else ["--no-deps"]
        python = str(self.python(root))
        uv = shutil.which("uv")
        if uv is None:  # pip sees what lies below, and leaves it where it satisfies
            command = [python, "-m", "pip", "install", "-q", *options]
        else:  # uv does not: what comes from below is left out by name
            command = [uv, "pip", "install", "-q", "--python", python, *options]
            if self.over is not None and self.with_dependencies:
                below = folder / "below.txt"
                below.write_text("".join(f"{name}; sys_platform == 'never'\n" for name in BELOW))
                command += ["--overrides", str(below)]
        subprocess.run([*command, *self.packages], check=True)


BELOW = ("torch", "triton", "nvidia-nccl-cu13", "nvidia-cudnn-cu13", "cuda-bindings")
"""Packages that no environment over another has of its own: they make the CUDA build."""


def named(packages: tuple[str, ...], over: Path) -> Environment:
    """The environment for these packages and their requirements, by a hash of their names."""
    digest = hashlib.sha256("\n".join([str(over), *sorted(packages)]).encode()).hexdigest()[:12]
    return Environment(digest, packages, over, with_dependencies=True)


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


def repository(root: Path, name: str, commit: str, mirrors: Path | None = None) -> Path:
    """The files of a repository on GitHub at a commit.

    `mirrors` is a folder of bare ones, OWNER+NAME/repo; without it, the repository is cloned.
    """
    folder = root / "sources" / f"{name.replace('/', '+')}-{commit[:12]}"
    if folder.exists():
        return folder
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    if mirrors is None:
        subprocess.run(["git", "clone", "-q", f"https://github.com/{name}", str(part)], check=True)
        subprocess.run(["git", "-C", str(part), "checkout", "-q", commit], check=True)
    else:
        mirror = mirrors / name.replace("/", "+") / "repo"
        archive = part.with_suffix(".tar")
        command = ["git", f"--git-dir={mirror}", "archive", "-o", str(archive), commit]
        subprocess.run(command, check=True)
        with tarfile.open(archive) as opened:
            opened.extractall(part, filter="data")
        archive.unlink()
    part.rename(folder)
    return folder


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
