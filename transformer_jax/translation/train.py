"""One run of training: from a resolved configuration to a trained, saved and evaluated model."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh

from transformer_jax import bert_encoder, optim, run, sharding, storage
from transformer_jax import config as core
from transformer_jax.bert_encoder import BertEncoder
from transformer_jax.config import ConfigError, UserError
from transformer_jax.engine import Engine
from transformer_jax.goodput import Clock
from transformer_jax.profiles import Steps
from transformer_jax.run import Start
from transformer_jax.run_file import write_config
from transformer_jax.shards import Shards
from transformer_jax.signals import StopSignal
from transformer_jax.tokenizer import WordPiece
from transformer_jax.train import RunResult, Validation
from transformer_jax.translation import data, pairs, run_file
from transformer_jax.translation.config import TransformerConfig, TranslationConfig
from transformer_jax.translation.interop import marian
from transformer_jax.translation.loading import NAMING, Loaded, load
from transformer_jax.translation.model import count_parameters
from transformer_jax.translation.prepare import asked_otherwise
from transformer_jax.translation.score import score
from transformer_jax.translation.task import TranslationTask
from transformer_jax.translation.translate import validation_translate
from transformer_jax.translation.vocabularies import Vocabularies

Translate = Callable[[TranslationConfig, Vocabularies, Any, Sequence[str], Callable[[], bool]], "Sequence[str] | None"]
"""(resolved configuration, vocabularies, parameters on the mesh, source lines, stop) -> a translation of each line;
None if `stop` asked to leave half-way."""


def resolve(config: TranslationConfig, vocabularies: Vocabularies) -> TranslationConfig:
    """Fill in what only the prepared data knows, the sizes of the vocabularies, and by what the best steps are known.

    Raises:
      ConfigError: sizes in the run file that are not those of the data, or embeddings that do not fit the vocabularies.
    """
    sizes = {"source": vocabularies.source.vocab_size, "target": vocabularies.target.vocab_size}
    for side, found in sizes.items():
        asked = getattr(config.model, f"{side}_vocab_size")
        if asked not in (0, found):
            raise ConfigError(
                f"model.{side}_vocab_size is {asked}, and the {side} vocabulary of {config.data.prepared} has {found} "
                f"entries; leave model.{side}_vocab_size out, or prepare the data with that vocabulary"
            )
    if config.model.embeddings == "shared" and not vocabularies.shared_ids:
        raise ConfigError(
            f'model.embeddings is "shared", but {config.data.prepared} has a vocabulary for each side; set it to '
            '"separate" or "untied", or prepare the data with tokenizer.joint'
        )
    if isinstance(vocabularies.source, WordPiece) and config.model.encoder_embeddings != "bert":
        raise ConfigError(
            f"the source side of {config.data.prepared} is cut by BERT's WordPiece, which has no </s> and no <pad> at "
            'its end; set model.encoder_embeddings to "bert" (the preset transformer-bert has it)'
        )
    model = dataclasses.replace(config.model, source_vocab_size=sizes["source"], target_vocab_size=sizes["target"])
    config = dataclasses.replace(config, model=model)
    if config.validation.lines:
        best = dataclasses.replace(config.checkpoint, best_metric=config.validation.metric, best_is="highest")
        config = dataclasses.replace(config, checkpoint=best)
    return config


def open_prepared(config: TranslationConfig, split: str, check: Literal["sizes", "digests"] = "sizes") -> Shards:
    """The prepared shards of a run; where there are none, the message says which command makes them."""
    return run.open_prepared(config.data.prepared, split, "transformer-jax", check)


def check_prepared(config: TranslationConfig, shards: Shards, force: bool = False) -> list[str]:
    """Compare what the run file says of pairs and vocabularies with what the prepared data was made with.

    Returns:
      A line for each difference, if forced.

    Raises:
      ConfigError: there are differences: the run would silently be another than its file says.
    """
    recipe = None
    if config.data.recipe:
        with contextlib.suppress(UserError):  # recipe and text need not be where training is
            recipe = pairs.load_recipe(config.data.recipe, fetch=False)
    lines = asked_otherwise(shards.manifest, config, recipe)
    return run.refuse_otherwise(config.data.prepared, lines, "transformer-jax", force)


def make_engine(config: TranslationConfig, mesh: Mesh) -> Engine:
    """The task compiled for a mesh, with the run's optimizer."""
    task = TranslationTask(config.model, config.examples, config.objective)
    optimizer = optim.make(config.optimizer, config.train.steps, config.model.hidden_size)
    return Engine(task, optimizer, config.train, mesh, config.mesh.preset, config.optimizer.clip_norm)


def make_meta(config: TranslationConfig, shards: Shards, vocabularies: Vocabularies) -> dict[str, Any]:
    """What makes a checkpoint self-contained; see `transformer_jax.run.make_meta`."""
    meta = run.make_meta(
        config,
        tokenizer_files=vocabularies.files(),
        tokenizer_digest=vocabularies.digest,
        fingerprint=shards.fingerprint,
        sources=shards.source_names,
        naming=NAMING,
        packages=("sentencepiece",),
    )
    meta["data"]["languages"] = shards.manifest["languages"]
    if licence := shards.manifest.get("made_from", {}).get("about", {}).get("license"):
        meta["data"]["license"] = licence
    return meta


