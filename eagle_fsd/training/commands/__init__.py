"""What `eagle-fsd train NAME` runs: a module for each command, with `main(argv)`."""
