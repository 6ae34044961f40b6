"""A traced step as torch.compile runs it: operators that share data as one kernel.

AOTAutograd makes one graph of a forward pass and one of its backward pass. Between products,
attention and other kernels of libraries, inductor runs pointwise operators and reductions that
share data as one Triton kernel: it reads its inputs once, and writes what others read. What the
backward pass needs of the forward pass is saved or computed again, by the rules of
`min_cut_rematerialization_partition` (torch/_functorch/partitioners.py, torch 2.13). The optimizer
is not compiled.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, NamedTuple

from tuner.core.kinds import Phase
from tuner.cost.operators.operators import launches_nothing
from tuner.cost.operators.timeline import FUSED, Op, Timeline, Work


class Role(Enum):
    """Classes of operators in a graph of inductor."""

    VIEW = "no kernel"
    LIBRARY = "a kernel of a library, which is not fused"
    POINTWISE = "each number of the result on its own"
    KEPT = "pointwise, and not computed again: random numbers, and rows of a table"
    ROWS = "sums over the last dimensions, fused with what reads them"
    COLUMNS = "sums over other dimensions: a kernel of its own"


class Use(NamedTuple):
    """A tensor that an operator reads or writes: its block, the view of it, the bytes touched."""

    block: int
    view: Any
    size_bytes: int


class Access(NamedTuple):
    """The tensors of one entry of `Timeline.ops`, and the numbers of events before and behind it.

    `keeps` is False where all that it writes is new, as of a copy.
    """

    role: Role
    reads: tuple[Use, ...]
    writes: tuple[Use, ...]
    start: int
    end: int
    keeps: bool = True


_REDUCTIONS = (
    "sum", "mean", "amax", "amin", "max", "min", "prod", "var", "std", "var_mean", "logsumexp",
    "norm", "linalg_vector_norm", "any", "all", "argmax", "argmin",
)  # fmt: skip
_IN_ROWS = (
    "_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data",
    "native_layer_norm", "native_layer_norm_backward", "_fused_rms_norm", "native_group_norm",
)  # fmt: skip
_RANDOM = ("native_dropout", "bernoulli", "bernoulli_", "rand_like", "randn_like", "uniform_")
_LIBRARIES = (
    "embedding_dense_backward", "index_put", "index_put_", "_index_put_impl_", "scatter",
    "scatter_add", "scatter_add_", "sort", "topk", "nonzero", "cumsum", "masked_select",
    "_local_scalar_dense", "bincount",
)  # fmt: skip
"""Operators of ATen that inductor leaves as they are, or that write in any order."""

_GATHERING = ("embedding", "index_select", "gather", "index", "nll_loss_forward")
"""Operators that read no more of a table than they write, whatever its size."""

LONGEST_NAME = 60
"""Letters of a kernel's name, which lists the operators in it."""


def role_of(func: Any, args: Sequence[Any], kind: str) -> Role:
    """The role of an operator with these arguments, whose class of kernel is `kind`."""
    name = func._schema.name.partition("::")[2]
    if launches_nothing(func):
        return Role.VIEW
    if kind != "elementwise" or func.namespace not in ("aten", "prims") or name in _LIBRARIES:
        return Role.LIBRARY
    if name.startswith(("_foreach", "_fused_adam", "convolution")):
        return Role.LIBRARY
    if name in _REDUCTIONS:
        return Role.ROWS if _sums_rows(func, args) else Role.COLUMNS
    if name in _RANDOM or name in _GATHERING:
        return Role.KEPT
    return Role.ROWS if name in _IN_ROWS else Role.POINTWISE


def _sums_rows(func: Any, args: Sequence[Any]) -> bool:
    """True if a reduction takes the last dimensions together, and leaves others."""
    names = [argument.name for argument in func._schema.arguments]
    dim, rank = dict(zip(names, args, strict=False)).get("dim"), args[0].dim()
    dims = sorted(d % rank for d in ([dim] if isinstance(dim, int) else dim or ()) if rank)
    return 0 < len(dims) < rank and dims == list(range(rank - len(dims), rank))


class _Edge(NamedTuple):
    """A value that a node reads or writes, and the bytes of it."""

    value: int
    view: Any
    size_bytes: int


