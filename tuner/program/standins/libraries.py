"""The modules of libraries that train, made when the program imports them."""

from __future__ import annotations

import builtins
import copy
import dis
import importlib
import importlib.machinery
import os
import random
import sys
import types
import typing
from opcode import opname
from typing import Any, cast

from tuner.program import standins
from tuner.program.standins import configs, datasets, dotenv, guard, models, trainers, unknown
from tuner.program.standins.record import STANDINS
from tuner.program.standins.unknown import (
    ABSENT,
    CLASSES,
    ORACLE,
    Absent,
    Name,
    Thing,
    Unknown,
    thing,
)

MARK, NAMES = standins.MARK, standins.NAMES
CORE = set("torch transformers trl peft accelerate unsloth datasets bitsandbytes".split())
# A class of these is known by its last name, whatever module it is taken from.
SHORT = set("lightning pytorch_lightning sentence_transformers diffusers setfit tqdm".split())
SHORT |= CORE - {"torch", "bitsandbytes"}
HEAVY = CORE | SHORT | set(NAMES["heavy"])
RELEASES: dict[str, str] = {}
EXPORTS: dict[str, dict[str, str]] = {}
GPU: dict[str, Any] = {}
FIXED: dict[str, Any] = {}
"""Stand-ins with a meaning of their own, by path or by library and last name."""
PARENTS: set[str] = set()
PARSERS = NAMES["parsers"]
_OWN = {
    trainers: "accelerate.Accelerator deepspeed.initialize torch.optim.Optimizer",
    datasets: "torch.utils.data.DataLoader tqdm.tqdm",
    models: "peft.get_peft_model transformers.AutoConfig",
}
_SAME = {"half": "float16", "float": "float32", "double": "float64", "long": "int64"}


def _answers() -> dict[str, Any]:
    """Calls of libraries, and what they return on the request's GPU."""
    memory, count = GPU.get("total_memory_bytes", 1 << 34), GPU.get("count", 1)
    major, minor = GPU.get("capability") or (8, 0)
    name, has_bf16 = GPU.get("name", "GPU"), GPU.get("has_bf16", True)
    processors, world = GPU.get("processors", 64), int(os.environ.get("WORLD_SIZE", "1"))
    properties = types.SimpleNamespace(
        name=name, total_memory=memory, major=major, minor=minor, multi_processor_count=processors
    )
    answers = [
        (None, "torch.cuda.empty_cache torch.cuda.set_device"),
        (None, "torch.cuda.synchronize torch.cuda.reset_peak_memory_stats"),
        (True, "torch.cuda.is_initialized torch.distributed.is_available"),
        (False, "torch.backends.mps.is_available torch.distributed.is_initialized"),
        (0, "torch.cuda.current_device torch.distributed.get_rank"),
        (world, "torch.distributed.get_world_size"),
        (bool(count), "torch.cuda.is_available"),
        (bool(count), "torch.accelerator.is_available"),
        (count, "torch.cuda.device_count torch.accelerator.device_count"),
        (Name("cuda", type="cuda") if count else None, "torch.accelerator.current_accelerator"),
        ((major, minor), "torch.cuda.get_device_capability"),
        (properties, "torch.cuda.get_device_properties"),
        (name, "torch.cuda.get_device_name"),
        ((memory - (1 << 29), memory), "torch.cuda.mem_get_info"),
        (has_bf16, "torch.cuda.is_bf16_supported"),
        (has_bf16, "unsloth.is_bf16_supported unsloth.is_bfloat16_supported"),
        ({"": 0}, "trl.get_kbit_device_map"),
    ]
    return {path: value for value, paths in answers for path in paths.split()}


