"""DL2's own design (Peng et al., arXiv 1909.06040): imitation, then actor-critic; docs/internals/dl2-paper.md."""
