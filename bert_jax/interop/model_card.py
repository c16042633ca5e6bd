"""The page that goes with an exported model."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from bert_jax.config import BertConfig
from bert_jax.heads import HF_CLASSES, HeadConfig
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


USE = {
    "huggingface": "`BertForPreTraining`, `BertForMaskedLM` and `BertModel` of `transformers` load this folder.",
    "tf1": """`bert_model.npz` holds the weights under the names of google-research/bert, float32, kernels as [in, out].
`bert-jax import` reads the folder. A TensorFlow checkpoint is made of it by

```python
import numpy as np, tensorflow as tf
weights = np.load("bert_model.npz")
tf.raw_ops.SaveV2(prefix="bert_model.ckpt", tensor_names=list(weights), shape_and_slices=[""] * len(weights.files),
                  tensors=[tf.constant(weights[name]) for name in weights])
```""",
}
"""How a folder of each format is used; the other formats say it themselves."""
_CHECKED = {
    "huggingface": """When this folder was written, it was read back: its {outputs} logits on four padded pairs are
within 1e-4 of the model's in float32, every tensor is the same bit for bit, and so are the ids of sample texts.""",
    "tf1": """When this folder was written, it was read back: its {outputs} logits on four padded pairs are within 1e-4
of the model's in float32, every tensor is the same bit for bit, and so is the tokenizer.""",
}
_PIPELINES = {
    "classification": "text-classification",
    "multi_label": "text-classification",
    "regression": "text-classification",
    "tagging": "token-classification",
    "span": "question-answering",
    "choice": "multiple-choice",
}


def model_card(
    config: BertConfig,
    tokenizer: WordPiece,
    facts: Mapping[str, Any],
    head: HeadConfig | None = None,
    form: str = "huggingface",
) -> str:
    """The README.md of an exported folder.

    Args:
      facts: `name`, `licence`, `language`, `sentence_task`, `command`, `settings` and `metrics` (nested), `use` and
        `checked` (text) have their places; all others become rows of the table.
      form: the format; where it is not one of `USE`, facts must hold `use` and `checked`.
    """
    facts = dict(facts)
    name, licence = facts.pop("name", "BERT"), facts.pop("licence", "")
    language, settings = facts.pop("language", ""), facts.pop("settings", {})
    metrics = facts.pop("metrics", {})
    labels = SENTENCE_LABELS[facts.pop("sentence_task", "nsp")]
    outputs = "MLM and NSP" if head is None else "head's"
    checked = facts.pop("checked", None) or _CHECKED[form].format(outputs=outputs)
    use = facts.pop("use", None) or USE[form]
    front: dict[str, Any] = {"license": licence or "unknown"}
    if form in ("huggingface", "sentence-transformers"):
        front["library_name"] = "transformers" if form == "huggingface" else form
    if language:
        front["language"] = language
    pipeline = "sentence-similarity" if form == "sentence-transformers" else "fill-mask"
    front |= {"pipeline_tag": _PIPELINES[head.kind] if head else pipeline, "tags": ["bert", "jax"]}
    lines = "\n".join(f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in front.items())
    count = sum(math.prod(e.shape) for e in entries(config, head))
    words = tokenizer.config
    rows: list[tuple[str, object]] = [
        ("layers", config.num_hidden_layers),
        ("hidden size", config.hidden_size),
        ("attention heads", config.num_attention_heads),
        ("parameters, with both heads" if head is None else "parameters, with the head", f"{count:,}"),
        ("vocabulary", f"{config.vocab_size:,}"),
        ("longest input", f"{config.max_position_embeddings} pieces, [CLS] and [SEP] included"),
        ("lower-cased", "yes" if words.lowercase else "no"),
        ("accents", "removed" if (words.lowercase if words.strip_accents is None else words.strip_accents) else "kept"),
        ("licence", licence or "not stated"),
    ]
    if words.pre_splitter:
        rows.append(("spaces put in beforehand", f"by `{words.pre_splitter}`; tokenizer.json does not do it"))
    rows += [(str(key).replace("_", " "), value) for key, value in facts.items()]
    rows += [(key.replace("_", " "), f"{value:.6g}") for key, value in metrics.items()]
    table = "\n".join(f"| {key} | {value} |".replace("\n", " ") for key, value in rows)
    block = f"\n## Settings\n\n```toml\n{core.dump_toml(settings)}```\n" if settings else ""
    if head is None:
        what, about = "BERT with its masked-language and next-sentence heads.", f"## The sentence head\n\n{labels}"
    else:
        what = f"BERT, fine-tuned: {head.kind.replace('_', ' ')}."
        if form == "huggingface":
            use = f"`{HF_CLASSES[head.kind]}` of `transformers` loads this folder."
        about = f"## The head\n\n{_head_text(head)}"
    return f"""---
{lines}
---

# {name}

{what} {use}

| | |
|---|---|
{table}

{about}

## How it was checked

{checked}
{block}"""


def _head_text(head: HeadConfig) -> str:
    if head.kind == "span":
        return "Two scores a token: the first as the start, the second as the end of the answer."
    if head.kind == "choice":
        return "One score a choice; the choices of one example are compared."
    if head.kind == "regression":
        return f"One number{': ' + head.labels[0] if head.labels else ''}."
    meant = {
        "classification": "the text's class",
        "multi_label": "each class that holds",
        "tagging": "a token's tag",
    }
    names = "\n".join(f"{i}. {label}" for i, label in enumerate(head.labels))
    return f"Scores of {meant[head.kind]}, by number:\n\n{names}"