def _known() -> dict[str, Any]:
    tokenizer, prepare = Unknown("tokenizer"), "peft.prepare_model_for_kbit_training"
    lightning: dict[str, Any] = {"Fabric": trainers.Accelerator}
    lightning |= dict.fromkeys(("LightningModule", "LightningDataModule"), trainers.LightningModule)
    return {
        **{path: getattr(k, path.rpartition(".")[2]) for k in _OWN for path in _OWN[k].split()},
        **{f"lightning.{k}": thing(f"lightning.{k}", v) for k, v in lightning.items()},
        **{f"pytorch_lightning.{k}": thing(f"lightning.{k}", v) for k, v in lightning.items()},
        **{path: models.wraps(path) for path in NAMES["wrappers"]},
        **{path: trainers.special(path) for path in NAMES["memory"]},
        **{f"torch.{k}": Name(f"torch.{_SAME.get(k, k)}", itemsize=2) for k in NAMES["dtypes"]},
        **{k: lambda *args, v=v, **kwargs: v for k, v in _answers().items()},
        **{f"{root}.set_seed": _seed for root in ("transformers", "accelerate", "trl")},
        **{f"{root}.seed_everything": _seed for root in ("lightning", "pytorch_lightning")},
        "accelerate.PartialState": thing("accelerate.PartialState", trainers.Accelerator),
        "torch.dtype": Name,
        **{f"torch.{k}autocast": trainers.Autocast for k in ("", "amp.", "cuda.amp.")},
        "torch.compile": models.compile_model,
        "torch.version.cuda": "13.0",
        "torch.version.hip": None,
        "torch.multiprocessing.spawn": trainers.runs(0),
        prepare: models.wraps(prepare, into="prepared"),
        prepare.replace("kbit", "int8"): models.wraps(prepare, into="prepared"),  # its older name
        "trl.create_reference_model": lambda model, *args, **kwargs: copy.deepcopy(model),
        "trl.setup_chat_format": models.wraps("trl.setup_chat_format", tokenizer),
        "trl.clone_chat_template": models.wraps("trl.clone_chat_template", tokenizer, []),
        "accelerate.notebook_launcher": trainers.runs(),
        "accelerate.find_executable_batch_size": trainers.finds_batch,
        "deepspeed.add_config_arguments": models.passes,
        "torch.tensor": lambda data=None, *args, **kwargs: (
            data if type(data) is Unknown else Unknown("torch.tensor(...)")
        ),
        "tqdm.trange": lambda *args, **kwargs: datasets.tqdm(range(*args)),
        "wandb.agent": trainers.sweep_wandb,
        "wandb.init": trainers.start_wandb,
        "wandb.config": trainers.Tracked({"**": Unknown("wandb.config")}),
        **{f"dotenv.{name}": getattr(dotenv, name) for name in dotenv.NAMES.split()},
    }


# Optuna's
unknown.CALLS["optimize"] = lambda self, args, kwargs: trainers.runs(Unknown("trial"))(*args)


def _patch(owner: Any, name: str, answer: Any) -> None:
    """Lets `answer` make the result of a function; of None the function's own counts."""
    own = getattr(owner, name)

    def call(*args: Any, **how: Any) -> Any:
        made = answer(*args)
        return own(*args, **how) if made is None else made

    setattr(owner, name, call)


