"""Measurements: run from the project's folder, each as `python -m benchmarks.NAME`."""
