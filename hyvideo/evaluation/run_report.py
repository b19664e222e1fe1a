"""From run folders to their report: read them, measure what improved, write the page."""

from collections.abc import Sequence
from pathlib import Path

from hyvideo.evaluation.improvement import against, improvement
from hyvideo.observability.report import write_report
from hyvideo.observability.run_record import read_run


def report_runs(folders: Sequence[Path], path: Path, names: Sequence[str | None] = (), *, embed: bool = False) -> Path:
    """Write the report of one run folder, or the comparison of several.

    Args:
        folders: of runs that are finished, in progress, or were killed.
        path: the HTML file.
        names: what to call the runs; None, or no names, takes the configured ones.
        embed: put the videos into the file instead of linking them.

    Raises:
        ValueError: a folder is not a run folder, or two runs have the same name.
        OSError: the page cannot be written.
    """
    runs = [read_run(folder, name) for folder, name in zip(folders, names or [None] * len(folders), strict=True)]
    taken = [run.name for run in runs]
    doubled = sorted({name for name in taken if taken.count(name) > 1})
    if doubled:
        raise ValueError(
            f"Two runs are called {', '.join(doubled)}: {', '.join(str(run.folder) for run in runs)}. "
            "Name them, as in `sage=outputs/a dance=outputs/b`."
        )
    gains = [improvement(run) for run in runs]
    against_first = [against(runs[0], run) for run in runs[1:]]
    return write_report(path, runs, gains, against_first, embed=embed)
