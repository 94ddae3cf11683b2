"""Commands on jobs: submit, pack, cancel, status, why, history and report."""
