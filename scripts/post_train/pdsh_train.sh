#!/usr/bin/env bash
# Start a script on every node with pdsh, each knowing its number, and stop all when one fails or is lost.
#
# Usage: scripts/post_train/pdsh_train.sh SCRIPT [arguments of SCRIPT]     settings: see run_post_train_multinode.sh
#
# One pdsh per node, because one for all would wait for the last. SCRIPT lies in the project, gets its place from NNODES,
# NODE_RANK, MASTER_ADDR, MASTER_PORT and RUN_ID, and ends a run's processes when called as `SCRIPT --stop RUN_ID SECONDS`.
set -euo pipefail

LOST_OTHERS=69 # status of a node whose ranks lost their connection, to a node that tells more a little later
KILL_AFTER=5 # seconds that processes get to end when a node has failed: a round cannot be completed then
PASSED='^(CONFIG|OUTPUT_DIR|RESUME_FROM_CHECKPOINT|PREFLIGHT|STOP_GRACE|PYTHON|(NCCL|GLOO|TORCH|PYTORCH|CUDA|HF|OMP)_.*)$'
SECRET='(TOKEN|KEY|SECRET|PASSWORD)' # on a command line every user of the machine could read them

# shellcheck source=scripts/post_train/checks.sh
source "${BASH_SOURCE[0]%/*}/checks.sh"

# Quote a text for any POSIX shell.
quote() {
  printf "'%s'" "${1//\'/\'\\\'\'}"
}

# Print one 'HOST' or 'HOST:PROCESSES' per line.
listed_nodes() {
  if [[ -n ${HOSTFILE-} ]]; then
    sed -E 's/#.*//; s/[[:space:]]+slots=/:/; s/^[[:space:]]+//; s/[[:space:]].*//; /^$/d' -- "$HOSTFILE"
  else
    tr -s ',[:space:]' '\n' <<<"${NODE_IP_LIST-}" | sed '/^$/d'
  fi
}

