"""The model card of a checkpoint: rendered from a template, merged into the card that is there already."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData

TEMPLATES = Path(__file__).parent / "templates"
START = "<!-- hf-poslsh: every push rewrites what follows; write above this line or below the end -->"
END = "<!-- hf-poslsh: end -->"
_SOURCE = "hf-poslsh"  # tells our evaluation results from the user's


def eval_results(evaluation: Mapping[str, Any], suffix: str = "", source_url: str | None = None) -> list[EvalResult]:
    """The results of an evaluation for the metadata of a card.

    Args:
        evaluation: ``protocol`` and ``lengths``, as in the ``evaluation.json`` that the recipes write.
        suffix: ends the name of every metric.
        source_url: page that the results are from. They are marked as ours then, for ``merge_card``.
    """
    texts = ", ".join(text["name"] for text in evaluation["protocol"]["texts"] if text["tokens_scored"])
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type="text",
            dataset_name=texts,
            dataset_config=evaluation["protocol"]["name"],
            metric_type=kind,
            metric_name=f"{label} at {length} tokens{suffix}",
            metric_value=round(summary[key], 4),
            source_name=None if source_url is None else _SOURCE,
            source_url=source_url,
        )
        for length, summary in evaluation["lengths"].items()
        for kind, label, key in _metrics(summary)
    ]


def _metrics(summary: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    accuracies = [key for key in summary if key.endswith("_accuracy")]
    return [
        ("perplexity", "Perplexity", "perplexity"),
        *(
            ("accuracy", key.replace("_", "-").replace("-accuracy", " accuracy").capitalize(), key)
            for key in accuracies
        ),
    ]


def checkpoint_card(data: ModelCardData, **facts: Any) -> ModelCard:
    """A new card, from ``templates/checkpoint.md``.

    Args:
        data: its metadata.
        **facts: what the template asks for.
    """
    return ModelCard.from_template(
        data, template_path=str(TEMPLATES / "checkpoint.md"), start=START, end=END, **facts
    )


def merge_card(existing: str, new: ModelCard) -> ModelCard:
    """A card with the user's text and metadata and ours: the part between our marks, and the metadata that we know.

    Of the metadata, tags are united, evaluation results of ours take the place of earlier ones of ours, and every
    other field of ``new`` takes the place of the old one. What ``new`` does not have stays.

    Args:
        existing: the text of the card that is there.
        new: a card of ``checkpoint_card``.

    Returns:
        The merged card.

    Raises:
        ValueError: the existing card can't be read, or lacks one of our two marks.
    """
    try:
        card = ModelCard(existing)
    except (yaml.YAMLError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"the metadata of the existing README.md can't be read ({error}); mend it there.") from error
    card.text = _merge_text(card.text, new.text)
    data, ours = cast(ModelCardData, card.data), cast(ModelCardData, new.data)
    results = [result for result in data.eval_results or [] if result.source_name != _SOURCE]
    results += ours.eval_results or []
    name = data.model_name or ours.model_name
    tags = [*_tags(data.tags), *_tags(ours.tags)]
    for key, value in vars(ours).items():
        if value is not None:
            data[key] = value
    data.tags = list(dict.fromkeys(tags)) or None
    data.eval_results, data.model_name = results or None, name if results else None
    return card


def _tags(tags: Any) -> list[str]:
    tags = [tags] if isinstance(tags, str) else list(tags or [])
    # PEFT makes a tag of the base model's name, which is no name on the Hub where the base was patched in memory.
    return [tag for tag in tags if not tag.startswith("base_model:adapter:poslsh:")]


def _merge_text(old: str, new: str) -> str:
    _, start, rest = new.partition(START)
    ours = start + rest.partition(END)[0] + END
    above, start, rest = old.partition(START)
    if not start and END not in old:
        # PEFT saves an empty form with every adapter: nothing to keep.
        written = old.strip().removeprefix(ModelCard.from_template(ModelCardData()).text.strip()).strip()
        if not written:
            return new
        return f"{written}\n\n{ours}\n" if written == old.strip() else f"{new.rstrip()}\n\n{written}\n"
    _, end, below = rest.partition(END)
    if not start or not end:
        raise ValueError(f"the existing README.md has one of these lines without the other; mend it:\n{START}\n{END}")
    return above + ours + below
