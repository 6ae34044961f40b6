"""A training beside its prediction: what is said once, and that nothing is raised."""

import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from nvml_fakes import FakeNvml
from waiting import wait_for, wait_until_gone

import tuner
from tuner.app.cli.main import run
from tuner.core.units import GIB, MIB, format_size
from tuner.emulator.here import DEVICE_VARIABLE
from tuner.integrations import Reporter, lightning, watching
from tuner.integrations import transformers as for_transformers
from tuner.integrations.expected import Asked, expected_of
from tuner.integrations.lightning import _StepReports as LightningEvents
from tuner.integrations.transformers import TunerCallback
from tuner.space.models.catalogue import get_entry

ROOT = Path(__file__).parents[1]

PREDICTED = {
    "source": "predicted",
    "gpu": "a6000",
    "model": "tiny-llama-3m",
    "method": "trace",
    "step_s": 1.0,
    "memory": {
        "device_bytes": 11 * GIB,
        "peak_reserved_bytes": 10 * GIB + 600 * MIB,
        "peak_allocated_bytes": 10 * GIB,
    },
    "intervals": {"device_bytes": [10 * GIB, 12 * GIB], "step_s": [0.8, 1.25]},
    "configuration": {"micro_batch": 2, "grad_accum": 1, "optimizer": "adamw_torch"},
}


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    for name in ("TUNER_TRIAL", "RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def clock(monkeypatch):
    """The time, which passes only where a test says so."""
    found = SimpleNamespace(now=0.0)
    for module in (watching, sys.modules["tuner.integrations.reporting"]):
        monkeypatch.setattr(module.time, "perf_counter", lambda: found.now)
    return found


@pytest.fixture
def a6000(monkeypatch):
    """A GPU by its driver and by PyTorch's counters: 11 GiB of this process, as predicted."""
    facts = SimpleNamespace(allocated=10 * GIB, reserved=10 * GIB + 600 * MIB, retries=0)
    driver = FakeNvml(
        name="NVIDIA RTX A6000",
        memory=(11 * GIB + 300 * MIB, 48 * GIB),
        utilization=97,
        reasons=0,
        processes=[(os.getpid(), 11 * GIB)],
    )
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    total = tuner.space.gpus.get_gpu("a6000").memory_bytes
    for name, value in {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "current_device": lambda: 0,
        "synchronize": lambda: None,
        "get_device_name": lambda index=0: "NVIDIA RTX A6000",
        "get_device_properties": lambda index=0: SimpleNamespace(total_memory=total),
        "max_memory_allocated": lambda index=0: facts.allocated,
        "max_memory_reserved": lambda index=0: facts.reserved,
        "memory_reserved": lambda index=0: facts.reserved,
        "memory_stats": lambda index=0: {"num_alloc_retries": facts.retries},
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    facts.driver = driver.values
    yield facts
    assert driver.open == 0  # whatever was opened was closed


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """A machine without anything beside the training, as far as its load tells."""
    monkeypatch.setattr(watching.os, "getloadavg", lambda: (1.0, 1.0, 1.0))


def train(clock, reporter: Reporter, *, steps: int = 12, step_s: float = 1.0, wait_s: float = 0.0):
    def batches():
        for number in range(steps):
            clock.now += wait_s
            yield number

    for _ in reporter.batches(batches()):
        clock.now += step_s
        reporter.step(samples=2)


def told(capsys) -> str:
    return capsys.readouterr().err


def test_a_run_as_predicted_is_said_once(clock, a6000, capsys):
    reporter = Reporter(PREDICTED)
    train(clock, reporter, steps=40)
    text = told(capsys)
    assert text.count("tuner:") == 1
    assert "after 10 steps" in text
    assert "memory  11.00 GiB, 11.00 GiB predicted (90 %: 10.00 GiB to 12.00 GiB)" in text
    assert "nothing is off" in text
    assert not list(Path().iterdir())


@pytest.mark.parametrize(
    ("change", "how", "cause", "said"),
    [
        ({"reserved": 15 * GIB, "retries": 3}, {}, "fragmentation", "freed its cache 3 times"),
        ({"driver": {"memory": (20 * GIB, 48 * GIB)}}, {}, "another process", "9.00 GiB"),
        ({}, {"wait_s": 0.5}, "input-bound", "33% of the time"),
        ({"driver": {"utilization": 40}}, {}, "input-bound", "computes 40% of the time"),
        ({"driver": {"reasons": 0x40}}, {}, "slow clocks", "temperature (hardware)"),
        ({}, {"step_s": 3.0}, None, "3.0 s, 1.0 s predicted (90 %: 800 ms to 1.2 s) (off)"),
    ],
)
def test_what_is_off_has_its_cause(clock, a6000, capsys, change, how, cause, said):
    a6000.driver.update(change.get("driver", {}))
    vars(a6000).update({name: value for name, value in change.items() if name != "driver"})
    train(clock, Reporter(PREDICTED), **how)
    text = told(capsys)
    assert said in text
    assert f"{cause}: " in text if cause else "cause unknown" in text


def test_a_busy_processor_is_named(clock, capsys, monkeypatch):
    monkeypatch.setattr(watching.os, "getloadavg", lambda: (100.0, 0.0, 0.0))
    monkeypatch.setattr(watching.os, "cpu_count", lambda: 4)
    train(clock, Reporter({**PREDICTED, "gpu": "cpu"}))
    assert "another process: 100 processes and threads want 4 processors" in told(capsys)


def test_memory_that_a_container_hides_is_the_catalogues(clock, a6000, capsys):
    a6000.driver["processes"] = []
    a6000.driver["memory"] = (30 * GIB, 48 * GIB)
    train(clock, Reporter(PREDICTED))
    text = told(capsys)
    used = 30 * GIB - a6000.reserved - tuner.space.gpus.get_gpu("a6000").context_bytes
    assert f"another process: {format_size(used)} of the GPU are used by others: " in text


def test_without_a_prediction_causes_are_said(clock, a6000, capsys):
    train(clock, Reporter(), wait_s=1.0)
    text = told(capsys)
    assert "no prediction: give one by prediction=" in text
    assert "input-bound" in text


def test_evaluation_and_saving_are_no_waiting_for_data(clock, a6000, capsys):
    callback = TunerCallback(PREDICTED)
    control, state = SimpleNamespace(), SimpleNamespace(is_world_process_zero=True)
    model = torch.nn.Linear(2, 2)
    args = SimpleNamespace(output_dir="", per_device_train_batch_size=2, bf16=False, fp16=False,
                           gradient_accumulation_steps=1, optim="adamw_torch")  # fmt: skip
    model.config = SimpleNamespace(to_dict=dict)
    callback.on_train_begin(args, state, control, model=model)
    for _ in range(12):
        callback.on_step_begin(args, state, control)
        clock.now += 1.0
        callback.on_step_end(args, state, control)
        clock.now += 30.0
        callback.on_evaluate(args, state, control)
    text = told(capsys)
    assert "step    1.0 s, 1.0 s predicted" in text
    assert "nothing is off" in text


def test_lightning_adds_its_batches_up_to_steps(clock, a6000, capsys):
    callback = LightningEvents(prediction=PREDICTED)
    trainer = SimpleNamespace(global_step=0, is_global_zero=True, default_root_dir=".")
    callback.on_train_start(trainer, None)
    for index in range(24):  # an optimizer step in every second batch
        clock.now += 0.25
        callback.on_train_batch_start(trainer, None, None, index)
        clock.now += 0.5
        trainer.global_step = (index + 1) // 2
        callback.on_train_batch_end(trainer, None, None, None, index)
        if index % 8 == 7:
            clock.now += 60.0
            callback.on_validation_end(trainer, None)
    text = told(capsys)
    assert "step    1.0 s, 1.0 s predicted" in text
    assert "input-bound: 33% of the time" in text


def test_shorter_rows_are_no_measure_of_the_longest(clock, capsys):
    watch = TunerCallback({**PREDICTED, "gpu": "cpu"})._reporter.watch
    watch.begin(lambda: watching.RunFacts(is_shorter=True))
    for _ in range(12):
        clock.now += 0.3
        watch.ended()
    assert "step    300 ms, 1.0 s predicted, of the longest rows" in (text := told(capsys))
    assert "(off)" not in text


def test_a_prediction_of_another_gpu_is_none(clock, a6000, capsys):
    train(clock, Reporter({**PREDICTED, "gpu": "t4"}))
    assert "no prediction: it is for t4, and this is a6000" in told(capsys)


def test_another_training_than_the_predicted_one_is_named(clock, capsys):
    callback = TunerCallback({**PREDICTED, "gpu": "cpu", "configuration": {"micro_batch": 8}})
    watch = callback._reporter.watch
    watch.begin(lambda: watching.RunFacts({"micro_batch": 2}))
    for _ in range(12):
        clock.now += 1.0
        watch.ended()
    assert "settings: micro_batch is 2, predicted for 8" in told(capsys)


@pytest.mark.parametrize(
    "given", ["nosuch.json", {"source": "predicted"}, 7, {"source": "emulated", "devices": 3}]
)
def test_a_failure_is_one_warning_and_the_training_goes_on(clock, capsys, given):
    train(clock, Reporter(given))
    text = told(capsys)
    assert text.count("tuner: warning: this run isn't compared") == 1


class Unwritable:
    """A stream that takes nothing."""

    def write(self, text):
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize("stream", [None, Unwritable()])
@pytest.mark.parametrize("given", [PREDICTED, "nosuch.json", None])
def test_nothing_is_raised_where_nothing_can_be_said(clock, monkeypatch, stream, given):
    monkeypatch.setattr(sys, "stderr", stream)
    train(clock, Reporter(given))
    callback, broken = TunerCallback(given), SimpleNamespace()
    for event in [name for name in vars(type(callback)) if name.startswith("on_")]:
        getattr(callback, event)(broken, broken, broken)


@pytest.mark.parametrize("text", ["", "[", "{}", '{"nosuch": 1}', "null"])
def test_a_trial_that_is_not_understood_ends_no_training(clock, monkeypatch, capsys, text):
    monkeypatch.setenv("TUNER_TRIAL", text)
    train(clock, Reporter())
    assert told(capsys).count("warning: ") <= 1


def test_a_trial_that_has_gone_ends_no_training(clock, monkeypatch, capsys):
    def closed(number, data):
        raise BrokenPipeError

    monkeypatch.setenv("TUNER_TRIAL", '{"budget_s": 1.0}')
    reporter = Reporter()
    with monkeypatch.context() as context:
        context.setattr(os, "write", closed)
        train(clock, reporter)
    assert told(capsys).count("warning: no more of this training is reported") == 1


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
@pytest.mark.parametrize("module", [for_transformers, lightning])
def test_callbacks_are_copied_while_they_watch(a6000, module, copied):
    callback = module.TunerCallback(prediction=PREDICTED)
    callback._reporter.watch.begin(lambda: watching.RunFacts(ask=lambda: None))
    assert copied(callback)._reporter.watch.given == PREDICTED
    callback._reporter.watch.stop()


def test_any_failure_of_ours_is_caught(clock, a6000, capsys, monkeypatch):
    def broken(*_):
        raise RuntimeError("the driver is gone")

    monkeypatch.setattr(watching, "device_numbers", broken)
    train(clock, Reporter(PREDICTED), steps=30)
    assert told(capsys).count("the driver is gone") == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [("TUNER_TRIAL", '{"budget_s": 1.0}'), ("RANK", "1"), (DEVICE_VARIABLE, "a6000")],
)
def test_trials_other_ranks_and_emulated_gpus_are_not_watched(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    reporter = Reporter(PREDICTED)
    assert reporter.watch.is_over
    assert reporter.is_active == (name == "TUNER_TRIAL")


def test_predictions_are_read_from_files_and_objects(tmp_path, capsys):
    path = tmp_path / "check.json"
    asked = ["check", "--predict", "--gpu", "rtx4090", "--json", "--no-changes"]
    program = [str(ROOT / "examples/programs/sft.py"), "tiny-llama-3m"]
    assert run([*asked, *program]) == 0
    path.write_text(capsys.readouterr().out)
    file = expected_of(path)
    checked = expected_of(tuner.check(program, gpu="rtx4090", predict=True, changes=False))
    assert file.numbers == checked.numbers
    assert file.own_words["micro_batch"] == checked.own_words["micro_batch"] == 16
    emulated = expected_of({"program": {
        "source": "emulated", "gpu": "t4", "time": {"step_s": 0.5}, "settings": {"micro_batch": 2},
        "devices": [{"device_bytes": 3, "peak_reserved_bytes": 2, "peak_allocated_bytes": 1}],
    }})  # fmt: skip
    assert emulated.source == "emulated"
    assert emulated.numbers.device_bytes == 3


# -- a real training on the processor --------------------------------------------------------------


@pytest.fixture
def trained(tmp_path):
    """Train a tiny model with the real Trainer, and return the folder of its output."""
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        Trainer,
        TrainingArguments,
        default_data_collator,
    )

    def train(callback) -> None:
        config = LlamaConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, vocab_size=100,
        )  # fmt: skip
        ids = list(range(32))
        rows = [{"input_ids": ids, "labels": ids, "attention_mask": [1] * 32}] * 64
        arguments = TrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=2,
            max_steps=12,
            report_to=[],
            use_cpu=True,
            save_strategy="no",
            disable_tqdm=True,
        )
        Trainer(
            model=LlamaForCausalLM(config),
            args=arguments,
            train_dataset=rows,
            data_collator=default_data_collator,
            callbacks=[callback],
        ).train()

    return train


