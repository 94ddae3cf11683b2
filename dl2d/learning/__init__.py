"""Learning: policies trained in the simulator, and what they are kept in. torch is imported here only."""
