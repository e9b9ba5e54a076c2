"""The check of a machine with a GPU: independent parts, each of which goes its own way if another fails.

command is its main; runner runs parts of any kind; bench holds the device and the models; checks lists the
parts, which are in parts/; report makes the table.
"""
