"""UrlCheckpoints: checkpoints below any URL that fsspec can write to, mainly in object stores."""

from __future__ import annotations

import re
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import msgspec

from hpstage.checkpoints import format as files
from hpstage.checkpoints.formatted import LOGS, PLACE, FormattedCheckpoints, Publish, Write, kind_of, log_path
from hpstage.checkpoints.remote import Remote, RemoteReader, RemoteWriter, is_definite
from hpstage.checkpoints.sharing import Sharing
from hpstage.checkpoints.store import Manifest, is_key, key_path
from hpstage.errors import CheckpointCorrupt, CheckpointError, CheckpointFull
from hpstage.plan.facts import StateKey

# Seconds after which files without a manifest are considered abandoned. A writer that takes half as long starts over.
_ABANDONED = 24 * 3600.0
# Seconds before each attempt to read an incomplete manifest, until it is considered corrupt. There are several, since
# each attempt may find another writer between creating the file and filling it.
_LOOKS = (0.0, 0.02, 0.05, 0.1, 0.2)

_TOKEN = re.compile(r"state-([0-9a-f]{1,64})\.(?:safetensors|json)")


class UrlCheckpoints(FormattedCheckpoints):
    """Checkpoints of one ``workload`` below ``url``, usually in an object store.

    ``<url>/<key[:2]>/<key>/`` holds the files of :mod:`hpstage.checkpoints.format`, as in a folder of
    ``FolderCheckpoints``; checkpoints copied from one to the other can be loaded. Object stores cannot rename files.
    Each writer therefore uses unique file names and writes the manifest, which lists them, last. So no file changes
    while it is read, and two writers of one key conflict only over the manifest, which only the first one writes.

    Files that no manifest names are leftovers of writers that died or lost their connection; :meth:`sweep` removes them
    after a day, by the service's clock, so that hosts' clocks do not matter. It runs only on request, since it lists
    all files. Multipart uploads that were never completed are not files yet: a lifecycle rule of the bucket removes
    them.

    Args:
        url: of any scheme that fsspec supports (``s3://bucket/prefix``, ``gs://``, ``abfs://``, ``sftp://``,
            ``memory://``). The bucket must exist.
        workload: as in every store.
        storage_options: fsspec's options of the driver, such as ``{"key": ..., "secret": ...}``. Instances carry them
            to workers; prefer credentials in the workers' environment.

    Raises:
        UsageError: the scheme is unknown, or its driver is not installed.
    """

    _to_reach = (
        "see that endpoint and credentials are the same everywhere, and that the files are not in the memory of one "
        "process or on the disk of one host"
    )

    def __init__(self, url: str, workload: str, *, storage_options: Mapping[str, Any] | None = None) -> None:
        self._remote = Remote(url, storage_options or {})
        self.workload = workload
        self._sharing = Sharing()
        with self._explained(None, "reach"):
            self._remote.connect()

    @property
    def url(self) -> str:
        """The URL without credentials."""
        return self._remote.url

    @property
    def _root(self) -> str:
        return self.url

    @contextmanager
    def _written(self, key: StateKey, write: Write, size: int) -> Iterator[tuple[Manifest, Publish]]:
        place, token = self._place(key), uuid.uuid4().hex
        is_named = False  # whether the manifest names these files, or may name them: then they must be kept

        def publish() -> bool:
            nonlocal is_named
            mine = files.encode_manifest(manifest)
            try:
                place.write_new(files.MANIFEST, mine)
            except OSError as error:
                if not isinstance(error, FileExistsError) and is_definite(error):
                    raise
                is_named = True
                found = self._manifest_bytes(place)
                is_named = found == mine  # if so, a reply was lost, and the next attempt found our own manifest
                if found is None and not isinstance(error, FileExistsError):
                    raise
            else:
                is_named = True
            return is_named

        try:
            while True:
                began = time.time()
                manifest = self._remote.attempt(lambda: write(place, token=token))
                if abs(time.time() - began) < _ABANDONED / 2:
                    break  # else, e.g. after this host was suspended overnight, the files may have been swept
            yield manifest, publish
        finally:
            if not is_named:
                self._discard(place, token)

    def _listed(self) -> tuple[dict[StateKey, int], int]:
        sizes, unpublished = {}, 0
        for key, found in self._files().items():
            if files.MANIFEST in found:
                sizes[key] = sum(found.values())
            else:
                unpublished += sum(found.values())
        return sizes, unpublished

    def _place_name(self) -> str:
        with suppress(FileNotFoundError):
            return self._read_file(PLACE).decode()
        with suppress(FileExistsError):  # another process was faster
            self._remote.write_new(PLACE, uuid.uuid4().hex.encode())
        return self._read_file(PLACE).decode()

    def sweep(self) -> int:
        """Remove the files of dead writers: those that no manifest names, a day after the last of them was written.

        Returns the number of such writers. Lists all files, and reads only the manifests next to unnamed files.
        """
        removed = 0
        now: float | None = None
        with self._explained(None, "sweep"):
            for key, found in self._files().items():
                for token, names in self._unnamed(key, found):
                    now = self._remote.now() if now is None else now
                    place = self._place(key)
                    with suppress(FileNotFoundError):  # another process sweeps as well
                        written = max(self._remote.modified(f"{place.path}/{name}") for name in names)
                        if now - written > _ABANDONED:
                            self._discard(place, token)
                            removed += 1
        return removed

    def check(self) -> None:
        path = f".check-{uuid.uuid4().hex}"
        with self._explained(None, "write"):
            self._remote.write(path, b"hpstage")
            self._remote.remove(path)

    def logs(self) -> dict[StateKey, int]:
        with self._explained(None, "list logs of"):
            sizes = self._remote.sizes(LOGS)
        found = ((path.rpartition("/")[2], size) for path, size in sizes.items())
        return {StateKey(name): size for name, size in found if is_key(name)}

    def delete_log(self, key: StateKey) -> None:
        with self._explained(key, "delete the log of"):
            self._remote.remove(log_path(key))

    def _write_file(self, path: str, content: bytes) -> None:
        self._remote.write(path, content)

    def _read_file(self, path: str) -> bytes:
        return self._remote.read(path)

    def _place(self, key: StateKey) -> UrlPlace:
        return UrlPlace(self._remote, key_path(key))

    def _manifest_bytes(self, place: UrlPlace) -> bytes | None:
        with suppress(FileNotFoundError):
            return place.manifest()
        return None

    def _remove(self, key: StateKey) -> None:
        """Remove a checkpoint. The files of a corrupt manifest are unknown, and are left to ``sweep``: another writer
        may be active there."""
        place = self._place(key)
        content = self._manifest_bytes(place)
        if content is None:
            return
        self._remote.remove(f"{place.path}/{files.MANIFEST}")
        with suppress(CheckpointCorrupt):
            for name in files.data_files(place, files.decode_manifest(content, "")):
                self._remote.remove(f"{place.path}/{name}")

    def _discard(self, place: UrlPlace, token: str) -> None:
        """Remove one writer's files; files that cannot be reached now are left to ``sweep``."""
        for name in (f"state-{token}.safetensors", f"state-{token}.json"):
            with suppress(OSError):
                self._remote.remove(f"{place.path}/{name}")

    def _files(self) -> dict[StateKey, dict[str, int]]:
        """Return the bytes of each file of each key."""
        with self._explained(None, "list"):
            sizes = self._remote.sizes()
        found: dict[StateKey, dict[str, int]] = defaultdict(dict)
        for path, size in sizes.items():
            prefix, _, rest = path.partition("/")
            key, _, name = rest.partition("/")
            if is_key(key) and prefix == key[:2] and name and "/" not in name:
                found[StateKey(key)][name] = size
        return found

    def _unnamed(self, key: StateKey, found: Mapping[str, int]) -> list[tuple[str, list[str]]]:
        """Return the token and file names of each writer whose files no manifest names."""
        tokens: dict[str, list[str]] = defaultdict(list)
        for name in found:
            if match := _TOKEN.fullmatch(name):
                tokens[match[1]].append(name)
        if files.MANIFEST in found and (len(tokens) > 1 or files.TENSORS in found):
            try:
                named = self._manifest(key).files
            except CheckpointError:
                # Corrupt: it may name any of them, and must be deleted first. Missing: deleted since it was listed.
                return []
            return [(token, names) for token, names in tokens.items() if not any(name in named for name in names)]
        return [] if files.MANIFEST in found else list(tokens.items())

    @contextmanager
    def _present(self, key: StateKey, manifest: Manifest | None = None) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            place = self._place(key)
            # A deleted checkpoint loses its manifest before its files, and one that is saved again has other files.
            if manifest is not None and self._manifest_bytes(place) == files.encode_manifest(manifest):
                lacks = str(error.filename).rpartition("/")[2]
                raise CheckpointCorrupt(f"{self.location(key)} lacks {lacks}") from error
            raise self._missing(key) from error

    def _described(self, error: OSError) -> tuple[str, str]:
        reason = self._remote.reason(error)
        is_full = kind_of(error, reason) is CheckpointFull
        remedy = "free some space there, or raise the quota" if is_full else _remedy(error)
        return reason, remedy

    def _shown_cause(self, error: OSError) -> OSError | None:
        return self._remote.shown_cause(error)


