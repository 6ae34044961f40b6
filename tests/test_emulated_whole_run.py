"""The whole run of a program, shortened: its largest batch, evaluation, saving and end."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.emulating import needs_emulator
from tuner.app.cli.emulated_text import input_bound_text
from tuner.core.supervised import Tail
from tuner.core.units import GIB, MIB
from tuner.emulator import Machine
from tuner.emulator.emulation import Emulation
from tuner.emulator.ending import Ended
from tuner.space.gpus import as_told, get_gpu

pytestmark = needs_emulator

TRAINER = """\
import os, torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForCausalLM, DataCollatorForSeq2Seq, LlamaConfig, PreTrainedTokenizerFast, Trainer,
    TrainingArguments,
)

LONG, VOCABULARY = int(os.environ["LONG"]), int(os.environ["VOCABULARY"])
words = Tokenizer(models.WordLevel({"<pad>": 0, "a": 1}, unk_token="<pad>"))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>")
config = LlamaConfig(
    hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, vocab_size=VOCABULARY,
)
model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
lengths = [100 + number % 20 for number in range(600)]
lengths[417] = LONG
rows = [{name: [1] * n for name in ("input_ids", "attention_mask", "labels")} for n in lengths]
data = Dataset.from_list(rows)
trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir="out", per_device_train_batch_size=1, gradient_accumulation_steps=2,
        eval_strategy="steps", eval_steps=200, save_steps=250, report_to="none", bf16=True,
        disable_tqdm=True,
    ),
    train_dataset=data,
    eval_dataset=data.select(range(20)),
    data_collator=DataCollatorForSeq2Seq(tokenizer, padding=True),
    processing_class=tokenizer,
)
trainer.train()
trainer.save_model("final")
print("saved", sorted(os.listdir("final")))
"""

LOOP = """\
import os, torch
from torch.utils.data import DataLoader, Dataset

names = ("LONG", "WORKERS", "LEAK", "KEEP")
LONG, WORKERS, LEAK, KEEP = (int(os.environ.get(name, 0)) for name in names)
WORDS, EPOCHS = 20_000, int(os.environ.get("EPOCHS", 2))

class Rows(Dataset):
    def __init__(self, number):
        self.number = number
    def __len__(self):
        return self.number
    def __getitem__(self, index):
        length = LONG if LONG and index == 50 else 100 if LEAK else 100 + index % 20
        return torch.ones(length, dtype=torch.long)

def together(rows):
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

embed, head = torch.nn.Embedding(WORDS, 256), torch.nn.Linear(256, WORDS)
model = torch.nn.Sequential(embed, torch.nn.ReLU(), head).cuda()
optimizer = torch.optim.AdamW(model.parameters())
loader = DataLoader(Rows(60), batch_size=2, collate_fn=together, num_workers=WORKERS)
test = DataLoader(Rows(200 if KEEP else 40), batch_size=4 if KEEP else 16, collate_fn=together)
kept = []
for epoch in range(EPOCHS):
    model.train()
    for tokens in loader:
        logits = model(tokens.cuda())
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.cuda().flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if LEAK:
            kept.append(logits.detach())
    model.eval()
    with torch.no_grad():
        for number, tokens in enumerate(test, 1):
            out = model(tokens.cuda())
            if KEEP:
                kept.append(out)
                print("evaluated", number, flush=True)
    torch.save(model.state_dict(), "best.pt")
model.load_state_dict(torch.load("best.pt"))
os.remove("best.pt")
print("ended", os.path.exists("best.pt"))
"""

SLOW = """\
    def __getitem__(self, index):
        __import__("time").sleep(0.03)
