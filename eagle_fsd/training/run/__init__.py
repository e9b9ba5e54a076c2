"""What a training run writes."""
