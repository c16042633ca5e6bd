#!/bin/sh
# A run on Cloud TPU VMs, by way of a queued resource. Not yet run with a cloud account: try --dry-run first.
#
#   launch/tpu_vm.sh COMMAND --name NAME --zone ZONE [options] [-- --key value ...]
#
#   create    ask for the machines: a queued resource NAME whose one node is NAME too
#   wait      until they are there
#   status    the state of the request: ACTIVE, WAITING_FOR_RESOURCES, SUSPENDED (after a preemption), FAILED, ...
#   install   mount the shared folder; copy the last commit to all workers and install it there, with the TPU's library
#   prepare   prepare the run's data, on worker 0
#   check     train 20 steps on all workers, kill one, resume, compare, export: before the first run, and waited for
#   run       start training on all workers, each under launch/restart.py; it goes on when this machine leaves
#   logs      follow the log of a worker
#   stop      SIGTERM to the run: it saves, and this waits until it has left
#   restart   after a preemption (SUSPENDED, FAILED) delete, create, wait, install and run; where the machines are there,
#             stop and run
#   delete    give the machines back; what is in the shared folder, or the bucket, stays
#
# option          environment        default
# --name          TPU_VM_NAME        none
# --zone          TPU_VM_ZONE        none; such as us-west4-a
# --project       TPU_VM_PROJECT     gcloud's own setting
# --type          TPU_VM_TYPE        v5litepod-16
# --runtime       TPU_VM_RUNTIME     the image for the type: v2-alpha-tpuv5-lite for v5litepod-*
# --spot          TPU_VM_SPOT=1      not set: machines that are not taken away
# --nfs           TPU_VM_NFS         none; ADDRESS:/SHARE of a file system, mounted at --mount
# --mount         TPU_VM_MOUNT       /mnt/runs
# --program       TPU_VM_PROGRAM     bert-jax; or transformer-jax
# --run-file      TPU_VM_RUN_FILE    none; a committed file of this repository, such as launch/runs/demo_en.toml
# --run-dir       TPU_VM_RUN_DIR     MOUNT/NAME: on the shared folder, whose name survives machines; or gs://BUCKET/...
# --prepared      TPU_VM_PREPARED    MOUNT/prepared/STEM: the prepared data of run file STEM.toml; or gs://BUCKET/...
# --worker        TPU_VM_WORKER      0; whose log `logs` follows, or all
# --if-lost                          `restart` does nothing where the machines are there
# --dry-run                          print every command and run none
#
# What stands after -- goes to prepare, check and run, as in: -- --train.batch_size 4096
set -eu

code=bert-transformer-jax
here=$(cd "$(dirname "$0")/.." && pwd)

fail() {
  printf 'tpu_vm.sh: %s\n' "$*" >&2
  exit 2
}

usage() { sed -n '2,/^set -eu/{/^set -eu/d;s/^# \{0,1\}//;p;}' "$0"; }

# Words as a shell reads them back.
quoted() {
  first=1
  for word in "$@"; do
    [ "$first" ] || printf ' '
    first=
    case $word in
      '' | *[!A-Za-z0-9_./:=@%+,-]*) printf "'%s'" "$(printf '%s' "$word" | sed "s/'/'\\\\''/g")" ;;
      *) printf '%s' "$word" ;;
    esac
  done
}

do_it() {
  if [ "$dry" ]; then
    quoted "$@"
    echo
  else
    "$@"
  fi
}

# gcloud compute tpus GROUP VERB ... with zone and project.
tpus() {
  set -- gcloud compute tpus "$@" "--zone=$zone"
  if [ "$project" ]; then set -- "$@" "--project=$project"; fi
  do_it "$@"
}

on_workers() { tpus tpu-vm ssh "$name" "--worker=$1" "--command=$2"; }

state() { tpus queued-resources describe "$name" '--format=value(state.state)'; }

create() {
  set -- "$name" "--node-id=$name" "--accelerator-type=$type" "--runtime-version=$runtime"
  if [ "$spot" ]; then set -- "$@" --spot; fi
  tpus queued-resources create "$@"
}

await() {
  if [ "$dry" ]; then
    state
    echo "# ... every 30 s until it is ACTIVE"
    return
  fi
  while true; do
    now=$(state)
    printf '%s %s\n' "$(date +%H:%M:%S)" "$now" >&2
    case $now in
      ACTIVE) return ;;
      FAILED | SUSPENDED) fail "the request is $now; launch/tpu_vm.sh restart makes a new one" ;;
    esac
    sleep 30
  done
}

# On a worker: is the run there, whose process `start` has noted?
# shellcheck disable=SC2016  # the worker's shell expands it
running='[ -f ~/run.pid ] && kill -0 "$(cat ~/run.pid)" 2>/dev/null'