"""


def ran(
    folder: Path, program: str, *, memory_bytes: int = 15 * GIB, whole: bool = True, **told: int
) -> tuple[Emulation, str]:
    """A run of `program` with these variables, and what it printed."""
    path = folder / "train.py"
    path.write_text(program)
    output = Tail()
    found = Machine(as_told(get_gpu("t4"), memory_bytes=memory_bytes, price_usd_per_hour=None)).run(
        [sys.executable, str(path)],
        steps=3 if whole else 0,
        whole=whole,
        output=output,
        cwd=folder,
        environment={name: str(value) for name, value in told.items()},
    )
    assert found.own_fault is None, found.own_fault
    return found, output.text


def allocated(found: Emulation) -> dict[str, int]:
    assert found.limiting is not None
    return {phase: sizes[0] for phase, sizes in found.limiting.run_phases.items()}


def test_the_first_long_batch_is_found_with_its_row_and_its_step(tmp_path: Path) -> None:
    found, output = ran(tmp_path, TRAINER, LONG=110, VOCABULARY=1000)
    assert found.fits, output
    assert "saved" in output
    assert set(allocated(found)) == {"load", "steps", "largest batch", "evaluation", "save", "end"}
    assert found.not_run == ("resume",)
    assert not list(tmp_path.glob("final*"))
    assert not list(tmp_path.glob("out/*"))

    limit = found.used_bytes + 300 * MIB
    found, _ = ran(tmp_path, TRAINER, LONG=20_000, VOCABULARY=1000, memory_bytes=limit)
    assert (found.ended, found.fits, found.refused.phase) == (Ended.OOM, False, "largest batch")
    data = found.training_data
    assert data is not None
    assert (data.row, data.size, data.unit, data.of) == (417, 20_000, "tokens", 600)
    assert (data.steps, data.batches) == (300, 600)
    assert data.longer["16384"] == pytest.approx(1 / 600)


@pytest.mark.proof
def test_an_evaluation_of_more_rows_than_a_batch_of_training_is_found(tmp_path: Path) -> None:
    """transformers evaluates 8 rows at a time where nothing else is said."""
    found, _ = ran(tmp_path, TRAINER, LONG=110, VOCABULARY=120_000)
    phases = allocated(found)
    assert phases["evaluation"] > 1.5 * phases["steps"]
    # Room for the steps, and not for the evaluation.
    limit = phases["steps"] + (phases["evaluation"] - phases["steps"]) // 2
    assert found.limiting is not None
    limit += found.limiting.device_bytes - found.limiting.peak_reserved_bytes
    small, _ = ran(tmp_path, TRAINER, LONG=110, VOCABULARY=120_000, memory_bytes=limit)
    assert (small.fits, small.refused.phase) == (False, "evaluation")


@pytest.mark.proof
@pytest.mark.parametrize("told", [{}, {"LONG": 900}, {"WORKERS": 2, "LONG": 900}])
def test_peaks_are_those_of_a_run_to_the_end(tmp_path: Path, told: dict[str, int]) -> None:
    (tmp_path / "best.pt").write_text("of a real training")
    short, output = ran(tmp_path, LOOP, **told)
    assert "ended False" in output
    assert (tmp_path / "best.pt").read_text() == "of a real training"
    assert short.steps <= 60
    truth, _ = ran(tmp_path, LOOP, whole=False, **told)
    assert truth.steps == 60
    assert short.limiting is not None
    assert truth.limiting is not None
    for phase in ("load", "evaluation"):
        assert allocated(short)[phase] == allocated(truth).get(phase, allocated(short)[phase])
    assert short.limiting.peak_allocated_bytes == truth.limiting.peak_allocated_bytes
    assert short.limiting.breakdown.keys() == truth.limiting.breakdown.keys()


def test_memory_that_grows_is_named_with_its_line_and_the_step_that_it_ends(tmp_path: Path) -> None:
    found, _ = ran(tmp_path, LOOP, LEAK=1, memory_bytes=700 * MIB)
    assert found.limiting is not None
    (growing,) = found.limiting.growth
    assert growing.line.endswith("train.py:29")
    assert growing.bytes_per_step == pytest.approx(2 * 100 * 20_000 * 4, rel=0.01)
    assert (found.ended, found.fits) == (Ended.OOM, False)
    truth, _ = ran(tmp_path, LOOP, LEAK=1, memory_bytes=700 * MIB, whole=False)
    assert (truth.ended, truth.steps) == (Ended.OOM, found.steps)
    # Where its memory is full after more steps than are run, the step is told.
    long = LOOP.replace("loader = DataLoader(Rows(60)", "loader = DataLoader(Rows(60_000)")
    small = long.replace("kept.append(logits.detach())", "kept.append(logits.detach()[:1, :9])")
    found, _ = ran(tmp_path, small.replace(".detach()[", ".detach().clone()["), LEAK=1)
    assert found.limiting is not None
    (growing,) = found.limiting.growth
    assert found.ends_at_step is not None
    room = found.gpu.memory_bytes - found.limiting.device_bytes_in("steps")
    assert found.ends_at_step == pytest.approx(room / growing.bytes_per_step, rel=0.01)
    assert found.fits is (found.ends_at_step > 60_000)


def test_memory_that_is_kept_each_few_steps_is_told(tmp_path: Path) -> None:
    program = LOOP.replace(
        "    for tokens in loader:\n", "    for n, tokens in enumerate(loader):\n"
    )
    program = program.replace("        if LEAK:\n", "        if n % 20 == 0:\n")
    found, _ = ran(tmp_path, program.replace("Rows(60)", "Rows(9000)"), EPOCHS=1)
    (line,) = found.unreached
    assert program.splitlines()[int(line.rpartition(":")[2]) - 1].strip() == "if n % 20 == 0:"


def test_a_queue_that_fills_up_does_not_grow(tmp_path: Path) -> None:
    program = """\
import collections, os, torch
deep = torch.nn.Sequential(*[torch.nn.Linear(8, 8)] * 200).cuda()
optimizer = torch.optim.SGD(deep.parameters())
kept = collections.deque(maxlen=int(os.environ["MOST"]))
for step in range(9000):
    deep(torch.ones(1, 8, device="cuda")).sum().backward()
    optimizer.step()
    kept.append(torch.zeros(25_000_000, device="cuda"))
