"""``dl2d submit`` and ``dl2d cancel``."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dl2d.cli.daemon_access.job_api_client import DaemonClient, certificate_for_jobs, daemon_uid_for_jobs, daemon_url
from dl2d.cli.daemon_access.job_views_from_store_or_api import is_hidden
from dl2d.cli.daemon_access.open_store import open_store
from dl2d.cli.jobs.job_file import JobFile, parse_override
from dl2d.cli.output import number, print_json, print_text
from dl2d.cli.shared_options import ConfigOption, JobArgument, JsonOption, option
from dl2d.config.settings import DEFAULT_PATH, Settings, load_settings
from dl2d.core.cluster import Node
from dl2d.core.errors import (
    ConfigError,
    Denied,
    Dl2dError,
    RequestError,
    ResourceManagerError,
    StoreError,
    did_you_mean,
)
from dl2d.core.jobs import TASK_ROLES, Architecture, Job, JobKey, JobRequest, JobState
from dl2d.daemon.job_views_from_store import StoreViews
from pslite.errors import UsageError
from pslite.job.environment_passed_to_tasks import TASK_VARIABLES, remarks, user_environment
from pslite.launch.daemon_connection.daemon_http import check_private

if TYPE_CHECKING:
    from dl2d.store.sql_store import SqlStore

RUNNER = "dl2-run"
#: Seconds between two looks at a job that is followed.
_LOOK_SECONDS = 0.5


def submit(
    file: Annotated[Path, typer.Argument(metavar="JOB.yaml", help="Job file: request keys, command, cwd, env.")],
    sbatch_options: Annotated[
        list[str] | None, typer.Argument(metavar="[-- SBATCH_OPTIONS...]", help="On Slurm: more options for sbatch.")
    ] = None,
    rm: Annotated[
        str | None,
        option("Post the job's YARN service yourself, as your own user.", "--rm", metavar="yarn"),
    ] = None,
    archive: Annotated[
        str, option("With --rm yarn: archive of `dl2d pack`, which all containers get.", metavar="URI")
    ] = "",
    files: Annotated[
        list[str] | None,
        option("With --rm yarn: a file that all containers get; may be repeated.", "--file", metavar="URI"),
    ] = None,
    show: Annotated[bool, option("With --rm yarn: print the service file, post nothing.", "--show")] = False,
    sets: Annotated[
        list[str] | None, option("Use this instead of the file's value.", "--set", metavar="KEY=VALUE")
    ] = None,
    wait: Annotated[bool, option("Follow the job until it ends; exit 1 if it fails.", "--wait")] = False,
    as_json: JsonOption = False,
    config: ConfigOption = DEFAULT_PATH,
) -> None:
    """Submit a job: to the daemon itself, or with sbatch where the cluster is Slurm's."""
    settings = load_settings(config)
    job = JobFile.read(file, settings.jobs.rules, dict(map(parse_override, sets or ())))
    request = job.checked
    unused = [key for key in ("ps", "min_ps", "max_ps") if key in job.request]
    if unused and request.architecture is Architecture.ALLREDUCE:
        typer.echo(f"{job.where}: {', '.join(unused)}: no effect with architecture: allreduce", err=True)
    if rm not in (None, settings.resource_manager.name):
        raise RequestError("--rm", f"is {rm}, but resource_manager.name is {settings.resource_manager.name}")
    if sbatch_options and settings.resource_manager.name != "slurm":
        raise RequestError(
            "SBATCH_OPTIONS", f"are for Slurm, but resource_manager.name is {settings.resource_manager.name}"
        )
    if rm == "yarn":
        if wait:
            raise RequestError("--wait", "is not for --rm yarn: see `dl2d status --watch` or `yarn app -status NAME`")
        _to_yarn(job, request, settings, archive, files or [], show=show, as_json=as_json)
        return
    if archive or files or show:
        raise RequestError("--archive, --file, --show", "are for --rm yarn")
    if settings.resource_manager.name == "slurm":
        _to_slurm(job, settings, sbatch_options or [], wait=wait, as_json=as_json)
        return
    cwd = _folder(job)
    for line in remarks(user_environment(os.environ)):
        typer.echo(line, err=True)
    with DaemonClient(settings) as daemon:
        answer = daemon.submit(job.request, job.argv, cwd, job_environment(os.environ, job.env))
    if not as_json:
        typer.echo(f"submitted job {answer['id']} ({answer['name']}); `dl2d status {answer['id']}` shows its progress")
    if not wait:
        if as_json:
            print_json(answer)
        return
    with open_store(settings) as store:
        ended = _follow(store, JobKey.from_slug(answer["job"]), quiet=as_json)
    if as_json:
        print_json({**answer, "state": ended.state, "end_reason": ended.end_reason, "digest": ended.digest})
    else:
        print_text(f"job {ended.key.id} {ended.state}: {ended.end_reason}")
    if ended.state is not JobState.FINISHED:
        raise typer.Exit(1)


