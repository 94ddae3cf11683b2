"""The Debian package of the checkout, for tests of installations."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

_CHECKOUT = Path(__file__).parents[1]
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
    """Build it as ``make deb`` does."""
    command = [_CHECKOUT / "packaging" / "deb" / "build", folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(folder.glob("*.deb"))


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
