"""Who sent a registration or an API request, checked with munge, and what Slurm knows of a job that registers."""

from __future__ import annotations

import re
from collections.abc import Mapping

from dl2d.core.errors import Denied, NotFound, Rejected, Unavailable
from dl2d.core.jobs import JobKey
from dl2d.core.resource_manager import Anchor, RmJobState
from dl2d_slurm.commands.commands import Commands, configured, failure
from dl2d_slurm.commands.squeue_and_sinfo_records import SHOW_PARTITIONS, query_jobs
from dl2d_slurm.commands.values_in_command_output import (
    EXCLUSIVE_PARTITION,
    LINEAR,
    exclusive_kind,
    is_known,
    owner_of,
    timestamp,
    value_or_empty,
)
from dl2d_slurm.jobs.slurm_states import job_state
from dl2d_slurm.jobs.squeue_jobs import OWNER_FIELDS, array_id
from dl2d_slurm.submission.sbatch_options import options_of_script, own_options, refuse_options, remarks, shown_options

_ID = re.compile(r"[0-9]{1,18}")
_FIELD = re.compile(r"([A-Z_]+):\s*(\S*)")
#: A credential with this short payload has some 250 characters.
_MAX_PROOF = 4096
#: Maximum length of a batch script, whose lines are read each time that its job registers; sbatch takes 4 MiB.
_MAX_SCRIPT = 1 << 20
#: Time for munge to say who sent a request.
USER_SECONDS = 5.0
#: munge's exit statuses that say nothing of the credential: SNAFU, no memory, no socket, time-out (munge.h).
_MUNGE_TROUBLE = frozenset({1, 5, 6, 7})
_MUNGE_WORDS = {
    15: "it has expired (do the clocks of the nodes agree?)",
    16: "it is from the future (do the clocks of the nodes agree?)",
    17: "it was used before",
}

#: Partitions that give each node to the jobs of one user. The second form is that of Slurm 26.05.
EXCLUSIVE_USER_PARTITION = re.compile(r"^PartitionName=(\S+) .*\b(?:ExclusiveUser=YES|Exclusive=USER)\b", re.MULTILINE)


def proven_uid(
    commands: Commands,
    proof: str,
    payload: str,
    *,
    subject: str,
    socket: str,
    hint: str = "",
    seconds: float | None = None,
) -> int:
    """User id of whoever made ``proof``, a munge credential with this payload, within so many seconds.

    ``subject`` is its purpose in messages; ``hint`` says what to do about one with another payload.
    munged remembers the credentials that it has decoded, so each serves once; and they expire (after five minutes by
    default).

    Raises
    ------
    Denied
        It is not a credential of munge, has expired, was used before, or was made for something else.
    Unavailable
        munged does not answer.
    """
    if len(proof) > _MAX_PROOF or not proof.isascii():
        raise Denied(f"the credential for {subject} is not from munge")
    chosen = (f"--socket={socket}",) if socket else ()
    answer = commands.run("unmunge", *chosen, "--numeric", "--keys=STATUS,UID,LENGTH", stdin=proof, seconds=seconds)
    if answer.status in _MUNGE_TROUBLE:
        raise Unavailable(f"munged did not verify the credential for {subject}", said=answer.stderr)
    if answer.status != 0:
        said = _MUNGE_WORDS.get(answer.status, answer.stderr)
        raise Denied(f"munged rejects the credential for {subject}", said=said)
    head, _, found = answer.stdout.partition("\n\n")
    fields = dict(_FIELD.findall(head))
    if fields.get("STATUS") != "0" or not fields.get("UID", "").isdecimal():
        raise Unavailable(
            f"munged did not verify the credential for {subject}", said=f"unmunge answered {head[:200]!r}"
        )
    if found != payload:
        raise Denied(f"the credential was not made for {subject}", said=hint)
    return int(fields["UID"])


