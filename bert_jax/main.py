"""The command `bert-jax`. Each command is a thin caller of a function that Python code can call as well.

Libraries are imported inside the commands, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from bert_jax import inspect_commands
from transformer_jax import command, storage
from transformer_jax.command import json_line
from transformer_jax.config import UserError

DESCRIPTION = "Pretrain BERT from your own text, fine-tune it, and take it elsewhere."
CHECKPOINT = "a run folder (its newest step that verifies), RUN@STEP, or a Hugging Face or TensorFlow 1 folder"
FORMATS = ("huggingface", "onnx", "stablehlo", "tf1", "sentence-transformers")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code, see `transformer_jax.command.main`."""
    return command.main(_parser(), arguments)


def _parser() -> argparse.ArgumentParser:
    parser = command.parser("bert-jax", DESCRIPTION)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    command.add_prepare(commands, _prepare, "make the vocabulary and token shards of a run's text")
    command.add_training(commands, "pretrain", _pretrain)

    sub = command.add(commands, "finetune", _finetune, "fine-tune a checkpoint on a task, and evaluate it", True)
    sub.add_argument(
        "task", metavar="TASK.toml", help="a task file; any of its keys can be given as --section.key value"
    )
    sub.add_argument("--from", dest="checkpoint", metavar="CHECKPOINT", help=f"{CHECKPOINT}, or a fine-tuned run")
    sub.add_argument("--random", action="store_true", help="take its settings and tokenizer only: random parameters")
    sub.add_argument("--out", metavar="RUN", help="the run folder (default: runs/NAME of the task)")
    sub.add_argument("--keys", action="store_true", help="list all keys with their present values, and stop")
    sub.add_argument("--force", action="store_true", help="go on although changed settings make it another run")
    sub.add_argument("--json", action="store_true", help="the results as JSON on standard output")

    sub = command.add(commands, "predict", _predict, "what a fine-tuned model says of new input, a line for each", True)
    sub.add_argument("run", metavar="RUN", help="a fine-tuned run (its best step), or RUN@STEP")
    sub.add_argument(
        "file", metavar="FILE", nargs="?", help="as the task's own, or .txt: a text a line (default: stdin)"
    )
    sub.add_argument("--out", metavar="FILE", help="where to write (default: standard output)")
    sub.set_defaults(writes=("out",))
    sub.add_argument("--threshold", type=float, help="of the null score, for questions that may have no answer")
    sub.add_argument("--json", action="store_true", help="an object a line")
    sub.add_argument("--keys", action="store_true", help="list the keys of the run's task with their values, and stop")

    sub = command.add(commands, "evaluate", _evaluate, "figures on held-out text, or a fine-tuned run's own")
    sub.add_argument("checkpoint", metavar="CHECKPOINT", help=CHECKPOINT)
    sub.add_argument(
        "--data", metavar="FILE.toml", help="all documents of this recipe instead; of a fine-tuned run: this task's dev"
    )
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

    sub = command.add(commands, "import", _import, "make a run from another program's model")
    sub.add_argument(
        "source", metavar="SOURCE", help="a Hugging Face folder (any BERT class), or one of google-research/bert"
    )
    sub.add_argument("run", metavar="RUN", help="the run folder to make")
    sub.add_argument("--seed", type=int, default=0, help="draws the heads that the source lacks")
    sub.add_argument("--max-position-embeddings", metavar="N", type=int, default=0, help="more positions, as copies")
    sub.add_argument("--type-vocab-size", metavar="N", type=int, default=0, help="more segments, as the mean")
    sub.add_argument("--add-tokens", metavar="FILE", help="words that become one piece each, one a line")

    sub = command.add(commands, "export", _export, "write a model for other programs, load it again, and compare")
    sub.add_argument("checkpoint", metavar="CHECKPOINT", help=CHECKPOINT)
    sub.add_argument("out", metavar="OUT", help="the folder to write; it must not exist, or be empty")
    sub.add_argument("--format", choices=FORMATS, default="huggingface")
    sub.add_argument("--int8", action="store_true", help="of onnx: a second file with 8-bit weights, its loss measured")
    sub.add_argument("--pooling", choices=["mean", "cls"], help="of sentence-transformers (default: mean)")
    sub.add_argument("--overwrite", action="store_true", help="replace an earlier export, its whole folder")

    inspect_commands.add(commands)
    command.add_plan(commands, _plan)
    command.add_check(commands, _check)
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
    command.before_training(config.hosts)
    from bert_jax.pretrain import pretrain
    from bert_jax.run_page import write_run_page

    profile = command.profile_steps(args)

    def train(stop: Any, clock: Any) -> Any:
        return pretrain(config, force=args.force, stop=stop, clock=clock, profile=profile)

    return command.training(train, write_run_page, config, args.json)


