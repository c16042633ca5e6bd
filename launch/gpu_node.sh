#!/bin/sh
# A run on one node with NVIDIA GPUs: one process for all of them, started again where that helps (launch/restart.py).
#
#   launch/gpu_node.sh [--dry-run] install
#   launch/gpu_node.sh [--dry-run] check RUN.toml FOLDER [--key value ...]
#   launch/gpu_node.sh [--dry-run] run RUN.toml RUN_DIR [--key value ...]
#
# PROGRAM=transformer-jax is the other program; CUDA_VISIBLE_DEVICES=0,1 leaves the other GPUs alone. `run` stays in the
# foreground: start it in tmux, or by systemd with KillMode=mixed. Not yet run on a GPU.
set -eu
cd "$(dirname "$0")/.."

fail() {
  printf 'gpu_node.sh: %s\n' "$*" >&2
  exit 2
}

do_it() {
  if [ ! "$dry" ]; then
    "$@"
    return
  fi
  between=
  for word in "$@"; do
    case $word in
      '' | *[!A-Za-z0-9_./:=@%+,-]*) printf "%s'%s'" "$between" "$(printf '%s' "$word" | sed "s/'/'\\\\''/g")" ;;
      *) printf '%s%s' "$between" "$word" ;;
    esac
    between=' '
  done
  echo
}

dry=
if [ "${1:-}" = --dry-run ]; then
  dry=1
  shift
fi
program=${PROGRAM:-bert-jax}
case $program in
  bert-jax) verb=pretrain ;;
  transformer-jax) verb=train ;;
  *) fail "PROGRAM is '$program'; bert-jax or transformer-jax" ;;
esac

case ${1:-} in
  -h | --help | help)
    sed -n '2,/^set -eu/{/^set -eu/d;s/^# \{0,1\}//;p;}' launch/gpu_node.sh
    ;;
  install)
    [ $# -eq 1 ] || fail "install takes nothing more"
    do_it make .venv/complete
    do_it .venv/bin/pip install --editable '.[cuda]'
    ;;
  check | run)
    [ $# -ge 3 ] || fail "a run file and a run folder are needed: launch/gpu_node.sh $1 RUN.toml RUN_DIR"
    what=$1
    file=$2
    run=$3
    shift 3
    [ -f "$file" ] || fail "there is no run file $file; paths are taken from the repository"
    if [ ! "$dry" ]; then
      [ -x ".venv/bin/$program" ] || fail "there is no .venv/bin/$program; launch/gpu_node.sh install makes it"
      nvidia-smi --list-gpus >&2 || fail "nvidia-smi finds no GPU; is the driver installed?"
    fi
    if [ "$what" = check ]; then # nothing is started again
      do_it exec ".venv/bin/$program" check "$file" --out "$run" --hosts.mode single "$@"
      exit
    fi
    do_it exec python3 launch/restart.py --run-dir "$run" -- \
      ".venv/bin/$program" "$verb" "$file" --run_dir "$run" --hosts.mode single "$@"
    ;;
  '') fail "no command; install, check or run" ;;
  *) fail "there is no command $1; install, check or run" ;;
esac
