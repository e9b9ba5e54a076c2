"""What tests share: stubs, tiny models, a Hub on localhost."""
