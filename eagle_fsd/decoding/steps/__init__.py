"""What a step does with its verdicts: each text's rule is applied, and each text gets its tokens."""
