"""FSDP2 by rank: the prediction against fully_shard itself, and a trial of two ranks."""

from __future__ import annotations

import contextlib
import json
import socket
import sys
from pathlib import Path

import pytest
from emulating import needs_emulator

from benchmarks.several_gpus import (
    CASES,
    MORE,
    PROGRAM,
    Case,
    compare,
    write_model,
)
from tuner.app.estimate import one_configuration
from tuner.app.measuring import emulating
from tuner.app.search.supported import trial_job
from tuner.core.records import Configuration, Memory
from tuner.core.units import MIB
from tuner.emulator import Machine
from tuner.predict.predict import predict, resolve_subject
from tuner.space.gpus import get_gpu
from tuner.trial.factories import EmulatedFactory

LORA = next(case for case in CASES if case.name == "LoRA, bf16, checkpointed")
BY_ACCELERATE = next(case for case in MORE if case.name == "accelerate: all weights, mixed")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@needs_emulator
@pytest.mark.parametrize(("case", "ranks"), [(LORA, 4), (BY_ACCELERATE, 2)])
def test_a_rank_is_predicted_as_fully_shard_trains_it(case: Case, ranks: int, model: Path) -> None:
    answer = compare(case, ranks, model)
    assert not answer.failure
    assert answer.emulated["allocated"] > 300 * MIB
    assert answer.holds, (answer.predicted, answer.emulated)
    assert abs(answer.share("reserved")) < 0.05


@needs_emulator
def test_two_ranks_that_exchange_take_what_is_predicted_of_one() -> None:
    settings = {"gpus_per_trial": 2, "distributed": "fsdp2", "precision": "nf4", "lora_rank": 8}
    sizes = {"micro_batch": 8, "max_length": 512, "grad_accum": 2, "num_workers": 0}
    settings |= sizes
    space, asked = one_configuration(None, "tiny-llama-3m", settings)
    gpu = get_gpu("h100_sxm")
    subject = resolve_subject(space.workload, space.predicted_model())
    predicted = predict(subject, asked, gpu).memory
    emulated = emulated_by_ranks(space, Configuration(asked), gpu)
    for name in ("peak_allocated_bytes", "peak_reserved_bytes", "loaded_bytes"):
        sizes_of = getattr(predicted, name), getattr(emulated, name)
        assert sizes_of[0] == pytest.approx(sizes_of[1], rel=0.01), name


@needs_emulator
def test_four_ranks_in_two_groups_take_what_is_predicted_of_one() -> None:
    settings = {"gpus_per_trial": 4, "distributed": "hsdp", "dp_shard_size": 2}
    settings |= {"precision": "bf16", "lora_rank": 0, "num_workers": 0, "grad_accum": 1}
    space, asked = one_configuration(None, "tiny-llama-3m", settings)
    gpu = get_gpu("h100_sxm")
    predicted = predict(resolve_subject(space.workload, space.predicted_model()), asked, gpu).memory
    emulated = emulated_by_ranks(space, Configuration(asked), gpu, ranks=4)
    for name in ("peak_allocated_bytes", "peak_reserved_bytes", "loaded_bytes"):
        sizes_of = getattr(predicted, name), getattr(emulated, name)
        assert sizes_of[0] == pytest.approx(sizes_of[1], rel=0.01), name


def emulated_by_ranks(space, asked: Configuration, gpu, *, ranks: int = 2) -> Memory:
    options = emulating(gpu).options()
    make = EmulatedFactory(trial_job(space, gpu, None, None), options, ranks)
    with contextlib.closing(make()) as runner:
        outcome = runner.run(asked)
    assert outcome.emulation is not None, outcome.message
    assert len(outcome.emulation.ranks) == ranks
    return outcome.emulation.memory


@needs_emulator
@pytest.mark.slow
def test_two_machines_in_one_script_take_what_is_predicted_of_a_rank(
    model: Path, tmp_path: Path
) -> None:
    case = Case("HSDP on two machines", group=2)
    launch = [
        *(
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nnodes",
            "2",
            "--node-rank",
            "$machine",
            "--nproc-per-node",
            "2",
        ),
        *("--master-addr", "127.0.0.1", "--master-port", str(free_port())),
        *(str(PROGRAM), str(model), f"'{json.dumps(case.for_program(4))}'"),
    ]
    script = tmp_path / "two_machines.sh"
    script.write_text(
        "for machine in 0 1; do\n"
        "  CUDA_VISIBLE_DEVICES=$((2 * machine)),$((2 * machine + 1)) \\\n"
        f"    {' '.join(launch)} &\n"
        '  set -- "$@" $!\n'
        "done\n"
        'for launched; do wait "$launched" || exit 1; done\n'
    )
    gpu = get_gpu("h100_sxm")
    with (tmp_path / "output").open("w+") as output:
        found = Machine(gpu, count=4, all_ranks=True).run(["sh", str(script)], output=output)
        output.seek(0)
        assert found.error is None, output.read()
    settings = {**case.settings(4), "machines": 2}
    space, asked = one_configuration(None, str(model), settings)
    predicted = predict(resolve_subject(space.workload, space.predicted_model()), asked, gpu).memory
    assert len(found.devices) == 4
    for device in found.devices:
        assert device.peak_allocated_bytes == pytest.approx(
            predicted.peak_allocated_bytes, rel=0.01
        )


def free_port() -> int:
    """A port of this machine that nothing listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
