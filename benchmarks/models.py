"""Reach: every causal model type of transformers, predicted with LoRA in bf16 and in NF4.

    python -m benchmarks.models [--images] [--only TYPE ...]

Each type is its configuration class's default, cut to a few layers: widths and vocabulary stay, as
a trace takes no memory for them. A type counts as built where transformers itself builds it on
tensors without data. Then it is written as a checkpoint's folder is, and predicted with the
settings of `tuner estimate --model FOLDER` from a trace of it: what that command does where a
shallower model does not compile. What comes of it is *answered*, *refused* (an error for
people, which says why) or *traceback* (a fault of ours).

One process a type, with a limit of memory and of time. Rows are written as they come, and types
that have theirs are not run again: a run that was stopped goes on. About ten minutes on two idle
cores.
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing
import os
import resource
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, fields
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tuner.core.errors import TunerError
from tuner.core.units import GIB

ROWS = Path(__file__).resolve().parent / "models.csv"
IMAGE_ROWS = ROWS.with_name("image_models.csv")
GPU = "a100_80gb"
METHODS: Mapping[str, Mapping[str, Any]] = {
    "bf16": {"precision": "bf16"},
    "nf4": {"precision": "nf4"},
}
"""LoRA with the defaults of `tuner estimate --model`, and the same on a 4-bit base."""
IMAGE: Mapping[str, Mapping[str, Any]] = {"image": {"precision": "bf16", "images": 1}}
"""LoRA of the whole model on one image and a text, of the size that its tower is made for."""
IMAGE_LENGTH = 4096
IMAGE_SIDE = 448
"""Pixels of a side where a vision tower takes images of any size."""
SETTINGS = {"micro_batch": 2, "max_length": 64, "grad_accum": 1}
"""A short length: recurrent layers without kernels of their own run a loop over it."""

LAYERS = 2
"""Layers of a model, where it has no kinds of layers that begin later."""
MOST_LAYERS = 8
EXPERTS = 16
"""Experts of a layer at most: enough for the groups that some types choose among."""

_LAYER_COUNTS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "encoder_layers",
    "decoder_layers",
    "num_encoder_layers",
    "num_decoder_layers",
    "depth",
)
_EXPERT_COUNTS = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_num_experts",
    "num_routed_experts",
)

_GEMMA_TOWER = {"image_size": 896, "patch_size": 14, "vision_use_head": False}
_MROPE = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [8, 12, 12],
    }
}
"""Rotary positions of GLM's models of images, in three parts."""

_HUNYUAN_ROPE = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [16] * 4}
}
_MINICPM = ("minicpmv4_6", "minicpmv4_7", "minicpm_ocr")
_NEEDED: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 6, "topk_group": 1, "n_group": 1},
    "dots1": {"n_routed_experts": 16, "n_shared_experts": 2, "num_experts_per_tok": 6},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "idefics3": {"vision_config": {"image_size": 364, "patch_size": 14}},
    "smolvlm": {"vision_config": {"image_size": 512, "patch_size": 16}, "scale_factor": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "ministral": {"head_dim": 128},
    "aria": {"vision_config": {"image_size": 980, "patch_size": 14}},
    "aya_vision": {
        "vision_config": {"image_size": 364, "patch_size": 14, "num_attention_heads": 16}
    },
    **{name: {"vision_config": {}} for name in ("gemma4", "gemma4_unified")},
    **{name: {"text_config": _MROPE} for name in ("glm46v", "glm4v", "glmga")},
    "glm4v_moe": {"text_config": {**_MROPE, "head_dim": 128}},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 151652},
    "llama4": {
        "vision_config": {"hidden_size": 1408, "image_size": 336, "vision_output_dim": 4096}
    },
    **{name: {"vision_config": _GEMMA_TOWER} for name in ("gemma3", "shieldgemma2")},
    "blip-2": {"image_token_index": 50265},
    **{name: {"image_token_id": 151655} for name in _MINICPM},
    "mllama": {
        "text_config": {"cross_attention_layers": [1], "num_hidden_layers": 2},
        "vision_config": {"intermediate_layers_indices": [0, 1], "vision_output_dim": 3 * 1280},
    },
    "ovis2": {"hidden_size": 4096},
    "deepseek_vl_hybrid": {
        "high_res_vision_config": {"model_type": "sam_vision_model", "global_attn_indexes": [1]}
    },
    "molmo2": {"adapter_config": {"text_hidden_size": 4096, "vision_feature_layer": [1, 0]}},
    "hunyuan_vl": {"text_config": {"head_dim": 128, **_HUNYUAN_ROPE}},
    "nemotron": {"num_key_value_heads": 8},
    "reformer": {"is_decoder": True},
}
"""What default configurations leave out that a model needs, much as published models have it."""

