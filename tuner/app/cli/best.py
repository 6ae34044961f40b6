"""`tuner best`: the recommendation, read from the journal of a search."""

from __future__ import annotations

import click

from tuner.app.cli.answers import print_recommendation
from tuner.app.cli.every_gpu import print_answers
from tuner.app.cli.next_commands import measure_command, use_commands, verify_command
from tuner.app.cli.options import examples, json_option
from tuner.app.cli.target_options import Selected, criteria_options, target_options
from tuner.app.recommendation import Criteria, answers, recommended
from tuner.report.terminal.render import echo, print_json


@click.command(
    "best",
    epilog=examples(
        "tuner best --space qlora27b --gpu a6000 --headroom 10%",
        "tuner best --space qlora27b --gpu all    # which GPU is cheapest per epoch?",
    ),
)
@target_options("The --model of the search.")
@criteria_options
@json_option
def command(
    *,
    selected: Selected,
    criteria: Criteria,
    as_json: bool,
) -> None:
    """Print the fastest configuration that fits, from a finished search.

    --gpu all compares every searched GPU type, --gpu a6000,t4 the named ones. Exit code 1 if
    nothing tried fits.
    """
    targets = selected.targets()
    if selected.is_several:
        print_answers(
            answers(targets, lambda target: recommended(target, criteria)), as_json=as_json
        )
        return
    target = targets[0]
    best = recommended(target, criteria)
    use = use_commands(target, criteria)
    measure = measure_command(target, best)
    if as_json:
        print_json({"by_gpus": [], **best.to_dict(), "use": list(use), "measure": measure})
        return
    echo(f"{target.space.name} on {target.gpu.name}: {target.space.subject_of(best.configuration)}")
    if target.known != target.folder:
        echo("from the results that come with tuner; nothing was searched here")
    print_recommendation(best, use=use, measure=measure, verify=verify_command(target, best))
