"""Virtual environments with the versions that a row was measured with."""

from __future__ import annotations

from benchmarks.environments import Environment

# `===` asks for the wheel without a local version, which is the CUDA build.
TORCH_2_10 = Environment(
    "torch-2.10",
    (
        "torch===2.10.0",
        "transformers==5.0.0",
        "peft==0.19.1",
        "bitsandbytes==0.50.2",
        "accelerate",
        "numpy",
        "fitcheck-llm==0.3.1",
    ),
)
TORCH_2_14 = Environment(
    "torch-2.14",
    (
        "torch===2.14.0",
        "transformers==5.17.0",
        "peft==0.20.0",
        "bitsandbytes==0.50.2",
        "accelerate",
        "numpy",
        "fitcheck-llm==0.3.1",
    ),
)
CANIFINETUNE = Environment(
    "canifinetune",
    (
        "transformers==5.8.1",
        "bitsandbytes==0.49.2",
        "canifinetune==0.2.0",
        "pydantic==2.14.3",
        "pydantic-core==2.50.4",
        "annotated-types",
        "typing-inspection",
        "platformdirs",
    ),
    over=TORCH_2_10,
    note="torch 2.10, and the row 2.6",
)
FITSCOUT = Environment(
    "fitscout",
    ("fitscout==0.1.1",),
    over=TORCH_2_10,
    note="the row's versions are not known",
)

ENVIRONMENTS = {one.name: one for one in (TORCH_2_10, TORCH_2_14, CANIFINETUNE, FITSCOUT)}
