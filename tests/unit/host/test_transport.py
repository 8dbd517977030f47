"""Megatron's copy services as a transport: buffers go through in order, and a service that fails names the peers."""

import pytest
import torch

from megatron_dyn.config import DynConfig, TransportKind
from megatron_dyn.host.transport import CopyServiceTransport, make_transport
from megatron_dyn.migrate import ProcessGroupTransport
from megatron_dyn.ports import CollectiveTimeout


class Service:
    """Stands for a CopyService; notes what is asked of it."""

    def __init__(self, error=None):
        self.calls, self.error = [], error

    def submit_send(self, tensor, dest_rank):
        self.calls.append(("send", dest_rank))

    def submit_recv(self, tensor, src_rank):
        self.calls.append(("receive", src_rank))

    def run(self):
        self.calls.append("run")
        if self.error is not None:
            raise self.error


BUFFER = torch.zeros(4, dtype=torch.uint8)


def test_all_that_was_queued_goes_to_the_service_in_order_and_once():
    service = Service()
    transport = CopyServiceTransport(service)
    transport.submit_send(BUFFER, to_rank=3, tag=1)
    transport.submit_receive(BUFFER, from_rank=2, tag=2)
    transport.run(meanwhile=lambda: service.calls.append("meanwhile"))
    transport.run()
    assert service.calls == [("send", 3), ("receive", 2), "meanwhile", "run"]


def test_with_nothing_queued_the_service_is_left_alone_and_the_work_is_done():
    service = Service()
    CopyServiceTransport(service).run(meanwhile=lambda: service.calls.append("meanwhile"))
    assert service.calls == ["meanwhile"]


@pytest.mark.usefixtures("one_rank")
def test_a_service_that_fails_names_the_peers():
    transport = CopyServiceTransport(Service(error=RuntimeError("connection reset")))
    transport.submit_send(BUFFER, to_rank=3, tag=1)
    transport.submit_receive(BUFFER, from_rank=2, tag=2)
    with pytest.raises(CollectiveTimeout, match=r"receiving from rank 2, sending to rank 3\): connection reset"):
        transport.run()


@pytest.mark.usefixtures("one_rank", "cpu_platform")
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (TransportKind.TORCH, ProcessGroupTransport),
        (TransportKind.GLOO_COPY, CopyServiceTransport),
        (TransportKind.NCCL_COPY, CopyServiceTransport),
    ],
)
def test_each_kind_is_what_its_flag_says(kind, expected):
    class Collective:
        group = torch.distributed.group.WORLD

    assert type(make_transport(DynConfig(transport=kind), Collective(), on_gpu=False)) is expected
