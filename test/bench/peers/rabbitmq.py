"""RabbitMQ quorum queues: named here so that its absence is reported, as it has no driver yet."""

from .base import Missing, Peer


class RabbitMq(Peer):
    name = "RabbitMQ quorum queues"

    def setup(self) -> None:
        raise Missing("a driver, which is not written yet")
