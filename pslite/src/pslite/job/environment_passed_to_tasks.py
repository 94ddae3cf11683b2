"""Environment variables of tasks: which of the user's are passed to them, and which belong to a task itself.

The user's variables on an allow-list are passed, without secrets.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

#: variable with the names or patterns of further variables, separated by commas
MORE_VARIABLE = "DL2_ENV"

#: patterns of names (fnmatch) that scripts, interpreters, numeric libraries and communication libraries read
ALLOWED = (
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "LC_*", "TZ", "TMPDIR", "XDG_*", "SCRATCH", "WORK",
    "LD_LIBRARY_PATH", "LD_PRELOAD", "LIBRARY_PATH", "MALLOC_*", "GLIBC_TUNABLES", "PYTHON*", "VIRTUAL_ENV*", "CONDA_*",
    "MAMBA_*", "MODULE*", "LMOD_*", "LOADEDMODULES", "_LMFILES_", "EB*", "SPACK_*", "APPTAINER_*", "SINGULARITY_*",
    "CUDA_*", "CUDNN_*", "NVIDIA_*", "NVTE_*", "CUBLAS_*", "ROCM_*", "HIP_*", "HSA_*", "ROCR_*", "GPU_*", "MIOPEN_*",
    "OMP_*", "GOMP_*", "KMP_*", "MKL_*", "OPENBLAS_*", "BLIS_*", "NUMEXPR_*", "NUMBA_*", "NCCL_*", "RCCL_*", "GLOO_*",
    "UCX_*", "FI_*", "OMPI_*", "MPI*", "TORCH*", "PYTORCH_*", "TRITON_*", "XLA_*", "TF_*", "JAX_*", "KERAS_*",
    "MXNET_*", "DMLC_*", "PSLITE_*", "HF_*", "HUGGINGFACE_*", "TRANSFORMERS_*", "TOKENIZERS_*", "DATASETS_*",
    "ACCELERATE_*", "WANDB_*", "MLFLOW_*", "TENSORBOARD_*", "COMET_*", "http_proxy", "https_proxy", "no_proxy",
    "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "KRB5CCNAME",
)  # fmt: skip
_SECRET_NAME = re.compile(
    r"(PASSWORD|PASSWD|PASSPHRASE|_PWD|(^|_)(TOKEN|SECRET|CREDENTIALS?|API_?KEY|ACCESS_KEY(_ID)?|PRIVATE_KEY|KEY))$"
    r"|(^|_)(SECRET|PASSWORD|PRIVATE_KEY)_",
    re.IGNORECASE,
)
#: a URL with a password, or a private key
_SECRET_VALUE = re.compile(r"://[^/\s:@]*:[^/\s@]+@|-----BEGIN [A-Z ]*PRIVATE KEY-----")
#: variables that belong to a shell or to a scheduler and are no loss
_UNREMARKABLE = (
    "SLURM*", "SBATCH_*", "SRUN_*", "PMI*", "DL2D_*", "BASH_*", "SSH_*", "*PWD", "SHLVL", "_", "TERM*", "*COLORS",
    "LESS*", "MAIL", "HOST*", "DISPLAY", "XAUTHORITY", "DBUS_*", "ENVIRONMENT", "HIST*", "EDITOR", "PAGER", "*PATH",
    "SYSTEMD_*", "INVOCATION_ID", "JOURNAL_STREAM", "SUDO_*", "MUNGE_SOCKET", "DEBUGINFOD_*", "PS1", "MOTD_*",
)  # fmt: skip
#: names, and prefixes of names, of variables that the node manager sets and a task may need
NODE_VARIABLES = ("CONTAINER_ID", "CUDA_VISIBLE_DEVICES", "HADOOP_", "LOCAL_DIRS", "LOG_DIRS", "NM_", "NVIDIA_")
#: variable with the Slurm job in which a task runs, in the environment of the task's script
SLURM_JOB_VARIABLE = "DL2_SLURM_JOB"
#: variables that make a process a task of a job; a job that a task submits inherits them, and is no task of that job
TASK_VARIABLES = frozenset(
    (
        "DL2_ARCHITECTURE", "DL2_COORDINATOR", "DL2_CREDENTIAL", "DL2_INSTANCE", "DL2_JOB", "DL2_PROOF", "DL2_ROLE",
        "DL2_STOPPED_STATUS", "DL2_TASK", "DL2_TOKEN", SLURM_JOB_VARIABLE,
    )
)  # fmt: skip


@dataclass(frozen=True)
class UserEnvironment:
    """The variables of a user's environment that a scheduler gets, and the names of those that it does not get."""

    variables: Mapping[str, str]
    #: names of variables that match the allow-list and are left out as secrets, in order
    secrets: tuple[str, ...]
    #: names of variables that do not match it and may be missed, in order
    dropped: tuple[str, ...]


def script_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a task's script: that of the task, and the id of its Slurm job if it runs in one."""
    job = environ.get("SLURM_JOB_ID")
    return {**environ, SLURM_JOB_VARIABLE: job} if job else dict(environ)


def own_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without `TASK_VARIABLES` that were inherited from a task of another Slurm job.

    A job that a task's script submits with sbatch inherits them.
    """
    task_job, job = environ.get(SLURM_JOB_VARIABLE), environ.get("SLURM_JOB_ID")
    if not task_job or not job or task_job == job:
        return dict(environ)
    return {name: value for name, value in environ.items() if name not in TASK_VARIABLES}


def is_secret(name: str, value: str) -> bool:
    """Whether a variable is to be kept from schedulers and their databases: by its name, or by its value."""
    return bool(_SECRET_NAME.search(name) or _SECRET_VALUE.search(value))


def user_environment(environ: Mapping[str, str]) -> UserEnvironment:
    """Choose by the allow-list and DL2_ENV."""
    wanted = (*ALLOWED, *(word for word in re.split(r"[,\s]+", environ.get(MORE_VARIABLE, "")) if word))
    variables, secrets, dropped = {}, [], []
    for name, value in sorted(environ.items()):
        if name.startswith("DL2_"):
            continue
        if not _matches(name, wanted):
            if not _matches(name, _UNREMARKABLE):
                dropped.append(name)
        elif is_secret(name, value):
            secrets.append(name)
        else:
            variables[name] = value
    return UserEnvironment(variables, tuple(secrets), tuple(dropped))


def remarks(environment: UserEnvironment, limit: int = 12) -> tuple[str, ...]:
    """Return sentences for the user on the variables that were left out, with at most `limit` names each."""
    lines = []
    if environment.secrets:
        lines.append(
            f"not passed to the tasks, as it looks like a secret: {_named(environment.secrets, limit)}; "
            "let the script read secrets from a file that only you can read"
        )
    if environment.dropped:
        lines.append(
            f"not passed to the tasks: {_named(environment.dropped, limit)}; "
            f"if the script needs some of them, set {MORE_VARIABLE}=NAME,NAME"
        )
    return tuple(lines)


def _named(names: Iterable[str], limit: int) -> str:
    found = list(names)
    more = f" and {len(found) - limit} more" if len(found) > limit else ""
    return ", ".join(found[:limit]) + more


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
