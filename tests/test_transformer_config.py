"""Run files: what is refused, and how it is said."""

import dataclasses
import math
from typing import Literal

import pytest

from transformer_jax import config as core
from transformer_jax.config import ConfigError, EncoderConfig, MeshConfig, OptimizerConfig, TrainConfig


@dataclasses.dataclass(frozen=True)
class Part:
    name: str
    weight: float = 1.0
    kind: Literal["old", "new"] = "new"


@dataclasses.dataclass(frozen=True)
class Run:
    title: str = ""
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    parts: tuple[Part, ...] = ()
    limit: float | None = None


def test_a_file_states_differences_only():
    run = core.load(Run, {"train": {"steps": 7}}, "r.toml", Run(title="kept", train=TrainConfig(batch_size=12)))
    assert (run.title, run.train.steps, run.train.batch_size) == ("kept", 7, 12)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"train": {"stpes": 1}}, r"r\.toml: unknown key `train\.stpes`; did you mean `train\.steps`\?"),
        ({"trian": {}}, r"unknown key `trian`; did you mean `train`\?"),
        ({"zzz": 1}, r"unknown key `zzz`; valid here: `title`, `train`"),
        (
            {"parts": [{"name": "a"}, {"nmae": "b"}]},
            r"unknown key `parts\[1\]\.nmae`; did you mean `parts\[1\]\.name`\?",
        ),
        ({"train": {"steps": "many"}}, r"r\.toml: Expected `int`, got `str` - at `train\.steps`"),
        ({"train": {"steps": 1.5}}, r"Expected `int`, got `float` - at `train\.steps`"),
        ({"train": 3}, r"Expected `object`, got `int` - at `train`"),
        ({"parts": [{}]}, r"missing required field `name`"),
        ({"parts": {"name": "a"}}, r"`parts` is one table, .* write \[\[parts\]\] in place of \[parts\]"),
        (
            {"optimizer": {"name": "adma"}},
            r"Invalid enum value 'adma' - at `optimizer\.name`; did you mean `adam`\?",
        ),
        (
            {"parts": [{"name": "a", "kind": "zzz"}]},
            r"Invalid enum value 'zzz' - at `parts\[0\]\.kind`; valid here: `old`, `new`",
        ),
        ({"train": {"seed": -1}}, r"train\.seed is -1; it must be at least 0"),
        ({"train": {"seed": 1 << 32}}, r"train\.seed is 4294967296; it must be below 2\^32"),
        ({"optimizer": {"clip_norm": -1.0}}, r"optimizer\.clip_norm is -1\.0; it must be a number of at least 0"),
        ({"optimizer": {"weight_decay": math.nan}}, r"optimizer\.weight_decay is nan"),
        ({"train": {"batch_size": 10, "accumulate": 3}}, r"r\.toml: train\.batch_size 10 does not divide"),
    ],
)
def test_a_mistake_is_named_with_file_and_key(data, message):
    with pytest.raises(ConfigError, match=message):
        core.load(Run, data, "r.toml")


def test_a_written_configuration_reads_back_equal(tmp_path):
    run = Run(title='a "quoted" line\nand 中文', parts=(Part("x"), Part("y", 0.5)), train=TrainConfig(steps=3))
    path = tmp_path / "r.toml"
    path.write_text(core.dump_toml(run), encoding="utf-8")
    assert core.load(Run, core.read_toml(path), str(path)) == run


def test_a_byte_order_mark_at_the_start_of_a_file_is_dropped(tmp_path):
    """C036."""
    (tmp_path / "r.toml").write_bytes(b"\xef\xbb\xbfa = 1\r\n")
    assert core.read_toml(tmp_path / "r.toml") == {"a": 1}


def test_missing_and_broken_files_are_named(tmp_path):
    (tmp_path / "demo.toml").write_text("a = \n")
    with pytest.raises(ConfigError, match=r"demo\.toml: not valid TOML"):
        core.read_toml(tmp_path / "demo.toml")
    with pytest.raises(ConfigError, match=r"dmeo\.toml: no such file; did you mean .*demo\.toml\?"):
        core.read_toml(tmp_path / "dmeo.toml")


def test_differences_are_dotted():
    assert core.differences({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}, "d": 4}) == {"a.c": (2, 3), "d": (None, 4)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 10, "num_attention_heads": 3}, "hidden_size 10 does not divide into num_attention_heads 3"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0; it must be at least 1"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0; it must be at least 1"),
        ({"layer_norm_eps": -1.0}, "layer_norm_eps is -1.0; it must be a number above 0"),
        ({"initializer_range": math.inf}, "initializer_range is inf; it must be a number of at least 0"),
        ({"hidden_dropout_prob": 1.0}, "hidden_dropout_prob is 1.0; it must be at least 0 and below 1"),
    ],
)
def test_impossible_encoders_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        EncoderConfig(**changes)


def test_a_mesh_has_at_least_one_slice():
    with pytest.raises(ConfigError, match=r"mesh\.slices is 0; it must be at least 1"):
        MeshConfig(slices=0)


def test_layers_are_unrolled_up_to_berts_largest():
    assert not EncoderConfig(num_hidden_layers=24).scanned
    assert EncoderConfig(num_hidden_layers=25).scanned
    assert EncoderConfig(num_hidden_layers=2, layers="scanned").scanned
