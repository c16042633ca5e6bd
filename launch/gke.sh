#!/bin/sh
# A run on one TPU slice of Google Kubernetes Engine: fills in launch/gke_jobset.yaml. Not yet run on a cluster.
#
#   launch/gke.sh COMMAND --name NAME [options] [-- --key value ...]
#
#   render    print the manifest
#   apply     kubectl apply it
#   status    the JobSet and its pods
#   logs      follow the log of the first pod
#   delete    kubectl delete it; what is in the claim stays
#
# option          default
# --name          none: of the JobSet
# --image         none: made from launch/Dockerfile
# --run-file      none: a file of this repository, such as launch/runs/demo_en.toml
# --claim         none: a PersistentVolumeClaim that many pods may write to, mounted at /mnt/runs; not needed where
#                 both folders are gs://BUCKET/...
# --program       bert-jax; or transformer-jax
# --run-dir       /mnt/runs/NAME; or gs://BUCKET/...
# --prepared      /mnt/runs/prepared/STEM, for run file STEM.toml; or gs://BUCKET/...
# --account       not set: the Kubernetes service account of the pods, which lets them into the bucket
# --accelerator   tpu-v5-lite-podslice
# --topology      4x4: 16 chips
# --chips         4: of a host
# --restarts      20: of the whole JobSet
# --spot          not set: nodes that are not taken away
# --check         not set: 20 steps, a kill, the rest and an export into the run folder, in place of the run (15 minutes)
# --namespace     kubectl's own setting
# --dry-run       print the manifest and the command, and run nothing
#
# What stands after -- goes to the program, as in: -- --train.batch_size 4096
set -eu

template=$(dirname "$0")/gke_jobset.yaml

fail() {
  printf 'gke.sh: %s\n' "$*" >&2
  exit 2
}

usage() { sed -n '2,/^set -eu/{/^set -eu/d;s/^# \{0,1\}//;p;}' "$0"; }

# must VALUE WHAT PATTERN EXAMPLE: an error where a value does not match as a whole. grep looks at lines one by one.
must() {
  case $1 in *"
"*) fail "$2 has more than one line; it must look like $4" ;; esac
  printf '%s\n' "$1" | grep -Eqx -e "$3" || fail "$2 is '$1'; it must look like $4"
}

commands='render, apply, status, logs or delete'
case ${1:-} in
  render | apply | status | logs | delete) command=$1 ;;
  -h | --help | help)
    usage
    exit 0
    ;;
  '') fail "no command; $commands" ;;
  *) fail "there is no command $1; $commands" ;;
esac
shift

name='' image='' run_file='' claim='' program=bert-jax run_dir='' prepared='' namespace='' spot='' check='' dry='' account=''
accelerator=tpu-v5-lite-podslice topology=4x4 chips=4 restarts=20
while [ $# -gt 0 ]; do
  case $1 in
    --spot) spot=1 ;;
    --check) check=1 ;;
    --)
      shift
      break
      ;;
    --dry-run) dry=1 ;;
    --name | --image | --run-file | --claim | --program | --run-dir | --prepared | --accelerator | --topology | \
      --chips | --restarts | --namespace | --account)
      [ $# -ge 2 ] || fail "$1 needs a value"
      case $1 in
        --name) name=$2 ;;
        --image) image=$2 ;;
        --run-file) run_file=$2 ;;
        --claim) claim=$2 ;;
        --program) program=$2 ;;
        --run-dir) run_dir=$2 ;;
        --prepared) prepared=$2 ;;
        --accelerator) accelerator=$2 ;;
        --topology) topology=$2 ;;
        --chips) chips=$2 ;;
        --restarts) restarts=$2 ;;
        --namespace) namespace=$2 ;;
        --account) account=$2 ;;
      esac
      shift
      ;;
    *) fail "there is no option $1; launch/gke.sh --help lists them" ;;
  esac
  shift
done

case $command in
  render | apply) ;;
  *) [ $# -eq 0 ] || fail "$command takes nothing after --" ;;
esac
[ "$name" ] || fail "no name; give --name NAME"
must "$name" --name '[a-z]([a-z0-9-]{0,38}[a-z0-9])?' 'bert-1: up to 40 small letters, digits and dashes'
[ -z "$namespace" ] || must "$namespace" --namespace '[a-z0-9]([a-z0-9-]*[a-z0-9])?' training

# The lines of the manifest with the words after --, which are JSON strings there. A | would end sed's text.
keys() {
  for word in "$@"; do
    case $word in *[!A-Za-z0-9_./:=@%+,-]*) fail "'$word': of keys and values only letters, digits and _./:=@%+,- can be given" ;; esac
    printf '                    - "%s"\\n' "$word"
  done
}

# folder VALUE OPTION NAME: a folder in the claim, or in a bucket.
folder() {
  case $1 in
    gs://*) must "$1" "$2" 'gs://[a-z0-9][a-z0-9._-]+(/[A-Za-z0-9._=+-]+)+' "gs://BUCKET/$3" ;;
    *)
      must "$1" "$2" '/mnt/runs/[A-Za-z0-9._/-]+' "/mnt/runs/$3, in the claim, or gs://BUCKET/$3"
      mounted=1
      ;;
  esac
}

