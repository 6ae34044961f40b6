"""Runs notebooks in a kernel without PyTorch and network: most readers begin there.

`python tests/jupyter_example.py` runs examples/tuner.ipynb and keeps what it shows; every
difference is to be read before it is committed.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

import tuner
from tuner.core.errors import MODULES

EXAMPLE = Path(__file__).parents[1] / "examples" / "tuner.ipynb"

_HIDES = f"""\
from importlib.machinery import PathFinder

found = PathFinder.find_spec


def find_spec(name, path=None, target=None):
    return None if name.partition(".")[0] in {sorted(MODULES)} else found(name, path, target)


PathFinder.find_spec = find_spec
"""


def executed(notebook: NotebookNode, folder: Path, **environment: str) -> NotebookNode:
    """The notebook with its outputs, run in the empty `folder`. Raises `CellExecutionError`."""
    (folder / "hidden").mkdir()
    (folder / "hidden" / "sitecustomize.py").write_text(_HIDES)
    place = folder / "here"
    place.mkdir()
    paths = [str(folder / "hidden"), str(Path(tuner.__file__).parents[1])]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "IPYTHONDIR": str(folder / "ipython"),
        "HF_HUB_OFFLINE": "1",
        **environment,
    }
    client = NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(place)}})
    client.execute(env=env)
    return notebook


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        ran = executed(nbformat.read(EXAMPLE, 4), Path(scratch))
    for cell in ran.cells:
        cell.metadata.pop("execution", None)  # when it ran
    nbformat.write(ran, EXAMPLE)
    sys.stdout.write(f"{EXAMPLE.name}: read what changed\n")
