"""Do exported models find our translations? Hugging Face and CTranslate2 against us, on real lines.

    python tests/benchmarks/exports.py RUN SOURCE.txt [--lines 200] [--beam 4] [--limit 64] [--out exports.json]

Exports the run in both formats, float32, and translates the lines three ways with scores divided by length (`power`,
alpha 1), each peer against our search under its own rule for when to stop. A line whose pieces differ is excused where
the peer's own two best scores are less than 1e-5 apart. Needs the development set with torch.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
from pathlib import Path
from typing import Any, Literal

import jax

from transformer_jax.translation import loading
from transformer_jax.translation.batching import Decoder, Sentence
from transformer_jax.translation.decode import DecodeSettings
from transformer_jax.translation.interop import ctranslate2 as to_ctranslate2
from transformer_jax.translation.interop import marian

CLOSE = 1e-5
Rule = Literal["huggingface", "ctranslate2"]


def ours(found: loading.Loaded, sources: list[list[int]], rule: Rule, beam: int, limit: int) -> list[list[int]]:
    """Our best pieces of each line under a peer's rule."""
    settings = DecodeSettings(
        beam_size=beam, alpha=1.0, length_penalty="power", stop=rule, max_length=limit, max_extra=limit
    )
    waiting: list[Any] = [[Sentence(i, ids) for i, ids in enumerate(sources)]]
    with jax.default_matmul_precision("highest"):
        decoder = Decoder(found.config, found.params, settings, 16)
        done = dict(itertools.chain.from_iterable(decoder.decode(lambda wait: waiting.pop() if waiting else None)))
    return [list(done[i][0].ids) for i in range(len(sources))]


def huggingface(folder: Path, sources: list[list[int]], beam: int, limit: int) -> list[tuple[list[int], float]]:
    """Best pieces of each line, and by how much they beat the second best."""
    import torch
    import transformers

    torch.set_num_threads(1)
    model = transformers.MarianMTModel.from_pretrained(folder).eval()
    pad, out = model.config.pad_token_id, []
    for ids in sources:
        with torch.inference_mode():
            found = model.generate(
                input_ids=torch.tensor([ids]),
                num_beams=beam,
                num_return_sequences=2,
                max_length=limit + 1,  # the start counts there
                length_penalty=1.0,
                do_sample=False,
                return_dict_in_generate=True,
                output_scores=True,
            )
        best, second = found.sequences_scores.tolist()
        pieces = [i for i in found.sequences[0].tolist() if i != pad]
        out.append((pieces[: pieces.index(0)] if 0 in pieces else pieces, best - second))
    return out


def ctranslate2(
    folder: Path, found: loading.Loaded, sources: list[list[int]], beam: int, limit: int
) -> list[tuple[list[int], float]]:
    """As `huggingface`."""
    import ctranslate2

    source, target = found.vocabularies.source.vocab, found.vocabularies.target.vocab
    ids_of = {piece: i for i, piece in enumerate(target)}
    results = ctranslate2.Translator(str(folder), device="cpu").translate_batch(
        [[source[i] for i in ids[:-1]] for ids in sources],
        beam_size=beam,
        num_hypotheses=2,
        length_penalty=1.0,
        max_decoding_length=limit,
        return_scores=True,
        max_batch_size=1,
    )
    return [([ids_of[p] for p in r.hypotheses[0]], r.scores[0] - r.scores[1]) for r in results]


def main() -> None:
    """Print what was found, and write it where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("source", type=Path)
    parser.add_argument("--lines", type=int, default=200)
    parser.add_argument("--beam", type=int, default=4)
    parser.add_argument("--limit", type=int, default=64, help="the most pieces of a translation")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found = loading.load(args.run)
    lines = args.source.read_text(encoding="utf-8").splitlines()[: args.lines]
    sources = [[*found.vocabularies.source.encode(line), *found.vocabularies.source_end] for line in lines]
    report: dict[str, Any] = {"lines": len(lines), "step": found.step, "beam": args.beam}
    with tempfile.TemporaryDirectory() as scratch:
        folders = {rule: Path(scratch) / rule for rule in ("huggingface", "ctranslate2")}
        marian.export_checkpoint(args.run, folders["huggingface"])
        to_ctranslate2.export_checkpoint(args.run, folders["ctranslate2"])
        theirs = {
            "huggingface": huggingface(folders["huggingface"], sources, args.beam, args.limit),
            "ctranslate2": ctranslate2(folders["ctranslate2"], found, sources, args.beam, args.limit),
        }
    rules: tuple[Rule, Rule] = ("huggingface", "ctranslate2")
    for rule in rules:
        best = ours(found, sources, rule, args.beam, args.limit)
        differing = [i for i, (a, (b, _)) in enumerate(zip(best, theirs[rule], strict=True)) if a != b]
        excused = [i for i in differing if theirs[rule][i][1] < CLOSE]
        report[rule] = {
            "equal": len(lines) - len(differing),
            "cut": sum(len(ids) >= args.limit for ids in best),
            "too close to call": [i + 1 for i in excused],
            "different": [i + 1 for i in differing if i not in excused],
        }
    text = json.dumps(report, indent=2)
    print(text)
    if args.out:
        args.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
