#!/usr/bin/env bash
# Fetch the reward model VideoReward and its scoring text, and check both; with --all HunyuanVideo-1.5 and its encoders too.
#
# Usage: ./download_weights.sh [--all VERSION [--sr]] [--dry-run | --verify] [ROOT]
#
#   ROOT        folder of all weights [./ckpts]; the reward model goes into ROOT/VideoReward
#   --all VERSION
#               fetch everything for one version of the transformer, such as 480p_t2v, after saying the sizes
#   --sr        also what sharpens its videos: the second transformer and the upsampler of generate.py --sr true
#   --dry-run   print the commands, fetch nothing
#   --verify    check what is there, fetch nothing
#
# An interrupted download continues where it stopped when the command is repeated. Settings, from the environment:
#
#   PYTHON       interpreter [.venv/bin/python where `make setup` made it, else python3]
#   HF           program that downloads from the hub [.venv/bin/hf, else hf]; it honours HF_ENDPOINT for a mirror
#   MODELSCOPE   program that fetches the glyph encoder for --all [.venv/bin/modelscope, else modelscope]
#   TEXT_URL     where the scoring text comes from [the authors' repository, at a fixed commit]
set -euo pipefail

REPOSITORY=KwaiVGI/VideoReward
COMMIT=3e5ebc600aebc4d28300e9132b0a23ee8e1bc47c
TEXT_SHA256=fdb6309bac618dd0c8b1b589d3a0970a974f7856eecbb355a190b2dce54af700
TEXT_URL="${TEXT_URL:-https://raw.githubusercontent.com/KwaiVGI/VideoAlign/$COMMIT/prompt_template.py}"
MODEL_BYTES=5000000000 # the released model.pth has about 5.03e9

fail() {
  local lines=("download_weights.sh: $1" "${@:2}")
  printf '%s\n' "${lines[@]//[[:cntrl:]]/?}" >&2 # a control character could change what the terminal shows
  exit 1
}

mode=fetch root='' version='' sharpened=''
while (($#)); do
  argument=$1
  shift
  case $argument in
    --all)
      [[ ${1-} =~ ^(480p|720p)_(t2v|i2v)[a-z0-9_]*$ ]] || fail "--all expects a version such as 480p_t2v; received '${1-}'."
      version=$1
      shift
      ;;
    --sr) sharpened=yes ;;
    -h | --help)
      sed -n '2,/^set -/{/^#/s/^# \{0,1\}//p;}' "${BASH_SOURCE[0]}"
      exit 0
      ;;
    --dry-run) mode=dry-run ;;
    --verify) mode=verify ;;
    -*) fail "unknown option '$argument'; expected --all VERSION, --sr, --dry-run, --verify or --help." ;;
    *)
      [[ -z $root ]] || fail "one ROOT is expected; received '$root' and '$argument'."
      root=$argument
      ;;
  esac
done
[[ -z $sharpened || -n $version ]] || fail "--sr goes with --all VERSION, whose videos it sharpens."
if [[ -n $sharpened ]]; then sharpened=720p_sr_distilled; fi
if [[ -n $sharpened && $version == 720p* ]]; then sharpened=1080p_sr_distilled; fi
folder="${root:-./ckpts}/VideoReward"
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
if [[ -z ${PYTHON-} ]]; then
  PYTHON=python3
  if [[ -x $here/.venv/bin/python ]]; then PYTHON=$here/.venv/bin/python; fi
fi
if [[ -z ${HF-} ]]; then
  HF=hf
  if [[ -x $here/.venv/bin/hf ]]; then HF=$here/.venv/bin/hf; fi
fi
if [[ -z ${MODELSCOPE-} ]]; then
  MODELSCOPE=modelscope
  if [[ -x $here/.venv/bin/modelscope ]]; then MODELSCOPE=$here/.venv/bin/modelscope; fi
fi

run() {
  printf '+'
  printf ' %q' "$@"
  printf '\n'
  if [[ $mode != dry-run ]]; then "$@"; fi
}

# The text is a string constant of a Python file. It is parsed, never executed.
check_text() {
  "$PYTHON" - "$1" "$TEXT_SHA256" <<'PYTHON'
import ast, hashlib, sys

path, expected = sys.argv[1:]
try:
    tree = ast.parse(open(path, encoding="utf-8").read())
except (OSError, SyntaxError, ValueError) as error:
    sys.exit(f"download_weights.sh: '{path}' cannot be read: {error}")
name = "DETAILED_PROMPT_WITH_SPECIAL_TOKEN"
for node in tree.body:
    if isinstance(node, ast.Assign) and any(getattr(target, "id", None) == name for target in node.targets):
        received = hashlib.sha256(ast.literal_eval(node.value).encode()).hexdigest()
        if received != expected:
            sys.exit(f"download_weights.sh: the scoring text in '{path}' has SHA-256 {received}, expected {expected}.")
        break
else:
    sys.exit(f"download_weights.sh: '{path}' has no constant {name}: it is not the authors' prompt_template.py.")
PYTHON
}

