"""What each knob is called, what it may be, and what it is when nobody says.

One table per workload. The space files, `tuner estimate --set` and the workloads read the same
one, so a name means one thing everywhere and a misspelt one is never silently ignored.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tuner.errors import InputError, nearest
from tuner.expressions import show
from tuner.records import KnobValue

Kind = Literal["int", "float", "bool", "word", "names"]

_INT = re.compile(r"[+-]?(0|[1-9][0-9]*(_[0-9]+)*)")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_MAX_INT = 10**12


@dataclass(frozen=True, slots=True)
class Term:
    """One name of a workload's vocabulary.

    `default` is the value where neither the space nor the user sets one; a `default_rule` (an
    expression over other names) takes its place where the default follows from them.
    `capacity` marks knobs that make the result better and never faster or smaller (rank,
    length): a search needs a floor on them.
    """

    name: str
    kind: Kind
    meaning: str
    default: KnobValue
    default_rule: str | None = None
    allowed: tuple[str, ...] = ()
    minimum: float = -math.inf
    below: float = math.inf
    """Values must be less than this."""
    capacity: bool = False

    @property
    def expects(self) -> str:
        """What is allowed, for people: "a whole number of at least 1"."""
        if self.kind == "word":
            return f"one of {', '.join(self.allowed)}"
        if self.kind == "bool":
            return "true or false"
        if self.kind == "names":
            return "a list of module names such as [q_proj, v_proj], or all-linear"
        noun = "a whole number" if self.kind == "int" else "a number"
        if self.below != math.inf:
            return f"{noun} of at least {self.minimum:g} and below {self.below:g}"
        return noun if self.minimum == -math.inf else f"{noun} of at least {self.minimum:g}"

    def read(self, value: Any) -> KnobValue:
        """`value` (typed by a person, or already of the right type) as a value of this term.

        Raises `InputError` with the value, what is allowed and the nearest spelling.
        """
        if isinstance(value, str):
            value = value.strip()
        result = _READERS[self.kind](value)
        if result is None or not self._in_range(result):
            raise self._refusal(value)
        return result

    def _in_range(self, value: KnobValue) -> bool:
        if self.kind == "word":
            return value in self.allowed
        if isinstance(value, bool | str | tuple):
            return True
        return self.minimum <= value < self.below and abs(value) <= _MAX_INT

    def _refusal(self, value: Any) -> InputError:
        shown = show(value)
        close = nearest(shown, self.allowed) if self.kind == "word" else None
        return InputError(
            f"{self.name} cannot be {shown[:60]!r}: it must be {self.expects}",
            hint=f"did you mean {close!r}?" if close else None,
        )


def _read_int(value: Any) -> int | None:
    if isinstance(value, str):
        # Not int(): it would take "٣", and YAML 1.1 would take 010 for eight.
        return int(value) if len(value) < 30 and _INT.fullmatch(value) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return int(value) if math.isfinite(value) and value == int(value) else None


def _read_float(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)  # also 2e-4, which YAML 1.1 reads as text
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _read_bool(value: Any) -> bool | None:
    if isinstance(value, bool):
        return value
    return _BOOLEANS.get(value.lower()) if isinstance(value, str) else None


def _read_word(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _read_names(value: Any) -> tuple[str, ...] | None:
    """Names from ['q_proj', 'v_proj'], '[q_proj, v_proj]' or 'q_proj,v_proj'."""
    if isinstance(value, str):
        inner = value[1:-1] if value.startswith("[") and value.endswith("]") else value
        value = [part.strip().strip("'\"") for part in inner.split(",")]
    if not isinstance(value, list | tuple) or not value:
        return None
    if not all(isinstance(part, str) and _NAME.fullmatch(part) for part in value):
        return None
    return tuple(value) if len(set(value)) == len(value) else None


_READERS = {
    "int": _read_int,
    "float": _read_float,
    "bool": _read_bool,
    "word": _read_word,
    "names": _read_names,
}


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Every name of one workload, and the conditions that hold in each of its spaces."""

    workload: str
    terms: Mapping[str, Term]
    always: tuple[str, ...] = ()


ALL_LINEAR: tuple[str, ...] = ("all-linear",)
"""peft's own word for every linear layer but the output head, whatever the model calls them."""

