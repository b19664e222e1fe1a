"""Rewrite short prompts into the long ones that HunyuanVideo-1.5 is used to, with any OpenAI-compatible server.

The prompt is replaced, and the column `original_prompt` keeps what it was. Started again, the script keeps rows that
are rewritten. `--system_prompt` takes another instruction than scripts/rewrite_prompts.txt.

Example: `python -m scripts.rewrite_prompts --prompts_csv assets/prompts/train.csv --output long_train.csv
    --server http://127.0.0.1:8000/v1 --model Qwen3-30B-A3B-Instruct`
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from hyvideo.config.flags import Parser
from hyvideo.config.outside import complain, in_words, read_file
from hyvideo.data.prompts import read_prompts, rows_of_csv
from hyvideo.models.reward_models.remote.exchange import ChatServer
from scripts.chat_rows import ATTEMPTS, Row, add_server_flags, fill_rows, server_of

ORIGINAL = "original_prompt"
MOST_WORDS = 300
_THOUGHT = re.compile(r"<think>.*?</think>", re.DOTALL)
_QUOTED = re.compile(r'["“]([^"”]+)["”]')


def main(argv: Sequence[str] | None = None) -> int:
    """Rewrite; returns the exit status (1: some rows are not rewritten yet, 2: wrong input)."""
    parser = Parser("rewrite_prompts", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add_server_flags(parser)
    default = Path(__file__).with_suffix(".txt")
    parser.add_argument("--system_prompt", type=Path, default=default, help="file of the instruction; default ours")
    arguments = parser.parse_args(argv)
    missing = [f"--{n}" for n in ("prompts_csv", "output", "server", "model") if getattr(arguments, n) is None]
    if missing or arguments.in_flight < 1:
        parser.error(f"needed: {', '.join(missing)}" if missing else "--in_flight: expected at least 1")
    try:
        return _rewrite(arguments)
    except (ValueError, OSError) as error:
        complain(f"rewrite_prompts: {in_words(error)}")
        return 2


def rewritten(server: ChatServer, instruction: str, prompt: str) -> str:
    """Return a prompt in other words, on one line.

    Raises:
        ValueError: however often it was asked, the model wrote nothing, far too much, or lost a text in quotes.
        Fault, RewardFailureError: the server gave no answer, or refused.
    """
    messages = [{"type": "text", "text": f"{instruction.strip()}\n\nThe prompt:\n{prompt}"}]
    for _ in range(ATTEMPTS):
        choice = server.complete(messages, max_tokens=1024, temperature=0.7)
        answer = _THOUGHT.sub("", choice.message.content or "")
        text = " ".join(answer.split())
        lost = [quoted for quoted in _QUOTED.findall(prompt) if quoted not in text]
        if not 0 < len(text.split()) <= MOST_WORDS:
            problem = f"it wrote {len(text.split())} words, expected 1 to {MOST_WORDS}"
        elif choice.finish_reason == "length" or "<think>" in answer:
            problem = "its answer was cut off at 1,024 tokens; a model that thinks needs that switched off"
        elif lost:
            problem = f"it lost the words on screen {lost[0]!r}"
        else:
            return text
    raise ValueError(f"the model did not rewrite it in {ATTEMPTS} attempts: {problem}")


def _rewrite(arguments: argparse.Namespace) -> int:
    read_prompts([arguments.prompts_csv])  # refuses what is no prompt CSV
    rows = [row for _, row in rows_of_csv(arguments.prompts_csv)]
    done: dict[str, str] = {}
    if arguments.output.exists():
        found = [row for _, row in rows_of_csv(arguments.output)]
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