def authenticate_anchor(commands: Commands, rm_id: str, uid: int, *, cluster: str) -> Anchor:
    """What Slurm knows of a job that user ``uid`` says is theirs.

    Raises
    ------
    NotFound
        There is no such job of this user, it has ended, or it has no batch script.
    Rejected
        It does not run, its user gave options to sbatch that its tasks could not have, or its batch script or
        AdminComment is too long.
    Unavailable
        Slurm does not answer, or its answer lacks what is needed.
    """
    if not _ID.fullmatch(rm_id):
        raise NotFound(f"{rm_id[:80]!r} is not the id of a Slurm job")
    answer, records = query_jobs(commands, OWNER_FIELDS, (rm_id,))
    # The same where it is another user's: whose it is, Slurm may not show to this one (PrivateData).
    not_found = NotFound(f"Slurm lists no job {rm_id} of user {uid}: it has ended, or belongs to another user")
    if answer.status != 0:
        error = failure(f"Slurm job {rm_id}", answer)
        raise not_found if isinstance(error, NotFound) else error
    found = next((record for record in records if record["JobID"] == rm_id), None)
    if found is None:
        raise not_found
    owner = owner_of(found)
    if owner is None:
        raise Unavailable(f"squeue shows no numeric user and group id of job {rm_id}")
    if owner.uid != uid:
        raise not_found
    if not is_known(owner):
        # Registering now would record the user as ``nobody`` for the job's whole life.
        raise Unavailable(
            f"the name service of the daemon's machine does not know user {uid}, who submitted job {rm_id}"
        )
    state, _ = job_state(found["State"], placed=True)
    if state.ended:
        raise NotFound(f"Slurm job {rm_id} has ended ({found['State']})")
    if state is not RmJobState.RUNNING:
        raise Rejected(
            f"Slurm job {rm_id} does not run ({found['State']}): start dl2-run in the batch script of a job that runs"
        )
    submitted = timestamp(found["SubmitTime"])
    if not submitted:
        raise Unavailable(f"squeue does not say when job {rm_id} was submitted", said=str(found)[:300])
    script = _script(commands, rm_id)
    exclusive = _user_asked_for_exclusive_nodes(commands, found)
    given = options_of_script(script)
    refuse_options([*shown_options(found, exclusive=exclusive), *given])
    return Anchor(
        key=JobKey(cluster, array_id(found) or rm_id, submitted),
        owner=owner,
        name=found["Name"],
        script=script,
        options=own_options(found),
        handle=rm_id,
        remarks=remarks([*given, *(["licenses"] if value_or_empty(found["Licenses"]) else [])]),
    )


def _script(commands: Commands, rm_id: str) -> str:
    """Text of the batch script. scontrol ends with status 0 even where there is none."""
    answer = commands.run("scontrol", "write", "batch_script", rm_id, "-")
    if len(answer.stdout) > _MAX_SCRIPT:
        raise Rejected(
            f"the batch script of Slurm job {rm_id} is longer than {_MAX_SCRIPT >> 20} MiB: keep what the job needs in "
            "files beside it"
        )
    if answer.status == 0 and answer.stdout:
        # On standard output scontrol adds a line break of its own.
        return answer.stdout.rstrip("\n") + "\n"
    error = failure(f"the batch script of Slurm job {rm_id}", answer)
    if isinstance(error, Rejected):
        raise NotFound(f"Slurm job {rm_id} has no batch script (start it with sbatch)", said=error.said)
    raise error


def _user_asked_for_exclusive_nodes(commands: Commands, record: Mapping[str, str]) -> bool:
    """Whether the user of a job asked for nodes that other jobs, or those of other users, do not share.

    False if the partition or select/linear gives every job nodes of its own, which is asked only if it has such nodes.
    """
    kind = exclusive_kind(record)
    if not kind:
        return False
    partitions = commands.run(*SHOW_PARTITIONS)
    try:
        linear = configured(commands, "SelectType") == LINEAR
    except Unavailable:
        return False
    exclusive = set(EXCLUSIVE_PARTITION.findall(partitions.stdout))
    if kind in ("USER", "MCS"):
        exclusive.update(EXCLUSIVE_USER_PARTITION.findall(partitions.stdout))
    return exclusive.isdisjoint(record["Partition"].split(",")) and not linear and partitions.status == 0
