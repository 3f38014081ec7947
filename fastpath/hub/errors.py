"""What can go wrong between us and the Hub, each in one line that says what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fastpath.hub.name import HubName

_OF_TRANSPORT = ("httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3", "ssl", "socket")
_ELSE = "or download the file elsewhere and name it"


class NetworkDown(ValueError):
    """Nobody answers."""


@contextmanager
def said_plainly(name: HubName, there: Callable[[], str] | None = None) -> Iterator[None]:
    """Errors of huggingface_hub as a `ValueError` of one line.

    there  what the repository has, for a file that it has not
    """
    try:
        yield
    except ValueError:
        raise  # ours, or the library's about a name
    except Exception as error:
        line = _line(name, error, there)
        if line is None:
            raise
        raise (NetworkDown if _is_of_network(error) else ValueError)(f"{name}: {line}") from error


@contextmanager
def losing(name: HubName) -> Iterator[None]:
    """A connection that ends before a file does, as `NetworkDown`."""
    try:
        yield
    except Exception as error:
        if not (_is_of_network(error) or "Consistency check" in str(error)):
            raise
        raise NetworkDown(
            f"{name}: the connection was lost ({_what(error)}). What came is kept: run this again to go on."
        ) from error


def _line(name: HubName, error: Exception, there: Callable[[], str] | None) -> str | None:
    from huggingface_hub import errors

    status = getattr(getattr(error, "response", None), "status_code", None)
    page = f"{_endpoint()}/{name.repo}"
    token = "`hf auth login`, or HF_TOKEN"
    if isinstance(error, errors.GatedRepoError) or status == 403:
        return (
            f"the repository is gated ({status}). Accept its terms at {page} and give a token of that "
            f"account: {token}."
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return (
            f"{name.repo} has no revision {name.revision!r}. Leave @{name.revision} out for its main branch."
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"no such repository, or a private one ({status}). Look at {page}; for a private one: {token}."
    if isinstance(error, errors.EntryNotFoundError) and status == 404:
        listed = f" It has {there()}." if there is not None else ""
        return f"{name.repo} has no such file.{listed}"
    if isinstance(error, errors.OfflineModeIsEnabled):
        return f"not in the cache, and HF_HUB_OFFLINE is set. Take that away, {_ELSE}."
    if status is not None:
        return f"{_endpoint()} answered {status}. Try again later, {_ELSE}."
    if _is_of_network(error):
        return (
            f"not in the cache, and {_endpoint()} does not answer ({_what(error)}). Check the connection, "
            f"{_ELSE}."
        )
    return None


def _is_of_network(error: BaseException | None) -> bool:
    from huggingface_hub.errors import OfflineModeIsEnabled

    while error is not None:
        if isinstance(error, OfflineModeIsEnabled | ConnectionError | TimeoutError):
            return True
        if type(error).__module__.split(".")[0] in _OF_TRANSPORT and getattr(error, "response", None) is None:
            return True
        error = error.__cause__
    return False


def _what(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 120 else f"{text[:117]}..."


def _endpoint() -> Any:
    from huggingface_hub import constants

    return constants.ENDPOINT
