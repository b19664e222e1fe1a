"""Write yes/no questions for the reward vlm_checks into the column `checks` of a prompt CSV.

A language model behind any server with OpenAI's chat protocol writes them. Started again, the script keeps rows that
have checks. `--validate` only reads a file and names its bad rows.

Example: `python -m scripts.make_checks --prompts_csv assets/prompts/train.csv --output train_checks.csv
    --server http://127.0.0.1:8000/v1 --model Qwen3-VL-8B-Instruct`
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from hyvideo.config.flags import Parser
from hyvideo.config.outside import complain, in_words
from hyvideo.data.checks import CHECKS, COLUMN, parse_checks, read_checks
from hyvideo.data.prompts import prompt_rows, read_prompts
from hyvideo.evaluation.rewriting import ATTEMPTS
from hyvideo.models.reward_models.remote.exchange import ChatServer
from scripts.chat_rows import Row, add_server_flags, fill_rows, server_of

INSTRUCTION = """A video is to be made from this prompt:

{prompt}

Write {count} yes/no questions that check whether the video shows what the prompt asks for. Each asks about one thing \
that can be seen: objects, their number, colours and places, actions, their order and direction, camera and style. \
Ask about what is in the prompt, and expect "no" only for what it rules out. Answer with JSON alone:
[{{"question": "...", "answer": "yes"}}, ...]"""


def main(argv: Sequence[str] | None = None) -> int:
    """Write or validate; returns the exit status (1: some rows have no checks yet, 2: wrong input)."""
    arguments = parse_arguments(argv)
    try:
        if arguments.validate is not None:
            found = read_checks([arguments.validate])
            print(f"{len(found)} prompts have {sum(map(len, found.values()))} checks in {arguments.validate}")
            return 0
        return _write(arguments)
    except (ValueError, OSError) as error:
        complain(f"make_checks: {in_words(error)}")
        return 2


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = Parser("make_checks", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add_server_flags(parser)
    add("--num_checks", type=int, default=5, help="questions per prompt; default 5")
    add("--validate", type=Path, metavar="CSV", help="only read this file and name its bad rows")
    arguments = parser.parse_args(argv)
    needed = ("prompts_csv", "output", "server", "model")
    missing = [f"--{name}" for name in needed if getattr(arguments, name) is None]
    if arguments.validate is None and missing:
        parser.error(f"needed, or --validate: {', '.join(missing)}")
    if min(arguments.num_checks, arguments.in_flight) < 1:
        parser.error(f"--num_checks {arguments.num_checks} and --in_flight {arguments.in_flight}: expected at least 1")
    return arguments


def ask_for_checks(server: ChatServer, prompt: str, count: int) -> str:
    """Return the cell of a prompt.

    Raises:
        ValueError: the model wrote no checks, however often it was asked.
        Fault, RewardFailureError: the server gave no answer, or refused.
    """
    for _ in range(ATTEMPTS):
        text = {"type": "text", "text": INSTRUCTION.format(prompt=prompt, count=count)}
        reply = server.complete([text], max_tokens=2048, temperature=0.7).message.content or ""
        try:
            return CHECKS.dump_json(parse_checks(reply[reply.find("[") : reply.rfind("]") + 1] or "[]")).decode()
        except ValueError as error:
            last = error
    raise ValueError(f"the model wrote no checks in {ATTEMPTS} attempts: {last}")


def _write(arguments: argparse.Namespace) -> int:
    read_prompts([arguments.prompts_csv])  # refuses what is no prompt CSV
    rows = _checked_rows(arguments.prompts_csv)
    if arguments.output.exists():
        done = {row["prompt"]: row.get(COLUMN, "") for row in _checked_rows(arguments.output)}
        for row in rows:
            row[COLUMN] = row.get(COLUMN) or done.get(row["prompt"], "")
    server = server_of(arguments)

    def fill(row: Row) -> None:
        """Write a row's cell."""
        row[COLUMN] = ask_for_checks(server, row["prompt"], arguments.num_checks)

    waiting = [row for row in rows if not row.get(COLUMN)]
    return fill_rows("make_checks", rows, waiting, fill, arguments, last=COLUMN)


def _checked_rows(path: Path) -> list[Row]:
    """Read a CSV; a malformed cell is a ValueError that names its line."""
    rows = []
    for where, row in prompt_rows(path):
        try:
            parse_checks(row.get(COLUMN, ""))
        except ValueError as error:
            raise ValueError(f"{where}: {COLUMN}: {error}") from error
        rows.append(row)
    return rows


if __name__ == "__main__":
    sys.exit(main())