render() {
  for given in "--image $image" "--run-file $run_file"; do
    case $given in *' ') fail "no ${given% }; launch/gke.sh --help says what it is" ;; esac
  done
  must "$image" --image '[A-Za-z0-9._/:@-]+' 'REGION-docker.pkg.dev/PROJECT/REPOSITORY/bert-jax:1'
  must "$run_file" --run-file '[A-Za-z0-9._/-]+[.]toml' launch/runs/demo_en.toml
  [ -f "$(dirname "$0")/../$run_file" ] || fail "$run_file is not a file of this repository"
  must "$accelerator" --accelerator 'tpu[a-z0-9-]+' tpu-v5-lite-podslice
  must "$topology" --topology '[1-9][0-9]*x[1-9][0-9]*(x[1-9][0-9]*)?' 4x4
  must "$chips" --chips '[1-9][0-9]*' 4
  must "$restarts" --restarts '[0-9]+' 20
  [ "$run_dir" ] || run_dir=/mnt/runs/$name
  [ "$prepared" ] || prepared=/mnt/runs/prepared/$(basename "$run_file" .toml)
  mounted=''
  folder "$run_dir" --run-dir NAME
  folder "$prepared" --prepared prepared/NAME
  if [ "$mounted" ] && [ -z "$claim" ]; then
    fail "no --claim, and $run_dir and $prepared are not both gs://BUCKET/...; launch/gke.sh --help says what it is"
  fi
  [ -z "$claim" ] || must "$claim" --claim '[a-z0-9]([a-z0-9.-]*[a-z0-9])?' runs
  [ -z "$account" ] || must "$account" --account '[a-z0-9]([a-z0-9.-]*[a-z0-9])?' trainer
  case $program in
    bert-jax) verb=pretrain ;;
    transformer-jax) verb=train ;;
    *) fail "--program is '$program'; bert-jax or transformer-jax" ;;
  esac
  all=$(($(printf %s "$topology" | tr x '*')))
  [ $((all % chips)) -eq 0 ] || fail "--topology $topology is $all chips, which hosts of --chips $chips do not make up"
  more=$(keys "$@")
  # Lines that are marked FILL_IN_TRAINING start the loop around a run; a check is made once.
  trains='s/  # FILL_IN_TRAINING$//' option=--run_dir
  if [ "$check" ]; then trains='/# FILL_IN_TRAINING$/d' option=--out verb=check restarts=0; fi
  # Lines that are marked FILL_IN_SPOT stay for spot nodes alone, without the mark.
  if [ "$spot" ]; then spots='s/  # FILL_IN_SPOT$//'; else spots='/# FILL_IN_SPOT$/d'; fi
  # ... and so do those of the claim, and of the account, where there is one.
  if [ "$claim" ]; then claims='s/  # FILL_IN_MOUNT$//'; else claims='/# FILL_IN_MOUNT$/d'; fi
  if [ "$account" ]; then accounts="s|FILL_IN_ACCOUNT|$account|"; else accounts='/FILL_IN_ACCOUNT/d'; fi
  sed -e '/^#/d' -e "$spots" -e "$claims" -e "$accounts" -e "s|^ *- \"FILL_IN_KEYS\"$|${more%??}|" -e '/^$/d' \
    -e "$trains" -e "s|FILL_IN_OPTION|$option|" -e "s|FILL_IN_NAME|$name|" -e "s|FILL_IN_RESTARTS|$restarts|" -e "s|FILL_IN_HOSTS|$((all / chips))|" \
    -e "s|FILL_IN_ACCELERATOR|$accelerator|" -e "s|FILL_IN_TOPOLOGY|$topology|" -e "s|FILL_IN_IMAGE|$image|" \
    -e "s|FILL_IN_RUN_DIR|$run_dir|" -e "s|FILL_IN_PROGRAM|$program|" -e "s|FILL_IN_VERB|$verb|" \
    -e "s|FILL_IN_RUN_FILE|$run_file|" -e "s|FILL_IN_PREPARED|$prepared|" -e "s|FILL_IN_CHIPS|$chips|" \
    -e "s|FILL_IN_CLAIM|$claim|" "$template"
}

kube() {
  set -- kubectl "$@"
  if [ "$namespace" ]; then set -- "$@" "--namespace=$namespace"; fi
  if [ "$dry" ]; then
    echo "$*" # no word of these has a blank
  else
    "$@"
  fi
}

[ "$dry" ] || [ "$command" = render ] || command -v kubectl >/dev/null || fail "kubectl is not on the PATH"

case $command in
  render) render "$@" ;;
  apply)
    manifest=$(render "$@")
    if [ "$dry" ]; then
      printf '%s\n' "$manifest"
      kube apply --filename=-
    else
      printf '%s\n' "$manifest" | kube apply --filename=-
    fi
    ;;
  status)
    kube get jobset "$name"
    kube get pods "--selector=jobset.sigs.k8s.io/jobset-name=$name" --output=wide
    ;;
  logs)
    first="jobset.sigs.k8s.io/jobset-name=$name,batch.kubernetes.io/job-completion-index=0"
    kube logs --follow --tail=100 "--selector=$first"
    ;;
  delete) kube delete jobset "$name" ;;
esac
