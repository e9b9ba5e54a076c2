"""What a program does to its own process: signals, standard streams, the garbage collector."""
