"""Results as rows of a CSV file and as Markdown. No arithmetic but percent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hf_poslsh.evaluation.intervals import LEVEL
from hf_poslsh.evaluation.windows import PROTOCOLS

_VERDICT = (
    f"Bold: neither the interval over texts nor the {LEVEL:.0%} interval over the runs of training (Student's, "
    "paired by seed) holds 0. Otherwise other texts or other seeds may turn the order."
)
_NO_VERDICT = "An interval that holds 0 shows no difference; what other seeds would give is not known."


def rows_by_length(results: dict[str, Any]) -> list[dict[str, Any]]:
    """One row per arm, length and measure.

    Args:
        results: ``protocol`` (a mapping with ``name``) and ``arms``: for each, ``lengths``, what ``summarize``
            returned by length. Optionally ``differences``: for each arm of reference and each other arm, what
            ``loss_difference`` returned by length; its measure is ``loss_minus_<reference>``.

    Returns:
        Mappings with the keys ``protocol, arm, length, measure, value, low, high, resampled, units, runs, runs_std,
        tokens_scored``; None where there is nothing to say.
    """
    rows = []
    for arm, content in results["arms"].items():
        for length, summary in content["lengths"].items():
            place = {"protocol": results["protocol"]["name"], "arm": arm, "length": int(length)}
            rows += [{**place, **row} for row in _rows(summary)]
            for reference, others in results.get("differences", {}).items():
                if arm in others:
                    row = _difference_row(f"loss_minus_{reference}", others[arm][length])
                    rows.append({**place, **row, "tokens_scored": summary["tokens_scored"]})
    return rows


def rows_by_position(results: dict[str, Any]) -> list[dict[str, Any]]:
    """One row per arm, bucket of positions and measure: as ``rows_by_length``, ``from`` and ``to`` for ``length``."""
    return [
        {"protocol": "single-pass", "arm": arm, "from": bucket["from"], "to": bucket["to"], **row}
        for arm, content in results["arms"].items()
        for bucket in content.get("positions") or []
        for row in _rows(bucket)
    ]


def _rows(summary: dict[str, Any]) -> Iterator[dict[str, Any]]:
    intervals = summary["intervals"]
    for name, runs in summary["runs"].items():
        low, high = intervals[name] or (None, None)
        yield {
            "measure": name,
            "value": summary[name],
            "low": low,
            "high": high,
            "resampled": intervals["resampled"],
            "units": intervals["units"],
            "runs": len(runs),
            "runs_std": summary["runs_std"][name],
            "tokens_scored": summary["tokens_scored"],
        }


def _difference_row(name: str, difference: dict[str, Any]) -> dict[str, Any]:
    low, high = difference["interval"] or (None, None)
    return {
        "measure": name,
        "value": difference["loss"],
        "low": low,
        "high": high,
        "resampled": difference["resampled"],
        "units": difference["units"],
        "runs": None if difference["runs"] is None else len(difference["runs"]),
        "runs_std": difference["runs_std"],
    }


def markdown_report(results: dict[str, Any]) -> str:
    """All arms in tables: each measure by length, differences to the reference arm, loss by position.

    A cell is the figure, its interval over texts in brackets, and, after ±, the standard deviation between runs.

    Args:
        results: as of ``rows_by_length``, and ``name``; an arm may have ``positions``, what ``by_position`` returned,
            and ``retrieval``, what ``summarize_retrieval`` returned.
    """
    arms, protocol = results["arms"], results["protocol"]
    first = next(iter(next(iter(arms.values()))["lengths"].values()))
    lengths = list(next(iter(arms.values()))["lengths"])
    parts = [f"# {results['name']}\n", _explanation(results, first)]
    for measure in first["runs"]:
        digits, factor, unit = _format(measure)
        rows = [
            [arm, *(_cell(content["lengths"][length], measure, digits, factor) for length in lengths)]
            for arm, content in arms.items()
        ]
        heading = measure.replace("_", " ").replace("top ", "top-").capitalize()
        parts.append(f"## {heading}{unit}, by context length\n\n{_table(['arm', *lengths], rows)}")
    for reference, others in results.get("differences", {}).items():
        rows = [[arm, *(_difference_cell(of_arm[length]) for length in lengths)] for arm, of_arm in others.items()]
        judged = any(of_arm[lengths[0]]["established"] is not None for of_arm in others.values())
        parts.append(
            f"## Loss minus that of {reference}, paired, by context length\n\n"
            f"Nats per token, below 0 where the arm is better. {_VERDICT if judged else _NO_VERDICT}\n\n"
            f"{_table(['arm', *lengths], rows)}"
        )
    positions = {arm: content["positions"] for arm, content in arms.items() if content.get("positions")}
    if positions:
        buckets = next(iter(positions.values()))
        rows = [[arm, *(_cell(b, "loss", 3, 1) for b in of_arm)] for arm, of_arm in positions.items()]
        head = [f"{bucket['from']}-{bucket['to']}" for bucket in buckets]
        parts.append(
            f"## Loss by position in one pass of {protocol['single_pass']['length']} tokens\n\n"
            "Nats per token. The text differs between positions: compare arms at one position, not positions.\n\n"
            f"{_table(['arm', *head], rows)}"
        )
    asked = [content["retrieval"] for content in arms.values() if content.get("retrieval")]
    parts += [part for task in (asked[0] if asked else []) for part in _retrieval_tables(results, task)]
    return "\n".join(parts)


def _retrieval_tables(results: dict[str, Any], task: str) -> Iterator[str]:
    arms = {arm: content["retrieval"][task] for arm, content in results["arms"].items() if content.get("retrieval")}
    asked, first = results["protocol"]["retrieval"], next(iter(arms.values()))
    around = "the repeated filler" if asked["text"] is None else f"`{asked['text']}`"
    head = [str(row["length"]) for row in first["lengths"]]
    rows = [
        [arm, *(_text(row["accuracy"], row["interval"], None, ".0f", 100) for row in found["lengths"])]
        for arm, found in arms.items()
    ]
    yield (
        f"## Retrieval, {task}: answers that are right (%), by length\n\n"
        f"{first['lengths'][0]['questions']} questions per length, answered {asked['answered']}, in {around}. "
        f"Brackets: {LEVEL:.0%} interval of Wilson, over the questions.\n\n{_table(['arm', *head], rows)}"
    )
    rows = []
    for arm, found in arms.items():
        cells = {(str(cell["length"]), cell["depth"]): cell["accuracy"] for cell in found["cells"]}
        for depth in dict.fromkeys(cell["depth"] for cell in found["cells"]):
            rows.append([arm, f"{depth:g}", *(f"{100 * cells[length, depth]:.0f}" for length in head)])
    yield (
        f"## Retrieval, {task}: answers that are right (%), by depth and length\n\n"
        f"{first['cells'][0]['trials']} questions per cell.\n\n{_table(['arm', 'depth', *head], rows)}"
    )


def rows_of_retrieval(results: dict[str, Any]) -> list[dict[str, Any]]:
    """One row per task, arm and length: the keys ``task, arm, length, questions, accuracy, low, high, runs``."""
    return [
        {
            "task": task,
            "arm": arm,
            **{key: row[key] for key in ("length", "questions", "accuracy")},
            "low": row["interval"][0],
            "high": row["interval"][1],
            "runs": len(row["runs"]),
        }
        for arm, content in results["arms"].items()
        for task, found in (content.get("retrieval") or {}).items()
        for row in found["lengths"]
    ]


def rows_of_cells(results: dict[str, Any], task: str) -> list[dict[str, Any]]:
    """One row per arm, length and depth of a task: the keys ``arm, length, depth, trials, accuracy, runs``."""
    return [
        {"arm": arm, **cell, "runs": len(cell["runs"])}
        for arm, content in results["arms"].items()
        for cell in (content.get("retrieval") or {}).get(task, {}).get("cells", [])
    ]


def _explanation(results: dict[str, Any], summary: dict[str, Any]) -> str:
    protocol = results["protocol"]
    texts = ", ".join(f"`{text['name']}` ({text['tokens_scored']})" for text in protocol["texts"])
    runs = len(summary["runs"]["loss"])
    intervals = summary["intervals"]
    lines = [
        f"Protocol `{protocol['name']}`: {PROTOCOLS[protocol['name']]}.",
        f"{summary['tokens_scored']} tokens are scored, all of the same weight: {texts}.",
        f"Brackets: {LEVEL:.0%} interval by bootstrap over {intervals['units']} {intervals['resampled']}."
        if intervals["loss"]
        else f"No intervals: {intervals['units']} {intervals['resampled']} are too few.",
    ]
    if runs > 1:
        lines.append(f"After ±: standard deviation between {runs} runs of training; the figure is their mean.")
    return "\n".join(lines) + "\n"


def _format(measure: str) -> tuple[int, float, str]:
    if measure.endswith("_accuracy"):
        return 2, 100.0, " (%)"
    return (1, 1.0, "") if measure == "perplexity" else (3, 1.0, "")


def _cell(summary: dict[str, Any], measure: str, digits: int, factor: float) -> str:
    return _text(summary[measure], summary["intervals"][measure], summary["runs_std"][measure], f".{digits}f", factor)


def _difference_cell(difference: dict[str, Any]) -> str:
    text = _text(difference["loss"], difference["interval"], difference["runs_std"], "+.3f", 1)
    return f"**{text}**" if difference["established"] else text


def _text(value: float, interval: Sequence[float] | None, std: float | None, how: str, factor: float) -> str:
    text = format(factor * value, how)
    if interval is not None:
        text += f" [{factor * interval[0]:{how}}, {factor * interval[1]:{how}}]"
    return text if std is None else f"{text} ± {factor * std:{how.removeprefix('+')}}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
