"""The releases that a prediction stands for, and the releases between which predictions break.

Older releases are given the names that tuner asks of today's. What a name stands for stays what
the release does: a name that it lacks, and has nothing like, is there and unused. Tracing still
fails where a release lacks more, and the failure is an error.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import re
import sys
import types
from array import array
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from packaging.specifiers import Specifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from tuner import __version__

STACK = ("torch", "transformers", "peft", "trl", "bitsandbytes", "accelerate")
"""Libraries whose releases a prediction stands for."""

CUDA = "CUDA"

_CUDA_OF_TORCH = re.compile(r"^cuda\b.*= *['\"]([\d.]+)['\"]", re.MULTILINE)
"""The line of torch/version.py; the build for processors has None there."""

EXPERTS = "quantised experts"
SFT = "SFTTrainer"
LOGITS = "logits"
FSDP2 = "FSDP2 of accelerate"


@dataclass(frozen=True, slots=True)
class Break:
    """A release of a library that changed memory, what it did `before`, and does since.

    It matters to a training that `concerns` one of the words above.
    """

    library: str
    release: str
    concerns: str
    before: str
    since: str
    source: str


# fmt: off
BREAKS = (
    Break("transformers", "5.0", EXPERTS,
          "each expert is a linear layer, which bitsandbytes quantises",
          "experts are one parameter, which bitsandbytes leaves unquantised",
          "https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1849"),
    Break("trl", "1.7", SFT,
          "SFTTrainer has the whole logits, and a copy of them in fp32",
          "SFTTrainer computes its loss in chunks, without the whole logits",
          "https://github.com/huggingface/trl/pull/5846"),
    Break("trl", "0.27", SFT,
          "SFTTrainer prepares quantised models for k-bit training",
          "SFTTrainer leaves quantised models as they are loaded",
          "https://github.com/huggingface/trl/blob/v0.27.0/trl/trainer/sft_trainer.py"),
    Break("trl", "0.22", SFT,
          "SFTConfig trains without gradient checkpointing by default",
          "SFTConfig turns gradient checkpointing on by default",
          "https://github.com/huggingface/trl/blob/v0.22.0/trl/trainer/sft_config.py"),
    Break("transformers", "4.46", LOGITS,
          "the model returns its logits in fp32",
          "the model returns its logits in its own type, and its loss widens them",
          "https://github.com/huggingface/transformers/pull/34147"),
    Break("transformers", "4.49", LOGITS,
          "the loss copies the logits in fp32 once more to shift them",
          "the loss shifts the labels, and does not copy the logits",
          "https://github.com/huggingface/transformers/pull/35646"),
    Break("accelerate", "1.13", FSDP2,
          "all weights are widened to fp32 under mixed precision, frozen ones too",
          "no weight is widened to fp32 in 1.13, by mistake",
          "https://github.com/huggingface/accelerate/issues/3979"),
    Break("accelerate", "1.14", FSDP2,
          "trainable weights stay as they are in 1.13, by mistake",
          "trainable weights are widened to fp32",
          "https://github.com/huggingface/accelerate/issues/3979"),
)
# fmt: on
"""Breaks that were read in the libraries' code or the pull request that made them."""


def predicted_stack() -> dict[str, str]:
    """The releases of tuner and of `STACK` that predictions of this process stand for.

    They are the installed ones, and without PyTorch those of the timelines that come with tuner.
    CUDA is that of the installed PyTorch; what is not known is left out.
    """
    if importlib.util.find_spec("torch") is None:
        from tuner.predict.shipped import shipped  # numpy

        return {"tuner": __version__, **shipped().versions}
    found = {"tuner": __version__}
    for name in STACK:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        if name == "torch" and (cuda := _cuda()):
            found[CUDA] = cuda
    return found


def _cuda() -> str | None:
    spec = importlib.util.find_spec("torch")
    try:
        text = Path(str(spec and spec.origin)).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    found = _CUDA_OF_TORCH.search(text)
    return found[1] if found else None


def other_releases(pinned: Mapping[str, str], stack: Mapping[str, str]) -> Iterator[str]:
    """The libraries whose release in `stack` is none that `pinned` allows, by their specifiers.

    A third number that differs ("5.12.1" for "==5.12.0") changes no results.
    """
    for library, specifier in pinned.items():
        if library in stack and not _allows(SpecifierSet(specifier), Version(stack[library])):
            yield library


def _allows(pinned: SpecifierSet, release: Version) -> bool:
    if pinned.contains(Version(release.public), prereleases=True):
        return True
    exact = [version for one in pinned if (version := _exact(one)) is not None]
    return bool(exact) and all(v.release[:2] == release.release[:2] for v in exact)


def _exact(one: Specifier) -> Version | None:
    if one.operator not in ("==", "===", "~=") or one.version.endswith("*"):
        return None
    try:
        return Version(one.version)
    except InvalidVersion:
        return None


def breaks_between(
    pinned: Mapping[str, str], stack: Mapping[str, str], concerns: Collection[str]
) -> Iterator[str]:
    """A sentence for each known break that lies between the pinned releases and the stack's."""
    for row in BREAKS:
        if row.concerns not in concerns or not {row.library} <= pinned.keys() & stack.keys():
            continue
        release = Version(row.release)
        theirs = is_before(pinned[row.library], release)
        ours = Version(stack[row.library]) < release
        if theirs is None or theirs == ours:
            continue
        when = f"before {row.library} {row.release}" if theirs else f"{row.library} {row.release}"
        what = row.before if theirs else row.since
        yield f"{when if theirs else f'since {when}'} {what}, unlike here ({row.source})"


