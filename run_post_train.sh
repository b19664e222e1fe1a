#!/usr/bin/env bash
# Post-train on this machine: torchrun over all its GPUs, or one CPU process where there is none.
#
# Usage: ./run_post_train.sh [flags of post_train.py]
#
#   ./run_post_train.sh --train_video_csv prompts.csv --max_steps 200
#   CONFIG=configs/tiny.yaml OUTPUT_DIR=outputs/first ./run_post_train.sh
#
# Flags pass through unchanged and win over the settings below; python post_train.py --help explains them. Missing weights
# are named, with the way to get them. Relative paths start at the folder of this script. Settings, from the environment:
#
#   CONFIG                  config file [configs/sage_8gpu.yaml]
#   OUTPUT_DIR              run folder [outputs/<name of CONFIG>]; one per experiment, it replaces the config's
#   RESUME_FROM_CHECKPOINT  'latest' continues what the run folder holds, '' insists on a new folder [latest]
#   NPROC_PER_NODE          processes [one per visible GPU; 1 without GPUs]
#   MASTER_PORT             port on which the processes meet [a free one]
#   PYTHON                  interpreter [.venv/bin/python where `make setup` made it, else python3]
set -euo pipefail

fail() {
  printf '%s\n' "$@" >&2
  exit 1
}

if [[ ${1-} == -h || ${1-} == --help ]]; then
  sed -n '2,/^set -/{/^#/s/^# \{0,1\}//p;}' "${BASH_SOURCE[0]}"
  exit 0
fi

cd "$(dirname "${BASH_SOURCE[0]}")"
config="${CONFIG:-configs/sage_8gpu.yaml}"
[[ -f $config ]] || fail "CONFIG: no file at '$config' (seen from $PWD). There are: $(echo configs/*.yaml)"

if [[ -z ${PYTHON-} ]]; then
  PYTHON=python3
  if [[ -x .venv/bin/python ]]; then PYTHON=.venv/bin/python; fi
fi
if [[ -z ${NPROC_PER_NODE-} ]]; then
  num_gpus="$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')" ||
    fail "'$PYTHON' cannot import torch. Run 'make setup', or set PYTHON to an interpreter with requirements.txt installed."
  NPROC_PER_NODE=$((num_gpus > 0 ? num_gpus : 1))
fi
[[ $NPROC_PER_NODE =~ ^[1-9][0-9]*$ ]] ||
  fail "NPROC_PER_NODE must be a whole number from 1, received '$NPROC_PER_NODE'."

launcher=("$PYTHON")
if ((NPROC_PER_NODE > 1)); then
  launcher+=(-m torch.distributed.run "--nproc_per_node=$NPROC_PER_NODE")
  if [[ -n ${MASTER_PORT-} ]]; then
    launcher+=(--nnodes=1 --master_addr=127.0.0.1 "--master_port=$MASTER_PORT")
  else
    launcher+=(--standalone)
  fi
fi
name="$(basename "$config")"
run=(--config "$config" --output_dir "${OUTPUT_DIR:-outputs/${name%.*}}")
resume="${RESUME_FROM_CHECKPOINT-latest}"
if [[ -n $resume ]]; then run+=(--resume_from_checkpoint "$resume"); fi

# First the launcher's choices, then the caller's flags: the last one given wins.
exec "${launcher[@]}" post_train.py "${run[@]}" "$@"