def _draws(library: Any, generator: Any) -> None:
    """Notes each number that is drawn without a seed, which is another one in each run."""
    state = {"seeded": False}

    def noted(name: str, own: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            said = [each for each in (*args, *kwargs.values()) if each is not None]
            is_set = bool(said) and not isinstance(said[0], Unknown)
            if name in ("seed", "setstate", "set_state"):
                state["seeded"] = is_set
                return own(*args, **kwargs) if is_set else own(ORACLE.seed)
            if not state["seeded"] and not unknown.is_library(sys._getframe(1).f_code.co_filename):
                ORACLE.ask(f"{library.__name__}.{name}()")
            return own(*args, **kwargs)

        return call

    for name, own in list(vars(library).items()):
        if getattr(own, "__self__", None) is generator:
            setattr(library, name, noted(name, own))
    library.seed()


def _draws_of_numpy(library: Any) -> None:
    _draws(library, library.mtrand._rand)
    default_rng = library.default_rng

    def seeded(seed: Any = None) -> Any:
        if seed is None:
            ORACLE.ask("numpy.random.default_rng()")
        return default_rng(ORACLE.seed if seed is None else seed)

    library.default_rng = seeded


def _seed(seed: Any = None, *args: Any, **kwargs: Any) -> Any:
    """`set_seed` of transformers and others."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    return seed


def start(request: dict[str, Any]) -> None:
    GPU.update(request.get("gpu") or {})
    unknown.ROWS.update(request.get("classes") or {})
    RELEASES.update(request.get("releases") or {})
    models.CONFIGS.update(request.get("configs") or {})
    EXPORTS.update(request.get("exports") or {})
    configs.RENAMED.update(request.get("renamed") or {})
    FIXED.update(_known())
    for path in FIXED:
        while path := path.rpartition(".")[0]:
            PARENTS.add(path)
    # A word that follows from a command of a shell script which isn't run has no type.
    guard.PATCHES["argparse"] = lambda module: _patch(
        module.ArgumentParser,
        "_get_value",
        lambda _, __, text: Unknown(text[len(MARK) : -1].strip()) if MARK in text else None,
    )
    guard.PATCHES["logging"] = lambda module: _patch(
        module, "_checkLevel", lambda level: 20 if isinstance(level, Unknown) else None
    )
    guard.PATCHES["dataclasses"] = lambda module: _patch(
        module, "asdict", lambda one: Unknown("asdict(...)") if type(one) is Unknown else None
    )
    guard.PATCHES["random"] = lambda module: _draws(module, module._inst)
    guard.PATCHES["numpy.random"] = _draws_of_numpy
    sys.meta_path.insert(0, First())
    sys.meta_path.append(Last())
    for package in ("importlib", "concurrent", "urllib", "xml"):  # nothing of which is slow
        importlib.import_module(package).__dict__["__getattr__"] = _part_of(package)


def _part_of(package: str) -> Any:
    """Imports a part of a standard package when it is used: real libraries have imported it."""

    def part(name: str) -> Any:
        try:
            if name[:2] != "__":
                return importlib.import_module(f"{package}.{name}")
        except ModuleNotFoundError:
            pass
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return part


def attribute(path: str) -> Any:
    """The stand-in for a path of a library."""
    root, last = path.partition(".")[0], path.rpartition(".")[2]
    short = f"{root}.{last}" if root in SHORT else path
    if (key := path if path in FIXED else short) in FIXED:
        return FIXED[key]
    if short in PARSERS:  # takes argparse and dataclasses, which cost time
        return getattr(importlib.import_module("tuner.program.standins.parsers"), last)
    if root == "typing_extensions" and hasattr(typing, last):
        return getattr(typing, last)
    if last == "__version__":
        try:
            return RELEASES.get(root) or importlib.import_module("importlib.metadata").version(root)
        except Exception:
            return Unknown(path)
    known = path if path in CLASSES else short
    if configs.is_config(known):
        return configs.config(known)
    if last.startswith("apply_liger_kernel_to_"):
        return trainers.special(path)
    if last.startswith("is_") and last.endswith("_available"):
        return lambda *args, **kwargs: _available(last[3:-10])
    is_table = last.isupper() and "_" in last  # MODEL_FOR_CAUSAL_LM_MAPPING
    is_class = last[:1].isupper() and not is_table
    return _class(known, root, last) if is_class else Unknown(path)


def _class(path: str, root: str, last: str) -> Any:
    if root in SHORT and last.endswith(("Config", "Arguments")):
        trains = last.endswith("Arguments") or root == "trl"
        if root == "transformers" and not trains and not _has(last, "quantized"):
            return thing(path, models.AutoConfig)
        return configs.config(path, ("transformers.TrainingArguments",) if trains else ())
    if last.endswith("Trainer") or last == "LightningCLI":
        return trainers.trainer_class(path)
    if root in SHORT and last.endswith(("Tokenizer", "TokenizerFast", "Processor")):
        return thing(path, datasets.Tokenizer)
    if root == "peft" and last.startswith("PeftM"):
        return models.peft_class(path)
    if last.startswith("AutoLigerKernel"):
        return models.model_class(path)
    if root in SHORT and (
        last.startswith(("AutoModel", "AutoPeft", "Fast"))
        or last.endswith(("Model", "Transformer", "CrossEncoder", "SparseEncoder"))
        or _has(last, "tasks")
    ):
        return models.model_class(path)
    if (".optim" in path and "lr_scheduler" not in path) or last in NAMES["optimizers"]:
        return thing(path, trainers.Optimizer)
    base = Absent if root in ABSENT else Thing
    return datasets.DataLoader if last == "DataLoader" else thing(path, base)


def _has(last: str, kind: str) -> bool:
    return any(word in last for word in NAMES[kind])


def _available(name: str) -> bool:
    if name.startswith(("torch_cuda", "cuda")) or name in ("torch_gpu", "torch_bf16_gpu"):
        return bool(GPU.get("count", 1))
    roots = {"flash_attn_2": "flash_attn", "bnb": "bitsandbytes"}
    return installed(roots.get(name, name))


def installed(root: str) -> bool:
    """True for a library that the user has; of one that is not here, the oracle says."""
    if root.startswith(tuple(NAMES["elsewhere"])):
        return False
    here = root in CORE or root in RELEASES or importlib.machinery.PathFinder.find_spec(root)
    return bool(here) or ORACLE.truth(f"is {root} installed")


def _starred(root: str, frame: Any) -> list[str]:
    """Names that `import *` gives: those of the tables, and those that the program never makes."""
    known = [path.rpartition(".") for path in (*unknown.ROWS, *FIXED, *PARSERS)]
    found, others = {name for of, _, name in known if of == root}, {name for *_, name in known}
    codes = [frame.f_code] if frame is not None else []
    used, made = set[str](), {*dir(builtins)}
    for code in codes:
        codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]
        for each in dis.get_instructions(code):
            if each.opname in ("LOAD_NAME", "LOAD_GLOBAL"):
                used.add(each.argval)
            elif each.opname in ("STORE_NAME", "STORE_GLOBAL"):
                made.add(each.argval)
    found |= used - made - others
    if root in EXPORTS:
        found = {name for name in found if _home(root, name) == root}
    return [name for name in found if frame is None or name not in frame.f_globals]


class Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        root, _, below = self.__name__.partition(".")
        if name == "__all__" and root in HEAVY:
            return _starred(self.__name__, unknown.users_frame(2))
        if name.startswith("__") and name.endswith("__") and name != "__version__":
            raise AttributeError(name)
        home = _home(root, name)
        if home != root and not below and root in EXPORTS:
            _lacks(root, name, home)
        path = f"{self.__name__}.{name}"
        made = sys.modules.get(path)
        if made is None:
            known = name in NAMES["submodules"] and root in HEAVY and (root == "torch" or not below)
            whole = (known or path in PARENTS) and path not in FIXED
            made = importlib.import_module(path) if whole else attribute(path)
        setattr(self, name, made)
        return made


def _home(root: str, name: str) -> str:
    """The module that a name is imported from; "" for one that the release lacks."""
    names = EXPORTS.get(root, {})
    if name in names or not (name[:1].isupper() or root == "trl"):
        return names.get(name, root)
    begins = name.lower().removeprefix("tf").removeprefix("flax")
    is_model = any(each[-1] == "*" and begins.startswith(each[:-1]) for each in names)
    return root if is_model or name.endswith("_MAPPING") else ""


def _lacks(root: str, name: str, home: str) -> None:
    """Notes a name that the program's release lacks; within a `try` it fails as it would."""
    frame = unknown.users_frame(3)
    running = opname[frame.f_code.co_code[frame.f_lasti]] if frame else ""
    text = f"{root} {RELEASES.get(root)} has no {name}"
    if unknown.guarded(frame) or running not in ("IMPORT_NAME", "LOAD_ATTR", "LOAD_METHOD"):
        raise (ImportError if running == "IMPORT_NAME" else AttributeError)(text)
    text += f": import it from {home}" if home else ""
    what = f"{name}, which ends with ImportError: {text}"
    guard.DROPPED.append({"what": what, "where": unknown.where(frame)})


class First:
    """Finds the libraries that train, before those that are installed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        root = name.partition(".")[0]
        if root not in HEAVY or (root not in CORE and _beside(root)):
            return None
        if name == root and _guarded() and not installed(root):
            return None
        STANDINS[root] = None
        return importlib.machinery.ModuleSpec(name, cast(Any, self), is_package=True)

    def find_distributions(self, context: Any) -> Any:
        """Releases of the request, for `importlib.metadata`."""
        release = RELEASES.get((context.name or "").replace("-", "_"))
        found = types.SimpleNamespace(version=release, metadata={"Version": release})
        return [found] if release else []

    def create_module(self, spec: Any) -> Any:
        made = Module(spec.name)
        made.__path__ = []
        return made

    def exec_module(self, module: Any) -> None:
        pass


def _beside(root: str) -> bool:
    """True for a name that a module of the user's own has."""
    roots = [os.path.join(os.path.abspath(each), "") for each in sys.path]
    folders = [each for each in roots if not unknown.is_library(each)]
    ends = (f"{root}.py", f"{root}/__init__.py")
    return any(os.path.exists(os.path.join(each, end)) for each in folders for end in ends)


class Last(First):
    """Stands in for what is not installed, where the user's own lines import it."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        root, frame = name.partition(".")[0], cast(Any, sys._getframe(1))
        while frame is not None and frame.f_code.co_filename.startswith("<frozen"):
            frame = frame.f_back
        if (
            frame is None
            or unknown.is_library(frame.f_code.co_filename)
            or root in sys.stdlib_module_names
        ):
            return None
        if name == root:  # a package in the folder, from which it is installed where it runs
            places = [os.getcwd(), os.path.join(os.getcwd(), "src")]
            own = importlib.machinery.PathFinder.find_spec(root, places)
            if own is not None and own.origin:
                return own
        if root not in ABSENT and _guarded() and not installed(root):
            return None
        if name != root and not isinstance(sys.modules.get(root, self), (Module, Last)):
            return None  # a part that a module of the user's own does not have
        ABSENT[root] = None
        return importlib.machinery.ModuleSpec(name, cast(Any, self), is_package=True)


def _guarded() -> bool:
    """True for an import in a `try`, or a question for a spec: the library may be absent."""
    frame = cast(Any, sys._getframe(1))
    while frame is not None and unknown.is_library(file := frame.f_code.co_filename):
        if frame.f_code.co_name == "find_spec" and file.endswith(("util.py", "util>")):
            return True
        frame = frame.f_back
    return unknown.guarded(frame)
