"""A job that its user posts as a service, and settings of the daemon."""

from __future__ import annotations

from dl2d.core.job_request_parser import RequestRules, parse_request
from dl2d_yarn.service_description import PostedJob
from dl2d_yarn.settings import YarnSettings

DIRECTIVES = {
    "name": "digits",
    "model": "resnet-50",
    "epochs": "20",
    "steps_per_epoch": "9",
    "worker": "cpu:2,memory:1G,gpu:1",
    "ps": "cpu:1",
}
REQUEST = parse_request(DIRECTIVES, rules=RequestRules())
POSTED = PostedJob(
    name="digits", request=REQUEST, directives=DIRECTIVES, argv=("python", "train.py", "--name", "a b"),
    cwd="/home/alice", env={"OMP_NUM_THREADS": "1"},
)  # fmt: skip
SETTINGS = YarnSettings.parse({"addresses": ["http://rm:8088"], "user": "dl2d", "runner": "/opt/dl2d/bin/dl2-run"})
