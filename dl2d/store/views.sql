-- Views for administrators; dl2d itself does not read them. `dl2d db upgrade` creates them, or replaces those of an
-- earlier version. A column may be added at the end; a migration has to rename or remove one (PostgreSQL keeps a
-- view's other columns as they are, and who may read it).

-- What was decided for each job in each scheduling interval, and why.
CREATE VIEW decision_history AS
SELECT jobs.cluster, jobs.id AS job_id, jobs.name, jobs.user_name, jobs.slug, decisions.slot, slots.at, slots.policy,
       slots.policy_version, decisions.previous_workers, decisions.workers, decisions.previous_ps, decisions.ps,
       decisions.binding_constraint, decisions.reason, decisions.guard
FROM decisions
JOIN jobs ON jobs.number = decisions.job_number
JOIN slots ON slots.number = decisions.slot;

-- One row for each task that came (direction grow) or went (shrink), with the time of each state; NULL if not seen.
CREATE VIEW resize_history AS
SELECT jobs.cluster, jobs.id AS job_id, jobs.name, jobs.user_name, jobs.slug, resizes.task, resizes.role,
       resizes.direction, resizes.node, resizes.began_at,
       max(CASE WHEN resize_events.state = 'asked' THEN resize_events.at END) AS asked_at,
       max(CASE WHEN resize_events.state = 'granted' THEN resize_events.at END) AS granted_at,
       max(CASE WHEN resize_events.state = 'joined' THEN resize_events.at END) AS joined_at,
       max(CASE WHEN resize_events.state = 'confirmed' THEN resize_events.at END) AS confirmed_at,
       max(CASE WHEN resize_events.state = 'draining' THEN resize_events.at END) AS draining_at,
       max(CASE WHEN resize_events.state = 'drained' THEN resize_events.at END) AS drained_at,
       max(CASE WHEN resize_events.state = 'released' THEN resize_events.at END) AS released_at,
       max(CASE WHEN resize_events.state = 'failed' THEN resize_events.at END) AS failed_at
FROM resizes
JOIN jobs ON jobs.number = resizes.job_number
JOIN resize_events ON resize_events.job_number = resizes.job_number AND resize_events.task = resizes.task
     AND resize_events.direction = resizes.direction
GROUP BY jobs.cluster, jobs.id, jobs.name, jobs.user_name, jobs.slug, resizes.task, resizes.role,
         resizes.direction, resizes.node, resizes.began_at;
