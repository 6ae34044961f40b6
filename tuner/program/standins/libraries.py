"""The modules of libraries that train, made when the program imports them."""

from __future__ import annotations

import importlib
import importlib.machinery
import os
import sys
import types
from typing import Any, cast

from tuner.program.standins import configs, data, loops, models, trainers
from tuner.program.standins.record import ABSENT, STANDINS
from tuner.program.standins.unknown import (
    CLASSES,
    ORACLE,
    ROWS,
    Name,
    Thing,
    Unknown,
    guarded,
    is_library,
    thing,
    users_frame,
)

CORE = set("torch transformers trl peft accelerate unsloth datasets bitsandbytes".split())
HEAVY = CORE | set(
    """torchvision torchaudio unsloth_zoo lightning pytorch_lightning sentence_transformers
    diffusers evaluate wandb deepspeed liger_kernel vllm huggingface_hub sklearn pandas flash_attn
    triton xformers mlflow comet_ml trackio matplotlib scipy nltk tensorboard google kernels optimum
    safetensors tokenizers apex ray neptune swanlab IPython requests urllib3 soundfile librosa snac
    tqdm PIL cv2 openenv setfit torchtune galore_torch lomo_optim torchao hqq auto_gptq gptqmodel
    timm einops seaborn plotly rouge_score sacrebleu jiwer gradio openai anthropic httpx aiohttp
    boto3 spacy polars pyarrow torchdata torchmetrics lightning_fabric onnx onnxruntime tensorflow
    jax flax keras xgboost lightgbm optuna clearml aim dvclive bert_score langchain llama_index
    qwen_vl_utils mistral_common tiktoken sentencepiece faiss mteb codecarbon psutil pynvml
    schedulefree apollo_torch adam_mini grokadamw came_pytorch torch_optimizer prodigyopt
    ipywidgets verl oumi axolotl llamafactory swift trlx nemo megatron transformer_engine
    h5py grpc duckdb pycurl lmdb psycopg2 cffi fastparquet rocksdb
    cut_cross_entropy causal_conv1d mamba_ssm fla dotenv_vault zmq uvicorn fastapi""".split()
)
SHORT = set(
    """transformers trl peft unsloth lightning pytorch_lightning sentence_transformers accelerate
    datasets diffusers setfit""".split()
)
SUBMODULES = set(
    """cuda nn optim utils backends distributed pytorch trainer_utils amp mps functional data
    lr_scheduler profiler cudnn chat_templates""".split()
)
MODEL_ROOTS = {"transformers", "unsloth", "diffusers", "trl", "sentence_transformers", "setfit"}
RELEASES: dict[str, str] = {}
GPU: dict[str, Any] = {}
FIXED: dict[str, Any] = {}
PARENTS: set[str] = set()


class Dtype(Name):
    pass


def _torch() -> dict[str, Any]:
    """What `torch` answers of the request's GPU, dtypes and devices."""
    memory, count = GPU.get("total_memory_bytes", 1 << 34), GPU.get("count", 1)
    capability = tuple(GPU.get("capability") or (8, 0))
    name = GPU.get("name", "GPU")
    properties = types.SimpleNamespace(
        name=name,
        total_memory=memory,
        major=capability[0],
        minor=capability[1],
        multi_processor_count=GPU.get("processors", 64),
    )
    answers = {
        "is_available": bool(count),
        "device_count": count,
        "is_bf16_supported": GPU.get("has_bf16", True),
        "get_device_capability": capability,
        "get_device_properties": properties,
        "get_device_name": name,
        "mem_get_info": (memory - (1 << 29), memory),
        "current_device": 0,
        "is_initialized": True,
        "empty_cache": None,
        "set_device": None,
        "synchronize": None,
        "reset_peak_memory_stats": None,
    }
    made: dict[str, Any] = {
        f"torch.cuda.{key}": lambda *args, value=value, **kwargs: value
        for key, value in answers.items()
    }
    for word in (
        "bfloat16 float16 float32 half float float64 double int8 uint8 int16 int32 int64 long"
        " short int bool float8_e4m3fn float8_e5m2 complex64"
    ).split():
        same = {"half": "float16", "float": "float32", "double": "float64", "long": "int64"}
        made[f"torch.{word}"] = Dtype(f"torch.{same.get(word, word)}", itemsize=2)
    made["torch.dtype"] = Dtype
    made["torch.compile"] = models.compile_model
    made["torch.optim.Optimizer"] = loops.Optimizer
    made["torch.version.cuda"] = "13.0"
    made["torch.version.hip"] = None
    made["torch.backends.mps.is_available"] = lambda: False
    made["torch.distributed.is_available"] = lambda: True
    made["torch.distributed.is_initialized"] = lambda: False
    made["torch.distributed.get_rank"] = lambda *args: 0
    made["torch.distributed.get_world_size"] = lambda *args: int(os.environ.get("WORLD_SIZE", "1"))
    for call in (
        "torch.autograd.graph.save_on_cpu torch.cuda.set_per_process_memory_fraction "
        "torchao.optim.CPUOffloadOptimizer galore_torch.GaLoreAdamW galore_torch.GaLoreAdamW8bit "
        "apollo_torch.APOLLOAdamW lomo_optim.Lomo lomo_optim.AdaLomo"
    ).split():
        made[call] = trainers.special(call)
    return made


