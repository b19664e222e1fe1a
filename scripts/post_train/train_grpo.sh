#!/usr/bin/env bash
# One node's part of a training: check, then torchrun over its GPUs (or one CPU process where it has none).
#
# Usage: scripts/post_train/train_grpo.sh [flags of post_train.py]     what the launchers run on every node
#        scripts/post_train/train_grpo.sh --stop RUN_ID SECONDS        end a run's processes on this node
#
# Settings: those of run_post_train.sh, and for one of several nodes NNODES, NODE_RANK (0 is where MASTER_ADDR is),
# MASTER_ADDR, MASTER_PORT and RUN_ID, by which the processes of one launch are found again.
set -euo pipefail

# shellcheck source=scripts/post_train/checks.sh
source "${BASH_SOURCE[0]%/*}/checks.sh"
RUN_IDS='[A-Za-z0-9_.-]+' # lines of a text would each be searched for

# Process ids of a run on this node, by the marker in their environment: torchrun's ranks have sessions of their own.
processes() {
  { grep -lszxF "TRAIN_GRPO_RUN=$1" /proc/[0-9]*/environ || true; } | cut -d/ -f3
}

# Ask a run's processes to end, and kill them after that many seconds.
stop() {
  local id="$1" seconds="$2" pids pid parent
  for ((waited = 0; ; waited++)); do
    mapfile -t pids < <(processes "$id")
    ((${#pids[@]})) || return 0
    if ((waited == 0)); then
      for pid in "${pids[@]}"; do # torchrun passes it on to its ranks; a second one would end them mid-round
        parent="$(sed -n 's/^PPid:[[:space:]]*//p' "/proc/$pid/status" 2>/dev/null)" || continue
        if [[ " ${pids[*]} " != *" $parent "* ]]; then kill -TERM "$pid" 2>/dev/null || true; fi
      done
    fi
    if ((waited >= seconds)); then kill -KILL "${pids[@]}" 2>/dev/null || true; fi
    ((waited < seconds + 10)) || fail "processes ${pids[*]} of run $id do not end."
    sleep 1
  done
}

if [[ ${1-} == --stop ]]; then
  (($# == 3)) || fail "train_grpo.sh --stop needs RUN_ID and SECONDS; received $(($# - 1)) argument(s)."
  need_match "--stop RUN_ID" "$2" "$RUN_IDS" "letters, digits, '_', '.' and '-'"
  need_seconds "--stop SECONDS" "$3"
  stop "$2" "$3"
  exit
fi

nnodes="${NNODES:-1}" node_rank="${NODE_RANK:-0}"
grace="${STOP_GRACE:-1800}" run_id="${RUN_ID:-$$}"
need_number NNODES "$nnodes" 1 1000000
need_number NODE_RANK "$node_rank" 0 "$((nnodes - 1))"
need_seconds STOP_GRACE "$grace"
need_match RUN_ID "$run_id" "$RUN_IDS" "letters, digits, '_', '.' and '-'"
need_match PREFLIGHT "${PREFLIGHT:-1}" "0|1" "0 or 1"
if [[ -n ${MASTER_PORT-} ]]; then need_number MASTER_PORT "$MASTER_PORT" 1 65535; fi
if [[ -n ${MASTER_ADDR-} ]]; then need_match MASTER_ADDR "$MASTER_ADDR" "[A-Za-z0-9_:][A-Za-z0-9_.:%-]*" "a host name or address"; fi
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
config="${CONFIG:-configs/sage_8gpu.yaml}"
[[ -f $config ]] || fail "CONFIG: no file at '$config' (seen from $PWD). There are: $(echo configs/*.yaml)"

find_python
if [[ -z ${NPROC_PER_NODE-} ]]; then
  NPROC_PER_NODE="$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')" || no_torch
  if [[ $NPROC_PER_NODE == 0 ]]; then NPROC_PER_NODE=1; fi
fi
need_number NPROC_PER_NODE "$NPROC_PER_NODE" 1 65536
if ((nnodes > 1)) && [[ -z ${MASTER_ADDR-} || -z ${MASTER_PORT-} ]]; then
  fail "NNODES is $nnodes: set MASTER_ADDR and MASTER_PORT, at which the nodes meet, and NODE_RANK."
fi

# A gloo group of n ranks takes n sockets of each: the default one, the writers' and the meshes' (at most 2n); the first
# rank has n more of the store. Measured with 2, 4 and 8 ranks: 36, 48 and 62 files in all.
files=$((5 * nnodes * NPROC_PER_NODE + 256)) soft="$(ulimit -Sn)" hard="$(ulimit -Hn)"
if [[ $soft != unlimited ]] && ((soft < files)); then
  if [[ $hard != unlimited ]] && ((hard < files)); then
    echo "a rank may open $files files, and no more than $hard are allowed here: raise the hard limit (nofile in" \
      "/etc/security/limits.conf, LimitNOFILE of a service), or too many open files may end the run." >&2
    files=$hard
  fi
  ulimit -Sn "$files"
fi

launcher=("$PYTHON")
if ((nnodes > 1 || NPROC_PER_NODE > 1)); then
  launcher+=(-m scripts.post_train.launch_ranks "--nproc_per_node=$NPROC_PER_NODE")
  if ((nnodes > 1)); then
    launcher+=("--nnodes=$nnodes" "--node_rank=$node_rank" "--master_addr=$MASTER_ADDR" "--master_port=$MASTER_PORT")
  elif [[ -n ${MASTER_PORT-} ]]; then
    launcher+=(--nnodes=1 --master_addr=127.0.0.1 "--master_port=$MASTER_PORT")
  else
    launcher+=(--standalone)
  fi
  if [[ -n ${MASTER_PORT-} ]] && ((node_rank == 0)); then
    "$PYTHON" -c 'import socket, sys; socket.create_server(("", int(sys.argv[1]))).close()' "$MASTER_PORT" >/dev/null 2>&1 ||
      fail "MASTER_PORT: port $MASTER_PORT is in use on $(hostname), where the processes would meet. Is a run still in" \
        "progress there? Otherwise set MASTER_PORT to another one."
  fi
  threads=$(($(nproc) / NPROC_PER_NODE))
  export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}"
fi
export NCCL_DEBUG="${NCCL_DEBUG:-WARN}" NCCL_IB_TIMEOUT="${NCCL_IB_TIMEOUT:-22}"
# The flight recorder goes to the run folder when NCCL gives up, which its heartbeat must not do before the watchdog told.
export TORCH_FR_BUFFER_SIZE="${TORCH_FR_BUFFER_SIZE:-2000}" TORCH_NCCL_DUMP_ON_TIMEOUT="${TORCH_NCCL_DUMP_ON_TIMEOUT:-1}"
export TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC="${TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC:-1800}"
[[ -v PYTORCH_CUDA_ALLOC_CONF ]] || export PYTORCH_ALLOC_CONF="${PYTORCH_ALLOC_CONF:-expandable_segments:True}"

# First the launcher's choices, then the caller's flags: the last one given wins.
run=(--config "$config" --output_dir "$(bash scripts/post_train/run_folder.sh "$config")")
resume="${RESUME_FROM_CHECKPOINT-latest}"
if [[ -n $resume ]]; then run+=(--resume_from_checkpoint "$resume"); fi
# Prompts that neither a flag nor a config file names are the starter prompts.
for csv in train valid; do
  named=0
  setting="^[^#]*${csv}_video_csv[\"']?[[:space:]]*:"
  for text in "$config" "$@"; do
    file="${text#--config=}"
    if [[ $text == "--${csv}_video_csv"* ]] || { [[ -f $file ]] && grep -Eqs "$setting" -- "$file"; }; then named=1; fi
  done
  if ((named == 0)) && [[ -f assets/prompts/$csv.csv ]]; then
    run+=("--${csv}_video_csv" "assets/prompts/$csv.csv")
    if ((node_rank == 0)); then echo "no --${csv}_video_csv: taking the starter prompts, assets/prompts/$csv.csv" >&2; fi
  fi
done
run+=("$@")

# Run a command; on one of several nodes leave nothing of it behind, whichever process dies, and end it when asked to or
# when whoever started this script is gone (a launcher that was killed, a lost connection).
supervised() {
  if ((nnodes == 1)); then
    "$@"
    return
  fi
  local ranks status=0 parent asked=0
  TRAIN_GRPO_RUN="$id" "$@" &
  ranks=$!
  trap 'asked=$((asked ? asked : 1))' TERM INT HUP
  while kill -0 "$ranks" 2>/dev/null; do
    read -r _ _ _ parent _ <"/proc/$$/stat"
    if ((asked == 1 || (parent != PPID && asked == 0))); then
      asked=2
      stop "$id" "$grace" &
    fi
    sleep 0.5 &
    wait "$!" || true # a signal ends the wait, not the sleep
  done
  wait "$ranks" || status=$?
  stop "$id" 0
  return "$status"
}

id="$run_id.$node_rank"
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-$grace}"
if [[ ${PREFLIGHT:-1} != 0 ]]; then
  supervised "${launcher[@]}" post_train.py "${run[@]}" --dry_run true || exit
fi
if [[ -n ${LOG_DIR-} ]] && ((${#launcher[@]} > 1)); then
  mkdir -p -- "$LOG_DIR/node_$node_rank"
  launcher+=("--log_dir=$LOG_DIR/node_$node_rank" --redirects=3 --tee=0:3)
fi
if ((nnodes == 1)); then exec "${launcher[@]}" post_train.py "${run[@]}"; fi
supervised "${launcher[@]}" post_train.py "${run[@]}"
