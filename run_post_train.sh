#!/usr/bin/env bash
# Post-train on this machine: torchrun over all its GPUs, or one CPU process where there is none.
#
# Usage: ./run_post_train.sh [flags of post_train.py]
#
#   ./run_post_train.sh --train_video_csv prompts.csv --max_steps 200
#   ./run_post_train.sh --config configs/sage_8gpu.yaml configs/kl/moving.yaml
#   CONFIG=configs/tiny.yaml OUTPUT_DIR=outputs/first ./run_post_train.sh
#
# Flags pass through unchanged and win over the settings below; python post_train.py --help explains them.
# Relative paths start at the folder of this script. Settings, from the environment:
#
#   CONFIG                  config file [configs/sage_8gpu.yaml]; the flag --config replaces it
#   OUTPUT_DIR              run folder [output_dir of the config, else outputs/<config name>]; one per experiment
#   RESUME_FROM_CHECKPOINT  'latest' continues what the run folder holds, '' insists on a new folder [latest]
#   NPROC_PER_NODE          processes [one per visible GPU; 1 without GPUs]
#   MASTER_PORT             port on which the processes meet [a free one]
#   PYTHON                  interpreter [.venv/bin/python where `make setup` made it, else python3]
set -euo pipefail

fail() {
  printf '%s\n' "$@" >&2
  exit 1
}

# given NAME: every value that follows --NAME in the arguments, one per line
given() {
  local name="$1" argument open=false
  for argument in "${arguments[@]}"; do
    case "$argument" in
      "--$name="*) printf '%s\n' "${argument#*=}" ;;
      "--$name") open=true ;;
      --*) open=false ;;
      *) if [[ $open == true ]]; then printf '%s\n' "$argument"; fi ;;
    esac
  done
}

# setting NAME DEFAULT: what the run will see: the last flag, else the last config file that says it, else the default
setting() {
  local name="$1" line value=""
  line="$(given "$name" | tail -n 1)"
  if [[ -n $line ]]; then
    printf '%s\n' "$line"
    return
  fi
  # Comment and quotes fall away; the key may stand alone or below its group.
  value="$(sed -nE "s/^[[:space:]]*$name:[[:space:]]*//p" -- "${configs[@]}" | tail -n 1 |
    sed -E "s/[[:space:]]+#.*$//; s/[[:space:]]+$//; s/^(['\"])(.*)\1$/\2/")"
  if [[ -z $value || $value == null ]]; then value="$2"; fi
  printf '%s\n' "$value"
}

# need FOLDER PATTERN...: note the patterns that no file in that folder of the model root matches
need() {
  local folder="$1" pattern files absent=""
  shift
  for pattern in "$@"; do
    # shellcheck disable=SC2206 # the pattern is meant to expand
    files=("$root/$folder"/$pattern)
    [[ -e ${files[0]} ]] || absent+="${absent:+, }$pattern"
  done
  [[ -z $absent ]] || missing+=("$(printf '  %-42s %s' "$root/$folder" "$absent")")
}

# The folders that HunyuanVideo-1.5 in its original layout needs, and those of the reward.
find_missing_weights() {
  if [[ ! -f $root/transformer/config.json ]]; then # else the diffusers layout, which the loader checks
    need "scheduler" scheduler_config.json
    need "transformer/$version" config.json '*.safetensors'
    need "vae" config.json '*.safetensors'
    need "text_encoder/llm" config.json tokenizer_config.json '*.safetensors'
    need "text_encoder/byt5-small" config.json tokenizer_config.json
    need "text_encoder/Glyph-SDXL-v2" assets/color_idx.json assets/multilingual_10-lang_idx.json \
      checkpoints/byt5_model.pt
    if [[ $version == *i2v* ]]; then
      need "vision_encoder/siglip" image_encoder/config.json feature_extractor/preprocessor_config.json
    fi
  fi
  if [[ $reward == videoalign_local ]]; then need "VideoReward" model_config.json 'checkpoint-*/*'; fi
}

if [[ ${1-} == -h || ${1-} == --help ]]; then
  sed -n '2,/^set -/{/^#/s/^# \{0,1\}//p;}' "${BASH_SOURCE[0]}"
  exit 0
fi

cd "$(dirname "${BASH_SOURCE[0]}")"
arguments=("$@")
mapfile -t configs < <(given config)
if ((${#configs[@]} == 0)); then
  configs=("${CONFIG:-configs/sage_8gpu.yaml}")
  set -- --config "${configs[0]}" "$@"
fi
names=""
for config in "${configs[@]}"; do
  [[ -f $config ]] || fail "No config file at '$config' (seen from $PWD). There are: $(echo configs/*.yaml)"
  name="$(basename "$config")"
  names+="${names:+-}${name%.*}"
done

root="$(setting pretrained_model_root ./ckpts)"
version="$(setting pretrained_transformer_version 480p_t2v)"
reward="$(setting reward_model videoalign_local)"
missing=()
find_missing_weights
if ((${#missing[@]} > 0)); then
  fail "The weights for transformer version $version with reward $reward are not complete. Missing:" \
    "${missing[@]}" \
    "How to get them: checkpoints-download.md" \
    "Without any download, the bundled tiny model trains on this machine:" \
    "  make setup && . .venv/bin/activate" \
    "  python post_train.py --config configs/tiny.yaml"
fi

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
run=(--output_dir "${OUTPUT_DIR:-$(setting output_dir "outputs/$names")}")
resume="${RESUME_FROM_CHECKPOINT-$(setting resume_from_checkpoint latest)}"
if [[ -n $resume ]]; then run+=(--resume_from_checkpoint "$resume"); fi

# First the launcher's choices, then the caller's flags: the last one given wins.
exec "${launcher[@]}" post_train.py "${run[@]}" "$@"
