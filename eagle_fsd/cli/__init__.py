"""What the command line says and shows."""
