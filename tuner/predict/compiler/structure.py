"""Settings of a configuration that change the operators' sequence, and those that change sizes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tuner.core.records import Configuration, KnobValue
from tuner.core.setup.causal_lm import CAUSAL_LM, Evaluating
from tuner.core.setup.common import QUANTIZED, Loader, Process
from tuner.core.setup.distributed_knobs import Ranks
from tuner.cost.polynomial import Probe

SIZE_KNOBS = frozenset(
    {"micro_batch", "max_length", "lora_rank", "lora_alpha", "grad_accum", "effective_batch"}
)
"""Knobs that scale tensors or repeat a micro-step, and change no operator."""

VARIABLE_KNOBS = ("micro_batch", "max_length", "lora_rank")
"""The knobs behind the variables of polynomials, in their order. Behind them come the negatives, or
the batch of an evaluation."""

HOST_KNOBS = frozenset(
    {"n_positives", *(term.name for term in (*Process.terms(), *Loader.terms(), *Ranks.terms()))}
    - {"liger"}
)
"""Knobs that a traced step does not see: what feeds it, how many pairs an epoch has, and the ranks
that do the same (`tuner.cost.parallel`)."""

OPTIMIZER_KNOBS = frozenset({"optimizer", "max_grad_norm"})
"""Knobs that act after the last backward pass."""

EVALUATION_KNOBS = frozenset(term.name for term in Evaluating.terms())
"""Knobs of the evaluation: its batch is a size."""

TILE_TOKENS = 4096
"""Most tokens of a tile of loss chunked: `TOKEN_CHUNK_SIZE` of trl/kernels/chunked_logprob.py,
TRL 1.16."""

_FLASH, _NO_FLASH = (8, 0), (7, 5)
"""Compute capabilities that stand for all GPUs with and without flash attention."""


@dataclass(frozen=True, slots=True)
class Structure:
    """One sequence of operators: everything but sizes, optimizer and GPU rates.

    `settings` are the remaining knobs. A micro-batch or a negative alone has a sequence of its
    own, and so have lengths that reach a model's sliding window (`window`, None without one),
    because a mask is made from there on, and tokens that fill a tile of a chunked loss.
    `compute_capability` stands for the kernels that GPUs of its kind choose. Models that look
    positions up have no more than `positions`.
    """

    settings: Configuration
    single_sample: bool
    full_training: bool
    window: int | None
    beyond_window: bool
    compute_capability: tuple[int, int]
    positions: int | None = None
    has_negatives: bool = False
    """More than one negative goes with each anchor; their number is a size."""
    in_one_tile: bool | None = None
    """True if all tokens are in one tile of a chunked loss; None with other losses."""
    kept_by_evaluation: int | None = None
    """Batches whose logits an evaluation behind the steps keeps; None without an evaluation."""
    single_evaluation: bool = False
    """True if an evaluation has one row at a time."""
    evaluated_in_one_tile: bool | None = None
    """As `in_one_tile`, of the evaluation's rows; None without one."""

    @classmethod
    def of(
        cls,
        configuration: Configuration,
        *,
        window: int | None,
        compute_capability: tuple[int, int],
        positions: int | None = None,
        linears: frozenset[str] = frozenset(),
    ) -> Structure:
        """The structure that a configuration has on a GPU, for a model with this window.

        `linears` as in `Architecture`.
        """
        has_negatives = _whole(configuration.get("n_negatives", 0)) > 1
        others = SIZE_KNOBS | OPTIMIZER_KNOBS | HOST_KNOBS | EVALUATION_KNOBS
        others |= {"n_negatives"} if has_negatives else set()
        settings = {
            name: value
            for name, value in configuration.items()
            if name not in others and (name != "liger" or value)
        }
        length = _whole(configuration["max_length"])
        evaluated = _whole(configuration.get("eval_batch", 0))
        is_full = _whole(configuration.get("lora_rank", 0)) == 0
        return cls(
            settings=Configuration(settings | _without_effect(settings, linears, is_full=is_full)),
            single_sample=_whole(configuration["micro_batch"]) == 1,
            full_training=is_full,
            window=window,
            # Eager attention makes its masks at every length.
            beyond_window=(
                window is not None and length >= window and settings.get("attention") != "eager"
            ),
            compute_capability=kernels_like(compute_capability),
            positions=positions,
            has_negatives=has_negatives,
            in_one_tile=in_one_tile(configuration, "micro_batch"),
            kept_by_evaluation=_whole(configuration.get("eval_kept", 0)) if evaluated else None,
            single_evaluation=evaluated == 1,
            evaluated_in_one_tile=in_one_tile(configuration, "eval_batch") if evaluated else None,
        )

    def configuration(self, probe: Probe) -> Configuration:
        """The configuration that is traced at a probe."""
        sizes: dict[str, Any] = {
            "micro_batch": probe.micro_batch,
            "max_length": probe.max_length,
            "lora_rank": probe.lora_rank,
            "lora_alpha": 16,
            "grad_accum": 2,
            "optimizer": "sgd",
            "max_grad_norm": 0.0,
            **({"n_negatives": probe.n_negatives} if self.has_negatives else {}),
        }
        if self.kept_by_evaluation is not None:
            sizes |= {"eval_batch": probe.n_negatives, "eval_kept": self.kept_by_evaluation}
        return Configuration({**self.settings, **sizes})

    def probes(self) -> tuple[tuple[Probe, Probe], Probe]:
        """The two points that determine polynomials, and one to check them at.

        The ratios are 7/11 (or 2/3), 31/29 (or 7/5, 4/3), 17/13 and 23/19: their prime factors tell
        every monomial apart, and few models have a dimension with those of the lengths. Lengths are
        multiples of 128, to which attention kernels round.
        """
        unit = 128
        steps = (5, 7)
        several_tiles = self.in_one_tile is False
        least = self.window if self.window is not None and self.beyond_window else 0
        is_long_row = several_tiles and self.single_sample
        if is_long_row:
            least = max(least, TILE_TOKENS + 2)
        if least:
            unit *= -(-least // (5 * unit))
        elif self.window is not None and self.settings.get("attention") != "eager":
            while 7 * unit >= self.window and unit > 1:
                unit //= 2
        elif self.positions is not None and 7 * unit > self.positions:
            # Only flash attention rounds to 128; the others to 64.
            steps = (3, 4) if self._may_run_flash_attention else (5, 7)
            while steps[1] * unit > self.positions and unit > 1:
                unit //= 2
        check_step = 11 if self.beyond_window or several_tiles else 3 if steps == (5, 7) else 1
        is_bounded = self.window is not None and self.settings.get("attention") != "eager"
        is_bounded |= bool(self.in_one_tile or self.evaluated_in_one_tile or is_long_row)
        if not is_bounded and (self.positions or 37 * 128) >= 37 * 128:
            unit, steps, check_step = 128, (29, 31), 37
        batches = (11, 7, 5)
        if self.in_one_tile:
            # Three and twice three are factors of few sizes, as two is of many.
            batches, check_step = (3, 2, 5), 6 if steps == (5, 7) else check_step
        if self.single_sample:
            batches = (1, 1, 1)
        ranks = (0, 0, 0) if self.full_training else (13, 17, 29)
        negatives = (19, 23, 5) if self.has_negatives else (0, 0, 0)
        if self.kept_by_evaluation is not None:
            evaluated = (5, 4, 5) if self.in_one_tile else (19, 23, 3)
            if self._is_evaluated_otherwise:
                evaluated = (5, 4, 2) if self.evaluated_in_one_tile else (43, 41, 47)
            negatives = (1, 1, 1) if self.single_evaluation else evaluated
        return (
            (
                Probe(batches[0], steps[0] * unit, ranks[0], negatives[0]),
                Probe(batches[1], steps[1] * unit, ranks[1], negatives[1]),
            ),
            Probe(batches[2], check_step * unit, ranks[2], negatives[2]),
        )

    @property
    def _may_run_flash_attention(self) -> bool:
        return (
            self.compute_capability >= _FLASH
            and self.settings.get("attention") == "sdpa"
            and self.settings.get("padding") != "max_length"
        )

    @property
    def _is_evaluated_otherwise(self) -> bool:
        """True if the tokens of a step and those of an evaluation fill tiles differently."""
        return self.evaluated_in_one_tile not in (None, self.in_one_tile)

    @property
    def key(self) -> str:
        """16 hexadecimal digits that identify the structure, the same in every process.

        Settings with their default stand for themselves: knobs that are added later, and are not
        set, change no key of the timelines that ship.
        """
        text = json.dumps(
            [
                self._changed,
                self.single_sample,
                self.full_training,
                self.window,
                self.beyond_window,
                self.compute_capability,
                self.positions,
                self.has_negatives,
                self.in_one_tile,
                *(
                    []
                    if self.kept_by_evaluation is None
                    else [self.kept_by_evaluation, self.single_evaluation]
                ),
                *([self.evaluated_in_one_tile] if self._is_evaluated_otherwise else []),
            ],
            sort_keys=True,
        )
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def said(self) -> dict[str, Any]:
        """The settings that tell it from others of its model.

        Settings that have their default are left out.
        """
        found = {
            **self._changed,
            "micro_batch": "1" if self.single_sample else "2 or more",
            "lora_rank": "0" if self.full_training else "1 or more",
            "gpu": "with flash attention" if self.compute_capability == _FLASH else "before Ampere",
        }
        if self.window is not None and self.settings.get("attention") != "eager":
            text = "{} or more" if self.beyond_window else "less than {}"
            found["max_length"] = text.format(self.window)
        if self.in_one_tile is not None:
            of_all = "at most" if self.in_one_tile else "more than"
            found["micro_batch x max_length"] = f"{of_all} {TILE_TOKENS}"
        if self.kept_by_evaluation is not None:
            found["eval_batch"] = "1" if self.single_evaluation else "2 or more"
            found["eval_kept"] = self.kept_by_evaluation
        if self._is_evaluated_otherwise:
            of_all = "at most" if self.evaluated_in_one_tile else "more than"
            found["eval_batch x max_length"] = f"{of_all} {TILE_TOKENS}"
        return found

    @property
    def _changed(self) -> dict[str, Any]:
        """The settings that have not their default."""
        return {
            name: value
            for name, value in self.settings.to_dict().items()
            if name not in CAUSAL_LM.terms or CAUSAL_LM.terms[name].default != value
        }


def differences(asked: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The settings in which one `Structure.said` differs from another, with both values."""
    terms = CAUSAL_LM.terms
    return {
        name: (asked.get(name, default), known.get(name, default))
        for name in dict.fromkeys((*asked, *known))
        for default in (terms[name].default if name in terms else None,)
        if asked.get(name, default) != known.get(name, default)
    }


SOME_DROPOUT = 0.05
"""Stands for every dropout above 0, whose operators are the same. It is the value of five of the
shipped search spaces, so that the keys of their timelines stay."""


def _without_effect(
    settings: Mapping[str, KnobValue], linears: frozenset[str], *, is_full: bool
) -> dict[str, KnobValue]:
    """The settings that change no operator beside the others, with the value that stands for all.

    That is the default: a key leaves it out.
    """
    precision, dropout = settings.get("precision"), settings.get("lora_dropout")
    targets = settings.get("lora_targets", ())
    names = sorted(map(str, targets)) if isinstance(targets, list | tuple) else [str(targets)]
    idle: list[str] = []
    if precision not in QUANTIZED:
        idle += ["compute_dtype", "kbit_preparation"]
    if precision != "nf4":
        idle.append("double_quant")
    if settings.get("gradient_checkpointing") is False:
        idle.append("use_reentrant")
    if is_full:
        idle += ["lora_targets", "lora_dropout"]
    if linears == {*names}:
        idle.append("lora_targets")
    if settings.get("adapter") == "rslora" and not is_full:  # another factor of the same product
        idle.append("adapter")
    found: dict[str, KnobValue] = (
        {"lora_targets": tuple(names)} if "lora_targets" in settings else {}
    )
    if dropout:
        found["lora_dropout"] = SOME_DROPOUT
    return found | {name: CAUSAL_LM.terms[name].default for name in idle if name in settings}


def kernels_like(compute_capability: tuple[int, int]) -> tuple[int, int]:
    """The compute capability that stands for all GPUs that choose the same kernels."""
    return _FLASH if compute_capability >= _FLASH else _NO_FLASH


def _whole(value: Any) -> int:
    return int(value)


def in_one_tile(configuration: Configuration, batch: str) -> bool | None:
    """True if all tokens of a batch are in one tile of a chunked loss; None with other losses."""
    if configuration.get("loss") != "chunked":
        return None
    rows, length = (_whole(configuration[name]) for name in (batch, "max_length"))
    return rows * (length - 1) <= TILE_TOKENS


Point = tuple[int, ...]
"""Micro-batch, length, rank, and negatives or the batch of an evaluation."""
