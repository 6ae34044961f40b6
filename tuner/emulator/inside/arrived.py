"""The settings that take effect in a training, read from the running model and trainer.

A value in a file or on a command line may never reach the trainer. Names are those of
`tuner.core.setup.schemas` (micro_batch, lora_rank, ...), and values are JSON.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from tuner.emulator.inside.faults import guarded
from tuner.emulator.inside.process import replaces, when_imported

_ARGUMENTS = {
    "micro_batch": "per_device_train_batch_size",
    "grad_accum": "gradient_accumulation_steps",
    "optimizer": "optim",
    "max_length": "max_length",
    "packing": "packing",
    "padding_free": "padding_free",
    "fused_kernels": "use_liger_kernel",
    "torch_compile": "torch_compile",
    "max_grad_norm": "max_grad_norm",
    "loss": "loss_type",
}
"""Arguments of transformers' and TRL's trainers, by the parameter that they set."""


_EACH_ALONE = (
    "TripletLoss", "CosineSimilarityLoss", "SoftmaxLoss", "ContrastiveLoss", "MSELoss",
    "MarginMSELoss", "DenoisingAutoEncoderLoss", "DistillKLDivLoss", "BinaryCrossEntropyLoss",
    "CrossEntropyLoss",
)  # fmt: skip
"""Losses of sentence-transformers 6.2 that are means over samples; the others compare the samples
of a micro-batch, as for in-batch negatives."""


class Arrived:
    """Collects the settings and the inputs of the training in this process."""

    def __init__(
        self,
        note_vocabulary: Callable[[int], None] = lambda words: None,
        looked_up: Callable[..., None] = lambda *, trains: None,
    ) -> None:
        self._of_trainer: dict[str, Any] = {}
        self._of_model: dict[str, Any] = {}
        self._note_vocabulary = note_vocabulary
        self._looked_up = looked_up
        self.inputs: dict[int, list[tuple[int, int]]] = {}
        """(sequences, tokens of each) of every forward pass with gradients, by step."""
        self._table, self._largest = 0, (0, 0)
        self.compares = ""
        """The part of the training that takes all samples of a micro-batch together."""

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the trainer and the model, by parameter."""
        return {**self._of_trainer, **self._of_model}

    def install(self, step: Any) -> None:
        """Start listening; `step()` returns the number of the running step."""
        import torch

        functional: Any = torch.nn.functional
        look_up = functional.embedding

        @functools.wraps(look_up)
        def embedding(indices: Any, weight: Any, *args: Any, **kwargs: Any) -> Any:
            trains = torch.is_grad_enabled()
            if weight.is_cuda:
                self._looked_up(trains=trains)
            if trains:
                self._note_input(step(), indices, weight)
            return look_up(indices, weight, *args, **kwargs)

        functional.embedding = embedding
        when_imported("transformers.trainer", self._follow_trainer)

    @guarded("the model's settings")
    def note_model(self, model: Any) -> None:
        """Read the settings of the trained model; the last one counts."""
        import torch

        self._of_model = settings_of_model(model) | _autocast()
        # The layers that normalise over a micro-batch, if the model trains with any.
        norms = torch.nn.modules.batchnorm._BatchNorm
        found = (m for m in model.modules() if isinstance(m, norms) and m.training)
        self.compares = self.compares or next((type(one).__name__ for one in found), "")

    @guarded("an input of the model")
    def _note_input(self, step: int, indices: Any, weight: Any) -> None:
        """Record the indices into one table: in the first step the most, in the largest table."""
        size = (indices.numel(), weight.numel())
        try:
            table = weight.data_ptr()
        except RuntimeError:  # torch.compile traces the lookup, and the tensors are fakes
            return
        is_other = table != self._table
        is_first = min(self.inputs, default=step) == step
        if not weight.is_cuda or (is_other and (size < self._largest or not is_first)):
            return
        if is_other:
            self._table, self._largest = table, size
            self._note_vocabulary(weight.shape[0] if weight.shape[0] != weight.shape[1] else 0)
            self.inputs.clear()
        rows = indices.shape[0] if indices.dim() > 1 else 1
        self.inputs.setdefault(step, []).append((rows, indices.numel() // max(1, rows)))

    def _follow_trainer(self, module: Any) -> None:
        @replaces(module.Trainer, "train")
        def train(run: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
            self._note_arguments(trainer.args)
            self._note_loss(trainer)
            return run(trainer, *args, **kwargs)

    @guarded("the trainer's settings")
    def _note_arguments(self, arguments: Any) -> None:
        self._of_trainer = settings_of_arguments(arguments)

    @guarded("the trainer's loss")
    def _note_loss(self, trainer: Any) -> None:
        if not any(kind.__name__ == "SentenceTransformerTrainer" for kind in type(trainer).mro()):
            return
        losses = trainer.loss.values() if isinstance(trainer.loss, dict) else [trainer.loss]
        names = [type(getattr(one, "loss", one)).__name__ for one in losses]
        self.compares = ", ".join(name for name in names if name not in _EACH_ALONE)


def _autocast() -> dict[str, str]:
    """The precision of `torch.autocast`, if the training runs in it."""
    import torch

    if not torch.is_autocast_enabled():
        return {}
    dtype = torch.get_autocast_dtype("cuda")
    return {"mixed_precision": {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype, "no")}


def settings_of_arguments(arguments: Any) -> dict[str, Any]:
    """The settings of transformers' and TRL's arguments, by parameter."""
    found = {knob: getattr(arguments, name, None) for knob, name in _ARGUMENTS.items()}
    found["optimizer"] = str(getattr(found["optimizer"], "value", found["optimizer"]))
    found["mixed_precision"] = "bf16" if arguments.bf16 else "fp16" if arguments.fp16 else "no"
    return {name: value for name, value in found.items() if value is not None}


def settings_of_model(model: Any) -> dict[str, Any]:
    """The settings of a model and its adapters, by parameter."""
    config = getattr(model, "config", None)
    found: dict[str, Any] = dict(_checkpointing(model))
    attention = getattr(config, "_attn_implementation", None)
    if isinstance(attention, str):
        found["attention"] = attention
    adapters = getattr(model, "peft_config", None) or {}
    for adapter in list(adapters.values())[:1]:
        found.update(_of_adapter(adapter))
    found["precision"] = _precision(model, config)
    return found


def _of_adapter(adapter: Any) -> Iterator[tuple[str, Any]]:
    for knob, name in (("lora_rank", "r"), ("lora_alpha", "lora_alpha")):
        value = getattr(adapter, name, None)
        if value is not None:
            yield knob, value
    dropout = getattr(adapter, "lora_dropout", None)
    if dropout is not None:
        yield "lora_dropout", dropout
    targets = getattr(adapter, "target_modules", None)
    if targets:
        yield "lora_targets", targets if isinstance(targets, str) else sorted(targets)


def _checkpointing(model: Any) -> Iterator[tuple[str, Any]]:
    """The gradient checkpointing settings, which are attributes of modules."""
    switches = [
        m for m in model.modules() if isinstance(m.__dict__.get("gradient_checkpointing"), bool)
    ]
    if not switches:
        return
    on = [m for m in switches if m.gradient_checkpointing]
    yield "gradient_checkpointing", bool(on) and bool(model.training)
    for module in on[:1]:
        keywords = getattr(getattr(module, "_gradient_checkpointing_func", None), "keywords", {})
        # PyTorch's own default is reentrant.
        yield "use_reentrant", bool(keywords.get("use_reentrant", True))


def _precision(model: Any, config: Any) -> str:
    """The precision of the weights: the quantisation, or their most common type."""
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None:
        get = quantization.get if isinstance(quantization, dict) else vars(quantization).get
        if get("load_in_4bit") or get("_load_in_4bit"):
            return str(get("bnb_4bit_quant_type") or "nf4")
        if get("load_in_8bit") or get("_load_in_8bit"):
            return "int8"
        return str(get("quant_method"))
    sizes: dict[str, int] = {}
    for parameter in model.parameters():
        name = str(parameter.dtype).removeprefix("torch.")
        sizes[name] = sizes.get(name, 0) + parameter.numel()
    most = max(sizes, key=lambda name: sizes[name], default="")
    return {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}.get(most, most)
