#!/usr/bin/env bash
# What the launchers do with settings before anything else reads them, and how they start. To be sourced.
#
# Shell arithmetic and `[[ -v ]]` run the commands that an array index holds, and read 0900 as octal: check a text first.

# End with a message of one or more lines; a control character could change what the terminal shows.
fail() {
  printf '%s\n' "${@//[[:cntrl:]]/?}" >&2
  exit 1
}

# need_number NAME VALUE LOWEST HIGHEST
need_number() {
  if [[ ! $2 =~ ^(0|[1-9][0-9]{0,17})$ ]] || (($2 < $3 || $2 > $4)); then
    fail "$1 must be a whole number from $3 to $4, without leading zeros; received '$2'."
  fi
}

# need_seconds NAME VALUE: at most a year
need_seconds() {
  need_number "$1" "$2" 0 31536000
}

# need_match NAME VALUE PATTERN EXPECTED
need_match() {
  [[ $2 =~ ^($3)$ ]] || fail "$1 must be $4; received '$2'."
}

find_python() {
  [[ -z ${PYTHON-} ]] || return 0
  PYTHON=python3
  if [[ -x .venv/bin/python ]]; then PYTHON=.venv/bin/python; fi
}

no_torch() {
  fail "'$PYTHON' cannot import torch. Run 'make setup', or set PYTHON to an interpreter with requirements.txt installed."
}

# Run a script with its flags, again after a lost rank or node where --max_restarts or MAX_RESTARTS asks for it.
start() {
  local word restarts="${MAX_RESTARTS:-0}"
  for word in "${@:2}"; do
    if [[ $word == --max_restarts || $word == --max_restarts=* ]]; then restarts=given; fi
  done
  if [[ $restarts == 0 ]]; then exec bash "$@"; fi
  find_python
  "$PYTHON" -c 'import sys, importlib.util as there; sys.exit(not there.find_spec("torch"))' || no_torch
  exec "$PYTHON" -m scripts.post_train.restarts "$@"
}
