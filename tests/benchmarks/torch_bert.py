"""Speed of Hugging Face's PyTorch BERT on the same work, on CPU in float32. Prints one line of JSON.

    python tests/benchmarks/torch_bert.py --size base --seq 128 --batch 16 --examples 96 --threads 1 [--tuned]

Stock is the library's usual way: `BertForPreTraining`, each row padded to --seq, scores of the vocabulary at every
position. --tuned is what a careful user makes of it by hand: the head runs at the masked positions alone, and examples
are sorted by length so that a batch is padded to its longest row only. Both have fused AdamW and dropout 0.1, and
neither clips gradients. Needs torch and transformers.
"""

from __future__ import annotations

import os

import measure
import numpy as np

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers

IGNORED = -100


def padded(rows: list[measure.Example], width: int) -> dict[str, torch.Tensor]:
    """The model's inputs: int64 [rows, width], and labels of the pairs [rows]."""
    batch = {name: np.zeros((len(rows), width), np.int64) for name in ("input_ids", "token_type_ids", "attention_mask")}
    batch["labels"] = np.full((len(rows), width), IGNORED, np.int64)
    for r, example in enumerate(rows):
        length = len(example.ids)
        batch["input_ids"][r, :length], batch["token_type_ids"][r, :length] = example.ids, example.types
        batch["attention_mask"][r, :length] = 1
        batch["labels"][r, example.positions] = example.labels
    batch["next_sentence_label"] = np.array([e.nsp for e in rows], np.int64)
    return {name: torch.from_numpy(x) for name, x in batch.items()}


def main() -> None:
    parser = measure.arguments(__doc__)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--tuned", action="store_true")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    layers, hidden, heads, feed_forward = measure.SIZES[options.size]
    config = transformers.BertConfig(
        vocab_size=measure.VOCABULARY,
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        intermediate_size=feed_forward,
        hidden_dropout_prob=options.dropout,
        attention_probs_dropout_prob=options.dropout,
    )
    model = transformers.BertForPreTraining(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)

    found = measure.load(options.data, options.seq, options.examples)
    if options.tuned:
        found.sort(key=lambda e: len(e.ids))
    groups = [found[i : i + options.batch] for i in range(0, len(found), options.batch)]
    groups = [g for g in groups if len(g) == options.batch]
    if options.tuned:
        # The warm-up repeats the first batch, which should not be the one of the shortest rows.
        groups = [groups[i] for i in np.random.default_rng(0).permutation(len(groups))]
    widths = [max(len(e.ids) for e in g) if options.tuned else options.seq for g in groups]
    batches = [padded(g, width) for g, width in zip(groups, widths, strict=True)]
    cross_entropy = torch.nn.functional.cross_entropy

    def tuned_loss(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        labels = batch["labels"].reshape(-1)
        masked = (labels != IGNORED).nonzero().squeeze(1)
        out = model.bert(
            input_ids=batch["input_ids"],
            token_type_ids=batch["token_type_ids"],
            attention_mask=batch["attention_mask"],
        )
        words, pairs = model.cls(out.last_hidden_state.reshape(-1, hidden)[masked], out.pooler_output)
        return cross_entropy(words, labels[masked]) + cross_entropy(pairs, batch["next_sentence_label"])

    def step(i: int) -> float:
        loss = tuned_loss(batches[i]) if options.tuned else model(**batches[i]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    tokens = [int(b["attention_mask"].sum()) for b in batches]
    measure.report(
        program="transformers, tuned" if options.tuned else "transformers, stock",
        size=options.size,
        seq=options.seq,
        batch=options.batch,
        **measure.timed(step, tokens, options.warm),
        fill=round(sum(tokens) / sum(b["input_ids"].numel() for b in batches), 4),
        dropout=options.dropout,
        threads=torch.get_num_threads(),
        attention=model.config._attn_implementation,
        torch=torch.__version__,
        transformers=transformers.__version__,
    )


if __name__ == "__main__":
    main()