@dataclass(slots=True, eq=False)
class _Node:
    """An operator of a graph. Its `level` counts the library kernels that have to run before."""

    op: Op
    work: Work
    access: Access
    reads: list[_Edge] = field(default_factory=list)
    writes: list[_Edge] = field(default_factory=list)
    level: int = 0

    @property
    def is_fused(self) -> bool:
        return self.access.role is not Role.LIBRARY

    @property
    def can_repeat(self) -> bool:
        """True if inductor may compute it several times: sums of rows are kept."""
        return self.access.role is Role.POINTWISE or self.work.name in _IN_ROWS

    def joins(self, value: _Value) -> bool:
        """True if a value is large enough that it saves something to read it only once."""
        return 2 * value.size_bytes >= max((edge.size_bytes for edge in self.writes), default=0)


@dataclass(slots=True)
class _Value:
    """A storage between two writes to it. `last` if nothing writes to it afterwards."""

    block: int
    size_bytes: int
    made_by: _Node | None
    readers: list[_Node] = field(default_factory=list)
    last: bool = True


def fused_by_inductor(timeline: Timeline, accesses: Sequence[Access]) -> Timeline:
    """The timeline of the same training under torch.compile; `accesses` of each of its operators.

    Products, attention and kernels of other libraries stay as they are, and so does everything
    outside of forward and backward passes. `timeline` is used up.
    """
    fusing = _Fusing(timeline)
    graphs = fusing.graphs(accesses)
    for number, nodes in graphs.items():
        if timeline.marks[number].phase is Phase.FORWARD:
            fusing.partition(nodes, graphs.get(number + 1, []))
    for nodes in graphs.values():
        fusing.fuse(nodes)
    timeline.ops = [op for op in timeline.ops if op.mark not in graphs] + fusing.ops
    timeline.ops.sort(key=lambda op: op.mark)
    fusing.rewrite_memory([node for nodes in graphs.values() for node in nodes])
    return timeline


