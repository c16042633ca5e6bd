"""The page that goes with an exported model."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from bert_jax.config import BertConfig
from bert_jax.interop.huggingface_names import entries
from transformer_jax import config as core

if TYPE_CHECKING:
    from transformer_jax.tokenizer import WordPiece


def model_card(config: BertConfig, tokenizer: WordPiece, facts: Mapping[str, Any]) -> str:
    """The README.md of an exported folder."""
    facts = dict(facts)
    name, licence = facts.pop("name", "BERT"), facts.pop("licence", "")
    language, settings = facts.pop("language", ""), facts.pop("settings", {})
    head: dict[str, Any] = {"license": licence or "unknown", "library_name": "transformers"}
    if language:
        head["language"] = language
    head |= {"pipeline_tag": "fill-mask", "tags": ["bert", "jax"]}
    front = "\n".join(f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in head.items())
    count = sum(math.prod(e.shape) for e in entries(config))
    words = tokenizer.config
    rows: list[tuple[str, object]] = [
        (
            "layers, hidden size, heads",
            f"{config.num_hidden_layers}, {config.hidden_size}, {config.num_attention_heads}",
        ),
        ("parameters, with both heads", f"{count:,}"),
        ("vocabulary", f"{config.vocab_size:,}"),
        ("longest input", f"{config.max_position_embeddings} pieces, [CLS] and [SEP] included"),
        ("lower-cased", "yes" if words.lowercase else "no"),
        ("accents", "removed" if (words.lowercase if words.strip_accents is None else words.strip_accents) else "kept"),
        ("licence", licence or "not stated"),
    ]
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

`seq_relationship_logits[:, 0]` is the score of "the second text follows the first", `[:, 1]` of "it does not":
label 0 means *is next*.

## How it was checked

When this folder was written, it was read back: its MLM and NSP logits on four padded pairs are within 1e-4 of the
model's in float32, every tensor is the same bit for bit, and so are the ids of sample texts.
{block}"""
