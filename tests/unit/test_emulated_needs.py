"""The emulator runs inside of other people's environments, which have PyTorch and little else."""

from started import run_python

_OURS = ("yaml", "click", "ray", "optuna", "rich", "pydantic", "transformers", "peft", "pynvml")
"""What `tuner` has installed, and the environment of a program need not have."""

_PROGRAM = f"""
import importlib, pkgutil, sys
import tuner.emulator.inside as inside

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {_OURS!r}:
            raise ModuleNotFoundError(f"{{name}} is not in the environment of the program")

sys.meta_path.insert(0, Refuse())
for found in pkgutil.iter_modules(inside.__path__):
    if found.name != "sitecustomize":
        importlib.import_module(f"{{inside.__name__}}.{{found.name}}")
print("all imported")
"""


def test_what_runs_in_a_program_needs_nothing_but_pytorch_and_numpy() -> None:
    done = run_python("-c", _PROGRAM)
    assert done.stdout == "all imported\n", done.stderr
