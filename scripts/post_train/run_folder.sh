#!/usr/bin/env bash
# Print the run folder that a config file leads to: OUTPUT_DIR, else the folder of a config.yaml that a run has saved
# there, else outputs/<name of the file>.
#
# Usage: scripts/post_train/run_folder.sh CONFIG
set -euo pipefail

name="$(basename -- "$1")"
if [[ -n ${OUTPUT_DIR-} ]]; then
  printf '%s\n' "$OUTPUT_DIR"
elif [[ $name == config.yaml && -f ${1%/*}/console.log ]]; then
  printf '%s\n' "${1%/*}"
else
  printf '%s\n' "outputs/${name%.*}"
fi
