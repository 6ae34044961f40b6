"""Checks of a space as a whole: contradictions, size, expressions, the baseline."""

from __future__ import annotations

from collections.abc import Mapping

from yaml.nodes import Node

from tuner.core.errors import InputError
from tuner.space.apply import check_apply
from tuner.space.document import Problems
from tuner.space.rules import (
    MAX_COMBINATIONS,
    MAX_EVALUATIONS,
    Rule,
    combinations,
    conflict,
    evaluate_everywhere,
    evaluations,
    show_values,
)
from tuner.space.searchspace import SearchSpace
from tuner.space.settings import configure

Nodes = Mapping[str, Node]


def check_meaning(space: SearchSpace, nodes: Nodes, problems: Problems) -> None:
    """Note in `problems` what can only be seen with the whole space.

    `nodes` tells where each part of the space stands in the file ("constraints[0]").
    """
    with problems.noting(nodes.get("derived"), "derived"):
        _ = space.derivations  # raises for a circle
    size = combinations(space.choices)
    if size > MAX_COMBINATIONS:
        knobs = sorted(space.knobs.values(), key=lambda knob: -len(knob.values))[:3]
        largest = ", ".join(f"{knob.name} has {len(knob.values)}" for knob in knobs)
        problems.add(
            nodes["knobs"],
            f"the knobs have {size:,} combinations; at most {MAX_COMBINATIONS:,} are allowed",
            at="knobs",
            hint=f"use fewer values or larger steps: {largest}",
        )
    problems.check()
    _check_evaluation(space, nodes, problems)
    problems.check()
    _check_not_empty(space, nodes, problems)
    _check_baseline(space, nodes, problems)


def check_expressions(space: SearchSpace, nodes: Nodes, problems: Problems) -> None:
    """Note every expression that is none, and stages that set derived values.

    Needs no knob to have been read, so it can be said together with everything else.
    """
    _check_stages(space, nodes, problems)
    texts = {f"derived.{name}": text for name, text in space.derived.items()}
    texts |= {f"constraints[{i}]": text for i, text in enumerate(space.constraints)}
    texts |= {f"floors[{i}]": text for i, text in enumerate(space.floors)}
    if space.command is not None and space.command.samples_per_step is not None:
        texts["samples_per_step"] = space.command.samples_per_step
    for at, text in texts.items():
        with problems.noting(nodes.get(at), at):
            space.condition(text)
    stages = [stage.name for stage in space.stages]
    check_apply(space.apply, stages, space.condition, nodes=nodes, problems=problems)


def _check_evaluation(space: SearchSpace, nodes: Nodes, problems: Problems) -> None:
    """Evaluate every rule for all values it can meet, so that nothing fails later."""
    rules = [*space.rules, *space.floor_rules()]
    needed = sum(evaluations(rule, space.choices) for rule in rules)
    if needed > MAX_EVALUATIONS:
        widest = max(rules, key=lambda rule: evaluations(rule, space.choices))
        problems.add(
            nodes.get(widest.origin),
            f"the constraints need {needed:,} evaluations; at most {MAX_EVALUATIONS:,} are allowed",
            at=widest.origin,
            hint=f"use fewer values, or fewer knobs in one condition than `{widest.label}`",
        )
        return
    failed: set[str] = set()
    for rule in sorted(rules, key=lambda rule: not rule.origin.startswith("derived")):
        try:
            evaluate_everywhere(rule, space.choices, space.fixed)
        except InputError as error:
            # A derived value that cannot be computed also fails every rule that reads it.
            if error.message not in failed:
                problems.add_error(nodes.get(rule.origin), error, at=rule.origin)
            failed.add(error.message)


def _check_not_empty(space: SearchSpace, nodes: Nodes, problems: Problems) -> None:
    blamed = conflict(space.choices, space.fixed, space.rules)
    if not blamed:
        blamed = conflict(space.choices, space.fixed, [*space.rules, *space.floor_rules()])
    if blamed:
        place = next((rule.origin for rule in blamed if rule.origin in nodes), "knobs")
        names = sorted({name for rule in blamed for name in rule.inputs})
        fixed = show_values(space.fixed, [n for n in names if n in space.fixed])
        problems.add(
            nodes[place],
            f"no configuration is left, excluded by {_together(blamed, nodes)}",
            at=place,
            hint=f"with {fixed}" if fixed else None,
        )


def _together(rules: list[Rule], nodes: Nodes) -> str:
    def line(rule: Rule) -> str:
        node = nodes.get(rule.origin)
        return f" (line {node.start_mark.line + 1})" if node is not None else ""

    return " together with ".join(f"`{rule.label}`{line(rule)}" for rule in rules)


def _check_stages(space: SearchSpace, nodes: Nodes, problems: Problems) -> None:
    for index, stage in enumerate(space.stages):
        at = f"stages[{index}]"
        for name in stage.values:
            if name in space.derived:
                text = f"{name} is derived ({space.derived[name]}) and cannot be set in a stage"
                problems.add(nodes[at], text, at=at)


def _check_baseline(space: SearchSpace, nodes: Nodes, problems: Problems) -> None:
    if space.baseline is None or problems.found:
        return
    missing = sorted(space.knobs.keys() - space.baseline.keys())
    if missing:
        text = f"{', '.join(missing)} missing: a baseline sets every knob"
        problems.add(nodes["baseline"], text, at="baseline")
    for name in sorted(space.baseline.keys() - space.knobs.keys()):
        text = f"{name} is not a knob of this space"
        problems.add(nodes[f"baseline.{name}"], text, at=f"baseline.{name}")
    if not problems.found:
        with problems.noting(nodes["baseline"], "baseline"):
            configure(space, space.baseline, strict=False)
