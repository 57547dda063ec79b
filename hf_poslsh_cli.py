"""The command line ``hf-poslsh``: what its commands are called and take. What they do is in ``hf_poslsh.cli``.

It stands outside of the package and imports it inside the commands: whatever imports ``hf_poslsh`` imports torch and
transformers, which takes seconds, and a question for help should not.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

_CODES = "Exit status: 0 done, 2 a mistake of the caller's (said on stderr), 1 anything else."


class _Group(TyperGroup):
    """Turns what the library says of a user's mistake into one message and exit status 2."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise
        except (ValueError, OSError, ImportError) as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(2) from error


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help=f"Positional LSH attention for Transformers checkpoints.\n\n{_CODES}",
)


class Dtype(str, enum.Enum):
    """Number formats of a cache or of weights."""

    float16 = "float16"
    bfloat16 = "bfloat16"
    float32 = "float32"
    float64 = "float64"


class Kind(str, enum.Enum):
    """Kinds of scores of heads."""

    planted = "planted"
    natural = "natural"


class Preset(str, enum.Enum):
    """Named methods."""

    paper = "paper"
    pretrained = "pretrained"


class Sampler(str, enum.Enum):
    """How hashes are drawn."""

    staggered = "staggered"
    iid = "iid"


Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout instead of text.")]
Batch = Annotated[int, typer.Option(min=1, help="Number of sequences.")]
CacheDtype = Annotated[Dtype | None, typer.Option(help="Of the KV cache; the checkpoint's by default.")]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="A field of PosLSHConfig; may be repeated. The value is JSON or a word."
    ),
]
Presets = Annotated[Preset | None, typer.Option(help="PosLSHConfig.paper() or .pretrained(), changed by --set.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace DST if it is a checkpoint.")]
Link = Annotated[
    bool,
    typer.Option("--link", help="Hard links to the weights instead of copies: what changes one file changes both."),
]
_NAME = "Folder or name on the Hub."


def _show(result: dict[str, Any], describe: Callable[[dict[str, Any]], str], as_json: bool) -> None:
    typer.echo(json.dumps(result, indent=2) if as_json else describe(result))


def _epilog(*examples: str) -> str:
    lines = "\n".join(f"  $ hf-poslsh {example}" for example in examples)
    return f"\b\nExamples:\n{lines}\n\n{_CODES}"


@app.command(
    epilog=_epilog(
        "info mistral-poslsh",
        "info mistral-poslsh --length 131072 --batch 4 --dtype bfloat16",
        "info my-adapter --json",
    )
)
def info(
    checkpoint: Annotated[str, typer.Argument(metavar="CHECKPOINT", help=_NAME, show_default=False)],
    length: Annotated[
        int | None, typer.Option(min=1, help="Tokens; by default as many as the config allows.")
    ] = None,
    batch: Batch = 1,
    dtype: CacheDtype = None,
    as_json: Json = False,
) -> None:
    """Say what is patched in a checkpoint, and its costs.

    Works on patched and unpatched checkpoints and on adapters. Reads configs, no weights.
    """
    from hf_poslsh.cli import info as command

    _show(command.inspect(checkpoint, length, batch, _value(dtype)), command.describe, as_json)


@app.command(
    epilog=_epilog(
        "patch Mistral-7B-v0.3 mistral-poslsh --preset pretrained",
        "patch my-model my-poslsh --set sigma=256 --set sink_tokens=1 --set layers=[0,1,2]",
    )
)
def patch(
    src: Annotated[Path, typer.Argument(metavar="SRC", help="Folder of an unpatched checkpoint.")],
    dst: Annotated[Path, typer.Argument(metavar="DST", help="Folder to make.")],
    settings: Settings = None,
    preset: Presets = None,
    overwrite: Overwrite = False,
    link: Link = False,
    as_json: Json = False,
) -> None:
    """Patch a checkpoint on disk.

    Writes what patch_model and save_pretrained would write, without loading the model: weights are copied.
    """
    from hf_poslsh.cli import checkpoints as command
    from hf_poslsh.cli.source import read_method

    method = read_method(settings or [], _value(preset))
    _show(command.patch_checkpoint(src, dst, method, overwrite=overwrite, link=link), command.describe, as_json)


@app.command(
    epilog=_epilog(
        "unpatch mistral-poslsh Mistral-7B-again",
        "unpatch mistral-poslsh Mistral-7B-again --link --overwrite",
    )
)
def unpatch(
    src: Annotated[Path, typer.Argument(metavar="SRC", help="Folder of a patched checkpoint.")],
    dst: Annotated[Path, typer.Argument(metavar="DST", help="Folder to make.")],
    overwrite: Overwrite = False,
    link: Link = False,
    as_json: Json = False,
) -> None:
    """Give the original checkpoint back.

    Writes the same weights under the config of the unpatched model.
    """
    from hf_poslsh.cli import checkpoints as command

    _show(command.unpatch_checkpoint(src, dst, overwrite=overwrite, link=link), command.describe, as_json)


