-- Views for administrators and analysts; dl2d itself does not read them. `dl2d db upgrade` creates them anew and keeps
-- who may read them. Their columns are stable: a version of dl2d may add some, and says so if it removes or renames one.
--
-- In braces stands what SQLite and PostgreSQL write differently (dl2d/store/sql_views.py): {time X} the timestamp of X
-- seconds since 1970, {hour X} and {day X} the hour and day that it lies in, {now} the seconds since 1970, {amount X Y}
-- the amount of resource Y in the demand X, and {event X} when a resize entered the state X. Timestamps are UTC in
-- SQLite, with time zone in PostgreSQL.

CREATE VIEW slot_times AS
SELECT slots.number AS slot, {time slots.at} AS at, ({now} - slots.at) / 86400 AS days_ago
FROM slots;

COMMENT ON VIEW slot_times IS 'When each scheduling interval was decided: decisions of the last days are found fast by their slot, not by days_ago.';
COMMENT ON COLUMN slot_times.days_ago IS 'days from the decision until now';

CREATE VIEW decision_history AS
SELECT decisions.slot, {time slots.at} AS at, ({now} - slots.at) / 86400 AS days_ago,
       jobs.slug AS job, jobs.cluster, jobs.id AS job_id, jobs.name, jobs.user_name, jobs.account, jobs.model,
       COALESCE(decisions.policy, slots.policy) AS policy,
       COALESCE(decisions.policy_version, slots.policy_version) AS policy_version,
       COALESCE(decisions.version_number, slots.version_number) AS version_number, slots.fallback,
       decisions.previous_workers, decisions.workers, decisions.previous_ps, decisions.ps,
       decisions.binding_constraint, decisions.reason, decisions.guard
FROM decisions
JOIN jobs ON jobs.number = decisions.job_number
JOIN slots ON slots.number = decisions.slot;

COMMENT ON VIEW decision_history IS 'What was decided for each job in each scheduling interval, and why.';
COMMENT ON COLUMN decision_history.days_ago IS 'days from the decision until now';
COMMENT ON COLUMN decision_history.policy IS 'policy that decided on the job; observed where the site''s scheduler did';
COMMENT ON COLUMN decision_history.policy_version IS 'its version, or name and release of the site''s scheduler';
COMMENT ON COLUMN decision_history.version_number IS 'policy_versions.number of what decided; NULL if not a version';

CREATE VIEW shadow_decisions AS
SELECT shadow_allocations.slot, {time slots.at} AS at, ({now} - slots.at) / 86400 AS days_ago,
       jobs.slug AS job, jobs.cluster, jobs.id AS job_id, jobs.name, jobs.user_name, jobs.account, jobs.model,
       slots.shadow_policy AS policy, slots.shadow_policy_version AS policy_version,
       slots.shadow_version_number AS version_number,
       shadow_allocations.given_workers, shadow_allocations.given_ps,
       shadow_allocations.workers, shadow_allocations.ps,
       CASE WHEN shadow_allocations.workers = shadow_allocations.given_workers
                 AND shadow_allocations.ps = shadow_allocations.given_ps THEN 'same'
            WHEN shadow_allocations.workers + shadow_allocations.ps
                 > shadow_allocations.given_workers + shadow_allocations.given_ps THEN 'more'
            WHEN shadow_allocations.workers + shadow_allocations.ps
                 < shadow_allocations.given_workers + shadow_allocations.given_ps THEN 'less'
            ELSE 'other' END AS compared,
       shadow_allocations.binding_constraint, shadow_allocations.reason, shadow_allocations.guard
FROM shadow_allocations
JOIN jobs ON jobs.number = shadow_allocations.job_number
JOIN slots ON slots.number = shadow_allocations.slot;

COMMENT ON VIEW shadow_decisions IS 'What dl2d would have given each job in mode shadow, beside what the site''s scheduler gave it.';
COMMENT ON COLUMN shadow_decisions.days_ago IS 'days from the decision until now';
COMMENT ON COLUMN shadow_decisions.policy IS 'policy that dl2d asked';
COMMENT ON COLUMN shadow_decisions.policy_version IS 'its version';
COMMENT ON COLUMN shadow_decisions.workers IS 'workers that dl2d would have given';
COMMENT ON COLUMN shadow_decisions.ps IS 'parameter servers that dl2d would have given';
COMMENT ON COLUMN shadow_decisions.compared IS 'dl2d would have given the same, more tasks, less tasks, or other (as many tasks of other roles)';

