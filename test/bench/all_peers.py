"""All peers by name. Not in package `peers`, so that a child process imports only the peer that it drives."""

from calls import CrowdedPgqueue, MoreCrowdedPgqueue, MostCrowdedPgqueue
from peers.base import Peer
from peers.node_peers import GraphileWorker, PgBoss, StrictPgBoss
from peers.pgmq import GroupedPgmq, Pgmq
from peers.pgq import Pgq
from peers.pgqueue import GroupedPgqueue, GroupedPgqueueClient, Pgqueue, PgqueueClient
from peers.pgqueuer import Pgqueuer
from peers.procrastinate import LockedProcrastinate, Procrastinate
from peers.rabbitmq import RabbitMq
from peers.raw import Raw
from peers.redis_streams import RedisStreams
from peers.transport import Transport

ALL: dict[str, type[Peer]] = {
    peer.name: peer
    for peer in (
        Pgqueue,
        CrowdedPgqueue,
        MoreCrowdedPgqueue,
        MostCrowdedPgqueue,
        Pgmq,
        Raw,
        Transport,
        PgqueueClient,
        Procrastinate,
        Pgqueuer,
        PgBoss,
        GraphileWorker,
        Pgq,
        RedisStreams,
        RabbitMq,
        GroupedPgqueue,
        GroupedPgmq,
        GroupedPgqueueClient,
        LockedProcrastinate,
        StrictPgBoss,
    )
}
