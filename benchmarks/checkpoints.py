"""How long training waits for a checkpoint: written at once, or copied and written during the next round.

Example: `python -m benchmarks.checkpoints`
"""

from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from transformers.utils.logging import disable_progress_bar

from benchmarks.paired import Result, compare, print_results
from benchmarks.plain_loop import make_round
from hyvideo.config.loading import load_config
from hyvideo.training.build import open_run


def measure() -> list[Result]:
    """Save the tiny run's state both ways; what is left to write is finished before the next save."""
    disable_progress_bar()
    with TemporaryDirectory() as folder:
        config = load_config(["--config", "configs/tiny.yaml", "--max_steps", "1", "--output_dir", f"{folder}/run"])
        config.validation.validation_interval = 0
        training = open_run(config)
        make_round(training)  # so that the optimizer has moments to save
        save = partial(training.state.save, Path(folder) / "saved", keep_last=1)
        result = compare(
            "checkpoints/blocked",
            "written at once / beside training",
            partial(save, beside_training=False),
            partial(save, beside_training=True),
            settle=training.state.finish_save,
        )
        training.journal.console.close()
    return [result]


if __name__ == "__main__":
    print_results(measure())
