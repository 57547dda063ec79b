"""Trains the arms of an experiment on the same batches, evaluates them on the same tokens, writes a report.

accelerate launch recipes/train.py --config recipes/configs/demo.yaml
"""

from __future__ import annotations

import argparse
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiment.arms import adapt, build_model, poslsh_config, whole_models
from experiment.console import results_table, start_run, start_trackers, stop
from experiment.evaluating import evaluate_checkpoint
from experiment.files import finish_folder, lock_folder, partial_folder, read_json, write_json
from experiment.preparing import Experiment, prepare
from experiment.publishing import check_names, publish
from experiment.report import versions, write_report
from experiment.settings import ArmSettings, load_settings
from experiment.training import train

from hf_poslsh import set_step

if TYPE_CHECKING:
    from accelerate import Accelerator
    from rich.console import Console


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="YAML file; its keys are in recipes/experiment/settings.py")
    parser.add_argument("--output_dir", help="in place of the config's")
    parser.add_argument("--set", action="append", metavar="KEY=VALUE", help="override, e.g. training.steps=100")
    parser.add_argument("--resume", action="store_true", help="continue what the output folder holds")
    parser.add_argument("--push_to_hub", metavar="ID", help="publish every arm on the Hugging Face Hub, as ID-ARM")
    arguments = parser.parse_args()
    accelerator, console = start_run()
    try:
        settings = load_settings(arguments.config, arguments.set)
        settings.output_dir = arguments.output_dir or settings.output_dir
        if arguments.push_to_hub:
            check_names(settings, arguments.push_to_hub)
        experiment = prepare(settings, accelerator, arguments.resume)
        if accelerator.is_main_process:
            lock_folder(experiment.output)
    except ValueError as error:
        stop(accelerator, error)
    start_trackers(accelerator, settings.trackers, settings.name, experiment.output / "logs", settings.to_dict())
    evaluations = {}
    for arm in settings.arms:
        if not (experiment.output / arm.name).exists():
            make_arm(accelerator, console, experiment, arm)
        evaluations[arm.name] = evaluate_arm(accelerator, console, experiment, arm)
    if accelerator.is_main_process:
        results = collect(experiment, evaluations, versions(accelerator.device))
        write_report(experiment.output, results)
        lengths = {name: arm["lengths"] for name, arm in results["arms"].items()}
        console.print(results_table(lengths, f"{settings.name}, held-out text, the same targets at every length"))
        console.print(f"results.json, perplexity.png, README.md and the checkpoints are in {experiment.output}")
    accelerator.end_training()
    if arguments.push_to_hub and accelerator.is_main_process:
        try:
            publish(console, experiment.output, settings, arguments.push_to_hub)
        except ValueError as error:
            stop(accelerator, error)


def make_arm(accelerator: Accelerator, console: Console, experiment: Experiment, arm: ArmSettings) -> None:
    """Puts the arm's checkpoint in place, complete or not at all."""
    settings, checkpoint = experiment.settings, experiment.output / arm.name
    states = experiment.output / "state" / arm.name
    if arm.train:
        report = train_arm(accelerator, console, experiment, arm, states)
    else:
        report = {"parameters": experiment.parameters, "steps": 0, "tokens": 0}
    if accelerator.is_main_process:
        partial = partial_folder(checkpoint)
        shutil.rmtree(partial, ignore_errors=True)  # what an interrupted run may have left
        if arm.train:
            shutil.copytree(states / "best", partial, ignore=shutil.ignore_patterns("kept.json"))
        experiment.tokenizer.save_pretrained(partial)
        recipe = {
            "experiment": settings.name,
            "arm": arm.name,
            "poslsh": arm.poslsh,
            "seed": settings.seed,
            "versions": versions(accelerator.device),
            "training": report,
            "evaluation": settings.to_dict()["evaluation"],
            "held_out": [{"name": text.name, "sha256": text.sha256} for text in experiment.held_out],
            "settings": settings.to_dict(),
        }
        write_json(partial / "recipe.json", recipe)
        finish_folder(checkpoint)
        shutil.rmtree(states.parent, ignore_errors=True)
    accelerator.wait_for_everyone()


def train_arm(
    accelerator: Accelerator, console: Console, experiment: Experiment, arm: ArmSettings, states: Path
) -> dict[str, Any]:
    """Trains one arm; its best checkpoint is in ``states / "best"`` afterwards."""
    settings, method = experiment.settings, poslsh_config(arm)

    def save(model: Any, folder: Path) -> None:
        accelerator.unwrap_model(model).save_pretrained(
            folder, is_main_process=accelerator.is_main_process, state_dict=accelerator.get_state_dict(model)
        )

    def fresh() -> Any:  # held by the training alone: what evaluates needs the memory
        # ZeRO-3 would draw other random weights than the seed gives; pretrained ones it may share out while reading.
        with whole_models(accelerator) if settings.model.pretrained is None else nullcontext():
            return adapt(build_model(experiment.config, settings, arm), settings)

    report = train(
        accelerator,
        console,
        f"train {arm.name}",
        fresh(),
        experiment.sequences,
        settings.training,
        states,
        save,
        experiment.validation,
        on_step=set_step if method is not None and method.resample == "step" else None,
    )
    accelerator.free_memory()
    return report


def evaluate_arm(
    accelerator: Accelerator, console: Console, experiment: Experiment, arm: ArmSettings
) -> dict[str, Any]:
    """The arm's evaluation: of the checkpoint as it was saved, once."""
    checkpoint = experiment.output / arm.name
    recorded = checkpoint / "evaluation.json"
    if recorded.exists():
        return read_json(recorded)
    evaluation = evaluate_checkpoint(
        accelerator, console, f"evaluate {arm.name}", checkpoint, experiment.held_out, experiment.settings.evaluation
    )
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        write_json(recorded, evaluation)
    return evaluation


def collect(experiment: Experiment, evaluations: dict[str, Any], used: dict[str, str]) -> dict[str, Any]:
    """The content of results.json."""
    recipes = {name: read_json(experiment.output / name / "recipe.json") for name in evaluations}
    return {
        "name": experiment.settings.name,
        "seed": experiment.settings.seed,
        "versions": used,
        "protocol": next(iter(evaluations.values()))["protocol"],
        "arms": {
            name: {
                "poslsh": recipes[name]["poslsh"],
                "training": recipes[name]["training"],
                "lengths": evaluation["lengths"],
                "positions": evaluation["positions"],
                "passkeys": evaluation["passkeys"],
                "retrieval": evaluation.get("retrieval"),
            }
            for name, evaluation in evaluations.items()
        },
        "settings": experiment.settings.to_dict(),
    }


if __name__ == "__main__":
    main()
