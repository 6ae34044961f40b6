"""Valid combinations of values: derived values, constraints, enumeration.

An expression reads few knobs, so its results are kept per combination of those few: a space of
10,000 configurations needs a handful of evaluations, not tens of thousands.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tuner.core.errors import InputError
from tuner.core.expressions import Expression
from tuner.core.records import KnobValue
from tuner.core.setup.schemas import KnobSchema

Values = Mapping[str, KnobValue]

MAX_COMBINATIONS = 200_000
"""More combinations than a person can overlook or a search can enumerate in seconds."""
MAX_EVALUATIONS = 500_000
"""Evaluations of all rules together, at about 7 us each; a usual space needs less than 100."""
_MAX_MINIMISED = 2_000_000


class Derivations:
    """Derived values in the order in which they can be computed.

    Raises `InputError` where they depend on each other in a circle.
    """

    def __init__(self, derived: Mapping[str, Expression]) -> None:
        self.expressions = {name: derived[name] for name in _in_order(derived)}

    def inputs(self, names: Iterable[str]) -> frozenset[str]:
        """The names that are not derived and on which `names` depend."""
        found: set[str] = set()
        for name in names:
            expression = self.expressions.get(name)
            found |= {name} if expression is None else self.inputs(expression.names)
        return frozenset(found)

    def complete(self, values: Values, names: Iterable[str] | None = None) -> dict[str, Any]:
        """`values` with the derived values (all, or those that `names` need) added."""
        needed = self._needed(self.expressions if names is None else names)
        result: dict[str, Any] = dict(values)
        for name, expression in self.expressions.items():
            if name in needed:
                result[name] = _whole(expression.evaluate(result))
        return result

    def _needed(self, names: Iterable[str]) -> set[str]:
        found: set[str] = set()
        for name in names:
            if name in self.expressions and name not in found:
                found |= {name} | self._needed(self.expressions[name].names)
        return found


def _in_order(derived: Mapping[str, Expression]) -> list[str]:
    order: list[str] = []
    visiting: list[str] = []

    def visit(name: str) -> None:
        if name in visiting:
            circle = " -> ".join([*visiting[visiting.index(name) :], name])
            raise InputError(f"derived values depend on each other in a circle: {circle}")
        if name in order:
            return
        visiting.append(name)
        for needed in sorted(derived[name].names & derived.keys()):
            visit(needed)
        visiting.pop()
        order.append(name)

    for name in sorted(derived):
        visit(name)
    return order


def _whole(value: Any) -> Any:
    """2.0 as 2: a division that comes out even gives a whole number."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


