"""The page that goes with an exported model."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from bert_jax.config import BertConfig
from bert_jax.interop.huggingface_names import entries
from transformer_jax import config as core
from transformer_jax.tokenizer import WordPiece

SENTENCE_LABELS = {
    "nsp": """`seq_relationship_logits[:, 0]` is the score of "the second text follows the first", `[:, 1]` of "it does
not": label 0 means *is next*.""",
    "sop": """Trained on sentence order: `seq_relationship_logits[:, 0]` is the score of "the two texts are in order",
`[:, 1]` of "they were swapped": label 0 means *in order*.""",
    "none": "It was not trained in this run.",
}
"""What the two logits mean, by the run's `examples.sentence_task`."""


def model_card(config: BertConfig, tokenizer: WordPiece, facts: Mapping[str, Any]) -> str:
    """The README.md of an exported folder."""
    facts = dict(facts)
    name, licence = facts.pop("name", "BERT"), facts.pop("licence", "")
    language, settings = facts.pop("language", ""), facts.pop("settings", {})
    labels = SENTENCE_LABELS[facts.pop("sentence_task", "nsp")]
    head: dict[str, Any] = {"license": licence or "unknown", "library_name": "transformers"}
    if language:
        head["language"] = language
    head |= {"pipeline_tag": "fill-mask", "tags": ["bert", "jax"]}
    front = "\n".join(f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in head.items())
    count = sum(math.prod(e.shape) for e in entries(config))
    words = tokenizer.config
    rows: list[tuple[str, object]] = [
        ("layers", config.num_hidden_layers),
        ("hidden size", config.hidden_size),
        ("attention heads", config.num_attention_heads),
        ("parameters, with both heads", f"{count:,}"),
        ("vocabulary", f"{config.vocab_size:,}"),
        ("longest input", f"{config.max_position_embeddings} pieces, [CLS] and [SEP] included"),
        ("lower-cased", "yes" if words.lowercase else "no"),
        ("accents", "removed" if (words.lowercase if words.strip_accents is None else words.strip_accents) else "kept"),
        ("licence", licence or "not stated"),
    ]
    if words.pre_splitter:
        rows.append(("spaces put in beforehand", f"by `{words.pre_splitter}`; tokenizer.json does not do it"))
    rows += [(str(key).replace("_", " "), value) for key, value in facts.items()]
    table = "\n".join(f"| {key} | {value} |".replace("\n", " ") for key, value in rows)
    block = f"\n## Settings\n\n```toml\n{core.dump_toml(settings)}```\n" if settings else ""
    return f"""---
{front}
---

# {name}

BERT with its masked-language and next-sentence heads. `BertForPreTraining`, `BertForMaskedLM` and `BertModel` of
`transformers` load this folder.

| | |
|---|---|
{table}

## The sentence head

{labels}

## How it was checked

When this folder was written, it was read back: its MLM and NSP logits on four padded pairs are within 1e-4 of the
model's in float32, every tensor is the same bit for bit, and so are the ids of sample texts.
{block}"""
