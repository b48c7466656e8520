"""``hpstage report`` and the picture of ``hpstage tree``: from the store alone, and nothing of it is changed."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from pathlib import Path

import optuna
import pytest
from typer.testing import CliRunner

from hpstage.algos import FullTraining
from hpstage.cli.app import app
from hpstage.errors import StoreError, UsageError
from hpstage.report import write_report
from hpstage.store import RedisJournal, SQLiteJournal
from tests.commands.stores import output_of, run
from tests.redis_server import RedisServer
from tests.unit.reports import HOSTILE, Page, read, search

pytestmark = pytest.mark.sampled(8)

optuna.logging.set_verbosity(optuna.logging.ERROR)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with two studies on it."""
    folder = tmp_path_factory.mktemp("searched") / "a store"
    folder.mkdir()
    with closing(SQLiteJournal(folder / "plan.sqlite")) as journal:
        search(journal, name="early", n_trials=8)
        search(journal, name=HOSTILE, n_trials=3, seed=1, algorithm=FullTraining())
    return folder


@pytest.fixture(scope="module")
def library(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of the store's report as the library writes it."""
    return write_report(tmp_path_factory.mktemp("reported") / "library", store)


@pytest.mark.ci
def test_report_writes_the_same_page_as_the_library_and_prints_its_path(
    store: Path, library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert output_of("report", store, "--tables").strip() == str(Path("hpstage-report") / "index.html")
    for path in library.parent.iterdir():
        assert path.read_bytes() == (tmp_path / "hpstage-report" / path.name).read_bytes()
    assert len(read(library.with_name("trials.csv"))) == 11


@pytest.mark.ci
def test_a_report_has_tables_only_with_the_tables_option(store: Path, library: Path, tmp_path: Path) -> None:
    output_of("report", store, tmp_path / "page")
    page = write_report(tmp_path / "library", store, tables=False)
    names = sorted(path.name for path in page.parent.iterdir())
    assert names == sorted(path.name for path in (tmp_path / "page").iterdir())
    assert not [name for name in names if name.endswith(".csv")] and "savings.json" in names
    assert page.read_bytes() == (tmp_path / "page" / "index.html").read_bytes()
    text = Page(page).text
    assert "trials.csv" not in text and "hpstage report --tables" in text
    with_tables = Page(library)
    assert "trials.csv" in with_tables.text and "--tables" not in with_tables.text


def test_one_study_can_be_reported_and_an_unknown_study_is_refused(store: Path, tmp_path: Path) -> None:
    output_of("report", store, tmp_path / "one", "--study", "early", "--tables")
    assert {row["study"] for row in read(tmp_path / "one" / "trials.csv")} == {"early"}
    output_of("report", store, tmp_path / "two", "--study", HOSTILE)
    assert HOSTILE in Page(tmp_path / "two" / "index.html").texts
    done = subprocess.run(
        [sys.executable, "-m", "hpstage", "report", str(store), str(tmp_path / "three"), "--study", "third"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1 and "the plan has no study 'third'; there are: 'early', " in done.stderr
    assert "\u202e" not in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "three").exists()


def test_an_unwritable_destination_of_a_report_is_refused(store: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    done = run("report", store, tmp_path / "file")
    assert isinstance(done.exception, UsageError) and "give another folder" in str(done.exception)
    (tmp_path / "folder" / "index.html").mkdir(parents=True)
    done = run("report", store, tmp_path / "folder")
    assert isinstance(done.exception, UsageError)
    assert not list((tmp_path / "folder").glob(".*"))  # nothing half written is left
    assert (tmp_path / "file").read_text() == "kept"


def test_a_report_imports_neither_pandas_nor_training_libraries(store: Path, tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['pandas'] = None\n"
        "from hpstage.cli.app import app\n"
        "app(['tree', sys.argv[1], '--picture', sys.argv[2]], standalone_mode=False)\n"
        "heavy = {'torch', 'dask', 'distributed', 'optuna', 'redis', 'pyarrow', 'matplotlib.pyplot'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        "app(['report', sys.argv[1], sys.argv[3]], standalone_mode=False)\n"
        "heavy -= {'optuna', 'redis'}  # Optuna, which imports redis, computes the importance of parameters\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    places = [str(tmp_path / name) for name in ("tree.svg", "report")]
    words = [sys.executable, "-W", "error", "-c", code, str(store), *places]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]" and done.stderr == ""


@pytest.mark.redis
def test_report_reads_a_plan_on_redis_by_its_url(shared_redis: RedisServer, tmp_path: Path) -> None:
    with closing(RedisJournal(shared_redis.url, prefix="test-report")) as journal:
        result = search(journal, n_trials=4)
        records = len(journal)
        output_of("report", f"{shared_redis.url}?prefix=test-report", tmp_path / "server", "--tables")
        assert len(journal) == records
    result.write_report(tmp_path / "result")
    for path in (tmp_path / "result").iterdir():
        assert path.read_bytes() == (tmp_path / "server" / path.name).read_bytes()
    with pytest.raises(UsageError, match="test-report"):
        CliRunner().invoke(app, ["report", shared_redis.url, str(tmp_path / "no")], catch_exceptions=False)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("kind", "begins"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF"), ("PNG", b"\x89")]
)
def test_tree_draws_its_picture_as_png_svg_or_pdf(store: Path, tmp_path: Path, kind: str, begins: bytes) -> None:
    for words in ((), ("--study", HOSTILE)):
        path = tmp_path / f"tree {len(words)}.{kind}"
        assert output_of("tree", store, "--picture", path, *words).strip() == str(path)
        assert path.read_bytes().startswith(begins)


def test_tree_refuses_an_invalid_picture_file_or_study_and_writes_no_file(store: Path, tmp_path: Path) -> None:
    for name in ("tree.gif", "tree"):
        done = run("tree", tmp_path / "nothing", "--picture", tmp_path / name)
        assert isinstance(done.exception, UsageError) and "ends in .png, .svg, .pdf" in str(done.exception)
    done = run("tree", store, "--picture", tmp_path / "no folder" / "tree.png")
    assert isinstance(done.exception, UsageError) and "give another file" in str(done.exception)
    done = run("tree", store, "--picture", tmp_path / "tree.png", "--study", "third")
    assert isinstance(done.exception, UsageError) and "no study 'third'" in str(done.exception)
    assert isinstance(run("tree", tmp_path, "--picture", tmp_path / "tree.png").exception, StoreError)
    assert list(tmp_path.iterdir()) == []
