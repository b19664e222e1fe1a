#!/usr/bin/env bash
# What the launchers do with settings before anything else reads them. To be sourced.
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
