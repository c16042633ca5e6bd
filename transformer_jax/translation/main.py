"""The command `transformer-jax`. Each command is a thin caller of a function that Python code can call as well.

Libraries are imported inside the commands, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from transformer_jax import command, storage
from transformer_jax.command import json_line
from transformer_jax.config import UserError

DESCRIPTION = "Train a Transformer on your own pairs of sentences, go on after any stop, and take the model elsewhere."
CHECKPOINT = "a run folder (its newest step that verifies), RUN@STEP or RUN@best"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code, see `transformer_jax.command.main`."""
    return command.main(_parser(), arguments)


def _parser() -> argparse.ArgumentParser:
    parser = command.parser("transformer-jax", DESCRIPTION)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    command.add_prepare(commands, _prepare, "make the vocabularies and token shards of a run's pairs")
    command.add_training(commands, "train", _train)

    sub = command.add(
        commands, "evaluate", _evaluate, "perplexity on held-out pairs, and BLEU and chrF2 of their translations"
    )
    sub.add_argument("checkpoint", metavar="CHECKPOINT", help=CHECKPOINT)
    sub.add_argument("--split", choices=["test", "validation"], default="test")
    sub.add_argument("--prepared", metavar="DIR", help="the run's prepared data, if it was moved")
    sub.add_argument("--beam", metavar="N", type=int, default=None, help="beam size (default: validation.beam_size)")
    sub.add_argument("--loss-only", action="store_true", help="translate nothing")
    sub.add_argument("--json", action="store_true")

    sub = command.add(commands, "translate", _translate, "translate lines: one in, one out, in order")
    _add_translate(sub)

    sub = command.add(commands, "score", _score, "BLEU and chrF2 with signatures, and the BLEU of papers")
    sub.add_argument("hypotheses", metavar="HYP", help="translations, one a line")
    sub.add_argument("references", metavar="REF", help="references, one a line")
    sub.add_argument("--language", default="", help="of the target side, as in de; decides the tokenisers")
    sub.add_argument("--tokenize", help="sacreBLEU's tokeniser for BLEU: 13a, intl, zh, char or none")
    sub.add_argument("--json", action="store_true")

    sub = command.add(commands, "average", _average, "the mean of several checkpoints, as a run of its own")
    sub.add_argument("checkpoints", metavar="CHECKPOINT", nargs="+", help=CHECKPOINT)
    sub.add_argument("--last", type=int, default=0, help="the newest so many steps of the one run that is named")
    sub.add_argument("--out", metavar="RUN", required=True, help="the run folder to make")

    sub = command.add(commands, "import", _import, "make a run from a folder in Marian's format")
    sub.add_argument("source", metavar="SOURCE", help="a folder that MarianMTModel loads, with safetensors weights")
    sub.add_argument("run", metavar="RUN", help="the run folder to make")

    sub = command.add(
        commands, "export", _export, "write a model for other programs; what was written is loaded again and compared"
    )
    sub.add_argument("checkpoint", metavar="CHECKPOINT", help=CHECKPOINT)
    sub.add_argument("out", metavar="OUT", help="the folder to write; it must not exist, or be empty")
    sub.add_argument("--format", choices=["marian", "ctranslate2"], default="marian", help="(default: marian)")
    sub.add_argument("--int8", action="store_true", help="matrices in 8 bits (ctranslate2 alone)")
    sub.add_argument("--overwrite", action="store_true", help="replace an earlier export")

    command.add_plan(commands, _plan)
    command.add_check(commands, _check)
    command.add_report(commands, _report)
    command.add_verify(commands)
    return parser


