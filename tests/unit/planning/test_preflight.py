"""The free space that a run needs includes the checkpoint that a reward guard keeps."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from hyvideo.checkpoint.run_folder import RunFolder
from hyvideo.config.schema import RunConfig
from hyvideo.planning import preflight
from hyvideo.planning.preflight import check_space


def test_the_best_checkpoint_of_a_guarded_run_needs_room_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder, run = RunFolder(tmp_path / "run", None), RunConfig(max_steps=100, save_interval=1, keep_last=2)
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda path: SimpleNamespace(free=30))
    check_space(folder, run, checkpoint_bytes=10)
    with pytest.raises(ValueError, match="enough for 3 more .* the run will write 4 more"):
        check_space(folder, run, checkpoint_bytes=10, keeps_best=True)