def _parser(name: str) -> Any:
    from tuner.program.standins import parsers  # with argparse and dataclasses, which cost time

    return getattr(parsers, name)


LATE: dict[str, Any] = {
    "transformers.HfArgumentParser": lambda: _parser("HfArgumentParser"),
    "trl.TrlParser": lambda: _parser("TrlParser"),
    "trl.get_peft_config": lambda: _parser("get_peft_config"),
    "trl.get_quantization_config": lambda: _parser("get_quantization_config"),
    "transformers.ExplicitEnum": lambda: importlib.import_module("enum").Enum,
}


def _known() -> dict[str, Any]:
    """What has a meaning of its own, by its path or by its library and last name."""
    tokenizer = Unknown("tokenizer")
    known: dict[str, Any] = {
        "peft.get_peft_model": models.get_peft_model,
        "peft.prepare_model_for_kbit_training": models.prepare_model_for_kbit_training,
        "trl.get_kbit_device_map": lambda: {"": 0},
        "trl.setup_chat_format": models.wraps("trl.setup_chat_format", tokenizer),
        "trl.clone_chat_template": models.wraps("trl.clone_chat_template", tokenizer, []),
        "unsloth.is_bfloat16_supported": lambda: GPU.get("has_bf16", True),
        "unsloth.is_bf16_supported": lambda: GPU.get("has_bf16", True),
        "unsloth.execute_with_time_limit": lambda seconds: _times_out,
        "transformers.set_seed": lambda *args, **kwargs: None,
        "transformers.AutoConfig": thing("transformers.AutoConfig", ModelConfig),
        "accelerate.Accelerator": loops.Accelerator,
        "accelerate.find_executable_batch_size": loops.find_executable_batch_size,
        "accelerate.notebook_launcher": loops.runs("function"),
        "lightning.Fabric": thing("lightning.Fabric", loops.Accelerator),
        "torch.utils.data.DataLoader": data.DataLoader,
        "torch.multiprocessing.spawn": loops.runs("function", "fn", first=(0,)),
        "deepspeed.initialize": loops.initialize,
        "deepspeed.add_config_arguments": models.passes,
        "datasets.Dataset": data.Dataset,
        "datasets.DatasetDict": data.DatasetDict,
        "tqdm.trange": lambda *args, **kwargs: range(*args),
        "optuna.create_study": lambda *args, **kwargs: Study(),
        "wandb.init": _wandb,
        "wandb.agent": loops.runs("function"),
    }
    for path in ("lightning.LightningModule", "lightning.LightningDataModule"):
        known[path] = thing(path, trainers.LightningModule)
    for path in list(known):
        if path.startswith("lightning."):
            known[f"pytorch_{path}"] = known[path]
    for path in ("tqdm.tqdm", "tqdm.auto.tqdm", "tqdm.notebook.tqdm", "tqdm.std.tqdm"):
        known[path] = _bar
    for path in (
        "unsloth.train_on_responses_only accelerate.dispatch_model peft.inject_adapter_in_model "
        "accelerate.load_checkpoint_and_dispatch torch.nn.DataParallel accelerate.cpu_offload "
        "torch.nn.parallel.DistributedDataParallel torch.distributed.fsdp.fully_shard "
        "torch.distributed.fsdp.FullyShardedDataParallel torch.quantization.convert "
        "torchao.quantize_ peft.replace_lora_weights_loftq peft.cast_mixed_precision_params "
        "optimum.bettertransformer.BetterTransformer.transform unsloth.add_new_tokens"
    ).split():
        known[path] = models.wraps(path)
    return known


