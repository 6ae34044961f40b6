"""The words for where a number is from, how a trial ended, what memory is for, and when.

What runs inside an emulated program imports these, and nothing else of the records.
"""

from __future__ import annotations

import enum


class Source(enum.StrEnum):
    """The source of a number, from the least to the most reliable.

    `EMULATED` is what a program took that ran on a GPU that is not there (`tuner.emulator`): its
    memory is the allocator's own, its time an estimate.
    """

    PREDICTED = "predicted"
    EMULATED = "emulated"
    MEASURED = "measured"

    @property
    def rank(self) -> int:
        """Larger for what is to be relied on more."""
        return list(Source).index(self)


class Status(enum.StrEnum):
    """The end of a trial. Out of memory is an outcome, not an error."""

    OK = "ok"
    OOM = "oom"
    THRASHING = "thrashing"
    TIMEOUT = "timeout"
    NON_FINITE = "non_finite"
    CRASHED = "crashed"
    INVALID = "invalid"
    INTERRUPTED = "interrupted"


SAYS_NOTHING = (Status.CRASHED, Status.TIMEOUT, Status.INVALID, Status.INTERRUPTED)
"""A verification that ended like this takes nothing from what was known before it."""


LOST = "tried again and lost again"
"""First words about a trial that was killed, or lost its worker, as often as it was tried."""


class Verdict(enum.StrEnum):
    """The answer to whether something fits on a GPU."""

    FITS = "fits"
    TIGHT = "tight"
    """The interval spans the limit, or it runs with less than the margin free."""
    DOES_NOT_FIT = "does not fit"
    UNKNOWN = "unknown"


class Doubt(enum.StrEnum):
    """A reason why predicted memory is less certain than that of a traced, plain training."""

    ESTIMATED = "estimated reserved memory"
    """The allocator was not replayed: what it holds was taken between other configurations."""
    KERNELS = "kernels of our own guess"
    """Fused kernels (Liger, foak, Unsloth) are priced as the operators that they replace."""
    UNCOMPARED = "not compared with a published run"
    """No published run that was compared trains like this: several GPUs, pairs of answers, packed
    rows, images, other workloads than language models."""
    RELEASES = "other releases"
    """The program runs with other releases of its libraries than the prediction stands for."""
    OLD_RELEASES = "releases before PyTorch 2"


class MemoryCategory(enum.StrEnum):
    """The use of a byte of device memory at the peak."""

    WEIGHTS = "weights"
    ADAPTERS = "adapters"
    GRADIENTS = "gradients"
    UNSHARDED_GRADIENTS = "unsharded_gradients"
    """Whole gradients that a rank of FSDP2 keeps between micro-steps without an exchange
    (`no_sync`)."""
    OPTIMIZER_STATE = "optimizer_state"
    ACTIVATIONS = "activations"
    LOGITS_AND_LOSS = "logits_and_loss"
    TEMPORARY = "temporary"
    ALLOCATOR_OVERHEAD = "allocator_overhead"
    """Reserved by PyTorch's caching allocator and not used at the peak: free blocks, and rests
    of blocks that were not worth splitting off."""
    CONTEXT_AND_WORKSPACE = "context_and_workspace"
    """CUDA context, loaded kernels and what the driver keeps: outside PyTorch's counters."""


class Exhausted(enum.StrEnum):
    """The memory that ran out in a trial that ended with `Status.OOM`."""

    DEVICE = "device"
    """The memory of the device that trains: what a search learns limits from."""
    HOST = "host"
    """The machine's main memory, beside a GPU that may have had room."""


class Phase(enum.StrEnum):
    """The stage of a trial in which memory is used, or ran out."""

    LOAD = "load"
    GENERATE = "generate"
    """Generating the tokens that are trained on, in emulated reinforcement learning."""
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    EVALUATION = "evaluation"
    """Evaluating and saving a checkpoint after the steps, in a verification."""