mount_line() {
  [ "$nfs" ] || return 0
  printf 'sudo mkdir -p %s; mountpoint -q %s || sudo mount -t nfs %s %s; sudo chmod 1777 %s; ' \
    "$mount" "$mount" "$nfs" "$mount" "$mount"
}

install() {
  archive=build/$code.tar.gz
  do_it mkdir -p build
  do_it git archive --format=tar.gz "--output=$archive" HEAD
  tpus tpu-vm scp "$archive" "$name:" --worker=all
  # Images have Python 3.10 or one that cannot make environments; uv brings another where no Python fits.
  on_workers all "set -e; if $running; then echo 'a run is there; stop it first' >&2; exit 1; fi; \
sudo apt-get -o DPkg::Lock::Timeout=600 -qq update; \
sudo apt-get -o DPkg::Lock::Timeout=600 -qq install -y nfs-common python3-pip python3-venv; \
$(mount_line)rm -rf $code; mkdir $code; tar -xzf $code.tar.gz -C $code; cd $code; \
python=\$(sh requirements/find_python.sh 2>/dev/null) || { python3 -m pip install --quiet --user uv; \
~/.local/bin/uv python install --quiet 3.12; python=\$(~/.local/bin/uv python find 3.12); }; \
\"\$python\" requirements/install.py .venv users; .venv/bin/python requirements/install.py .venv tpu; \
.venv/bin/python requirements/install.py .venv gcs"
}

