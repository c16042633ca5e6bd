"""Folders that `sentence-transformers` loads: BERT's encoder with mean or [CLS] pooling on top.

modules.json                     the two modules, in order
1_Pooling/config.json            how token vectors become one
sentence_bert_config.json        the longest input
config_sentence_transformers.json
config.json, model.safetensors   as `BertModel` of transformers; vocab.txt, tokenizer.json, tokenizer_config.json
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from bert_jax.config import BertConfig
from bert_jax.heads import HeadConfig
from bert_jax.interop import huggingface
from bert_jax.interop.huggingface_names import Say, to_hf
from bert_jax.interop.model_card import model_card
from bert_jax.interop.probe import SAMPLE_TEXTS, failed
from transformer_jax import storage
from transformer_jax.new_folder import check_target, new_folder
from transformer_jax.safetensors_folder import write_json
from transformer_jax.tokenizer import WordPiece

Pooling = Literal["mean", "cls"]
MARKS = ("modules.json", "model.safetensors")
"""Files by which an earlier export is known."""
_MODULES = (("", "Transformer"), ("1_Pooling", "Pooling"))
_log = logging.getLogger(__name__).warning


def export(
    params: Mapping[str, Any],
    config: BertConfig,
    tokenizer: WordPiece,
    out: str | Path,
    *,
    head: HeadConfig | None = None,
    pooling: Pooling = "mean",
    extra_card: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    say: Say = _log,
) -> Path:
    """Write a sentence-transformers folder, read its model back, compare, and only then put it at `out`.

    Args:
      params: nested dict of arrays without Flax boxes; heads are left out.
      head: of a fine-tuned model; left out too, and said.
      pooling: the mean over the pieces of a text, [CLS] and [SEP] included, or the vector of [CLS].
      extra_card: facts for the model card.
      overwrite: replace an earlier export. Any other folder that is not empty is refused.

    Returns:
      `out`.

    Raises:
      UserError: the target is in use, the disk refuses, or what was read back differs. Nothing is then left at `out`
        that was not there before.
    """
    out = storage.path(out)
    check_target(out, overwrite, MARKS)
    if head is not None:
        say(f"its head ({head.kind}) is left out")
    tensors = {
        name.removeprefix("bert."): x for name, x in to_hf(params, config, head).items() if name.startswith("bert.")
    }
    how = "the mean of a text's pieces" if pooling == "mean" else "the vector of [CLS]"
    facts = dict(extra_card or {}) | {
        "sentence_vector": how,
        "use": """`sentence-transformers` loads this folder:

```python
from sentence_transformers import SentenceTransformer
from transformer_jax import storage
vectors = SentenceTransformer("FOLDER").encode(["one text", "another"])
```

Pretraining alone does not make such vectors good at similarity; that takes training on pairs.""",
        "checked": """When this folder was written, it was read back: every tensor is the same bit for bit, and so are
the ids of sample texts.""",
    }
    with new_folder(out) as folder:
        huggingface.write(folder, tensors, config, tokenizer)
        settings = huggingface.config_to_hf(config, tokenizer) | {"architectures": ["BertModel"]}
        write_json(folder / "config.json", settings)
        _write_modules(folder, config, pooling)
        (folder / "README.md").write_text(
            model_card(config, tokenizer, facts, form="sentence-transformers"), encoding="utf-8"
        )
        found = huggingface.read(folder)
        for name, tensor in tensors.items():
            if not np.isfinite(tensor).all() or not np.array_equal(found.tensors[name], tensor):
                raise failed(f"tensor {name} reads back changed, or is not finite")
        for text in SAMPLE_TEXTS:
            if found.tokenizer.encode(text) != tokenizer.encode(text):
                raise failed(f"other token ids for {text!r}")
    return out


def _write_modules(folder: Path, config: BertConfig, pooling: Pooling) -> None:
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(_MODULES)
    ]
    (folder / "modules.json").write_text(json.dumps(modules, indent=2) + "\n", encoding="utf-8")
    (folder / "1_Pooling").mkdir()
    modes = {"cls_token": "cls", "mean_tokens": "mean", "max_tokens": "", "mean_sqrt_len_tokens": ""}
    settings: dict[str, Any] = {"word_embedding_dimension": config.hidden_size}
    settings |= {f"pooling_mode_{name}": kind == pooling for name, kind in modes.items()}
    write_json(folder / "1_Pooling" / "config.json", settings)
    # The tokenizer does the lower-casing itself.
    limits = {"max_seq_length": config.max_position_embeddings, "do_lower_case": False}
    write_json(folder / "sentence_bert_config.json", limits)
    write_json(folder / "config_sentence_transformers.json", {"prompts": {}, "similarity_fn_name": "cosine"})
