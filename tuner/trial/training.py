"""The work of a runner's processes: import the training libraries, then measure a training."""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import replace

from tuner.core.host import give_back_freed
from tuner.core.meanwhile import ASK_DRIVER, without_context
from tuner.core.records import Configuration, Measurement
from tuner.core.setup.distributed_knobs import Parallelism, gpus_per_trial
from tuner.core.setup.schemas import SCHEMAS
from tuner.trial.base import MeasureOptions, TrialJob
from tuner.trial.messages import Report
from tuner.trial.ranks import Rank, run_ranks


class Training:
    """Real training of the job's workload; see `TrialBody`."""

    def prepare(self, job: TrialJob, options: MeasureOptions) -> None:
        """Import the libraries, and the code of the job's model and workload."""
        import_libraries()
        from tuner.predict.training import get_workload
        from tuner.space.models.catalogue import resolve_config
        from tuner.trial import measure  # noqa: F401

        if job.code_path is not None:
            sys.path.insert(0, job.code_path)
        get_workload(job.workload)
        if job.model is not None:
            # The classes of a model's family are imported at the first use.
            from transformers import AutoModel, AutoModelForCausalLM

            family = type(resolve_config(job.model))
            for auto in (AutoModelForCausalLM, AutoModel):
                if family in auto._model_mapping:
                    auto._model_mapping[family]
        _warm_up()

    def measure(
        self, job: TrialJob, configuration: Configuration, options: MeasureOptions, report: Report
    ) -> Measurement:
        """See `tuner.trial.measure.measure`; on several GPUs a process for each does it."""
        from tuner.trial.measure import measure

        # Code of the user's own has names of its own, which mean what it says.
        count = gpus_per_trial(configuration) if job.workload in SCHEMAS else 1
        if count == 1:
            return measure(job, configuration, options, report)

        def one_rank(number: int, store: str, report: Report) -> Measurement:
            return measure_rank(job, configuration, options, report, Rank(number, count, store))

        return run_ranks(count, one_rank, report)


TRAINING = Training()


def measure_rank(
    job: TrialJob, configuration: Configuration, options: MeasureOptions, report: Report, rank: Rank
) -> Measurement:
    """Make this process one of several ranks, and return the rank's measurement."""
    from tuner.predict.training.parallel import import_strategy
    from tuner.trial.measure import measure

    rank.settle()
    parallelism = Parallelism.of(configuration)
    if options.device == "cpu" and not parallelism.is_replicated:
        give_back_freed()
    import_strategy(parallelism)
    limit_bytes = options.memory_limit_bytes
    if limit_bytes is not None and options.device == "cpu":
        limit_bytes //= rank.count  # the ranks share one machine
    options = replace(options, device=rank.device(options.device), memory_limit_bytes=limit_bytes)
    return measure(job, configuration, options, report, rank)


def import_libraries() -> None:
    """Import torch, transformers, peft and bitsandbytes without touching a device."""
    os.environ.update(ASK_DRIVER)  # of trials too, which are forks of this process
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with without_context():
        for name in (
            "bitsandbytes", "bitsandbytes.optim", "peft", "transformers.models.auto",
            "tuner.trial.device", "tuner.trial.device", "tuner.predict.training.causal_lm",
        ):  # fmt: skip
            importlib.import_module(name)


def _warm_up() -> None:
    """Adapt a model without data once, so that no trial pays for what libraries do only then.

    They import and compile patterns for a tenth of a second when the first model is adapted.
    Nothing is computed, so that no threads start.
    """
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, LlamaConfig

    sizes = {"hidden_size": 8, "intermediate_size": 8, "vocab_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, **heads))
        get_peft_model(model, LoraConfig(target_modules="all-linear"), low_cpu_mem_usage=True)
