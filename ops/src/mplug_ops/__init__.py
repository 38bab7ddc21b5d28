"""Differentiable collectives that strategies share; each is stated once, with its dual."""

from mplug.distributed.exchanges import Item, in_order
from mplug_ops.bounded_rows import (
    BoundedMeeting,
    give_back_bounded,
    meet_bounded,
    pack_bounded,
    send_bounded,
    unpack_bounded,
)
from mplug_ops.collectives import (
    Group,
    all_gather,
    all_reduce,
    all_to_all,
    copy,
    exchange,
    gather,
    join,
    own_part,
    reduce,
    reduce_scatter,
    scatter,
    split,
)
from mplug_ops.exchanges import CHECK, Exchange
from mplug_ops.peer_memory import PeerMemory, SignalledMemory, reachable, refuse_healing, size_of
from mplug_ops.rows import Meeting, RowReturn, bring_back, give_back, meet, send
from mplug_ops.started_rows import arrive, arrive_back, depart, depart_back
from mplug_ops.token_offers import TokenOffers
from mplug_ops.waits import listening, waiting

__all__ = [
    "CHECK",
    "BoundedMeeting",
    "Exchange",
    "Group",
    "Item",
    "Meeting",
    "PeerMemory",
    "RowReturn",
    "SignalledMemory",
    "TokenOffers",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "arrive",
    "arrive_back",
    "bring_back",
    "copy",
    "depart",
    "depart_back",
    "exchange",
    "gather",
    "give_back",
    "give_back_bounded",
    "in_order",
    "join",
    "listening",
    "meet",
    "meet_bounded",
    "own_part",
    "pack_bounded",
    "reachable",
    "reduce",
    "reduce_scatter",
    "refuse_healing",
    "scatter",
    "send",
    "send_bounded",
    "size_of",
    "split",
    "unpack_bounded",
    "waiting",
]
