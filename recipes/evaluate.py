"""Evaluates checkpoints on the same tokens and writes one report: results.json, results.csv, report.md and plots.

accelerate launch recipes/evaluate.py outputs/demo/plsh
accelerate launch recipes/evaluate.py outputs/seed*/{plsh,rope} --output_dir REPORT --set lengths=[512,8192]
accelerate launch recipes/evaluate.py CHECKPOINT --text my-novel.txt --data_dir . --set lengths=[512,8192]

Checkpoints of one arm that differ in the seed of training are averaged, with the spread between them.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from experiment.console import results_table, start_run, stop
from experiment.evaluating import Scored, score_checkpoint, summarize_runs
from experiment.files import read_json
from experiment.report import replaced, versions, write_results
from experiment.settings import EvaluationSettings, build, override
from experiment.sources import Text, read_texts

from hf_poslsh.evaluation import loss_difference, require_same_targets


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint to evaluate.

    Args:
        path: folder or name.
        arm: what it is called in the report; equal for runs that differ in the seed alone.
        seed: of its training, or None where no ``recipe.json`` says it.
        recipe: the content of its ``recipe.json``; empty where there is none.
    """

    path: str
    arm: str
    seed: int | None
    recipe: dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "checkpoint", nargs="+", help="folders that recipes/train.py wrote, or any checkpoints of transformers"
    )
    parser.add_argument(
        "--text", action="append", metavar="NAME", help="held-out file, in place of the recorded ones"
    )
    parser.add_argument("--data_dir", help="where the texts are; recipes/data by default")
    parser.add_argument("--set", action="append", metavar="KEY=VALUE", help="override, e.g. lengths=[512,8192]")
    parser.add_argument("--output_dir", help="folder for the report and the scores of every token")
    parser.add_argument(
        "--reference",
        action="append",
        metavar="ARM",
        help="arm that the others are compared with, the first by default; may be given several times",
    )
    parser.add_argument("--name", default="Evaluation on held-out text", help="title of the report")
    arguments = parser.parse_args()
    accelerator, console = start_run()
    try:
        checkpoints = [read_checkpoint(path) for path in arguments.checkpoint]
        arms = group(checkpoints)
        references = arguments.reference or [next(iter(arms))]
        for reference in references:
            if reference not in arms:
                raise ValueError(f"--reference is {reference!r}, which is not among the arms {', '.join(arms)}.")
        settings, texts = read_request(checkpoints, arguments.text, arguments.data_dir, arguments.set or [])
        scored = {}
        for checkpoint in checkpoints:
            title = f"evaluate {checkpoint.path}"
            scored[checkpoint.path] = score_checkpoint(accelerator, console, title, checkpoint.path, texts, settings)
            if arguments.output_dir and accelerator.is_main_process:
                save_scores(Path(arguments.output_dir), checkpoint, scored[checkpoint.path])
        runs = {arm: [scored[checkpoint.path] for checkpoint in members] for arm, members in arms.items()}
        results = {
            "name": arguments.name,
            "versions": versions(accelerator.device),
            **compare(runs, references, settings),
            "settings": {"evaluation": asdict(settings)},
        }
    except (ValueError, OSError) as error:
        stop(accelerator, error)
    for arm, members in arms.items():
        results["arms"][arm] |= {
            "poslsh": members[0].recipe.get("poslsh"),
            "seeds": [member.seed for member in members],
            "checkpoints": [Path(member.path).name for member in members],
        }
    lengths = {name: arm["lengths"] for name, arm in results["arms"].items()}
    console.print(results_table(lengths, f"held-out text, protocol {settings.protocol}"))
    if arguments.output_dir and accelerator.is_main_process:
        trained = {training_length(checkpoint) for checkpoint in checkpoints}
        write_results(Path(arguments.output_dir), results, trained.pop() if len(trained) == 1 else None)
        console.print(f"the report is in {arguments.output_dir}")
    accelerator.end_training()


def read_checkpoint(path: str) -> Checkpoint:
    """A checkpoint with what its ``recipe.json`` says of it; without one the arm is the folder's name."""
    recorded = Path(path) / "recipe.json"
    recipe = read_json(recorded) if recorded.exists() else {}
    return Checkpoint(path, recipe.get("arm", Path(path).name), recipe.get("seed"), recipe)


def training_length(checkpoint: Checkpoint) -> int | None:
    """Tokens of a training sequence, from the settings beside the checkpoint; None without either."""
    if checkpoint.recipe.get("training", {}).get("steps") == 0:
        return None
    settings = Path(checkpoint.path).parent / "settings.json"
    return read_json(settings)["training"]["length"] if settings.exists() else None


