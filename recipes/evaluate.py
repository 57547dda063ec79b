"""Repeats the evaluation of a checkpoint, or evaluates it on other texts and lengths.

accelerate launch recipes/evaluate.py outputs/demo/plsh
accelerate launch recipes/evaluate.py CHECKPOINT --text my-novel.txt --data_dir . --set lengths=[512,8192]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from experiment.console import results_table, start_run, stop
from experiment.corpus import Text, read_texts
from experiment.evaluating import evaluate_checkpoint
from experiment.files import read_json, write_json
from experiment.report import versions
from experiment.settings import EvaluationSettings, build, override


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="folder that recipes/train.py wrote, or any checkpoint of transformers")
    parser.add_argument(
        "--text", action="append", metavar="NAME", help="held-out file, in place of the recorded ones"
    )
    parser.add_argument("--data_dir", help="where the texts are; recipes/data by default")
    parser.add_argument("--set", action="append", metavar="KEY=VALUE", help="override, e.g. lengths=[512,8192]")
    parser.add_argument("--output", help="JSON file to write")
    arguments = parser.parse_args()
    accelerator, console = start_run()
    try:
        settings, texts = read_request(arguments)
        evaluation = evaluate_checkpoint(accelerator, console, "evaluate", arguments.checkpoint, texts, settings)
    except (ValueError, OSError) as error:
        stop(accelerator, error)
    console.print(results_table({Path(arguments.checkpoint).name: evaluation["lengths"]}, "held-out text"))
    if arguments.output and accelerator.is_main_process:
        content = {
            "checkpoint": Path(arguments.checkpoint).name,
            "versions": versions(accelerator.device),
            **evaluation,
        }
        write_json(Path(arguments.output), content)
    accelerator.end_training()


def read_request(arguments: argparse.Namespace) -> tuple[EvaluationSettings, list[Text]]:
    """The protocol and texts: what the checkpoint's recipe.json says, unless the command line says otherwise.

    Raises:
        ValueError: neither says it, or a recorded text is not the one that is found.
    """
    recorded = Path(arguments.checkpoint) / "recipe.json"
    recipe: dict[str, Any] = read_json(recorded) if recorded.exists() else {"evaluation": {}, "held_out": []}
    fields = dict(recipe["evaluation"])
    for text in arguments.set or []:
        override(fields, text)
    if arguments.text:
        return build(EvaluationSettings, fields, "evaluation."), read_texts(arguments.text, arguments.data_dir)
    if not recipe["held_out"]:
        raise ValueError(f"{arguments.checkpoint} records no held-out text; name one: --text FILE --data_dir FOLDER.")
    texts = read_texts([text["name"] for text in recipe["held_out"]], arguments.data_dir)
    for text, expected in zip(texts, recipe["held_out"], strict=True):
        if text.sha256 != expected["sha256"]:
            raise ValueError(
                f"{text.name!r} is not the text this checkpoint was evaluated on; point --data_dir to the original, "
                f"or --text {text.name} to evaluate on this one."
            )
    return build(EvaluationSettings, fields, "evaluation."), texts


if __name__ == "__main__":
    main()
