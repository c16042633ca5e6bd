"""The commands that look into a model without training it: `embed`, `probe` and `attention`."""

from __future__ import annotations

import argparse
from typing import Any

from transformer_jax import command
from transformer_jax.config import UserError

CHECKPOINT = "a run folder, RUN@STEP, a Hugging Face or TensorFlow 1 folder, or a fine-tuned run"
LAST_FOUR = "last4"


def add(commands: Any) -> None:
    """Add the commands to the sub-parsers `commands`."""
    sub = command.add(commands, "embed", _embed, "features of each line of a text, as a .npy or .parquet file")
    sub.add_argument("checkpoint", metavar="CHECKPOINT", help=CHECKPOINT)
    sub.add_argument("file", metavar="FILE", nargs="?", help="a text a line, .gz or not (default: standard input)")
    sub.add_argument("--out", metavar="FEATURES", required=True, help="a name that ends in .npy or .parquet")
    sub.set_defaults(writes=("out",))
    _add_features(sub, ["mean", "cls", "pooled", "tokens"])
    sub.add_argument("--dtype", choices=["float32", "float16"], default="float32")
    sub.add_argument("--max-seq-length", metavar="N", type=int, default=0, help="of a row (default: all positions)")
    sub.add_argument("--long-text", choices=["cut", "windows"], default="cut", help="windows are averaged")
    sub.add_argument("--stride", metavar="N", type=int, default=0, help="of windows (default: half of the room)")
    sub.add_argument("--encoding-errors", choices=["strict", "replace"], default="strict")
    sub.add_argument("--overwrite", action="store_true", help="replace files that are there")

    sub = command.add(commands, "probe", _probe, "a linear model on frozen features, scored on a task", True)
    sub.add_argument("task", metavar="TASK.toml", help="as for finetune; any key can be given as --section.key value")
    sub.add_argument(
        "--from", dest="checkpoint", metavar="CHECKPOINT", required=True, action="append",
        help=f"{CHECKPOINT}; given more than once, their features stand beside each other",
    )  # fmt: skip
    _add_features(sub, ["mean", "cls", "pooled"])
    sub.add_argument("--json", action="store_true", help="the figures as JSON")

    sub = command.add(commands, "attention", _attention, "a page with the attention weights of every layer and head")
    sub.add_argument("checkpoint", metavar="CHECKPOINT", help=CHECKPOINT)
    sub.add_argument("text", metavar="TEXT")
    sub.add_argument("text_b", metavar="TEXT_B", nargs="?", help="the second text of a pair")
    sub.add_argument("--out", metavar="PAGE.html", required=True, help="one file, which needs no network")
    sub.set_defaults(writes=("out",))


def _add_features(sub: argparse.ArgumentParser, which: list[str]) -> None:
    sub.add_argument("--features", choices=which, default="mean", help="of a text, or of every piece (default: mean)")
    sub.add_argument(
        "--layers", metavar="N", nargs="+", default=["-1"], help=f"0 (embeddings) to the last; -1, -2 ...; {LAST_FOUR}"
    )
    sub.add_argument("--join", choices=["concat", "sum"], default="concat", help="of several layers")
    sub.add_argument("--batch-tokens", metavar="N", type=int, default=8192, help="on each device (default: 8192)")
    sub.add_argument("--precision", choices=["highest", "high", "default"], default="highest", help="of GPU and TPU")


def layers(words: list[str]) -> tuple[int, ...]:
    """The numbers that `--layers` names."""
    if words == [LAST_FOUR]:
        return (-4, -3, -2, -1)
    try:
        return tuple(int(word) for word in words)
    except ValueError:
        raise UserError(
            f"--layers is {' '.join(words)!r}; give numbers, such as -2 or 9 10 11, or {LAST_FOUR}"
        ) from None


def _features(args: argparse.Namespace) -> dict[str, Any]:
    names = ("features", "join", "batch_tokens", "precision")
    return {"layers": layers(args.layers)} | {name: getattr(args, name) for name in names}


def _embed(args: argparse.Namespace, rest: list[str]) -> int:
    from bert_jax.embed import EmbedConfig, embed_file
    from transformer_jax.report import quiet_libraries

    quiet_libraries()
    command.keep_programs()
    own = {name: getattr(args, name) for name in ("dtype", "max_seq_length", "long_text", "stride")}
    settings = EmbedConfig(**_features(args), **own)
    embed_file(
        args.checkpoint,
        args.file,
        args.out,
        settings,
        overwrite=args.overwrite,
        encoding_errors=args.encoding_errors,
    )
    return 0


def _probe(args: argparse.Namespace, rest: list[str]) -> int:
    from bert_jax.featurizer import FeatureConfig
    from bert_jax.finetune.task_file import load_task
    from bert_jax.probe import probe, table
    from transformer_jax.report import quiet_libraries

    task, settings = load_task(args.task, rest), FeatureConfig(**_features(args))
    quiet_libraries()
    command.keep_programs()
    found = probe(task, args.checkpoint, settings)
    print(command.json_line(found) if args.json else table(found))
    return 0


def _attention(args: argparse.Namespace, rest: list[str]) -> int:
    from bert_jax.attention import write_page
    from transformer_jax.report import quiet_libraries

    quiet_libraries()
    command.keep_programs()
    write_page(args.checkpoint, args.text, args.text_b, args.out)
    print(args.out)
    return 0
