"""Translate lines with an exported CTranslate2 folder: nothing of this project is needed, only its two libraries.

python launch/translate_ctranslate2.py FOLDER < source.txt > translations.txt
"""

from __future__ import annotations

import sys
from pathlib import Path

import ctranslate2
import sentencepiece


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    folder = Path(sys.argv[1])
    source = sentencepiece.SentencePieceProcessor(model_file=str(folder / "source.spm"))
    target = sentencepiece.SentencePieceProcessor(model_file=str(folder / "target.spm"))
    translator = ctranslate2.Translator(str(folder), device="cpu")
    lines = [line.rstrip("\n") for line in sys.stdin]
    results = translator.translate_batch([source.encode(line, out_type=str) for line in lines], beam_size=4)
    for result in results:
        print(target.decode(result.hypotheses[0]))


if __name__ == "__main__":
    main()
