"""How processes end, told apart by their status and by what the kernel counts."""

from __future__ import annotations

import pytest

from pslite.job.job_status import Cause, signal_in_words
from pslite.launch.task_process.exit_status import OomKills, classify, oom_kills


@pytest.mark.parametrize(
    ("code", "before", "after", "cause", "words"),
    [
        (0, (0, 0), (1, 1), Cause.DONE, ""),
        (3, (0, 0), (0, 0), Cause.FAILED, ""),
        (-11, (0, 0), (0, 0), Cause.KILLED, ""),
        (-9, (0, 0), (0, 0), Cause.KILLED, ""),
        (-9, (2, 2), (3, 3), Cause.OUT_OF_MEMORY, "out of memory in its control group"),
        # a data loader's process was killed, and the script could not go on
        (1, (2, 2), (3, 3), Cause.OUT_OF_MEMORY, "a process of its control group was killed for lack of memory"),
        (137, (2, 2), (3, 3), Cause.OUT_OF_MEMORY, "out of memory in its control group"),
        # somebody else's
        (-9, (2, 2), (2, 3), Cause.KILLED, ""),
        (-15, (2, 2), (3, 3), Cause.KILLED, ""),
        # no control group to be read
        (-9, (None, 2), (None, 3), Cause.OUT_OF_MEMORY,
         "out of memory, probably: the kernel killed a process of this machine"),
        (1, (None, 2), (None, 3), Cause.FAILED, ""),
        (-9, (None, None), (None, None), Cause.KILLED, ""),
    ],
)  # fmt: skip
def test_causes(code, before, after, cause, words):
    ending = classify(code, OomKills(*before), lambda: OomKills(*after))
    assert (ending.cause, ending.text) == (cause, words)


def place(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_what_the_kernel_counts_in_control_groups_of_version_2(tmp_path):
    place(tmp_path, {
        "proc/self/cgroup": "0::/slurm/job_7/step_0\n",
        "sys/fs/cgroup/slurm/job_7/step_0/memory.events": "low 0\nmax 12\noom 3\noom_kill 2\noom_group_kill 0\n",
        "proc/vmstat": "nr_free_pages 5\noom_kill 9\n",
    })  # fmt: skip
    assert oom_kills(tmp_path) == OomKills(2, 9)


def test_what_the_kernel_counts_in_control_groups_of_version_1(tmp_path):
    place(tmp_path, {
        "proc/self/cgroup": "9:name=systemd:/\n4:cpu,memory:/job:7\n0::/\n",
        "sys/fs/cgroup/memory/job:7/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n",
    })  # fmt: skip
    assert oom_kills(tmp_path) == OomKills(1, None)


def test_nothing_to_be_read(tmp_path):
    assert oom_kills(tmp_path) == OomKills(None, None)
    place(tmp_path, {"proc/self/cgroup": "0::/x\n", "sys/fs/cgroup/x/memory.events": "oom_kill many\n"})
    assert oom_kills(tmp_path) == OomKills(None, None)


def test_signals_in_words():
    assert signal_in_words(9) == "signal 9 (SIGKILL)"
    assert signal_in_words(63) == "signal 63"
