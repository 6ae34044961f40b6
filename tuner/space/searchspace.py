"""A search space: what may be tried, what is held fixed, and what follows from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from tuner.core.errors import InputError, Problem, nearest
from tuner.core.expressions import Expression, compile_expression
from tuner.core.records import Configuration, KnobValue
from tuner.core.setup.distributed_knobs import rule_with_ranks
from tuner.core.setup.schemas import SCHEMAS, KnobSchema
from tuner.space.apply import ApplyTarget
from tuner.space.command import Command
from tuner.space.data import DataFacts
from tuner.space.knobs import Knob
from tuner.space.rules import (
    Derivations,
    Rule,
    Stage,
    condition_rule,
    conflict,
    kind_rule,
    solutions,
    stage_terms,
)


@dataclass(frozen=True, slots=True)
class ObjectiveName:
    """A number of a prediction or measurement that is to be large or small."""

    metric: str
    direction: Literal["maximize", "minimize"]


METRICS: Mapping[str, ObjectiveName] = {
    objective.metric: objective
    for objective in (
        ObjectiveName("samples_per_s", "maximize"),
        ObjectiveName("tokens_per_s", "maximize"),
        ObjectiveName("step_s", "minimize"),
        ObjectiveName("device_bytes", "minimize"),
        ObjectiveName("peak_allocated_bytes", "minimize"),
        ObjectiveName("peak_reserved_bytes", "minimize"),
        ObjectiveName("epoch_usd", "minimize"),
        ObjectiveName("lora_rank", "maximize"),
        ObjectiveName("length_coverage", "maximize"),
    )
}
"""Possible objectives. A metric has its own direction, which cannot be set wrongly."""

DEFAULT_OBJECTIVES = (METRICS["samples_per_s"], METRICS["device_bytes"])


@dataclass(frozen=True)
class SearchSpace:
    """Knobs with their values, and everything that turns them into complete configurations.

    Plain data, checked when it was read; picklable. `fixed` and `derived` together with `knobs`
    give every name of the workload's vocabulary a value; `defaulted` names those that the file
    does not mention. `floors` are conditions on capacity knobs that narrow a search unless the
    user sets others on the same knobs. `baseline` holds knob values that people used before;
    knobs that are not set take them (or their first value where there is no baseline). `apply`
    names the keys of the user's own files that the values belong to.

    Where the user's own code trains (`command`, or a workload "package.module:object"), the
    names are those of the file, and `own_terms` says of which kind each is. `memory` has values
    of some knobs from least to most memory, all else the same.
    """

    name: str
    workload: str
    description: str = ""
    model: str | None = None
    gpus: tuple[str, ...] = ()
    knobs: Mapping[str, Knob] = field(default_factory=dict)
    fixed: Mapping[str, KnobValue] = field(default_factory=dict)
    derived: Mapping[str, str] = field(default_factory=dict)
    constraints: tuple[str, ...] = ()
    floors: tuple[str, ...] = ()
    data: DataFacts = field(default_factory=DataFacts)
    objectives: tuple[ObjectiveName, ...] = DEFAULT_OBJECTIVES
    stages: tuple[Stage, ...] = ()
    baseline: Mapping[str, KnobValue] | None = None
    apply: Mapping[str, ApplyTarget] = field(default_factory=dict)
    defaulted: frozenset[str] = frozenset()
    path: Path | None = None
    command: Command | None = None
    own_terms: Mapping[str, KnobSchema] = field(default_factory=dict)
    memory: Mapping[str, tuple[KnobValue, ...]] = field(default_factory=dict)

    @property
    def predictable(self) -> bool:
        """True if predictions know the workload; they don't know the user's own code."""
        return self.workload in SCHEMAS

    @property
    def subject(self) -> str:
        """The trained subject in words: the model, else the user's own command or code."""
        return self.model or str(self.command or self.workload)

    def subject_of(self, configuration: Configuration) -> str:
        """The subject of one configuration, whose values are filled into the command."""
        return self.command.line(configuration) if self.command else self.subject

    def predicted_model(self) -> str:
        """The model, for predictions. Raises `InputError` where nothing can be predicted."""
        if not self.predictable:
            raise InputError(
                f"search space {self.name!r} runs your own code, which cannot be predicted",
                hint="`tuner trial` runs one configuration, `tuner search` measures many",
            )
        if self.model is None:
            raise InputError(
                f"search space {self.name!r} names no model", hint="name one with --model"
            )
        return self.model

    @property
    def terms(self) -> Mapping[str, KnobSchema]:
        """The workload's vocabulary: every name of a configuration."""
        own = SCHEMAS[self.workload].terms if self.predictable else self.own_terms
        return {**own, **self._stage_terms} if self._stage_terms else own

    @property
    def names(self) -> frozenset[str]:
        """The names that each configuration has: all but optional ones that nothing mentions."""
        mentioned = {*self.knobs, *self.fixed, *self.derived}
        names = (n for n, term in self.terms.items() if n in mentioned or not term.optional)
        return frozenset(names)

    @property
    def choices(self) -> dict[str, tuple[KnobValue, ...]]:
        """The values of each knob."""
        return {name: knob.values for name, knob in self.knobs.items()}

    def configurations(
        self, where: Sequence[str] = (), *, use_floors: bool = True
    ) -> Iterator[Configuration]:
        """Every valid configuration, in an order that depends on nothing but names and values.

        `where` are conditions such as "lora_rank >= 128"; see `conditions` for the floors.
        Raises `InputError` at once for a condition that is not one.
        """
        found = self._solutions(where, use_floors)
        return (Configuration(self.complete(values)) for values in found)

    def count(self, where: Sequence[str] = (), *, use_floors: bool = True) -> int:
        """The number of configurations that `configurations` gives."""
        return sum(1 for _ in self._solutions(where, use_floors))

    def conditions(self, where: Sequence[str] = (), *, use_floors: bool = True) -> tuple[str, ...]:
        """The conditions in force: the floors, less those on knobs that `where` speaks of."""
        spoken = {name for text in where for name in self.condition(text).names}
        floors = self.floors if use_floors else ()
        kept = [text for text in floors if not spoken & self.condition(text).names]
        return (*kept, *where)

    def matches(
        self, configuration: Configuration, where: Sequence[str] = (), *, use_floors: bool = True
    ) -> bool:
        """True if `configuration` meets the conditions in force, constraints aside.

        False for a configuration that lacks a name which a condition reads (an older journal).
        """
        expressions = [self.condition(t) for t in self.conditions(where, use_floors=use_floors)]
        return all(e.names <= configuration.keys() and e.holds(configuration) for e in expressions)

    def require_configurations(self, where: Sequence[str] = ()) -> None:
        """Raise `InputError`, naming the conditions and constraints at fault, if none is left."""
        extra = self._condition_rules(self.conditions(where))
        blamed = conflict(self.choices, self.fixed, [*self.rules, *extra])
        if blamed:
            raise InputError(
                f"no configuration of search space {self.name!r} is left",
                problems=[Problem(f"excluded by: {rule.label}") for rule in blamed],
                hint=f"`tuner spaces {self.name}` shows the knobs and their values",
            )

    def to_dict(self) -> dict[str, Any]:
        """The space as JSON types, for `tuner spaces --json`."""
        plain = dataclasses.asdict(self)
        del plain["own_terms"]  # they follow from the values
        if lengths := plain["data"]["token_lengths"]:
            del lengths["examples"]  # they stand beside it
        return {
            **plain,
            "knobs": {name: list(values) for name, values in self.choices.items()},
            "defaulted": sorted(self.defaulted),
            "stages": [{**s, "searched": sorted(s["searched"])} for s in plain["stages"]],
            "path": str(self.path) if self.path else None,
        }

    def stage_configurations(self, configuration: Configuration) -> dict[str, Configuration]:
        """`configuration` as it is in each stage, by the stage's name; empty without stages."""
        left_out = self.derived.keys() | self._stage_terms.keys()
        base = {n: v for n, v in configuration.items() if n not in left_out}
        changed = {stage.name: stage.changed(configuration) for stage in self.stages}
        return {n: Configuration(self.complete({**base, **own})) for n, own in changed.items()}

    def condition(self, text: str) -> Expression:
        """`text` as a condition over the names of a configuration.

        Raises `InputError` for unknown names, and for words that a knob can never be.
        """
        expression = self._compiled.get(text)
        if expression is None:
            words = {word for term in self.terms.values() for word in term.allowed}
            expression = compile_expression(text, self.names, words=words)
            for name, word in expression.compared_words():
                term = self.terms[name]
                if term.kind == "word" and word not in term.allowed:
                    close = nearest(word, term.allowed)
                    raise InputError(
                        f"{name} is never {word!r} in {text!r}: it must be {term.expects}",
                        hint=f"did you mean {close!r}?" if close else None,
                    )
            self._compiled[text] = expression
        return expression

    def complete(self, values: Mapping[str, KnobValue]) -> dict[str, KnobValue]:
        """Knob and fixed values with the derived ones added, each of its term's type."""
        full = self.derivations.complete(values)
        for name in self.derived:
            full[name] = self.terms[name].read(full[name])
        return full

    @cached_property
    def _stage_terms(self) -> dict[str, KnobSchema]:
        """The vocabulary of what is searched for one stage alone."""
        own = SCHEMAS[self.workload].terms if self.predictable else self.own_terms
        return stage_terms(self.stages, own)

    @cached_property
    def derivations(self) -> Derivations:
        """The derived values, ready to be computed."""
        return Derivations({name: self.condition(text) for name, text in self.derived.items()})

    @cached_property
    def rules(self) -> list[Rule]:
        """Everything that a configuration must meet, in every stage."""
        texts = [(text, f"constraints[{i}]") for i, text in enumerate(self.constraints)]
        always = SCHEMAS[self.workload].always if self.predictable else ()
        texts += [(rule_with_ranks(text, self.names), "") for text in always]
        rules: list[Rule] = []
        for stage in (None, *self.stages):
            kinds = [kind_rule(self.terms[n], self.derivations, stage) for n in self.derived]
            rules += [
                condition_rule(self.condition(text), self.derivations, origin, stage)
                for text, origin in texts
            ]
            rules += kinds
        return rules

    def floor_rules(self) -> list[Rule]:
        """The floors as rules."""
        return self._condition_rules(self.floors, "floors")

    def _condition_rules(self, texts: Sequence[str], place: str = "where") -> list[Rule]:
        return [
            condition_rule(self.condition(text), self.derivations, f"{place}[{i}]")
            for i, text in enumerate(texts)
        ]

    def _solutions(self, where: Sequence[str], use_floors: bool) -> Iterator[dict[str, KnobValue]]:
        extra = self._condition_rules(self.conditions(where, use_floors=use_floors))
        return solutions(self.choices, self.fixed, [*self.rules, *extra])

    @cached_property
    def _compiled(self) -> dict[str, Expression]:
        return {}

    def __getstate__(self) -> dict[str, Any]:
        """The fields alone: what is computed from them is computed again where it is needed."""
        return {name: self.__dict__[name] for name in self.__dataclass_fields__}


def complete_space(space: SearchSpace) -> SearchSpace:
    """`space` with the vocabulary's defaults for each name that it does not mention.

    Optional names stay out, so that a name which is added to the vocabulary does not make other
    configurations of those that were tried before.
    """
    mentioned = {*space.knobs, *space.fixed, *space.derived}
    unset = space.names - mentioned
    missing = [term for name, term in space.terms.items() if name in unset]
    values = {term.name: term.default for term in missing if term.default_rule is None}
    rules = {
        term.name: rule_with_ranks(term.default_rule, mentioned)
        for term in missing
        if term.default_rule is not None
    }
    if "grad_accum" in mentioned and "effective_batch" in unset:
        # The default derives the accumulation from the effective batch; here it is the other
        # way round.
        del values["effective_batch"]
        rules["effective_batch"] = rule_with_ranks("micro_batch * grad_accum", mentioned)
    return dataclasses.replace(
        space,
        fixed={**space.fixed, **values},
        derived={**space.derived, **rules},
        defaulted=frozenset(term.name for term in missing),
    )
