"""The ranks: the processes that hold one target together, and run the same steps on it.

Rank 0 decides. Whatever could differ between two processes (a clock, a seed, the last bit of a sum) is taken
from rank 0, and every rank checks that it is where rank 0 is, since a rank that is elsewhere would wait for
ever. One process alone is `ALONE`, for which all of this does nothing.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from eagle_fsd.core.checks import one_line
from eagle_fsd.files.fingerprints import parts_of, stored

Value = TypeVar("Value")
PATIENCE = timedelta(hours=2)  # how long a rank waits for another: reading large weights takes long
NUMBERS = 4  # in a check: one for what is checked, the others for what must be alike
COMMAND = "torchrun --nproc-per-node N -m eagle_fsd.generate --tp-plan auto ..."


class RanksDiverged(RuntimeError):
    """The ranks are not at the same place of the same work."""


@dataclass(frozen=True)
class Ranks:
    """The processes that hold one target together. control: their group for what the hosts tell each other.

    device: this rank's.
    """

    rank: int = 0
    size: int = 1
    device: torch.device = torch.device("cpu")  # noqa: RUF009  # it cannot change
    control: dist.ProcessGroup | None = None

    @property
    def several(self) -> bool:
        return self.size > 1

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which decides and speaks."""
        return self.rank == 0

    def lead(self, value: Value) -> Value:
        """Return rank 0's value on every rank. It must be one that pickle takes."""
        if not self.several:
            return value
        held = [value if self.leads else None]
        dist.broadcast_object_list(held, src=0, group=self.control)
        return held[0]  # type: ignore[return-value]

    def lead_tensor(self, tensor: Tensor) -> Tensor:
        """Return rank 0's tensor on every rank, without waiting for the device. The shapes are alike."""
        if self.several:
            tensor = tensor.contiguous()
            dist.broadcast(tensor, src=0)
        return tensor

    def gather(self, value: Value) -> list[Value]:
        """Return the values of all ranks, on every rank."""
        if not self.several:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.control)
        return found

    def check(self, what: str, numbers: Sequence[int] = ()) -> None:
        """Raise RanksDiverged unless all ranks are at `what`, with the same numbers, fewer than NUMBERS.

        Every rank raises, and none waits for another.
        """
        if not self.several:
            return
        mine = [zlib.crc32(what.encode()), *numbers]
        sent = torch.tensor([*mine, *[0] * (NUMBERS - len(mine))], device="cpu")
        found = [torch.empty_like(sent) for _ in range(self.size)]
        dist.all_gather(found, sent, group=self.control)
        for rank, theirs in enumerate(found):
            if not theirs.equal(found[0]):
                raise RanksDiverged(
                    f"rank {rank} is not where rank 0 is ({what} on rank {self.rank}): every rank must make "
                    "the same calls with the same arguments, and read streams to the same step"
                )

    def check_alike(self, what: str, *values: object) -> None:
        """Raise RanksDiverged unless all ranks are at `what` with values of the same repr."""
        if self.several:
            self.check(what, [digest_number(repr(values))])

    def on_rank_0(self, make: Callable[[], Value]) -> Value:
        """Return what rank 0 makes, on every rank. Every rank raises its ValueError."""
        value, error = attempt(make) if self.leads else (None, None)
        value, error = self.lead((value, error))
        if error is not None:
            raise ValueError(error)
        return value  # type: ignore[return-value]

    def together(self, make: Callable[[], Value], first: bool = False) -> Value:
        """Return what this rank makes. If one rank fails, all raise its ValueError.

        first: rank 0 goes first, for example to download what the others read then.
        """
        if not self.several:
            return make()
        value, error = None, None
        if self.leads or not first:
            value, error = attempt(make)
        if first:
            error = self.lead(error)
            if error is None and not self.leads:
                value, error = attempt(make)
        for rank, found in enumerate(self.gather(error)):
            if found is not None:
                raise ValueError(found if rank == 0 else f"rank {rank}: {found}")
        return value  # type: ignore[return-value]


ALONE = Ranks()


def attempt(make: Callable[[], Value]) -> tuple[Value | None, str | None]:
    """Return what is made, or else the text of the user's mistake."""
    try:
        return make(), None
    except (ValueError, OSError) as error:
        return None, one_line(error)


def digest_number(text: str) -> int:
    """Return a number that tells texts apart."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")


def rank_by_environment() -> tuple[int, int]:
    """Return rank and number of ranks as torchrun sets them; (0, 1) without it."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


_joined: list[Ranks] = []


def join_ranks(command: str = COMMAND) -> Ranks:
    """Join the processes that torchrun has started. Raises ValueError if there is only this one.

    command: what to run instead. The group of torch.distributed is made here unless the caller has made one.
    """
    if _joined:
        return _joined[0]
    if not dist.is_available():
        raise ValueError("tp_plan is 'auto': this build of torch has no torch.distributed; install another")
    made = dist.is_initialized()
    rank, size = (dist.get_rank(), dist.get_world_size()) if made else rank_by_environment()
    if size < 2:
        raise ValueError(
            f"tp_plan is 'auto' in a single process: each part of the target has its own; run {command}"
        )
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if not made:
        nccl = {"device_id": device} if device.type == "cuda" else {}
        dist.init_process_group("nccl" if nccl else "gloo", timeout=PATIENCE, **nccl)
    # Objects and checks are the hosts': with NCCL they would go through the devices, and wait for them.
    _joined.append(Ranks(rank, size, device, dist.new_group(backend="gloo", timeout=PATIENCE)))
    return _joined[0]


def has_joined() -> bool:
    """Return whether this process has joined others."""
    return bool(_joined)


def leave_ranks() -> None:
    """End the group of this process, if it joined one."""
    if _joined:
        _joined.clear()
        if dist.is_initialized():
            dist.destroy_process_group()


# -- weights of which a rank holds a part ----------------------------------------


def is_split(weight: Tensor) -> bool:
    """Return whether each rank holds a part of this weight: it is a DTensor then."""
    return hasattr(weight, "full_tensor")


def local_bytes(weight: Any) -> int:
    """Return the bytes of a weight that are on this rank."""
    here = weight.to_local() if is_split(weight) else weight
    return sum(part.nbytes for part in parts_of(here))


def held_bytes(module: nn.Module | None, besides: nn.Module | None = None) -> int:
    """Return the bytes of a module's weights on this rank, without those that another one has as well."""
    others = set() if besides is None else set(besides.parameters())
    weights = [] if module is None else stored(module)
    return sum(local_bytes(weight) for weight in weights if weight not in others)


def look_up(tokens: Tensor, weight: Any) -> Tensor:
    """Return the embeddings [..., d] of tokens [...]. If each rank holds a part, all must call this."""
    if not is_split(weight):
        return F.embedding(tokens, weight)
    from torch.distributed.tensor import DTensor, Replicate  # not in every build of torch

    ids = DTensor.from_local(tokens, weight.device_mesh, [Replicate()], run_check=False)
    found: Tensor = F.embedding(ids, weight).redistribute(placements=[Replicate()]).to_local()
    return found
