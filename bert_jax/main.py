"""The command `bert-jax`. Each command is a thin caller of a function that Python code can call as well.

Libraries are imported inside the commands, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import errno
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformer_jax.config import UserError

DESCRIPTION = "Pretrain BERT from your own text, go on after any stop, and take the model elsewhere."
CHECKPOINT = "a run folder (its newest step that verifies), RUN@STEP, or a Hugging Face folder"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0 done, 2 a mistake the user can mend, 128 + N stopped by signal N."""
    for argument in sys.argv[1:] if arguments is None else arguments:
        if any("\ud800" <= character <= "\udfff" for character in argument):
            print(f"error: {argument!r} on the command line is not UTF-8; write it in UTF-8", file=sys.stderr)
            return 2
    args, rest = _parser().parse_known_args(arguments)
    if rest and not getattr(args, "takes_overrides", False):
        _parser().error(f"unrecognised arguments: {' '.join(rest)}")
    try:
        return int(args.function(args, rest) or 0)
    except UserError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 141
    except OSError as e:
        if e.filename is None and e.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise  # not about a file of the user's
        print(f"error: {e.filename or 'a file could not be written'}: {e.strerror}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bert-jax", description=DESCRIPTION)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(name: str, function: Any, summary: str, overrides: bool = False) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        sub.set_defaults(function=function, takes_overrides=overrides)
        return sub

    sub = command("prepare", _prepare, "make the vocabulary and token shards of a run's corpora, with a report", True)
    sub.add_argument("run", metavar="RUN.toml", help="a run file; any of its keys can be given as --section.key value")
    sub.add_argument("--workers", type=int, default=None, help="processes (default: one a core)")
    sub.add_argument("--json", action="store_true", help="the data report as JSON")

    sub = command("pretrain", _pretrain, "train, or go on training: the same command resumes", True)
    sub.add_argument("run", metavar="RUN.toml", help="a run file; any of its keys can be given as --section.key value")
    sub.add_argument("--keys", action="store_true", help="list all keys with their present values, and stop")
    sub.add_argument("--force", action="store_true", help="go on although changed settings make it another run")
    sub.add_argument("--json", action="store_true", help="the held-out figures as JSON on standard output")

    sub = command("evaluate", _evaluate, "MLM and NSP loss and accuracy on held-out text, with counts and baselines")
    sub.add_argument("checkpoint", metavar="CHECKPOINT", help=CHECKPOINT)
    sub.add_argument("--data", metavar="RECIPE.toml", help="evaluate all documents of this recipe instead")
    sub.add_argument("--prepared", metavar="DIR", help="prepared data, where the checkpoint names none or it was moved")
    sub.add_argument("--json", action="store_true")

    sub = command("fill-mask", _fill_mask, "the best pieces for each [MASK], with probabilities")
    sub.add_argument("checkpoint", metavar="CHECKPOINT", help=CHECKPOINT)
    sub.add_argument("text", metavar="TEXT", nargs="+", help="text with [MASK] in it")
    sub.add_argument("--top-k", type=int, default=5)
    sub.add_argument("--json", action="store_true")

    sub = command("import", _import, "make a run from a Hugging Face folder, to go on training or to evaluate")
    sub.add_argument("source", metavar="SOURCE", help="a folder with config.json, model.safetensors and vocab.txt")
    sub.add_argument("run", metavar="RUN", help="the run folder to make")
    sub.add_argument("--seed", type=int, default=0, help="draws the heads that the source lacks")

    sub = command("export", _export, "write a model for other programs; what was written is loaded again and compared")
    sub.add_argument("checkpoint", metavar="CHECKPOINT", help=CHECKPOINT)
    sub.add_argument("out", metavar="OUT", help="the folder to write; it must not exist, or be empty")
    sub.add_argument("--format", choices=["huggingface"], default="huggingface")
    sub.add_argument("--overwrite", action="store_true", help="replace a folder that is there")

    sub = command("report", _report, "write the run's page, report.html, and print its path")
    sub.add_argument("run", metavar="RUN")

    sub = command("verify", _verify, "check each checkpoint's files against their digests")
    sub.add_argument("run", metavar="RUN", help="a run folder or RUN@STEP")
    return parser


def _prepare(args: argparse.Namespace, rest: list[str]) -> int:
    from bert_jax.prepare import prepare, report_text
    from bert_jax.run_file import load_run

    report = prepare(load_run(args.run, rest), workers=args.workers)
    print(_json(report) if args.json else report_text(report))
    return 0


def _pretrain(args: argparse.Namespace, rest: list[str]) -> int:
    from bert_jax import run_file

    config = run_file.load_run(args.run, rest)
    if args.keys:
        run_file.override(config, ["--help"])
    from transformer_jax import allocator

    if allocator.on_cpu():
        allocator.keep_freed_memory()
    from bert_jax.pretrain import pretrain
    from bert_jax.run_page import write_run_page
    from transformer_jax.report import quiet_libraries
    from transformer_jax.signals import StopSignal

    quiet_libraries()
    with StopSignal() as stop:
        result = pretrain(config, force=args.force, stop=stop)
    if result.interrupted:
        return stop.exit_code
    if args.json and result.evaluation is not None:
        print(_json(result.evaluation))
    print(f"page: {write_run_page(Path(config.run_dir))}", file=sys.stderr)
    return 0


def _evaluate(args: argparse.Namespace, rest: list[str]) -> int:
    from bert_jax.evaluate import evaluate, table

    scores = evaluate(args.checkpoint, args.data, args.prepared)
    print(_json(scores) if args.json else table(scores))
    return 0


def _fill_mask(args: argparse.Namespace, rest: list[str]) -> int:
    from bert_jax.fill_mask import fill_mask
    from bert_jax.loading import load

    found = fill_mask(load(args.checkpoint), args.text, args.top_k)
    if args.json:
        print(_json(found))
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


def _report(args: argparse.Namespace, rest: list[str]) -> int:
    from bert_jax.run_page import write_run_page

    print(write_run_page(Path(args.run)))
    return 0


def _verify(args: argparse.Namespace, rest: list[str]) -> int:
    from transformer_jax.checkpoint import verify

    found = verify(args.run)
    for step, problems in found:
        print(f"step {step}: " + ("; ".join(problems) if problems else "verified"))
    if not found:
        raise UserError(f"{args.run}: no checkpoint here")
    return 1 if any(problems for _, problems in found) else 0


def _json(value: Any) -> str:
    """One line that every reader of JSON takes: a number that is not finite is null."""

    def strict(x: Any) -> Any:
        if isinstance(x, dict):
            return {k: strict(v) for k, v in x.items()}
        if isinstance(x, list | tuple):
            return [strict(v) for v in x]
        return None if isinstance(x, float) and not math.isfinite(x) else x

    return json.dumps(strict(value), ensure_ascii=False, allow_nan=False)


if __name__ == "__main__":
    sys.exit(main())
