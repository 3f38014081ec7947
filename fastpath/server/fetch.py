"""fetch: an image or sound that a request names by http or https, never from an address of a private place.

The address that was checked is the one that is connected to, so that a name cannot change its mind between.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
from urllib.parse import SplitResult, urljoin, urlsplit

from refimpl.frontend.dialects import Media

MAX_BYTES = 32 << 20
MAX_REDIRECTS = 3
TIMEOUT_S = 10.0


def fetch(item: Media) -> bytes:
    """
    Raises:
        ValueError: one line that begins with the field
    """
    url = item.url
    try:
        for _ in range(MAX_REDIRECTS + 1):
            found = _get(urlsplit(url))
            if isinstance(found, bytes):
                return found
            url = urljoin(url, found)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise ValueError(f"{item.where}: cannot be fetched ({error}). Send the content itself") from None
    raise ValueError(f"{item.where}: more than {MAX_REDIRECTS} redirects. Send the content itself")


def _get(url: SplitResult) -> bytes | str:
    """The content, or where it is to be looked for instead."""
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ValueError("expected http or https and a host")
    port = url.port or (443 if url.scheme == "https" else 80)
    connection = http.client.HTTPConnection(url.hostname, port, timeout=TIMEOUT_S)
    plain = socket.create_connection((public_address(url.hostname, port), port), TIMEOUT_S)
    connection.sock = plain
    try:
        if url.scheme == "https":
            connection.sock = ssl.create_default_context().wrap_socket(plain, server_hostname=url.hostname)
        path = (url.path or "/") + (f"?{url.query}" if url.query else "")
        connection.request("GET", path, headers={"User-Agent": "twinpath", "Accept": "*/*"})
        response = connection.getresponse()
        if response.status in (301, 302, 303, 307, 308):
            return response.getheader("Location") or ""
        if response.status != 200:
            raise ValueError(f"the answer was {response.status}")
        data = response.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ValueError(f"more than {MAX_BYTES} bytes")
        return data
    finally:
        connection.close()


def public_address(host: str, port: int) -> str:
    """An address of the host; all that it has must be public."""
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
