"""The package as people install it: a wheel, in an environment outside of the checkout."""

import fcntl
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import tuner

_CHECKOUT = Path(tuner.__file__).parents[1]


def python_with_wheel(shared: Path) -> Path:
    """A Python that has tuner's wheel, and all else of the environment that the tests run in.

    It is made once below `shared`, which processes of one run have in common. Where the tests
    themselves run with an installed wheel, it is their own.
    """
    if not (_CHECKOUT / "pyproject.toml").is_file():
        return Path(sys.executable)
    place = shared / "installed"
    python = place / "venv" / "bin" / "python"
    with (shared / "installed.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (place / "done").exists():
            _install(place, python)
            (place / "done").touch()
    return python


def _install(place: Path, python: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    subprocess.run([*pip, "wheel", "--no-deps", "-w", place, _CHECKOUT], check=True)
    venv.create(place / "venv", symlinks=True)
    (packages,) = (place / "venv" / "lib").glob("python*/site-packages")
    # Of a folder that is named here, .pth files are not read: an editable tuner is not in the way.
    others = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (packages / "others.pth").write_text("\n".join(sorted(others)))
    (wheel,) = place.glob("*.whl")
    install = ["--python", str(python), "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run([*pip, *install], check=True)


def environment() -> dict[str, str]:
    """This process's environment without folders that would come before the wheel."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