def _follow(store: SqlStore, key: JobKey, *, quiet: bool) -> Job:
    """Wait until a job has ended and return it; prints a line for each change, unless ``quiet``."""
    told: tuple[object, ...] = ()
    while True:
        job = store.job(key)
        if job is None:
            raise Dl2dError(f"job {key.slug} was removed from the store")
        if job.state.ended:
            return job
        progress, epochs = job.progress, job.request.epochs
        now = (job.state, progress.workers, progress.ps, int(10 * progress.epoch / epochs))
        if now != told and not quiet:
            size = f"{progress.workers}w+{progress.ps}ps, {number(progress.steps_per_second)} steps/s"
            print_text(f"{job.state}, epoch {progress.epoch:.1f}/{epochs:g}, {size}")
        told = now
        time.sleep(_LOOK_SECONDS)


def cancel(job: JobArgument, as_json: JsonOption = False, config: ConfigOption = DEFAULT_PATH) -> None:
    """End a job and everything that runs for it. On Slurm users end their jobs with `scancel JOBID` instead."""
    settings, chosen = _job_to_cancel(job, config)
    if chosen.state.ended:
        raise RequestError("JOB", f"job {chosen.key.id} has ended already ({chosen.state}: {chosen.end_reason})")
    with DaemonClient(settings) as daemon:
        answer = daemon.cancel(chosen.key.slug)
    if as_json:
        print_json(answer)
    else:
        typer.echo(f"job {answer['id']} ({chosen.request.name}) is cancelled")


def _job_to_cancel(job: str, config: Path) -> tuple[Settings, Job]:
    """The settings and the job; raises ``Denied`` with what other accounts do where these may not be read."""
    try:
        settings = load_settings(config)
        with open_store(settings) as store:
            return settings, StoreViews(store).find(job)
    except (ConfigError, StoreError) as error:
        closed = is_hidden(config) if isinstance(error, ConfigError) else "Permission denied" in str(error)
        if os.geteuid() == 0 or not closed:
            raise
        raise Denied(
            "`dl2d cancel` is for root and the daemon's account, and this account has no permission to read the "
            "configuration or the database; on Slurm `scancel JOBID` ends your job, on YARN `yarn app -stop NAME`"
        ) from error


def job_environment(caller: Mapping[str, str], more: Mapping[str, str]) -> dict[str, str]:
    """Environment of a job's processes: what the allow-list has of the caller's, then the job file's.

    The folder of this dl2d's programs is put last into PATH where ``dl2-run`` would not be found otherwise.
    """
    kept = user_environment(caller).variables
    return with_runner_in_path({**kept, **more})


