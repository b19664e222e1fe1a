#!/usr/bin/env bash
# Post-train on this machine: torchrun over all its GPUs, or one CPU process where there is none.
#
# Usage: ./run_post_train.sh [flags of post_train.py]
#
#   ./run_post_train.sh --train_video_csv train.csv --valid_video_csv valid.csv --max_steps 200
#   CONFIG=configs/tiny.yaml OUTPUT_DIR=outputs/first ./run_post_train.sh
#
# Flags pass through unchanged and win over the settings below; python post_train.py --help explains them. Missing weights
# are named, with the way to get them. Without CSVs the starter prompts in assets/prompts are used. Relative paths start
# at the folder of this script. Settings, from the environment:
#
#   CONFIG                  config file [configs/sage_8gpu.yaml]
#   OUTPUT_DIR              run folder [outputs/<name of CONFIG>, or where CONFIG is the config.yaml that a run has
#                           saved, its folder]; one per experiment, it replaces the config's
#   RESUME_FROM_CHECKPOINT  'latest' continues what the run folder holds, '' insists on a new folder [latest]
#   PREFLIGHT               1 checks everything first (post_train.py --dry_run), 0 does not [1]
#   NPROC_PER_NODE          processes [one per visible GPU; 1 without GPUs]
#   MASTER_PORT             port on which the processes meet [a free one]
#   LOG_DIR                 folder for a log of each process, beside the first one's console [none: all on the console]
#   MAX_RESTARTS            how often a run that loses a rank (killed, crashed, connection lost) starts again from its last
#                           checkpoint by itself, and says what was lost; also as a flag, --max_restarts N [0]
#   STOP_GRACE              seconds that a round and its checkpoint get after Ctrl-C or SIGTERM [1800]
#   PYTHON                  interpreter [.venv/bin/python where `make setup` made it, else python3]
#
# Defaults that a variable of the same name replaces: NCCL_DEBUG=WARN, TORCH_FR_BUFFER_SIZE=2000 (collectives that the
# flight recorder keeps), TORCH_NCCL_DUMP_ON_TIMEOUT=1, TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC=1800.
set -euo pipefail

if [[ ${1-} == -h || ${1-} == --help ]]; then
  sed -n '2,/^set -/{/^#/s/^# \{0,1\}//p;}' "${BASH_SOURCE[0]}"
  exit 0
fi

cd "$(dirname "${BASH_SOURCE[0]}")"
source scripts/post_train/checks.sh
export NNODES=1 NODE_RANK=0 CONFIG="${CONFIG:-configs/sage_8gpu.yaml}"
start scripts/post_train/train_grpo.sh "$@"
