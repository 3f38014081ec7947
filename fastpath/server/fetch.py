"""Fetcher: an image or sound that a request names by http or https, never from an address of a private place.

The address that was checked is the one that is connected to, so that a name cannot change its mind between.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from urllib.parse import SplitResult, urljoin, urlsplit

from refimpl.frontend.dialects import Media

Resolve = Callable[[str, int], str]
MAX_REDIRECTS = 3
PIECE = 1 << 16
_UNICAST = ipaddress.ip_network("2000::/3")  # all of IPv6 that is routed in public
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


def public_address(host: str, port: int) -> str:
    """An address of the host; all that it has must be public.

    Raises:
        ValueError
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise ValueError("no such host") from None
    addresses = [str(entry[4][0]) for entry in found]
    if not all(_is_public(address.split("%")[0]) for address in addresses):
        raise ValueError("the host is in a private place")
    return addresses[0]


def _is_public(address: str) -> bool:
    """Also of the addresses of IPv4 that those of IPv6 can carry: a gateway would pass them on."""
    plain = ipaddress.ip_address(address)
    if isinstance(plain, ipaddress.IPv6Address):
        carried = plain.ipv4_mapped or plain.sixtofour
        if plain in _NAT64:
            carried = ipaddress.IPv4Address(int(plain) & 0xFFFFFFFF)
        if carried is None:
            return plain in _UNICAST and plain.is_global
        plain = carried
    return plain.is_global and not plain.is_multicast


@dataclass(frozen=True)
class Fetcher:
    """
    resolve    the address of a host and port that may be asked
    max_bytes  of what lies there
    silence_s  seconds that a server may say nothing
    total_s    seconds that it may take, redirects included
    """

    resolve: Resolve = public_address
    max_bytes: int = 32 << 20
    silence_s: float = 10.0
    total_s: float = 30.0

    def __call__(self, item: Media) -> bytes:
        """
        Raises:
            ValueError: one line that begins with the field
        """
        url, deadline = item.url, time.monotonic() + self.total_s
        try:
            for _ in range(MAX_REDIRECTS + 1):
                found = self._get(urlsplit(url), deadline)
                if time.monotonic() >= deadline:
                    raise ValueError
                if isinstance(found, bytes):
                    return found
                url = urljoin(url, found)
        except (OSError, http.client.HTTPException, ValueError) as error:
            is_late = time.monotonic() >= deadline  # whatever the cut looked like to who read
            why = f"it took more than {self.total_s:g} s" if is_late else error
            raise ValueError(f"{item.where}: cannot be fetched ({why}). Send the content itself") from None
        raise ValueError(f"{item.where}: more than {MAX_REDIRECTS} redirects. Send the content itself")

    def _get(self, url: SplitResult, deadline: float) -> bytes | str:
        """The content, or where it is to be looked for instead."""
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError("expected http or https and a host")
        port = url.port or (443 if url.scheme == "https" else 80)
        address = self.resolve(url.hostname, port)
        connection = http.client.HTTPConnection(url.hostname, port, timeout=self.silence_s)
        plain = socket.create_connection((address, port), self.silence_s)
        if url.scheme == "https":
            context = ssl.create_default_context()
            connection.sock = context.wrap_socket(
                plain, server_hostname=url.hostname, do_handshake_on_connect=False
            )
        else:
            connection.sock = plain
        with _ends(connection, deadline) as sock:
            if isinstance(sock, ssl.SSLSocket):
                sock.do_handshake()
            path = (url.path or "/") + (f"?{url.query}" if url.query else "")
            connection.request("GET", path, headers={"User-Agent": "twinpath", "Accept": "*/*"})
            response = connection.getresponse()
            if response.status in (301, 302, 303, 307, 308):
                return response.getheader("Location") or ""
            if response.status != 200:
                raise ValueError(f"the answer was {response.status}")
            return self._read(response)

    def _read(self, response: http.client.HTTPResponse) -> bytes:
        pieces, n = [], 0
        while piece := response.read1(PIECE):
            pieces.append(piece)
            n += len(piece)
            if n > self.max_bytes:
                raise ValueError(f"more than {self.max_bytes} bytes")
        if response.length:
            raise ValueError(f"it ended {response.length} bytes early")
        return b"".join(pieces)


@contextmanager
def _ends(connection: http.client.HTTPConnection, deadline: float) -> Iterator[socket.socket]:
    """Cut off at the deadline, whoever waits for it then: a server that sends its head a byte at a time keeps
    every limit of silence.
    """
    sock: socket.socket = connection.sock  # the connection lets go of it when the head is read

    def cut() -> None:
        with suppress(OSError):
            socket.socket.shutdown(sock, socket.SHUT_RDWR)

    watch = threading.Timer(max(0.0, deadline - time.monotonic()), cut)
    watch.daemon = True
    watch.start()
    try:
        yield sock
    finally:
        watch.cancel()
        connection.close()
