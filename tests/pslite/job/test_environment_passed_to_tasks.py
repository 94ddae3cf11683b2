from __future__ import annotations

import pytest

from pslite.job.environment_passed_to_tasks import (
    is_secret,
    own_environment,
    remarks,
    script_environment,
    user_environment,
)


@pytest.mark.parametrize(
    ("name", "value", "secret"),
    [
        ("WANDB_API_KEY", "1", True),
        ("HF_TOKEN", "hf_1", True),
        ("AWS_SECRET_ACCESS_KEY", "1", True),
        ("AWS_ACCESS_KEY_ID", "1", True),
        ("PGPASSWORD", "1", True),
        ("DB_PASSWORD", "1", True),
        ("db_pwd", "1", True),
        ("GOOGLE_APPLICATION_CREDENTIALS", "/home/a/key.json", True),
        ("SECRET_SALT", "1", True),
        ("https_proxy", "http://ann:hunter2@proxy:3128", True),
        ("https_proxy", "http://proxy:3128", False),
        ("TORCH_EXTRA", "-----BEGIN RSA PRIVATE KEY-----", True),
        ("TOKENIZERS_PARALLELISM", "false", False),
        ("MAX_TOKENS", "512", False),
        ("PATH", "/a:/b", False),
        ("KEYBOARD", "de", False),
    ],
)
def test_what_looks_like_a_secret(name, value, secret):
    assert is_secret(name, value) is secret


def test_a_scheduler_gets_what_is_on_the_list_and_what_the_user_names_and_no_secret():
    chosen = user_environment(
        {
            "PATH": "/usr/bin", "LC_ALL": "C", "OMP_NUM_THREADS": "4", "NCCL_DEBUG": "INFO", "HF_TOKEN": "x",
            "MY_DATA": "/data", "MY_PASSWORD": "x", "OTHER": "y", "SLURM_JOB_ID": "7", "DL2_TOKEN": "x",
            "DL2_ENV": "MY_DATA, MY_PASSWORD  X_*", "X_1": "1",
        }
    )  # fmt: skip
    assert chosen.variables == {
        "PATH": "/usr/bin", "LC_ALL": "C", "OMP_NUM_THREADS": "4", "NCCL_DEBUG": "INFO", "MY_DATA": "/data", "X_1": "1"
    }  # fmt: skip
    assert (chosen.secrets, chosen.dropped) == (("HF_TOKEN", "MY_PASSWORD"), ("OTHER",))
    secret, dropped = remarks(chosen)
    assert "HF_TOKEN, MY_PASSWORD" in secret
    assert "OTHER; if the script needs some of them, set DL2_ENV=" in dropped
    many = user_environment({f"V{number:03}": "" for number in range(100)})
    assert "V011 and 88 more;" in remarks(many)[0]
    assert remarks(user_environment({"PATH": ""})) == ()


def test_a_batch_job_that_a_script_of_a_task_submits_is_no_task():
    task = {"DL2_ROLE": "worker", "DL2_TASK": "worker-0", "DL2_STOPPED_STATUS": "0", "DL2_QUIET": "1"}
    script = script_environment({**task, "SLURM_JOB_ID": "7"})
    assert own_environment(script) == script  # it runs in its task
    without_id = {name: value for name, value in script.items() if name != "SLURM_JOB_ID"}
    assert own_environment(without_id) == without_id  # it may remove Slurm's variables
    assert own_environment({**script, "SLURM_JOB_ID": "8"}) == {"DL2_QUIET": "1", "SLURM_JOB_ID": "8"}
    assert own_environment({**task, "SLURM_JOB_ID": "8"}) == {**task, "SLURM_JOB_ID": "8"}  # a task that begins
    assert script_environment(task) == task