def _times_out(function: Any) -> Any:
    def late(*args: Any, **kwargs: Any) -> Any:
        raise TimeoutError("a time limit of unsloth's")

    return late


class ModelConfig(Thing):
    """A configuration of a model: made of a checkpoint's name, or of numbers."""

    __slots__ = ()
    _path = "transformers.AutoConfig"

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        return cls(**{**dict(zip(("pretrained_model_name_or_path",), args)), **kwargs})

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._note.take(args, kwargs)
        if "pretrained_model_name_or_path" not in kwargs:
            self.__dict__.update(kwargs)


class Study(Thing):
    """Optuna's: the objective runs once, with a trial that is unknown."""

    __slots__ = ()
    _path = "optuna.Study"

    def optimize(self, func: Any, *args: Any, **kwargs: Any) -> None:
        func(Unknown("trial"))


class WandbConfig(dict[str, Any]):
    def __getattr__(self, name: str) -> Any:
        return self.get(name, Unknown(f"wandb.config.{name}"))

    def __missing__(self, name: str) -> Any:
        return Unknown(f"wandb.config.{name}")

    __setattr__ = dict.__setitem__


def _wandb(*args: Any, **kwargs: Any) -> Any:
    run: Any = Unknown("wandb.init(...)")
    config = kwargs.get("config")
    held = config if isinstance(config, dict) else getattr(config, "__dict__", {})
    run.config = WandbConfig(held)
    sys.modules["wandb"].config = run.config  # type: ignore[attr-defined]
    return run


def start(request: dict[str, Any]) -> None:
    GPU.update(request.get("gpu") or {})
    ROWS.update(request.get("classes") or {})
    RELEASES.update(request.get("releases") or {})
    configs.RENAMED.update(request.get("renamed") or {})
    FIXED.update({**_torch(), **_known()})
    for path in FIXED:
        while path := path.rpartition(".")[0]:
            PARENTS.add(path)
    sys.meta_path.insert(0, First())
    sys.meta_path.append(Last())
    for package in ("importlib", "concurrent", "urllib", "xml"):  # nothing of which is slow
        importlib.import_module(package).__dict__["__getattr__"] = _part_of(package)


def _part_of(package: str) -> Any:
    """Imports a part of a standard package when it is used: real libraries have imported it."""

    def part(name: str) -> Any:
        if name[:2] != "__":
            try:
                return importlib.import_module(f"{package}.{name}")
            except ModuleNotFoundError:
                pass
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return part


def _bar(rows: Any = None, *args: Any, **kwargs: Any) -> Any:
    return Unknown("tqdm") if rows is None else Bar(rows)


class Bar(Unknown):
    """A progress bar goes through what it gets."""

    __slots__ = ()

    def __init__(self, rows: Any) -> None:
        super().__init__("tqdm")
        self.__dict__["rows"] = rows

    def __iter__(self) -> Any:
        return iter(self.__dict__["rows"])

    def __len__(self) -> int:
        return len(self.__dict__["rows"])


def _versions(module: Any) -> None:
    own = module.version

    def version(name: str) -> Any:
        return RELEASES.get(name) or RELEASES.get(name.replace("-", "_")) or own(name)

    module.version = version


def _version(root: str) -> Any:
    if root not in RELEASES:
        from importlib import metadata

        try:
            RELEASES[root] = metadata.version(root)
        except Exception:
            return Unknown(f"{root}.__version__")
    return RELEASES[root]


