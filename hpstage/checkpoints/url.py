"""UrlCheckpoints: checkpoints below any URL that fsspec can write to, mainly in object stores."""

from __future__ import annotations

import re
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, TypeVar

import msgspec

from hpstage.checkpoints import format as files
from hpstage.checkpoints.formatted import LOGS, FormattedCheckpoints, log_path
from hpstage.checkpoints.remote import Remote, RemoteReader, RemoteWriter, is_definite
from hpstage.checkpoints.state_tree import FlatState
from hpstage.checkpoints.store import Manifest, Usage, is_key, key_path
from hpstage.checkpoints.trouble import kind_of
from hpstage.errors import CheckpointCorrupt, CheckpointError, CheckpointFull, CheckpointMissing, CheckpointUnreachable
from hpstage.plan.facts import Kept, StateKey

T = TypeVar("T")

# Seconds after which files without a manifest are considered abandoned. A writer that takes half as long starts over.
_ABANDONED = 24 * 3600.0
# Seconds before each attempt to read an incomplete manifest, until it is considered corrupt. There are several, since
# each attempt may find another writer between creating the file and filling it.
_LOOKS = (0.0, 0.02, 0.05, 0.1, 0.2)
# The file that holds the place's name.
_PLACE = ".place/name"

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

    def __init__(self, url: str, workload: str, *, storage_options: Mapping[str, Any] | None = None) -> None:
        self._remote = Remote(url, storage_options or {})
        self.workload = workload
        self._name = ""  # the place's name, set by the first call of identity()
        with self._explained(None, "reach"):
            self._remote.connect()

    @property
    def url(self) -> str:
        """The URL without credentials."""
        return self._remote.url

    def identity(self) -> str:
        """Return a random name, written to the place by the first caller: one URL refers to two places if endpoints or
        the memory of two processes differ, and two URLs may refer to one place."""
        if self._name:
            self.prove()
            return self._name
        with self._explained(None, "write"):
            try:
                self._name = self._remote.read(_PLACE).decode()
            except FileNotFoundError:
                with suppress(FileExistsError):  # another process was faster
                    self._remote.write_new(_PLACE, uuid.uuid4().hex.encode())
                self._name = self._remote.read(_PLACE).decode()
        return self._name

    def prove(self) -> None:
        if not self._name:
            return
        try:
            with self._explained(None, "reach"):
                found = self._remote.read(_PLACE).decode()
        except CheckpointUnreachable as error:
            if isinstance(error.__cause__, FileNotFoundError):
                raise CheckpointUnreachable(
                    f"{self.url} is a different place here than for the driver, or to none; see that it has the same "
                    f"endpoint and credentials everywhere, and that its files are not in one process's memory or disk"
                ) from error.__cause__
            raise
        if found != self._name:
            raise CheckpointUnreachable(
                f"{self.url} is a different place here than for the driver; see that it has the same endpoint and "
                f"credentials everywhere"
            )

    def __repr__(self) -> str:
        return f"UrlCheckpoints({self.url!r}, workload={self.workload!r})"

    def location(self, key: StateKey) -> str:
        return f"{self.url}/{key_path(key)}"

    def _save(self, key: StateKey, flat: FlatState, step: int, parent: StateKey | None) -> Kept:
        place = self._place(key)
        token = uuid.uuid4().hex
        with self._explained(key, "write"):
            try:
                while True:
                    began = time.time()
                    manifest = self._remote.attempt(
                        lambda: files.write(
                            place, flat, key=key, step=step, parent=parent, workload=self.workload, token=token
                        )
                    )
                    if abs(time.time() - began) < _ABANDONED / 2:
                        break  # else, e.g. after this host was suspended overnight, the files may have been swept
                return self._publish(key, manifest)
            except _Unclear as unclear:
                raise unclear.error from None
            except BaseException:
                self._discard(place, token)
                raise

    def _manifest(self, key: StateKey) -> Manifest:
        place = self._place(key)
        with self._explained(key, "read"):
            content = self._manifest_bytes(place)
        if content is None:
            raise self._missing(key)
        manifest = files.decode_manifest(content, place.where(files.MANIFEST))
        files.check_identity(manifest, key, self.workload, place.where("").rstrip("/"))
        return manifest

    def delete(self, key: StateKey) -> None:
        with self._explained(key, "delete"):
            self._remove(self._place(key))

    def keys(self) -> Iterator[StateKey]:
        yield from sorted(key for key, found in self._listed().items() if files.MANIFEST in found)

    def sizes(self) -> dict[StateKey, int]:
        return {key: sum(found.values()) for key, found in self._listed().items() if files.MANIFEST in found}

    def usage(self) -> Usage:
        listed = self._listed().values()
        published = [sum(found.values()) for found in listed if files.MANIFEST in found]
        unpublished = sum(sum(found.values()) for found in listed if files.MANIFEST not in found)
        return Usage(checkpoints=len(published), bytes=sum(published), unpublished=unpublished)

    def sweep(self) -> int:
        """Remove the files of dead writers: those that no manifest names, a day after the last of them was written.

        Returns the number of such writers. Lists all files, and reads only the manifests beside unnamed files.
        """
        removed = 0
        now: float | None = None
        with self._explained(None, "sweep"):
            for key, found in self._listed().items():
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
        with self._explained(key, "delete the log beside"):
            self._remote.remove(log_path(key))

    def _write_file(self, path: str, content: bytes) -> None:
        self._remote.write(path, content)

    def _read_file(self, path: str) -> bytes:
        return self._remote.read(path)

    def _place(self, key: StateKey) -> UrlPlace:
        return UrlPlace(self._remote, key_path(key))

    def _publish(self, key: StateKey, manifest: Manifest) -> Kept:
        """Write the manifest, unless a sound checkpoint exists."""
        place = self._place(key)
        mine = files.encode_manifest(manifest)
        while True:
            try:
                place.write_new(files.MANIFEST, mine)
            except OSError as error:
                if not isinstance(error, FileExistsError) and is_definite(error):
                    raise
                try:
                    found = self._manifest_bytes(place)
                except OSError as second:
                    raise _Unclear(second) from error
                if found == mine:
                    break  # a reply was lost, and the next attempt found our own manifest
                if found is None and not isinstance(error, FileExistsError):
                    raise
                # Another writer was faster. Equal keys mean equal training, so its checkpoint is used if it is sound.
                if (kept := self._kept(key)) is not None:
                    self._discard_named(place, manifest)
                    return msgspec.structs.replace(kept, digest=manifest.digest, marks=manifest.marks)
                self._remove(place)
            else:
                break
        return manifest.as_kept()

    def _manifest_bytes(self, place: UrlPlace) -> bytes | None:
        """Return the content of the manifest's file, ``None`` if there is none.

        On file systems that do not write files atomically it may be incomplete, and then is not valid JSON.
        """
        content = b""
        for pause in _LOOKS:
            time.sleep(pause)
            try:
                content = place.read(files.MANIFEST)
            except FileNotFoundError:
                return None
            if _is_json(content):
                break
        return content

    def _remove(self, place: UrlPlace) -> None:
        """Make a checkpoint disappear at once, then remove its files.

        The files of a corrupt manifest are unknown, and are left to ``sweep``: another writer may be active there.
        """
        content = self._manifest_bytes(place)
        if content is None:
            return
        self._remote.remove(f"{place.path}/{files.MANIFEST}")
        with suppress(CheckpointCorrupt):
            self._discard_named(place, files.decode_manifest(content, ""))

    def _discard_named(self, place: UrlPlace, manifest: Manifest) -> None:
        for name in files.data_files(place, manifest):
            self._remote.remove(f"{place.path}/{name}")

    def _discard(self, place: UrlPlace, token: str) -> None:
        """Remove one writer's files; files that cannot be reached now are left to ``sweep``."""
        for name in (f"state-{token}.safetensors", f"state-{token}.json"):
            with suppress(OSError):
                self._remote.remove(f"{place.path}/{name}")

    def _listed(self) -> dict[StateKey, dict[str, int]]:
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

    def _missing(self, key: StateKey) -> CheckpointMissing:
        return CheckpointMissing(f"no checkpoint of state {key} under {self.url}")

    @contextmanager
    def _present(self, key: StateKey, manifest: Manifest) -> Iterator[None]:
        """Distinguish a checkpoint that is deleted while it is read from one with a missing file."""
        try:
            yield
        except FileNotFoundError as error:
            place = self._place(key)
            # A deleted checkpoint loses its manifest before its files, and one that is saved again has other files.
            if self._manifest_bytes(place) == files.encode_manifest(manifest):
                lacks = str(error.filename).rpartition("/")[2]
                raise CheckpointCorrupt(f"{place.where('').rstrip('/')} lacks {lacks}") from error
            raise self._missing(key) from error

    @contextmanager
    def _explained(self, key: StateKey | None, action: str) -> Iterator[None]:
        what = "checkpoints" if key is None else f"the checkpoint of state {key}"
        try:
            yield
        except OSError as error:
            reason = self._remote.reason(error)
            kind = kind_of(error, reason)
            remedy = "free some space there, or raise the quota" if kind is CheckpointFull else _remedy(error)
            raise kind(f"cannot {action} {what} under {self.url}: {reason}; {remedy}") from self._remote.shown_cause(
                error
            )


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
        with _named(name):
            return self._remote.open(f"{self.path}/{name}")

    def read(self, name: str) -> bytes:
        with _named(name):
            return self._remote.read(f"{self.path}/{name}")

    def write(self, name: str, content: bytes) -> None:
        self._remote.write(f"{self.path}/{name}", content)

    def write_new(self, name: str, content: bytes) -> None:
        self._remote.write_new(f"{self.path}/{name}", content)


class _Unclear(Exception):
    """Raised if it is unknown whether the manifest was written, so that the files it may name must be kept."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Make a ``FileNotFoundError`` name the file: drivers put arbitrary values into it."""
    try:
        yield
    except FileNotFoundError as error:
        error.filename = name
        raise


def _is_json(content: bytes) -> bool:
    try:
        msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True


def _remedy(error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return "see that the bucket or folder of the URL is there: it is not made unasked"
    if isinstance(error, PermissionError):
        return "see that the credentials are right and allow to list, read, write and delete there"
    if is_definite(error):
        return "see the URL and storage_options, and that there is free space"
    return "see that the service can be reached and that there are credentials for it"
