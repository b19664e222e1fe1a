"""Find out in a run that hangs which collective it waits for, and which ranks did not come."""

import json
import platform
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d as recorders
from torch.distributed import Store

from hyvideo.distributed import HANGS
from hyvideo.distributed.collectives import gather

_KEY = "roll_call"


def collectives_of_this_rank() -> dict[str, Any]:
    """Read PyTorch's flight recorders, by group: the number of the `last` collective, and the one that it `waits` in.

    Of the latter, where there is one, name, number, ranks, and the seconds since it began.
    """
    last, waits = {}, {}
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):  # gloo's, and NCCL's where PyTorch is built for GPUs
        for entry in json.loads(getattr(recorders, name, lambda: "{}")()).get("entries", ()):
            operation, (group, _), number = (entry[f] for f in ("profiling_name", "process_group", "collective_seq_id"))
            key = f"{operation.partition(':')[0]} {group}"
            last[key] = max(number, last.get(key, 0))
            if not entry["retired"] and key not in waits:  # entries come in the order in which they were begun
                ranks = dist.get_process_group_ranks(recorders._resolve_process_group(group))
                waits[key] = operation, number, ranks, time.time() - entry["time_created_ns"] / 1e9
    return {"last": last, "waits": waits}


class RollCall:
    """Asks the watchdogs of all ranks where they are, over the store by which the ranks met: no collective is needed.

    A rank whose process is stopped or dead does not answer. Of those that do, the first one sums up.
    """

    def __init__(self) -> None:
        self._store: Store = dist.distributed_c10d._get_default_store().clone()  # another thread may wait in that one
        self._answered = self._store.add(_KEY, 0)
        self._hosts = gather(platform.node())

    def ask(self) -> None:
        """Ask all ranks, unless one has already."""
        self._store.compare_set(_KEY, str(self._answered), str(self._answered + 1))

    def answer(self, where: str) -> bool:
        """Say `where` this rank is, in words, and in which collectives, if a rank has asked; return whether."""
        asked = self._store.add(_KEY, 0)
        if asked == self._answered:
            return False
        self._answered = asked
        self._store.set(self._place(dist.get_rank()), json.dumps(collectives_of_this_rank() | {"where": where}))
        return True

    def summary(self) -> str | None:
        """Sum up the answers to the last question; None on all ranks but the first that answered.

        None too where ranks are silent and no other waits: a rank that writes the report of a hang cannot answer.
        """
        came = [rank for rank in range(dist.get_world_size()) if self._store.check([self._place(rank)])]
        if came[0] != dist.get_rank():
            return None
        answers = {rank: json.loads(self._store.get(self._place(rank))) for rank in came}
        if len(came) < dist.get_world_size() and not any(answer["waits"] for answer in answers.values()):
            return None
        return summary_of(answers, self._hosts)

    def _place(self, rank: int) -> str:
        return f"{_KEY}/{self._answered}/{rank}"


def summary_of(answers: Mapping[int, Mapping[str, Any]], hosts: Sequence[str]) -> str:
    """Say of every collective that a rank waits in who did not come and where those are; both by rank."""
    found = {(key, wait[1]): wait for answer in answers.values() for key, wait in answer["waits"].items()}
    told = []
    for (key, number), (name, _, ranks, seconds) in found.items():
        missing = [rank for rank in ranks if rank not in answers or answers[rank]["last"].get(key, 0) < number]
        where = {rank: answers[rank]["where"] if rank in answers else "silent" for rank in missing[:8]}
        who = [f"rank {rank} on {hosts[rank]} ({doing})" for rank, doing in where.items()]
        who += [f"{len(missing) - 8} more"] if len(missing) > 8 else []
        came = f"{', '.join(who)} did not come" if who else "all came, so look at the network and the GPUs"
        told.append(f"{name}, collective {number} of {len(ranks)} ranks, waits for {seconds:.0f} s: {came}")
    return f"{HANGS}{'; '.join(told)}." if told else "The run is slow, but no rank waits in a collective."