_CAUSAL_LM = (
    Term(
        "micro_batch",
        "int",
        "sequences in one forward and backward pass on one GPU",
        default=1,
        minimum=1,
    ),
    Term(
        "effective_batch",
        "int",
        "sequences in one optimizer step: micro_batch * grad_accum",
        default=16,
        minimum=1,
    ),
    Term(
        "grad_accum",
        "int",
        "micro-steps whose gradients are added up before an optimizer step",
        default=16,
        default_rule="effective_batch // micro_batch",
        minimum=1,
    ),
    Term("lora_rank", "int", "rank of the LoRA adapters", default=16, minimum=1, capacity=True),
    Term(
        "lora_alpha",
        "int",
        "scale of the LoRA adapters: no effect on memory or time",
        default=32,
        default_rule="2 * lora_rank",
        minimum=1,
    ),
    Term("lora_dropout", "float", "dropout before each adapter", default=0.0, minimum=0, below=1),
    Term("lora_targets", "names", "modules that get an adapter", default=ALL_LINEAR),
    Term(
        "max_length",
        "int",
        "longest sequence in tokens; longer examples are cut",
        default=1024,
        minimum=1,
        capacity=True,
    ),
    Term(
        "precision",
        "word",
        "how the base weights are kept: nf4 and int8 are quantised by bitsandbytes, tf32 is "
        "fp32 weights with TF32 matrix products",
        default="bf16",
        allowed=("fp32", "tf32", "fp16", "bf16", "int8", "nf4"),
    ),
    Term(
        "mixed_precision",
        "word",
        "autocast of the forward pass, as Trainer's bf16=True and fp16=True",
        default="bf16",
        default_rule="'no' if precision in ('fp32', 'tf32') else "
        "'fp16' if precision == 'fp16' else 'bf16'",
        allowed=("no", "bf16", "fp16"),
    ),
    Term(
        "compute_dtype",
        "word",
        "dtype of products with nf4 and int8 layers and of what is not quantised; auto is that "
        "of mixed_precision, else bf16",
        default="auto",
        allowed=("auto", "fp32", "fp16", "bf16"),
    ),
    Term(
        "double_quant",
        "bool",
        "nf4 only: keep the scales of weight blocks in 8 bits too (bnb_4bit_use_double_quant)",
        default=True,
    ),
    Term(
        "kbit_preparation",
        "word",
        "nf4 and int8 with adapters: widen what is not quantised to fp32, as peft's "
        "prepare_model_for_kbit_training, only the norms of it, as trl's SFTTrainer, or nothing",
        default="peft",
        allowed=("peft", "trl", "none"),
    ),
    Term(
        "loss",
        "word",
        "how the loss treats the logits: as the installed transformers does, as versions 4.46 to "
        "4.48 or up to 4.45 did, or in the precision of the logits",
        default="transformers",
        allowed=("transformers", "transformers_4_46", "transformers_4_45", "unwidened"),
    ),
    Term(
        "fused_loss",
        "bool",
        "a fused cross entropy that turns the logits into their gradient in place",
        default=False,
    ),
    Term(
        "gradient_checkpointing",
        "bool",
        "recompute each layer's activations in the backward pass instead of keeping them",
        default=True,
    ),
    Term(
        "optimizer",
        "word",
        "optimizer by its name in transformers' TrainingArguments",
        default="adamw_torch",
        allowed=("adamw_torch", "adamw_torch_fused", "adamw_8bit", "paged_adamw_8bit", "sgd"),
    ),
    Term(
        "attention",
        "word",
        "attn_implementation of transformers",
        default="sdpa",
        allowed=("eager", "sdpa", "flash_attention_2"),
    ),
    Term(
        "max_grad_norm",
        "float",
        "gradients are clipped to this norm; 0 does not clip (TrainingArguments' default is 1)",
        default=1.0,
        minimum=0,
    ),
    Term(
        "training_loop",
        "word",
        "who runs the step: transformers' Trainer; a function of one's own, which holds the "
        "model's outputs (the logits) until backward has ended; or the body of a loop, whose "
        "variables hold them until the next forward pass has ended",
        default="trainer",
        allowed=("trainer", "function", "loop"),
    ),
)

VOCABULARIES: Mapping[str, Vocabulary] = {
    "causal_lm": Vocabulary(
        "causal_lm",
        {term.name: term for term in _CAUSAL_LM},
        always=("effective_batch == micro_batch * grad_accum",),
    ),
}
"""By workload. A workload without a table here cannot be searched."""
