"""Post-train HunyuanVideo-1.5 by GRPO.

Example: `python post_train.py --config configs/tiny.yaml`; `--help` lists every setting.
"""

import os
import sys

from transformers.utils.logging import disable_progress_bar

from hyvideo.config.loading import load_config
from hyvideo.models.reward_models.registry import RewardFailureError
from hyvideo.training.assembly import build_trainer
from hyvideo.training.update import NonFiniteUpdateError


def main() -> int:
    """Train from the command line; returns the exit status (0 done, 1 the run failed, 2 wrong input)."""
    disable_progress_bar()
    try:
        trainer = build_trainer(load_config(sys.argv[1:]), world_size=int(os.environ.get("WORLD_SIZE", "1")))
    except ValueError as error:
        print(f"post_train.py: {error}", file=sys.stderr)
        return 2
    try:
        trainer.train()
    except (NonFiniteUpdateError, RewardFailureError) as error:
        trainer.console.warning(str(error))
        return 1
    finally:
        trainer.console.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
