"""PyTorch adapter: an ordinary training loop becomes an elastic job.

    job = ElasticJob(model, optimizer=SGD(lr=0.1, momentum=0.9), dataset=train, batch_size=64, epochs=10, seed=1)
    for inputs, targets in job:
        loss = F.cross_entropy(model(inputs), targets)   # mean over the samples given
        job.backward(loss)
    if job.is_chief:
        torch.save(model.state_dict(), "model.pt")

The same script runs as a worker under dl2-run and, without it, alone in one process with the same result.
"""

from __future__ import annotations

from pslite.job.job_spec import LAMB, SGD, Adam
from pslite.job.learning_rates import Constant, Cosine, Milestones, Polynomial, StepDecay
from pslite.torch.elastic_job import ElasticJob
from pslite.torch.parameters import Group

__all__ = [
    "LAMB", "SGD", "Adam", "Constant", "Cosine", "ElasticJob", "Group", "Milestones", "Polynomial", "StepDecay"
]  # fmt: skip
