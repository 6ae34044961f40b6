"""Older releases of the traced libraries, given the names that tuner asks of today's.

What a name stands for stays what the release does: a name that it lacks, and has nothing like, is
there and unused. Tracing still fails where a release lacks more, and the failure is an error.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import types
from array import array
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from packaging.version import Version


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