TIME_LIMIT_S = 600
MEMORY_LIMIT_BYTES = 6 * GIB


@dataclass(frozen=True, slots=True)
class Row:
    """What came of one type with one method; `answer` is empty where transformers fails."""

    model_type: str
    builds: bool
    method: str
    answer: str
    peak_allocated_bytes: int | None
    text: str
    seconds: float


def model_types(*, images: bool = False) -> list[str]:
    """Every type that `AutoModelForCausalLM` of the installed transformers knows.

    With `images` those of `AutoModelForImageTextToText`.
    """
    from transformers.models.auto import modeling_auto

    if images:
        return list(modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    return list(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def small_config(model_type: str, *, cut: bool = True) -> Any:
    """The default configuration of a type, with few layers and few experts where `cut`."""
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type]
    config = kind(**_NEEDED.get(model_type, {}))
    if not cut:
        return config
    layers_are_named = bool(getattr(config, "vision_feature_layers", None))
    for part in (config, *_parts(config)):
        if not (layers_are_named and part is config.vision_config):
            _cut(part)
    _fit_tower(config)
    # Through a dictionary, so that what follows from the numbers is made again.
    return kind.from_dict(config.to_dict())


def _fit_tower(config: Any) -> None:
    """A vision tower's results as wide as the language model, as in every published model."""
    vision = getattr(config, "vision_config", None)
    width = getattr(config.get_text_config(), "hidden_size", None)
    if vision is None or width is None:
        return
    for name in ("out_hidden_size", "projection_dim", "lm_hidden_size", "text_hidden_size"):
        if isinstance(getattr(vision, name, None), int):
            setattr(vision, name, width)
    if getattr(vision, "vision_use_head", False):
        vision.vision_use_head = False  # of SigLIP, whose head reads no patches
    if config.model_type == "qwen2_vl":  # its name for the same
        vision.hidden_size = width


def _parts(config: Any) -> list[Any]:
    from transformers import PreTrainedConfig

    return [value for value in vars(config).values() if isinstance(value, PreTrainedConfig)]


def _cut(part: Any) -> None:
    values = vars(part)
    names = [name for name in _LAYER_COUNTS if isinstance(values.get(name), int)]
    per_layer = {
        name: value
        for name, value in values.items()
        if isinstance(value, list) and any(len(value) == values[n] > LAYERS for n in names)
    }
    needed = max((_begun(value) for value in per_layer.values()), default=LAYERS)
    layers = min(max(LAYERS, needed), MOST_LAYERS)
    for name in names:
        setattr(part, name, min(layers, values[name]))
    for name, value in per_layer.items():
        setattr(part, name, value[:layers])
    for name, value in values.items():
        if name.startswith("per_layer") and isinstance(value, dict):
            setattr(part, name, {k: v for k, v in value.items() if int(k) < layers})
    for name in _EXPERT_COUNTS:
        if isinstance(values.get(name), int):
            setattr(part, name, min(EXPERTS, values[name]))


def _begun(kinds: list[Any]) -> int:
    """How many layers there are until each kind has come."""
    names = [str(kind) for kind in kinds]
    return max(names.index(kind) for kind in set(names)) + 1


def rows_of(model_type: str, methods: Sequence[str]) -> list[Row]:
    """What comes of a type with each of the methods, in this process.

    With a method that has images the type is one of `AutoModelForImageTextToText`.
    """
    began = time.monotonic()
    try:
        config = buildable_config(model_type, images="image" in methods)
    except Exception as error:  # noqa: BLE001 - whatever a class of transformers raises
        seconds = time.monotonic() - began
        text = f"{type(error).__name__}: {error}"
        return [Row(model_type, False, m, "", None, _line(text), seconds) for m in methods]
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        return [_predicted(model_type, method, folder) for method in methods]


def buildable_config(model_type: str, *, images: bool) -> Any:
    """The configuration of a model that transformers builds, as a checkpoint of it has it."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    try:
        config = small_config(model_type)
        model = _built(config, images=images)
    except Exception:  # noqa: BLE001 - not every class can be cut
        config = small_config(model_type, cut=False)
        model = _built(config, images=images)
    if images:
        config.architectures = [type(model).__name__]
        return config
    # As the model writes it: classes such as BartForCausalLM change their configuration, others
    # have that of a part of it.
    if type(model.config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        config = model.config
    config.architectures = [type(model).__name__]
    return config


def _built(config: Any, *, images: bool) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    auto = AutoModelForImageTextToText if images else AutoModelForCausalLM
    with torch.device("meta"):
        return auto.from_config(config)


def _predicted(model_type: str, method: str, folder: str) -> Row:
    from tuner.app.estimate import one_configuration
    from tuner.predict.predict import predict
    from tuner.predict.traces import Subject
    from tuner.space.gpus import get_gpu

    began = time.monotonic()
    peak_bytes = None
    try:
        if method in IMAGE:
            found, configuration = _with_an_image(folder)
        else:
            settings = {**SETTINGS, **METHODS[method]}
            space, configuration = one_configuration(None, folder, settings)
            found = predict(Subject(space.workload, folder), configuration, get_gpu(GPU))
    except TunerError as error:
        answer, text = "refused", "; ".join([str(error), *(p.message for p in error.problems)])
    except Exception as error:  # noqa: BLE001 - a traceback is what is looked for
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(last.filename).name}:{last.lineno}"
        answer, text = "traceback", f"{type(error).__name__} at {place}: {error}"
    else:
        answer = "answered"
        text = " ".join(f"{k}={configuration[k]}" for k in ("attention", "gradient_checkpointing"))
        peak_bytes = found.memory.peak_allocated_bytes
    seconds = time.monotonic() - began
    return Row(
        model_type, True, method, answer, peak_bytes, _line(text.replace(folder, "")), seconds
    )


def _with_an_image(folder: str) -> tuple[Any, Any]:
    """The prediction with one image, of the model's own size where it has one."""
    from tuner.app.estimate import one_configuration
    from tuner.predict.predict import predict
    from tuner.predict.traces import Subject
    from tuner.space.gpus import get_gpu

    settings = {**SETTINGS, **IMAGE["image"], "max_length": IMAGE_LENGTH}
    try:
        space, configuration = one_configuration(None, folder, settings)
        subject = Subject(space.workload, folder)
        return predict(subject, configuration, get_gpu(GPU)), configuration
    except TunerError as error:
        if "image_size is not set" not in str(error):
            raise
    settings["image_size"] = IMAGE_SIDE
    _, configuration = one_configuration(None, folder, settings)
    return predict(subject, configuration, get_gpu(GPU)), configuration


def _line(text: str) -> str:
    return " ".join(text.split())[:400]


# -- a process a type ------------------------------------------------------------------------


def run_types(
    types: Sequence[str], file: Path, *, processes: int, methods: Sequence[str] = tuple(METHODS)
) -> None:
    """Run what has no rows in `file` yet, each type in a process of its own."""
    have = {row.model_type for row in read_rows(file)} if file.exists() else set()
    wanted = [name for name in types if name not in have]
    if not file.exists():
        _write(file, [], header=True)
    _import_all()
    with ThreadPoolExecutor(processes) as pool:
        for done in as_completed([pool.submit(_in_process, name, methods) for name in wanted]):
            rows = done.result()
            _write(file, rows)
            for row in rows:
                print(f"{row.model_type:28} {row.method:5} {row.answer or 'not built':10} "
                      f"{row.seconds:5.1f} s  {row.text[:110]}", flush=True)  # fmt: skip


def _import_all() -> None:
    """What every process needs, imported once, before they are forked."""
    import bitsandbytes  # noqa: F401
    import peft  # noqa: F401
    import torch
    import transformers

    import tuner.app.estimate
    import tuner.cost.memory
    import tuner.predict.predict
    import tuner.predict.tracing.trace
    import tuner.predict.training.causal_lm  # noqa: F401

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)


