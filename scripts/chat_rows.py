"""Rows of a prompt CSV filled in by a language model behind a chat server: saved as they come, never asked twice."""

import argparse
import csv
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hyvideo.config.outside import complain
from hyvideo.data.files import replacing
from hyvideo.models.reward_models.registry import RewardContext, RewardFailureError
from hyvideo.models.reward_models.remote.exchange import ChatServer, Fault

_SAVED_TOGETHER = 20

Row = dict[str, str]


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """Add what both programs read: the files and the server."""
    add = parser.add_argument
    add("--prompts_csv", type=Path, help="file with a column `prompt`; its other columns are kept")
    add("--output", type=Path, help="CSV to write")
    add("--server", help="address up to and with /v1; the variable OPENAI_API_KEY may hold its key")
    add("--model", help="name of the model on the server")
    add("--in_flight", type=int, default=4, help="requests at once; default 4")


def server_of(arguments: argparse.Namespace) -> ChatServer:
    """Return the server that the flags name."""
    return ChatServer(arguments.server, arguments.model, RewardContext(in_flight=arguments.in_flight), "--server")


def fill_rows(
    program: str,
    rows: Sequence[Row],
    waiting: Sequence[Row],
    fill: Callable[[Row], None],
    arguments: argparse.Namespace,
    *,
    last: str,
) -> int:
    """Let `fill` complete the waiting ones of the rows, and save all of them to `--output` after every few.

    Args:
        program: name of the program, for what it says of rows that stay open.
        rows: all rows of the file.
        waiting: those of them that are not complete.
        fill: completes a row in place; a ValueError, or a server that does not answer or refuses, leaves it open.
        arguments: with `output` and `in_flight`.
        last: name of the column that is written last.

    Returns:
        The exit status: 1 if rows stay open.

    Raises:
        ValueError: the server refused every row of those that are saved together.
    """

    def attempt(row: Row) -> Exception | None:
        """Complete a row, or return why not."""
        try:
            fill(row)
        except (ValueError, Fault, RewardFailureError) as error:
            return error
        return None

    failed = 0
    with ThreadPoolExecutor(arguments.in_flight) as threads:
        for start in range(0, len(waiting), _SAVED_TOGETHER):
            block = waiting[start : start + _SAVED_TOGETHER]
            try:
                results = list(threads.map(attempt, block))
            finally:
                _save(arguments.output, rows, last)
            problems = [(row, error) for row, error in zip(block, results, strict=True) if error]
            if all(isinstance(error, RewardFailureError) for error in results):
                raise ValueError(str(results[0]))
            failed += len(problems)
            for row, error in problems:
                complain(f"{program}: {row['prompt']!r:.120}: {error}")
            done = start + len(block) - failed
            print(f"{done} of {len(waiting)} rows written to {arguments.output}", flush=True)
    if not waiting:
        _save(arguments.output, rows, last)
    return int(failed > 0)


def _save(path: Path, rows: Sequence[Row], last: str) -> None:
    columns = [*dict.fromkeys(column for row in rows for column in row if column != last), last]
    with replacing(path) as place, place.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        writer.writerows(rows)
