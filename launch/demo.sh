#!/bin/sh
# The whole path, from documents to a model for other programs. The same commands again go on where this one stopped.
#
#   launch/demo.sh RUN.toml RUN [--key value ...]
#
# RUN.toml is a run file, RUN the folder of the run; further keys go to `bert-jax prepare` and `bert-jax pretrain`.
set -eu
file=$1
run=$2
shift 2
out=exports/$(basename "$run")

say() { printf '\n== %s\n' "$*"; }

say "bert-jax prepare $file"
bert-jax prepare "$file" "$@"
say "bert-jax pretrain $file --run_dir $run $*"
bert-jax pretrain "$file" --run_dir "$run" "$@"
say "bert-jax evaluate $run"
bert-jax evaluate "$run"
say "bert-jax fill-mask $run ..."
case $file in
  *_zh*) bert-jax fill-mask "$run" "次日，玄德引[MASK]而行。" "曹操大[MASK]，急令退军。" "耶和华[MASK]摩西说。" ;;
  *) bert-jax fill-mask "$run" "She could not [MASK] what he had said." "The function returns a [MASK] of strings." \
      "If the table does not [MASK], an error is raised." ;;
esac
say "bert-jax export $run $out --format huggingface"
bert-jax export "$run" "$out" --format huggingface --overwrite
say "bert-jax report $run"
bert-jax report "$run"
