"""Translate lines with an exported CTranslate2 folder: nothing of this project is needed, only its two libraries.

python launch/translate_ctranslate2.py FOLDER [--beam 4] [--length-penalty 0.5] < source.txt > translations.txt

One line in gives one line out, blank ones too. What is beyond MOST_PIECES of a line is dropped, and said so. A line
that is longer than those of training is translated as it is, with a note: its translation may go wrong. A line may
begin with a tag of the model's vocabulary, such as >>de<<, which is one piece.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path

import ctranslate2
import sentencepiece

LINES_AT_ONCE = 1024
BATCH_SIZE = 64
MOST_PIECES = 1024
MOST_GIVEN = 256
SPACE = "\u2581"
VOCABULARIES = ("shared_vocabulary.json", "source_vocabulary.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="written by export --format ctranslate2")
    parser.add_argument("--beam", type=int, default=4, metavar="N", help="beam size (default: 4)")
    parser.add_argument(
        "--length-penalty",
        type=float,
        metavar="X",
        help="scores are divided by length^X (default: what the folder's config.json has, or 1)",
    )
    parser.add_argument(
        "--compute-type",
        default="default",
        metavar="KIND",
        choices=["default", "float32", "int8"],
        help="of the products: as the folder was written (default), float32 or int8",
    )
    options = parser.parse_args()
    folder = options.folder
    missing = [name for name in ("model.bin", "source.spm", "target.spm") if not (folder / name).is_file()]
    if missing:
        raise SystemExit(f"error: {folder} has no {' and no '.join(missing)}; name a folder of --format ctranslate2")
    source = sentencepiece.SentencePieceProcessor(model_file=str(folder / "source.spm"))
    target = sentencepiece.SentencePieceProcessor(model_file=str(folder / "target.spm"))
    (listed,) = (folder / name for name in VOCABULARIES if (folder / name).is_file())
    tags = set(filter(re.compile(r">>[^<]*<<").fullmatch, json.loads(listed.read_text(encoding="utf-8"))))
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    penalty = settings.get("length_penalty", 1.0) if options.length_penalty is None else options.length_penalty
    trained = settings.get("max_source_length", MOST_PIECES)
    translator = ctranslate2.Translator(str(folder), device="cpu", compute_type=options.compute_type)
    numbered: Iterable[tuple[int, bytes]] = enumerate(sys.stdin.buffer, 1)
    while chunk := list(itertools.islice(iter(numbered), LINES_AT_ONCE)):
        pieces = []
        for number, line in chunk:
            text = line.decode("utf-8", "replace").removesuffix("\n").removesuffix("\r").replace("\r", " ")
            text = text.removeprefix("\ufeff") if number == 1 else text
            first = text.split(" ", 1)[0]
            tag = [first] if first in tags else []
            pieces.append(tag + source.encode(text.removeprefix(first) if tag else text, out_type=str))
            if len(pieces[-1]) > MOST_PIECES:
                print(f"line {number}: cut after {MOST_PIECES} of its {len(pieces[-1])} pieces", file=sys.stderr)
            elif len(pieces[-1]) >= trained:  # which counts </s>
                said = f"{len(pieces[-1])} pieces, more than the {trained - 1} that the model was trained on"
                print(f"line {number}: {said}; cut it into sentences", file=sys.stderr)
        try:
            results = translator.translate_batch(
                pieces,
                beam_size=options.beam,
                length_penalty=penalty,
                max_batch_size=BATCH_SIZE,
                max_input_length=MOST_PIECES,
                max_decoding_length=MOST_GIVEN,
            )
        except RuntimeError as e:  # a model with fewer positions than lines have pieces
            raise SystemExit(f"error: lines {chunk[0][0]} to {chunk[-1][0]}: {e}") from None
        for (number, _), result in zip(chunk, results, strict=True):
            if len(result.hypotheses[0]) >= MOST_GIVEN:
                print(f"line {number}: its translation was cut after {MOST_GIVEN} pieces", file=sys.stderr)
            text = target.decode(result.hypotheses[0])
            if SPACE in text:  # a piece that only the source's model has comes back as it is
                text = text.removeprefix(SPACE).replace(SPACE, " ")
            print(text.replace("\n", " "), flush=True)


if __name__ == "__main__":
    main()