check_weights() {
  local missing=() checkpoint size
  [[ -f $folder/model_config.json ]] || missing+=("model_config.json")
  checkpoint="$(find "$folder" -maxdepth 1 -type d -name 'checkpoint-*' 2>/dev/null | sort -V | tail -n 1 || true)"
  if [[ -z $checkpoint ]]; then
    missing+=("checkpoint-*/")
  elif [[ -f $checkpoint/model.pth ]]; then
    size="$(wc -c <"$checkpoint/model.pth")"
    ((size >= MODEL_BYTES)) ||
      fail "'$checkpoint/model.pth' has $size bytes, expected at least $MODEL_BYTES: repeat this command to finish it."
  elif [[ ! -f $checkpoint/adapter_model.safetensors || ! -f $checkpoint/non_lora_state_dict.pth ]]; then
    missing+=("${checkpoint##*/}/model.pth")
  fi
  [[ -f $folder/prompt_template.py ]] || missing+=("prompt_template.py")
  ((${#missing[@]} == 0)) || fail "'$folder' lacks: ${missing[*]}. Fetch them: ./download_weights.sh ${root:-./ckpts}"
  check_text "$folder/prompt_template.py"
  echo "$folder is complete; the scoring text is the authors'."
}

if [[ $mode == verify ]]; then
  check_weights
  exit 0
fi
if [[ $mode == fetch ]]; then
  command -v "$HF" >/dev/null || fail "'$HF' is not installed. Run 'make setup', or set HF to the hub's program."
  command -v curl >/dev/null || fail "curl is not installed, and fetches the scoring text."
  if [[ -n $version ]]; then
    command -v "$MODELSCOPE" >/dev/null || fail "'$MODELSCOPE' is not installed, and fetches the glyph encoder: pip install modelscope"
  fi
  mkdir -p "$folder"
fi
if [[ -n $version ]]; then
  base="${root:-./ckpts}" total=61
  place="$base"
  while [[ ! -e $place ]]; do place="$(dirname "$place")"; done # df takes only what exists
  echo "GB at most: transformer/$version 33.3, vae 5.0, text_encoder/llm 17, Glyph-SDXL-v2 1, VideoReward 5.0"
  if [[ $version == *i2v* ]]; then
    total=62
    echo "and for i2v vision_encoder/siglip 1: ask for access on the page of black-forest-labs/FLUX.1-Redux-dev, then $HF auth login"
  fi
  if [[ -n $sharpened ]]; then
    total=$((total + 34))
    echo "and transformer/$sharpened 33.3 at most, with its upsampler below 1"
  fi
  echo "$total GB in all; free where '$base' lies: $(df -Ph "$place" 2>/dev/null | awk 'NR == 2 {print $4}' || true)"
  run "$HF" download tencent/HunyuanVideo-1.5 --include config.json --include 'scheduler/*' --include 'vae/*' \
    --include "transformer/$version/*" --local-dir "$base"
  if [[ -n $sharpened ]]; then
    run "$HF" download tencent/HunyuanVideo-1.5 --include "transformer/$sharpened/*" --include "upsampler/$sharpened/*" \
      --local-dir "$base"
  fi
  run "$HF" download Qwen/Qwen2.5-VL-7B-Instruct --local-dir "$base/text_encoder/llm"
  run "$HF" download google/byt5-small --include '*.json' --local-dir "$base/text_encoder/byt5-small"
  run "$MODELSCOPE" download --model AI-ModelScope/Glyph-SDXL-v2 --local_dir "$base/text_encoder/Glyph-SDXL-v2"
  if [[ $version == *i2v* ]]; then
    run "$HF" download black-forest-labs/FLUX.1-Redux-dev --include 'image_encoder/*' --include 'feature_extractor/*' \
      --local-dir "$base/vision_encoder/siglip"
  fi
  run "$HF" download Qwen/Qwen2-VL-2B-Instruct config.json --local-dir "$folder/base"
fi
run "$HF" download "$REPOSITORY" --local-dir "$folder"
text="$folder/prompt_template.py"
if [[ -f $text ]] && check_text "$text" 2>/dev/null; then
  echo "the scoring text is there already"
else
  run curl --fail --location --silent --show-error --retry 3 --output "$text.partial" --url "$TEXT_URL"
  if [[ $mode == fetch ]]; then
    check_text "$text.partial" || fail "the scoring text was not kept. Nothing else is wrong; repeat the command."
    mv "$text.partial" "$text"
  fi
fi
if [[ $mode == fetch ]]; then check_weights; fi
