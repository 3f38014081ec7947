"""A file of the Hub, on this machine: from the Hub's own cache, or downloaded into it.

huggingface_hub does the talking: addresses, tokens, redirects, retries, progress, the layout of the cache.
It begins again when a download was interrupted, and does not look at what came.  So here the bytes are kept
beside where they belong, the next run goes on behind them, and a file gets its name when its hash is right.

A file that is in the cache is used without asking the Hub.
"""

from __future__ import annotations

import hashlib
import logging
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from fastpath.hub import catalogue
from fastpath.hub.errors import NetworkDown, losing, said_plainly
from fastpath.hub.name import HubName

Say = Callable[[str], None]
MAX_TRIES, WAIT_S = 3, 1.0  # of connections that bring nothing
SPARE_BYTES = 1 << 29  # of the disk, left free
_PART = re.compile(r"(.*-)(\d{5})-of-(\d{5})(\.gguf)")
_IS_PROJECTOR = re.compile(r"mmproj", re.IGNORECASE)
_IS_DRAFTER = re.compile(r"(^|/)mtp|assistant", re.IGNORECASE)


def local_path(given: str, kind: str = "model", *, say: Say | None = None) -> Path:
    """The file of a name on the Hub, fetched if it is not in the cache.

    kind  "model", "projector" or "drafter": which file is meant, where the name says a repository only

    Raises:
        ValueError: one line
    """
    name = HubName.parse(given)
    _library()
    if not name.file:
        name = HubName(name.repo, _chosen(name, kind), name.revision)
    return fetch(name, say=say)


def fetch(name: HubName, *, refresh: bool = False, say: Say | None = None) -> Path:
    """One file; of a model in parts all of them, and the path of the first.

    refresh  ask the Hub whether there is a newer one, if it answers
    """
    say = say or _say
    paths = [_fetch(part, refresh, say) for part in _parts(name)]
    return paths[0]


def cached(name: HubName) -> Path | None:
    """Where a file is in the cache already, as last fetched."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name.repo, name.file, revision=name.revision)
    return Path(found) if isinstance(found, str) else None


def is_installed() -> bool:
    import importlib.util

    return importlib.util.find_spec("huggingface_hub") is not None


def check_installed() -> None:
    _library()


def _library() -> Any:
    try:
        import huggingface_hub
    except ImportError:
        raise ValueError(
            "models of the Hub need huggingface_hub, which is not installed. pip install 'twinpath[hub]', or "
            "download the file yourself and name it"
        ) from None
    return huggingface_hub


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _parts(name: HubName) -> list[HubName]:
    match = _PART.fullmatch(name.file)
    if match is None:
        return [name]
    head, _, n, tail = match.groups()
    files = (f"{head}{k:05}-of-{n}{tail}" for k in range(1, int(n) + 1))
    return [HubName(name.repo, file, name.revision) for file in files]


# -- which file -------------------------------------------------------------------------------------------


def _chosen(name: HubName, kind: str) -> str:
    """The file of a repository: the one it is known for, or the only one of its kind."""
    if known := catalogue.file_of(name.repo, kind):
        return known
    there = _cached_files(name)
    found = _of_kind(there, kind)
    if len(found) != 1:
        there = _listed(name)
        found = _of_kind(there, kind)
    if len(found) == 1:
        return found[0]
    what = f"{len(found)} files that may be the {kind}" if found else f"no file that is a {kind}"
    names = found or [file for file in there if file.endswith(".gguf")] or there
    raise ValueError(f"{name}: {what}. Name one: {name.repo} has {_in_words(names)}.")


def _of_kind(files: list[str], kind: str) -> list[str]:
    """Candidates by their names; of a model in parts the first."""
    found = []
    for file in files:
        part = _PART.fullmatch(file)
        if not file.endswith(".gguf") or (part and int(part[2]) > 1):
            continue
        of = "projector" if _IS_PROJECTOR.search(file) else "drafter" if _IS_DRAFTER.search(file) else "model"
        if of == kind:
            found.append(file)
    return found


def _cached_files(name: HubName) -> list[str]:
    """Files of the repository that are on this machine, of the revision as last fetched."""
    from huggingface_hub.file_download import repo_folder_name

    folder = _cache() / repo_folder_name(repo_id=name.repo, repo_type="model")
    ref = folder / "refs" / name.revision
    commit = ref.read_text().strip() if ref.is_file() else name.revision
    snapshot = folder / "snapshots" / commit
    return sorted(path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*.gguf"))


def _listed(name: HubName) -> list[str]:
    """What the Hub says that the repository has."""
    with said_plainly(name):
        return sorted(_library().HfApi().list_repo_files(name.repo, revision=name.revision))


def _in_words(files: list[str], most: int = 12) -> str:
    more = f" and {len(files) - most} more" if len(files) > most else ""
    return ", ".join(files[:most]) + more if files else "no files"


def _cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


# -- download ---------------------------------------------------------------------------------------------


def _fetch(name: HubName, refresh: bool, say: Say) -> Path:
    known = cached(name)
    if known is not None and not refresh:
        return known
    hub = _library()
    try:
        with said_plainly(name, lambda: _in_words(_listed(name))), _warnings_as_lines(say):
            for _ in range(3):  # the branch may move between two questions
                commit = _fill_blob(name, say)
                path = hub.hf_hub_download(name.repo, name.file, revision=name.revision)
                if Path(path).is_relative_to(_snapshot(name, commit)):
                    return Path(path)
    except NetworkDown:
        if known is None:
            raise
        say(f"{name}: the Hub does not answer; the file that was fetched before is taken")
        return known
    raise ValueError(f"{name}: the revision changes faster than it can be fetched. Name a commit: @COMMIT.")


def _snapshot(name: HubName, commit: str) -> Path:
    from huggingface_hub.file_download import repo_folder_name

    folder = _cache().expanduser().resolve() / repo_folder_name(repo_id=name.repo, repo_type="model")
    return folder / "snapshots" / commit


def _fill_blob(name: HubName, say: Say) -> str:
    """The bytes of a file, checked, where the cache has them; the commit that they are of."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.utils import WeakFileLock

    url = hf_hub_url(name.repo, name.file, revision=name.revision)
    about = get_hf_file_metadata(url)
    if not about.commit_hash or not about.etag or about.size is None:
        raise ValueError(
            f"{name}: {_host(url)} sent no commit, ETag and size, so it is not the Hub. Check "
            "HF_ENDPOINT, or a proxy between."
        )
    _hash_for(name, about.etag, about.size)
    blob = _snapshot(name, "").parent / "blobs" / about.etag
    lock = _cache() / ".locks" / blob.parent.parent.name / f"{about.etag}.lock"
    for folder in (blob.parent, lock.parent):
        folder.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):
        if not blob.exists():
            _download(name, url, about, blob, say)
    return about.commit_hash


