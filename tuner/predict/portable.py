"""Timelines and rates of kernels as arrays that a page can read: see `app.calculator`."""

from __future__ import annotations

import base64
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tuner.core.gpu import Gpu
from tuner.core.kinds import Phase
from tuner.cost.polynomial import Terms
from tuner.cost.sized import SizedTimeline, rows_of
from tuner.cost.speed.rates import as_chosen, attention_flops_per_s, half_rate_tokens
from tuner.cost.speed.roofline import BLOCKWISE, Efficiency, launches_of, update_launches, waits_of
from tuner.cost.work_arrays import WorkArrays
from tuner.predict.shipped import SHIPPED_OPTIMIZERS, Shipped, Steps, optimizer_key

PHASES = tuple(Phase)
_VARIABLES = 3
"""Micro-batch, length and rank: causal language models have no negatives."""


class Words:
    """Numbers for kinds of operators, types of operands, attention kernels and optimizer steps."""

    def __init__(self) -> None:
        self.kinds: dict[str, int] = {}
        self.dtypes: dict[str, int] = {}
        self.attention: dict[tuple[str, str, int], int] = {}
        """By name, type and size of heads; 0 where the kernel is not known."""
        self.optimizers: dict[tuple[str, str], int] = {}
        """By the model's digest and the key of the steps."""


