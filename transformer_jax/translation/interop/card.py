"""The page that goes with an exported translation model."""

from __future__ import annotations

from pathlib import Path

from transformer_jax import config as core
from transformer_jax.model_facts import place_name, without_places
from transformer_jax.translation.loading import Loaded
from transformer_jax.translation.model import count_parameters

_USE = {
    "marian": """`MarianMTModel` and `MarianTokenizer` of `transformers` load this folder. Its beam search divides the
score of a translation by length^0.5 (`generation_config.json`), which is the nearest to ((5 + length) / 6)^0.6, the
penalty that this project's own search has.""",
    "ctranslate2": """CTranslate2 loads this folder: `Translator(FOLDER).translate_batch([pieces], beam_size=4,
length_penalty=0.5)` takes pieces of `source.spm` without `</s>`, and gives pieces of `target.spm`. Without that
`length_penalty` its default is 1; 0.5 is the nearest to this project's own search. `config.json` holds it, and the
longest source, for who calls it.""",
}
_CHECKED = {
    "marian": """When this folder was written, it was read back: its logits on three padded pairs are within 1e-4 of
the model's in float32, every tensor is the same bit for bit, and so are the ids of sample texts.""",
    "ctranslate2": """When this folder was written, CTranslate2 scored pairs with it: the log-probability of each piece
is within 1e-4 of the model's, or within 0.5 with 8-bit weights, in float32 arithmetic.""",
}


def card(checkpoint: str | Path, found: Loaded, form: str) -> str:
    """The README.md of an exported folder.

    Args:
      form: the format, and what else of the command line made it, as in "ctranslate2 --int8".
    """
    meta, config = found.meta, found.config
    data = meta.get("data", {})
    kind = form.split()[0]
    rows: list[tuple[str, object]] = [
        ("layers of encoder and decoder", f"{config.num_hidden_layers} and {config.num_decoder_layers}"),
        ("hidden size", config.hidden_size),
        ("attention heads", config.num_attention_heads),
        ("parameters", f"{count_parameters(config)['total']:,}"),
        ("vocabulary", f"{config.source_vocab_size:,} and {config.target_vocab_size:,}, `<pad>` included"),
        ("longest source in training", f"{found.max_source_length} pieces, `</s>` included; cut longer text first"),
        ("step", found.step),
    ]
    if "languages" in data:
        rows.append(("languages", " to ".join(map(str, data["languages"]))))
    if "fingerprint" in data:
        rows.append(("fingerprint of the data", data["fingerprint"]))
    if data.get("sources"):
        rows.append(("sources", ", ".join(map(place_name, data["sources"]))))
    rows.append(("licence of the text", data.get("license") or "see its sources"))
    if "imported_from" in meta:
        rows.append(("imported from", meta["imported_from"]))
    if "averaged_from" in meta:
        rows.append(("mean of", ", ".join(meta["averaged_from"])))
    rows.append(("exported by", f"`transformer-jax export CHECKPOINT OUT --format {form}`"))
    table = "\n".join(f"| {key} | {value} |" for key, value in rows)
    name = Path(meta["config"].get("run_dir") or str(checkpoint)).name
    return f"""---
license: "unknown"
pipeline_tag: "translation"
tags: ["transformer", "jax"]
---

# {name}

A Transformer for translation (Vaswani et al. 2017). {_USE[kind]}

The licence of the model is for its publisher to state, in the first lines of this page.

| | |
|---|---|
{table}

## How it was checked

{_CHECKED[kind]}

## Settings

```toml
{core.dump_toml(without_places(meta["config"]))}```
"""
