"""Connects the ranks of a torch.distributed process group. The ranks find each other by the group's store,
which every backend has.

Each attempt has its own keys, so that values of sub-groups and of several communicators are not mixed up. In
each round every rank gives a value, and rank 0 sends all values to all ranks. So all ranks make the same
decision.
"""

import collections
import concurrent.futures
import contextlib
import fcntl
import ipaddress
import json
import math
import os
import secrets
import socket
import struct
import sys
import time

import torch
import torch.distributed as dist

from onebit._native import Error, Status

# The time limit of a connection. Between two hosts that are up, only a firewall makes it slower.
CONNECT_SECONDS = 10.0
_CONNECTIONS = 32  # connections that a rank opens at once: each takes a round trip of the network
# The other ranks wait this much longer for rank 0 than rank 0 waits for them, so that rank 0 can name the
# missing rank.
GRACE_SECONDS = 10.0
NOTICE_SECONDS = 10.0
_PAUSE = 0.005  # the longest pause before another look, for each rank: the store has 200 looks a second
_UNSET = "?"  # no value, since values are JSON lists
# Before torch 2.5 `compare_set` makes its result without holding the GIL, which corrupts the memory of other threads'
# objects (pytorch/pytorch#128212).
_COMPARES = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 5)
_SIOCGIFADDR = 0x8915

_attempts = collections.Counter()  # the number of attempts, by the group's name


def _store_of_group(group):
    """Returns (store, name) of a process group. torch has no public call for these."""
    c10d = dist.distributed_c10d
    world = getattr(c10d, "_world", None)  # from 2.0 on
    groups, names = (world.pg_map, world.pg_names) if world else (c10d._pg_map, c10d._pg_names)
    group = dist.group.WORLD if group is None else group
    return groups[group][1], names[group]


class Rendezvous:
    """Exchanges values between the ranks of a group that create a communicator. Collective.

    timeout: seconds to wait for a rank that has not come yet
    """

    def __init__(self, group, timeout):
        store, name = _store_of_group(group)
        _attempts[name] += 1
        self._store = dist.PrefixStore(f"onebit/{name}/{_attempts[name]}", store)
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.timeout, self._rounds = timeout, 0

    def store_of(self, name):
        """Returns a store for the same ranks with other keys, for another purpose."""
        return dist.PrefixStore(name, self._store)

    def _set(self, key, value):
        self._store.set(key, json.dumps(value))
        if not _COMPARES:
            self._store.add(f"{key}/set", 1)

    def _look_up(self, key):
        """Returns a value as text, or "" if it is not set. Does not wait, as `get` would."""
        if _COMPARES:  # in one message and its answer
            text = self._store.compare_set(key, _UNSET, _UNSET).decode()
            return "" if text == _UNSET else text
        return self._store.get(key).decode() if self._store.add(f"{key}/set", 0) else ""

    def _name_missing(self):
        """Prints which rank is missing, once in each round, as the library does."""
        self._notice_at = math.inf
        missing = [rank for rank in range(self.size) if not self._look_up(f"{self._rounds}/{rank}")]
        if missing:
            print(
                f"onebit WARN {socket.gethostname()} rank {self.rank}: waiting "
                f"{NOTICE_SECONDS:.3g} s for rank {missing[0]} to make its communicator",
                file=sys.stderr, flush=True,
            )  # fmt: skip

    def _get(self, key, until):
        """Returns a value, or None when the time is over. It polls, since an interrupt cannot end a store's
        wait."""
        pause = 0.001
        while not (text := self._look_up(key)):
            if time.monotonic() > until:
                return None
            if time.monotonic() > self._notice_at:
                self._name_missing()
            time.sleep(pause)
            pause = min(2 * pause, _PAUSE * self.size, 0.2)
        return json.loads(text)

    def share(self, value):
        """Returns the values of all ranks, in the order of ranks. Raises `Error` on all ranks if a value is
        missing."""
        self._rounds += 1
        now = time.monotonic()
        until, self._notice_at = now + self.timeout, now + NOTICE_SECONDS
        key = f"{self._rounds}/{{}}".format
        self._set(key(self.rank), [value])
        if self.rank == 0:
            values = [self._get(key(rank), until) for rank in range(self.size)]
            self._set(key("all"), values)
        else:
            values = self._get(key("all"), until + GRACE_SECONDS) or [None]
        if None in values:
            raise Error(
                Status.ERROR_TRANSPORT,
                f"waited {self.timeout:.3g} s for rank {values.index(None)} to make its communicator",
            )
        return [one for (one,) in values]

    def share_results(self, function):
        """Returns the results of function() of all ranks. If it fails on some rank, raises
        ConnectionError with the first failure on all ranks."""
        try:
            own = [function(), None]
        except Exception as reason:  # noqa: BLE001: the others must not wait for this one
            own = [None, str(reason) or type(reason).__name__]
        shared = self.share(own)
        for rank, (_, why) in enumerate(shared):
            if why:
                raise ConnectionError(f"rank {rank}: {why}")
        return [result for result, _ in shared]


# --- Addresses ------------------------------------------------------------------------------------


