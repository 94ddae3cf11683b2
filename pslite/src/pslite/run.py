"""dl2-run: runs one task of an elastic job, or a whole job on this machine; also as `python -m pslite.run`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from pslite.errors import PsliteError, UsageError
from pslite.job.environment_passed_to_tasks import own_environment, script_environment
from pslite.job.printable_text import give_up_unwritten_text, tell
from pslite.launch.coordinator_process.mxnet_launcher import is_launched, task_variables
from pslite.launch.environment_parsing import (
    DURABILITY_VARIABLE,
    PROGRESS_VARIABLE,
    durability_of,
    encryption_of,
    role_of,
    task_environment,
    watch_seconds,
)
from pslite.launch.task_process.task_agent import TaskAgent
from pslite.net.tls import VARIABLE, Encryption

if TYPE_CHECKING:
    from pslite.launch.daemon_connection.job_registration import Registration

_EPILOG = """\
In a Slurm batch job with #DL2 lines or --dl2 options of sbatch, dl2-run registers the job with the daemon, whose
address it finds in the file that the daemon writes (api.address_file); elsewhere a whole job runs on this machine.

environment (set by the daemon):
  DL2_ROLE         coordinator, worker or server; or container: runs the tasks that the daemon gives it (on YARN)
  DL2_INSTANCE     role and number of a container, such as worker-0
  DL2_PROOF        secret of a YARN service that a user posted (containers)
  DL2_TASK         id of the task, such as worker-3
  DL2_COORDINATOR  host:port of the coordinator
  DL2_TOKEN        the job's token, 64 hexadecimal digits
  DL2_ARCHITECTURE ps or allreduce, for scripts that do not set it (workers)
  DL2_DURABILITY   none or durable, as --durability, for scripts that do not set it (workers)
  DL2_BALANCE      speed or even, as --balance (coordinator)
  DL2_WATCH_SECONDS  seconds between measurements of a task's resource usage (default 5; 0: no measurements)
  DL2_ENCRYPT      what TLS encrypts, the same in all tasks: none, control or all (the default)
  DL2_PROGRESS_DEADLINE  seconds, as --progress-deadline (coordinator)
  DL2_STOPPED_STATUS  exit status of a task that fails after SIGTERM or as its job was cancelled
  DL2_SLURM_JOB    id of the task's Slurm job (set by dl2-run): another job, which its script submits, is no task
  DL2_STATE        folder of the coordinator's log (default: a temporary one; none: no log)
  DL2_DAEMON, DL2_JOB, DL2_CREDENTIAL   the daemon's job API (coordinator); DL2_DAEMON replaces the address file
  DL2_DAEMON_UID   uid of the daemon's account, which has its port on this machine where no certificate proves that

exit status: 0 done or drained, 1 the job failed, 2 wrong usage or refused by the daemon,
128+n the command was ended by signal n.
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dl2-run",
        usage="dl2-run [options] [--] COMMAND [ARGUMENT ...]",
        description="Run COMMAND as a task of an elastic training job. Its role comes from the environment; "
        "parameter servers and coordinators do not run COMMAND themselves.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--workers", type=int, default=1, help="number of workers where dl2d does not decide it (default 1)"
    )
    parser.add_argument(
        "--servers", type=int, default=1, help="number of parameter servers where dl2d does not decide it (default 1)"
    )
    parser.add_argument(
        "--encrypt",
        choices=get_args(Encryption),
        help="what TLS encrypts between machines: messages with the coordinator, gradients and weights (all, the "
        "default), messages with the coordinator alone (control), or nothing (none)",
    )
    parser.add_argument(
        "--durability", choices=("none", "durable"), default="",
        help="durable: parameter servers keep replicas of each other's part of the model, so that the job goes on when "
        "one of them dies; for scripts that do not set it (default none)",
    )  # fmt: skip
    parser.add_argument(
        "--standalone", action="store_true",
        help="run a whole job on this machine, without dl2d, also in a batch job with #DL2 lines or --dl2 options",
    )  # fmt: skip
    parser.add_argument(
        "--check-daemon", action="store_true",
        help="check that this machine finds and reaches the daemon, print each step, and run nothing",
    )  # fmt: skip
    parser.add_argument("--quiet", action="store_true", help="no progress lines on stderr")
    parser.add_argument(
        "--balance", choices=("speed", "even"), default="",
        help="speed: slow tasks get less work (default); even: all get the same",
    )  # fmt: skip
    parser.add_argument(
        "--progress-deadline", default="", metavar="SECONDS",
        help="seconds that the job may go without progress (default 1800; 0: no limit); ten times its slowest step of "
        "the last day counts if that is longer; before the first step the limit is twice as long",
    )  # fmt: skip
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND", help="the training command")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of dl2-run; returns the exit status."""
    options = _parser().parse_args(arguments)
    environ = _environment(options)

    def say(text: str) -> None:
        if environ.get("DL2_QUIET") != "1":
            tell("dl2-run", text)

    try:
        return _run(options, environ, say)
    except PsliteError as error:
        tell("dl2-run", str(error))
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        give_up_unwritten_text()