def _download(name: HubName, url: str, about: Any, blob: Path, say: Say) -> None:
    part = blob.with_name(f"{blob.name}.incomplete")
    have = part.stat().st_size if part.exists() else 0
    if have > about.size:
        part.unlink()
        have = 0
    _check_disk(name, blob.parent, about.size - have)
    behind = f", going on behind {_size(have)}" if have else ""
    say(f"fetching {name}: {_size(about.size)} from {_host(url)}{behind}")
    n_tries = 0
    while True:
        try:
            with open(part, "ab") as stream, losing(name):
                _get(url, Progress(stream, about.size, have, say), have, about.size)
            break
        except NetworkDown:
            before, have = have, part.stat().st_size
            n_tries = 0 if have > before else n_tries + 1
            if n_tries >= MAX_TRIES:
                raise
            time.sleep(WAIT_S)
    _check_hash(name, part, about.etag)
    part.replace(blob)


def _get(url: str, stream: Any, have: int, size: int) -> None:
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    if have < size:
        http_get(url, stream, resume_size=have, headers=build_hf_headers(), expected_size=size)


def _check_disk(name: HubName, folder: Path, missing: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < missing + SPARE_BYTES:
        raise ValueError(
            f"{name}: got {_size(free)} free in {folder}, expected {_size(missing + SPARE_BYTES)}. Make "
            "room, or name another folder with HF_HUB_CACHE."
        )


def _hash_for(name: HubName, etag: str, n_bytes: int) -> Any:
    """Large files are known by their SHA-256, small ones by that of Git; what else a server says is no name
    of a file here."""
    if re.fullmatch("[0-9a-f]{64}", etag):
        return hashlib.sha256()
    if re.fullmatch("[0-9a-f]{40}", etag):
        return hashlib.sha1(b"blob %d\0" % n_bytes, usedforsecurity=False)
    raise ValueError(
        f"{name}: the ETag {etag[:70]!r} is no hash, so what comes cannot be checked. Check HF_ENDPOINT."
    )


def _check_hash(name: HubName, path: Path, etag: str) -> None:
    """The bytes go if they are others."""
    digest = _hash_for(name, etag, path.stat().st_size)
    with open(path, "rb") as stream:
        while block := stream.read(1 << 22):
            digest.update(block)
    if digest.hexdigest() != etag:
        path.unlink()
        raise ValueError(
            f"{name}: what came has the hash {digest.hexdigest()[:12]}..., expected {etag[:12]}...; it was "
            "thrown away. Fetch it again; if that does not help, a proxy between changes files."
        )


class Progress:
    """The file that is being written; where nobody sees the bar of the library, a line says each quarter."""

    def __init__(self, stream: BinaryIO, size: int, have: int, say: Say):
        self.stream, self.size, self.done, self.say = stream, size, have, say
        self.quiet = sys.stderr.isatty()
        self.quarter = self._quarter()

    def write(self, data: bytes) -> int:
        n = self.stream.write(data)
        self.done += n
        if not self.quiet and self._quarter() > self.quarter:
            self.quarter = self._quarter()
            self.say(f"{25 * self.quarter} % of {_size(self.size)}")
        return n

    def _quarter(self) -> int:
        return 4 * self.done // max(1, self.size)

    def tell(self) -> int:
        return self.stream.tell()

    def seek(self, where: int) -> int:
        return self.stream.seek(where)

    def truncate(self) -> int:
        """The server began at the beginning again."""
        self.done = self.stream.tell()
        return self.stream.truncate()


@contextmanager
def _warnings_as_lines(say: Say) -> Iterator[None]:
    """What the library warns of, such as a lost connection, in one line each."""
    logger = logging.getLogger("huggingface_hub")
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: say(" ".join(record.getMessage().split()))  # type: ignore[method-assign]
    before, propagates = logger.handlers[:], logger.propagate
    logger.handlers[:], logger.propagate = [handler], False
    try:
        yield
    finally:
        logger.handlers[:], logger.propagate = before, propagates


def _size(n: int) -> str:
    return f"{n / 1e9:.2f} GB" if n >= 1e8 else f"{n / 1e6:.2f} MB"


def _host(url: str) -> str:
    return url.split("/", 3)[2] if "//" in url else url
