"""Connections between the processes of a job: authentication, encryption, messages, data frames, shared memory."""
