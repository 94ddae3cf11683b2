"""The Debian package of the checkout, for tests of installations."""

from __future__ import annotations

import fcntl
import hashlib
import io
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

_CHECKOUT = Path(__file__).parents[1]
#: Holds the package that was built last, in a folder that is named after its source.
_KEPT = _CHECKOUT / "build" / "deb"
_CAN_BUILD = "import ensurepip, sys; sys.exit(sys.version_info < (3, 11))"


def why_not() -> str:
    """Reason for which it cannot be built here, or ""."""
    if shutil.which("dpkg-deb") is None:
        return "dpkg-deb is not installed"
    python = Path("/usr/bin/python3")
    if not python.exists() or subprocess.run([python, "-c", _CAN_BUILD], capture_output=True, check=False).returncode:
        return "/usr/bin/python3 is not 3.11 or newer with python3-venv"
    return ""


def build(folder: Path) -> Path:
    """Build it as ``make deb`` does, or take the one that an earlier test built of the same files."""
    source = _digest_of_checkout()
    if not source:
        return _build(folder)
    _KEPT.mkdir(parents=True, exist_ok=True)
    with (_KEPT / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests in several processes ask for it at the same time
        kept = _KEPT / source
        if not kept.exists():
            built = _build(folder)
            for old in _KEPT.glob("*/"):
                shutil.rmtree(old)
            kept.with_suffix(".new").mkdir()
            shutil.copy(built, kept.with_suffix(".new"))
            kept.with_suffix(".new").rename(kept)
    return next(kept.glob("*.deb"))


def _build(folder: Path) -> Path:
    command = [_CHECKOUT / "packaging" / "deb" / "build", folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(folder.glob("*.deb"))


def _digest_of_checkout() -> str:
    """Digest of all files of the checkout, or "" where Git does not say which they are."""
    command = ["git", "-C", _CHECKOUT, "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False) if shutil.which("git") else None
    if listed is None or listed.returncode != 0:
        return ""
    found = hashlib.sha256()
    for name in sorted(listed.stdout.split("\0")[:-1]):
        path = _CHECKOUT / name
        content = path.read_bytes() if path.is_file() else b"gone"
        found.update(f"{name} {len(content)}\0".encode() + content)
    return found.hexdigest()


def with_version(package: Path, version: str, built: Path) -> None:
    """Write the same package as one of another version; its files, most of the archive, are not packed anew."""
    control = built.with_suffix(".control")
    subprocess.run(["dpkg-deb", "--control", package, control], check=True, timeout=60)
    file = control / "control"
    file.write_text(re.sub(r"^Version: .*$", f"Version: {version}", file.read_text(), flags=re.MULTILINE))
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        tar.add(control, ".")
    with built.open("wb") as archive:
        archive.write(b"!<arch>\n")
        for name, content in _members(package):
            is_control = name.startswith("control.tar")
            data = packed.getvalue() if is_control else content
            archive.write(b"%-16s%-12d%-6d%-6d%-8s%-10d`\n" % (
                b"control.tar.gz" if is_control else name.encode(), 0, 0, 0, b"100644", len(data),
            ))  # fmt: skip
            archive.write(data + b"\n" * (len(data) % 2))


def _members(package: Path) -> Iterator[tuple[str, bytes]]:
    """Names and contents in an ``ar`` archive."""
    with package.open("rb") as archive:
        archive.seek(8)
        while header := archive.read(60):
            size = int(header[48:58])
            yield header[:16].decode().rstrip(" /"), archive.read(size)
            archive.read(size % 2)
