"""Python parts of harness: the pytest plugin `harness.pytest_plugin`, and snapshots of out-of-memory errors, `harness.observe`."""
