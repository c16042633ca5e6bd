"""The command `bert-jax`. Each command is a thin caller of a function that Python code can call as well.

Libraries are imported inside the commands, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from transformer_jax import command
from transformer_jax.command import json_line

DESCRIPTION = "Pretrain BERT from your own text, go on after any stop, and take the model elsewhere."
CHECKPOINT = "a run folder (its newest step that verifies), RUN@STEP, or a Hugging Face folder"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code, see `transformer_jax.command.main`."""
    return command.main(_parser(), arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bert-jax", description=DESCRIPTION)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    command.add_prepare(commands, _prepare, "make the vocabulary and token shards of a run's corpora, with a report")
    command.add_training(commands, "pretrain", _pretrain)

    sub = command.add(
        commands, "evaluate", _evaluate, "MLM and NSP loss and accuracy on held-out text, with counts and baselines"
    )
    sub.add_argument("checkpoint", metavar="CHECKPOINT", help=CHECKPOINT)
    sub.add_argument("--data", metavar="RECIPE.toml", help="evaluate all documents of this recipe instead")
    sub.add_argument("--prepared", metavar="DIR", help="prepared data, where the checkpoint names none or it was moved")
    sub.add_argument(
        "--max-seq-length", metavar="N", type=int, default=0, help="of a row (default: the run's own, or 128)"
    )
    sub.add_argument("--json", action="store_true")

    sub = command.add(commands, "fill-mask", _fill_mask, "the best pieces for each [MASK], with probabilities")
    sub.add_argument("checkpoint", metavar="CHECKPOINT", help=CHECKPOINT)
    sub.add_argument("text", metavar="TEXT", nargs="+", help="text with [MASK] in it")
    sub.add_argument("--top-k", type=int, default=5)
    sub.add_argument("--json", action="store_true")

    sub = command.add(
        commands, "import", _import, "make a run from a Hugging Face folder, to go on training or to evaluate"
    )
    sub.add_argument("source", metavar="SOURCE", help="a folder with config.json, model.safetensors and vocab.txt")
    sub.add_argument("run", metavar="RUN", help="the run folder to make")
    sub.add_argument("--seed", type=int, default=0, help="draws the heads that the source lacks")

    sub = command.add(
        commands, "export", _export, "write a model for other programs; what was written is loaded again and compared"
    )
    sub.add_argument("checkpoint", metavar="CHECKPOINT", help=CHECKPOINT)
    sub.add_argument("out", metavar="OUT", help="the folder to write; it must not exist, or be empty")
    sub.add_argument("--format", choices=["huggingface"], default="huggingface")
    sub.add_argument("--overwrite", action="store_true", help="replace a folder that is there")

    command.add_plan(commands, _plan)
    command.add_report(commands, _report)
    command.add_verify(commands)
    return parser


def _prepare(args: argparse.Namespace, rest: list[str]) -> int:
    from bert_jax.prepare import prepare, report_text
    from bert_jax.run_file import load_run

    report = prepare(load_run(args.run, rest), workers=args.workers)
    print(json_line(report) if args.json else report_text(report))
    return 0


def _pretrain(args: argparse.Namespace, rest: list[str]) -> int:
    from bert_jax import run_file

    config = run_file.load_run(args.run, rest)
    if args.keys:
        run_file.override(config, ["--help"])
    command.keep_freed_memory()
    from bert_jax.pretrain import pretrain
    from bert_jax.run_page import write_run_page

    return command.training(
        lambda stop: pretrain(config, force=args.force, stop=stop), write_run_page, Path(config.run_dir), args.json
    )


def _evaluate(args: argparse.Namespace, rest: list[str]) -> int:
    from bert_jax.evaluate import evaluate, table

    scores = evaluate(args.checkpoint, args.data, args.prepared, args.max_seq_length)
    print(json_line(scores) if args.json else table(scores))
    return 0


def _fill_mask(args: argparse.Namespace, rest: list[str]) -> int:
    from bert_jax.fill_mask import fill_mask
    from bert_jax.loading import load

    found = fill_mask(load(args.checkpoint), args.text, args.top_k)
    if args.json:
        print(json_line(found))
        return 0
    for text, masks in zip(args.text, found, strict=True):
        print(text)
        for i, best in enumerate(masks):
            print(f"  [MASK] {i + 1}: " + "  ".join(f"{g.token} {g.probability:.3f}" for g in best))
    return 0


def _import(args: argparse.Namespace, rest: list[str]) -> int:
    from bert_jax.interop.huggingface import import_folder

    import_folder(args.source, args.run, seed=args.seed)
    print(args.run)
    return 0


def _export(args: argparse.Namespace, rest: list[str]) -> int:
    from bert_jax.interop.huggingface import export_checkpoint

    print(export_checkpoint(args.checkpoint, args.out, overwrite=args.overwrite))
    return 0


def _plan(args: argparse.Namespace, rest: list[str]) -> int:
    from bert_jax.plan import PROGRAM
    from bert_jax.run_file import load_run
    from transformer_jax import plan_command

    return plan_command.plan(args, PROGRAM, load_run(args.run, rest))


def _report(args: argparse.Namespace, rest: list[str]) -> int:
    from bert_jax.run_page import write_run_page

    print(write_run_page(Path(args.run)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
