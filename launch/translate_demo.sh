#!/bin/sh
# The whole path of translation, from pairs to a CTranslate2 model. The same commands again go on where this one stopped.
#
#   launch/translate_demo.sh RUN.toml RUN [--key value ...]
#
# RUN.toml is a run file, RUN the folder of the run; further keys go to `transformer-jax prepare` and `train`.
set -eu
file=$1
run=$2
shift 2
out=exports/$(basename "$run")

say() { printf '\n== %s\n' "$*"; }

say "transformer-jax prepare $file"
transformer-jax prepare "$file" "$@"
say "transformer-jax train $file --run_dir $run $*"
transformer-jax train "$file" --run_dir "$run" "$@"
say "transformer-jax average $run --last 5 --out $run-average"
rm -rf "$run-average"
transformer-jax average "$run" --last 5 --out "$run-average"
say "transformer-jax evaluate $run-average"
transformer-jax evaluate "$run-average"

mkdir -p "$out"
gzip -dc data/pairs/en-de/test.permissive.tsv.gz | cut -f 1 > "$out/test.en"
gzip -dc data/pairs/en-de/test.permissive.tsv.gz | cut -f 2 > "$out/test.de"
say "transformer-jax translate $run-average --input $out/test.en --output $out/test.ours"
transformer-jax translate "$run-average" --input "$out/test.en" --output "$out/test.ours"
transformer-jax score "$out/test.ours" "$out/test.de" --language de

say "ten translations: source, ours, reference"
paste -d '\n' "$out/test.en" "$out/test.ours" "$out/test.de" | awk 'NR > 30 {exit} {print} NR % 3 == 0 {print ""}'

say "transformer-jax export $run-average $out/ctranslate2 --format ctranslate2"
transformer-jax export "$run-average" "$out/ctranslate2" --format ctranslate2 --overwrite
python launch/translate_ctranslate2.py "$out/ctranslate2" < "$out/test.en" > "$out/test.ctranslate2"
transformer-jax score "$out/test.ctranslate2" "$out/test.de" --language de
say "transformer-jax export $run-average $out/marian --format marian"
transformer-jax export "$run-average" "$out/marian" --format marian --overwrite
say "transformer-jax report $run"
transformer-jax report "$run"
