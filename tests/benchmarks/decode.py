"""Speed of our beam search on CPU: sentences a second, by CPU seconds and by wall clock. Prints one line of JSON.

    python tests/benchmarks/decode.py --size base --beam 4 --batch 16 --sentences 64 --threads 1 [--data FILE.npz]

Weights are random, so no sentence ends by itself: each batch of sentences of near lengths is decoded to one length,
the longest reference in it. `peer_decode.py` gives Hugging Face's `generate` and CTranslate2 the same weights and the
same batches; `first`, the first pieces found for the first batch's first sentence, shows that all agree.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import time

import measure
import pairs


def main() -> None:
    parser = pairs.arguments(__doc__)
    options = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    if options.threads:
        os.environ["NPROC"] = str(options.threads)  # the size of XLA's thread pool, read once

    from transformer_jax import allocator

    allocator.keep_freed_memory()  # as the command does

    import jax

    from transformer_jax.translation.batching import Decoder, Sentence
    from transformer_jax.translation.config import TransformerConfig
    from transformer_jax.translation.decode import DecodeSettings
    from transformer_jax.translation.interop import marian_names

    layers, hidden, heads, inner = pairs.SIZES[options.size]
    config = TransformerConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_decoder_layers=layers,
        num_attention_heads=heads,
        intermediate_size=inner,
        source_vocab_size=pairs.VOCABULARY,
        target_vocab_size=pairs.VOCABULARY,
        max_position_embeddings=512,
    )
    shapes = {entry.name: entry.shape for entry in marian_names.entries(config)}
    params = marian_names.from_marian(pairs.weights(shapes), config)
    batches = pairs.batches(options)
    first: list[int] = []

    settings = DecodeSettings(beam_size=options.beam, alpha=1.0, length_penalty="power", stop="huggingface")
    decoder = Decoder(config, params, settings, options.batch)

    def step(i: int) -> float:
        sources, length = batches[i]
        fixed = dataclasses.replace(settings, min_length=length, max_length=length, max_extra=length)
        given = [[Sentence(n, ids) for n, ids in enumerate(sources)]]
        finished = decoder.with_settings(fixed).decode(lambda wait: given.pop() if given else None)
        found = dict(itertools.chain.from_iterable(finished))
        first.extend(found[0][0].ids[:6])
        return found[0][0].score

    before = time.process_time()
    for i in range(len(batches)):  # each meets shapes of its own; what is timed below compiles nothing
        step(i)
    compiling = time.process_time() - before
    measure.report(
        program="ours",
        size=options.size,
        beam=options.beam,
        batch=options.batch,
        **measure.timed(step, [len(sources) for sources, _ in batches], options.warm),
        mean_length=round(sum(length for _, length in batches) / len(batches), 1),
        all_batches_first_cpu_s=round(compiling, 1),
        first=first[:6],
        threads=options.threads,
        jax=jax.__version__,
    )


if __name__ == "__main__":
    main()