CREATE VIEW job_completion AS
SELECT jobs.slug AS job, jobs.cluster, jobs.id AS job_id, jobs.name, jobs.user_name, jobs.account, jobs.partition,
       jobs.model, jobs.static, jobs.state, jobs.end_cause, jobs.end_reason,
       {time jobs.submitted} AS submitted_at, {time jobs.started_at} AS started_at, {time jobs.ended_at} AS ended_at,
       ({now} - jobs.submitted) / 86400 AS days_ago,
       ({now} - COALESCE(jobs.started_at, jobs.ended_at, {now})) / 86400 AS waited_until_days_ago,
       ({now} - jobs.ended_at) / 86400 AS ended_days_ago,
       CASE WHEN COALESCE(jobs.started_at, jobs.ended_at, {now}) < jobs.submitted THEN 0.0
            ELSE COALESCE(jobs.started_at, jobs.ended_at, {now}) - jobs.submitted END AS waiting_seconds,
       COALESCE(jobs.ended_at, {now}) - jobs.started_at AS training_seconds,
       jobs.ended_at - jobs.submitted AS completion_seconds,
       CASE WHEN jobs.static AND jobs.address = '' THEN NULL ELSE jobs.epochs END AS epochs,
       jobs.epoch AS epochs_done,
       jobs.workers, jobs.ps, jobs.max_workers, jobs.max_ps
FROM jobs;

COMMENT ON VIEW job_completion IS 'How long each job waited and trained, and how it ended.';
COMMENT ON COLUMN job_completion.days_ago IS 'days from its submission until now';
COMMENT ON COLUMN job_completion.waited_until_days_ago IS 'days from the end of its waiting until now, when it trained first or ended; 0 while it waits';
COMMENT ON COLUMN job_completion.ended_days_ago IS 'days from its end until now; NULL if it has not ended';
COMMENT ON COLUMN job_completion.waiting_seconds IS 'seconds from its submission until it trained first, or until now; 0 where a clock was set back';
COMMENT ON COLUMN job_completion.training_seconds IS 'seconds from when it trained first until it ended, or until now; NULL if it never trained';
COMMENT ON COLUMN job_completion.completion_seconds IS 'seconds from its submission until it ended; NULL if it has not';
COMMENT ON COLUMN job_completion.epochs IS 'epochs that its user declared; NULL of a static job that reports nothing';
COMMENT ON COLUMN job_completion.epochs_done IS 'epochs completed; NULL of a static job that reports nothing';

CREATE VIEW utilization_hourly AS
SELECT {hour slots.at} AS hour, ({now} - max(slots.at)) / 86400 AS days_ago, slot_resources.resource, count(*) AS slots,
       avg(slot_resources.capacity) AS capacity, avg(slot_resources.used) AS used, avg(slot_resources.held) AS held,
       100.0 * sum(slot_resources.used) / NULLIF(sum(slot_resources.capacity), 0) AS used_percent,
       100.0 * sum(slot_resources.held) / NULLIF(sum(slot_resources.capacity), 0) AS held_percent
FROM slot_resources
JOIN slots ON slots.number = slot_resources.slot
GROUP BY {hour slots.at}, slot_resources.resource;

COMMENT ON VIEW utilization_hourly IS 'Capacity and use of each resource, as means over the scheduling intervals of an hour.';
COMMENT ON COLUMN utilization_hourly.hour IS 'beginning of the hour';
COMMENT ON COLUMN utilization_hourly.days_ago IS 'days from the last of its intervals until now';
COMMENT ON COLUMN utilization_hourly.capacity IS 'of all nodes that take tasks, in units of the resource; memory in MiB';
COMMENT ON COLUMN utilization_hourly.used IS 'in use on these nodes, by whomever; memory in MiB';
COMMENT ON COLUMN utilization_hourly.held IS 'held on these nodes by tasks of jobs that dl2d knows; memory in MiB';
COMMENT ON COLUMN utilization_hourly.slots IS 'number of scheduling intervals in the hour';
COMMENT ON COLUMN utilization_hourly.used_percent IS 'used, as per cent of the capacity';
COMMENT ON COLUMN utilization_hourly.held_percent IS 'held, as per cent of the capacity';

