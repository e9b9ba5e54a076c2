"""The parts of the GPU check: each takes the bench and returns its findings."""
