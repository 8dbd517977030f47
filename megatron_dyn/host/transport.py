"""Data planes of the host: `megatron.core.resharding`'s copy services as a transport, next to torch's own point-to-point.

A copy service brings what Megatron knows of the machine: gloo through pinned host memory where NCCL must not be used, NCCL
itself, others to come. Source: megatron/core/resharding/copy_services.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megatron_dyn.config import DynConfig, TransportKind
from megatron_dyn.host.collective import GlooCollective
from megatron_dyn.migrate import ProcessGroupTransport
from megatron_dyn.ports import CollectiveTimeout, Transport


class CopyServiceTransport:
    """Implements ports.Transport on a copy service.

    Its waits have no timeout of their own: the process group's bounds them (gloo) or its watchdog (NCCL).
    """

    def __init__(self, service: Any) -> None:
        """`service` is a `CopyService`; the ranks it knows must be the global ranks of the job."""
        self._service = service
        self._peers: list[str] = []

    def submit_send(self, buffer: torch.Tensor, *, to_rank: int, tag: int) -> None:
        """See ports.Transport."""
        self._peers.append(f"sending to rank {to_rank}")
        self._service.submit_send(buffer, to_rank)

    def submit_receive(self, buffer: torch.Tensor, *, from_rank: int, tag: int) -> None:
        """See ports.Transport."""
        self._peers.append(f"receiving from rank {from_rank}")
        self._service.submit_recv(buffer, from_rank)

    def run(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """See ports.Transport. `meanwhile` comes first, since a service does not come back before it is done."""
        peers, self._peers = self._peers, []
        meanwhile()
        if not peers:
            return
        try:
            self._service.run()
        except RuntimeError as error:
            # The service does not say which of its transfers failed.
            told = ", ".join(sorted(set(peers)))
            raise CollectiveTimeout(f"rank {dist.get_rank()}: moving layers failed ({told}): {error}") from error
        if torch.cuda.is_available():
            torch.cuda.synchronize()


def make_transport(config: DynConfig, collective: GlooCollective, *, on_gpu: bool) -> Transport:
    """The transport that `--dyn-transport` names. All ranks together, since a service may make a group."""
    if config.transport is TransportKind.GLOO_COPY:
        from megatron.core.resharding.copy_services.gloo_copy_service import GlooCopyService

        return CopyServiceTransport(GlooCopyService(collective.group))
    if config.transport is TransportKind.NCCL_COPY:
        from megatron.core.resharding.copy_services.nccl_copy_service import NCCLCopyService

        return CopyServiceTransport(NCCLCopyService(dist.group.WORLD if on_gpu else collective.group))
    return ProcessGroupTransport(None if on_gpu else collective.group, timeout_seconds=config.timeout_seconds)
