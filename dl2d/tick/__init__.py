"""The scheduling tick: one pass from observing the cluster to recording a slot. The daemon and the simulator run it.

Words that the modules here share (all of them are in ``docs/internals/glossary.md``):

======  ================================================================================================================
anchor  the process that the user submitted (on Slurm, the batch job); it runs the job's coordinator
claim   room that a job which is not dl2d's waits for in the resource manager, and for which elastic jobs vacate nodes
floor   the size below which a running job is not reduced in this slot
slot    the scheduling interval (``schedule.slot_seconds``); the policy decides once in it
stray   a listed job with a tag of this cluster that is no task or anchor of the store
======  ================================================================================================================
"""
