"""What a plan assumes; in a file of its own, so that `scripts.plan` reads its flags without importing PyTorch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Assumptions:
    """What a plan assumes.

    Attributes:
        num_text: text tokens of a prompt.
        utilisation: share of a GPU's operations per second that the executed ones reach; what an H200 reached with
            compiled blocks (`tests/architecture/test_planned_numbers.py`).
        gpus_per_node: GPUs of a machine.
        network: GB/s that a GPU sends to other machines.
        price_per_gpu_hour: in any currency; None: prices are not worked out.
        reserve: GiB for what a rehearsal leaves out; None: 1 GiB plus a quarter of the rehearsed peak, at most 8.
    """

    num_text: int = 300
    utilisation: float = 0.46
    gpus_per_node: int = 8
    network: float = 50.0
    price_per_gpu_hour: float | None = None
    reserve: float | None = None

    def reserved(self, peak: float) -> float:
        """Return the GiB to reserve besides a rehearsed peak of `peak` GiB."""
        return min(8.0, 1 + peak / 4) if self.reserve is None else self.reserve
