#!/usr/bin/env bash
# Post-train on several machines: run_post_train.sh's work on each of them, started from here through pdsh.
#
# Usage: ./run_post_train_multinode.sh [flags of post_train.py]
#
#   NODE_IP_LIST=10.0.0.1,10.0.0.2 ./run_post_train_multinode.sh --train_video_csv train.csv --valid_video_csv valid.csv
#   HOSTFILE=hosts.txt OUTPUT_DIR=/shared/runs/first ./run_post_train_multinode.sh [flags as above]
#
# Needs pdsh here and a login without password on every node, on all of which this folder and OUTPUT_DIR are the same.
# When one node fails or is lost, the others are stopped. The same command again continues from the last checkpoint.
# Ctrl-C saves and stops, with status 75. Settings, from the environment:
#
#   NODE_IP_LIST            nodes, HOST or HOST:PROCESSES, separated by commas or blanks; the first is the meeting point
#   HOSTFILE                instead: a file with one 'HOST', 'HOST:PROCESSES' or 'HOST slots=PROCESSES' per line
#   CONFIG                  config file [configs/sage_64gpu.yaml]
#   OUTPUT_DIR              run folder, on storage that all nodes share [outputs/<name of CONFIG>, or where CONFIG is the
#                           config.yaml that a run has saved, its folder]
#   RESUME_FROM_CHECKPOINT  'latest' continues what the run folder holds, '' insists on a new folder [latest]
#   PREFLIGHT               1 checks everything first (post_train.py --dry_run), 0 does not [1]
#   NPROC_PER_NODE          processes per node [what the node list says, else one per visible GPU, 1 without GPUs]
#   MASTER_ADDR             address at which the nodes meet [the first node]
#   MASTER_PORT             port there [29500]
#   LOG_DIR                 folder for a log of each process; the first of each node also logs to this console
#                           [<OUTPUT_DIR>/logs/<time>]
#   MAX_RESTARTS            how often a run that loses a rank or node starts again on all nodes, from its last checkpoint,
#                           by itself, and says what was lost; also as a flag, --max_restarts N. This machine then needs
#                           PYTHON and the run folder too [0]
#   STOP_GRACE              seconds that a round gets to end after Ctrl-C [1800]
#   PYTHON                  interpreter on the nodes [.venv/bin/python where `make setup` made it, else python3]
#   PASS_ENV                names of more variables to pass to the nodes, separated by blanks; those that begin with
#                           NCCL_, GLOO_, TORCH_, PYTORCH_, CUDA_, HF_ or OMP_ are passed anyway, unless TOKEN, KEY, SECRET
#                           or PASSWORD is in the name. They are on command lines, where users of a node can read them: a
#                           secret such as REWARD_TOKEN belongs in the nodes' own environment
#
# Defaults that a variable of the same name replaces: NCCL_DEBUG=WARN, NCCL_IB_TIMEOUT=22 (about 17 s, for large
# fabrics), TORCH_FR_BUFFER_SIZE=2000 (collectives that the flight recorder keeps), TORCH_NCCL_DUMP_ON_TIMEOUT=1,
# TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC=1800, PYTORCH_ALLOC_CONF=expandable_segments:True, OMP_NUM_THREADS=<cores /
# processes>. Where the nodes' names lead to another network than the one to use, set NCCL_SOCKET_IFNAME and
# GLOO_SOCKET_IFNAME, for example to eth0.
set -euo pipefail

if [[ ${1-} == -h || ${1-} == --help ]]; then
  sed -n '2,/^set -/{/^#/s/^# \{0,1\}//p;}' "${BASH_SOURCE[0]}"
  exit 0
fi

cd "$(dirname "${BASH_SOURCE[0]}")"
source scripts/post_train/checks.sh
export CONFIG="${CONFIG:-configs/sage_64gpu.yaml}"
start scripts/post_train/pdsh_train.sh "scripts/post_train/train_grpo.sh" "$@"