(($#)) || fail "pdsh_train.sh needs the script to start, such as scripts/post_train/train_grpo.sh."
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
cd "$root"
script="$1"
shift
[[ -f $script ]] || fail "pdsh_train.sh: no script at '$script' (seen from $PWD)."
[[ -z ${HOSTFILE-} || (-f $HOSTFILE && -r $HOSTFILE) ]] || fail "HOSTFILE: cannot read '$HOSTFILE' (seen from $PWD)."

nodes=() processes=()
while IFS= read -r node; do
  host="${node%%:*}"
  [[ $host =~ ^[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?$ && $node =~ ^[^:]+(:[1-9][0-9]{0,4})?$ ]] ||
    fail "the node list has '$node'; expected a host name or IPv4 address, with ':PROCESSES' (from 1) after it or not; no ranges."
  [[ " ${nodes[*]-} " != *" $host "* ]] || fail "the node list has '$host' twice; list each node once."
  nodes+=("$host")
  [[ $node == *:* ]] && processes+=("${node##*:}") || processes+=("")
done < <(listed_nodes)
((${#nodes[@]})) ||
  fail "the node list is empty: set NODE_IP_LIST, for example to 10.0.0.1,10.0.0.2, or HOSTFILE to a file with one node" \
    "per line. For this machine only: ./run_post_train.sh"
command -v pdsh >/dev/null ||
  fail "pdsh is not installed on this machine ('apt-get install pdsh' on Debian and Ubuntu). Under SLURM it is not needed:" \
    "sbatch scripts/post_train/slurm_train.sbatch"

export STOP_GRACE="${STOP_GRACE:-1800}"
need_seconds STOP_GRACE "$STOP_GRACE"
run_id="$(date +%Y%m%d-%H%M%S)-$$"
logs="${LOG_DIR:-$(bash scripts/post_train/run_folder.sh "${CONFIG:-run}")/logs/$run_id}"

shared=("NNODES=${#nodes[@]}" "MASTER_ADDR=${MASTER_ADDR:-${nodes[0]}}" "MASTER_PORT=${MASTER_PORT:-29500}")
shared+=("RUN_ID=$run_id" "LOG_DIR=$logs")
read -rd '' -a names <<<"${PASS_ENV-}" || true
for variable in ${names[@]+"${names[@]}"}; do
  need_match "each of PASS_ENV" "$variable" "[A-Za-z_][A-Za-z0-9_]*" "the name of a variable"
done
for variable in $(compgen -e | grep -E "$PASSED" | grep -viE "$SECRET" || true) ${names[@]+"${names[@]}"}; do
  [[ -v $variable ]] || fail "PASS_ENV names '$variable', which is not a variable of this environment."
  shared+=("$variable=${!variable}")
done

# Print the command line by which a node's shell runs SCRIPT in the project's folder; pdsh replaces % by itself.
#   remote [VARIABLE=VALUE ...] -- [ARGUMENT ...]
remote() {
  local missing line word
  missing="no folder '$root' on this node: the project must have the same path on all nodes (shared storage)"
  line="cd $(quote "$root") || { echo $(quote "$missing") >&2; exit 1; }; exec env"
  while [[ $1 != -- ]]; do
    line+=" $(quote "$1")"
    shift
  done
  line+=" bash $(quote "$script")"
  for word in "${@:2}"; do line+=" $(quote "$word")"; done
  printf '%s' "${line//%/%%}"
}

# A dead machine is noticed within a minute; a password is never asked for.
export PDSH_SSH_ARGS_APPEND="${PDSH_SSH_ARGS_APPEND--oBatchMode=yes -oServerAliveInterval=15 -oServerAliveCountMax=4}"
export PDSH_RCMD_TYPE="${PDSH_RCMD_TYPE:-ssh}"

# Begin to end the run on all nodes; its processes get that many seconds. A node that cannot be reached is given up.
stop_all() {
  echo "pdsh_train.sh: stopping all nodes, within $1 s" >&2
  for rank in "${!nodes[@]}"; do
    setsid pdsh -S -b -t 10 -u "$(($1 + 30))" -w "${nodes[rank]}" "$(remote -- --stop "$run_id.$rank" "$1")" &
    stoppers+=("$!")
  done
}

# Note which nodes have ended; the first that failed stops the others.
look_at_nodes() {
  for rank in "${!clients[@]}"; do
    if kill -0 "${clients[rank]}" 2>/dev/null; then continue; fi
    status=0
    wait "${clients[rank]}" || status=$?
    unset "clients[rank]"
    if ((status && (!first_status || (first_status == LOST_OTHERS && status != LOST_OTHERS && !stopping)))); then
      first_status=$status
      if ((!stopping)); then
        where="its messages are above" # the check before the run has no logs
        if [[ -d $logs/node_$rank ]]; then where="logs: $logs/node_$rank"; fi
        lost="${nodes[rank]} (node $rank) ended with status $status"
        if ((status == 255)); then lost+=", as a lost connection does"; fi
        if ((status > 128 && status < 160)); then lost+=" (SIG$(kill -l "$status"))"; fi
        echo "pdsh_train.sh: $lost; $where" >&2
        if [[ -n ${TRAIN_LOST_FILE-} ]]; then echo "$lost" >"$TRAIN_LOST_FILE"; fi
        ((patience = SECONDS + (status == LOST_OTHERS ? 10 : 0)))
      fi
    fi
  done
}

clients=() stoppers=() asked=0 stopping=0 silent=0 first_status=0 patience=0
trap 'asked=$((asked + 1))' INT TERM HUP
echo "pdsh_train.sh: run $run_id on ${#nodes[@]} node(s): ${nodes[*]}; logs: $logs" >&2
for rank in "${!nodes[@]}"; do
  own=("NODE_RANK=$rank")
  count="${NPROC_PER_NODE:-${processes[rank]}}"
  if [[ -n $count ]]; then own+=("NPROC_PER_NODE=$count"); fi
  # A session of its own: Ctrl-C in the terminal reaches only this script, which ends the ranks in order.
  setsid pdsh -S -b -w "${nodes[rank]}" "$(remote "${shared[@]}" "${own[@]}" -- "$@")" &
  clients[rank]=$!
done
while ((${#clients[@]})); do
  look_at_nodes
  if ((asked > 0 && stopping == 0)); then
    stopping=1
    stop_all "$STOP_GRACE"
  elif ((asked > 1 && stopping == 1)); then
    stopping=2
    stop_all "$KILL_AFTER"
  elif ((first_status && !stopping && SECONDS >= patience)); then
    stopping=2
    stop_all "$KILL_AFTER"
  elif ((stopping)) && ! kill -0 "${stoppers[@]}" 2>/dev/null; then
    # Nothing runs any more: once its last output is through, all that is left is a connection to a node that is gone.
    if ((silent++ >= 10)); then kill "${clients[@]}" 2>/dev/null || true; fi
  fi
  sleep 0.5 &
  wait "$!" || true # a signal ends the wait, not the sleep
done
wait
exit "$first_status"