def _finetune(args: argparse.Namespace, rest: list[str]) -> int:
    import dataclasses

    from bert_jax.finetune import task_file

    task = task_file.load_task(args.task, rest)
    if args.out:
        task = dataclasses.replace(task, run_dir=args.out)
    if args.keys:
        task_file.override(task, ["--help"])
    if not args.checkpoint:
        raise UserError("--from is missing; name what to start from: a run, RUN@STEP, or a Hugging Face folder")
    command.keep_freed_memory()
    from bert_jax.finetune.sweep import finetune, table
    from transformer_jax.report import quiet_libraries
    from transformer_jax.signals import StopSignal

    quiet_libraries()
    command.keep_programs()
    with StopSignal() as stop:
        found = finetune(task, args.checkpoint, random=args.random, force=args.force, stop=stop)
    if found is None:
        return stop.exit_code
    print(json_line(found) if args.json else table(found))
    return 0


def _predict(args: argparse.Namespace, rest: list[str]) -> int:
    from bert_jax.finetune.predict import predict
    from transformer_jax.report import quiet_libraries

    rest += ["--help"] if args.keys else []  # of the parser of keys
    quiet_libraries()
    command.keep_programs()
    predict(args.run, args.file, rest, out=args.out, as_json=args.json, threshold=args.threshold)
    return 0


def _evaluate(args: argparse.Namespace, rest: list[str]) -> int:
    from bert_jax.evaluate import evaluate, table
    from bert_jax.finetune.loading import is_finetuned

    if is_finetuned(args.checkpoint):
        from bert_jax.finetune.predict import evaluate as evaluate_task
        from bert_jax.finetune.sweep import figures_table

        if args.prepared or args.max_seq_length:
            raise UserError(
                f"{args.checkpoint} is fine-tuned, and --prepared and --max-seq-length are of pretraining; name a task "
                "with --data"
            )
        of_task = evaluate_task(args.checkpoint, args.data)
        print(json_line(of_task) if args.json else figures_table(of_task))
        return 0
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
    from bert_jax.interop.imports import import_folder
    from bert_jax.resize import read_tokens

    import_folder(
        args.source,
        args.run,
        seed=args.seed,
        max_position_embeddings=args.max_position_embeddings,
        type_vocab_size=args.type_vocab_size,
        add_tokens=read_tokens(args.add_tokens) if args.add_tokens else (),
        say=_say,
    )
    print(args.run)
    return 0


def _export(args: argparse.Namespace, rest: list[str]) -> int:
    from bert_jax.interop.exports import export_checkpoint

    options: dict[str, Any] = {"int8": True} if args.int8 else {}
    options |= {"pooling": args.pooling} if args.pooling else {}
    for option, form in (("int8", "onnx"), ("pooling", "sentence-transformers")):
        if option in options and args.format != form:
            raise UserError(f"--{option} is of --format {form}, and the format is {args.format}")
    print(export_checkpoint(args.checkpoint, args.out, args.format, overwrite=args.overwrite, say=_say, **options))
    return 0


def _plan(args: argparse.Namespace, rest: list[str]) -> int:
    from bert_jax.plan import PROGRAM
    from bert_jax.run_file import load_run
    from transformer_jax import plan_command

    return plan_command.plan(args, PROGRAM, load_run(args.run, rest))


def _check(args: argparse.Namespace, rest: list[str]) -> int:
    from bert_jax.run_file import load_run

    config = load_run(args.run, rest)
    if args.part is None:
        from transformer_jax import pod_check

        return pod_check.check(args, "bert_jax.main", config, rest)
    command.before_training(config.hosts)
    from bert_jax.pretrain import pretrain
    from bert_jax.run_page import write_run_page
    from transformer_jax import pod_check_part

    return pod_check_part.run(args, config, pretrain, write_run_page)


def _say(line: str) -> None:
    print(line, file=sys.stderr)


def _report(args: argparse.Namespace, rest: list[str]) -> int:
    from bert_jax.run_page import write_run_page

    print(write_run_page(storage.path(args.run)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
