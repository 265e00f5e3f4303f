"""Python parts of harness: the pytest plugin `harness.pytest_plugin`."""
