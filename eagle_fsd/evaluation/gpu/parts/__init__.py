"""The parts of the GPU check: each takes the bench and what was found before, and returns its findings."""