def _add_translate(sub: argparse.ArgumentParser) -> None:
    """The arguments of `translate`, many of which are fields of DecodeSettings and TranslateSettings."""
    sub.usage = "transformer-jax translate CHECKPOINT [options] < LINES > TRANSLATIONS"
    sub.add_argument("checkpoint", metavar="CHECKPOINT", help=CHECKPOINT)
    sub.add_argument("--input", metavar="FILE", help="lines, plain or .gz (default: standard input)")
    sub.add_argument("--output", metavar="FILE", help="where translations go (default: standard output)")
    sub.set_defaults(writes=("output", "attention"))
    numbers: tuple[tuple[str, str, type, float | None, str], ...] = (
        ("--beam", "beam_size", int, None, "beam size (default: 4); 1 is greedy"),
        ("--alpha", "alpha", float, 0.6, "strength of the length penalty (default: 0.6)"),
        ("--n-best", "n_best", int, 1, "as many translations, each `line from 0 ||| text ||| score`"),
        ("--min-length", "min_length", int, 1, "pieces before a translation may end (default: 1)"),
        ("--max-length", "max_length", int, 0, "the most pieces of a translation"),
        ("--max-extra", "max_extra", int, 50, "pieces beyond the source's (default: 50)"),
        ("--temperature", "temperature", float, 1.0, "of sampling (default: 1)"),
        ("--top-k", "top_k", int, 0, "sample from so many pieces (default: all)"),
        ("--top-p", "top_p", float, 1.0, "sample from pieces of this share together (default: 1)"),
        ("--seed", "seed", int, 0, "of sampling (default: 0)"),
        ("--batch-size", "batch_size", int, 0, "sentences at once (default: 16 a device on CPU, else 128)"),
        ("--max-source-length", "max_source_length", int, 0, "pieces of a source (default: as in training)"),
    )
    for flag, name, kind, default, help_text in numbers:
        sub.add_argument(flag, dest=name, type=kind, default=default, metavar="N", help=help_text)
    sub.add_argument("--length-penalty", choices=["gnmt", "power"], default="gnmt", help="(default: gnmt)")
    sub.add_argument(
        "--stop",
        choices=["bound", "huggingface", "ctranslate2"],
        default="bound",
        help="whose rule (default: bound)",
    )
    sub.add_argument(
        "--long-lines",
        choices=["split", "cut"],
        default="split",
        help="(default: split)",
    )
    sub.add_argument("--sample", action="store_true", help="draw translations in place of searching")
    sub.add_argument("--scores", action="store_true", help="the score and a tab before each translation")
    sub.add_argument("--json", action="store_true", help="one object a line")
    sub.add_argument("--attention", metavar="PAGE.html", default="", help="draw the first line's cross-attention")


def _prepare(args: argparse.Namespace, rest: list[str]) -> int:
    from transformer_jax import data_report
    from transformer_jax.translation.prepare import prepare
    from transformer_jax.translation.run_file import load_run

    progress = command.ProgressLines("pairs")
    report = prepare(load_run(args.run, rest), workers=args.workers, progress=progress, say=command.say)
    print(json_line(report) if args.json else data_report.render(report))
    return 0


def _train(args: argparse.Namespace, rest: list[str]) -> int:
    from transformer_jax.translation import run_file

    config = run_file.load_run(args.run, rest)
    if args.keys:
        run_file.override(config, ["--help"])
    command.before_training(config.hosts)
    from transformer_jax.translation.train import train

    profile = command.profile_steps(args)
    return command.training(
        lambda stop, clock: train(config, force=args.force, stop=stop, clock=clock, profile=profile),
        _write_page,
        config,
        args.json,
    )


def _evaluate(args: argparse.Namespace, rest: list[str]) -> int:
    from transformer_jax.report import quiet_libraries
    from transformer_jax.translation.evaluate import evaluate, table
    from transformer_jax.translation.translate import validation_translate

    quiet_libraries()
    translate = None if args.loss_only else validation_translate
    figures = evaluate(args.checkpoint, args.split, args.prepared, translate, args.beam)
    print(json_line(figures) if args.json else table(figures))
    for note in figures.get("notes", []):
        command.say(f"note: {note}")
    return 0


