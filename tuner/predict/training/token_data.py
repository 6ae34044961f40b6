"""Batches of synthetic tokens, through PyTorch's own data loader and its worker processes."""

from __future__ import annotations

import bisect
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from tuner.core.errors import InputError
from tuner.core.setup.common import Loader
from tuner.space.data import DataFacts
from tuner.space.lengths import TokenLengths

_IGNORE_INDEX = -100
_UNKNOWN_EXAMPLES = 1_000_000
"""Examples of an epoch where the data's number is not known: no trial reaches its end."""
_SEEDS_PER_RANK = 1 << 32
"""Seeds of examples: ranks of a trial on several GPUs see different ones."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """The arguments of a model, and the number of tokens that aren't padding."""

    inputs: dict[str, torch.Tensor]
    tokens: int


class _SyntheticTokens(Dataset[torch.Tensor]):
    """Examples of random tokens: the same ones for the same index, made when asked for.

    Their lengths are cut at `max_length`, which all of the first `full` examples have, and all
    examples where `lengths` is None. Each `rank` has examples of its own.
    """

    def __init__(
        self,
        vocab_size: int,
        max_length: int,
        *,
        examples: int,
        lengths: TokenLengths | None = None,
        full: int = 0,
        rank: int = 0,
    ) -> None:
        self._seed = rank * _SEEDS_PER_RANK
        self._vocab_size = vocab_size
        self._max_length = max_length
        self._examples = examples
        self._points = lengths.points if lengths else ()
        self._longest = min(max_length, lengths.max) if lengths else max_length
        self._full = full

    def __len__(self) -> int:
        return self._examples

    def __getitem__(self, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self._seed + index)
        length = self._longest
        if self._points and index >= self._full:
            # The length below which this share of the data lies: its distribution, inverted.
            fraction = float(torch.rand((), generator=generator))
            place = bisect.bisect_left(self._points, fraction, key=lambda point: point[1])
            end, above = self._points[place]
            start, below = self._points[max(0, place - 1)]
            share = (fraction - below) / (above - below) if above > below else 1.0
            length = max(1, min(self._max_length, round(start + share * (end - start))))
        return torch.randint(self._vocab_size, (length,), generator=generator)


@dataclass(frozen=True, slots=True)
class _Collator:
    """Examples of several lengths to one padded batch on the host; picklable for workers.

    `padded_length` is None where a batch is as long as its longest example.
    """

    padded_length: int | None

    def __call__(self, examples: list[torch.Tensor]) -> dict[str, Any]:
        """`input_ids`, `attention_mask` and `labels` of (examples, length), and `tokens`."""
        lengths = [len(example) for example in examples]
        length = self.padded_length or max(lengths)
        ids = torch.zeros(len(examples), length, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, example in enumerate(examples):
            ids[row, : lengths[row]] = example
            mask[row, : lengths[row]] = 1
        labels = ids.masked_fill(mask == 0, _IGNORE_INDEX)
        tokens = sum(lengths)
        return {"input_ids": ids, "attention_mask": mask, "labels": labels, "tokens": tokens}


class _FullFirst(Sampler[int]):
    """The order of examples: those of the longest length once, then the data's, epoch after epoch.

    Of data with few examples the first ones would otherwise come again with every epoch.
    """

    def __init__(self, examples: int, full: int) -> None:
        self._examples = examples
        self._full = full
        self._start = 0

    def __len__(self) -> int:
        return self._full + self._examples - self._start

    def __iter__(self) -> Iterator[int]:
        start, self._start = self._start, self._full
        return iter(range(start, self._full + self._examples))


class TokenBatches:
    """Micro-batches on the device, epoch after epoch. `waited_s` is the time spent in waiting."""

    def __init__(self, loader: DataLoader[torch.Tensor], device: str) -> None:
        self.loader = loader
        self._device = device
        self._batches: Iterator[dict[str, Any]] | None = None
        self.waited_s = 0.0

    def next(self) -> _Batch:
        """The next micro-batch; it is copied without waiting where its memory is pinned."""
        started = time.perf_counter()
        batch = self._next_on_host()
        self.waited_s += time.perf_counter() - started
        tokens = batch.pop("tokens")
        pinned = self.loader.pin_memory
        inputs = {n: t.to(self._device, non_blocking=pinned) for n, t in batch.items()}
        return _Batch(inputs, int(tokens))

    def close(self) -> None:
        """End the worker processes."""
        self._batches = None
        self.loader._iterator = None  # where persistent workers are kept

    def _next_on_host(self) -> dict[str, Any]:
        if self._batches is None:
            self._batches = iter(self.loader)
        try:
            return next(self._batches)
        except StopIteration:  # the next epoch
            self._batches = iter(self.loader)
            return next(self._batches)


def build_loader(
    settings: Loader,
    *,
    vocab_size: int,
    shape: tuple[int, int],
    data: DataFacts | None = None,
    full: int = 0,
    padded: bool = False,
    rank: int = 0,
) -> DataLoader[torch.Tensor]:
    """A loader of micro-batches of `shape`, (examples, longest length).

    Without `data` every example has the longest length, as has each of the first `full`. With
    `padded` each has a token of padding at least, so that attention needs its mask.
    Raises `InputError` for data whose lengths are known by mean and maximum only: no example
    can be drawn from these.
    """
    micro_batch, max_length = shape
    lengths = data.token_lengths if data else None
    if lengths is not None and not lengths.points:
        raise InputError(
            "the data's token_lengths name a mean and a maximum, which do not say how long "
            "single examples are",
            hint="give quantiles or a histogram (`tuner data` reads them from a file), or train "
            "on full lengths",
        )
    examples = max((data.examples if data else None) or _UNKNOWN_EXAMPLES, micro_batch)
    full = full if lengths else 0  # without lengths all examples are the longest
    pads_fully = padded or (data is not None and data.padding == "max_length")
    longest = max(1, max_length - padded)
    workers = settings.num_workers
    return DataLoader(
        _SyntheticTokens(
            vocab_size, longest, examples=examples + full, lengths=lengths, full=full, rank=rank
        ),
        sampler=_FullFirst(examples, full),
        batch_size=micro_batch,
        drop_last=True,
        collate_fn=_Collator(max_length if pads_fully else None),
        num_workers=workers,
        pin_memory=settings.pin_memory,
        prefetch_factor=settings.prefetch_factor if workers else None,
        persistent_workers=settings.persistent_workers,
    )