"""
    found, _ = ran(tmp_path, program, MOST=20)
    assert (found.fits, found.ends_at_step) == (True, None)
    assert allocated(found)["largest batch"] > 20 * 25_000_000 * 4
    found, _ = ran(tmp_path, program, MOST=9000)
    assert (found.fits, found.ends_at_step) == (False, pytest.approx(160, abs=5))


def test_code_after_a_loop_that_is_left_early_is_the_end(tmp_path: Path) -> None:
    program = """\
import torch
from torch.utils.data import DataLoader
model = torch.nn.Linear(4096, 4096).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for number, rows in enumerate(DataLoader(torch.randn(400, 4096), batch_size=8)):
    if number == 20:
        break
    model(rows.cuda()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
copies = [one.detach().repeat(8, 1) for one in model.parameters() if one.dim() > 1]
"""
    found, _ = ran(tmp_path, program)
    assert found.steps == 20
    phases = allocated(found)
    assert phases["end"] - phases["steps"] > 5 * 4096 * 4096 * 4


def test_a_loop_of_ones_own_ends_where_branches_wait_and_the_program_goes_on(
    tmp_path: Path,
) -> None:
    program = """\
import sys, torch
deep = torch.nn.Sequential(*[torch.nn.Linear(8, 8)] * 200).cuda()
optimizer = torch.optim.SGD(deep.parameters())
def train(steps):
    for step in range(steps):
        rows = torch.ones(8 if step != 500 else 100_000_000, 8, device="cuda")
        deep[0](rows).sum().backward()
        deep(rows[:1]).sum().backward()
        optimizer.step()
train(9000)
kept = torch.zeros(2_000_000_000, device="cuda")
print("ran", __name__, __spec__, sys.argv[1:], __file__ == sys.argv[0])
"""
    found, output = ran(tmp_path, program)
    assert "ran __main__ None [] True" in output
    assert (found.ended, found.fits, found.unreached) == (Ended.END, True, ())
    assert found.steps < 100
    phases = allocated(found)
    assert phases["largest batch"] > 2 * 100_000_000 * 8 * 4 > 7 * phases["steps"]
    assert phases["end"] > 2_000_000_000 * 4


@pytest.mark.proof
def test_outputs_that_an_evaluation_keeps_are_found(tmp_path: Path) -> None:
    found, output = ran(tmp_path, LOOP, KEEP=1, memory_bytes=GIB)
    assert (found.ended, found.refused and found.refused.phase) == (Ended.OOM, "evaluation")
    truth, real = ran(tmp_path, LOOP, KEEP=1, memory_bytes=GIB, whole=False)
    assert truth.ended is Ended.OOM
    assert output.count("evaluated") == real.count("evaluated")


@pytest.mark.proof
def test_a_program_of_many_epochs_comes_to_its_end(tmp_path: Path) -> None:
    found, output = ran(tmp_path, LOOP, EPOCHS=25)
    assert found.ended is Ended.END
    assert "ended False" in output


def test_a_failure_after_the_steps_leaves_the_verdict(tmp_path: Path) -> None:
    found, _ = ran(tmp_path, LOOP.replace("os.remove", "raise ValueError(3); os.remove"))
    assert found.fits
    assert found.later_error is not None
    assert found.later_error.type == "builtins.ValueError"


@pytest.mark.proof
def test_the_time_of_the_run_is_that_of_its_steps_and_evaluations(tmp_path: Path) -> None:
    found, _ = ran(tmp_path, TRAINER, LONG=900, VOCABULARY=1000)
    every, _ = ran(tmp_path, TRAINER, LONG=900, VOCABULARY=1000, whole=False)
    run, step, data = found.run_time, found.time, found.training_data
    assert run is not None
    assert step is not None
    assert data is not None
    assert (run.is_whole, run.steps, run.evaluations) == (True, every.steps, 4)
    # Launches dominate so small a model.
    launch_s = step.breakdown_s["launch"]
    assert run.steps * launch_s < run.seconds < run.steps * step.step_s * 1.5
    # The collator pads to the longest of two rows.
    assert data.epoch_size > 600 * 100
    assert run.interval_s[0] < run.seconds < run.interval_s[1]


@pytest.mark.proof
def test_data_that_is_slow_to_read_is_named(tmp_path: Path) -> None:
    slow = LOOP.replace("    def __getitem__(self, index):", SLOW.rstrip())
    found, _ = ran(tmp_path, slow)
    data = found.training_data
    assert data is not None
    assert data.read_s is not None
    assert found.time is not None
    assert found.time.step_s < 0.05 < data.read_s
    assert "input-bound" in input_bound_text(found)


@pytest.mark.proof
def test_weights_that_are_copied_to_be_saved_run_out_of_memory_in_the_save(tmp_path: Path) -> None:
    """The copies are made before `save` is called, in a statement or a function named by it."""
    save = "    torch.save(model.state_dict(), "
    copies = "{name: one.repeat(30, 1) for name, one in model.state_dict().items()}"
    found, _ = ran(tmp_path, LOOP)
    program = LOOP.replace(save, f"    torch.save({copies}, ")
    found, output = ran(tmp_path, program, memory_bytes=found.used_bytes + 16 * MIB)
    assert (found.fits, found.refused.phase) == (False, "save"), output
