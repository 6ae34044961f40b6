"""`tuner estimate`: the memory and speed of one configuration on one GPU, without running it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from tuner.cli.options import (
    examples,
    gpu_options,
    json_option,
    model_option,
    parse_margin,
    set_option,
    space_option,
)

if TYPE_CHECKING:
    from tuner.estimators.speed.profile import DeviceProfile
    from tuner.estimators.stages import StagedPrediction
    from tuner.gpus import Gpu
    from tuner.records import Configuration, Prediction
    from tuner.space import SearchSpace


@click.command(
    "estimate",
    short_help="Predict memory and speed of one configuration.",
    epilog=examples(
        "tuner estimate --space qlora27b --gpu a6000 --set micro_batch=4 --set lora_rank=128",
        "tuner estimate --model mistral-7b-v0.3 --gpu rtx4090 --set precision=nf4 --json",
    ),
)
@space_option(required=False)
@model_option("Model in place of the space's; without --space, with defaults for all settings.")
@gpu_options
@set_option
@click.option("--margin", metavar="SHARE", help="Memory to keep free. [default: 3%]")
@json_option
def command(  # noqa: PLR0913 - one argument for each option
    *,
    space_name: str | None,
    model: str | None,
    gpu_name: str,
    gpu_memory: int | None,
    price: float | None,
    settings: tuple[str, ...],
    margin: str | None,
    as_json: bool,
) -> None:
    """Predict memory and speed of one configuration; nothing is run and nothing is written.

    Exit code 0 whether it fits or not: see `fits`.
    """
    from tuner.cli.device import find_gpu, with_profile
    from tuner.cli.quiet import quiet_libraries
    from tuner.cli.render import print_fields, print_json, settings_text
    from tuner.cli.stages import print_staged, staged_to_dict
    from tuner.results.facts import SpaceFacts

    gpu = find_gpu(gpu_name, memory_bytes=gpu_memory, price_usd_per_hour=price)
    fraction = parse_margin(margin, gpu)
    space, configuration = one_configuration(space_name, model, settings)
    with quiet_libraries():
        gpu, profile = with_profile(gpu, quiet=False, err=True)
        staged = (
            predict_stages_of(space, configuration, gpu, fraction, profile)
            if space.stages
            else None
        )
        prediction = (
            staged.overall
            if staged is not None
            else predict_one(space, configuration, gpu, fraction, profile)
        )
    if as_json:
        stages = staged_to_dict(staged) if staged else {}
        print_json({**_to_dict(space, configuration, prediction), **stages})
        return
    print_fields(
        [
            ("model", str(space.model)),
            ("GPU", gpu.name),
            ("settings", settings_text(configuration)),
        ]
    )
    from tuner.cli.evidence import print_evidence

    print_evidence(prediction, gpu, fits=prediction.fits)
    if staged is not None:
        print_staged(staged, configuration, SpaceFacts.of(space))


def one_configuration(
    space_name: str | None, model: str | None, texts: tuple[str, ...]
) -> tuple[SearchSpace, Configuration]:
    """The configuration that `--space` or `--model` and `--set` name, with its space."""
    from tuner.cli.target import with_model
    from tuner.space import default_space, load_space, parse_settings

    settings = parse_settings(texts)
    if space_name is not None:
        space = with_model(load_space(space_name), model)
    elif model is not None:
        space = default_space(model, settings)
    else:
        raise click.UsageError("Missing option '--space' or '--model'.")
    return space, space.configuration(settings, strict=False)


def predict_one(
    space: SearchSpace,
    configuration: Configuration,
    gpu: Gpu,
    margin_fraction: float | None,
    profile: DeviceProfile | None,
) -> Prediction:
    """The prediction of one configuration. Raises `InputError` when the GPU cannot run it."""
    from tuner.cli.support import require_supported
    from tuner.estimators.predictor import Job, Predictor

    model = space.predicted_model()
    require_supported(configuration, gpu)
    predictor = Predictor(Job(space.workload, model))
    return predictor.predict(
        [configuration], gpu, margin_fraction=margin_fraction, profile=profile
    )[0]


def predict_overall_of(
    space: SearchSpace,
    configuration: Configuration,
    gpu: Gpu,
    margin_fraction: float | None,
    profile: DeviceProfile | None,
) -> Prediction:
    """The prediction of one configuration, of all stages together where there are some."""
    if not space.stages:
        return predict_one(space, configuration, gpu, margin_fraction, profile)
    return predict_stages_of(space, configuration, gpu, margin_fraction, profile).overall


def predict_stages_of(
    space: SearchSpace,
    configuration: Configuration,
    gpu: Gpu,
    margin_fraction: float | None,
    profile: DeviceProfile | None,
) -> StagedPrediction:
    """One configuration in every stage of its space; see `predict_one`."""
    from tuner.cli.support import require_supported
    from tuner.estimators.predictor import Job, Predictor
    from tuner.estimators.stages import predict_stages

    model = space.predicted_model()
    for values in space.stage_configurations(configuration).values():
        require_supported(values, gpu)
    predictor = Predictor(Job(space.workload, model))

    def predict(configurations: Sequence[Configuration]) -> list[Prediction]:
        return predictor.predict(
            configurations, gpu, margin_fraction=margin_fraction, profile=profile
        )

    return predict_stages(space, [configuration], predict)[0]


def _to_dict(
    space: SearchSpace, configuration: Configuration, prediction: Prediction
) -> dict[str, Any]:
    from tuner.runner.base import outcome_versions

    return {
        "space": space.name if space.path is not None else None,
        "model": space.model,
        **prediction.to_dict(),
        "configuration": configuration.to_dict(),
        "versions": outcome_versions(),
    }