CREATE VIEW resize_log AS
SELECT jobs.slug AS job, jobs.cluster, jobs.id AS job_id, jobs.name, jobs.user_name, resizes.task, resizes.role,
       resizes.direction, resizes.node, {time resizes.began_at} AS at, ({now} - resizes.began_at) / 86400 AS days_ago,
       {event asked} AS asked_at, {time resizes.granted_at} AS granted_at, {event joined} AS joined_at,
       {event confirmed} AS confirmed_at, {event draining} AS draining_at, {event drained} AS drained_at,
       {event released} AS released_at, {event failed} AS failed_at,
       resizes.granted_at - resizes.began_at AS granted_seconds, resizes.ended_at - resizes.began_at AS seconds
FROM resizes
JOIN jobs ON jobs.number = resizes.job_number
WHERE NOT jobs.static;

COMMENT ON VIEW resize_log IS 'One row for each resize of an elastic job, the coming or the going of one task, with the time of each state; NULL if it was not seen.';
COMMENT ON COLUMN resize_log.at IS 'when the resize began';
COMMENT ON COLUMN resize_log.days_ago IS 'days from its beginning until now';
COMMENT ON COLUMN resize_log.asked_at IS 'recorded, then submitted to the resource manager';
COMMENT ON COLUMN resize_log.granted_at IS 'the resource manager runs it';
COMMENT ON COLUMN resize_log.joined_at IS 'connected to its coordinator';
COMMENT ON COLUMN resize_log.confirmed_at IS 'takes part in the training';
COMMENT ON COLUMN resize_log.draining_at IS 'decided to leave';
COMMENT ON COLUMN resize_log.drained_at IS 'no longer takes part';
COMMENT ON COLUMN resize_log.released_at IS 'ended; its resources are free';
COMMENT ON COLUMN resize_log.failed_at IS 'ended without being asked to';
COMMENT ON COLUMN resize_log.granted_seconds IS 'seconds from the beginning until the resource manager ran it';
COMMENT ON COLUMN resize_log.seconds IS 'seconds from the beginning until it took part or had ended; NULL while in progress';

CREATE VIEW policy_performance AS
SELECT COALESCE(decisions.policy, slots.policy) AS policy,
       COALESCE(decisions.policy_version, slots.policy_version) AS policy_version, count(*) AS jobs,
       sum(CASE WHEN jobs.state = 'finished' THEN 1 ELSE 0 END) AS finished,
       {time min(jobs.submitted)} AS first_submitted_at, {time max(jobs.ended_at)} AS last_ended_at,
       avg(CASE WHEN jobs.started_at < jobs.submitted THEN 0.0
                ELSE jobs.started_at - jobs.submitted END) AS mean_waiting_seconds,
       avg(CASE WHEN jobs.state = 'finished' THEN jobs.ended_at - jobs.submitted END) AS mean_completion_seconds
FROM jobs
JOIN slots ON slots.number = (SELECT max(last.slot) FROM decisions AS last WHERE last.job_number = jobs.number)
JOIN decisions ON decisions.job_number = jobs.number AND decisions.slot = slots.number
WHERE jobs.ended_at IS NOT NULL
GROUP BY COALESCE(decisions.policy, slots.policy), COALESCE(decisions.policy_version, slots.policy_version);

COMMENT ON VIEW policy_performance IS 'Jobs that ended, by the policy and version that made the last decision on them.';
COMMENT ON COLUMN policy_performance.policy IS 'policy that made the last decision on them';
COMMENT ON COLUMN policy_performance.policy_version IS 'its version';
COMMENT ON COLUMN policy_performance.jobs IS 'number of jobs that ended';
COMMENT ON COLUMN policy_performance.finished IS 'number of these that completed all epochs';
COMMENT ON COLUMN policy_performance.first_submitted_at IS 'when the first of them was submitted';
COMMENT ON COLUMN policy_performance.last_ended_at IS 'when the last of them ended';
COMMENT ON COLUMN policy_performance.mean_waiting_seconds IS 'mean seconds from submission until a job trained; 0 of a job where a clock was set back';
COMMENT ON COLUMN policy_performance.mean_completion_seconds IS 'mean seconds from submission to end, of finished jobs';

CREATE VIEW user_usage AS
SELECT {day tasks.granted_at} AS day, ({now} - min(tasks.granted_at)) / 86400 AS days_ago,
       jobs.user_name, jobs.account, count(DISTINCT jobs.number) AS jobs, count(*) AS tasks,
       sum(COALESCE(tasks.ended_at, {now}) - tasks.granted_at) / 3600 AS task_hours,
       sum((COALESCE(tasks.ended_at, {now}) - tasks.granted_at) * {amount tasks.demand cpu}) / 3600 AS cpu_hours,
       sum((COALESCE(tasks.ended_at, {now}) - tasks.granted_at) * {amount tasks.demand gpu}) / 3600 AS gpu_hours
