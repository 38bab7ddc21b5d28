"""Network links of this network namespace, by messages to the kernel (rtnetlink), so that no tool is needed.

    python links.py bridge NAME                   a virtual switch
    python links.py cable NAME MASTER PEER PID    a cable from a port of the switch to the namespace of PID
    python links.py up NAME ...                   switch interfaces on
    python links.py down NAME
    python links.py address NAME 10.77.0.1/24 fd77::1/64
    python links.py no-address NAME 10.77.0.1/24

The messages are those of `man 7 rtnetlink`; the numbers are from linux/rtnetlink.h, linux/if_link.h and linux/veth.h.
"""

import os
import socket
import struct
import sys
from collections.abc import Sequence
from ipaddress import ip_interface

NEWLINK, NEWADDR, DELADDR = 16, 20, 21
REQUEST, ACK, NEW = 0x1, 0x4, 0x400 | 0x200  # create; it must not exist
NAME, MASTER, INFO, NAMESPACE = 3, 10, 18, 19
KIND, DATA, PEER = 1, 2, 1
ADDRESS, LOCAL, ADDRESS_FLAGS, NO_DETECTION = 1, 2, 8, 0x2
UP = 0x1


def attribute(kind: int, data: bytes) -> bytes:
    """An attribute, padded to four bytes."""
    return struct.pack("HH", 4 + len(data), kind) + data + bytes(-len(data) % 4)


def link(index: int = 0, flags: int = 0, change: int = 0) -> bytes:
    """The fixed part of a message about a link."""
    return struct.pack("BxHiII", socket.AF_UNSPEC, 0, index, flags, change)


def ask(kind: int, flags: int, body: bytes) -> None:
    """Send a message to the kernel; OSError with its answer."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as line:
        line.send(struct.pack("IHHII", 16 + len(body), kind, REQUEST | ACK | flags, 1, 0) + body)
        (error,) = struct.unpack_from("i", line.recv(65536), 16)
    if error:
        raise OSError(-error, os.strerror(-error))


def named(name: str) -> bytes:
    return attribute(NAME, name.encode() + b"\0")


def bridge(name: str) -> None:
    """Make a virtual switch."""
    ask(NEWLINK, NEW, link() + named(name) + attribute(INFO, attribute(KIND, b"bridge")))


def cable(name: str, master: str, peer: str, pid: str) -> None:
    """Join a port of a switch with a new interface in the network namespace of a process."""
    other = link() + named(peer) + attribute(NAMESPACE, struct.pack("I", int(pid)))
    pair = attribute(KIND, b"veth") + attribute(DATA, attribute(PEER, other))
    port = attribute(MASTER, struct.pack("I", socket.if_nametoindex(master)))
    ask(NEWLINK, NEW, link() + named(name) + port + attribute(INFO, pair))


def up(*names: str) -> None:
    """Switch interfaces on."""
    for name in names:
        ask(NEWLINK, 0, link(socket.if_nametoindex(name), UP, UP))


def down(name: str) -> None:
    """Switch an interface off."""
    ask(NEWLINK, 0, link(socket.if_nametoindex(name), 0, UP))


def address(name: str, *addresses: str) -> None:
    """Give an interface addresses, which are usable at once."""
    _addresses(NEWADDR, NEW, name, addresses)


def no_address(name: str, *addresses: str) -> None:
    """Take addresses from an interface."""
    _addresses(DELADDR, 0, name, addresses)


def _addresses(kind: int, how: int, name: str, addresses: Sequence[str]) -> None:
    for one in map(ip_interface, addresses):
        family = socket.AF_INET if one.version == 4 else socket.AF_INET6
        fixed = struct.pack("BBBBI", family, one.network.prefixlen, 0, 0, socket.if_nametoindex(name))
        values = attribute(LOCAL, one.ip.packed) + attribute(ADDRESS, one.ip.packed)
        flags = attribute(ADDRESS_FLAGS, struct.pack("I", NO_DETECTION)) if one.version == 6 else b""
        ask(kind, how, fixed + values + flags)


if __name__ == "__main__":
    commands = {"bridge": bridge, "cable": cable, "up": up, "down": down, "address": address, "no-address": no_address}
    commands[sys.argv[1]](*sys.argv[2:])
