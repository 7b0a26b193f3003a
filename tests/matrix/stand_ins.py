"""Stand-ins for shared libraries that a build of torch needs and this machine does not have.

A wheel of torch for CUDA is loaded together with gigabytes of CUDA's libraries. On a machine
without a GPU none of their functions is of use, but the loader asks for each of them by name and
version. ``write(folder)`` puts small libraries beside torch's that have all those names. Their
functions say that there is no device.

Needs gcc and binutils (readelf).
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

_NO_DEVICE = 100  # cudaErrorNoDevice, CUDA_ERROR_NO_DEVICE; no status of the others is success
_PLAIN = "long {name}(void) {{ return {status}; }}"
# What is called while torch is loaded, or by `torch.cuda.is_available`.
_SPECIAL = {
    "cudaGetDeviceCount": "int {name}(int *n) {{ *n = 0; return {status}; }}",
    "cudaGetErrorString": 'const char *{name}(int e) {{ return "no CUDA on this machine"; }}',
    "cudaGetErrorName": 'const char *{name}(int e) {{ return "cudaErrorNoDevice"; }}',
    "cudaGetLastError": "int {name}(void) {{ return 0; }}",
    "cudaPeekAtLastError": "int {name}(void) {{ return 0; }}",
    "__cudaRegisterFatBinary": "static void *h[8]; void **{name}(void *f) {{ return h; }}",
}
_OF_CUDA = re.compile("lib(cu|nv|nccl)")
_NEEDED = re.compile(r"\(NEEDED\).*\[(.+)\]")
_SYMBOL = re.compile(
    r"^ *\d+: \S+ +\d+ +\w+ +(GLOBAL|WEAK|UNIQUE) +\w+ +(\w+) +([A-Za-z_]\w*)(?:@+(\S+))?"
)
_FILE = re.compile(r"File: (\S+)")
_VERSION = re.compile(r"Name: (\S+) +Flags")


class _Library(NamedTuple):
    needed: set[str]
    asked: dict[str, str]  # functions that others have to have, and their version or ""
    defined: set[str]
    versions: dict[str, set[str]]  # by the library that they are asked of


def _read(path: Path) -> _Library:
    text = _output("readelf", "-W", "--dynamic", "--dyn-syms", "--version-info", str(path))
    found = _Library(set(_NEEDED.findall(text)), {}, set(), defaultdict(set))
    file = ""
    for line in text.splitlines():
        if symbol := _SYMBOL.match(line):
            binding, section, name, version = symbol.groups()
            if section != "UND":
                found.defined.add(name)
            elif binding == "GLOBAL":
                found.asked[name] = version or ""
        elif of_file := _FILE.search(line):
            file = of_file[1]
        elif file and (version := _VERSION.search(line)):
            found.versions[file].add(version[1])
    return found


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _of_machine() -> dict[str, str]:
    """The libraries that the loader finds by itself, by name, but none of CUDA's.

    Those that are there would call into those that are not.
    """
    lines = _output("/sbin/ldconfig", "-p").splitlines()[1:]
    found = {line.split()[0]: line.split()[-1] for line in lines if "=>" in line}
    return {name: path for name, path in found.items() if not _OF_CUDA.match(name)}


def write(site: Path) -> list[str]:
    """Write what torch in this folder of packages lacks, beside its libraries; return the names."""
    lib = site / "torch" / "lib"
    paths = [*lib.glob("*.so*"), *(site / "torch").glob("_C*.so")]
    read = {path.name: _read(path) for path in paths}
    has = _of_machine()
    needed = {name for library in read.values() for name in library.needed}
    bundled = {path.name for path in site.glob("*.libs/*.so*")}
    missing = sorted(needed - read.keys() - bundled - has.keys())
    if not missing:
        return []
    defined = {name for library in read.values() for name in library.defined}
    for name in needed & has.keys():
        defined |= _read(Path(has[name])).defined
    versions: dict[str, set[str]] = defaultdict(set)
    for library in read.values():
        for file, names in library.versions.items():
            versions[file] |= names
    file_of = {version: file for file in missing for version in versions[file]}
    # Those without a version may be in any library that has none.
    asked: dict[str, dict[str, set[str]]] = {name: defaultdict(set) for name in missing}
    for library in read.values():
        for name, version in library.asked.items():
            if name in defined or name.startswith(("Py", "_Py")):
                continue
            for file in [file_of[version]] if version in file_of else missing:
                if version or not versions[file]:
                    asked[file][version].add(name)
    for file in missing:
        _compile(lib / file, asked[file], versions[file])
    return missing


def _compile(path: Path, functions: dict[str, set[str]], versions: set[str]) -> None:
    names = sorted({name for group in functions.values() for name in group})
    source = (_SPECIAL.get(n, _PLAIN).format(name=n, status=_NO_DEVICE) for n in names)
    script = []
    for version in sorted(versions):
        group = sorted(functions.get(version, ()))
        script.append(f"{version} {{ {'global: ' + '; '.join(group) + ';' if group else ''} }};")
    with tempfile.TemporaryDirectory() as folder:
        code, exported = Path(folder, "code.c"), Path(folder, "versions.map")
        code.write_text("\n".join(source))
        exported.write_text("\n".join(script))
        command = ["gcc", "-w", "-fno-builtin", "-shared", "-fPIC", f"-Wl,-soname,{path.name}"]
        command += [f"-Wl,--version-script={exported}"] if script else []
        subprocess.run([*command, "-o", str(path), str(code)], check=True)


if __name__ == "__main__":
    print(*write(Path(sys.argv[1])), sep="\n")
