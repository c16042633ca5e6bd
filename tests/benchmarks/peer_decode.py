"""Speed of Hugging Face's `generate` or of CTranslate2 on the work of `decode.py`, on CPU. Prints one line of JSON.

    python tests/benchmarks/peer_decode.py --engine hf --size base --sentences 64 --threads 1 [--data FILE.npz]
    python tests/benchmarks/peer_decode.py --engine ct2 --size base --sentences 64 --threads 1 [--quantize int8]

Both have the weights of `decode.py`. Needs torch and transformers, and for `ct2` ctranslate2.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

import measure
import numpy as np
import pairs

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers


def build(size: str) -> Any:
    layers, hidden, heads, inner = pairs.SIZES[size]
    config = transformers.MarianConfig(
        vocab_size=pairs.VOCABULARY,
        d_model=hidden,
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_ffn_dim=inner,
        decoder_ffn_dim=inner,
        activation_function="relu",
        scale_embedding=True,
        max_position_embeddings=512,
        pad_token_id=pairs.PAD,
        eos_token_id=pairs.END,
        bos_token_id=None,
        decoder_start_token_id=pairs.PAD,
        forced_eos_token_id=None,
        share_encoder_decoder_embeddings=True,
    )
    model = transformers.MarianMTModel(config).eval()
    own = model.state_dict()
    tied = ("embed_tokens.weight", "embed_positions.weight", "lm_head.weight", "final_logits_bias")
    shapes = {name: tuple(x.shape) for name, x in own.items() if not name.endswith(tied)}
    tensors = {name: torch.from_numpy(x) for name, x in pairs.weights(shapes).items()}
    bias = torch.zeros(1, pairs.VOCABULARY)
    bias[0, pairs.PAD] = -1e9
    left = model.load_state_dict(tensors | {"final_logits_bias": bias}, strict=False)
    assert not left.unexpected_keys, left
    return model


def convert(model: Any, folder: str, quantize: str | None) -> None:
    """Write the model for CTranslate2 by its own converter."""
    from ctranslate2.converters.transformers import MarianMTLoader

    class Names:
        """What the converter asks of a tokenizer."""

        eos_token, unk_token, bos_token, pad_token = "t0", "t1", None, f"t{pairs.PAD}"

    loader = MarianMTLoader()
    spec = loader.get_model_spec(model)
    loader.set_config(spec.config, model, Names)
    names = [f"t{i}" for i in range(pairs.VOCABULARY - 1)]  # the converter drops the row of <pad>
    spec.register_source_vocabulary(names)
    spec.register_target_vocabulary(names)
    spec.validate()
    spec.optimize(quantization=quantize)
    spec.save(folder)


def main() -> None:
    parser = pairs.arguments(__doc__)
    parser.add_argument("--engine", choices=["hf", "ct2"], default="ct2")
    parser.add_argument("--quantize", choices=["int8", "int16"])
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    model, batches, first = build(options.size), pairs.batches(options), []

    def step_hf(i: int) -> float:
        sources, length = batches[i]
        ids = np.full((len(sources), max(map(len, sources))), pairs.PAD, np.int64)
        for row, source in zip(ids, sources, strict=True):
            row[: len(source)] = source
        given = torch.from_numpy(ids)
        with torch.inference_mode():
            out = model.generate(
                input_ids=given,
                attention_mask=(given != pairs.PAD).long(),
                num_beams=options.beam,
                max_new_tokens=length,
                min_new_tokens=length,
                do_sample=False,
                return_dict_in_generate=True,
                output_scores=True,
            )
        first.extend(out.sequences[0, 1:7].tolist())
        return float(out.sequences_scores[0])

    def step_ct2(i: int) -> float:
        sources, length = batches[i]
        out = translator.translate_batch(
            [[f"t{x}" for x in source] for source in sources],
            beam_size=options.beam,
            min_decoding_length=length,
            max_decoding_length=length,
            return_scores=True,
        )
        first.extend(int(x[1:]) for x in out[0].hypotheses[0][:6])
        return float(out[0].scores[0])

    with tempfile.TemporaryDirectory() as folder:
        if options.engine == "ct2":
            import ctranslate2

            convert(model, folder, options.quantize)
            translator = ctranslate2.Translator(
                folder,
                device="cpu",
                inter_threads=1,
                intra_threads=options.threads,
                compute_type=options.quantize or "float32",
            )
            del model
        step = step_ct2 if options.engine == "ct2" else step_hf
        times = measure.timed(step, [len(sources) for sources, _ in batches], options.warm)
    measure.report(
        program={"hf": "transformers", "ct2": "ctranslate2"}[options.engine],
        size=options.size,
        beam=options.beam,
        batch=options.batch,
        quantize=options.quantize,
        **times,
        mean_length=round(sum(length for _, length in batches) / len(batches), 1),
        first=first[:6],
        threads=options.threads,
        torch=torch.__version__,
        transformers=transformers.__version__,
    )


if __name__ == "__main__":
    main()
