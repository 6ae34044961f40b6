"""The nodes of a cluster: their GPUs by what is known, and their room for trials. No Ray."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from tuner.core import nvml
from tuner.core.errors import UnavailableError
from tuner.core.gpu import Gpu
from tuner.core.units import format_gib
from tuner.searches.request import SearchRequest
from tuner.space.gpus import accelerator_types
from tuner.trial.base import outcome_versions
from tuner.trial.factories import Facts

Resources = Mapping[str, float]
Identify = Callable[[], nvml.DeviceIdentity | None]

ACCELERATOR, NODE_GROUP = "ray.io/accelerator-type", "ray.io/node-group"
"""Labels that Ray sets by default: the type of a node's GPUs, and its type for the autoscaler."""
ACCELERATOR_RESOURCE = "accelerator_type:"
"""Prefix of the resource by which Ray names the type of a node's GPUs as well."""
FIXED_GROUPS = ("", "local.cluster.node")
"""Node types that no autoscaler starts more of: none, and that of `ray up` on own machines."""

REFRESH_S = 1.0
"""Period of asking Ray for its nodes. Ray notices a change in about a second."""
SILENT_S = 20.0
"""Ray's head node is silent after this time; Ray itself ends the process after 60 s."""


@dataclass(frozen=True, slots=True)
class Need:
    """Demands of the trials of one search on a node.

    `gpu` is None if any node with the `resources` will do; `memory` among them is in bytes.
    Nodes must have the `versions` of libraries; without any they aren't asked.
    """

    resources: Resources
    gpu: Gpu | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    identify: Identify = nvml.device_identity

    @classmethod
    def of(cls, request: SearchRequest) -> Need:
        """The need of a search. On this machine the GPU is known already."""
        resources, joins = dict(request.resources_per_trial), request.options.address is not None
        typed = joins and resources.get("GPU", 0) > 0
        identify = getattr(request.runner_factory, "identify", None) or nvml.device_identity
        need = cls(resources, request.gpu if typed else None, request.labels, identify=identify)
        return need.asking() if joins else need

    def asking(self) -> Need:
        """The need of nodes that are asked first, for the releases that are here."""
        here = outcome_versions()
        return replace(self, versions={n: here[n] for n in ("tuner", "torch") if n in here})

    @property
    def text(self) -> str:
        """The need as people write it: "1 GPU (a6000), 1 CPU"."""
        return ", ".join(
            f"{format_gib(int(amount))} of memory" if name == "memory"
            else f"{amount:g} {name}" + (f" ({self.gpu.id})" if self.gpu and name == "GPU" else "")
            for name, amount in self.resources.items() if amount
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Node:
    """One living node of the cluster."""

    id: str
    name: str
    resources: Resources
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def accelerator(self) -> str:
        """Ray's name for the type of its GPUs; empty if Ray doesn't know it."""
        named = [n for n in self.resources if n.startswith(ACCELERATOR_RESOURCE)]
        known = named[0].removeprefix(ACCELERATOR_RESOURCE) if named else ""
        return self.labels.get(ACCELERATOR, known)


def fits_on(resources: Resources, wanted: Resources) -> int:
    """Number of trials that want these resources for which a node's are enough."""
    shares = [resources.get(name, 0.0) / need for name, need in wanted.items() if need]
    return math.floor(min(shares, default=1.0) + 1e-6)


class Nodes:
    """The living nodes, and the facts that they were asked for, each once."""

    def __init__(
        self,
        alive: Callable[[], Sequence[Node]],
        question: Callable[[Node, Need], Future[Facts]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ask_ray, self._question, self._clock = alive, question, clock
        self.alive: tuple[Node, ...] = ()
        self._asked_s = -math.inf
        self._pending: Future[Sequence[Node]] | None = None
        self._thread = ThreadPoolExecutor(1)
        self._answers: dict[str, Future[Facts]] = {}

    @property
    def silent_s(self) -> float:
        """Time for which Ray has not answered, beyond the period of asking."""
        return self._clock() - self._asked_s if self._pending is not None else 0.0

    def refresh(self, *, wait: bool = False) -> None:
        """Take Ray's answer about its nodes if it is there, and ask again if it is time."""
        if self._pending is None and (wait or self._clock() - self._asked_s >= REFRESH_S):
            self._asked_s = self._clock()
            self._pending = self._thread.submit(self._ask_ray)
        if self._pending is not None and (wait or self._pending.done()):
            self.alive, self._pending = tuple(self._pending.result()), None

    def why_not(self, node: Node, need: Need) -> str | None:
        """The reason why trials can't run on the node; empty if they can, None while it is asked.

        What Ray knows of its GPUs comes first, then a resource named after the type; the node
        itself has the last word.
        """
        if why := _known_objection(node, need):
            return why
        if not need.versions:
            return ""
        if node.id not in self._answers:
            self._answers[node.id] = self._question(node, need)
        answer = self._answers[node.id]
        if not answer.done():
            return None
        if (error := answer.exception()) is not None:
            return f"can't run tuner: {str(error).strip().splitlines()[-1]}"
        return _objection(answer.result(), need)

    def usable(self, need: Need) -> list[Node]:
        """The nodes on which trials can run."""
        return [node for node in self.alive if self.why_not(node, need) == ""]

    def asked(self, need: Need) -> bool:
        """True while a node has not said yet whether trials can run on it."""
        return None in [self.why_not(node, need) for node in self.alive]

    @property
    def emulated(self) -> bool:
        """True if a node said that its GPUs are emulated."""
        known = [a for a in self._answers.values() if a.done() and a.exception() is None]
        return any(answer.result().emulated for answer in known)

    def grows(self) -> bool:
        """True if an autoscaler starts nodes: its own have a label with their type."""
        return any(n.labels.get(NODE_GROUP, "") not in FIXED_GROUPS for n in self.alive)

    def missing(
        self, need: Need, *, waited_s: float = 0.0, was_there: bool = False
    ) -> UnavailableError:
        """The error if no node can run a trial: a table of the nodes, and what would help."""
        after = f", after {waited_s:.0f} s" if waited_s >= 1 else ""
        rows = [("node", "GPUs", "labels", "why no trial runs there")]
        for node in self.alive:
            own = {k: v for k, v in node.labels.items() if not k.startswith("ray.io/node-")}
            gpus = f"{node.resources.get('GPU', 0):g} {node.accelerator}".strip()
            why = self.why_not(node, need)
            why = "didn't answer yet: its GPUs are in use" if why is None else why or "it can"
            labels = ", ".join(f"{k}={v}" for k, v in own.items()) or "-"
            rows.append((node.name, gpus, labels, why))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        table = ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)) for r in rows]
        name = need.gpu.name if need.gpu else "such a node"
        return UnavailableError(
            f"no node of the cluster {'is left that ' * was_there}can run a trial, which needs "
            f"{need.text}{after}:\n" + "\n".join(f"    {line.rstrip()}" for line in table),
            hint=f"`ray start --address=HEAD:6379` on a machine with {name} adds one; a cluster "
            "that grows needs a node type with its GPU; --mode predict runs no trial",
        )


def _known_objection(node: Node, need: Need) -> str:
    """The reason why trials can't run on the node, by what Ray knows of it; empty if they may."""
    for name, amount in need.resources.items():
        if (has := node.resources.get(name, 0.0)) < amount:
            return f"has {format_gib(int(has)) if name == 'memory' else f'{has:g}'} {name}"
    for label, value in need.labels.items():
        if node.labels.get(label) != value:
            return f"has no label {label}={value}"
    types = accelerator_types(node.accelerator) if need.gpu else ()
    if need.gpu and types and need.gpu.id not in (*types, *node.resources):
        return f"has {node.accelerator}"
    return ""


def _objection(facts: Facts, need: Need) -> str:
    """The reason why a node with these facts runs no trials; empty if it can."""
    for name, wanted in need.versions.items():
        if (has := facts.versions.get(name)) != wanted:
            return f"has {f'{name} {has}' if has else f'no {name}'}, and this search {wanted}"
    if need.gpu is None:
        return ""
    if facts.identity is None:
        return "has no NVIDIA driver"
    if facts.identity.name not in need.gpu.device_names:
        return f"has {facts.identity.name} ({format_gib(facts.identity.total_bytes)})"
    return ""
