"""`dist.shrink_group` goes on without a rank: one that was killed, or is excluded and lives."""

from __future__ import annotations

import logging
import os
import signal
import sys

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import SHRINK_ABORT, SHRINK_DEFAULT

import aiodist
from aiodist_torch import ProcessGroup

HOW, VICTIM, MEETING = sys.argv[1], int(sys.argv[2]), sys.argv[3]
# torch warns that it destroys all other groups. Other warnings of torch fail the test.
logging.getLogger("torch.distributed.distributed_c10d").addFilter(
    lambda record: "will destroy" not in record.msg
)


def total(group: dist.ProcessGroup | None = None) -> float:
    x = torch.ones(1)
    dist.all_reduce(x, group=group)
    return float(x)


def part_from(store: dist.Store) -> None:
    """The process that serves torch's store keeps it until nobody else needs it."""
    if own := int(os.environ["RANK"]):
        store.set(f"bye {own}", "")
    else:
        store.wait(["bye 1", "bye 2"])


def leave(_: dist.Work | None) -> None:
    """The victim: it dies, or lives on, and is out of the group."""
    if HOW == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    store = dist.distributed_c10d._get_default_store()
    store.wait(["shrunk"])
    try:
        total()
        raise AssertionError("the group has ended")
    except aiodist.AiodistError:
        pass
    part_from(store)
    dist.destroy_process_group()


def go_on(pending: dist.Work | None) -> None:
    """The survivors."""
    store = dist.distributed_c10d._get_default_store()
    if pending is None:
        try:
            total()
            raise AssertionError("nobody was lost")
        except aiodist.PeerLostError as error:
            assert error.ranks == (VICTIM,)
    old = dist.group.WORLD
    group = dist.shrink_group(
        [VICTIM], shrink_flags=SHRINK_DEFAULT if pending is None else SHRINK_ABORT
    )
    if pending is not None:
        store.set("shrunk", "")
    assert group is dist.group.WORLD
    assert isinstance(group, ProcessGroup)
    assert old is not group
    if pending is not None:
        try:
            pending.wait()
            raise AssertionError("the victim does not call it")
        except aiodist.GroupRevokedError:
            pass
    rank = dist.get_rank()
    survivors = [each for each in range(3) if each != VICTIM]
    assert survivors[rank] == int(os.environ["RANK"])
    assert (dist.get_world_size(), total()) == (2, 2)
    assert group.group_desc == "default:shrunken"
    old.shutdown()  # it has a successor: nothing ends
    every: list[object] = [None, None]
    dist.all_gather_object(every, survivors[rank])
    assert every == survivors
    x = torch.full((2,), float(rank))
    dist.broadcast(x, 1)
    assert x.tolist() == [1, 1]
    assert total(dist.new_group()) == 2
    # Of another group, and of one that has been shrunk before.
    part = dist.new_group([0, 1])
    if rank == 0:
        part = dist.shrink_group([1], group=part)
        assert (part.size(), total(part)) == (1, 1)
    assert total() == 2
    if rank == 0:
        dist.shrink_group([1])
        assert (dist.get_world_size(), total()) == (1, 1)
    if pending is not None:
        part_from(store)  # of a victim that was killed, it may be gone: nothing here needs it
    dist.destroy_process_group()
    dist.init_process_group("aiodist", init_method=MEETING, rank=rank, world_size=2)
    assert total() == 2
    dist.destroy_process_group()


def main() -> None:
    dist.init_process_group("aiodist")
    assert total() == 3
    assert total(dist.new_group()) == 3
    is_victim = dist.get_rank() == VICTIM
    pending = None
    if HOW == "excluded" and not is_victim:
        pending = dist.all_reduce(torch.ones(1), async_op=True)
    (leave if is_victim else go_on)(pending)
    print("shrunk")


main()
