"""The kernel under the compiler's sanitizers: no byte outside of a tensor, no undefined behaviour, no race."""

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

DRIVER = Path(__file__).parent / "csrc" / "sanitized.cpp"
COMPILER = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")


@pytest.mark.skipif(COMPILER is None and not os.environ.get("CI"), reason="there is no C++ compiler")
@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_all_sweeps_are_clean(sanitizers, tmp_path):
    assert COMPILER is not None, "CI should have a C++ compiler"
    program = tmp_path / "sanitized"
    # Without optimisation, which takes minutes here: what the sanitizers look at is in the source.
    flags = ["-std=c++17", "-O0", "-g", "-ffp-contract=off", "-Wno-psabi", "-pthread", "-fno-sanitize-recover=all"]
    command = [*shlex.split(COMPILER), *flags, f"-fsanitize={sanitizers}", str(DRIVER), "-o", str(program)]
    subprocess.run(command, check=True)
    run = subprocess.run([program], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "steps, counts 2 and 3" in run.stdout