def with_runner_in_path(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment with the folder of ``dl2-run`` in PATH."""
    path = environment.get("PATH", os.defpath)
    if shutil.which(RUNNER, path=path) is not None:
        return dict(environment)
    folders = dict.fromkeys((sysconfig.get_path("scripts"), str(Path(sys.executable).parent)))
    return {**environment, "PATH": os.pathsep.join((path, *folders))}


def _folder(job: JobFile) -> str:
    """Working folder of a job. Raises ``RequestError`` where there is none on this machine."""
    cwd = Path.cwd() / (job.cwd or "")
    if not cwd.is_dir():
        raise RequestError("cwd", f"{cwd} is not a folder", where=job.where)
    return str(cwd)


def _to_yarn(
    job: JobFile,
    request: JobRequest,
    settings: Settings,
    archive: str,
    files: Sequence[str],
    *,
    show: bool,
    as_json: bool,
) -> None:
    """Post the job's service as the calling user; its containers register with the daemon."""
    # What only this way needs.
    from dl2d_yarn.cluster_listing import SERVICES_PATH, read_listing  # noqa: PLC0415
    from dl2d_yarn.rest_client import RestClient  # noqa: PLC0415
    from dl2d_yarn.service_description import PostedJob, posted_description, read_application_id  # noqa: PLC0415
    from dl2d_yarn.settings import YarnSettings  # noqa: PLC0415

    if job.cwd is not None and (archive or files):
        text = "has no effect with --archive or --file: containers run in folders of their own; remove it (--set cwd=)"
        raise RequestError("cwd", text, where=job.where)
    yarn = YarnSettings.parse(settings.resource_manager.chosen)
    posted = PostedJob(
        name=request.name,
        request=request,
        directives=job.directives(),
        argv=job.argv,
        cwd=_folder(job),
        env=job.env,
    )
    daemon, certificate = settings.api.advertise or daemon_url(settings), certificate_for_jobs(settings)
    service = posted_description(
        posted, yarn, daemon=daemon, certificate=certificate, daemon_uid=daemon_uid_for_jobs(settings, daemon),
        archive=archive, files=files,
    )  # fmt: skip
    if show:
        print_json(service)
        return
    if not settings.mode.acts:
        raise RequestError(
            "--rm", f"dl2d is in mode {settings.mode}, in which it starts no tasks: print the service file (--show), "
            "give its coordinator the resources of all tasks and `dl2-run --workers W --servers S`, and post it"
        )  # fmt: skip
    try:
        check_private(daemon)
    except UsageError:
        raise ConfigError(
            f"the daemon's address is {daemon}, but a service registers over https only: ask the administrator to set "
            "api.advertise to an https URL, and api.certificate"
        ) from None
    # The tickets are the user's, not the daemon's.
    with RestClient.of(yarn, as_caller=True) as client:
        _refuse_unknown_resources(job, request, read_listing(client, yarn.partition).nodes)
        try:
            answer = client.send("POST", SERVICES_PATH, service)
        except ResourceManagerError as error:
            if "already taken" not in error.said:
                raise
            text = f"a service {request.name} of yours exists already: choose another name with --set name=..."
            raise RequestError("name", text, where=job.where) from None
    application = read_application_id(answer)
    if as_json:
        print_json({"id": application.removeprefix("application_"), "name": request.name})
    else:
        typer.echo(
            f"posted service {request.name} ({application}); "
            f"`yarn app -status {request.name}` shows it, `yarn app -stop {request.name}` ends it"
        )


def _refuse_unknown_resources(job: JobFile, request: JobRequest, nodes: Sequence[Node]) -> None:
    """Raise ``RequestError`` if tasks ask for a resource that no node has: YARN would take the service."""
    known = {name for node in nodes for name in node.capacity.as_dict()}
    for role in TASK_ROLES:
        for name in sorted(request.demand(role).as_dict().keys() - known) if known else ():
            text = f"no node has the resource {name!r}{did_you_mean(name, known)}; they have {', '.join(sorted(known))}"
            raise RequestError(str(role), text, where=job.where)


def _to_slurm(job: JobFile, settings: Settings, options: list[str], *, wait: bool, as_json: bool) -> None:
    """Submit as the calling user, through sbatch: accounts, limits and plug-ins of the site hold as for any job."""
    # sbatch runs as the user, and keeps the environment as for any job, except what makes a process a task of a job.
    environment = with_runner_in_path({name: value for name, value in os.environ.items() if name not in TASK_VARIABLES})
    if settings.api.advertise:
        url = environment.setdefault("DL2_DAEMON", settings.api.advertise)
        if url == settings.api.advertise and (uid := daemon_uid_for_jobs(settings, url)):
            environment.setdefault("DL2_DAEMON_UID", uid)
    if certificate := certificate_for_jobs(settings):
        environment.setdefault("DL2_DAEMON_CERTIFICATE", certificate)
    configured = settings.resource_manager.slurm.get("slurm_conf")
    if configured:
        environment.setdefault("SLURM_CONF", str(configured))
    program = shutil.which("sbatch", path=environment.get("PATH"))
    if program is None:
        raise ConfigError("sbatch is not in PATH: submit from a machine where Slurm's commands are installed")
    command = [program, "--parsable", *(["--wait"] if wait else []), *options]
    script = job.as_batch_script(Path.cwd())
    done = subprocess.run(command, input=script, capture_output=True, text=True, env=environment, check=False)
    number = done.stdout.strip().partition(";")[0]
    if not number:
        raise ResourceManagerError("sbatch refused the job", said=done.stderr or f"exit status {done.returncode}")
    if done.stderr.strip():
        typer.echo(done.stderr.strip(), err=True)
    if as_json:
        print_json({"id": number, "status": done.returncode if wait else None})
    else:
        typer.echo(
            f"submitted batch job {number}" + (f", which ended with exit status {done.returncode}" if wait else "")
        )
    if done.returncode:
        raise typer.Exit(1)
