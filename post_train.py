"""Post-train HunyuanVideo-1.5 by GRPO.

Example: `python post_train.py --config configs/tiny.yaml`; `--help` lists every setting. Over several ranks:
`torchrun --nproc_per_node 8 post_train.py --config configs/sage_8gpu.yaml`.
"""

import sys
from contextlib import ExitStack

import torch.distributed as dist
from transformers.utils.logging import disable_progress_bar

from hyvideo.checkpoint.train_state import SaveError
from hyvideo.config.loading import load_config
from hyvideo.distributed.process_group import process_group
from hyvideo.models.reward_models.registry import RewardFailureError
from hyvideo.planning.preflight import plan_on_main, preflight
from hyvideo.training.assembly import build_trainer
from hyvideo.training.update import NonFiniteUpdateError


def main() -> int:
    """Train from the command line; returns the exit status (0 done, 1 the run failed, 2 wrong input)."""
    disable_progress_bar()
    with ExitStack() as ranks:
        try:
            config = load_config(sys.argv[1:])
            planned = plan_on_main(config) if config.run.dry_run else None
            ranks.enter_context(process_group(config.parallel.collective_timeout))
            if config.run.dry_run:
                report = preflight(config, planned)
                if not dist.is_initialized() or dist.get_rank() == 0:
                    print(report)
                return 0
            trainer = build_trainer(config)
        except ValueError as error:
            if not dist.is_initialized() or dist.get_rank() == 0:  # ranks that have met all say the same
                print(f"post_train.py: {error}", file=sys.stderr)
            return 2
        try:
            trainer.train()
        except (NonFiniteUpdateError, RewardFailureError, SaveError) as error:
            if trainer.mesh.is_main:
                trainer.console.warning(str(error))
                trainer.write_report()
            return 1
        finally:
            trainer.console.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
