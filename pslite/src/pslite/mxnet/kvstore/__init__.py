"""The KVStore of `kvstore='dl2'` and `dist_sync`: a script's keys are trained by the servers of an elastic job."""