FROM tasks
JOIN jobs ON jobs.number = tasks.job_number
WHERE tasks.granted_at IS NOT NULL
GROUP BY {day tasks.granted_at}, jobs.user_name, jobs.account;

COMMENT ON VIEW user_usage IS 'Resources that users'' tasks held, by the day on which the task began to run.';
COMMENT ON COLUMN user_usage.day IS 'day on which the tasks began';
COMMENT ON COLUMN user_usage.days_ago IS 'days from the first of these tasks until now';
COMMENT ON COLUMN user_usage.jobs IS 'number of jobs that had such tasks; a job counts on each day on which a task of it began';
COMMENT ON COLUMN user_usage.tasks IS 'number of tasks that began on the day';
COMMENT ON COLUMN user_usage.task_hours IS 'hours that they ran, until now for those that run';
COMMENT ON COLUMN user_usage.cpu_hours IS 'the same hours times the CPUs of each';
COMMENT ON COLUMN user_usage.gpu_hours IS 'the same hours times the GPUs of each';

CREATE VIEW failures_by_cause AS
SELECT failures.day, min(failures.days_ago) AS days_ago, failures.what, failures.cause, count(*) AS failures,
       max(failures.text) AS example
FROM (
    SELECT {day tasks.ended_at} AS day, ({now} - tasks.ended_at) / 86400 AS days_ago, 'task' AS what,
           COALESCE(NULLIF(task_reports.cause, ''), NULLIF(tasks.cause, ''), 'unknown') AS cause,
           COALESCE(NULLIF(task_reports.how, ''), tasks.note) AS text
    FROM tasks
    LEFT JOIN task_reports ON task_reports.job_number = tasks.job_number AND task_reports.task = tasks.id
    WHERE tasks.state = 'failed'
    UNION ALL
    SELECT {day jobs.ended_at} AS day, ({now} - jobs.ended_at) / 86400 AS days_ago, 'job' AS what,
           COALESCE(NULLIF(jobs.end_cause, ''), 'unknown') AS cause, jobs.end_reason AS text
    FROM jobs
    WHERE jobs.state IN ('failed', 'lost')
) AS failures
GROUP BY failures.day, failures.what, failures.cause;

COMMENT ON VIEW failures_by_cause IS 'Tasks and jobs that failed, by day and cause.';
COMMENT ON COLUMN failures_by_cause.day IS 'day on which they ended';
COMMENT ON COLUMN failures_by_cause.days_ago IS 'days from the last of them until now';
COMMENT ON COLUMN failures_by_cause.what IS 'task or job';
COMMENT ON COLUMN failures_by_cause.cause IS 'one word: see the page on the database';
COMMENT ON COLUMN failures_by_cause.failures IS 'number of tasks or jobs that failed for this cause';
COMMENT ON COLUMN failures_by_cause.example IS 'what was reported of one of them';

CREATE VIEW waiting_now AS
SELECT jobs.slug AS job, jobs.cluster, jobs.id AS job_id, jobs.name, jobs.user_name, jobs.account, jobs.partition,
       jobs.model, jobs.state, {time jobs.submitted} AS submitted_at, {now} - jobs.submitted AS waiting_seconds,
       decisions.slot, decisions.workers, decisions.ps, decisions.binding_constraint, decisions.reason
FROM jobs
LEFT JOIN decisions ON decisions.job_number = jobs.number
     AND decisions.slot = (SELECT max(newest.slot) FROM decisions AS newest WHERE newest.job_number = jobs.number)
WHERE jobs.state IN ('submitted', 'ready');

COMMENT ON VIEW waiting_now IS 'Jobs that do not train yet, each with the last decision on it.';
COMMENT ON COLUMN waiting_now.waiting_seconds IS 'seconds since its submission';
COMMENT ON COLUMN waiting_now.slot IS 'number of that decision''s slot; NULL if there is none';
COMMENT ON COLUMN waiting_now.workers IS 'workers decided on, which have not joined yet';
COMMENT ON COLUMN waiting_now.ps IS 'parameter servers decided on, which have not joined yet';