def attribute(path: str) -> Any:
    """What a library has under a path."""
    root, _, last = path.partition(".")[0], None, path.rpartition(".")[2]
    short = f"{root}.{last}" if root in SHORT else path
    for key in dict.fromkeys((path, short)):
        if key in FIXED:
            return FIXED[key]
        if key in LATE:
            FIXED[key] = LATE[key]()
            return FIXED[key]
    if last == "__version__":
        return _version(root)
    known = path if path in CLASSES else short
    if configs.is_config(known):
        return configs.config(known)
    if last.startswith("is_") and last.endswith("_available"):
        return lambda *args, **kwargs: _available(last[3:-10])
    if last[:1].isupper():
        return _class(known, root, last)
    return Unknown(path)


def _class(path: str, root: str, last: str) -> Any:
    if last.endswith(("Config", "Arguments")) and root in (
        "trl",
        "transformers",
        "unsloth",
        "peft",
        "sentence_transformers",
        "setfit",
    ):
        trains = last.endswith("Arguments") or root == "trl"
        if last not in ("AutoConfig", "PretrainedConfig", "PeftConfig") and not (
            root == "transformers" and last.endswith("Config") and last not in _QUANTIZED
        ):
            return configs.config(path, ("transformers.TrainingArguments",) if trains else ())
        if root == "transformers":
            return thing(path, ModelConfig)
    if last.endswith("Trainer") or last == "LightningCLI":
        return trainers.trainer_class(path)
    if root in MODEL_ROOTS and last.endswith(("Tokenizer", "TokenizerFast", "Processor")):
        return thing(path, data.Tokenizer)
    if root == "peft" and last.startswith("AutoPeft"):
        return models.model_class(path)
    if root == "peft" and last.startswith("PeftM"):
        return models.peft_class(path)
    if root in MODEL_ROOTS and (
        last.startswith(("AutoModel", "Fast"))
        or last.endswith(("Model", "Transformer", "CrossEncoder", "SparseEncoder"))
        or any(f"For{task}" in last for task in _TASKS)
    ):
        made = models.model_class(path)
        if last == "SentenceTransformer":
            made.fit = trainers.fit
        return made
    if (".optim" in path and "lr_scheduler" not in path) or last in _OPTIMIZERS:
        return thing(path, loops.Optimizer)
    if last == "DataLoader":
        return data.DataLoader
    return thing(path, Thing)


_QUANTIZED = set(
    """BitsAndBytesConfig GPTQConfig AwqConfig TorchAoConfig HqqConfig QuantoConfig Mxfp4Config
    FineGrainedFP8Config EetqConfig AqlmConfig""".split()
)
_TASKS = (
    "CausalLM Conditional Sequence Token Masked Question Image CTC Seq2Seq Vision Object".split()
)
_OPTIMIZERS = set("Adafactor AdamW Lion Muon GaLoreAdamW GaLoreAdamW8bit".split())


def _available(name: str) -> bool:
    roots = {"flash_attn_2": "flash_attn", "liger_kernel": "liger_kernel", "bnb": "bitsandbytes"}
    if name.startswith(("torch_cuda", "cuda")) or name in ("torch_gpu", "torch_bf16_gpu"):
        return bool(GPU.get("count", 1))
    if name.startswith(
        (
            "torch_xla",
            "torch_npu",
            "torch_mps",
            "torch_xpu",
            "torch_hpu",
            "tpu",
            "npu",
            "xpu",
            "mps",
            "hpu",
            "mlu",
            "sagemaker",
            "tf",
            "flax",
        )
    ):
        return False
    return installed(roots.get(name, name))


def installed(root: str) -> bool:
    """Whether the user has a library; of one that is not here, the oracle says."""
    if root in CORE or root in RELEASES or importlib.machinery.PathFinder.find_spec(root):
        return True
    return ORACLE.truth(f"is {root} installed")


