"""Which weights a video was made with, told from samples of their files: a whole model would take minutes to read."""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

SAMPLES, SAMPLE_BYTES = 64, 2**16
"""Places of a file that are read, evenly spread, and how much at each; a file up to 4 MiB is read whole."""


def fingerprint(folders: Iterable[Path]) -> str:
    """Return 16 hexadecimal digits that change when files in `folders` do: in name, size or what is sampled.

    Where the folders lie, and whether by links, does not matter. Training moves every weight it trains, and 64 samples
    of a file meet them; a checkpoint's manifest is read whole, and holds the hashes of all its files. A folder that is
    not there is empty. Notes of the program that downloaded them (`.cache`: when it ran) do not count.
    """
    digest = hashlib.sha256()
    for number, folder in enumerate(folders):
        files = (Path(place, name) for place, _, names in os.walk(folder, followlinks=True) for name in names)
        for path in sorted(path for path in files if path.is_file()):
            if ".cache" in path.relative_to(folder).parts:
                continue
            size = path.stat().st_size
            digest.update(f"{number} {path.relative_to(folder)!s} {size}\n".encode(errors="surrogateescape"))
            with path.open("rb") as file:
                for sample in range(SAMPLES):
                    file.seek(max(sample * SAMPLE_BYTES, (size - SAMPLE_BYTES) * sample // (SAMPLES - 1)))
                    digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()[:16]
