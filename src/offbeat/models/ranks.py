"""The ranks of a learner in torch: how they meet, how they add up tensors, which device each one has."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed
from torch import Tensor

from offbeat.errors import ConfigError, LearnerLost

_dist: Any = torch.distributed
"""Its classes are made in C++; not all of them have types."""
Backend = Literal["gloo", "nccl"]
_SECOND_TRY_S = 10.0
THIS_MACHINE = "127.0.0.1"
"""Address at which ranks that are all on one machine meet; nobody outside can reach it."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Address at which the ranks of a learner find each other, and their time-outs.

    Example: ``Rendezvous("10.0.0.4", 41233, size=4, backend="gloo", start_timeout_s=60.0, timeout_s=60.0)``;
    ``host`` and ``port`` are rank 0's.
    """

    host: str
    port: int
    size: int
    backend: Backend
    start_timeout_s: float
    timeout_s: float


class RendezvousHost:
    """The store that rank 0 opens for the others to connect to."""

    def __init__(
        self, host: str, size: int, backend: Backend, start_timeout_s: float, timeout_s: float
    ) -> None:
        with socket.create_server((host, 0)) as server:
            port = server.getsockname()[1]
            # The store goes on listening at this address only, and closes its own copy of the socket.
            self.store = _dist.TCPStore(
                host,
                port,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=start_timeout_s),
                master_listen_fd=os.dup(server.fileno()),
            )
        self.rendezvous = Rendezvous(host, port, size, backend, start_timeout_s, timeout_s)


class TorchRanks:
    """One rank's view of all: a process group of its own, beside any that the user's program has."""

    def __init__(self, rendezvous: Rendezvous, rank: int, device: torch.device, store: Any = None) -> None:
        self.rank = rank
        self.size = rendezvous.size
        self.is_nccl = rendezvous.backend == "nccl"
        start = timedelta(seconds=rendezvous.start_timeout_s)
        self._options = _dist.AllreduceOptions()
        self._options.timeout = timedelta(seconds=rendezvous.timeout_s)
        try:
            self._store: Any = store or _dist.TCPStore(rendezvous.host, rendezvous.port, timeout=start)
            join = _join_nccl if rendezvous.backend == "nccl" else _join_gloo
            self._group: Any = join(self._store, rendezvous, rank, device)
        except (RuntimeError, OSError) as error:
            raise LearnerLost(
                f"rank {rank} of the learner did not find the others at {rendezvous.host}:{rendezvous.port}: "
                f"{_headline(error)}"
            ) from error

    def sum_(self, tensor: Tensor) -> None:
        """Replace a tensor by its sum over all ranks, in place; `LearnerLost` when another rank is gone."""
        if self._group is None:
            raise LearnerLost(f"rank {self.rank} of the learner has left the others")
        try:
            self._group.allreduce([tensor], self._options).wait()
        except RuntimeError as error:
            text = f"rank {self.rank} of the learner waited for the others in vain: {_headline(error)}"
            raise LearnerLost(text) from error

    def abort(self) -> None:
        """End an exchange that another thread waits in, with a rank that is known to be lost."""
        if self._group is not None:
            self._group.abort()

    def close(self) -> None:
        """Leave the others, who may be gone already."""
        if self.is_nccl:
            self.abort()
        self._group = self._store = None


def _join_gloo(store: Any, rendezvous: Rendezvous, rank: int, device: torch.device) -> Any:
    options = _dist.ProcessGroupGloo._Options()
    address = _own_address(rendezvous.host, rendezvous.port)
    options._devices = [_dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timedelta(seconds=rendezvous.start_timeout_s)
    try:
        return _dist.ProcessGroupGloo(_dist.PrefixStore("first", store), rank, rendezvous.size, options)
    except RuntimeError:
        # Seldom a connection is closed while it is made, for both who make it: they meet again.
        options._timeout = timedelta(seconds=min(rendezvous.start_timeout_s, _SECOND_TRY_S))
        return _dist.ProcessGroupGloo(_dist.PrefixStore("second", store), rank, rendezvous.size, options)


def _join_nccl(store: Any, rendezvous: Rendezvous, rank: int, device: torch.device) -> Any:
    # A wait for a rank that is gone has to end with an exception, not with the end of this process.
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
    torch.cuda.set_device(device)
    options = _dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=rendezvous.timeout_s)
    return _dist.ProcessGroupNCCL(store, rank, rendezvous.size, options)


def _own_address(host: str, port: int) -> str:
    """The address of this machine on the way to ``host``; nothing is sent to find it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


def _headline(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def choose_device(name: str, rank: int = 0, *, key: str = "trainer.device") -> torch.device:
    """The device of a rank, by what is set as ``key``; GPUs in turn."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(f"{key} is cuda, but torch sees no GPU: set {key} to cpu or auto")
    return torch.device("cuda", rank % torch.cuda.device_count())


def choose_backend(name: str, device: torch.device, ranks_per_node: int, gpus_per_node: int) -> Backend:
    """Choose the backend that exchanges gradients; NCCL needs a GPU for each rank.

    ``name`` is ``learner.backend``; ``gpus_per_node`` of 0: count them.
    """
    gpus = (gpus_per_node or torch.cuda.device_count()) if device.type == "cuda" else 0
    if name == "nccl" and gpus < ranks_per_node:
        raise ConfigError(
            f"learner.backend is nccl, which needs a GPU for each of the {ranks_per_node} ranks of a machine,"
            f" but it has {gpus}: set learner.backend to auto or gloo, or lower learner.num_ranks"
        )
    return "nccl" if name != "gloo" and gpus >= ranks_per_node else "gloo"