class _Fusing:
    """The graphs of a timeline, and the kernels that inductor makes of them."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._values: list[_Value] = []
        self._repeated: set[int] = set()
        """Values of forward passes that backward passes compute again."""
        self._realised: set[int] = set()
        """Values that some kernel writes."""
        self._ends: dict[int, int] = {}
        """The events before which blocks end, where kernels change that."""
        self._works: dict[Any, int] = {}
        self.ops: list[Op] = []

    def graphs(self, accesses: Sequence[Access]) -> dict[int, list[_Node]]:
        """The nodes of each forward and backward pass, by mark."""
        found: dict[int, list[_Node]] = defaultdict(list)
        current: dict[int, int] = {}
        for op, access in zip(self._timeline.ops, accesses, strict=True):
            if access.role is Role.VIEW:
                continue
            node = _Node(op, self._timeline.works[op.work], access)
            most = sum(use.size_bytes for use in access.writes)
            for place, (block, view, size) in enumerate(access.reads):
                if block not in current:
                    current[block] = self._new(block, None)
                is_table = place == 0 and node.work.name in _GATHERING
                self._read(node, _Edge(current[block], view, most if is_table else size))
            for block, view, size in access.writes:
                before = current.get(block)
                if before is not None:
                    self._values[before].last = False
                    if access.keeps or size < self._values[before].size_bytes:
                        self._read(node, _Edge(before, None, 0))
                current[block] = self._new(block, node)
                node.writes.append(_Edge(current[block], view, size))
            if self._timeline.marks[op.mark].phase not in (Phase.FORWARD, Phase.BACKWARD):
                self._realised |= {edge.value for edge in node.writes}
            else:
                makers = (self._values[edge.value].made_by for edge in node.reads)
                levels = [
                    maker.level + (maker.access.role is Role.COLUMNS)
                    for maker in makers
                    if maker is not None and maker.op.mark == op.mark
                ]
                node.level = max(levels, default=0) + (not node.is_fused)
                found[op.mark].append(node)
        return found

    def _new(self, block: int, node: _Node | None) -> int:
        self._values.append(_Value(block, self._timeline.blocks[block].size_bytes, node))
        return len(self._values) - 1

    def _read(self, node: _Node, edge: _Edge) -> None:
        node.reads.append(edge)
        self._values[edge.value].readers.append(node)

    # -- the partitioner ---------------------------------------------------------------------

    def partition(self, forward: list[_Node], backward: list[_Node]) -> None:
        """Decide what a backward pass saves of its forward pass, and what it computes again."""
        needed = {edge.value for node in backward for edge in node.reads}
        made = [edge.value for node in forward for edge in node.writes]
        saved = {value for value in made if value in needed and not self._may_repeat(value)}
        inside = set(made)
        for value in made:
            if value in needed and value not in saved:
                cut = self._cut(value, inside, saved, {})
                saved |= cut & inside
                self._repeated |= {value} - cut

    def _may_repeat(self, value: int) -> bool:
        """False where `should_ban_recomputation` and the ban of distant uses say so.

        A library's kernel of the backward pass reads the value, or it is a fourth of what it
        follows from, or that is read far before as well, as residuals are.
        """
        found = self._values[value]
        node = found.made_by
        assert node is not None
        read = [self._values[edge.value] for edge in node.reads]
        return (
            node.can_repeat
            and all(r.is_fused or r.op.mark == node.op.mark for r in found.readers)
            and 4 * found.size_bytes >= sum(each.size_bytes for each in read)
            and not any(
                r.op.mark == node.op.mark and r.level - (not r.is_fused) < node.level
                for each in read
                for r in each.readers
            )
        )

    def _cut(
        self, value: int, made: set[int], saved: set[int], known: dict[int, set[int]]
    ) -> set[int]:
        """The values to save for one, itself or those that it follows from: the fewer bytes."""
        if value in saved or value not in made:
            return {value}
        if value not in known:
            known[value], found = {value}, self._values[value]
            if self._may_repeat(value) and found.made_by is not None:
                reads = (edge.value for edge in found.made_by.reads)
                cut = {v for each in reads for v in self._cut(each, made, saved, known)}
                cost = sum(self._values[v].size_bytes for v in (cut & made) - saved)
                if cost < found.size_bytes:
                    known[value] = cut
        return known[value]

    # -- the kernels -------------------------------------------------------------------------

    def fuse(self, nodes: list[_Node]) -> None:
        """Add the kernels of one graph, as operators."""
        kernels = self._kernels(nodes)
        kernel_of = {node: number for number, kernel in enumerate(kernels) for node in kernel}
        end = nodes[-1].access.end
        for node in nodes:
            for edge in node.writes:
                if not node.is_fused or self._is_wanted(edge.value, node, kernel_of, end):
                    self._realised.add(edge.value)
        for node in nodes:
            self._inline(node)
        for kernel in kernels:
            if kernel[0].is_fused:
                self._add(kernel)
            else:
                self.ops.append(kernel[0].op)

    def _kernels(self, nodes: list[_Node]) -> list[list[_Node]]:
        """The nodes of each kernel: those of one level that share data, sums of columns apart.

        No library kernel has to run between nodes of one level.
        """
        parent = {node: node for node in nodes}

        def root(node: _Node) -> _Node:
            while parent[node] is not node:
                parent[node] = node = parent[parent[node]]
            return node

        first: dict[tuple[int, int], _Node] = {}
        for node in nodes:
            if not node.is_fused or node.access.role is Role.COLUMNS:
                continue
            for edge in node.reads:
                value = self._values[edge.value]
                if not node.joins(value):
                    continue
                maker = value.made_by
                if maker is None or maker not in parent or not maker.is_fused:
                    maker = first.setdefault((edge.value, node.level), node)
                if maker.access.role is not Role.COLUMNS and maker.level == node.level:
                    parent[root(node)] = root(maker)
        found: dict[_Node, list[_Node]] = defaultdict(list)
        for node in nodes:
            found[root(node)].append(node)
        return list(found.values())

    def _is_wanted(self, value: int, node: _Node, kernel_of: dict[_Node, int], end: int) -> bool:
        """True if a kernel has to write a value: another one reads it, or it stays."""
        found = self._values[value]
        readers = [r for r in found.readers if value not in self._repeated or r in kernel_of]
        if found.readers:
            return any(kernel_of.get(reader) != kernel_of[node] for reader in readers)
        died = self._timeline.blocks[found.block].died_event
        return found.last and (died < 0 or died > end)

    def _inline(self, node: _Node) -> None:
        """Leave out a result that other kernels compute from no more bytes than it has."""
        found = self._values
        if len(node.writes) != 1 or node.writes[0].value not in self._realised:
            return
        edge = node.writes[0]
        value, readers = found[edge.value], found[edge.value].readers
        own = all(reader.op.mark == node.op.mark and reader.is_fused for reader in readers)
        if not (readers and own and node.access.role is Role.POINTWISE):
            return
        self._realised.remove(edge.value)
        leaves = {leaf.value for leaf in self._leaves([node])}
        if sum(found[leaf].size_bytes for leaf in leaves) > value.size_bytes:
            leaves = {edge.value}
        self._realised |= {leaf for leaf in leaves if found[leaf].made_by is not None}

    def _leaves(self, kernel: list[_Node]) -> list[_Edge]:
        """The tensors that a kernel reads: once each, and not those that it computes."""
        inside = {edge.value for node in kernel for edge in node.writes}
        views: dict[int, dict[Any, _Edge]] = defaultdict(dict)
        left, seen = [edge for node in kernel for edge in node.reads], set(kernel)
        for edge in left:
            maker = self._values[edge.value].made_by
            computed = edge.value not in self._realised and maker is not None and maker.can_repeat
            if edge.value not in inside and not computed:
                views[edge.value].setdefault(edge.view, edge)
            elif computed and maker is not None and maker not in seen:
                seen.add(maker)
                left += maker.reads
        for value, edges in views.items():  # views that another contains
            whole = [e for e in edges.values() if e.size_bytes == self._values[value].size_bytes]
            views[value] = {edge.view: edge for edge in whole[:1]} or edges
        return [edge for edges in views.values() for edge in edges.values()]

    def _add(self, kernel: list[_Node]) -> None:
        writes = [e for node in kernel for e in node.writes if e.value in self._realised]
        if not writes:
            return
        blocks, reads = self._timeline.blocks, self._leaves(kernel)
        for block in {self._values[edge.value].block for edge in reads}:
            end = max(kernel[-1].access.end, self._ends.get(block, 0))
            if 0 <= blocks[block].died_event < end:
                self._ends[block] = end
        largest = max((*reads, *writes), key=lambda edge: edge.size_bytes)
        dtype = blocks[self._values[largest.value].block].dtype or kernel[0].work.dtype
        name = "_".join(("fused", *dict.fromkeys(n.work.name.strip("_") for n in kernel)))
        work = Work(
            name=name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}...",
            kind=FUSED,
            flops=0,
            tensor_bytes=tuple(e.size_bytes for e in (*reads, *writes) if e.size_bytes),
            dtype=str(dtype).removeprefix("torch."),
            shape=None,
            workspace_bytes=(),
        )
        key = (tuple(node.op.work for node in kernel), work)
        if key not in self._works:
            self._works[key] = len(self._timeline.works)
            self._timeline.works.append(work)
        recompute = all(node.op.recompute for node in kernel)
        self.ops.append(Op(self._works[key], kernel[0].op.mark, recompute))

    # -- memory ------------------------------------------------------------------------------

    def rewrite_memory(self, nodes: list[_Node]) -> None:
        """Take the blocks away that no kernel writes; others end when their last kernel has run.

        What is computed again ends in its forward pass.
        """
        blocks, events = self._timeline.blocks, self._timeline.events
        dropped: set[int] = set()
        for node in nodes:
            kept = {self._values[e.value].block for e in node.writes if e.value in self._realised}
            if node.is_fused:
                start, end = node.access.start, node.access.end
                dropped |= {b for b, sign in events[start:end] if sign > 0 and b not in kept}
            for edge in node.writes:
                found = self._values[edge.value]
                if edge.value in self._repeated:
                    own = [r.access.end for r in found.readers if r.op.mark == node.op.mark]
                    self._ends[found.block] = max(own, default=node.access.end)
        story = [
            (event if sign > 0 else self._ends.get(block, event), block, sign)
            for event, (block, sign) in enumerate(events)
            if block not in dropped
        ]
        story.sort(key=lambda each: each[0])
        numbers: dict[int, int] = {}
        self._timeline.blocks, self._timeline.events = [], []
        for now, (_, block, sign) in enumerate(story):
            if sign > 0:
                numbers[block] = len(numbers)
                self._timeline.blocks.append(replace(blocks[block], born_event=now, died_event=-1))
            else:
                self._timeline.blocks[numbers[block]].died_event = now
            self._timeline.events.append((numbers[block], sign))
        places = [event for event, *_ in story]
        self._timeline.marks = [
            mark._replace(event=bisect_left(places, mark.event)) for mark in self._timeline.marks
        ]
