"""Hollow checkpoints: a model's folder as the hub has it, with holes in place of the weights.

`from_pretrained` loads one as it loads the published checkpoint: the same names, shapes and
types. All weights are zero, and no disk is taken. For programs that run where values do not
count: on an emulated device, or to look at a model of any size.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.core.errors import InputError, UnavailableError
from tuner.core.sparse import TensorEntry, disk_bytes, is_hollow, write_shards
from tuner.space.models.catalogue import auto_class, resolve_config
from tuner.space.models.hollow_tokenizer import add_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

__all__ = ["_HollowCheckpoint", "is_hollow", "write_hollow"]


_NAMES = {
    "torch.float64": "F64", "torch.float32": "F32", "torch.float16": "F16",
    "torch.bfloat16": "BF16", "torch.float8_e4m3fn": "F8_E4M3", "torch.float8_e5m2": "F8_E5M2",
    "torch.int64": "I64", "torch.int32": "I32", "torch.int16": "I16", "torch.int8": "I8",
    "torch.uint8": "U8", "torch.bool": "BOOL",
}  # fmt: skip

_NOTE = """# Not weights

This is a hollow checkpoint of `{model}`, written by `tuner models hollow`: the names, shapes and
types of the real one, and zeros in place of {parameters:,} parameters. The safetensors files have
holes and take no disk. It is for programs that run on an emulated device.

Tokenizer: {tokenizer}.
"""


@dataclass(frozen=True, slots=True)
class _HollowCheckpoint:
    """The files that were written.

    `parameters` counts every number that is stored; `logical_bytes` is the length of the weight
    files, and `disk_bytes` what the whole folder takes. `tokenizer` says in words where the
    tokenizer is from, and what it is not; `processor` the same of an image-text model's
    processor, None for other models.
    """

    folder: Path
    model: str
    dtype: str
    parameters: int
    logical_bytes: int
    disk_bytes: int
    tokenizer: str
    processor: str | None


def write_hollow(model: str, folder: Path | str) -> _HollowCheckpoint:
    """Write a hollow checkpoint of `model`, anything that `resolve_config` takes, to `folder`.

    A folder that is not empty is refused, and replaced where it is a hollow checkpoint itself.

    Raises `InputError` for an unknown model, a quantised checkpoint, and a folder that is in use;
    `UnavailableError` where the file system has no holes. Nothing is half-written.
    """
    config = resolve_config(model)
    _require_plain(config, model)
    target = Path(folder).expanduser().absolute()
    _require_free(target)
    with _sibling(target) as made:
        tensors = _write_config(config, made)
        _require_loads(config, tensors)
        files = write_shards(made, tensors)
        spoken = add_tokenizer(made, config, model=model)
        parameters = sum(tensor.elements for tensor in tensors)
        note = _NOTE.format(model=model, parameters=parameters, tokenizer=spoken.tokenizer)
        (made / "HOLLOW.md").write_text(note, encoding="utf-8")
        logical_bytes = sum(path.stat().st_size for path in files)
        taken_bytes = disk_bytes(made.iterdir())
        _put_in_place(made, target)
    return _HollowCheckpoint(
        folder=target,
        model=model,
        dtype=str(config.dtype).removeprefix("torch."),
        parameters=parameters,
        logical_bytes=logical_bytes,
        disk_bytes=taken_bytes,
        tokenizer=spoken.tokenizer,
        processor=spoken.processor,
    )


def _require_plain(config: PreTrainedConfig, model: str) -> None:
    quantization = getattr(config, "quantization_config", None)
    if quantization is None:
        return
    fields = quantization if isinstance(quantization, Mapping) else vars(quantization)
    method = str(fields.get("quant_method", "unknown")).rpartition(".")[2]
    raise InputError(
        f"the checkpoint of model {model!r} is quantised ({method}); hollow ones cannot be",
        hint="take quantization_config out of a copy of its config.json, or name the model that "
        "was quantised",
    )


def _require_free(target: Path) -> None:
    """Raise unless `target` may become a hollow checkpoint without a loss."""
    if not target.exists() and not target.is_symlink():
        return
    if not target.is_dir():
        raise InputError(f"{str(target)!r} is not a folder")
    if any(target.iterdir()) and not is_hollow(target):
        raise InputError(
            f"folder {str(target)!r} is not empty and not a hollow checkpoint",
            hint="name a new folder",
        )


@contextlib.contextmanager
def _sibling(target: Path) -> Iterator[Path]:
    """A new folder beside `target`, which is removed unless it was moved away."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        made.chmod(0o755)  # mkdtemp's is for its owner alone
    except OSError as error:
        raise InputError(f"folder {str(target)!r} cannot be written: {error}") from error
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _put_in_place(made: Path, target: Path) -> None:
    if target.is_dir() and any(target.iterdir()):
        with _sibling(target) as old:
            target.rename(old / "replaced")
            made.rename(target)
        return
    made.rename(target)  # over an empty folder this is one step