def train(
    config: TranslationConfig,
    *,
    force: bool = False,
    stop: StopSignal | None = None,
    on_step: Callable[[int, dict[str, float]], None] = lambda step, values: None,
    clock: Clock | None = None,
    profile: Steps | None = None,
    translate: Translate = validation_translate,
) -> RunResult:
    """Train, or go on training: where the run folder holds a checkpoint, the run goes on exactly as if never stopped.

    Args:
      config: from `run_file.load_run`.
      force, stop, on_step, clock, profile: see `transformer_jax.run.run`.
      translate: the decoder that `validation.lines` of the validation pairs are translated and scored with.

    Raises:
      UserError: anything the user can mend, before a long job starts wherever that is possible.
    """
    clock = clock or Clock()
    clock.start_up.enter("reading")
    # A long run reads every file once more before it trusts them: a flipped bit in a shard is another data set.
    shards = open_prepared(config, "train", check="digests")
    vocabularies = data.load_vocabularies(shards)
    otherwise = check_prepared(config, shards, force)  # before sizes, which can differ because the data is another
    config = resolve(config, vocabularies)
    heldout = open_prepared(config, "validation", check="digests")
    clock.start_up.enter("building")
    engine = make_engine(config, sharding.make_mesh(config.mesh))
    stream = data.TrainingData(shards, config.examples, config.train.seed, shards.folder / "plans")
    return run.run(
        config,
        engine,
        stream,
        data.EvaluationData(heldout, config.examples) if heldout.num_documents else None,
        make_meta(config, shards, vocabularies),
        write_files=lambda run_dir: write_run_files(run_dir, config, vocabularies),
        check_resume=lambda stored: run_file.check_resume(stored, config, force),
        start_elsewhere=elsewhere(config, engine, vocabularies),
        warnings=[f"warning: not prepared as this run says: {line}" for line in otherwise],
        opening_lines=opening_lines(config, engine, stream),
        force=force,
        stop=stop,
        on_step=on_step,
        clock=clock,
        profile=profile,
        validation=validation(config, vocabularies, heldout, translate),
    )


def validation(
    config: TranslationConfig, vocabularies: Vocabularies, heldout: Shards, translate: Translate
) -> Validation | None:
    """BLEU and chrF2 of the first `validation.lines` validation pairs; None where none are asked for.

    Raises:
      ConfigError: fewer pairs than asked for.
    """
    settings = config.validation
    if not settings.lines:
        return None
    if heldout.num_documents < settings.lines:
        raise ConfigError(
            f"validation.lines is {settings.lines}, and {config.data.prepared} has {heldout.num_documents} validation "
            "pairs; lower it, or hold out more"
        )
    texts = data.pair_texts(heldout, range(settings.lines))
    language = heldout.manifest["languages"][1]

    def scored(params: Any, stop: Callable[[], bool]) -> dict[str, float] | None:
        found = translate(config, vocabularies, params, [source for source, _ in texts], stop)
        if found is None:
            return None
        scores = score(found, [target for _, target in texts], language=language)
        return {"bleu": scores["bleu"]["score"], "chrf": scores["chrf"]["score"]}

    return Validation(("bleu", "chrf"), settings.every, scored)


def elsewhere(
    config: TranslationConfig, engine: Engine, vocabularies: Vocabularies
) -> Callable[[list[str]], Start] | None:
    """The start that `[init]` asks for: a run's parameters, or an encoder that comes from BERT; None if neither."""
    if config.init.checkpoint:
        return lambda notes: _from_run(config, engine, vocabularies, notes)
    if config.init.encoder_from:
        return lambda notes: _from_bert(config, engine, vocabularies, notes)
    return None


def _from_run(config: TranslationConfig, engine: Engine, vocabularies: Vocabularies, notes: list[str]) -> Start:
    where, folder = f"[init] from = {config.init.checkpoint!r}", storage.path(config.init.checkpoint)
    loaded: Loaded | marian.Folder
    step, meta = None, {}
    if marian.is_folder(folder):
        loaded = marian.read_folder(folder)
    else:
        loaded = load(config.init.checkpoint)
        step, meta = loaded.step, loaded.meta
    run.check_init(config, step, meta, "folder in Marian's format")
    if loaded.vocabularies.digest != vocabularies.digest:
        raise ConfigError(
            f"{where} has other vocabularies than {config.data.prepared}; prepare the data with those "
            f'(tokenizer.vocabularies = "{config.init.checkpoint.split("@")[0]}")'
        )
    _check_fit(where, loaded, config)
    return run.start_of_phase(config, engine, step, lambda: with_padding(loaded.params, config.model), notes)


