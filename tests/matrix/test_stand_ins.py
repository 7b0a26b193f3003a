"""A library is loaded though what it needs is not there, and is told that there is no device."""

import ctypes
import shutil
import subprocess
import sys

import pytest

from matrix import stand_ins

USER = """
int cudaGetDeviceCount(int *n); long other(void); long plain(void);
int devices(void) { int n = 7; return 1000 * cudaGetDeviceCount(&n) + n; }
long both(void) { return other() == plain() ? other() : 0; }
"""


@pytest.mark.skipif(
    not sys.platform.startswith("linux") or not shutil.which("gcc"), reason="needs gcc on Linux"
)
def test_functions_with_and_without_versions(tmp_path):
    lib = tmp_path / "torch" / "lib"
    lib.mkdir(parents=True)

    def compiled(name, source, *options):
        path = tmp_path / f"{name}.c"
        path.write_text(source)
        command = ["gcc", "-w", "-shared", "-fPIC", path, "-o", lib / name, *options]
        subprocess.run(command, check=True)

    (tmp_path / "map").write_text("libcudaone.so.1 { global: cudaGetDeviceCount; other; };")
    one = "int cudaGetDeviceCount(int *n) { return 0; } long other(void) { return 0; }"
    named = "-Wl,-soname,libcudaone.so.1", f"-Wl,--version-script={tmp_path / 'map'}"
    compiled("libcudaone.so.1", one, *named)
    compiled("libcudatwo.so.2", "long plain(void) { return 0; }", "-Wl,-soname,libcudatwo.so.2")
    linked = f"-L{lib}", "-l:libcudaone.so.1", "-l:libcudatwo.so.2", f"-Wl,-rpath,{lib}"
    compiled("libuser.so", USER, *linked)
    missing = ["libcudaone.so.1", "libcudatwo.so.2"]
    for name in missing:
        (lib / name).unlink()
    with pytest.raises(OSError, match="cannot open shared object"):
        ctypes.CDLL(str(lib / "libuser.so"))
    assert stand_ins.write(tmp_path) == missing
    user = ctypes.CDLL(str(lib / "libuser.so"))
    assert user.devices() == 100_000
    assert user.both() == 100
    assert stand_ins.write(tmp_path) == []
