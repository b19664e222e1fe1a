#!/usr/bin/env bash
# Sample videos with the settings of SAGE-GRPO's release: 480x864, 40 steps, seed 930, one process per GPU.
#
# Usage: ./run_inference.sh [flags of generate.py]
#
#   ./run_inference.sh --checkpoint_path outputs/sage_8gpu/checkpoints/step_100
#   ./run_inference.sh --prompt 'A girl holding a paper with words "Hello, world!"' --output_path hello.mp4
#   MODEL_PATH=assets/tiny ./run_inference.sh --fixed_size 64x64 --video_length 17 --output_path outputs/tiny_samples
#
# Flags pass through unchanged and win over these settings; python generate.py --help explains them. Without --prompt and
# --prompts_csv the held-out starter prompts are sampled. Settings, from the environment:
#
#   MODEL_PATH       folder of the base model [ckpts]
#   NPROC_PER_NODE   processes, which share the videos [one per visible GPU; 1 without GPUs]
#   PYTHON           interpreter [.venv/bin/python where `make setup` made it, else python3]
set -euo pipefail

if [[ ${1-} == -h || ${1-} == --help ]]; then
  sed -n '2,/^set -/{/^#/s/^# \{0,1\}//p;}' "${BASH_SOURCE[0]}"
  exit 0
fi

# shellcheck source=scripts/post_train/checks.sh
source "$(dirname "${BASH_SOURCE[0]}")/scripts/post_train/checks.sh"
cd "$(dirname "${BASH_SOURCE[0]}")"
if [[ -z ${PYTHON-} ]]; then
  PYTHON=python3
  if [[ -x .venv/bin/python ]]; then PYTHON=.venv/bin/python; fi
fi
processes="${NPROC_PER_NODE:-$("$PYTHON" -c 'import torch; print(max(1, torch.cuda.device_count()))')}"
need_number NPROC_PER_NODE "$processes" 1 65536

launcher=("$PYTHON")
if ((processes > 1)); then launcher+=(-m torch.distributed.run --standalone "--nproc_per_node=$processes"); fi
model="${MODEL_PATH:-ckpts}"
run=(--model_path "$model" --num_inference_steps 40 --seed 930)
given=" $* "
if [[ -d $model/transformer/480p_t2v && $given != *" --transformer_version"* && $given != *" --resolution"* ]]; then
  run+=(--transformer_version 480p_t2v)
fi
if [[ $given != *" --fixed_size"* && $given != *" --aspect_ratio"* ]]; then run+=(--fixed_size 480x864); fi
if [[ $given != *" --prompt"* ]]; then run+=(--prompts_csv assets/prompts/valid.csv); fi
if [[ $given != *" --output_path"* && $given != *" --prompt "* ]]; then
  run+=(--output_path outputs/samples_480x864_step40_seed930)
fi
exec "${launcher[@]}" generate.py "${run[@]}" "$@"