def _check_fit(where: str, loaded: Loaded | marian.Folder, config: TranslationConfig) -> None:
    changed = core.differences(core.to_builtins(loaded.config), core.to_builtins(config.model), "model.")
    if config.init.optimizer != "keep":
        changed.pop("model.vocab_multiple", None)  # the padding is made anew
    fixed = [f"{k}: {a!r} there, {b!r} here" for k, (a, b) in changed.items() if k.startswith(run_file.FIXED)]
    if fixed:
        raise ConfigError(f"{where} does not fit this model:\n  " + "\n  ".join(fixed))


def _from_bert(config: TranslationConfig, engine: Engine, vocabularies: Vocabularies, notes: list[str]) -> Start:
    """Fresh parameters, but embeddings and encoder on the source side from BERT."""
    found = bert_encoder.read(config.init.encoder_from, notes.append)
    check_encoder(config, vocabularies, found)
    state = engine.init()
    params, put = state.params, jax.device_put
    word = {"embedding": _padded(found.embeddings["word"]["embedding"], config.model.padded_source_vocab_size)}
    shardings = engine.shardings.params
    source = jax.tree.map(put, {**found.embeddings, "word": word}, shardings["embeddings"]["source"])
    encoder = jax.tree.map(put, found.encoder, shardings["encoder"])
    params = {**params, "encoder": encoder, "embeddings": {**params["embeddings"], "source": source}}
    return Start(state._replace(params=params), 0, False, [*notes, f"encoder from {config.init.encoder_from}"])


def check_encoder(config: TranslationConfig, vocabularies: Vocabularies, found: BertEncoder) -> None:
    """Refuse an encoder that this model cannot start from.

    Raises:
      ConfigError: names each setting that does not fit, with both values.
    """
    where = f"init.encoder_from {config.init.encoder_from}"
    wrong = []
    for name, wanted in (("encoder_embeddings", "bert"), ("norm", "post")):
        if getattr(config.model, name) != wanted:
            wrong.append(f"model.{name} is {getattr(config.model, name)!r}; it must be {wanted!r}")
    same = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_act",
            "layer_norm_eps", "max_position_embeddings", "type_vocab_size")  # fmt: skip
    for name in same:
        here = getattr(config.model, name)
        if found.settings.get(name, here) != here:
            wrong.append(f"model.{name} is {here!r}; there it is {found.settings[name]!r}")
    if wrong:
        raise ConfigError(f"{where} does not fit this model:\n  " + "\n  ".join(wrong))
    if not isinstance(vocabularies.source, WordPiece) or vocabularies.source.digest != found.tokenizer.digest:
        raise ConfigError(
            f"{where} has another vocabulary than the source side of {config.data.prepared}; set "
            f'tokenizer.source_wordpiece = "{config.init.encoder_from}" and tokenizer.joint = false, and run '
            "`transformer-jax prepare` again"
        )


def with_padding(params: dict[str, Any], config: TransformerConfig) -> dict[str, Any]:
    """Parameters whose tables are padded as `config` says, with the zeros that padding rows are born with."""

    def padded(table: dict[str, Any], used: int, rows: int) -> dict[str, Any]:
        if "word" in table:
            return {**table, "word": padded(table["word"], used, rows)}
        return {"embedding": _padded(table["embedding"][:used], rows)}

    tables = {
        name: padded(table, config.source_vocab_size, config.padded_source_vocab_size)
        if name == "source"
        else padded(table, config.target_vocab_size, config.padded_target_vocab_size)
        for name, table in params["embeddings"].items()
    }
    if not config.output_bias:
        return {**params, "embeddings": tables}
    bias_V = params["output"]["bias"][: config.target_vocab_size]
    return {**params, "embeddings": tables, "output": {"bias": _padded(bias_V, config.padded_target_vocab_size)}}


def _padded(table: np.ndarray, rows: int) -> np.ndarray:
    """A table [V, H] or vector [V] with zeros up to so many rows."""
    return np.pad(np.asarray(table), [(0, rows - len(table))] + [(0, 0)] * (table.ndim - 1))


def opening_lines(config: TranslationConfig, engine: Engine, stream: data.TrainingData) -> list[str]:
    """What is about to run, for people."""
    model, examples = config.model, config.examples
    vocabulary = f"vocabulary {model.target_vocab_size:,}"
    if model.source_vocab_size != model.target_vocab_size or model.embeddings != "shared":
        vocabulary = f"vocabularies {model.source_vocab_size:,} and {model.target_vocab_size:,}"
    counts = count_parameters(model)
    parts = ", ".join(f"{name} {count:,}" for name, count in counts.items() if name != "total")
    lengths = f"{examples.max_source_length} + {examples.max_target_length}"
    lines = run.opening_lines(config, engine, stream, f"{counts['total']:,} parameters, {vocabulary}", lengths)
    lines.insert(1, f"parameters: {parts}")
    if stream.too_long:
        lines.append(f"{stream.too_long:,} pairs are longer than a row and left out")
    return lines


def write_run_files(run_dir: Path, config: TranslationConfig, vocabularies: Vocabularies) -> None:
    """`config.toml` and the vocabularies."""
    write_config(run_dir, config, run_file.BESIDE)
    vocabularies.save(run_dir / "tokenizer")