def _in_process(model_type: str, methods: Sequence[str]) -> list[Row]:
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(model_type, methods, sender), daemon=True)
    began = time.monotonic()
    process.start()
    sender.close()
    try:
        if receiver.poll(TIME_LIMIT_S):
            rows: list[Row] = receiver.recv()
            process.join()
            return rows
        text = f"no answer after {TIME_LIMIT_S} s"
    except EOFError:
        process.join()
        text = f"the process ended with exit code {process.exitcode}"
    process.kill()
    seconds = time.monotonic() - began
    return [Row(model_type, True, m, "no answer", None, text, seconds) for m in methods]


def _child(model_type: str, methods: Sequence[str], sender: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    warnings.simplefilter("ignore")
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    sender.send(rows_of(model_type, methods))


# -- files -----------------------------------------------------------------------------------


def read_rows(file: Path) -> list[Row]:
    """The rows of an earlier run."""
    with file.open(encoding="utf-8", newline="") as lines:
        return [
            Row(
                model_type=row["model_type"],
                builds=row["builds"] == "True",
                method=row["method"],
                answer=row["answer"],
                peak_allocated_bytes=int(row["peak_allocated_bytes"] or 0) or None,
                text=row["text"],
                seconds=float(row["seconds"]),
            )
            for row in csv.DictReader(lines)
        ]


def _write(file: Path, rows: Iterable[Row], *, header: bool = False) -> None:
    with file.open("a", encoding="utf-8", newline="") as lines:
        writer = csv.DictWriter(lines, [field.name for field in fields(Row)])
        if header:
            writer.writeheader()
        writer.writerows({**asdict(row), "seconds": f"{row.seconds:.1f}"} for row in rows)


def counted(
    rows: Sequence[Row], methods: Iterable[str] = METHODS
) -> Iterator[tuple[str, Counter[str]]]:
    """By method: how many types there are, are built, and are answered or not."""
    for method in methods:
        mine = [row for row in rows if row.method == method]
        counts = Counter(row.answer for row in mine if row.builds)
        yield method, counts + Counter(types=len(mine), built=sum(row.builds for row in mine))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing; returns 1 where a type ends in a traceback."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=Path, help="rows to go on from and to write")
    parser.add_argument("--only", nargs="*", help="types, of all")
    parser.add_argument("--images", action="store_true", help="types of images and text")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args(arguments)
    methods = IMAGE if options.images else METHODS
    file = options.rows or (IMAGE_ROWS if options.images else ROWS)
    types = options.only or model_types(images=options.images)
    run_types(types, file, processes=options.processes, methods=tuple(methods))
    rows = read_rows(file)
    for method, counts in counted(rows, methods):
        print(method, dict(counts))
    return int(any(row.answer == "traceback" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