def is_before(pinned: str, release: Version) -> bool | None:
    """True if all releases that the specifiers allow are older, False if none is, else None."""
    for one in SpecifierSet(pinned):
        try:
            version = Version(one.version.removesuffix(".*"))
        except InvalidVersion:  # "===" takes any text
            continue
        if one.operator in ("==", "===", "~="):
            return version < release
        if one.operator == "<" and version <= release:
            return True
        if one.operator == "<=" and version < release:
            return True
        if one.operator in (">", ">=") and version >= release:
            return False
    return None


def use_todays_names() -> None:
    """Import transformers, and add to it and to huggingface_hub what the installed releases lack.

    For transformers 4.45 to 5.9; nothing is imported for newer ones. Raises `ImportError` where a
    library cannot be imported.
    """
    if not _is_before("transformers", "5.10"):
        return
    import huggingface_hub
    import huggingface_hub.errors
    import transformers
    from transformers import configuration_utils, integrations, modeling_utils
    from transformers.quantizers.base import HfQuantizer

    _lend(huggingface_hub, "is_offline_mode", lambda: huggingface_hub.constants.HF_HUB_OFFLINE)
    _lend(huggingface_hub.errors, "StrictDataclassError", ValueError)
    config: Any = getattr(configuration_utils, "PreTrainedConfig", None)
    if config is None:  # until 4.56
        config = configuration_utils.PretrainedConfig
        # There: transformers 4.48 to 4.52 may import itself again, its modules not.
        configuration_utils.PreTrainedConfig = config
    _lend(config, "sub_configs", {})  # until 4.46
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    for name in ("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING", "AutoModelForImageTextToText"):
        _lend(transformers, name, getattr(auto, name, None))  # 4.45 does not export them
    _lend(HfQuantizer, "get_modules_to_not_convert", staticmethod(_not_converted))
    _lend(modeling_utils.PreTrainedModel, "_flash_attn_can_dispatch", None)
    _lend(modeling_utils, "lazy_import_flash_attention", None)
    for name, attributes in _MODULES.items():
        module = _module(f"{integrations.__name__}.{name}")
        for attribute in attributes:
            _lend(module, attribute, None)
        _lend(integrations, name, module)
    if _is_before("transformers", "4.56"):
        _take_dtype(modeling_utils.PreTrainedModel)
    if _is_before("transformers", "5"):
        _choose_experts_evenly()
    if _is_before("peft", "0.14"):
        _make_adapters_on_meta()


_MODULES = {
    "moe": ("_can_use_grouped_mm",),
    "flash_attention": ("get_target_dtype", "_flash_attention_forward"),
}
"""Modules of transformers.integrations, and the functions that a trace replaces in them."""


def _lend(owner: Any, name: str, value: Any) -> None:
    if not hasattr(owner, name):
        setattr(owner, name, value)


def _module(name: str) -> types.ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        return sys.modules.setdefault(name, types.ModuleType(name))


def _not_converted(model: Any, skipped: list[str] | None, in_fp32: list[str] | None) -> list[str]:
    """As the quantisers of bitsandbytes compute it in each of these releases."""
    from transformers.integrations import get_keys_to_not_convert

    names = get_keys_to_not_convert(model) if skipped is None else skipped
    return [*names, *(in_fp32 or ())]


def _is_before(library: str, release: str) -> bool:
    try:
        return Version(version(library)) < Version(release)
    except PackageNotFoundError:
        return False


def _take_dtype(model_class: Any) -> None:
    """Let models be built with `dtype`, which was `torch_dtype` until 4.55."""
    build = model_class._from_config.__func__

    def from_config(cls: Any, config: Any, /, **options: Any) -> Any:
        if "dtype" in options:
            options["torch_dtype"] = options.pop("dtype")
        return build(cls, config, **options)

    model_class._from_config = classmethod(from_config)


def _make_adapters_on_meta() -> None:
    """Let `get_peft_model` take `low_cpu_mem_usage`, with which it makes adapters on meta."""
    import peft
    import torch

    make = peft.get_peft_model

    def get_peft_model(model: Any, config: Any, *, low_cpu_mem_usage: bool = False) -> Any:
        with torch.device("meta") if low_cpu_mem_usage else contextlib.nullcontext():
            return make(model, config)

    peft.get_peft_model = get_peft_model


def _choose_experts_evenly() -> None:
    """Let `torch.where` find the tokens of an expert on meta, as many for each, and all experts.

    The blocks of experts before transformers 5 look for the ones of an expert in a table that has
    one for each choice of a token: there are as many ones as choices of a single expert. Since 4.52
    they go through the experts that any token chose.
    """
    import torch

    replaced: Any = torch
    where, nonzero = replaced.where, replaced.Tensor.nonzero

    def find(*arguments: Any, **options: Any) -> Any:
        if len(arguments) > 1 or options or not arguments[0].is_meta or arguments[0]._base is None:
            return where(*arguments, **options)
        chosen = arguments[0]
        ones = chosen.numel() ** 2 // chosen._base.numel()
        return tuple(
            torch.empty(ones, dtype=torch.long, device="meta") for _ in range(chosen.dim())
        )

    def chosen_experts(tensor: Any, *, as_tuple: bool = False) -> Any:
        if not tensor.is_meta or tensor.dim() != 1 or tensor.dtype is not torch.bool:
            return nonzero(tensor, as_tuple=as_tuple)
        numbers = array("q", range(len(tensor)))
        return (numbers,) if as_tuple else numbers

    replaced.where, replaced.Tensor.nonzero = find, chosen_experts
