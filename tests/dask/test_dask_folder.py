"""Workers and training processes import from no folder that another account of the host can change."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import dask.config
import pytest

import hpstage
from hpstage.cluster.settings import dask_folder, scheduler_environment, worker_environment

pytestmark = pytest.mark.skipif(not hasattr(os, "getuid"), reason="the folder for temporary files is the account's")


def is_private(folder: Path) -> bool:
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not stat.S_IMODE(found.st_mode) & 0o077


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder for temporary files in which another account has made what Dask would look for."""
    (tmp_path / "dask-scratch-space").mkdir()
    (tmp_path / "dask-scratch-space").chmod(0o777)
    return tmp_path


@pytest.mark.usefixtures("nothing_ahead")
def test_worker_files_are_in_a_folder_that_other_accounts_cannot_change(shared: Path) -> None:
    with (
        dask.config.set({"temporary-directory": str(shared)}),
        hpstage.local_cluster(2, gpus=0) as cluster,
    ):
        folders = [server.local_directory for server in (cluster.scheduler, *cluster.workers.values())]
    assert len(set(folders)) == 3
    for folder in map(Path, folders):
        above = [one for one in folder.parents if one.is_relative_to(shared) and one != shared]
        assert shared in folder.parents and is_private(above[-1])
    assert list((shared / "dask-scratch-space").iterdir()) == []


def test_scheduler_and_workers_use_the_same_private_folder(shared: Path) -> None:
    with dask.config.set({"temporary-directory": str(shared / "new")}):
        folder = dask_folder()
        assert dask_folder() == folder and is_private(Path(folder)) and Path(folder).parent == shared / "new"
        for environment in (scheduler_environment({}), worker_environment({"DASK_TEMPORARY_DIRECTORY": "/any"})):
            assert environment["DASK_TEMPORARY_DIRECTORY"] == folder


@pytest.mark.parametrize("how", ["open", "link", "file"])
def test_an_existing_temporary_folder_that_is_not_private_is_not_used(shared: Path, how: str) -> None:
    name = shared / f"hpstage-{os.getuid()}"
    if how == "open":
        name.mkdir()
        name.chmod(0o770)
    elif how == "link":
        (shared / "another").mkdir(mode=0o700)
        name.symlink_to(shared / "another")
    else:
        name.touch()
    with dask.config.set({"temporary-directory": str(shared)}):
        folder = Path(dask_folder())
    assert folder != name and is_private(folder) and list(folder.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_temporary_folder_of_another_account_is_not_used(shared: Path) -> None:
    name = shared / f"hpstage-{os.getuid()}"
    name.mkdir(mode=0o700)
    os.chown(name, 65534, 65534)
    with dask.config.set({"temporary-directory": str(shared)}):
        assert dask_folder() != str(name)