def _write_config(config: PreTrainedConfig, folder: Path) -> list[TensorEntry]:
    """Let transformers save the model without its weights; the tensors that it would have saved.

    So the configuration, the generation settings and the names are those that it writes itself:
    experts apart, tied weights once, prefixes as published.
    """
    model = build_on_meta(config, config.dtype)
    _restore_prefixes(model)
    with _kept_in_place_of_files() as kept, _no_progress_bars():
        model.save_pretrained(folder, max_shard_size="1000TB")
    config.dtype = model.config.dtype
    return [
        TensorEntry(name, _NAMES[str(tensor.dtype)], tuple(tensor.shape))
        for name, tensor in kept.items()
    ]


@contextlib.contextmanager
def _kept_in_place_of_files() -> Iterator[dict[str, Any]]:
    """Inside, what transformers saves without memory goes into this mapping, and into no file."""
    from transformers import modeling_utils

    kept: dict[str, Any] = {}
    write = modeling_utils.safe_save_file

    def keep(tensors: Mapping[str, Any], *rest: Any, **options: Any) -> None:
        if all(tensor.is_meta for tensor in tensors.values()):
            kept.update(tensors)
        else:  # of another thread
            write(tensors, *rest, **options)

    modeling_utils.safe_save_file = keep
    try:
        yield kept
    finally:
        modeling_utils.safe_save_file = write


def build_on_meta(config: PreTrainedConfig, dtype: Any) -> Any:
    """The published class of a model, without memory; `dtype` is torch's, None for float32."""
    import torch

    with torch.device("meta"):
        return model_class(config)._from_config(config, dtype=dtype or torch.float32)


def model_class(config: PreTrainedConfig) -> Any:
    """The class of transformers that a checkpoint was saved from: its architecture's."""
    import transformers

    name = (config.architectures or [""])[0]
    found = getattr(transformers, name, None) if name else None
    if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
        return found
    mapping = auto_class(config)._model_mapping
    if type(config) not in mapping:
        raise InputError(
            f"transformers {transformers.__version__} has no model for {config.model_type!r}",
            hint="state architectures in its config.json",
        )
    classes = mapping[type(config)]
    return classes[0] if isinstance(classes, tuple) else classes


def _restore_prefixes(model: Any) -> None:
    """Have a tower's own prefix written that transformers 5 drops when it loads (vision_model).

    It loads either way; with the prefix the names are those of the hub.
    """
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange
    except ImportError:  # an older one, which keeps the prefix
        return
    conversions = [
        one
        for one in get_model_conversion_mapping(model, add_legacy=False)
        if not isinstance(one, PrefixChange) or getattr(one, "scope_prefix", None)
    ]
    model._weight_conversions = conversions or None


def _require_loads(config: PreTrainedConfig, tensors: Sequence[TensorEntry]) -> None:
    """Raise unless transformers finds each weight of the model among `tensors`, and no other.

    They are given without memory: reading the files would fill the page cache with zeros.
    """
    import torch

    dtypes = {name: getattr(torch, kind.removeprefix("torch.")) for kind, name in _NAMES.items()}
    state = {t.name: torch.empty(t.shape, dtype=dtypes[t.dtype], device="meta") for t in tensors}
    with _no_progress_bars():
        _, found = model_class(config).from_pretrained(
            None,
            config=config,
            state_dict=state,
            dtype=config.dtype,
            device_map={"": "meta"},
            output_loading_info=True,
        )
    wrong = {kind: sorted(map(str, names)) for kind, names in found.items() if names}
    if wrong:
        told = "; ".join(f"{kind}: {', '.join(names[:3])}" for kind, names in wrong.items())
        raise UnavailableError(
            f"this transformers does not load what it saves of {config.model_type!r}: {told}",
            hint="install another version of transformers",
        )


@contextlib.contextmanager
def _no_progress_bars() -> Iterator[None]:
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
