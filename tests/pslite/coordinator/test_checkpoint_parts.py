"""Checkpoints that cannot be completed: what was written of them is removed."""

from __future__ import annotations

from coordinator.jobs import job, spec

from pslite.coordinator import checkpoints_and_rollback
from pslite.net.messages import NotSaved, Saved


def test_what_was_written_of_a_version_that_a_server_could_not_write_is_removed(tmp_path):
    """It would fill the disk that was full, so that no later one could be written either."""
    a_job, lines = job(
        ("worker-0", "ps-0", "ps-1"), plan=("worker-0", "ps-0", "ps-1"),
        described=spec(checkpoint=str(tmp_path), checkpoint_every=10),
    )  # fmt: skip
    for version in (10, 20):
        part = tmp_path / f"{version:010d}.part"
        part.mkdir()
        part.joinpath("ps-0-1.safetensors").touch()
        written = Saved(version=version, name="ps-0-1.safetensors", sha256="0", blocks=(0,))
        checkpoints_and_rollback.saved(a_job, a_job.state.members["ps-0"], written)
    full = NotSaved(version=10, reason="No space left on device")
    checkpoints_and_rollback.not_saved(a_job, a_job.state.members["ps-1"], full)
    assert a_job.disk.close(60.0)
    assert [place.name for place in tmp_path.iterdir()] == ["0000000020.part"]
    assert list(a_job.state.checkpoint_files) == [20]
    assert lines[-1] == "no checkpoint of version 10: ps-1: No space left on device"