def group(checkpoints: list[Checkpoint]) -> dict[str, list[Checkpoint]]:
    """The checkpoints by arm, each arm's in the order of their seeds.

    Raises:
        ValueError: two checkpoints are the same arm and seed.
    """
    arms: dict[str, list[Checkpoint]] = {}
    for checkpoint in checkpoints:
        arms.setdefault(checkpoint.arm, []).append(checkpoint)
    for arm, members in arms.items():
        seeds = [member.seed for member in members]
        if len(set(seeds)) != len(seeds):
            raise ValueError(
                f"{', '.join(member.path for member in members)} are all arm {arm!r}, with the seeds {seeds}; "
                "evaluate each seed of an arm once."
            )
        members.sort(key=lambda member: (member.seed is None, member.seed))
    return arms


def read_request(
    checkpoints: list[Checkpoint], names: list[str] | None, data_dir: str | None, overrides: list[str]
) -> tuple[EvaluationSettings, list[Text]]:
    """The settings and texts: what the checkpoints' recipes say, unless the command line says otherwise.

    Raises:
        ValueError: neither says it, two recipes say different things, or a recorded text is not the one found.
    """
    requests = []
    for checkpoint in checkpoints:
        fields = dict(checkpoint.recipe.get("evaluation", {}))
        for text in overrides:
            override(fields, text)
        requests.append((build(EvaluationSettings, fields, "evaluation."), checkpoint.recipe.get("held_out", [])))
    settings, held_out = requests[0]
    for checkpoint, (other_settings, other_held_out) in zip(checkpoints, requests, strict=True):
        if other_settings != settings or (not names and other_held_out != held_out):
            raise ValueError(
                f"{checkpoint.path} and {checkpoints[0].path} record different evaluations; name all that differs: "
                "--text FILE --set KEY=VALUE."
            )
    if names:
        return settings, read_texts(names, data_dir)
    if not held_out:
        raise ValueError(f"{checkpoints[0].path} records no held-out text; name one: --text FILE --data_dir FOLDER.")
    texts = read_texts([text["name"] for text in held_out], data_dir)
    for text, expected in zip(texts, held_out, strict=True):
        if text.sha256 != expected["sha256"]:
            raise ValueError(
                f"{text.name!r} is not the text this checkpoint was evaluated on; point --data_dir to the original, "
                f"or --text {text.name} to evaluate on this one."
            )
    return settings, texts


def compare(runs: dict[str, list[Scored]], references: list[str], settings: EvaluationSettings) -> dict[str, Any]:
    """``protocol``, ``arms`` and, where there are several, ``differences``: as ``write_results`` takes them.

    Raises:
        ValueError: the checkpoints scored different tokens (their tokenizers differ), or in different precision.
    """
    every = {f"{arm}, run {index}": run for arm, members in runs.items() for index, run in enumerate(members)}
    first = next(iter(every.values()))
    for part in first.parts():
        require_same_targets({name: run.parts()[part] for name, run in every.items()}, "checkpoints")
    for name, run in every.items():
        if run.protocol["dtype"] != first.protocol["dtype"]:
            raise ValueError(
                f"{next(iter(every))} was read in {first.protocol['dtype']}, {name} in {run.protocol['dtype']}; "
                "choose one for all: --set dtype=float32."
            )
    results: dict[str, Any] = {
        "protocol": first.protocol,
        "arms": {arm: summarize_runs(members, settings) for arm, members in runs.items()},
    }
    if len(runs) > 1:
        results["differences"] = {
            reference: {arm: minus(runs[arm], runs[reference]) for arm in runs if arm != reference}
            for reference in references
        }
    return results


def minus(runs: list[Scored], reference: list[Scored]) -> dict[str, Any]:
    """What ``loss_difference`` returns, by length."""
    return {
        str(length): loss_difference(*([run.lengths[length] for run in of_arm] for of_arm in (runs, reference)))
        for length in runs[0].lengths
    }


def save_scores(output: Path, checkpoint: Checkpoint, scored: Scored) -> None:
    """Keeps the scores of every token in ``scores/``, an array per length and field, for other comparisons."""
    seed = "" if checkpoint.seed is None else f"-seed{checkpoint.seed}"
    path = output / "scores" / f"{checkpoint.arm}{seed}.npz"
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays = {
        f"{part}/{field}": array
        for part, scores in scored.parts().items()
        for field, array in scores.arrays().items()
    }
    with replaced(path) as partial:
        np.savez_compressed(partial, **arrays)


if __name__ == "__main__":
    main()
