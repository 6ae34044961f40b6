"""Trials on the lengths of the data: who refuses them, and what they say of other trials."""

import dataclasses
from types import SimpleNamespace

import pytest
from encoder_samples import TINY_ROBERTA, configuration

from tuner.app.search.supported import model_version, require_lengths
from tuner.core.errors import InputError
from tuner.core.setup.common import Loader
from tuner.predict.training import get_workload
from tuner.predict.training.token_data import TokenBatches, build_loader
from tuner.space import DataFacts, TokenLengths, load_space
from tuner.space.command import Command
from tuner.space.gpus import get_gpu
from tuner.trial.base import MeasureOptions, TrialJob
from tuner.trial.command import COMMAND_TRIAL
from tuner.trial.device import RealEnvironment, open_session

DRAWN = TokenLengths(10.0, 20, ((0.0, 0.0), (20.0, 1.0)))


def test_only_what_examples_can_be_drawn_from_will_do():
    space = load_space("tiny_cpu")
    for lengths in (None, TokenLengths(10.0, 20)):
        with pytest.raises(InputError, match="--lengths data draws examples"):
            require_lengths(dataclasses.replace(space, data=DataFacts(token_lengths=lengths)))
    require_lengths(dataclasses.replace(space, data=DataFacts(token_lengths=DRAWN)))


def test_trials_of_other_lengths_are_trials_of_something_else():
    space = dataclasses.replace(load_space("tiny_cpu"), data=DataFacts(token_lengths=DRAWN))
    longer = dataclasses.replace(space, data=DataFacts(token_lengths=TokenLengths(10.0, 30)))
    assert model_version(space, "full") == model_version(space)
    versions = {model_version(space), model_version(space, "data"), model_version(longer, "data")}
    assert len(versions) == 3


def test_an_encoder_refuses_lengths_that_it_does_not_train_on():
    environment = RealEnvironment("cpu", data=DataFacts(token_lengths=DRAWN))
    values = configuration("contrastive", micro_batch=2, max_length=16)
    with pytest.raises(InputError, match="only language models"):
        open_session(get_workload("contrastive"), TINY_ROBERTA, values, environment)


def test_a_command_reads_its_own_data(tmp_path):
    command = Command(("true",), str(tmp_path))
    job = TrialJob("command", None, get_gpu("a6000"), command=command)
    with pytest.raises(InputError, match="a command reads it"):
        COMMAND_TRIAL.prepare(job, MeasureOptions(device="cpu", lengths="data"))


@pytest.mark.parametrize("workers", [0, 1])
def test_the_longest_come_once_however_few_examples_there_are(workers):
    mixed = DataFacts(
        examples=2, token_lengths=TokenLengths(2.0, 8, ((2.0, 0.0), (2.0, 0.99), (8.0, 1.0)))
    )
    loader = build_loader(
        Loader(num_workers=workers), vocab_size=10, shape=(1, 8), data=mixed, full=3
    )
    batches = TokenBatches(loader, "cpu")
    lengths = [batches.next().inputs["input_ids"].shape[1] for _ in range(9)]
    batches.close()
    assert lengths == [8] * 3 + [2] * 6


def test_a_search_measures_on_the_lengths_that_were_asked_for():
    from tuner.app.measuring import Measuring
    from tuner.app.search.prepare import measure_options

    given = SimpleNamespace(
        budget_s=None, timeout_s=None, weights=None, lengths="data", whole_steps=True
    )
    found = measure_options(Measuring("cuda:0", ("GPU",), (1,), {}), given)
    assert (found.lengths, found.whole_steps, found.timeout_s) == ("data", True, None)
