"""An experiment on the Hugging Face Hub: a repository for every arm, because that is what loaders take a name of."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from experiment.settings import Settings
from hf_poslsh import push_to_hub
from hf_poslsh.hub import check_push


def check_names(settings: Settings, name: str) -> None:
    """Could every arm be published?

    Raises:
        ValueError: an arm makes a malformed name, there is no token, or adapters would name a folder as their base.
    """
    pretrained = settings.model.pretrained
    if settings.peft is not None and "base_model" not in settings.card and Path(str(pretrained)).exists():
        raise ValueError(
            f"adapters of the folder {pretrained!r} are of no use to others; add the name that this model has on the "
            "Hub: --set card.base_model=user/name."
        )
    for arm in settings.arms:
        check_push(f"{name}-{arm.name}")


def publish(console: Console, output: Path, settings: Settings, name: str) -> None:
    """Publishes the arms that have weights of their own, each with the results of all.

    Args:
        console: told what went where.
        output: folder of the experiment, complete.
        settings: of the experiment.
        name: the repositories are ``name`` and the arm's name, joined by a hyphen.

    Raises:
        ValueError: something can't be published; the message says how to go on.
    """
    results = [
        path
        for path in sorted(output.iterdir())
        if path.name in ("results.json", "report.md")
        or (path.suffix in (".csv", ".png") and not path.name.startswith("."))
    ]
    for arm in settings.arms:
        folder = output / arm.name
        if not any((folder / config).exists() for config in ("config.json", "adapter_config.json")):
            console.print(f"{arm.name}: not published, it has no weights of its own")
            continue
        try:
            commit = push_to_hub(
                folder,
                f"{name}-{arm.name}",
                files=results,
                base_model=settings.card.get("base_model"),
                metadata=settings.card,
            )
        except (ValueError, OSError, RuntimeError) as error:
            raise ValueError(
                f"{name}-{arm.name} was not published: {error}\nThe experiment is complete in {output}; repeat the "
                "command with --resume to publish it."
            ) from error
        console.print(f"{arm.name}: {commit}")