def _is_link_local(address):
    """True for a link-local IPv6 address. It contains the name of an interface of this host, so other hosts
    cannot use it as it is."""
    return ":" in address and ipaddress.ip_address(address.split("%")[0]).is_link_local


def _ipv6_addresses(name):
    """Returns the IPv6 addresses of an interface that Linux lists."""
    with contextlib.suppress(OSError), open("/proc/net/if_inet6", encoding="ascii") as file:
        rows = [line.split() for line in file]
        return [str(ipaddress.IPv6Address(int(row[0], 16))) for row in rows if row[-1] == name]
    return []


def _interface_address(name):
    """Returns the IPv4 address of an interface. If it has none, returns an IPv6 address that other hosts can
    reach."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        asked = struct.pack("256s", name.encode()[:15])
        try:
            return socket.inet_ntoa(fcntl.ioctl(one.fileno(), _SIOCGIFADDR, asked)[20:24])
        except OSError as error:
            reason = error.strerror
    six = _ipv6_addresses(name)
    for address in six:
        if not _is_link_local(address):
            return address
    if six:
        raise OSError(f"interface {name} has link-local addresses only: {', '.join(six)}")
    raise OSError(f"interface {name} has no IPv4 address, nor an IPv6 one: {reason}")


def _is_own_address(address):
    with contextlib.suppress(OSError), _open_listener(address):
        return True
    return False


def _hostname_address():
    """Returns the address of this host's name, unless only this host itself can use that address."""
    with contextlib.suppress(OSError):
        for *_, (address, *_rest) in socket.getaddrinfo(socket.gethostname(), None):
            own = address.startswith("127.") or address == "::1" or _is_link_local(address)
            if not own and _is_own_address(address):
                return address
    return None


def _address_towards(host):
    """Returns the address from which this host would send to another host. Sends nothing."""
    with contextlib.suppress(OSError):
        family, _, _, _, (address, *_rest) = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as one:
            one.connect((address, 9))
            own = one.getsockname()[0]
            return None if _is_link_local(own) else own
    return None


def own_address():
    """Returns the address at which other ranks reach this one. As with gloo, it is that of the first interface
    in ONEBIT_SOCKET_IFNAME or GLOO_SOCKET_IFNAME, or else that of the host's name. If only the host itself can
    use that, it is the address from which MASTER_ADDR is reached, or else 127.0.0.1."""
    names = os.environ.get("ONEBIT_SOCKET_IFNAME") or os.environ.get("GLOO_SOCKET_IFNAME") or ""
    if names:
        return _interface_address(names.split(",")[0])
    master = os.environ.get("MASTER_ADDR")
    return _hostname_address() or (master and _address_towards(master)) or "127.0.0.1"


def _open_listener(address):
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    one = socket.socket(family, socket.SOCK_STREAM)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # accepted connections have it too
    try:
        one.bind((address, 0))
        one.listen(1024)
    except OSError:
        one.close()
        raise
    return one


def _connect_to_rank(at):
    """Connects to another rank. Returns this rank's own address in that connection."""
    try:
        with socket.create_connection(at, CONNECT_SECONDS) as one:
            return one.getsockname()[0]
    except OSError as reason:
        raise OSError(f"cannot connect to {at[0]} port {at[1]}: {reason}") from None


def _reserve_port(address):
    """Returns a port that the system gives to no other program for a minute, but at which a socket may listen.
    The port is in TIME_WAIT, since this side closed a connection first."""
    with _open_listener(address) as listener:
        at = listener.getsockname()[:2]
        with socket.create_connection(at) as one:
            listener.accept()[0].close()
            one.recv(1)
    return at[1]


# --- Sockets --------------------------------------------------------------------------------------


def _find_address(rendezvous, listeners):
    """Connects each pair of ranks, which shows failures early: the library would try to connect until the
    timeout. Returns the address at which rank 0 will listen, and the secret."""

    def listen(address):
        listeners.append(_open_listener(address))
        return listeners[-1].getsockname()[:2]

    rank = rendezvous.rank
    at = rendezvous.share_results(lambda: listen(own_address()) if rank == 0 else None)[0]
    peers = rendezvous.share_results(lambda: listen(_connect_to_rank(at)) if rank else at)

    def connect():
        with concurrent.futures.ThreadPoolExecutor(_CONNECTIONS) as threads:
            list(threads.map(_connect_to_rank, peers[1:rank]))
        return [_reserve_port(at[0]), secrets.token_hex(16)] if rank == 0 else None

    port, secret = rendezvous.share_results(connect)[0]
    return (f"[{at[0]}]:{port}" if ":" in at[0] else f"{at[0]}:{port}"), secret


def create_sockets(kind, rendezvous, timeout, streams):
    """Returns a communicator of class `kind`. Raises ConnectionError on all ranks if two of them cannot
    connect."""
    listeners = []
    try:
        address, secret = _find_address(rendezvous, listeners)
    finally:
        for one in listeners:
            one.close()
    made = []

    def create():
        options = {"secret": secret, "streams": streams, "timeout": timeout}
        made.append(kind.sockets(rendezvous.rank, rendezvous.size, address, **options))

    try:
        rendezvous.share_results(create)
    except ConnectionError:
        for comm in made:
            comm.close()
        raise
    return made[0]
