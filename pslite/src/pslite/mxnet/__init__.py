"""MXNet adapter: `import pslite.mxnet` makes a training script elastic.

A Gluon or Module script with a loop of its own uses the KVStore: `kvstore='dl2'`, or `dist_sync` as it stands there
already.  A script whose data the job gives out, so that a resize changes nothing at all, uses `ElasticJob`:

    job = ElasticJob(net, optimizer=SGD(lr=0.1, momentum=0.9), dataset=train, batch_size=64, epochs=10, seed=1)
    for data, label in job:
        with autograd.record():
            loss = loss_function(net(data), label)
        job.backward(loss)

Made for MXNet 1.9.1, which needs numpy below 1.24.
"""

from __future__ import annotations

import os

from pslite.launch.coordinator_process.mxnet_launcher import task_variables
from pslite.run import become_server

# A process of MXNet's own launcher that is a server or the scheduler never comes back from `import mxnet`: it must be
# ours before.
become_server(os.environ)
os.environ.update(task_variables(os.environ))

from pslite.job.job_spec import LAMB, SGD, Adam  # noqa: E402
from pslite.job.learning_rates import Constant, Cosine, Milestones, Polynomial, StepDecay  # noqa: E402
from pslite.mxnet.elastic_data_sampler import elastic_split  # noqa: E402
from pslite.mxnet.gluon_elastic_job import ElasticJob  # noqa: E402
from pslite.mxnet.kvstore.registration_with_mxnet import register  # noqa: E402

__all__ = [
    "LAMB", "SGD", "Adam", "Constant", "Cosine", "ElasticJob", "Milestones", "Polynomial", "StepDecay", "elastic_split",
]  # fmt: skip

register()