def become_server(environ: Mapping[str, str]) -> None:
    """Run as server or coordinator, and exit, if MXNet's launcher has started this process as such."""
    if is_launched(environ) and environ["DMLC_ROLE"] != "worker":
        sys.exit(main([]))


def _environment(options: argparse.Namespace) -> dict[str, str]:
    """Return this process's environment with what the options say."""
    chosen = {
        VARIABLE: options.encrypt,
        DURABILITY_VARIABLE: options.durability,
        "DL2_BALANCE": options.balance,
        "DL2_QUIET": "1" if options.quiet else "",
        PROGRESS_VARIABLE: options.progress_deadline,
    }
    return {**own_environment(os.environ), **{name: value for name, value in chosen.items() if value}}


def _run(options: argparse.Namespace, environ: dict[str, str], say: Callable[[str], None]) -> int:
    """Do what the role asks for; returns the exit status."""
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if is_launched(environ):
        if environ["DMLC_ROLE"] == "scheduler":
            from pslite.launch.coordinator_process import coordinator_launcher  # noqa: PLC0415  (see below)

            return coordinator_launcher.launched(environ, say)
        environ.update(task_variables(environ))
    if options.check_daemon:
        from pslite.launch.daemon_connection.daemon_reachability import print_check  # noqa: PLC0415  (of this option only)

        return print_check(environ)
    role = role_of(environ)
    encrypt, durability = encryption_of(environ), durability_of(environ)
    if role == "container":
        from pslite.launch.task_process import container_agent  # noqa: PLC0415  (see below)

        def run_job(registration: Registration, own: Mapping[str, str]) -> int:
            from pslite.launch.coordinator_process import coordinator_launcher  # noqa: PLC0415  (see below)

            tasks = coordinator_launcher.Tasks(command, options.workers, options.servers, encrypt, durability)
            return coordinator_launcher.coordinate(tasks, own, say, registration)

        place = container_agent.container_environment(environ)
        return container_agent.ContainerAgent(place, environ, command, run_job=run_job, say=say).run()
    if role == "ps":
        return _task(role, [sys.executable, "-m", "pslite.launch.server_process"], environ, say)
    if not command:
        raise UsageError("no command given: dl2-run [options] python train.py ...")
    if role == "worker":
        return _task(role, command, with_hooks(environ), say)
    if options.workers < 1 or options.servers < 0:
        raise UsageError("--workers must be at least 1, --servers at least 0")
    if options.standalone and not environ.get("DL2_ROLE"):
        role = "standalone"
    elif role == "standalone" and _finds_daemon(environ, say):
        role = "coordinator"
    # beside a worker or a server a coordinator would take memory, and time at the start
    from pslite.launch.coordinator_process import coordinator_launcher  # noqa: PLC0415

    tasks = coordinator_launcher.Tasks(command, options.workers, options.servers, encrypt, durability)
    if role == "coordinator":
        return coordinator_launcher.coordinate(tasks, environ, say)
    return coordinator_launcher.standalone(tasks, environ, say)


def _finds_daemon(environ: dict[str, str], say: Callable[[str], None]) -> bool:
    """Set the variables of the daemon's address if this is a batch job of dl2d; return whether it is.

    Raises
    ------
    UsageError
        it is, and there is no address.

    """
    # of a job's first process only
    from pslite.launch.coordinator_process.slurm_batch_script import asks_for_daemon  # noqa: PLC0415
    from pslite.launch.daemon_connection.daemon_address_file import find_address  # noqa: PLC0415

    if not asks_for_daemon(environ):
        return False
    try:
        path, address = find_address()
    except UsageError as error:
        raise UsageError(
            f"this batch job has #DL2 lines or options of dl2d, but {error}. An administrator can find the cause with "
            "`dl2d check --slurm-probe`; `dl2-run --standalone` trains without dl2d, inside this job alone"
        ) from None
    say(f"the daemon is at {address.url}, says {path}")
    for name, value in address.variables().items():
        if not environ.get(name):
            environ[name] = os.environ[name] = value  # requests read the certificate in os.environ
    return True


def with_hooks(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which scripts that import mxnet get `pslite.mxnet` (mxnet_hook/sitecustomize.py)."""
    hooks = str(Path(__file__).with_name("mxnet_hook"))
    before = environ.get("PYTHONPATH", "")
    places = [place for place in before.split(os.pathsep) if place and place != hooks]
    return {**environ, "PYTHONPATH": os.pathsep.join([hooks, *places])}


def _task(
    role: Literal["worker", "ps"], command: Sequence[str], environ: dict[str, str], say: Callable[[str], None]
) -> int:
    place = task_environment(environ, role)
    seconds = watch_seconds(environ)
    of_script = script_environment(environ)
    return TaskAgent(place.identity, place.coordinator, command, of_script, say=say, watch_seconds=seconds).run()


if __name__ == "__main__":
    sys.exit(main())
