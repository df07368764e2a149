"""Optional packages for schemas are loaded only by programs that use schemas."""

import subprocess
import sys

import pytest

_OPTIONAL = ("starlette", "uvicorn", "fastavro", "avro", "jsonschema", "google.protobuf", "segmentlog.schemas")


@pytest.mark.parametrize(
    "code",
    [
        "import segmentlog; segmentlog.open; segmentlog.LogStore",
        "from segmentlog.cli import main\ntry: main(['--version'])\nexcept SystemExit: pass",
        "from segmentlog.cli import main\ntry: main(['consume', '--help'])\nexcept SystemExit: pass",
        "from segmentlog.cli import main\ntry: main(['produce', '--help'])\nexcept SystemExit: pass",
        "import segmentlog, tempfile\nwith segmentlog.open(tempfile.mkdtemp() + '/s') as store:\n"
        "    store.create_topic('t')\n    store.topic('t').partition(0).append([b'a'])\n    list(store.consumer('t'))",
    ],
)
def test_nothing_optional_is_loaded_without_need(code: str) -> None:
    """The library and commands without schemas start without the optional packages."""
    check = f"{code}\nimport sys\nprint([name for name in {_OPTIONAL!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", check], check=True, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_package_that_is_missing_is_named() -> None:
    """Without fastavro, a serializer raises an error that names the package to install."""
    code = (
        "import sys\nsys.modules['fastavro'] = None\nimport segmentlog\n"
        "try:\n    from segmentlog.schemas import AvroSerializer\n"
        "except segmentlog.SegmentlogError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "pip install '.[http]' in a clone of segmentlog" in done.stdout
