"""Rewrite short prompts into the long ones that HunyuanVideo-1.5 is used to, with any OpenAI-compatible server.

The prompt is replaced, and the column `original_prompt` keeps what it was. Started again, the script keeps rows that
are rewritten. `--system_prompt` takes another instruction than hyvideo/evaluation/rewriting.txt.

Example: `python -m scripts.rewrite_prompts --prompts_csv assets/prompts/train.csv --output long_train.csv
    --server http://127.0.0.1:8000/v1 --model Qwen3-30B-A3B-Instruct`
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from hyvideo.config.flags import Parser
from hyvideo.config.outside import complain, in_words, read_file
from hyvideo.data.prompts import prompt_rows, read_prompts
from hyvideo.evaluation.rewriting import INSTRUCTION, rewritten
from scripts.chat_rows import Row, add_server_flags, fill_rows, server_of

ORIGINAL = "original_prompt"


def main(argv: Sequence[str] | None = None) -> int:
    """Rewrite; returns the exit status (1: some rows are not rewritten yet, 2: wrong input)."""
    parser = Parser("rewrite_prompts", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add_server_flags(parser)
    parser.add_argument("--system_prompt", type=Path, default=INSTRUCTION, help="file of the instruction; default ours")
    arguments = parser.parse_args(argv)
    missing = [f"--{n}" for n in ("prompts_csv", "output", "server", "model") if getattr(arguments, n) is None]
    if missing or arguments.in_flight < 1:
        parser.error(f"needed: {', '.join(missing)}" if missing else "--in_flight: expected at least 1")
    try:
        return _rewrite(arguments)
    except (ValueError, OSError) as error:
        complain(f"rewrite_prompts: {in_words(error)}")
        return 2


def _rewrite(arguments: argparse.Namespace) -> int:
    read_prompts([arguments.prompts_csv])  # refuses what is no prompt CSV
    rows = [row for _, row in prompt_rows(arguments.prompts_csv)]
    done: dict[str, str] = {}
    if arguments.output.exists():
        found = [row for _, row in prompt_rows(arguments.output)]
        asked = {text for row in rows for text in (row["prompt"], row.get(ORIGINAL))}
        if strange := [row for row in found if (row.get(ORIGINAL) or row["prompt"]) not in asked]:
            raise ValueError(
                f"--output: '{arguments.output}' has {len(strange)} rows that are not of '{arguments.prompts_csv}', "
                "and would lose them. Name another file."
            )
        done = {row[ORIGINAL]: row["prompt"] for row in found if row.get(ORIGINAL)}
    waiting = []
    for row in rows:
        if row["prompt"] in done:
            row[ORIGINAL], row["prompt"] = row["prompt"], done[row["prompt"]]
        elif not row.get(ORIGINAL):
            waiting.append(row)
    server, instruction = server_of(arguments), read_file(arguments.system_prompt).decode()

    def fill(row: Row) -> None:
        """Rewrite a row."""
        text = rewritten(server, instruction, row["prompt"])
        row[ORIGINAL], row["prompt"] = row["prompt"], text

    return fill_rows("rewrite_prompts", rows, waiting, fill, arguments, last=ORIGINAL)


if __name__ == "__main__":
    sys.exit(main())