@dataclass(frozen=True, slots=True)
class Rule:
    """One condition on a configuration.

    `label` is how people know it, `inputs` the names it depends on (none of them derived), and
    `origin` the place in the space file that asks for it ("constraints[0]"), if one does.
    """

    label: str
    origin: str
    inputs: tuple[str, ...]
    test: Callable[[Values], bool]
    results: dict[tuple[Any, ...], bool] = field(default_factory=dict)

    def holds(self, values: Values) -> bool:
        """True if the rule holds; each combination of inputs is evaluated once."""
        key = tuple(values[name] for name in self.inputs)
        found = self.results.get(key)
        if found is None:
            found = self.results[key] = self.test(values)
        return found


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of the training that changes some values: `values` replace those of the rest.

    One configuration is used for all stages, so it must be valid, and fit, in each. `examples`
    and `epochs` are those of the stage; None where it has those of the space's data. `searched`
    are names in `values` whose value the search chooses for this stage alone: the configuration
    has it under `own_name`.
    """

    name: str
    values: Mapping[str, KnobValue]
    examples: int | None = None
    epochs: float | None = None
    searched: frozenset[str] = frozenset()

    def own_name(self, name: str) -> str:
        """The name, in a configuration, of a value of this stage alone."""
        return f"{self.name}.{name}"

    def changed(self, values: Values) -> dict[str, KnobValue]:
        """The values that this stage replaces, in a configuration with these values."""
        own = {name: values.get(self.own_name(name), self.values[name]) for name in self.searched}
        return {**self.values, **own}

    def inputs(self, names: Iterable[str]) -> frozenset[str]:
        """The names of a configuration on which these depend in this stage."""
        own = frozenset(names)
        searched = {self.own_name(name) for name in own & self.searched}
        return (own - self.values.keys()) | searched


def stage_terms(stages: Iterable[Stage], terms: Mapping[str, KnobSchema]) -> dict[str, KnobSchema]:
    """A term for each value that is searched for one stage alone, by its own name."""
    return {
        name: replace(terms[own], name=name, optional=True)
        for stage in stages
        for own in sorted(stage.searched)
        for name in (stage.own_name(own),)
    }


def condition_rule(
    expression: Expression, derivations: Derivations, origin: str, stage: Stage | None = None
) -> Rule:
    """The rule that `expression` holds, in `stage` with its values if one is given."""
    return _rule(expression.text, origin, expression.names, expression.holds, derivations, stage)


def kind_rule(term: KnobSchema, derivations: Derivations, stage: Stage | None = None) -> Rule:
    """The rule that the derived value of `term` is of its kind (a whole number of at least 1)."""

    def is_read(complete: Values) -> bool:
        try:
            term.read(complete[term.name])
        except InputError:
            return False
        return True

    expression = derivations.expressions[term.name]
    label = f"{term.name} = {expression.text} must be {term.expects}"
    return _rule(label, f"derived.{term.name}", [term.name], is_read, derivations, stage)


def _rule(
    label: str,
    origin: str,
    names: Collection[str],
    holds: Callable[[Values], bool],
    derivations: Derivations,
    stage: Stage | None,
) -> Rule:
    """The rule that `holds`, which reads `names`, is true of a complete configuration."""

    def test(values: Values) -> bool:
        changed = stage.changed(values) if stage else {}
        return holds(derivations.complete({**values, **changed}, names))

    inputs = derivations.inputs(names)
    inputs = stage.inputs(inputs) if stage else inputs
    label = f"{label} (in stage {stage.name})" if stage else label
    return Rule(label, origin, tuple(sorted(inputs)), test)


def combinations(choices: Mapping[str, Sequence[KnobValue]]) -> int:
    """The number of combinations of values."""
    return math.prod(len(values) for values in choices.values())


def solutions(
    choices: Mapping[str, Sequence[KnobValue]], fixed: Values, rules: Iterable[Rule]
) -> Iterator[dict[str, KnobValue]]:
    """Every combination of `choices` (with `fixed` beside) for which all `rules` hold.

    Names in alphabetical order, the last varying fastest, values in the order given. A branch
    is left as soon as a rule whose inputs are all set does not hold.
    """
    names = sorted(choices)
    due: list[list[Rule]] = [[] for _ in range(len(names) + 1)]
    for rule in rules:
        due[max((names.index(n) + 1 for n in rule.inputs if n in choices), default=0)].append(rule)
    values: dict[str, KnobValue] = dict(fixed)

    def descend(depth: int) -> Iterator[dict[str, KnobValue]]:
        if not all(rule.holds(values) for rule in due[depth]):
            return
        if depth == len(names):
            yield dict(values)
            return
        for value in choices[names[depth]]:
            values[names[depth]] = value
            yield from descend(depth + 1)

    return descend(0)


def conflict(
    choices: Mapping[str, Sequence[KnobValue]], fixed: Values, rules: Sequence[Rule]
) -> list[Rule]:
    """A smallest set of rules that together leave no combination; empty if one is left.

    Rules are dropped one at a time while the rest still excludes everything (the deletion
    filter for irreducible infeasible subsets, Chinneck and Dravnieks 1991).
    """

    def leaves_something(candidates: Sequence[Rule]) -> bool:
        read = {name for rule in candidates for name in rule.inputs}
        relevant = {name: values for name, values in choices.items() if name in read}
        return next(solutions(relevant, fixed, candidates), None) is not None

    if leaves_something(rules):
        return []
    # What people wrote themselves says more than what follows from it, and is dropped last.
    kept = sorted(rules, key=lambda rule: (rule.origin != "", not rule.origin.startswith("der")))
    if combinations(choices) * len(kept) > _MAX_MINIMISED:
        return kept  # all of them: finding out which would take too long
    for rule in list(kept):
        fewer = [r for r in kept if r is not rule]
        if not leaves_something(fewer):
            kept = fewer
    return kept


def evaluations(rule: Rule, choices: Mapping[str, Sequence[KnobValue]]) -> int:
    """The number of different inputs that `rule` can meet."""
    return combinations({name: values for name, values in choices.items() if name in rule.inputs})


def evaluate_everywhere(
    rule: Rule, choices: Mapping[str, Sequence[KnobValue]], fixed: Values
) -> None:
    """Evaluate `rule` for every combination it can meet. Raises `InputError` where it cannot."""
    read = [name for name in rule.inputs if name in choices]
    for values in itertools.product(*(choices[name] for name in read)):
        rule.holds({**fixed, **dict(zip(read, values, strict=True))})
