"""A wheel, a source archive and an editable install all hold `smcgen.kernels` and `smcgen.potentials`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROBE = """
import smcgen, smcgen.kernels.philox, smcgen.kernels.attention, smcgen.potentials.base, smcgen.potentials.regex
import pathlib, sys
assert pathlib.Path(smcgen.__file__).is_relative_to(sys.argv[1]), smcgen.__file__
for module in (smcgen.kernels.philox, smcgen.potentials.base):
    assert pathlib.Path(module.__file__).resolve().is_relative_to(pathlib.Path(sys.argv[1]).resolve()), module.__file__
"""


def call(*command: str, cwd: Path = ROOT, **environment: str) -> str:
    clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env={**clean, **environment}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def archives(tmp_path_factory) -> Path:
    """dist/ of a copy of what git tracks (or would), so that nothing stray is packed by chance."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    files = call("git", "ls-files", "--cached", "--others", "--exclude-standard", "-z").split("\0")
    for name in files:
        if name and os.path.lexists(ROOT / name):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name, follow_symlinks=False)
    call(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), cwd=source)  # the wheel from the archive
    return out


def test_wheel(archives, tmp_path):
    wheel = next(archives.glob("*.whl"))
    names = set(zipfile.ZipFile(wheel).namelist())
    for name in ("kernels/philox.py", "potentials/base.py", "smc/round.py", "lm/load.py", "cli.py"):
        assert f"smcgen/{name}" in names
    assert not any(name.startswith(("kernels/", "potentials/", "tests/", "benchmarks/")) for name in names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    for folder in (Path("/"), ROOT / "tests"):
        call(sys.executable, "-c", PROBE, str(tmp_path), cwd=folder, PYTHONPATH=str(tmp_path))


def test_source_archive(archives, tmp_path):
    with tarfile.open(next(archives.glob("*.tar.gz"))) as archive:
        archive.extractall(tmp_path, filter="data")
    folder = next(tmp_path.iterdir())
    call(sys.executable, "-c", PROBE, str(folder), cwd=folder)
    call(sys.executable, "-c", PROBE, str(folder), cwd=Path("/"), PYTHONPATH=str(folder))


def test_editable_install(tmp_path):
    venv.create(tmp_path / "env", with_pip=True, system_site_packages=True, symlinks=True)
    python = str(tmp_path / "env/bin/python")
    site = subprocess.run(
        [sys.executable, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    call(python, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "-e", str(ROOT), PYTHONPATH=site)
    for folder in (Path("/"), ROOT):
        call(python, "-c", PROBE, str(ROOT), cwd=folder, PYTHONPATH=site)


def test_repository_root():
    call(sys.executable, "-c", PROBE, str(ROOT), cwd=ROOT)