need_run_file() {
  [ "$run_file" ] || fail "no run file; give --run-file launch/runs/NAME.toml"
  case $run_file in /* | ../* | */../*) fail "$run_file is not in this repository, of which install copies a commit" ;; esac
  [ -f "$here/$run_file" ] || fail "$run_file is not a file of this repository"
}

prepare() {
  on_workers 0 "cd $code && $(quoted ".venv/bin/$program" prepare "$run_file" --data.prepared "$prepared" "$@")"
}

check() {
  words=$(quoted ".venv/bin/$program" check "$run_file" --out "$run_dir-check" --data.prepared "$prepared" \
    --hosts.mode auto "$@")
  on_workers all "cd $code || exit 1; \
if $running; then echo 'a run is there; stop it first' >&2; exit 1; fi; $words"
}

start() {
  case $program in transformer-jax) verb=train ;; *) verb=pretrain ;; esac
  words=$(quoted python3 launch/restart.py --run-dir "$run_dir" -- ".venv/bin/$program" "$verb" "$run_file" \
    --run_dir "$run_dir" --data.prepared "$prepared" --hosts.mode auto "$@")
  on_workers all "cd $code || exit 1; \
if $running; then echo 'a run is there already' >&2; exit 1; fi; \
nohup $words >>~/run.log 2>&1 </dev/null & echo \$! >~/run.pid"
}

stop() {
  on_workers all "if $running; then pid=\$(cat ~/run.pid); kill -TERM \"\$pid\"; \
while kill -0 \"\$pid\" 2>/dev/null; do sleep 0.5; done; \
else echo 'no run is there' >&2; fi"
}

delete() { tpus queued-resources delete "$name" --force --quiet; }

again() {
  delete
  create
  await
  install
  start "$@"
}

restart() {
  if [ "$dry" ]; then
    state
    echo "# where that prints ACTIVE:"
    if [ "$if_lost" ]; then
      echo "# nothing"
    else
      stop
      start "$@"
    fi
    echo "# where it prints SUSPENDED or FAILED:"
    again "$@"
    echo "# where it prints anything else: an error, since the machines are on their way"
    return
  fi
  now=$(state) || fail "there is no request $name in $zone, or it cannot be seen; create makes one"
  case $now in
    ACTIVE)
      if [ "$if_lost" ]; then
        echo "$name is ACTIVE" >&2
        return
      fi
      stop
      start "$@"
      ;;
    SUSPENDED | FAILED) again "$@" ;;
    *) fail "$name is $now; wait until it is ACTIVE, SUSPENDED or FAILED" ;;
  esac
}

case ${1:-} in
  create | wait | status | install | prepare | check | run | logs | stop | restart | delete) command=$1 ;;
  -h | --help | help)
    usage
    exit 0
    ;;
  '') fail "no command; create, wait, status, install, prepare, check, run, logs, stop, restart or delete" ;;
  *) fail "there is no command $1; create, wait, status, install, prepare, check, run, logs, stop, restart or delete" ;;
esac
shift

name=${TPU_VM_NAME:-}
zone=${TPU_VM_ZONE:-}
project=${TPU_VM_PROJECT:-}
type=${TPU_VM_TYPE:-v5litepod-16}
runtime=${TPU_VM_RUNTIME:-}
spot=${TPU_VM_SPOT:-}
nfs=${TPU_VM_NFS:-}
mount=${TPU_VM_MOUNT:-/mnt/runs}
program=${TPU_VM_PROGRAM:-bert-jax}
run_file=${TPU_VM_RUN_FILE:-}
run_dir=${TPU_VM_RUN_DIR:-}
prepared=${TPU_VM_PREPARED:-}
worker=${TPU_VM_WORKER:-0}
if_lost=
dry=

while [ $# -gt 0 ]; do
  case $1 in
    --name | --zone | --project | --type | --runtime | --nfs | --mount | --program | --run-file | --run-dir | \
      --prepared | --worker)
      [ $# -ge 2 ] || fail "$1 needs a value"
      case $1 in
        --name) name=$2 ;;
        --zone) zone=$2 ;;
        --project) project=$2 ;;
        --type) type=$2 ;;
        --runtime) runtime=$2 ;;
        --nfs) nfs=$2 ;;
        --mount) mount=$2 ;;
        --program) program=$2 ;;
        --run-file) run_file=$2 ;;
        --run-dir) run_dir=$2 ;;
        --prepared) prepared=$2 ;;
        --worker) worker=$2 ;;
      esac
      shift
      ;;
    --spot) spot=1 ;;
    --if-lost) if_lost=1 ;;
    --dry-run) dry=1 ;;
    --)
      shift
      break
      ;;
    *) fail "there is no option $1; launch/tpu_vm.sh --help lists them" ;;
  esac
  shift
done

# must VALUE WHAT PATTERN EXAMPLE: an error where a value does not match as a whole. grep looks at lines one by one.
must() {
  case $1 in *"
"*) fail "$2 has more than one line; it must look like $4" ;; esac
  printf '%s\n' "$1" | grep -Eqx -e "$3" || fail "$2 is '$1'; it must look like $4"
}

case $spot in 0 | no | false) spot= ;; esac
[ "$name" ] || fail "no name; give --name NAME or set TPU_VM_NAME"
[ "$zone" ] || fail "no zone; give --zone ZONE or set TPU_VM_ZONE, such as us-west4-a"
must "$name" --name '[a-z]([a-z0-9-]{0,61}[a-z0-9])?' 'bert-1: small letters, digits and dashes'
must "$zone" --zone '[a-z]+-[a-z]+[0-9]+-[a-z]' us-west4-a
case $type in v5e-*) fail "--type is '$type'; Google's own name for it is v5litepod-${type#v5e-}" ;; esac
must "$type" --type 'v[0-9][a-z]*-[0-9]+' 'v5litepod-16, v5p-32 or v6e-16'
must "$mount" --mount '/[A-Za-z0-9_./-]+' /mnt/runs
must "$worker" --worker 'all|[0-9]+' '0 or all'
[ -z "$project" ] || must "$project" --project '[a-z0-9.:-]+' my-project
[ -z "$nfs" ] || must "$nfs" --nfs '[A-Za-z0-9.-]+:/[A-Za-z0-9_./-]*' 10.0.0.2:/share
case $program in bert-jax | transformer-jax) ;; *) fail "--program is '$program'; bert-jax or transformer-jax" ;; esac
if [ -z "$runtime" ]; then
  case $type in
    v5litepod-*) runtime=v2-alpha-tpuv5-lite ;;
    v5p-*) runtime=v2-alpha-tpuv5 ;;
    v6e-*) runtime=v2-alpha-tpuv6e ;;
    v2-* | v3-* | v4-*) runtime=tpu-ubuntu2204-base ;;
    *) fail "no runtime version is known for $type; give --runtime" ;;
  esac
fi
must "$runtime" --runtime '[a-z0-9.-]+' v2-alpha-tpuv5-lite
[ "$run_dir" ] || run_dir=$mount/$name
[ "$prepared" ] || prepared=$mount/prepared/$(basename "$run_file" .toml)
for folder in "$run_dir" "$prepared"; do
  case $folder in
    gs://*) must "$folder" 'the folder' 'gs://[a-z0-9][a-z0-9._-]+(/[A-Za-z0-9._=+-]+)+' gs://BUCKET/bert-1 ;;
    /*) ;;
    *) fail "'$folder' must be gs://BUCKET/... or an absolute path, in a folder that all workers share" ;;
  esac
done
case $command in
  prepare | check | run | restart) need_run_file ;;
  *) [ $# -eq 0 ] || fail "$command takes nothing after --" ;;
esac
cd "$here"
[ "$dry" ] || command -v gcloud >/dev/null || fail "gcloud is not on the PATH; install the Google Cloud CLI"

case $command in
  create) create ;;
  wait) await ;;
  status) state ;;
  install) install ;;
  prepare) prepare "$@" ;;
  check) check "$@" ;;
  run) start "$@" ;;
  logs) on_workers "$worker" 'tail -n 100 -F ~/run.log' ;;
  stop) stop ;;
  restart) restart "$@" ;;
  delete) delete ;;
esac
