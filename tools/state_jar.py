"""`python -m tools.state_jar`: compiles spark_connector/java against the jars of the PySpark that is installed, into
the jar of the engine `jvm` of `sow_spark.state_of_the_world`.

The same sources and the same compiler give the same bytes.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
SOURCES: Final = ROOT / "spark_connector" / "java"
JAR: Final = ROOT / "spark_connector" / "sow_spark" / "sow-state.jar"


def compiled(folder: Path, *sources: Path) -> str:
    """Compiles Java into a folder; returns the class path with it. Raises CalledProcessError."""
    spec = find_spec("pyspark")
    assert spec is not None, "PySpark is installed"
    assert spec.origin is not None, "it is a package"
    jars = f"{Path(spec.origin).parent / 'jars'}/*"
    files = [str(file) for source in sources for file in sorted(source.rglob("*.java"))]
    lint = "-Xlint:all,-classfile,-path,-serial"  # of the jars, and of classes that no other version reads
    subprocess.run(["javac", "--release", "17", lint, "-Werror", "-cp", jars, "-d", str(folder), *files], check=True)
    return f"{folder}:{jars}"


def main() -> int:
    """Writes the jar, unless it is newer than its sources."""
    if JAR.is_file() and all(JAR.stat().st_mtime > file.stat().st_mtime for file in SOURCES.rglob("*.java")):
        return 0
    missing = [*([] if shutil.which("javac") else ["javac"]), *([] if find_spec("pyspark") else ["PySpark"])]
    if missing:
        print(f"no {' and no '.join(missing)} here: sow_spark.state_of_the_world will use its engine in Python")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        compiled(Path(folder), SOURCES)
        with zipfile.ZipFile(Path(folder) / "made.jar", "w", zipfile.ZIP_DEFLATED) as jar:
            for file in sorted(Path(folder).rglob("*.class")):
                jar.writestr(zipfile.ZipInfo(str(file.relative_to(folder))), file.read_bytes(), zipfile.ZIP_DEFLATED)
        shutil.copyfile(Path(folder) / "made.jar", JAR)
    print(f"{JAR.relative_to(ROOT)}: {JAR.stat().st_size // 1024} KiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