def _starred(root: str, frame: Any) -> list[str]:
    """Names that `import *` gives: those of the tables, and what looks like a library's class."""
    known = [path for path in (*ROWS, *FIXED, *LATE) if path.startswith(f"{root}.")]
    found = {path.rpartition(".")[2] for path in known if path.count(".") == 1}
    others = {path.rpartition(".")[2] for path in (*ROWS, *FIXED, *LATE)}
    codes = [frame.f_code] if frame is not None else []
    ends = ("Trainer", "Config", "Arguments", "LM", "Tokenizer", "Dataset", "Module")
    for code in codes:
        codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]
        for name in code.co_names:
            if name not in others and (name.startswith(("Auto", "Fast")) or name.endswith(ends)):
                found.add(name)
    return [name for name in found if frame is None or name not in frame.f_globals]


class Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name == "__all__" and self.__name__.partition(".")[0] in HEAVY:
            return _starred(self.__name__, users_frame(2))
        if name.startswith("__") and name.endswith("__") and name != "__version__":
            raise AttributeError(name)
        path = f"{self.__name__}.{name}"
        made = sys.modules.get(path)
        if made is None:
            root, _, below = self.__name__.partition(".")
            whole = path in PARENTS or (
                name in SUBMODULES and root in HEAVY and (root == "torch" or not below)
            )
            made = importlib.import_module(path) if whole and path not in FIXED else attribute(path)
        setattr(self, name, made)
        return made


class First:
    """Finds the libraries that train, before those that are installed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        root = name.partition(".")[0]
        if name == "importlib.metadata":
            return _patched(name, path, _versions)
        if root not in HEAVY or (root not in CORE and _beside(root)):
            return None
        if name == root and _guarded() and not installed(root):
            return importlib.machinery.ModuleSpec(name, cast(Any, _Missing()))
        STANDINS[root] = None
        return importlib.machinery.ModuleSpec(name, cast(Any, self), is_package=True)

    def create_module(self, spec: Any) -> Any:
        made = Module(spec.name)
        made.__path__ = []
        return made

    def exec_module(self, module: Any) -> None:
        pass


def _patched(name: str, path: Any, patch: Any) -> Any:
    spec: Any = importlib.machinery.PathFinder.find_spec(name, path)
    run = spec.loader.exec_module

    def exec_module(module: Any) -> None:
        run(module)
        patch(module)

    spec.loader.exec_module = exec_module
    return spec


class _Missing:
    def create_module(self, spec: Any) -> Any:
        raise ModuleNotFoundError(f"No module named {spec.name!r}", name=spec.name)

    def exec_module(self, module: Any) -> None:
        pass


def _beside(root: str) -> bool:
    """Whether the user has a module of this name of his own."""
    for folder in sys.path:
        if not is_library(os.path.join(folder, "")):
            path = os.path.join(folder or ".", root)
            if os.path.exists(path + ".py") or os.path.exists(os.path.join(path, "__init__.py")):
                return True
    return False


class Last(First):
    """Stands in for what is not installed, where the user's own lines import it."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        root, frame = name.partition(".")[0], sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith("<frozen"):
            frame = frame.f_back  # type: ignore[assignment]
        if frame is None or is_library(frame.f_code.co_filename) or root in _stdlib():
            return None
        if name == root and (own := _in_folder(root)):
            return own
        if root in ABSENT or not (_guarded() and not ORACLE.truth(f"is {root} installed")):
            if name != root and root in sys.modules and not isinstance(sys.modules[root], Module):
                return None  # a part that a module of the user's own does not have
            ABSENT[root] = None
            return importlib.machinery.ModuleSpec(name, cast(Any, self), is_package=True)
        return None


def _in_folder(root: str) -> Any:
    """A package that lies in the folder, from which it is installed where the program runs."""
    places = [os.getcwd(), os.path.join(os.getcwd(), "src")]
    spec = importlib.machinery.PathFinder.find_spec(root, places)
    return spec if spec is not None and spec.origin else None


def _stdlib() -> Any:
    return sys.stdlib_module_names


def _guarded() -> bool:
    """Whether the user's import stands in a `try`, or asks for a spec: then it may be absent."""
    frame = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.endswith("util.py"):
        if not is_library(frame.f_code.co_filename):
            break
        frame = frame.f_back  # type: ignore[assignment]
    if frame is None:
        return False
    if frame.f_code.co_filename.endswith("util.py") and frame.f_code.co_name == "find_spec":
        return True
    return guarded(users_frame(2))
