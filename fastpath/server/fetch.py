"""Fetcher: an image or sound that a request names by http or https, never from an address of a private place.

The address that was checked is the one that is connected to, so that a name cannot change its mind between.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import SplitResult, urljoin, urlsplit

from refimpl.frontend.dialects import Media

Resolve = Callable[[str, int], str]
MAX_REDIRECTS = 3
PIECE = 1 << 16


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
    for address in addresses:
        plain = ipaddress.ip_address(address.split("%")[0])
        mapped = getattr(plain, "ipv4_mapped", None)
        if not (mapped or plain).is_global or plain.is_multicast:
            raise ValueError("the host is in a private place")
    return addresses[0]


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
                if isinstance(found, bytes):
                    return found
                url = urljoin(url, found)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ValueError(f"{item.where}: cannot be fetched ({error}). Send the content itself") from None
        raise ValueError(f"{item.where}: more than {MAX_REDIRECTS} redirects. Send the content itself")

    def _get(self, url: SplitResult, deadline: float) -> bytes | str:
        """The content, or where it is to be looked for instead."""
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError("expected http or https and a host")
        port = url.port or (443 if url.scheme == "https" else 80)
        address = self.resolve(url.hostname, port)
        connection = http.client.HTTPConnection(url.hostname, port, timeout=self.silence_s)
        connection.sock = socket.create_connection((address, port), self.silence_s)
        try:
            if url.scheme == "https":
                context = ssl.create_default_context()
                connection.sock = context.wrap_socket(connection.sock, server_hostname=url.hostname)
            path = (url.path or "/") + (f"?{url.query}" if url.query else "")
            connection.request("GET", path, headers={"User-Agent": "twinpath", "Accept": "*/*"})
            response = connection.getresponse()
            if response.status in (301, 302, 303, 307, 308):
                return response.getheader("Location") or ""
            if response.status != 200:
                raise ValueError(f"the answer was {response.status}")
            return self._read(response, deadline)
        finally:
            connection.close()

    def _read(self, response: http.client.HTTPResponse, deadline: float) -> bytes:
        """Piece by piece: who sends a byte a second is not waited for."""
        pieces, n = [], 0
        while piece := response.read1(PIECE):
            pieces.append(piece)
            n += len(piece)
            if n > self.max_bytes:
                raise ValueError(f"more than {self.max_bytes} bytes")
            if time.monotonic() > deadline:
                raise ValueError(f"it took more than {self.total_s:g} s")
        return b"".join(pieces)