class Answered(Asked):
    """A process that predicted, without the seconds that this takes."""

    asked: tuple = ()
    waited_s = 0.0

    def __init__(self, config, gpu, knobs):
        Answered.asked = (config, gpu, knobs)

    def ready(self, wait_s=0.0):
        Answered.waited_s = wait_s
        return wait_s > 0

    def result(self):
        return expected_of({**PREDICTED, "gpu": "cpu", "configuration": self.asked[2]})

    def close(self): ...


def test_the_real_trainer_is_predicted_from_its_own_objects(trained, monkeypatch, capsys):
    monkeypatch.setattr(for_transformers, "Asked", Answered)
    monkeypatch.setattr(for_transformers, "_gpu_id", lambda: "cpu")
    trained(TunerCallback())
    text = told(capsys)
    assert "after 10 steps" in text  # although the prediction was not ready then
    assert "settings: " not in text
    config, gpu, knobs = Answered.asked
    assert config["hidden_size"] == 32
    assert (gpu, knobs["micro_batch"], knobs["effective_batch"], knobs["max_length"]) == (
        "cpu", 2, 2, 32,
    )  # fmt: skip
    assert (knobs["lora_rank"], knobs["precision"], knobs["loss"]) == (0, "fp32", "transformers")


def test_a_training_waits_for_one_percent_of_its_time(clock, capsys):
    class Late(Answered):
        def ready(self, wait_s=0.0):
            super().ready(wait_s)
            return False

    watch = Reporter().watch
    watch.begin(lambda: watching.RunFacts(ask=lambda: Late({}, "cpu", {})))
    for _ in range(12):
        clock.now += 1.0
        watch.ended()
    watch.end()
    assert Answered.waited_s == pytest.approx(0.12)
    assert "no prediction: the training ended before it" in told(capsys)


