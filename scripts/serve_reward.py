"""Serve rewards over HTTP, for trainers that set `--remote_reward_url`.

Example: `REWARD_TOKEN=secret python -m scripts.serve_reward --reward videoalign_local --host 0.0.0.0 --port 8000`
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn
from fastapi import FastAPI

from hyvideo.config.flags import Parser
from hyvideo.config.outside import complain, loading, with_home
from hyvideo.models.reward_models.remote.wire import TOKEN_VARIABLE, checked_token

if TYPE_CHECKING:
    from hyvideo.models.reward_models.registry import RewardContext, RewardModel

_LOCAL_HOSTS = ("127.0.0.1", "::1", "localhost")
_MOST_CONNECTIONS = 256  # fewer than the files that a process may open; who comes later is answered 503


def main(argv: Sequence[str]) -> int:
    """Serve until a signal; returns the exit status (2: wrong input)."""
    arguments = parse_arguments(argv)
    try:
        app = build_app(arguments, os.environ.get(TOKEN_VARIABLE))
    except (ValueError, RuntimeError) as error:
        complain(f"serve_reward: {error}")
        return 2
    uvicorn.run(app, host=arguments.host, port=arguments.port, limit_concurrency=_MOST_CONNECTIONS, ws="none")
    return 0


def build_app(arguments: argparse.Namespace, token: str | None) -> FastAPI:
    """Load the rewards and make the application.

    Raises:
        ValueError: a token that is no header, an unknown or repeated reward, an unknown option, missing weights,
            or a public address without a token.
        RuntimeError: an unknown device.
    """
    token = checked_token(token)
    names = [text.partition("=")[0] for text in arguments.reward]
    if len(set(names)) < len(names):
        raise ValueError(f"--reward: a server has each reward once; received {', '.join(names)}.")
    if not token and arguments.host not in _LOCAL_HOSTS:
        raise ValueError(f"--host {arguments.host} is open to others: set {TOKEN_VARIABLE} to a token they must show.")
    with loading("serve_reward"):
        import torch  # only now, for it takes seconds
        from transformers.utils.logging import disable_progress_bar

        from hyvideo.models.reward_models.registry import RewardContext
        from hyvideo.models.reward_models.remote.server import create_app

    disable_progress_bar()
    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    context = RewardContext(device, arguments.model_root, arguments.video_fps, arguments.batch_size, own_files=False)
    return create_app(
        dict(read_reward(text, context) for text in arguments.reward),
        token=token,
        video_fps=arguments.video_fps,
        max_body_bytes=arguments.max_body_mb * 2**20,
    )


def read_reward(text: str, context: "RewardContext") -> tuple[str, "RewardModel"]:
    """Build the reward that `NAME` or `NAME=JSON` asks for; JSON holds its options.

    Raises:
        ValueError: it is unknown, or its options do not fit.
    """
    name, _, written = text.partition("=")
    shown = f"{written!r:.200}"
    try:
        options = with_home(json.loads(written or "{}"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--reward {name}: expected its options as JSON, received {shown} ({error}).") from error
    if not isinstance(options, dict):
        raise ValueError(
            f'--reward {name}: expected its options as a JSON object such as {{"seconds": 2}}, received {shown}.'
        )
    from hyvideo.models.reward_models.rewards import build_reward

    return name, build_reward(name, options, context)


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    description = f"Serve rewards over HTTP. The token is read from the environment: {TOKEN_VARIABLE}."
    parser = Parser("serve_reward", description=description)
    add = parser.add_argument
    reward = "a reward, with options; repeat the flag for several rewards"
    add("--reward", action="append", required=True, metavar="NAME[=JSON]", help=reward)
    add("--host", default="127.0.0.1", help="address to listen on; default 127.0.0.1, this machine only")
    add("--port", type=int, default=8000, help="default 8000")
    add("--device", help="default: a GPU where there is one")
    add("--model_root", type=Path, default=Path("ckpts"), help="default ckpts")
    add("--batch_size", type=int, default=8, help="videos scored together; default 8")
    add("--video_fps", type=float, default=24, help="of videos sent as frames; default 24")
    largest = "largest request in MiB, and most frames decoded for one; default 256"
    add("--max_body_mb", type=int, default=256, help=largest)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
