"""What a GPU's power limit leaves of its peak rate: the energy of an operation decides.

A data sheet's rates hold at boost clock. Under steady matrix products many boards reach their
power limit first and lower the clock until they stay below it ("SW power cap" in nvidia-smi;
NVIDIA calls 24 of the T4's 65 TFLOP/s expected for that reason). The memory clock stays, so
traffic is not slower. A product then runs at power / energy of an operation, and that energy
is a property of the chip: four boards with GA10x chips and limits of 70 to 300 W agree on it
within 6 %, so that it can be taken from one board and used for another of the generation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from tuner.core.gpu import Gpu

_PJ = 1e-12

JOULES_PER_FLOP: Mapping[tuple[int, int], Mapping[str, float]] = {
    (7, 0): {"fp16": 2.8 * _PJ},
    (7, 5): {"fp16": 2.9 * _PJ, "fp32": 16 * _PJ},
    (8, 0): {"fp16": 1.21 * _PJ, "tf32": 2.5 * _PJ},
    (8, 6): {"fp16": 2.47 * _PJ, "tf32": 4.9 * _PJ, "fp32": 12.6 * _PJ},
    (8, 9): {"fp16": 1.31 * _PJ, "tf32": 2.8 * _PJ, "fp32": 6.6 * _PJ},
    (9, 0): {"fp16": 0.75 * _PJ, "tf32": 1.5 * _PJ, "fp32": 9.7 * _PJ},
    (12, 0): {"fp16": 1.66 * _PJ, "tf32": 3.15 * _PJ, "fp32": 8.5 * _PJ},
}
"""Joules of a board per floating-point operation of large products, by compute capability.

Power limit over the steady rate of boards that run at their limit; fp16 stands for bf16 too.
The rates are public measurements of torch.mm with random square matrices (github.com/zzc0721/
torch-performance-test-data): of issues 72, 95, 96, 97, 108, 120, 124, 160, 161 and 185 the sizes
8192 and 10240, which take seconds; of database.md the best size, marked *, because it has no other:

- 7.0: V100S, 250 W: 88.9* TFLOP/s in fp16.
- 7.5: T4, 70 W: 24 in fp16 (4096, 100 times; forums.developer.nvidia.com/t/264462, with
  NVIDIA's explanation), 4.2* to 4.4* in fp32; T10, 150 W: 9.5* in fp32.
- 8.0: A100 PCIe 40 GB, 250 W: 198 to 215 in fp16 and bf16, 97 to 102 in tf32.
- 8.6: RTX A2000, 70 W: 28, 14.3, 5.2 in fp16, tf32, fp32; RTX A4000, 140 W: 58, 30, 11.4;
  A40, 300 W: 114, 59.5, 23.3; RTX A6000, 300 W: 120* in fp16, 23.9* in fp32.
- 8.9: L4, 72 W: 53 to 58, 26, 10.9; L40S, 350 W: 264* in fp16.
- 9.0: H100 PCIe, 350 W: 444 to 482, 233, 36.
- 12.0: RTX PRO 6000 Workstation Edition, 600 W: 318 to 350, 181, 69; Server Edition, 600 W: 374 to
  417, 202, 77; RTX 5090, 575 W: 66 in fp32. These three boards agree within 10 % of the mean.

A precision that is missing was not seen to run at the limit of any board.
"""

BOARDS_DIFFER = 1.10
"""How many times faster or slower a board may be at its power limit: the rates above of the three
boards of 12.0 lie within 10 % of their mean, those of one type (A100, H100, L4) within 5 %."""


def sustained_flops(gpu: Gpu, precision: str) -> float:
    """FLOP/s of steady products that the power limit allows; infinite where it is not known.

    `precision` is a key of `Gpu.flops`. For int8 nobody published rates: it keeps the same
    share of its peak as fp16, which is the same clock.
    """
    joules = JOULES_PER_FLOP.get(gpu.compute_capability)
    if gpu.power_w is None or joules is None:
        return math.inf
    if precision == "int8":
        return sustained_flops(gpu, "fp16") * gpu.flops["int8"] / gpu.flops["fp16"]
    energy = joules.get("fp16" if precision == "bf16" else precision)
    return math.inf if energy is None else gpu.power_w / energy