TRAINING = """
import sys, time
from tuner.integrations import expected, watching
expected.own_python = lambda *words: ["sh", "-c", "echo $$ > asked; sleep 600 & wait"]
watch = watching.RunWatch()
watch.begin(lambda: watching.RunFacts(ask=lambda: expected.Asked({}, "cpu", {})))
print("began", flush=True)
sys.stdin.readline()
began = time.perf_counter()
for _ in range(3):
    watch.ended()
watch.end()
print(time.perf_counter() - began, flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("how", ["SIGKILL", "its end", "the program's end"])
def test_a_prediction_ends_with_its_training(how, tmp_path):
    training = subprocess.Popen(
        [sys.executable, "-c", TRAINING],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    with training:
        assert training.stdout.readline() == b"began\n"
        told = tmp_path / "asked"
        wait_for(lambda: told.exists() and told.read_text())
        asked = psutil.Process(int(told.read_text()))
        left = [asked.pid, asked.ppid(), *(child.pid for child in asked.children())]
        if how == "its end":
            training.stdin.write(b"\n")
            training.stdin.flush()
            assert float(training.stdout.readline()) < 0.5  # on a busy machine
        else:
            training.kill() if how == "SIGKILL" else training.stdin.close()
        wait_until_gone(left)


def test_accelerates_loop_has_three_lines(capsys):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(8, 8)
    data = torch.utils.data.DataLoader(torch.zeros(48, 8), batch_size=2)
    optimizer = torch.optim.SGD(model.parameters())
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    reporter = Reporter(prediction={**PREDICTED, "gpu": "cpu"})
    for batch in reporter.batches(data):
        accelerator.backward(model(batch).sum())
        optimizer.step()
        optimizer.zero_grad()
        reporter.step(samples=2)
    assert "after 10 steps" in told(capsys)


@pytest.mark.proof
def test_the_prediction_of_a_run_is_made_by_a_process_of_its_own(capsys):
    config = get_entry("tiny-llama-3m").config
    asked = Asked(config, "rtx4090", {"micro_batch": 2, "grad_accum": 1, "lora_rank": 0})
    assert asked.ready(120.0)
    assert asked.result().configuration["micro_batch"] == 2
    wrong = Asked(config, "nosuch", {})
    assert wrong.ready(120.0)
    with pytest.raises(tuner.UnavailableError, match="nosuch"):
        wrong.result()