def _translate(args: argparse.Namespace, rest: list[str]) -> int:
    command.keep_freed_memory()
    import contextlib
    import dataclasses

    from transformer_jax.lines import opened
    from transformer_jax.new_file import check_place
    from transformer_jax.report import quiet_libraries
    from transformer_jax.translation.decode import DecodeSettings
    from transformer_jax.translation.stream import Format, open_translator, translate_stream
    from transformer_jax.translation.translate import TranslateSettings

    quiet_libraries()
    command.keep_programs()

    def fields(kind: type) -> dict[str, object]:
        return {f.name: getattr(args, f.name) for f in dataclasses.fields(kind) if hasattr(args, f.name)}

    if args.beam_size is None:
        del args.beam_size
    elif args.sample:
        raise UserError("--beam is of searching, and --sample draws; --n-best says how many are drawn")
    decode = DecodeSettings(**fields(DecodeSettings))  # type: ignore[arg-type]
    settings = TranslateSettings(decode, **fields(TranslateSettings))  # type: ignore[arg-type]
    form: Format = "json" if args.json else "n-best" if args.n_best > 1 else "scores" if args.scores else "text"
    if args.input:
        Path(args.input).open("rb").close()  # what is missing is told before the model is read
    if args.output:
        check_place(Path(args.output))
    if args.attention:
        check_place(Path(args.attention), replaced=True)
    loaded, translator = open_translator(args.checkpoint, settings)
    with contextlib.ExitStack() as files:
        source = files.enter_context(opened(Path(args.input))) if args.input else _standard_input()
        out = files.enter_context(Path(args.output).open("wb")) if args.output else sys.stdout.buffer
        done = translate_stream(loaded, translator, source, out, form, args.attention)
    rate = done.lines / max(done.seconds, 1e-9)
    command.say(f"{done.lines:,} lines in {done.seconds:.1f} s, {rate:.1f} lines/s; {done.noted:,} with notes")
    return 0


def _standard_input() -> BinaryIO:
    """Standard input, to be read by a thread that may still wait for a line when the program ends.

    As it ends, Python takes the lock of `sys.stdin`, and aborts if a thread holds it; so the thread gets an object of
    its own.
    """
    try:
        return open(sys.stdin.fileno(), "rb", closefd=False)
    except io.UnsupportedOperation:  # put in its place by who called
        return sys.stdin.buffer


def _score(args: argparse.Namespace, rest: list[str]) -> int:
    from transformer_jax.translation.score import score_files, table

    scores = score_files(args.hypotheses, args.references, language=args.language, tokenize=args.tokenize)
    print(json_line(scores) if args.json else table(scores))
    for note in scores["notes"]:
        command.say(f"note: {note}")
    return 0


def _average(args: argparse.Namespace, rest: list[str]) -> int:
    from transformer_jax.translation.average import average

    if len(args.checkpoints) < 2 and not args.last:
        raise UserError("one checkpoint has no mean: name several, or how many of the run's newest with --last N")
    print(average(args.checkpoints, args.out, args.last, command.say))
    return 0


def _import(args: argparse.Namespace, rest: list[str]) -> int:
    from transformer_jax.report import quiet_libraries
    from transformer_jax.translation.interop import marian

    quiet_libraries()
    print(marian.import_folder(args.source, args.run))
    return 0


def _export(args: argparse.Namespace, rest: list[str]) -> int:
    from transformer_jax.report import quiet_libraries

    quiet_libraries()
    if args.format == "ctranslate2":
        from transformer_jax.translation.interop import ctranslate2

        quantization: ctranslate2.Quantization = "int8" if args.int8 else "float32"
        options = {"quantization": quantization, "overwrite": args.overwrite, "say": command.say}
        print(ctranslate2.export_checkpoint(args.checkpoint, args.out, **options))
        return 0
    if args.int8:
        raise UserError("--int8 is for --format ctranslate2; Marian's format has float32 alone")
    from transformer_jax.translation.interop import marian

    print(marian.export_checkpoint(args.checkpoint, args.out, overwrite=args.overwrite, say=command.say))
    return 0


def _plan(args: argparse.Namespace, rest: list[str]) -> int:
    from transformer_jax import plan_command
    from transformer_jax.translation.plan import PROGRAM
    from transformer_jax.translation.run_file import load_run

    return plan_command.plan(args, PROGRAM, load_run(args.run, rest))


def _report(args: argparse.Namespace, rest: list[str]) -> int:
    print(_write_page(storage.path(args.run)))
    return 0


def _check(args: argparse.Namespace, rest: list[str]) -> int:
    from transformer_jax.translation.run_file import load_run

    config = load_run(args.run, rest)
    if args.part is None:
        from transformer_jax import pod_check

        return pod_check.check(args, "transformer_jax.translation.main", config, rest)
    command.before_training(config.hosts)
    from transformer_jax import pod_check_part
    from transformer_jax.translation.train import train

    return pod_check_part.run(args, config, train, _write_page)


def _write_page(run_dir: Path) -> Path:
    from transformer_jax.run_page import write_run_page
    from transformer_jax.translation.config import TranslationConfig

    return write_run_page(run_dir, TranslationConfig)


if __name__ == "__main__":
    sys.exit(main())
