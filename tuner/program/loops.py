"""The training loops that a prediction without a program stands for: a plain script of each.

The script says what its author has to: the model with its dtype, the quantisation, and an adapter
on all linear layers. The reader of its trainer knows the rest, as it does for `tuner check`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tuner.core.errors import unknown
from tuner.core.gpu import Gpu
from tuner.core.setup.common import QUANTIZED, TORCH_DTYPES
from tuner.core.setup.schemas import SCHEMAS
from tuner.program.arguments import Argument, Arguments, Found, ProgramTraining
from tuner.program.planned import HALVED, WORKLOAD, ProgramPlan, plan_training
from tuner.program.reading import with_method
from tuner.program.releases import known
from tuner.space.models.catalogue import stored_format

OWN = "own"
"""The loop that `tuner trial` and the search of a space run."""

_TRAINERS: Mapping[str, str] = {"trl": "SFTTrainer", "transformers": "Trainer"}

LOOPS = (*_TRAINERS, OWN)
"""The loops that can be named, the default first."""


def loop_of(said: str | None, given: Mapping[str, Any]) -> str:
    """The loop that is `said`, else the one that the settings are of.

    A classifier is trained by transformers' Trainer. Raises `InputError` for an unknown name.
    """
    if said is not None and said not in LOOPS:
        raise unknown("loop", said, LOOPS)
    if said is not None:
        return said
    if given.get("training_loop", "trainer") != "trainer":
        return OWN
    return "transformers" if given.get("num_labels") else LOOPS[0]


def plan_settings(
    model: str, given: Mapping[str, Any], loop: str, *, gpu: Gpu | None = None
) -> ProgramPlan:
    """The training of a script with these parameters, which leaves the rest to its trainer.

    Raises `InputError` as `tuner.program.planned.plan_program` does.
    """
    script = _script(model, given, _TRAINERS[loop], gpu)
    said = () if given.get("precision") == "tf32" else HALVED
    rest = {name: value for name, value in given.items() if name not in said}
    return plan_training(script, rest, model, gpu=gpu)


def _script(model: str, given: Mapping[str, Any], trainer: str, gpu: Gpu | None) -> ProgramTraining:
    found = Found()
    terms = SCHEMAS[WORKLOAD].terms
    precision, rank, targets = (
        given.get(name, terms[name].default) for name in ("precision", "lora_rank", "lora_targets")
    )
    dtype = TORCH_DTYPES.get(str(precision), "bfloat16")
    if precision in QUANTIZED and given.get("compute_dtype", "auto") != "auto":
        dtype = TORCH_DTYPES[str(given["compute_dtype"])]
    groups: dict[str, tuple[str, dict[str, Any]]] = {}
    groups["model"] = ("AutoModelForCausalLM.from_pretrained", {"0": model, "dtype": dtype})
    title = trainer.replace("Trainer", "Config") if trainer != "Trainer" else "TrainingArguments"
    mixed = given.get("mixed_precision")
    halves = {} if mixed is None else {"bf16": mixed == "bf16", "fp16": mixed == "fp16"}
    groups |= {"arguments": (title, halves), "trainer": (trainer, {})}
    library = "transformers" if trainer == "Trainer" else "trl"
    fields = (known(f"{library}.{title}") or {}).get("fields", {})
    plain = (bool, int, float, str)
    defaults = {n: v["default"] for n, v in fields.items() if isinstance(v.get("default"), plain)}
    made = dict[str, Arguments]()
    for name, (of, said) in groups.items():
        values = {n: Argument(value, of) for n, value in said.items()}
        made[name] = Arguments(of, values, found, defaults if name == "arguments" else {})
    script = ProgramTraining(trainer, made, found, has_bf16=gpu is None or gpu.has_bf16)
    method = {
        "lora_rank": rank,
        "lora_targets": targets,
        "compute_dtype": given.get("compute_dtype"),
    }
    if stored_format(model) != precision:
        method["precision"] = precision
    return with_method(script, method)
