"""Speed of Hugging Face's Marian model in PyTorch on the work of `translation_step.py`, on CPU. One line of JSON.

    python tests/benchmarks/torch_marian.py --size base --threads 1 [--data FILE.npz]

Batches hold sentences of near lengths, cut so that rows times the longest stays within --tokens, as toolkits do it.
Label smoothing, dropout 0.1 on residuals and attention weights, fused AdamW. Needs torch and transformers.
"""

from __future__ import annotations

import os

import measure
import numpy as np
import pairs

os.environ["HF_HUB_OFFLINE"] = "1"

import peer_decode
import torch
import transformers

IGNORED = -100


def groups_of(found: list[tuple[np.ndarray, np.ndarray]], tokens: int) -> list[list[tuple[np.ndarray, np.ndarray]]]:
    """Pairs sorted by length, in groups whose padded size stays within `tokens`, in a fixed random order."""
    groups: list[list[tuple[np.ndarray, np.ndarray]]] = [[]]
    longest = 0
    for pair in sorted(found, key=lambda p: (len(p[1]), len(p[0]))):
        length = max(map(len, pair)) + 1
        if groups[-1] and max(longest, length) * (len(groups[-1]) + 1) > tokens:
            groups.append([])
            longest = 0
        groups[-1].append(pair)
        longest = max(longest, length)
    return [groups[i] for i in np.random.default_rng(3).permutation(len(groups))]


def padded(rows: list[np.ndarray], fill: int) -> torch.Tensor:
    block = np.full((len(rows), max(map(len, rows))), fill, np.int64)
    for r, ids in enumerate(rows):
        block[r, : len(ids)] = ids
    return torch.from_numpy(block)


def main() -> None:
    options = pairs.training_arguments(__doc__).parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    model = peer_decode.build(options.size).train()
    model.final_logits_bias.zero_()  # label smoothing there counts <pad> in
    for module in model.modules():
        for name in ("dropout", "attention_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, options.dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
    batches, tokens, slots = [], [], 0
    for group in groups_of(pairs.read(options.data, options.pairs), options.tokens)[: options.steps]:
        source = padded([np.append(s, pairs.END) for s, _ in group], pairs.PAD)
        given = padded([np.append(pairs.PAD, t) for _, t in group], pairs.PAD)
        wanted = padded([np.append(t, pairs.END) for _, t in group], IGNORED)
        batches.append((source, (source != pairs.PAD).long(), given, wanted))
        tokens.append(sum(len(s) + len(t) + 2 for s, t in group))
        slots += source.numel() + given.numel()

    def step(i: int) -> float:
        source, mask, given, wanted = batches[i]
        logits = model(input_ids=source, attention_mask=mask, decoder_input_ids=given).logits
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), wanted.flatten(), ignore_index=IGNORED, label_smoothing=0.1
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    measure.report(
        program="transformers, Marian",
        size=options.size,
        **measure.timed(step, tokens, options.warm),
        fill=round(sum(tokens) / slots, 4),
        dropout=options.dropout,
        threads=torch.get_num_threads(),
        attention=model.config._attn_implementation,
        torch=torch.__version__,
        transformers=transformers.__version__,
    )


if __name__ == "__main__":
    main()
