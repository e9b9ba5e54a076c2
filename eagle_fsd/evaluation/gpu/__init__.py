"""The check of a machine with a GPU: independent parts, each of which goes its own way if another fails.

runner runs parts of any kind; bench holds the device and the models; texts, sampled, waits, recordings,
failures and costs are the parts; projection turns costs into speed-ups; report makes the table; checks lists
the parts.
"""