@app.command(
    epilog=_epilog(
        "plan Qwen/Qwen3-0.6B --length 32768",
        "plan Qwen/Qwen3-0.6B --length 32768 --samples 20 --samples 100 --set sigma=256",
    )
)
def plan(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=_NAME)],
    length: Annotated[int, typer.Option(min=1, help="Tokens.")],
    samples: Annotated[
        list[int] | None, typer.Option(min=1, help="A number of samples; may be repeated. By default 8, 20, 64.")
    ] = None,
    settings: Settings = None,
    preset: Presets = None,
    delta: Annotated[float, typer.Option(help="Chance that a head exceeds its bound.")] = 0.01,
    batch: Batch = 1,
    dtype: CacheDtype = None,
    as_json: Json = False,
) -> None:
    """Compare numbers of samples for a model and a length.

    Shows error bounds, the windows of every head, cache and work. Reads configs, no weights.
    """
    from hf_poslsh.cli import plan as command
    from hf_poslsh.cli.source import read_method, read_source

    source = read_source(model)
    method = read_method(settings or [], _value(preset), source.method)
    counts = samples or [8, 20, 64]
    _show(command.plan(source, method, counts, length, batch, _value(dtype), delta), command.describe, as_json)


@app.command(
    epilog=_epilog(
        "draw masks.png --sigma 16 --samples 20 --length 128",
        "draw masks.png mistral-poslsh --layer 3 --head 7",
    )
)
def draw(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="File to write: .png, .svg or .pdf.")],
    checkpoint: Annotated[
        str | None, typer.Argument(metavar="[CHECKPOINT]", help="Draw its method. Folder or name on the Hub.")
    ] = None,
    sigma: Annotated[str | None, typer.Option(help="alibi, or a number of positions. [default: alibi]")] = None,
    samples: Annotated[int | None, typer.Option(help="Masks per head, s. [default: 20]")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the draws. [default: 0]")] = None,
    sampler: Annotated[Sampler | None, typer.Option(help="How masks are drawn. [default: staggered]")] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="Query heads. [default: 8]")] = None,
    length: Annotated[int, typer.Option(help="Positions to draw.")] = 128,
    layer: Annotated[int, typer.Option(help="Layer whose masks are drawn.")] = 0,
    head: Annotated[int | None, typer.Option(help="Head to draw; by default one that fits the length.")] = None,
    as_json: Json = False,
) -> None:
    """Draw masks and windows.

    A picture of the kernel L, the mean mask M~, single masks and the windows by head. Needs hf-poslsh[plots].
    """
    from hf_poslsh.cli import pictures as command
    from hf_poslsh.cli.source import read_method

    fields = {"sigma": sigma, "num_samples": samples, "seed": seed, "sampler": _value(sampler)}
    given = [f"{key}={value}" for key, value in fields.items() if value is not None]
    if checkpoint is None:
        subject = command.Subject(read_method(given), heads or 8, 1, "Positional LSH")
    elif given or heads:
        raise ValueError(
            f"{', '.join(given) or 'heads'}: with a checkpoint these are the checkpoint's; leave them out."
        )
    else:
        subject = command.Subject.of(checkpoint)
    _show(command.draw(out, subject, length, layer, head), command.describe, as_json)


@app.command(
    "retrieval-heads",
    epilog=_epilog(
        "retrieval-heads Qwen/Qwen3-0.6B --share 0.2 --output-dir heads",
        "retrieval-heads my-model --kind natural --text book.txt --length 8192",
    ),
)
def retrieval_heads(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=f"Unpatched. {_NAME}", show_default=False)],
    share: Annotated[float, typer.Option(help="How many of all KV heads are chosen.")] = 0.2,
    length: Annotated[int, typer.Option(min=2, help="Tokens of a prompt.")] = 2048,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts of each kind.")] = 4,
    seed: Annotated[int, typer.Option(min=0, help="Of planted numbers and random tokens.")] = 0,
    texts: Annotated[
        list[Path] | None,
        typer.Option(
            "--text", metavar="FILE", help="Text for the natural prompts; may be repeated. By default random tokens."
        ),
    ] = None,
    kind: Annotated[Kind, typer.Option(help="Scores that rank the heads.")] = Kind.planted,
    dtype: Annotated[Dtype, typer.Option(help="Of the weights.")] = Dtype.bfloat16,
    output_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Writes scores.json, poslsh.json and heads.png there.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Find the KV heads that fetch from afar.

    Scores heads by their attention to planted numbers and repeated passages, a few passes of the model, no training.
    """
    from hf_poslsh.cli import retrieval as command

    prompt = command.Prompts(length, prompts, seed, texts or None)
    result = command.find_heads(model, share, prompt, _value(kind), _value(dtype), output_dir)
    _show(result, command.describe, as_json)


@app.command(epilog=_epilog("demo", "demo --train"))
def demo(
    train: Annotated[
        bool, typer.Option("--train", help="Run the repository's demo instead, which trains two models: minutes.")
    ] = False,
    as_json: Json = False,
) -> None:
    """See the method at work, in seconds.

    A tiny random model is patched, checked and timed in memory. Nothing is written or fetched.
    """
    from hf_poslsh.cli import demo as command

    if train and as_json:
        raise ValueError("--train shows its own progress and writes results.json; leave out --json.")
    if train:
        raise typer.Exit(command.train())
    _show(command.run_demo(), command.describe, as_json)


def _value(choice: enum.Enum | None) -> Any:
    return None if choice is None else choice.value


if __name__ == "__main__":
    app(prog_name="hf-poslsh")