class UrlPlace:
    """The place of one checkpoint's files: a prefix below a URL."""

    def __init__(self, remote: Remote, path: str) -> None:
        self._remote = remote
        self.path = path

    def where(self, name: str) -> str:
        return f"{self._remote.url.rstrip('/')}/{self.path}/{name}"

    def create(self, name: str) -> AbstractContextManager[RemoteWriter]:
        return self._remote.create(f"{self.path}/{name}")

    def open(self, name: str) -> RemoteReader:
        try:
            return self._remote.open(f"{self.path}/{name}")
        except FileNotFoundError as error:
            error.filename = name  # drivers put arbitrary values into it
            raise

    def manifest(self) -> bytes:
        """Read the manifest. On file systems that do not write files atomically it may be incomplete, and then is not
        valid JSON."""
        for pause in _LOOKS:
            time.sleep(pause)
            content = self._remote.read(f"{self.path}/{files.MANIFEST}")
            with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                msgspec.json.decode(content)
                break
        return content

    def write(self, name: str, content: bytes) -> None:
        self._remote.write(f"{self.path}/{name}", content)

    def write_new(self, name: str, content: bytes) -> None:
        self._remote.write_new(f"{self.path}/{name}", content)


def _remedy(error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return "see that the bucket or folder of the URL is there: hpstage creates no bucket and no parent folder"
    if isinstance(error, PermissionError):
        return "see that the credentials are right and allow to list, read, write and delete there"
    if is_definite(error):
        return "see the URL and storage_options, and that there is free space"
    return "see that the service can be reached and that there are credentials for it"