class Arrays:
    """Arrays of whole numbers and of fractions, like ones together and equal ones once."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, bytes], list[Any]] = {}

    def add(self, name: str, values: Any) -> list[Any]:
        """The place of an array in `packed`, filled in there: type, start and length."""
        array = np.asarray(values)
        most = np.abs(array).max(initial=0)
        kind = "i1" if most < 2**7 else "i2" if most < 2**15 else "i4"
        if most >= 2**31 or (array != np.round(array)).any():
            kind = "f8"
        content = np.ascontiguousarray(array, dtype=f"<{kind}").tobytes()
        return self._known.setdefault((f"{kind} {name}", content), [kind, 0, array.size])

    def packed(self) -> str:
        """All arrays, one after the other, deflated and in base64."""
        parts, start = [], 0
        for (_, content), place in sorted(self._known.items(), key=lambda item: item[0][0]):
            padding = -start % 8
            place[1] = start + padding
            parts += [bytes(padding), content]
            start += padding + len(content)
        return base64.b64encode(zlib.compress(b"".join(parts), 9)).decode()


class PortableStructure:
    """One structure and its optimizer steps, as the page takes them."""

    def __init__(
        self, sized: SizedTimeline, timelines: Shipped, digest: str, is_half: bool
    ) -> None:
        self._sized, known = sized, {*timelines.optimizers(digest)}
        keys = {n: optimizer_key(n, sized, clip=True, scaled=is_half) for n in SHIPPED_OPTIMIZERS}
        self.optimizers = {name: (digest, key) for name, key in keys.items() if key in known}

    def data(self, arrays: Arrays, words: Words) -> dict[str, Any]:
        """JSON types, and places of arrays; differences of what repeats, which compress better."""
        sized, operators = self._sized, self._sized.operators
        names = np.array(operators.names)
        spans = [
            [*span[:2], PHASES.index(span.phase), span.step]
            for span in sized.spans(accumulates=False)
        ]
        return {
            "sizes": _terms("sizes", sized.sizes, arrays),
            "spans": arrays.add("spans", np.ravel(spans)),
            "events": _events(sized.events, arrays),
            "numbers": arrays.add("numbers", sized.blocks.numbers),
            "rows": arrays.add("rows", rows_of(sized.blocks.labels)),
            "workspace": sized.workspace,
            "kinds": arrays.add("kinds", [number_of(words.kinds, k) for k in operators.kinds]),
            "dtypes": arrays.add("dtypes", [number_of(words.dtypes, d) for d in operators.dtypes]),
            "attention": arrays.add("attention", self._attention(words)),
            "flops": _terms("flops", operators.flops, arrays),
            "tensors": _terms("tensors", operators.tensor_bytes, arrays),
            "tensor_of": arrays.add("tensor_of", operators.tensor_of),
            "shapes": _terms("shapes", operators.shapes, arrays),
            "has_shape": arrays.add("has_shape", operators.has_shape.astype(int)),
            "executions": arrays.add("executions", sized.executions.ravel()),
            "launches": arrays.add("launches", launches_of(names)),
            "waits": arrays.add("waits", waits_of(names).astype(int)),
            "trained": len(sized.order),
            "optimizers": {
                name: number_of(words.optimizers, key) for name, key in self.optimizers.items()
            },
        }

    def _attention(self, words: Words) -> list[int]:
        """The kernel of each operator of fused attention by its number; -1 of all others."""
        operators, numbers = self._sized.operators, []
        for row, (name, kind, dtype) in enumerate(
            zip(operators.names, operators.kinds, operators.dtypes, strict=True)
        ):
            if kind != "attention":
                numbers.append(-1)
                continue
            head = 0
            if operators.has_shape[row]:
                coefficients = operators.shapes.coefficients[4 * row + 3]
                assert not operators.shapes.exponents[4 * row + 3][coefficients != 0].any()
                head = int(coefficients.sum())
            numbers.append(number_of(words.attention, (name, dtype, head)))
        return numbers


def number_of(known: dict[Any, int], value: Any) -> int:
    """The number of a value, a new one for a new value."""
    return known.setdefault(value, len(known))


def _terms(name: str, terms: Terms, arrays: Arrays) -> list[Any]:
    """Coefficients (n, 2) and exponents (n, 2, 3) of polynomials without negatives."""
    assert not terms.exponents[:, :, _VARIABLES:].any()
    return [
        arrays.add(f"{name} coefficients", terms.coefficients.ravel()),
        arrays.add(f"{name} exponents", terms.exponents[:, :, :_VARIABLES].ravel()),
    ]


def steps_data(steps: Steps, arrays: Arrays, words: Words) -> dict[str, Any]:
    """The steps of an optimizer at each rank: its events, blocks and kernels."""
    return {
        str(rank): {
            "events": _events(each.events, arrays),
            "first": each.first,
            "second": each.second,
            "rows": arrays.add("optimizer rows", rows_of(each.blocks.labels)),
            "sizes": arrays.add("optimizer sizes", each.sizes_bytes),
            "kinds": arrays.add(
                "optimizer kinds",
                [
                    number_of(words.kinds, name if name == BLOCKWISE else kind)
                    for name, kind in zip(each.names, each.kinds, strict=True)
                ],
            ),
            "launches": update_launches(0, np.array(each.names), each.times),
            "dtypes": arrays.add(
                "optimizer dtypes", [number_of(words.dtypes, d) for d in each.dtypes]
            ),
            "flops": arrays.add("optimizer flops", each.flops),
            "moved": arrays.add("optimizer moved", each.moved_bytes),
            "times": arrays.add("optimizer times", each.times),
        }
        for rank, each in steps.items()
    }


def _events(events: NDArray[np.int32], arrays: Arrays) -> list[Any]:
    """Differences of 2 block + (sign > 0), with repetitions."""
    codes = 2 * events[:, 0].astype(np.int64) + (events[:, 1] > 0)
    return arrays.add("events", repeated(np.diff(codes, prepend=0).astype(np.int32)))


LEAST_RUN = 16


def repeated(values: NDArray[np.int32]) -> list[int]:
    """Values as runs: n and n new ones, or -n and the place from which n are as they were.

    The layers of a model are one such run each, far longer than the window of deflate.
    """
    content, listed, found = values.tobytes(), values.tolist(), []
    known: dict[bytes, int] = {}
    begin = at = 0
    while at < len(listed):
        here = content[4 * at : 4 * (at + LEAST_RUN)]
        source = known.get(here, -1) if len(here) == 4 * LEAST_RUN else -1
        if source < 0:
            known[here] = at
            at += 1
            continue
        if at > begin:
            found += [at - begin, *listed[begin:at]]
        differs = np.append(values[at:] != values[source : source + len(values) - at], True)
        length = int(differs.argmax())
        found += [-length, source]
        at += length
        begin = at
    return [*found, at - begin, *listed[begin:at]] if at > begin else found


def attention_rates(gpu: Gpu, words: Words, efficiency: Efficiency) -> list[list[float]]:
    """FLOP/s of each kernel of attention on endless sequences, and what its time depends on.

    That are the factors by which it may differ, and the length of sequences at half of the rate.
    """
    if not words.attention:
        return []
    names, dtypes, heads = zip(*words.attention, strict=True)
    shapes = np.ones((len(names), 4, 1))
    shapes[:, 2], shapes[:, 3, 0] = np.inf, heads
    ones = np.ones((len(names), 1))
    works = WorkArrays(
        names=np.array(names, dtype=np.str_),
        kinds=np.full(len(names), "attention"),
        dtypes=np.array(dtypes, dtype=np.str_),
        flops=ones,
        bytes_moved=ones,
        shapes=shapes,
        has_shape=np.array(heads) > 0,
    )
    works = as_chosen(works, gpu, "sdpa")
    rates = attention_flops_per_s(works, gpu, masked=efficiency.masked_attention)[:, 0]
    return [
        [
            float(rate),
            *efficiency.ends_of(gpu, name, "attention", ""),
            half_rate_tokens(name, dtype, head, gpu),
        ]
        for name, dtype, head, rate in zip(works.names.tolist(), dtypes, heads, rates, strict=True)
    ]
